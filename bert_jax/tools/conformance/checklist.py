"""`bert-jax conformance`: whether the rules hold of Devlin et al. 2018 and google-research/bert.

And what an experiment does otherwise than they.
"""

import dataclasses
import re
from collections.abc import Iterator

import jax

from bert_jax import config
from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, explain
from bert_jax.errors import printable
from bert_jax.tools.conformance import data_rules, model_rules, optimizer_rules
from bert_jax.tools.conformance.rule import ReferenceRule
from bert_jax.training import mesh


def check() -> Iterator[ReferenceRule]:
    """Yields every rule of the reference, compared; takes some twenty seconds."""
    mesh.make_mesh(Parallelism())  # refuses by name a device that is not there
    # Rules are about formulas: no device may round float32 in products.
    with jax.default_matmul_precision("highest"):
        for part in (data_rules, optimizer_rules, model_rules):
            yield from part.check()


def print_rules(experiment: Experiment | None) -> bool:
    """Prints a line a rule, and what an experiment does otherwise; returns whether all rules hold.

    With an experiment differences are printed as bounds, so that the text is the same everywhere.
    """
    checked = []
    for rule in check():
        checked.append(rule)
        print(rule.line("measured" if experiment is None else "bounds"), flush=True)
    broken = sum(not rule.holds for rule in checked)
    print(
        f"{broken} of {len(checked)} rules FAILED" if broken else f"all {len(checked)} rules hold"
    )
    if experiment is not None:
        print(f"\n{experiment.name} does otherwise than the paper and its code:\n")
        for setting, why in deviations(experiment):
            print(f"{printable(setting)}\n  {why}")
    return not broken


# --- where settings leave the paper -------------------------------------------------------------


# The paper's BASE, on 16 chips of two cores; where the paper is silent, what the reference's code
# has (ten passes over the text, say).
_BASE = Experiment(
    name="paper",
    corpus=Corpus(
        sources=("text:English Wikipedia of 2018", "text:BooksCorpus, which is not public"),
        layout="sentences_by_line",
        tokenizer="the released vocab.txt",
    ),
    data=Data(dupe_factor=10),
    phases=(
        Phase(steps=900_000, sequence_length=128, max_predictions_per_seq=20),
        Phase(steps=100_000, sequence_length=512, max_predictions_per_seq=77),
    ),
    optimizer=Optimizer(clip="per_replica", reference_replicas=32),
)
# And its LARGE, on 64 chips.
_LARGE = dataclasses.replace(
    _BASE,
    model=Model(
        hidden_size=1_024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4_096
    ),
    optimizer=dataclasses.replace(_BASE.optimizer, reference_replicas=128),
)

# Fields of identity that make no other experiment of it, that have a meaning with another alone, or
# of which `_EVERY_RUN` tells.
_LEFT_OUT = re.compile(
    r"name|seed|corpus\.(text_field|encoding|language|case|validation_share)|data\.eval_.*|"
    r"model\.dropout_rng|optimizer\.(bad_steps_in_a_row|after_bad_steps)|"
    r"phases\.\d+\.(row_offset|global_rotary_base)"
)

# What no setting changes, and what it makes otherwise.
_EVERY_RUN = {
    "dropout": "is drawn in steps of 1/256 (model.dropout_rng=threefry8) or of 1/65536, so that "
    "0.1 is 26/256 or 6554/65536; what is kept is scaled by the share really kept",
    "held-out documents": "corpus.validation_share of them are evaluated on, on the same rows and "
    "masks every time; the reference trains on all, and evaluates on whatever instances it is "
    "given",
    "data.dupe_factor": "passes follow one another, each in an order of its own; in the reference "
    "the instances of all passes are shuffled together",
    "phases": "one schedule and the moments of Adam run through all of them; in the reference the "
    "next length is another job, which starts its schedule again and its moments at 0",
    "random choices": "each is a function of seed, phase, row and purpose; the reference takes "
    "them from one generator in turn: the same laws, other examples",
    "rows an epoch": "every epoch takes as many rows as the first one's plan has: of a longer plan "
    "some are left out, of a shorter one some come twice; the reference's files hold each once",
}


def deviations(experiment: Experiment) -> list[tuple[str, str]]:
    """Returns each setting that is not the paper's, with its field's comment, and `_EVERY_RUN`."""
    papers = min((_BASE, _LARGE), key=lambda p: len(config.differences(p, experiment, "identity")))
    paper, values = (dict(config.flatten(e, "identity")) for e in (papers, experiment))
    comments = {setting.path: setting.comment for setting in explain.settings(Experiment)}
    named = []
    for path in dict.fromkeys([*values, *paper]):
        ours, theirs = values.get(path, "absent"), paper.get(path, "absent")
        if ours != theirs and not _LEFT_OUT.fullmatch(path):
            comment = comments[re.sub(r"\.\d+\.", ".N.", path)]
            named.append((f"{path}={ours!r}", f"the paper has {theirs!r}. {comment}"))
    return [*named, *_EVERY_RUN.items()]
