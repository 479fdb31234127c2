"""Batches as a function of (step, row indices), computed from the plans of epochs.

The plan of an epoch lists its pairs (data.pairs); a step gathers, truncates and masks its rows.
Steps count from 0 in each phase: row = step * batch + `Phase.row_offset` + i, and epoch, slot =
divmod(row, R), where R is the number of rows in the phase's first plan. Epoch e takes R rows of its
own plan in a random order (data.plans): a longer plan is cut, a shorter one repeats from its start.
With static masks (`Data.dupe_factor` n) epoch e repeats epoch e mod n, draw for draw. Batches are
stateless: any host may compute any rows of any step, in any order.

Shape letters: B rows, S sequence, P predictions.
"""

import dataclasses
from typing import Any

import numpy as np

from bert_jax.config import Data
from bert_jax.data import draws as draws_lib
from bert_jax.data import masking, pairs, sentences
from bert_jax.data.draws import Draws
from bert_jax.data.masking import Ids
from bert_jax.data.plans import Plans
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The widths of a phase's batches, and `Phase.row_offset`, which `fork` sets."""

    sequence_length: int
    max_predictions: int
    batch_size: int
    row_offset: int = 0

    def rows(self, step: int, indices: np.ndarray) -> np.ndarray:
        """Returns the row numbers in the phase, int64 [B], of rows `indices` of a step."""
        first = step * self.batch_size + self.row_offset
        if first < 0:
            raise InputError(
                f"row_offset={self.row_offset}: step {step} of the phase has no rows, since these "
                "settings are those of a fork that starts at a later step; repeat the fork instead"
            )
        return np.int64(first) + np.asarray(indices, np.int64)


@dataclasses.dataclass(frozen=True)
class BatchBuilder:
    """Builds batches from the planned rows of a split."""

    stream: Stream
    ids: Ids
    data: Data  # the objective, and whether documents attend to each other
    sequence_length: int  # S
    max_predictions: int  # P; S - 1 with data.objective=causal, which masks nothing

    def make(self, planned: np.ndarray, draws: Draws, policy: masking.Policy) -> Batch:
        """Returns the batch of pairs, pairs.ROW_DTYPE [B], or of rows of `sentences.plan`, [B].

        Returns:
          input_ids, segment_ids, input_mask int32 [B, S]; masked_lm_positions, masked_lm_ids int32
          [B, P]; masked_lm_weights float32 [B, P]. For pairs next_sentence_labels int32 [B]: 1 if
          the second text is random, or if the texts were swapped. For full sentences with
          data.attention=per_document example_numbers, the number of each token's document from 1,
          and positions, counted within the document; int32 [B, S], 0 for padding.
        """
        if self.data.row_kind == "sentences":
            return self._make_full_sentences(planned, draws, policy)
        pair = pairs.truncate(planned, self.sequence_length, draws)
        a_end = 1 + pair.a_length[:, None]  # column of the first [SEP]
        b_end = a_end + 1 + pair.b_length[:, None]  # column of the last [SEP]
        column = np.arange(self.sequence_length)
        real = column <= b_end
        in_b = (column > a_end) & real
        a_shift, b_shift = pair.a_start[:, None] - 1, pair.b_start[:, None] - a_end - 1
        source = column + np.where(in_b, b_shift, a_shift)
        # Clipped: the columns of specials and padding, overwritten below, may lie outside.
        input_ids = np.take(np.asarray(self.stream.ids), source, mode="clip").astype(np.int32)
        np.copyto(input_ids, self.ids.pad, where=~real)
        input_ids[:, 0] = self.ids.cls
        np.put_along_axis(input_ids, a_end, self.ids.sep, 1)
        np.put_along_axis(input_ids, b_end, self.ids.sep, 1)
        text = real & (column > 0) & (column != a_end) & (column != b_end)
        lengths = pair.a_length + pair.b_length + pairs.NUM_SPECIALS
        return {
            **self._mask(masking.Rows(input_ids, text, lengths), draws, policy),
            "segment_ids": in_b.astype(np.int32),
            "input_mask": real.astype(np.int32),
            "next_sentence_labels": planned["is_random_next"].astype(np.int32),
        }

    def _make_full_sentences(
        self, chunks: np.ndarray, draws: Draws, policy: masking.Policy
    ) -> Batch:
        specials = self.ids.pad, self.ids.cls, self.ids.sep
        rows, document, positions = sentences.rows(
            self.stream, chunks, self.sequence_length, *specials
        )
        per_document = self.data.attention == "per_document"
        if self.data.objective == "causal":
            self._require_known(rows.input_ids)
            # Every token predicts the next; with per_document only within its document.
            predicted = document[:, 1:] > 0
            if per_document:
                predicted &= document[:, 1:] == document[:, :-1]
            batch = {
                "input_ids": rows.input_ids,
                "masked_lm_positions": np.arange(predicted.shape[1], dtype=np.int32) * predicted,
                "masked_lm_ids": rows.input_ids[:, 1:] * predicted,
                "masked_lm_weights": predicted.astype(np.float32),
            }
        else:
            batch = self._mask(rows, draws, policy)
        if per_document:
            batch |= {"example_numbers": document, "positions": positions}
        return {
            **batch,
            "segment_ids": np.zeros_like(rows.input_ids),
            "input_mask": (document > 0).astype(np.int32),
        }

    def _mask(self, rows: masking.Rows, draws: Draws, policy: masking.Policy) -> Batch:
        self._require_known(rows.input_ids)
        masked = masking.mask(rows, draws, policy, self.max_predictions, self.ids)
        return {
            "input_ids": masked.input_ids,
            "masked_lm_positions": masked.positions,
            "masked_lm_ids": masked.ids,
            "masked_lm_weights": masked.weights,
        }

    def _require_known(self, input_ids: np.ndarray) -> None:
        """Raises InputError if the stream holds ids outside of the vocabulary."""
        if input_ids.size and input_ids.max() >= self.ids.vocab_size:
            raise self.stream.damage_error("ids")  # a device would silently use another id


