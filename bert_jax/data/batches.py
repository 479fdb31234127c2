"""Batches as a function of (step, which rows), by plan and execute.

The plan of an epoch lists its pairs (data.pairs); a step gathers, truncates and masks its rows.
Within a phase, row = (step - first step) * batch + `Phase.row_offset` + i, and epoch, slot =
divmod(row, R), where R is the number of rows in the phase's first plan. Epoch e takes the first R
rows of a random order of its own plan (data.plans); a shorter plan wraps to its start. With static
masks (`Data.dupe_factor` n) epoch e is epoch e mod n again, draw for draw. Nothing here has memory:
any host may compute any rows of any step, in any order.

Where examples share rows (data.packing), the R of an epoch are those that would have had a row
each, with the numbers of those rows, and so with their draws. Their packed rows are counted as rows
are above, with the number of the first plan's in place of R.

Shape letters: B rows, S sequence, P predictions; E examples of a packed row, Q predictions of one.
"""

import dataclasses
from typing import Any

import numpy as np

from bert_jax.config import Data
from bert_jax.data import draws, masking, packing, pairs, sentences
from bert_jax.data.plans import Packed, Plans
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError
from bert_jax.text.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Ids:
    """The ids of a vocabulary that building an example needs, and how many there are."""

    pad: int
    cls: int
    sep: int
    mask: int
    vocab_size: int
    continues: np.ndarray  # bool [vocab_size]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Ids":
        """Returns the ids of a tokenizer."""
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
    """Widths of a phase's batches, and what is added to the numbers of its rows."""

    sequence_length: int
    max_predictions: int
    batch_size: int
    row_offset: int = 0

    def rows(self, step: int, indices: np.ndarray) -> np.ndarray:
        """Returns the numbers, int64 [B], of rows of a step of the phase."""
        return np.int64(step) * self.batch_size + self.row_offset + np.asarray(indices, np.int64)


