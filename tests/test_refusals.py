"""What cannot be is refused in one line that names the setting or the file at fault."""

import pytest
from broken import fails

from bert_jax import config
from bert_jax.config import Corpus, Experiment, Finetuning, Phase, Task

PRETRAINING = Experiment(
    name="x",
    corpus=Corpus(sources=("text:a", "jsonl:b")),
    phases=(
        Phase(steps=90_000, sequence_length=128, max_predictions_per_seq=20),
        Phase(steps=10_000, sequence_length=512, max_predictions_per_seq=77),
    ),
)
TASK = Task(kind="classify", train=("tsv:a",), validation=("tsv:b",))

_CAUSAL = "data.objective=causal data.eval_max_predictions_per_seq=127"
_LEFT = f"{_CAUSAL} model.direction=left_to_right"
MODERN = "model.kind=modern model.num_hidden_layers=13"
CLIP = "optimizer.clip=per_replica optimizer.reference_replicas=32"
_CHOICE = "task.kind=choice task.choice_columns=b,c"
SPAN = "task.kind=span task.train=squad:a task.validation=squad:b"

_PAIRS = (
    "task.kind=minimal_pairs task.train= task.validation=jsonl:x task.text_column=good "
    "task.second_column=bad"
)

# Settings, and what the line names where it is not the last of them.
OF_PRETRAINING = f"""
model.hiden_size=3 -> model.hidden_size
lr=1e-4 -> optimizer.peak_learning_rate
batch_size=8 -> phases.0.batch_size
model=3
model.hidden_size -> FIELD=VALUE
model.hidden_size=x
model.hidden_size=1e999
model.hidden_size=1{"0" * 40}
model.hidden_size.deep=3
phases.2.steps=1
phases=[] -> phases.0.steps
phases.1.steps=0
phases.0.steps=17000000
phases.0.max_predictions_per_seq=128
phases.0.global_rotary_base=1
model.vocab_size=5
model.max_position_embeddings=7
model.num_attention_heads=7
model.type_vocab_size=1
model.max_position_embeddings=256 -> phases.1.sequence_length=512
model.hidden_act=relu -> gelu_tanh
model.hidden_dropout_prob=1.0
model.hidden_dropout_prob=0.001
model.dropout_rng=rbg16 run.replay_every=9
model.dropout_rng=in_kernel run.replay_every=9
data.masked_lm_prob=0.3 -> phases.0.max_predictions_per_seq=20
data.final_masked_lm_prob=0.16 -> phases.1.max_predictions_per_seq=77
data.dupe_factor=2 data.final_masked_lm_prob=0.1
data.mask_share=1.1
data.mask_share=0.95 -> data.random_share=0.1
data.attention=per_document
data.packing=pairs -> data.packing
data.objective=causal -> data.eval_max_predictions_per_seq=20
{_CAUSAL} -> model.direction
model.direction=left_to_right
{_LEFT} -> phases.0.max_predictions_per_seq=20
{_LEFT} run.watch=a[MASK]
{MODERN} model.local_window=1024
{MODERN} model.max_position_embeddings=1024 model.local_window=514
{MODERN} model.num_attention_heads=256
{MODERN} model.local_window=1
{MODERN} model.global_rotary_scaling=linear:0.5
model.output_table=own
{MODERN} model.global_every=1 model.local_window=64
{MODERN} model.type_vocab_size=3
phases.1.objective=mlm
phases.0.objective=caussal -> choose one of mlm_nsp
phases.0.objective=causal -> phases.0.max_predictions_per_seq=20
phases.0.masked_lm_prob=0.4 -> phases.0.max_predictions_per_seq=20
data.objective=mlm data.attention=per_document phases.0.objective=mlm_nsp
data.objective=mlm model.type_vocab_size=1 phases.0.objective=mlm_nsp -> model.type_vocab_size
optimizer.name=sgd -> stable_adamw
optimizer.eps=nan
optimizer.bad_steps_in_a_row=64
optimizer.warmup_steps=200000
phases.0.steps=60 phases.1.steps=1 -> optimizer.warmup_steps=6
optimizer.schedule=wsd optimizer.decay_steps=90001
{CLIP} parallelism.accumulation=4
{CLIP} parallelism.state=zero3
{CLIP} optimizer.reference_replicas=3
parallelism.accumulation=3 -> phases.0.batch_size=256
parallelism.accumulation=1,1,1
run.profile_steps=0,101
run.profile_steps=1,x
run.keep_checkpoints=1
run.trackers=aim -> wandb
corpus.mixture=1 -> 2 weights
corpus.mixture=1,1,1 -> 2 weights
corpus.mixture=1,0 -> jsonl:b
corpus.mixture=0,0 -> positive
corpus.temperature=1.5
phases.0.mixture=1,1 -> corpus.temperature
phases.1.temperature=.5 -> corpus.mixture
corpus.mixture=1,1 phases.1.mixture=1,1,1 -> text:a, jsonl:b
corpus.mixture=1,1 phases.1.mixture=9999,1 -> phases.1.mixture
corpus.mixture=1,1 phases.0.mixture=1,-1 -> phases.0.mixture
corpus.mixture=0,1 phases.0.mixture=0,2 -> text:a
corpus.mixture=-1,2 -> text:a
corpus.mixture=1e308,1e300 -> jsonl:b
corpus.mixture=1,nan -> finite
corpus.sources=novel:a
corpus.encoding=utf-99
corpus.language=xx
corpus.document_starts=(
corpus.language=french -> did you mean fr
corpus.text_field=a,b,c
corpus.quality=score:1,score:2,score:3 -> corpus.sources
corpus.quality=,score:x -> FIELD:MIN
corpus.quality=,score:3:3 -> FIELD:MIN
corpus.quality=,score:nan -> FIELD:MIN
corpus.quality=,score -> FIELD:MIN
corpus.quality=score:3 -> text:a
corpus.validation_share=0
name={"x" * 300}
"""
OF_FINETUNING = f"""
task.kind=pair -> task.second_column
task.kind=pair task.text_column=premise -> hypothesis
task.second_column=b
task.kind=choice task.choice_columns=b
{_CHOICE} task.labels=A,B,C
task.field_column=b
task.kind=pair task.second_column=sentence -> task.text_column
task.kind=pair task.second_column=label -> task.text_column
task.text_column=
task.labels=a,a
task.labels=["a",""]
task.kind=regress task.second_column=b task.labels=a,b
{SPAN} -> task.document_stride
{SPAN} task.document_stride=1 task.max_sequence_length=67 -> task.max_query_length
task.kind=tag task.score=f1 -> task.train
task.score=bleu
task.train=
task.train=x
task.train=tsv
task.train=tsv:
task.train=text:x
task.train=tfds:x
task.train=tfds:x:
task.train=tfds::y
task.validation=
optimizer.warmup_steps=5
optimizer.schedule=wsd
optimizer.clip=per_replica
adapt.how=lora optimizer.layer_decay=0.9
adapt.how=lora parallelism.state=zero1 -> adapt.how=lora
adapt.features=last
{_PAIRS} adapt.pooling=mean -> adapt.pooling
adapt.lora_targets=query,pooler
run.probes=classify.py
vectors.temperature=0.1 -> vectors
run.replay_every=9
{SPAN} task.document_stride=1 class_weights=balanced -> class_weights='balanced'
{_PAIRS} task.validation= -> task.validation
{_PAIRS} task.train=jsonl:x
{_PAIRS} task.second_column=
{_PAIRS} task.field_column=good -> task.text_column
{_PAIRS} task.validation=conll:x
parallelism.accumulation=3
"""
COMMANDS = """
pretrain none.py -> none.py
pretrain -> EXPERIMENT
config tiny --explain optimizer.epsilon -> optimizer.eps
config tiny --set model.width=3 -> model.width
evaluate --workdir nowhere -> nowhere
predict --workdir nowhere x -> nowhere
embed --workdir nowhere --out a.npz --layers -4,-3 -> nowhere
embed --workdir nowhere --out a.npz --layers -4,x -> --layers
layers --workdir nowhere -> --attention
report nowhere -> nowhere
finetune -> --kind
tokenize --tokenizer nowhere -> nowhere
doctor nowhere -> nowhere
doctor experiments --set seed=1 -> --set
pretrain tiny --stps 3 -> --stps
show tiny --rows 0 -> --rows
show tiny --step -1 -> --step
layers --workdir gs://none/run --attention a -> gs://none/run
finetune sst2 --sweep seed=1,2 --second b -> --second
predict wa -> --workdir
predict --workdir nowhere --source tsv:a --out /dev/null/a.jsonl -> --out /dev/null/a.jsonl
embed --workdir nowhere --out /dev/null/a.npz -> --out /dev/null/a.npz
search a.txt --workdir nowhere --queries b --out /dev/null/a -> --out /dev/null/a
export --workdir nowhere --out experiments -> experiments
import nowhere --workdir experiments -> experiments
evaluate tiny --text a -> --text
finetune sst2 --broken-rows skip -> --broken-rows
finetune --kind choice --train a.tsv --validation a.tsv --set task.choice_columns=b,c -> --from
pretrian tiny -> pretrain
config tiny --verbosity=sideways -> --verbosity
config tiny --flagfile=nowhere -> nowhere
pretrain --text a --hours 1 -> auto TEXT --hours H
pretrain tiny --base=b -> auto TEXT
pretrain --fork a/checkpoints/1 --workdir w -> fork RUN/checkpoints/STEP
pretrain --decay-from=a/checkpoints/1 --workdir w -> decay RUN/checkpoints/STEP
pretrain tiny --extend -> extend
conformance instances a.txt -> conformance-instances
fork a/checkpoints/1 tiny -> --workdir
fork newest --workdir w -> fork newest
import nowhere --workdir nothing --keep 5 -> --keep
import nowhere --workdir nothing --tokenizer v.txt --add w.txt -> --tokenizer
import nowhere --workdir nothing --tokenizer v.txt --vocabulary t.txt -> --tokenizer
import https://x.org/m --workdir b -> https://x.org/m
import nowhere --workdir https://x.org/m -> https://x.org/m
export --workdir https://x.org/m --as encoder --out o -> https://x.org/m
export --workdir nowhere --as encoder --out https://x.org/m -> https://x.org/m
tokenize --tokenizer https://x.org/m -> https://x.org/m
predict --workdir https://x.org/m w7 -> https://x.org/m
checkpoints https://x.org/m -> https://x.org/m
report https://x.org/m -> https://x.org/m
pretrain tiny --set init_from=https://x.org/m -> https://x.org/m
finetune --kind classify --from https://x.org/m --train tsv:x --validation tsv:x -> https://x.org/m
decay newest --workdir w -> decay newest
"""


def rows(table):
    return [line for line in table.splitlines() if line]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Both kinds of experiment, as JSON."""
    folder = tmp_path_factory.mktemp("refusals")
    for experiment in (PRETRAINING, Finetuning(name="x", task=TASK)):
        (folder / f"{experiment.label}.json").write_text(config.to_json(experiment))
    return folder


@pytest.mark.parametrize("command", rows(COMMANDS))
def test_a_command_that_cannot_be_is_refused(command):
    words, _, name = command.partition(" -> ")
    fails(words, name)


@pytest.mark.parametrize(
    ("command", "row"),
    [
        *(("config {}/experiment.json", row) for row in rows(OF_PRETRAINING)),
        *(("finetune {}/finetuning.json", row) for row in rows(OF_FINETUNING)),
    ],
)
def test_a_setting_that_cannot_be_is_refused(command, row, files):
    settings, _, name = row.partition(" -> ")
    words = settings.split()
    flags = [word for setting in words for word in ("--set", setting)]
    fails([*command.format(files).split(), *flags], name or words[-1].partition("=")[0])
