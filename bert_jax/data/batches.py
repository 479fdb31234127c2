"""Batches as a function of (step, which rows), by plan and execute.

The plan of an epoch lists its pairs (data.pairs); a step gathers, truncates and masks its rows.
Within a phase, row = (step - first step) * batch + `Phase.row_offset` + i, and epoch, slot =
divmod(row, R), where R is the number of rows in the phase's first plan. Epoch e takes the first R
rows of a random order of its own plan (data.plans); a shorter plan wraps to its start. With static
masks (`Data.dupe_factor` n) epoch e is epoch e mod n again, draw for draw. Nothing here has memory:
any host may compute any rows of any step, in any order.

Shape letters: B rows, S sequence, P predictions.
"""

import dataclasses
from typing import Any

import numpy as np

from bert_jax.config import Data
from bert_jax.data import draws, masking, pairs, sentences
from bert_jax.data.masking import Ids
from bert_jax.data.plans import Plans
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Widths of a phase's batches, and what is added to the numbers of its rows."""

    sequence_length: int
    max_predictions: int
    batch_size: int
    row_offset: int = 0

    def rows(self, step: int, indices: np.ndarray) -> np.ndarray:
        """Returns the numbers, int64 [B], of rows of a step of the phase."""
        first = step * self.batch_size + self.row_offset
        if first < 0:
            raise InputError(
                f"row_offset={self.row_offset}: step {step} of the phase has no rows, since the "
                "fork of these settings began later"
            )
        return np.int64(first) + np.asarray(indices, np.int64)


