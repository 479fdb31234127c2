"""What the encoder's directions and the next sentence bring, at twice the width and depth.

    bert-jax compare tables/objectives_mini.py

Source: tables/objectives.py with the encoder of experiments/mini.py, on novels; then BERT's own
encoder (experiments/mini_paper.py without dropout), masked and left to right. ELMo's steps are of
32 rows, about the 2,560 pieces that Peters et al. 2018 have in theirs.
Hardware: two CPU cores, three hours; 1,200 seconds of CPU are each run's steps.
Expected: fine-tuned (one seed) 0.905 of chunks for masked LM with next sentence, 0.896 without,
0.857 left to right, 0.863 for ELMo; see docs/results/learning.md.
"""

import dataclasses

from bert_jax import config
from bert_jax.config import Row, Table

_TASKS = "finetune:experiments/tasks"
_LEARN = "epochs=1 adapt.how=full batch_size=16 optimizer.peak_learning_rate=3e-4"
_PAIRS = "batch_size=16 optimizer.peak_learning_rate=5e-4"
_LEFT_TO_RIGHT = (
    "data.objective=causal",
    "model.direction=left_to_right",
    "phases.0.max_predictions_per_seq=63",
    "data.eval_max_predictions_per_seq=63",
)


def table() -> Table:
    """Each objective at equal CPU time; the rows called paper's have the encoder of 2018."""
    ours = config.override(
        config.load("experiments/mini.py"), ["optimizer.name=adamw", "data.eval_rows=2000"]
    )
    scored = ("eval_rows", "eval_sequence_length", "eval_max_predictions_per_seq")
    paper = config.override(
        config.load("experiments/mini_paper.py"),
        [
            *("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0"),
            *(f"data.{name}={getattr(ours.data, name)}" for name in scored),
        ],
    )
    paper = dataclasses.replace(paper, phases=paper.phases[:1])
    elmo = config.load("experiments/elmo.py")
    elmo = dataclasses.replace(
        ours,
        model=dataclasses.replace(
            elmo.model,
            vocab_size=ours.model.vocab_size,
            num_hidden_layers=ours.model.num_hidden_layers,
            max_position_embeddings=ours.model.max_position_embeddings,
        ),
        data=dataclasses.replace(ours.data, objective=elmo.data.objective, code=elmo.data.code),
    )
    of_elmo = ("model.hidden_size=512", "model.intermediate_size=512", "phases.0.batch_size=32")
    rows = {
        "bert": (ours, ()),
        "no-nsp": (ours, ("data.objective=mlm",)),
        "ltr-no-nsp": (ours, _LEFT_TO_RIGHT),
        "paper-bert": (paper, ()),
        "paper-ltr": (paper, _LEFT_TO_RIGHT),
        "elmo": (elmo, of_elmo),
    }
    return Table(
        name="objectives_mini",
        rows=tuple(
            Row(name=name, experiment=config.override(experiment, settings))
            for name, (experiment, settings) in rows.items()
        ),
        columns=(
            f"{_TASKS}/conll2000.py name=fine-tuned {_LEARN}",
            f"{_TASKS}/conll2000.py name=features epochs=1 adapt.how=frozen adapt.features=mixed",
            f"{_TASKS}/stsb.py epochs=3 task.max_sequence_length=64 {_PAIRS}",
            *("steps", "cpu_seconds"),
        ),
        cpu_seconds=1_200.0,
    )
