"""What fine-tunings of every kind leave behind, written by hand: nothing is trained."""

import json

import kinds
import numpy as np

from bert_jax import config
from bert_jax.config import Finetuning, Optimizer
from bert_jax.storage.workdir import Workdir

STEPS, EVERY, EXAMPLES = 400, 10, 400
SOURCES = {"tag": "conll", "span": "squad"}
SCORES = {
    "classify": {"accuracy": 0.8, "macro_f1": 0.78},
    "pair": {"accuracy": 0.8, "f1": 0.8},
    "regress": {"spearman": 0.7, "pearson": 0.71},
    "choice": {"accuracy": 0.8},
    "tag": {"entity_f1": 0.7, "accuracy": 0.9},
    "span": {"f1": 0.6, "exact_match": 0.5},
}


def answers(kind, examples, seed=0):
    """Answers of which some are wrong, as `TaskKind.answers` gives them."""
    rng = np.random.default_rng(seed)
    labels = kinds.LABELS[kind]
    for example in examples:
        wrong = rng.random() < 0.2
        if kind == "regress":
            yield {"value": example.label + rng.normal(0, 0.3)}
        elif kind == "tag":
            tags = ["O" if wrong else tag for tag in example.tags]
            yield {"words": list(example.words), "tags": tags}
        elif kind == "span":
            text = "elsewhere" if wrong else example.answers[0].text
            yield {"id": example.id, "answer": text, "best": [{"answer": text, "score": 1.0}]}
        else:
            label = labels[(labels.index(example.label) + wrong) % len(labels)]
            rest = dict.fromkeys(labels, 0.2 / (len(labels) - 1))
            yield {"label": label, "probabilities": rest | {label: 0.8}}


class Run:
    """A healthy fine-tuning, to be spoiled: its experiment and the lines it has written."""

    def __init__(self, kind="classify"):
        self.experiment = Finetuning(
            name="planted",
            init_from="runs/base",
            task=kinds.task(kind, validation=(f"{SOURCES.get(kind, 'jsonl')}:y",)),
            optimizer=Optimizer(name="adamw", peak_learning_rate=1e-4, warmup_steps=0),
        )
        rng, main = np.random.default_rng(0), self.experiment.task.main_score
        self.train, self.scored = [], []
        self.timings = [
            {"step": 0, "kind": "start", "time": 1.8e9, "seconds": 9.0, "steps": 0},
        ]
        for step in range(EVERY, STEPS + 1, EVERY):
            fall = np.exp(-step / 150)
            line = {"loss": 0.3 + 0.4 * fall + rng.normal(0, 0.01), "gradient_norm": 1.0}
            line |= {"accuracy": 0.9, "filled": 0.6, "bad_steps": 0.0, "learning_rate": 1e-4}
            line |= {"worst_step": step - 1, "worst_step_loss": line["loss"] + 0.1}
            self.train.append({"step": step, "kind": "train", **line})
            lap = {"steps": EVERY, "seconds": 2.0, "cpu_seconds": 3.0, "steps_per_second": 5.0}
            lap |= {"tokens_per_second": 1e4, "real_tokens_per_second": 6e3, "padding": 0.4}
            lap |= {"time": 1.8e9 + step}
            self.timings.append({"step": step, "kind": "train", **lap})
            if step % 100 == 0:
                by_name = {n: v * (1 - 0.3 * fall) for n, v in SCORES[kind].items()}
                line = {"loss": 0.4 + 0.3 * fall, "score": by_name[main], "examples": EXAMPLES}
                self.scored.append({"step": step, "kind": "scores", **line, **by_name})
        end = {"step": STEPS, "kind": "end", "time": 1.9e9, "seconds": 1.0, "steps": 0}
        self.timings.append(end | {"outcome": "finished"})
        examples = kinds.examples(kind, EXAMPLES)
        shares = {"train": 0.001, "validation": 0.002}
        guess = ["always 'a'", 0.4] if kind in ("classify", "pair", "choice") else None
        self.task = {"total_steps": STEPS, "unknown": shares, "cut": shares, "guess": guess}
        self.task |= {"examples": {"train": 4_000, "validation": EXAMPLES}}
        self.mistakes = kinds.kind_of(kind).mistakes(list(answers(kind, examples)), examples)

    def write(self, folder):
        """Writes its files into a new folder, and returns that as text."""
        workdir = Workdir(folder)
        workdir.root.mkdir(parents=True)
        workdir.experiment.write_text(config.to_json(self.experiment))
        lines = sorted(self.train + self.scored, key=lambda line: line["step"])
        predictions = [{"step": 0, "kind": "task"} | self.task]
        if self.mistakes:
            predictions.append({"step": STEPS, "kind": "mistakes"} | self.mistakes)
        for path, rows in (
            (workdir.metrics, lines),
            (workdir.predictions, predictions),
            (workdir.timings, self.timings),
        ):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder)