@dataclasses.dataclass(frozen=True)
class Examples:
    """Makes what is planned of a split into examples."""

    stream: Stream
    ids: Ids
    data: Data  # what is predicted, and whether documents see each other
    sequence_length: int  # S
    max_predictions: int  # P; of data.objective=causal, where nothing is masked, S - 1

    def make(self, planned: np.ndarray, array_draws: draws.Draws, policy: masking.Policy) -> Batch:
        """Returns the examples of pairs, pairs.ROW_DTYPE [B], or of rows of `sentences.plan`, [B].

        Draws are of truncation and masks, `policy` is of the masks.

        Returns:
          input_ids, segment_ids, input_mask int32 [B, S]; masked_lm_positions, masked_lm_ids int32
          [B, P]; masked_lm_weights float32 [B, P]. Of pairs next_sentence_labels int32 [B], 1 for a
          random next, or of swapped pairs for those that were swapped. Of full sentences with
          data.attention=per_document example_numbers, of the document that each token is of, from
          1, and positions within it, int32 [B, S], 0 for padding.
        """
        if self.data.units == "sentences":
            return self._of_sentences(planned, array_draws, policy)
        pair = pairs.truncate(planned, self.sequence_length, array_draws)
        a_end = 1 + pair.a_length[:, None]  # where the first [SEP] stands
        b_end = a_end + 1 + pair.b_length[:, None]  # and the last
        column = np.arange(self.sequence_length)
        real = column <= b_end
        in_b = (column > a_end) & real
        a_shift, b_shift = pair.a_start[:, None] - 1, pair.b_start[:, None] - a_end - 1
        source = column + np.where(in_b, b_shift, a_shift)
        # Clipped: specials and padding, which are put over what is read there, may lie outside.
        input_ids = np.take(np.asarray(self.stream.ids), source, mode="clip").astype(np.int32)
        np.copyto(input_ids, self.ids.pad, where=~real)
        input_ids[:, 0] = self.ids.cls
        np.put_along_axis(input_ids, a_end, self.ids.sep, 1)
        np.put_along_axis(input_ids, b_end, self.ids.sep, 1)
        text = real & (column > 0) & (column != a_end) & (column != b_end)
        lengths = pair.a_length + pair.b_length + pairs.SPECIAL_TOKENS
        return {
            **self._masked(input_ids, text, lengths, array_draws, policy),
            "segment_ids": in_b.astype(np.int32),
            "input_mask": real.astype(np.int32),
            "next_sentence_labels": planned["is_random_next"].astype(np.int32),
        }

    def _of_sentences(
        self, chunks: np.ndarray, array_draws: draws.Draws, policy: masking.Policy
    ) -> Batch:
        specials = self.ids.pad, self.ids.cls, self.ids.sep
        rows = sentences.rows(self.stream, chunks, self.sequence_length, *specials)
        apart = self.data.attention == "per_document"
        if self.data.objective == "causal":
            self._require_known(rows.input_ids)
            # What comes after every token; but the first piece of a document that is not seen.
            predicted = rows.document[:, 1:] > 0
            if apart:
                predicted &= rows.document[:, 1:] == rows.document[:, :-1]
            batch = {
                "input_ids": rows.input_ids,
                "masked_lm_positions": np.arange(predicted.shape[1], dtype=np.int32) * predicted,
                "masked_lm_ids": rows.input_ids[:, 1:] * predicted,
                "masked_lm_weights": predicted.astype(np.float32),
            }
        else:
            batch = self._masked(rows.input_ids, rows.text, rows.length, array_draws, policy)
        return {
            **batch,
            "segment_ids": np.zeros_like(rows.input_ids),
            "input_mask": (rows.document > 0).astype(np.int32),
            **({"example_numbers": rows.document, "positions": rows.positions} if apart else {}),
        }

    def _masked(
        self,
        input_ids: np.ndarray,
        text: np.ndarray,
        lengths: np.ndarray,
        array_draws: draws.Draws,
        policy: masking.Policy,
    ) -> Batch:
        """Masks rows, int32 [B, S] of these lengths; `text`, bool [B, S], may be masked."""
        self._require_known(input_ids)
        masked = masking.mask(
            input_ids, text, lengths, array_draws, policy, self.max_predictions, self.ids
        )
        return {
            "input_ids": masked.input_ids,
            "masked_lm_positions": masked.positions,
            "masked_lm_ids": masked.ids,
            "masked_lm_weights": masked.weights,
        }

    def _require_known(self, input_ids: np.ndarray) -> None:
        """Raises InputError if the stream holds ids that the vocabulary has not."""
        if input_ids.size and input_ids.max() >= self.ids.vocab_size:
            raise self.stream.damaged("ids")  # a device would take another id without a word


