"""Batches as a function of (step, rows): the same in any order, batch size, process."""

import dataclasses

import numpy as np
import pytest
from compare import assert_identical

from bert_jax.config import Data
from bert_jax.data import batches, draws, pairs, plans, stream

LENGTH, PREDICTIONS = 32, 5
CONTINUES = np.arange(100) % 4 == 1
CONTINUES[:5] = False
IDS = batches.Ids(pad=0, cls=2, sep=3, mask=4, vocab_size=100, continues=CONTINUES)
DTYPES = {
    "rows": np.uint32,
    "row_weights": np.float32,
    "input_ids": np.int32,
    "segment_ids": np.int32,
    "input_mask": np.int32,
    "masked_lm_positions": np.int32,
    "masked_lm_ids": np.int32,
    "masked_lm_weights": np.float32,
    "next_sentence_labels": np.int32,
}


def make_stream(documents=30, seed=0):
    rng = np.random.default_rng(seed)
    return stream.make_stream(
        [
            [rng.integers(5, 100, rng.integers(1, 25)).tolist() for _ in range(rng.integers(2, 12))]
            for _ in range(documents)
        ]
    )


SMALL = make_stream()
EVAL = Data(eval_sequence_length=LENGTH, eval_max_predictions_per_seq=PREDICTIONS)


def make(batch_size=8, seed=0, phase=0, data=None, rows=None, length=LENGTH, **options):
    """Training batches of SMALL; rows of pairs of segments, or of full sentences."""
    data = data or Data()
    spec = (seed, "train", phase), length, data.short_seq_prob, data.row_kind
    source = plans.Plans(SMALL, plans.PlanSpec(*spec))
    most = length - data.unpredicted if data.unpredicted else PREDICTIONS
    source._row_count, shape = rows, batches.BatchShape(length, most, batch_size)
    return batches.TrainBatches(source, IDS, data, shape, **options)


def plan_rows(key_parts=(0, "train", 0, 0), data=None):
    """The pairs of a plan in the order of the documents."""
    key = draws.key_of(*key_parts)
    chunks = pairs.plan(SMALL, LENGTH, (data or Data()).short_seq_prob, key)
    return pairs.rows(SMALL, chunks, draws.CounterDraws(key, chunks["sentence"]))


def take(batch, indices):
    return {name: value[indices] for name, value in batch.items()}


def whole(train, step, size=8):
    return train.batch(step, np.arange(size))


def test_a_batch_has_the_shapes_and_types_it_says():
    batch = whole(make(), 3)
    widths = {"input_ids": LENGTH, "segment_ids": LENGTH, "input_mask": LENGTH}
    for name, dtype in DTYPES.items():
        assert batch[name].dtype == dtype, name
        width = widths.get(name, PREDICTIONS if name.startswith("masked") else None)
        assert batch[name].shape == ((8,) if width is None else (8, width)), name
    assert batch.keys() == DTYPES.keys()
    assert batch["rows"].tolist() == list(range(24, 32))
    assert (batch["row_weights"] == 1).all()


def test_a_row_reads_cls_a_sep_b_sep():
    data = Data(masked_lm_prob=0.0)  # still one, as in the reference
    train = make(64, data=data)
    batch = whole(train, 0, 64)
    text = SMALL.ids.tolist()
    for row in range(64):
        ids = batch["input_ids"][row].copy()
        at = batch["masked_lm_positions"][row, 0]
        ids[at] = batch["masked_lm_ids"][row, 0]
        length = int(batch["input_mask"][row].sum())
        assert batch["input_mask"][row].tolist() == [1] * length + [0] * (LENGTH - length)
        assert (ids[length:] == 0).all()
        middle = 1 + ids.tolist().index(3)
        assert (ids[0], ids[middle - 1], ids[length - 1]) == (2, 3, 3)
        segments = [0] * middle + [1] * (length - middle) + [0] * (LENGTH - length)
        assert batch["segment_ids"][row].tolist() == segments
        for part in (ids[1 : middle - 1].tolist(), ids[middle : length - 1].tolist()):
            assert part
            assert any(text[i : i + len(part)] == part for i in range(len(text)))