class TrainBatches:
    """Training batches of one phase. May be pickled.

    `first_step` is the phase's first step in the run, which has `total_steps`.
    """

    def __init__(
        self,
        plans: Plans,
        ids: Ids,
        data: Data,
        shape: BatchShape,
        first_step: int = 0,
        total_steps: int = 1,
    ):
        self.plans, self._data, self.shape = plans, data, shape
        widths = shape.sequence_length, shape.max_predictions
        self._builder = BatchBuilder(plans.stream, ids, data, *widths)
        self._first_step, self._total_steps = first_step, total_steps
        self._key = draws_lib.key_of(*plans.spec.key_parts)

    @property
    def rows_per_epoch(self) -> int:
        """Returns R; waits until the rows of the first plan are counted."""
        while (rows := self.plans.count_rows()) is None:
            self.plans.wait_briefly()
        return rows

    def is_ready(self, step: int) -> bool:
        """Returns whether a step's batch can be made at once; else starts to make its plans.

        If it can, starts to make the plan of the epoch after it.
        """
        ends = np.array([0, self.shape.batch_size - 1])
        return self.are_rows_ready(*self.shape.rows(step, ends).tolist())

    def are_rows_ready(self, first_row: int, last_row: int) -> bool:
        """Does what `is_ready` does, for rows of the phase from the first to the last inclusive."""
        rows = self.plans.count_rows()
        if rows is None:
            return False
        first, last = first_row // rows, last_row // rows
        epochs = [self._plan_number(epoch) for epoch in range(first, last + 1)]
        if any(self.plans.find_or_begin(epoch) is None for epoch in epochs):
            return False  # a plan is being made; those of later epochs begin when it is made
        self.plans.prefetch(self._plan_number(last + 1))
        # The epoch before is kept, since rows before those of a prefetched step are still made.
        self.plans.keep({self._plan_number(epoch) for epoch in range(first - 1, last + 2)})
        return True

    def close(self) -> None:
        """Stops planning; a thread that waits for a plan raises RuntimeError."""
        self.plans.close()

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Returns rows `indices`, any of [0, batch_size) in any order, of a step of this phase.

        Adds to the arrays of `BatchBuilder.make`: `rows` uint32 [B], the row numbers in the phase,
        and `row_weights` float32 [B], all 1.
        """
        while not self.is_ready(step):
            self.plans.wait_briefly()
        return self.batch_of_rows(step, self.shape.rows(step, indices))

    def batch_of_rows(self, step: int, row: np.ndarray) -> Batch:
        """Returns what `batch` does, for rows of the phase, int64 [B], that are ready.

        The step only decides how much is masked.
        """
        epochs, slots = np.divmod(row, self.rows_per_epoch)
        stream, spec = self.plans.stream, self.plans.spec
        dtype = pairs.chunk_dtype(stream) if spec.row_kind == "sentences" else pairs.ROW_DTYPE
        planned = np.empty(len(row), dtype)
        for epoch in np.unique(epochs).tolist():
            in_epoch, plan_number = epochs == epoch, self._plan_number(epoch)
            plan = self.plans.wait(plan_number)
            chunks = plan[slots[in_epoch] % len(plan)]
            if spec.row_kind != "sentences":
                key = draws_lib.key_of(*spec.key_parts, plan_number)
                chunk_draws = draws_lib.CounterDraws(key, chunks["sentence"])
                chunks = pairs.rows(stream, chunks, chunk_draws, spec.row_kind)
            planned[in_epoch] = chunks
        number = self._plan_number(epochs) * self.rows_per_epoch + slots
        policy = masking.Policy.of(self._data, self._first_step + step, self._total_steps)
        batch = self._builder.make(planned, draws_lib.CounterDraws(self._key, number), policy)
        weights = np.ones(len(row), np.float32)
        return {"rows": row.astype(np.uint32), "row_weights": weights, **batch}

    def _plan_number(self, epoch: Any) -> Any:
        """Returns the epoch whose plan is used: modulo `dupe_factor` with static masks."""
        return epoch % self._data.dupe_factor if self._data.dupe_factor else epoch

    def rows_planned(self, epoch: int) -> int:
        """Counts the rows of the epoch's plan; if R is larger, its first rows are repeated."""
        return len(self.plans.wait(self._plan_number(epoch)))


