"""Held-out evaluation: the same frozen rows every time, against two simple guessers.

The unigram line is what a model knows that has only counted pieces in the training split; the
majority line is what always saying the commoner label scores.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bert_jax.config import Data, Run
from bert_jax.data import batches as batches_lib
from bert_jax.data.stream import Stream
from bert_jax.model import losses
from bert_jax.training import feed, metrics
from bert_jax.training import mesh as mesh_lib


@dataclasses.dataclass
class HeldOut:
    """The evaluation rows and their baselines.

    Attributes:
      batches: as data.batches.eval_batches gives them.
      rows: how many rows are real.
      unigram_loss: nats a masked piece, with the training split's frequencies (one added to each).
      majority: share of the commoner next-sentence label.
    """

    batches: list[batches_lib.Batch]
    rows: int
    unigram_loss: float
    majority: float

    @classmethod
    def of(
        cls,
        train: Stream,
        validation: Stream,
        ids: batches_lib.Ids,
        data: Data,
        run: Run,
        seed: int,
        mesh: jax.sharding.Mesh,
    ) -> "HeldOut":
        """Makes the rows, in batches that can be cut over the mesh."""
        shards = mesh_lib.data_shards(mesh)
        size = -(-run.eval_batch_size // shards) * shards
        batches, rows = batches_lib.eval_batches(validation, ids, data, seed, size)
        counts = train.unigrams + 1
        nats = -np.log(counts / counts.sum())
        weights = np.concatenate([b["masked_lm_weights"].ravel() for b in batches])
        labels = np.concatenate([b["masked_lm_ids"].ravel() for b in batches])
        random = sum(float((b["next_sentence_labels"] * b["row_weights"]).sum()) for b in batches)
        return cls(
            batches,
            rows,
            float((nats[labels] * weights).sum() / weights.sum()),
            max(random / rows, 1 - random / rows),
        )


def evaluate(
    held_out: HeldOut,
    params: Any,
    eval_step: Callable[..., losses.Metrics],
    mesh: jax.sharding.Mesh,
) -> dict[str, float]:
    """Means over the held-out rows, the two baselines, and the standard error of NSP."""
    sums = {name: np.zeros(2, np.float32) for name in losses.NAMES}
    sums = feed.put(sums, mesh_lib.replicated(mesh))
    for batch in feed.place_all(held_out.batches, mesh_lib.batch_sharding(mesh)):
        sums = eval_step(params, sums, batch)
    found = metrics.means(metrics.fetch(sums))
    return {
        **found,
        "loss": found["masked_lm_loss"] + found["next_sentence_loss"],
        "unigram_loss": held_out.unigram_loss,
        "next_sentence_majority": held_out.majority,
        "next_sentence_error": metrics.next_sentence_error(
            found["next_sentence_accuracy"], held_out.rows
        ),
        "rows": held_out.rows,
    }


def summary(line: dict[str, Any]) -> str:
    """An evaluation in words."""
    below = line["unigram_loss"] - line["masked_lm_loss"]
    return (
        f"held-out masked LM {line['masked_lm_loss']:.3f} nat, {abs(below):.3f} "
        f"{'below' if below >= 0 else 'above'} the unigram line {line['unigram_loss']:.3f}; "
        f"accuracy {line['masked_lm_accuracy']:.3f}; next sentence "
        f"{line['next_sentence_accuracy']:.3f} +- {line['next_sentence_error']:.3f}, "
        f"majority {line['next_sentence_majority']:.3f} ({line['rows']} rows)"
    )