class TrainBatches:
    """Training batches of one phase. May be pickled.

    The phase's first step is counted in the run, whose steps are `total_steps`.
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
        self._made = Examples(plans.stream, ids, data, *widths)
        self._first_step, self._total_steps = first_step, total_steps
        self._key = draws.key_of(*plans.names)

    @property
    def rows_per_epoch(self) -> int:
        """Returns R; waits where nobody has counted them yet."""
        while (rows := self.plans.counted()) is None:
            self.plans.pause()
        return rows

    def ready(self, step: int) -> bool:
        """Returns whether a step's batch can be made at once; else what it waits for is under way.

        The plan of the epoch after it is begun, too.

        Raises:
          Unavailable: the process that makes it was killed again and again.
        """
        ends = np.array([0, self.shape.batch_size - 1])
        return self.ready_for(*self.shape.rows(step, ends).tolist())

    def ready_for(self, first_row: int, last_row: int) -> bool:
        """Returns what `ready` does, of rows of the phase, the last one included."""
        rows = self.plans.counted()
        if rows is None:
            return False
        first, last = first_row // rows, last_row // rows
        drawn = [self._epoch_drawn(epoch) for epoch in range(first, last + 1)]
        if any(self.plans.find(epoch) is None for epoch in drawn):
            return False
        self.plans.begin(self._epoch_drawn(last + 1))
        # Also the one before: batches are made ahead, and who asks may not be there yet.
        self.plans.keep({self._epoch_drawn(epoch) for epoch in range(first - 1, last + 2)})
        return True

    def close(self) -> None:
        """Ends what is being planned; a thread that waits for it gives up."""
        self.plans.close()

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Returns rows `indices`, any of [0, batch_size) in any order, of a step of this phase.

        Next to what `Examples.make` gives: `rows` uint32 [B], numbered through the phase, and
        `row_weights` float32 [B], all 1.
        """
        while not self.ready(step):
            self.plans.pause()
        return self.batch_of(step, self.shape.rows(step, indices))

    def batch_of(self, step: int, row: np.ndarray) -> Batch:
        """Returns what `batch` does, of rows of the phase, int64 [B], which are `ready_for` it.

        A step decides how much is masked.
        """
        epochs, slots = np.divmod(row, self.rows_per_epoch)
        of_pairs = self.plans.units != "sentences"
        kind = pairs.ROW_DTYPE if of_pairs else pairs.chunk_dtype(self.plans.stream)
        planned = np.empty(len(row), kind)
        for epoch in np.unique(epochs).tolist():
            here, drawn = epochs == epoch, self._epoch_drawn(epoch)
            chunks = self.plans.wait(drawn)
            some = chunks[slots[here] % len(chunks)]
            if of_pairs:
                counter = draws.Counter(draws.key_of(*self.plans.names, drawn), some["sentence"])
                is_swapped = self._data.units == "swapped_pairs"
                units = "swapped_pairs" if is_swapped else "pairs"
                some = pairs.rows(self.plans.stream, some, counter, units)
            planned[here] = some
        number = self._epoch_drawn(epochs) * self.rows_per_epoch + slots
        policy = masking.Policy.of(self._data, self._first_step + step, self._total_steps)
        examples = self._made.make(planned, draws.Counter(self._key, number), policy)
        weights = np.ones(len(row), np.float32)
        return {"rows": row.astype(np.uint32), "row_weights": weights, **examples}

    def _epoch_drawn(self, epoch: Any) -> Any:
        """Returns the epoch whose plan serves: itself, or with static masks one of the first."""
        return epoch % self._data.dupe_factor if self._data.dupe_factor else epoch

    def rows_planned(self, epoch: int) -> int:
        """Counts the rows of the epoch's plan; those beyond R go, missing ones are repeated."""
        return len(self.plans.wait(self._epoch_drawn(epoch)))


def eval_batches(stream: Stream, ids: Ids, data: Data, batch_size: int) -> tuple[list[Batch], int]:
    """Returns the frozen held-out examples, the same at every evaluation, batch size and mesh.

    Rows are those of one plan of the validation split, at most `Data.eval_rows`, document after
    document in a random order; masks are keyed by the split, and how much is masked is the same
    whatever is trained with (`masking.HELD_OUT`). The last batch is filled up with rows
    of weight 0.

    Returns:
      The batches, and the number of real rows.
    """
    names = (data.eval_seed, "validation", "eval")
    first, length = draws.key_of(*names, 0), data.eval_sequence_length
    if data.units != "sentences":
        how = data.short_seq_prob, first, data.eval_rows, data.units
        plan = pairs.sample(stream, length, *how)
    else:
        plan = sentences.plan(stream, length, first)
        plan = plan[draws.permutation(first, 0, len(plan))[: data.eval_rows]]
    key = draws.key_of(*names)
    made = Examples(stream, ids, data, length, data.eval_max_predictions_per_seq)
    batches = []
    for start in range(0, len(plan), batch_size):
        row = np.arange(start, start + batch_size)
        real = row < len(plan)
        planned = plan[np.where(real, row, 0)]
        batch = made.make(planned, draws.Counter(key, row), masking.HELD_OUT)
        batch["masked_lm_weights"] *= real[:, None]
        weights = real.astype(np.float32)
        batches.append({"rows": row.astype(np.uint32), "row_weights": weights, **batch})
    return batches, len(plan)
