"""What the encoder's directions and the next sentence bring (Devlin et al. 2018, Table 5).

    bert-jax compare tables/objectives.py

Source: the objectives of the paper's section 5.1 and of its peers, on the speeches in sample_text/;
the encoder is ModernBERT's (experiments/tiny.py) but for ELMo's, whose layer is twice as wide, half
of it each direction's. Rows predict at other places, so no losses are compared: each learns the
chunks of experiments/tasks/conll2000.py, fine-tuned, with a BiLSTM on top, and from features of the
frozen encoder, mixed as ELMo's are; and how much alike the pairs of experiments/tasks/stsb.py are.
The files of both are wanted.
Hardware: any CPU, an hour on two cores; 150 seconds of CPU are each run's steps.
Expected: both sides ahead of one when fine-tuned (docs/results/learning.md); in the paper, too.
"""

from bert_jax import config
from bert_jax.config import Row, Table

_TASK = "finetune:experiments/tasks/conll2000.py"
_LEARN = "epochs=1 adapt.how=full optimizer.peak_learning_rate=5e-4"
_PAIRS = "batch_size=16 optimizer.peak_learning_rate=5e-4"
_LEFT_TO_RIGHT = (
    "data.objective=causal",
    "model.direction=left_to_right",
    "phases.0.max_predictions_per_seq=63",
    "data.eval_max_predictions_per_seq=63",
    "run.watch=",
)
_ROWS = {
    "bert": ("tiny", ()),
    "no-nsp": ("tiny", ("data.objective=mlm",)),
    "ltr-no-nsp": ("tiny", _LEFT_TO_RIGHT),
    "elmo": ("elmo", ()),
}


def table() -> Table:
    """Each objective at equal CPU time, over two seeds; the BiLSTM on top is a column."""
    parents = {
        name: config.override(config.load(f"experiments/{name}.py"), ["optimizer.name=adamw"])
        for name in ("tiny", "elmo")
    }
    return Table(
        name="objectives",
        rows=tuple(
            Row(name=name, experiment=config.override(parents[parent], settings))
            for name, (parent, settings) in _ROWS.items()
        ),
        columns=(
            f"{_TASK} name=fine-tuned {_LEARN}",
            f"{_TASK} name=bilstm-on-top {_LEARN} adapt.features=last",
            f"{_TASK} name=features epochs=1 adapt.how=frozen adapt.features=mixed",
            f"finetune:experiments/tasks/stsb.py epochs=3 task.max_sequence_length=64 {_PAIRS}",
            *("steps", "cpu_seconds"),
        ),
        seeds=(0, 1),
        cpu_seconds=150.0,
    )