MLM = Data(objective="mlm")
CAUSAL = Data(
    objective="causal", eval_sequence_length=LENGTH, eval_max_predictions_per_seq=LENGTH - 1
)
APART = dataclasses.replace(CAUSAL, attention="per_document")
KINDS = {
    "piece": Data(),
    "whole word": Data(masking="whole_word"),
    "span": Data(masking="span"),
    "order": Data(objective="mlm_sop"),
    "sentences": MLM,
    "span apart": Data(objective="mlm", masking="span", attention="per_document"),
    "causal": CAUSAL,
    "causal apart": APART,
}


@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
def test_a_row_depends_on_its_number_alone(data):
    """Not on which rows are asked for with it, on the batch size, or on what was asked before."""
    train, halves, rng = make(64, data=data), make(32, data=data), np.random.default_rng(0)
    for step in (7, 0, 1):
        full = whole(train, step, 64)
        # A TPU host's rows need not be one range, nor in order.
        parts = [*np.split(np.arange(64), 4), [5], rng.permutation(64)[:5], rng.permutation(64)]
        for part in parts:
            assert_identical(train.batch(step, np.asarray(part)), take(full, part))
        for half in (0, 1):
            part = take(full, np.arange(32 * half, 32 * half + 32))
            assert_identical(whole(halves, 2 * step + half, 32), part)


def planned_rows(train, epoch):
    """The epoch's rows as they are planned, in their order."""
    chunks = train.plans.wait(epoch)
    counter = draws.CounterDraws(
        draws.key_of(*train.plans.spec.key_parts, epoch), chunks["sentence"]
    )
    slots = np.arange(train.rows_per_epoch) % len(chunks)
    return pairs.rows(train.plans.stream, chunks, counter)[slots]


def test_each_epoch_takes_as_many_rows_as_the_first():
    train = make()
    seen = {train.rows_planned(epoch) for epoch in range(12)}
    # Plans are longer and shorter than the first: both ways are tried here.
    assert min(seen) < train.rows_per_epoch < max(seen)
    assert train.rows_per_epoch == train.rows_planned(0) == len(plan_rows())
    for epoch in range(12):
        rows, plan = planned_rows(train, epoch).tolist(), plan_rows((0, "train", 0, epoch))
        assert set(rows) <= set(plan.tolist())
        assert rows[:9] != plan[:9].tolist()
        labels = whole(make(len(rows)), epoch, len(rows))["next_sentence_labels"]
        assert labels.tolist() == [row[-1] for row in rows]
        if len(plan) < len(rows):  # wraps to its own start
            assert rows[len(plan) :] == rows[: len(rows) - len(plan)]


def test_phases_seeds_and_epochs_differ():
    sources = [make(50, rows=50), make(50, rows=50, phase=1), make(50, rows=50, seed=1)]
    made = [whole(source, epoch, 50) for source in sources for epoch in range(4)]
    assert len({batch["input_ids"].tobytes() for batch in made}) == 12


def assert_same_examples(a, b):
    """All but the rows' numbers, which dropout is drawn from."""
    assert_identical({**a, "rows": 0}, {**b, "rows": 0})


@pytest.mark.parametrize("masking", ["piece", "whole_word", "span"])
def test_static_masks_come_back_after_dupe_factor_epochs(masking):
    train = make(50, rows=50, data=Data(dupe_factor=3, masking=masking))
    dynamic = make(50, rows=50, data=Data(masking=masking))
    epochs = [whole(train, epoch, 50) for epoch in range(8)]
    for epoch in range(5):
        assert_same_examples(epochs[epoch], epochs[epoch + 3])
    for epoch in range(4):  # the first passes are those of dynamic ones
        is_same = (epochs[epoch]["input_ids"] == whole(dynamic, epoch, 50)["input_ids"]).all()
        assert is_same == (epoch < 3)
    assert len({batch["rows"].tobytes() for batch in epochs}) == 8
    assert [train.rows_planned(e) for e in range(3)] == [train.rows_planned(e) for e in (3, 4, 5)]


