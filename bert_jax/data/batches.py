"""Batches as a function of (step, which rows), by plan and execute.

The plan of an epoch lists its pairs (data.pairs); a step gathers, truncates and masks its rows.
Within a phase, row = (step - first step) * batch + i, and epoch, slot = divmod(row, R), where R is
the number of rows in the phase's first plan. Epoch e takes the first R rows of a random order of
its own plan; a shorter plan wraps to its start. With static masks (`Data.dupe_factor` n) epoch e is
epoch e mod n again, draw for draw. Nothing here has memory: any host may compute any rows of any
step, in any order.

Shape letters: B rows, S sequence, P predictions.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import random
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config import Data, InputError
from bert_jax.data import draws, masking, pairs
from bert_jax.data.stream import Stream
from bert_jax.storage.workdir import is_sealed, read_json, sealed, write_atomic
from bert_jax.text.tokenizer import Tokenizer

PLANS_VERSION = 1

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Ids:
    """What building an example needs to know of a vocabulary."""

    pad: int
    cls: int
    sep: int
    mask: int
    vocab_size: int
    continues: np.ndarray  # bool [vocab_size]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Ids":
        """The ids of a tokenizer."""
        return cls(
            tokenizer.pad_id,
            tokenizer.cls_id,
            tokenizer.sep_id,
            tokenizer.mask_id,
            tokenizer.size,
            tokenizer.continues,
        )


@dataclasses.dataclass(frozen=True)
class Shape:
    """Widths of a phase's batches."""

    sequence_length: int
    max_predictions: int
    batch_size: int


def execute(
    stream: Stream,
    rows: np.ndarray,
    array_draws: draws.ArrayDraws,
    ids: Ids,
    data: Data,
    sequence_length: int,
    max_predictions: int,
) -> Batch:
    """Turns planned pairs into examples.

    Args:
      stream: the split.
      rows: pairs.ROW_DTYPE [B].
      array_draws: truncation and masks.
      ids: specials and vocabulary.
      data: probabilities and the kind of mask.
      sequence_length: S.
      max_predictions: P.

    Returns:
      input_ids, segment_ids, input_mask int32 [B, S]; masked_lm_positions, masked_lm_ids int32
      [B, P]; masked_lm_weights float32 [B, P]; next_sentence_labels int32 [B], 1 for a random
      next.
    """
    pair = pairs.truncate(rows, sequence_length, array_draws)
    a_end = 1 + pair.a_length[:, None]  # where the first [SEP] stands
    b_end = a_end + 1 + pair.b_length[:, None]  # and the last
    column = np.arange(sequence_length)
    real = column <= b_end
    in_b = (column > a_end) & real
    a_shift, b_shift = pair.a_start[:, None] - 1, pair.b_start[:, None] - a_end - 1
    source = column + np.where(in_b, b_shift, a_shift)
    # Clipped: specials and padding, which are put over what is read there, may lie outside.
    input_ids = np.take(np.asarray(stream.ids), source, mode="clip").astype(np.int32)
    np.copyto(input_ids, ids.pad, where=~real)
    input_ids[:, 0] = ids.cls
    np.put_along_axis(input_ids, a_end, ids.sep, 1)
    np.put_along_axis(input_ids, b_end, ids.sep, 1)
    if input_ids.size and input_ids.max() >= ids.vocab_size:
        raise stream.damaged("ids")  # a device would take another id without a word
    masked = masking.mask(
        input_ids,
        pair.a_length,
        pair.b_length,
        array_draws,
        masked_lm_prob=data.masked_lm_prob,
        max_predictions=max_predictions,
        mask_id=ids.mask,
        vocab_size=ids.vocab_size,
        continues=ids.continues if data.masking == "whole_word" else None,
    )
    return {
        "input_ids": masked.input_ids,
        "segment_ids": in_b.astype(np.int32),
        "input_mask": real.astype(np.int32),
        "masked_lm_positions": masked.positions,
        "masked_lm_ids": masked.ids,
        "masked_lm_weights": masked.weights,
        "next_sentence_labels": rows["is_random_next"].astype(np.int32),
    }


def make_plan(stream: Stream, names: tuple[object, ...], length: int, data: Data) -> np.ndarray:
    """One pass over the documents, drawn from `random.Random` of the names; ROW_DTYPE [rows]."""
    scalars = draws.Scalars(random.Random("/".join(map(str, names))))
    order = scalars.document_order(len(stream.document_offsets) - 1)
    rows = pairs.plan(stream, order, length, data.short_seq_prob, scalars)
    return np.fromiter(rows, pairs.ROW_DTYPE)


