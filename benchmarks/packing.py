"""What packed rows bring: real tokens a second, and held-out loss after equal CPU time.

`python -m benchmarks.packing --source jsonl:WIKIPEDIA.jsonl.gz`. The same small model is trained
twice in one process, in turns: with a row an example, and with rows that examples share. Both have
as many rows a step, the same learning rates over the same CPU seconds, batches made included, and
are asked the same held-out rows. Without `--source` the text is the sample next to the
experiments.
"""

import argparse
import dataclasses
import os
import tempfile
import time
from typing import Any

import jax
import numpy as np
from etils import epath

from benchmarks import measure
from bert_jax import config
from bert_jax.config import Corpus, Experiment, Phase
from bert_jax.data import corpus
from bert_jax.training import evaluators, feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining
from bert_jax.training.pretraining import Prepared

SAMPLE = measure.ROOT / "experiments" / "sample_text" / "speeches.jsonl.gz"
# Turns of a run, after each of which held-out rows are scored.
TURNS = 3


def main() -> None:
    """Trains both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default=f"jsonl:{SAMPLE}", help="of the text")
    parser.add_argument("--seconds", type=float, default=300.0, help="of CPU time, of each run")
    parser.add_argument("--steps", type=int, default=300, help="in which the rate falls to 0")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="of a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    measure.restart_with(threads=len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        here = epath.Path(folder) / "corpus"
        unpacked = experiment(flags)
        corpus.prepare(unpacked.corpus, unpacked.model.vocab_size, here, print)
        prepared = Prepared.open(here)
        packed = config.override(unpacked, ["data.packing=pairs"])
        runs = {"unpacked": unpacked, "packed": packed}
        arms = {name: Arm(of, prepared) for name, of in runs.items()}
        for turn in range(1, TURNS + 1):
            for name, arm in arms.items():
                arm.train_until(flags.seconds * turn / TURNS)
                print(name, arm.evaluate(), flush=True)
    figures: dict[str, Any] = {}
    for name, arm in arms.items():
        last = arm.lines[-1]
        figures |= {
            f"{name}_tokens_per_cpu_second": arm.tokens / arm.seconds,
            f"{name}_share_of_real_tokens": arm.tokens / arm.places,
            f"{name}_examples_per_step": arm.examples / arm.steps,
            f"{name}_held_out_masked_lm_loss": last["masked_lm_loss"],
            f"{name}_held_out_next_sentence_accuracy": last["next_sentence_accuracy"],
        }
    a, b = arms["packed"], arms["unpacked"]
    figures["tokens_ratio"] = (a.tokens / a.seconds) / (b.tokens / b.seconds)
    figures["unigram_loss"] = a.lines[-1]["unigram_loss"]
    details = {"cpu_seconds": flags.seconds, "rows": flags.rows, "length": flags.length}
    details |= {name: arm.lines for name, arm in arms.items()}
    measure.report("packing", figures, details, flags.out)


def experiment(flags: argparse.Namespace) -> Experiment:
    """The experiment `mini_paper` in one phase, for a vocabulary that a few megabytes bear."""
    mini = config.load(str(measure.ROOT / "experiments" / "mini_paper.py"))
    predictions = round(0.15 * flags.length)
    return dataclasses.replace(
        mini,
        corpus=Corpus(sources=(flags.source,), validation_share=0.05),
        model=dataclasses.replace(mini.model, vocab_size=8_000, num_hidden_layers=flags.layers),
        data=dataclasses.replace(mini.data, eval_rows=512),
        phases=(
            Phase(
                steps=flags.steps,
                sequence_length=flags.length,
                max_predictions_per_seq=predictions,
                batch_size=flags.rows,
            ),
        ),
        optimizer=dataclasses.replace(mini.optimizer, warmup_steps=flags.steps // 10),
    )


class Arm:
    """One of the two runs."""

    def __init__(self, of: Experiment, prepared: Prepared):
        # Done; trained on, padding left out; with padding.
        # Of CPU time that its steps and batches have taken.
        self.seconds, self.steps, self.tokens, self.places, self.examples = 0.0, 0, 0, 0, 0
        self.lines: list[dict[str, float]] = []  # one an evaluation
        self._size = of.phases[0].batch_size
        self._mesh = mesh_lib.make_mesh(of.parallelism, jax.devices()[:1])
        self._objective = objective = Pretraining(of.model)
        everywhere = mesh_lib.replicated(self._mesh)
        state = step.init_state(objective, of.optimizer, of.seed)
        self._state = jax.device_put(state, everywhere)
        self._window = jax.device_put(step.empty_window(objective), everywhere)
        train_step = step.make_train_step(
            objective, of.optimizer, of.parallelism, 1, of.total_steps, self._mesh
        )
        self._key = step.phase_key(of.model, of.seed, 0)
        self._batches = prepared.train_batches(of, 0)
        self._held_out = prepared.held_out(of, self._mesh)
        self._score = step.make_eval_step(objective, of.parallelism, self._mesh)
        inputs = self._state, self._window, self._batch(0), self._key
        self._step = train_step.lower(*inputs).compile()

    def _batch(self, number: int) -> dict[str, jax.Array]:
        rows = np.arange(self._size)
        batch = self._batches.batch(number, rows)
        self._seen = int(batch["input_mask"].sum()), int(batch["row_weights"].sum())
        return feed.place(batch, rows, self._size, mesh_lib.batch_sharding(self._mesh))

    def train_until(self, seconds: float) -> None:
        """Trains until so many CPU seconds are used."""
        while self.seconds < seconds:
            began = time.process_time()
            batch = self._batch(self.steps)
            self._state, self._window = self._step(self._state, self._window, batch, self._key)
            jax.block_until_ready(self._state)
            self.seconds += time.process_time() - began
            self.steps += 1
            self.tokens, self.examples = self.tokens + self._seen[0], self.examples + self._seen[1]
            self.places += batch["input_mask"].size

    def evaluate(self) -> dict[str, float]:
        """Returns the line of an evaluation, and keeps it."""
        scores = evaluators.evaluate(
            self._held_out, self._state["params"], self._objective, self._score, self._mesh
        )
        line = {"steps": self.steps, "cpu_seconds": self.seconds, "tokens": self.tokens, **scores}
        self.lines.append({name: float(f"{value:.6g}") for name, value in line.items()})
        return self.lines[-1]


if __name__ == "__main__":
    main()
