"""Batches of packed rows: the same examples, each once, within what a row may hold."""

import numpy as np
import pytest
import test_batches as alone
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.config import Data
from bert_jax.data import batches, packing, plans, stream

LENGTH, PREDICTIONS = alone.LENGTH, alone.PREDICTIONS
# Of one piece a sentence, so that short examples are many.
MIXED = stream.from_documents(
    [
        [[5 + (7 * d + i) % 90] * (1 + (d * i) % (3 if d % 2 else 24)) for i in range(1 + d % 7)]
        for d in range(60)
    ]
)


def make(batch_size=8, limits=(4, 9), data=None, small=MIXED, seed=0):
    data = data or Data()
    packed = plans.Packed(*limits, data.masked_lm_prob, PREDICTIONS)
    names, how = (seed, "train", 0), {"packed": packed, "units": data.units}
    source = plans.Plans(small, names, LENGTH, data.short_seq_prob, **how)
    shape = batches.Shape(LENGTH, PREDICTIONS, batch_size)
    return batches.TrainBatches(source, alone.IDS, data, shape)


def examples_of(batch):
    """(number, what the example has as `execute` gives it) of each, none of it padded."""
    for row, column in zip(*np.nonzero(batch["row_weights"]), strict=True):
        here = np.flatnonzero(batch["example_numbers"][row] == column + 1)
        masked = batch["masked_lm_positions"][row]
        mine = np.isin(masked, here) & (batch["masked_lm_weights"][row] > 0)
        start = batch["example_starts"][row, column]
        assert start == here[0] and (np.diff(here) == 1).all()
        np.testing.assert_array_equal(batch["positions"][row, here], np.arange(len(here)))
        yield (
            int(batch["examples"][row, column]),
            {
                "input_ids": batch["input_ids"][row, here].tolist(),
                "segment_ids": batch["segment_ids"][row, here].tolist(),
                "masked_lm_positions": (masked[mine] - start).tolist(),
                "masked_lm_ids": batch["masked_lm_ids"][row, mine].tolist(),
                "next_sentence_labels": int(batch["next_sentence_labels"][row, column]),
            },
        )


def unpacked(number, data=None, small=MIXED):
    """The example with this number in a row of its own."""
    row = alone.make(1, data=data, small=small).batch(number, np.arange(1))
    length, count = int(row["input_mask"].sum()), int(row["masked_lm_weights"].sum())
    assert row["rows"] == [number]
    return {
        "input_ids": row["input_ids"][0, :length].tolist(),
        "segment_ids": row["segment_ids"][0, :length].tolist(),
        "masked_lm_positions": row["masked_lm_positions"][0, :count].tolist(),
        "masked_lm_ids": row["masked_lm_ids"][0, :count].tolist(),
        "next_sentence_labels": int(row["next_sentence_labels"][0]),
    }


@pytest.mark.parametrize(
    "data",
    [Data(), Data(masking="whole_word"), Data(dupe_factor=1), Data(objective="mlm_sop")],
    ids=["piece", "word", "dupe", "order"],
)
def test_a_packed_example_is_the_one_that_has_the_row_of_its_number(data):
    """Of any epoch, masks and all; an epoch's come once each."""
    train, whole = make(data=data), alone.make(data=data, small=MIXED)
    rows, per_epoch = train.rows_per_epoch, whole.rows_per_epoch
    assert rows < 0.8 * per_epoch
    seen = {}
    for step in range(-(-3 * rows // 8)):
        for number, example in examples_of(train.batch(step, np.arange(8))):
            seen.setdefault(number, []).append(example)
    first = [number for number in seen if number < per_epoch]
    assert sorted(first) == list(range(per_epoch))
    for number, found in seen.items():
        assert number >= per_epoch or len(found) == 1
        if number % 5 == 0:
            assert found[0] == unpacked(number, data)


def test_batch_is_the_same_for_any_host_count_and_order():
    train = make(16)
    rng = np.random.default_rng(0)
    for step in (5, 0, 2):
        full = train.batch(step, np.arange(16))
        for part in (*np.split(np.arange(16), 4), rng.permutation(16), np.array([7])):
            alone.assert_equal(make(16).batch(step, part), alone.take(full, part))
        alone.assert_equal(make(32).batch(0, np.arange(16)), make(16).batch(0, np.arange(16)))


def test_rows_hold_no_more_than_they_may():
    for limits in ((1, 5), (2, 5), (4, 6), (8, 13)):
        train = make(limits=limits)
        for step in range(train.rows_per_epoch // 8):
            batch = train.batch(step, np.arange(8))
            assert batch["masked_lm_ids"].shape == (8, limits[1])
            assert batch["examples"].shape == (8, limits[0])
            predicted = batch["masked_lm_weights"].sum(axis=1)
            # None is lost: as many as of the examples by themselves.
            for row in range(8):
                alone_too = [
                    unpacked(int(n))["masked_lm_ids"]
                    for n in batch["examples"][row][batch["row_weights"][row] > 0]
                ]
                assert predicted[row] == sum(map(len, alone_too))
            if step == 1:
                break


@given(
    st.lists(st.integers(5, 40), min_size=1, max_size=120),
    st.integers(1, 6),
    st.integers(6, 12),
    st.integers(0, 3),
)
def test_every_example_stands_in_one_row_and_fits(lengths, examples, most, epoch):
    limits = packing.Limits(40, examples, most)
    predictions = np.minimum(6, np.maximum(1, np.rint(np.arange(41) * 0.15))).astype(np.int64)
    lengths = np.array(lengths, np.uint16)
    packs = packing.pack_epoch(lengths, predictions, limits, (1, 2), epoch)
    rows = packs.of(np.arange(len(packs)), examples)
    assert sorted(rows[rows >= 0].tolist()) == list(range(len(lengths)))
    assert ((rows >= 0).sum(axis=1) >= 1).all()
    held = np.where(rows >= 0, lengths[rows], 0)
    used = np.stack([held.sum(1), np.where(held, predictions[held], 0).sum(1), (held > 0).sum(1)])
    may = np.array([40, most, examples])
    assert not (may < used.T).any()
    # No row would have taken another one whole.
    both = used[:, :, None] + used[:, None]
    assert ((both > may[:, None, None]).any(axis=0) | np.eye(len(rows), dtype=bool)).all()


def test_lengths_of_wikipedia_leave_next_to_nothing_of_a_row_empty():
    """Lognormal lengths cut at 512, 260 tokens in the mean, as its examples at that length."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.3, 0.95, 20_000), 8, 512).astype(np.uint16)
    assert 230 < lengths.mean() < 280
    predictions = np.minimum(77, np.rint(np.arange(513) * 0.15)).astype(np.int64)
    packs = packing.pack_epoch(lengths, predictions, packing.Limits(512, 8, 85), (1, 2), 0)
    assert lengths.sum() / (512 * len(packs)) > 0.98
    # In no order: a step's rows are of all kinds.
    sizes = np.diff(packs.starts.astype(np.int64))
    assert abs(sizes[:1000].mean() / sizes.mean() - 1) < 0.1