class TrainBatches:
    """Training batches of one phase. May be pickled; a worker makes its own plans.

    Args:
      stream: the training split.
      ids: specials and vocabulary.
      data: how examples are made.
      shape: widths of the batches.
      seed: of the run.
      phase: number of the phase, from 0.
      rows_per_epoch: R, from `rows_per_epoch`.
    """

    def __init__(
        self,
        stream: Stream,
        ids: Ids,
        data: Data,
        shape: Shape,
        seed: int,
        phase: int,
        rows_per_epoch: int,
    ):
        self._stream, self._ids, self._data, self._shape = stream, ids, data, shape
        self._seed, self._phase = seed, phase
        self.rows_per_epoch = rows_per_epoch
        self._key = draws.key_of(seed, "train", phase)
        self._plans: dict[int, concurrent.futures.Future] = {}
        self._planner: concurrent.futures.ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_planner": None}

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Rows `indices` (in [0, batch_size), any subset in any order) of a step of this phase.

        Besides what `execute` gives: `rows` uint32 [B], numbered through the phase, and
        `row_weights` float32 [B], all 1.
        """
        row = np.int64(step) * self._shape.batch_size + np.asarray(indices, np.int64)
        planned = np.empty(len(row), pairs.ROW_DTYPE)
        epochs, slots = np.divmod(row, self.rows_per_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            planned[here] = self._plan(int(epoch))[slots[here]]
        batch = execute(
            self._stream,
            planned,
            draws.Counter(self._key, self._epoch_drawn(epochs) * self.rows_per_epoch + slots),
            self._ids,
            self._data,
            self._shape.sequence_length,
            self._shape.max_predictions,
        )
        return {
            "rows": row.astype(np.uint32),
            "row_weights": np.ones(len(row), np.float32),
            **batch,
        }

    def _plan(self, epoch: int) -> np.ndarray:
        """The epoch's R rows in their order; the next epoch's are begun meanwhile."""
        for wanted in (epoch, epoch + 1):
            if wanted not in self._plans:
                if self._planner is None:
                    self._planner = concurrent.futures.ThreadPoolExecutor(1, "plan")
                self._plans[wanted] = self._planner.submit(self._make, wanted)
        for old in [e for e in self._plans if e < epoch - 1 or e > epoch + 1]:
            del self._plans[old]
        return self._plans[epoch].result()

    def _epoch_drawn(self, epoch: Any) -> Any:
        """The epoch whose plan and draws serve: itself, or with static masks one of the first."""
        return epoch % self._data.dupe_factor if self._data.dupe_factor else epoch

    def rows_planned(self, epoch: int) -> int:
        """Rows of the epoch's plan; those beyond R are dropped, those wanting are repeated."""
        return len(self._planned(epoch))

    def _planned(self, epoch: int) -> np.ndarray:
        names = (self._seed, "train", self._phase, self._epoch_drawn(epoch))
        return make_plan(self._stream, names, self._shape.sequence_length, self._data)

    def _make(self, epoch: int) -> np.ndarray:
        plan = self._planned(epoch)
        order = draws.permutation(self._key, self._epoch_drawn(epoch), len(plan))
        return plan[np.resize(order, self.rows_per_epoch)]


def rows_per_epoch(
    stream: Stream, data: Data, length: int, seed: int, phase: int, plans: epath.Path
) -> int:
    """R of a phase: the rows in its first plan, remembered in the file `plans`."""
    key = f"{seed}/train/{phase}/length={length}/short_seq_prob={data.short_seq_prob}"
    anew = "remove it, it is made anew"
    known = read_json(plans, PLANS_VERSION, anew, anew) if plans.exists() else {}
    if not is_sealed(known):  # none is there, or an older one, which might be damaged
        known = {"rows": {}}
    # Every row of a plan takes a sentence at least.
    possible = range(1, len(stream.sentence_offsets))
    rows = known["rows"].get(key, 1) if isinstance(known.get("rows"), dict) else None
    if type(rows) is not int or rows not in possible:
        raise InputError(f"{plans}: damaged; {anew}")
    if key not in known["rows"]:
        rows = len(make_plan(stream, (seed, "train", phase, 0), length, data))
        known = sealed({"format_version": PLANS_VERSION, "rows": {**known["rows"], key: rows}})
        with contextlib.suppress(InputError):  # counted again where the corpus cannot be written
            write_atomic(plans, json.dumps(known, indent=2) + "\n")
    return known["rows"][key]


def eval_batches(
    stream: Stream, ids: Ids, data: Data, seed: int, batch_size: int
) -> tuple[list[Batch], int]:
    """The frozen held-out examples, the same at every evaluation, batch size and mesh.

    Rows are those of one plan of the validation split in plan order, at most `Data.eval_rows`;
    masks are keyed by the split. The last batch is filled up with rows of weight 0.

    Returns:
      The batches, and the number of real rows.
    """
    names = (seed, "validation", "eval")
    plan = make_plan(stream, (*names, 0), data.eval_sequence_length, data)[: data.eval_rows]
    if not len(plan):
        raise InputError("data.eval_rows: the validation split gives no row")
    key = draws.key_of(*names)
    batches = []
    for start in range(0, len(plan), batch_size):
        row = np.arange(start, start + batch_size)
        real = row < len(plan)
        batch = execute(
            stream,
            plan[np.where(real, row, 0)],
            draws.Counter(key, row),
            ids,
            data,
            data.eval_sequence_length,
            data.eval_max_predictions_per_seq,
        )
        batch["masked_lm_weights"] *= real[:, None]
        weights = real.astype(np.float32)
        batches.append({"rows": row.astype(np.uint32), "row_weights": weights, **batch})
    return batches, len(plan)