def test_a_batch_may_cross_the_end_of_an_epoch_and_be_larger_than_an_epoch():
    batch, one = whole(make(64, rows=20), 1, 64), make(1, rows=20)
    for i in range(64):
        assert_identical(one.batch(64 + i, np.array([0])), take(batch, [i]))


def test_whole_word_masks_keep_words_together():
    train = make(64, data=Data(masking="whole_word"))
    batch = whole(train, 0, 64)
    original = batch["input_ids"].copy()
    for row, n in enumerate(batch["masked_lm_weights"].sum(axis=1).astype(int)):
        positions = batch["masked_lm_positions"][row, :n]
        original[row, positions] = batch["masked_lm_ids"][row, :n]
        for position in positions.tolist():
            after = position + 1
            if original[row, after] not in (2, 3) and CONTINUES[original[row, after]]:
                assert after in positions
    assert batch["masked_lm_weights"].any()


# --- Rows of full sentences ---


def test_rows_of_sentences_hold_every_sentence_once_an_epoch():
    train = make(16, data=MLM)
    rows = train.rows_per_epoch
    parts = [whole(train, step, 16) for step in range(-(-rows // 16))]
    epoch = {n: np.concatenate([part[n] for part in parts])[:rows] for n in parts[0]}
    assert "next_sentence_labels" not in epoch and not epoch["segment_ids"].any()
    ids, weights = epoch["input_ids"].copy(), epoch["masked_lm_weights"] > 0
    row, _ = np.nonzero(weights)
    ids[row, epoch["masked_lm_positions"][weights]] = epoch["masked_lm_ids"][weights]
    assert (ids[:, 0] == IDS.cls).all()
    length = epoch["input_mask"].sum(axis=1)
    assert (ids[np.arange(rows), length - 1] == IDS.sep).all()
    # No sentence is cut, as all are shorter than a row; ids up to that of [MASK] are no words.
    assert np.sort(ids[ids > IDS.mask]).tolist() == np.sort(np.asarray(SMALL.ids)).tolist()
    expected = np.maximum(1, np.rint(length * 0.15)).tolist()
    assert epoch["masked_lm_weights"].sum(axis=1).tolist() == expected


def test_per_document_attention_numbers_the_documents_of_a_row():
    """The rest of the batch is the same; a document ends with its [SEP]."""
    whole_row = whole(make(16, data=MLM), 2, 16)
    apart = whole(make(16, data=Data(objective="mlm", attention="per_document")), 2, 16)
    numbers, positions = apart.pop("example_numbers"), apart.pop("positions")  # of documents
    assert_identical(apart, whole_row)
    np.testing.assert_array_equal(numbers > 0, apart["input_mask"] > 0)
    ended = np.cumsum(apart["input_ids"] == IDS.sep, axis=1) - (apart["input_ids"] == IDS.sep)
    np.testing.assert_array_equal(numbers, (ended + 1) * apart["input_mask"])
    assert numbers.max() > 1
    for row in range(16):
        for number in range(1, numbers[row].max() + 1):
            here = positions[row][numbers[row] == number]
            np.testing.assert_array_equal(here, np.arange(len(here)))


@pytest.mark.parametrize("data", [CAUSAL, APART], ids=["whole row", "apart"])
def test_every_next_piece_is_predicted_and_nothing_is_masked(data):
    """Where documents are apart, all but the first piece of each."""
    batch, masked = whole(make(64, data=data), 1, 64), whole(make(64, data=MLM), 1, 64)
    plain = masked["input_ids"].copy()
    row, place = np.nonzero(masked["masked_lm_weights"])
    plain[row, masked["masked_lm_positions"][row, place]] = masked["masked_lm_ids"][row, place]
    np.testing.assert_array_equal(batch["input_ids"], plain)
    borders = 0
    for i, ids in enumerate(plain.tolist()):
        real = int(batch["input_mask"][i].sum())
        borders += ids[: real - 1].count(IDS.sep)
        expected = [
            (at, ids[at + 1])
            for at in range(real - 1)
            if data.attention == "whole_row" or ids[at] != IDS.sep
        ]
        there = batch["masked_lm_weights"][i] > 0
        places = batch["masked_lm_positions"][i][there].tolist()
        assert list(zip(places, batch["masked_lm_ids"][i][there].tolist(), strict=True)) == expected
        assert not batch["masked_lm_positions"][i][~there].any()
    assert borders > 4, "at a border documents that are apart differ from those that are not"
    assert set(batch) - set(masked) == (
        set() if data.attention == "whole_row" else {"example_numbers", "positions"}
    )


# --- Held-out rows ---


def real_rows(found):
    """All rows of weight 1, one after another."""
    return {
        name: np.concatenate([b[name][b["row_weights"] == 1] for b in found]) for name in found[0]
    }


@pytest.mark.parametrize(
    "data",
    [EVAL, dataclasses.replace(EVAL, objective="mlm"), CAUSAL],
    ids=lambda data: data.objective,
)
def test_held_out_rows_are_the_same_at_every_batch_size(data):
    found, count = batches.eval_batches(SMALL, IDS, data, 1)
    expected = real_rows(found)
    for size in (7, 1000):
        found, real = batches.eval_batches(SMALL, IDS, data, size)
        assert real == count and all(len(batch["rows"]) == size for batch in found)
        assert_identical(real_rows(found), expected)
        # What fills up the last batch weighs nothing.
        last, filled = found[-1], (count - 1) % size + 1
        assert not last["row_weights"][filled:].any()
        assert not last["masked_lm_weights"][filled:].any()
    assert filled == count
    few = dataclasses.replace(data, eval_rows=5)
    found, count = batches.eval_batches(SMALL, IDS, few, 4)
    assert count == 5
    assert_identical(real_rows(found), take(expected, np.arange(5)))


def test_evaluation_rows_are_a_plan_in_a_random_order_of_documents():
    found, count = batches.eval_batches(SMALL, IDS, EVAL, 8)
    key_parts = (0, "validation", "eval", 0)
    key = draws.key_of(*key_parts)
    plan = pairs.sample(SMALL, LENGTH, EVAL.short_seq_prob, key, EVAL.eval_rows)
    in_order = plan_rows(key_parts)
    assert sorted(plan.tolist()) == sorted(in_order.tolist())
    assert plan.tolist() != in_order.tolist()
    rows = real_rows(found)
    assert count == len(plan)
    assert rows["rows"].tolist() == list(range(count))
    assert rows["next_sentence_labels"].tolist() == plan["is_random_next"].astype(int).tolist()
    cut = pairs.truncate(plan, LENGTH, draws.CounterDraws((0, 0), np.arange(count)))
    lengths = cut.a_length + cut.b_length + 3
    assert rows["input_mask"].sum(axis=1).tolist() == lengths.tolist()


def test_evaluation_rows_are_masked_alike_whatever_is_trained_with():
    other = dataclasses.replace(
        EVAL,
        masked_lm_prob=0.4,
        final_masked_lm_prob=0.2,
        mask_share=1.0,
        random_share=0.0,
        masking="span",
    )
    found = batches.eval_batches(SMALL, IDS, other, 8)[0]
    for one, expected in zip(found, batches.eval_batches(SMALL, IDS, EVAL, 8)[0], strict=True):
        assert_identical(one, expected)


def test_the_share_of_masked_tokens_changes_linearly_over_the_run():
    data = Data(masked_lm_prob=0.151, final_masked_lm_prob=0.052)
    # The second phase of a run of 11 steps, from its sixth on.
    train = make(64, phase=1, data=data, first_step=5, total_steps=11)
    for step in (0, 3, 5):
        found, share = whole(train, step, 64), 0.151 - 0.0099 * (5 + step)
        length = found["input_mask"].sum(axis=1)
        expected = np.maximum(1, np.rint(length * share))
        assert found["masked_lm_weights"].sum(axis=1).tolist() == expected.tolist()