def execute(
    stream: Stream,
    rows: np.ndarray,
    array_draws: draws.ArrayDraws,
    ids: Ids,
    policy: masking.Policy,
    sequence_length: int,
    max_predictions: int,
) -> Batch:
    """Turns planned pairs into examples.

    Args:
      stream: the split.
      rows: pairs.ROW_DTYPE [B].
      array_draws: truncation and masks.
      ids: specials and vocabulary.
      policy: of the masks.
      sequence_length: S.
      max_predictions: P.

    Returns:
      input_ids, segment_ids, input_mask int32 [B, S]; masked_lm_positions, masked_lm_ids int32
      [B, P]; masked_lm_weights float32 [B, P]; next_sentence_labels int32 [B], 1 for a random
      next, or of swapped pairs for those that were swapped.
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
    text = real & (column > 0) & (column != a_end) & (column != b_end)
    lengths = pair.a_length + pair.b_length + pairs.SPECIAL_TOKENS
    return {
        **_masked(stream, input_ids, text, lengths, array_draws, ids, policy, max_predictions),
        "segment_ids": in_b.astype(np.int32),
        "input_mask": real.astype(np.int32),
        "next_sentence_labels": rows["is_random_next"].astype(np.int32),
    }


def execute_sentences(
    stream: Stream,
    chunks: np.ndarray,
    array_draws: draws.ArrayDraws,
    ids: Ids,
    policy: masking.Policy,
    sequence_length: int,
    max_predictions: int,
    data: Data,
) -> Batch:
    """Turns planned rows of full sentences into examples.

    Args:
      chunks: of `sentences.plan`, [B].
      stream, array_draws, ids, policy, sequence_length, max_predictions: see `execute`; with
        data.objective=causal nothing is masked, and P is S - 1.
      data: what is predicted, and whether documents see each other.

    Returns:
      What `execute` gives, without labels of next sentences; segment_ids are 0. With
      data.attention=per_document `example_numbers`, of the document that each token is of, from 1,
      and `positions` within it, int32 [B, S], 0 for padding.
    """
    rows = sentences.rows(stream, chunks, sequence_length, ids.pad, ids.cls, ids.sep)
    apart = {"example_numbers": rows.document, "positions": rows.positions}
    if data.unpredicted:
        _require_known(stream, rows.input_ids, ids)
        batch = _next_pieces(rows, data)
    else:
        which = stream, rows.input_ids, rows.text, rows.length
        batch = _masked(*which, array_draws, ids, policy, max_predictions)
    return {
        **batch,
        "segment_ids": np.zeros_like(rows.input_ids),
        "input_mask": (rows.document > 0).astype(np.int32),
        **(apart if data.attention == "per_document" else {}),
    }


def _next_pieces(rows: sentences.Rows, data: Data) -> Batch:
    """Returns rows as they are, and after every token the one to predict: see `_masked`.

    Of documents that do not see each other the first piece of the next is not predicted.
    """
    batch, length = rows.input_ids.shape
    document = rows.document
    predicted = document[:, 1:] > 0
    if data.attention == "per_document":
        predicted &= document[:, 1:] == document[:, :-1]
    places = np.broadcast_to(np.arange(length - 1, dtype=np.int32), (batch, length - 1))
    return {
        "input_ids": rows.input_ids,
        "masked_lm_positions": places * predicted,
        "masked_lm_ids": rows.input_ids[:, 1:] * predicted,
        "masked_lm_weights": predicted.astype(np.float32),
    }


def execute_planned(
    data: Data,
    stream: Stream,
    planned: np.ndarray,
    array_draws: draws.ArrayDraws,
    ids: Ids,
    policy: masking.Policy,
    sequence_length: int,
    max_predictions: int,
) -> Batch:
    """Turns what is planned for an objective into examples: see `execute`, `execute_sentences`."""
    how = array_draws, ids, policy, sequence_length, max_predictions
    if data.units == "sentences":
        return execute_sentences(stream, planned, *how, data)
    return execute(stream, planned, *how)


def _masked(
    stream: Stream,
    input_ids: np.ndarray,
    text: np.ndarray,
    lengths: np.ndarray,
    array_draws: draws.ArrayDraws,
    ids: Ids,
    policy: masking.Policy,
    max_predictions: int,
) -> Batch:
    """Masks rows; returns `input_ids` and `masked_lm_*`, see `execute`.

    Args:
      input_ids: int32 [B, S].
      text: bool [B, S], False for specials and padding.
      lengths: int64 [B], of the rows without padding.
      stream, array_draws, ids, policy, max_predictions: see `execute`.
    """
    _require_known(stream, input_ids, ids)
    masked = masking.mask(
        input_ids,
        text,
        lengths,
        array_draws,
        policy,
        max_predictions=max_predictions,
        mask_id=ids.mask,
        vocab_size=ids.vocab_size,
        continues=ids.continues,
    )
    return {
        "input_ids": masked.input_ids,
        "masked_lm_positions": masked.positions,
        "masked_lm_ids": masked.ids,
        "masked_lm_weights": masked.weights,
    }


def _require_known(stream: Stream, input_ids: np.ndarray, ids: Ids) -> None:
    """Raises InputError if the stream holds ids that the vocabulary has not."""
    if input_ids.size and input_ids.max() >= ids.vocab_size:
        raise stream.damaged("ids")  # a device would take another id without a word


class TrainBatches:
    """Training batches of one phase. May be pickled.

    Args:
      plans: of the phase; they say whether examples share rows.
      ids: specials and vocabulary.
      data: how examples are made.
      shape: widths of the batches.
      rows_per_epoch: R; None: the rows in the first plan.
      first_step: of the phase, counted in the run.
      total_steps: of the run.
    """

    def __init__(
        self,
        plans: Plans,
        ids: Ids,
        data: Data,
        shape: Shape,
        rows_per_epoch: int | None = None,
        first_step: int = 0,
        total_steps: int = 1,
    ):
        self.plans, self._ids, self._data, self.shape = plans, ids, data, shape
        self._first_step, self._total_steps = first_step, total_steps
        self._rows = rows_per_epoch
        self._key = draws.key_of(*plans.names)

    @property
    def rows_per_epoch(self) -> int:
        """Returns R, or how many packed rows; waits where nobody has counted them yet."""
        while (rows := self._rows_if_known()) is None:
            self.plans.pause()
        return rows

    def _rows_if_known(self) -> int | None:
        if self._rows is None:
            self._rows = self.plans.rows_per_epoch()
        return self._rows

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
        rows = self._rows_if_known()
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

        Next to what `execute` gives, of packed rows `packing.share`: `rows` uint32 [B], numbered
        through the phase, and `row_weights` float32 [B], all 1; of packed rows `examples` uint32
        [B, E], numbered through the phase, 0 where there is none, and `row_weights` [B, E].
        """
        while not self.ready(step):
            self.plans.pause()
        return self.batch_of(step, self.shape.rows(step, indices))

    def batch_of(self, step: int, row: np.ndarray) -> Batch:
        """Returns what `batch` does, of rows of the phase, int64 [B], which are `ready_for` it.

        A step decides how much is masked.
        """
        epochs, slots = np.divmod(row, self.rows_per_epoch)
        number = {"rows": row.astype(np.uint32)}
        policy = masking.Policy.of(self._data, self._first_step + step, self._total_steps)
        if self.plans.packed is not None:
            return number | self._packed(epochs, slots, policy, self.plans.packed)
        batch = self._examples(epochs, slots, self.rows_per_epoch, policy)
        return {**number, "row_weights": np.ones(len(row), np.float32), **batch}

    def _examples(
        self, epochs: np.ndarray, slots: np.ndarray, per_epoch: int, policy: masking.Policy
    ) -> Batch:
        """Returns some examples by themselves; of each int64 [B] an epoch and its slot there."""
        of_pairs = self.plans.units != "sentences"
        kind = pairs.ROW_DTYPE if of_pairs else pairs.chunk_dtype(self.plans.stream)
        planned = np.empty(len(epochs), kind)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            of_epoch = self._pairs if of_pairs else self._chunks
            planned[here] = of_epoch(epoch, slots[here])
        return execute_planned(
            self._data,
            self.plans.stream,
            planned,
            draws.Counter(self._key, self._epoch_drawn(epochs) * per_epoch + slots),
            self._ids,
            policy,
            self.shape.sequence_length,
            self.shape.max_predictions,
        )

    def _packed(
        self, epochs: np.ndarray, places: np.ndarray, policy: masking.Policy, packed: Packed
    ) -> Batch:
        """Returns some packed rows; of each int64 [B] an epoch and its place there."""
        slots = np.empty((len(epochs), packed.examples), np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            packs = self.plans.packs(self._epoch_drawn(epoch))
            slots[here] = packs.of(places[here] % len(packs), packed.examples)
        there = slots >= 0
        per_epoch = self.plans.examples_per_epoch() or 0  # known, since rows are
        its_epochs = np.repeat(epochs, there.sum(axis=1))
        numbers = np.zeros(slots.shape, np.uint32)
        numbers[there] = (its_epochs * per_epoch + slots[there]).astype(np.uint32)
        examples = self._examples(its_epochs, slots[there], per_epoch, policy)
        return {"examples": numbers, **packing.share(examples, there, packed.predictions)}

    def _chunks(self, epoch: int, slots: np.ndarray) -> np.ndarray:
        """Returns the chunks in some slots of an epoch."""
        plan = self.plans.wait(self._epoch_drawn(epoch))
        return plan[slots % len(plan)]

    def _pairs(self, epoch: int, slots: np.ndarray) -> np.ndarray:
        """Returns the pairs in some slots of an epoch, ROW_DTYPE."""
        chunks = self._chunks(epoch, slots)
        counter = draws.Counter(self.plans.key(self._epoch_drawn(epoch)), chunks["sentence"])
        return pairs.rows(self.plans.stream, chunks, counter, self._data.units)

    def _epoch_drawn(self, epoch: Any) -> Any:
        """Returns the epoch whose plan serves: itself, or with static masks one of the first."""
        return epoch % self._data.dupe_factor if self._data.dupe_factor else epoch

    def rows_planned(self, epoch: int) -> int:
        """Counts the rows of the epoch's plan; those beyond R go, missing ones are repeated."""
        drawn = self._epoch_drawn(epoch)
        return len(self.plans.wait(drawn) if self.plans.packed is None else self.plans.packs(drawn))


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
    if not len(plan):
        raise InputError("data.eval_rows: the validation split gives no row")
    key = draws.key_of(*names)
    batches = []
    for start in range(0, len(plan), batch_size):
        row = np.arange(start, start + batch_size)
        real = row < len(plan)
        batch = execute_planned(
            data,
            stream,
            plan[np.where(real, row, 0)],
            draws.Counter(key, row),
            ids,
            masking.HELD_OUT,
            data.eval_sequence_length,
            data.eval_max_predictions_per_seq,
        )
        batch["masked_lm_weights"] *= real[:, None]
        weights = real.astype(np.float32)
        batches.append({"rows": row.astype(np.uint32), "row_weights": weights, **batch})
    return batches, len(plan)