def eval_batches(stream: Stream, ids: Ids, data: Data, batch_size: int) -> tuple[list[Batch], int]:
    """Returns batches of the same held-out rows at every batch size and mesh, and their number.

    The rows are at most `Data.eval_rows` of one plan of the validation split: pairs by document, in
    a random order of documents, or full sentences in a random order of rows. Masks are keyed by the
    split and follow `masking.HELD_OUT`, whatever the training masks are. Rows of weight 0 fill the
    last batch.
    """
    names = (data.eval_seed, "validation", "eval")
    plan_key, length = draws_lib.key_of(*names, 0), data.eval_sequence_length
    if data.row_kind != "sentences":
        short, count = data.short_seq_prob, data.eval_rows
        plan = pairs.sample(stream, length, short, plan_key, count, data.row_kind)
    else:
        plan = sentences.plan(stream, length, plan_key)
        plan = plan[draws_lib.permutation(plan_key, 0, len(plan))[: data.eval_rows]]
    key = draws_lib.key_of(*names)
    builder = BatchBuilder(stream, ids, data, length, data.eval_max_predictions_per_seq)
    batches = []
    for start in range(0, len(plan), batch_size):
        row = np.arange(start, start + batch_size)
        real = row < len(plan)
        planned = plan[np.where(real, row, 0)]
        batch = builder.make(planned, draws_lib.CounterDraws(key, row), masking.HELD_OUT)
        batch["masked_lm_weights"] *= real[:, None]
        weights = real.astype(np.float32)
        batches.append({"rows": row.astype(np.uint32), "row_weights": weights, **batch})
    return batches, len(plan)
