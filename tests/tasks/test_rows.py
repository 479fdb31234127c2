"""Batches of examples: functions of seed and step, whichever rows are asked for."""

import itertools
import pathlib
import pickle

import numpy as np
import pytest
import tokenizers
from compare import assert_identical
from hypothesis import given
from hypothesis import strategies as st
from kinds import TOKENIZER, ids, sentence, task

from bert_jax.tasks.labels import ChoiceKind, RegressionKind, SentenceKind
from bert_jax.tasks.rows import TaskBatches, TaskRows, eval_batches
from bert_jax.text.library import LibraryTokenizer

LIMIT = 100
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def rows_of(lengths, together=1):
    """Row i holds i + 10, `lengths[i]` times; half of it, rounded up, is of segment 0."""
    found = [np.full(n, i + 10, np.int32) for i, n in enumerate(lengths)]
    first = np.array([(n + 1) // 2 for n in lengths], np.int32)
    targets = np.repeat(np.arange(len(lengths) // together, dtype=np.int32), together)
    tokens = {"target_weights": [np.full(n, 0.5, np.float32) for n in lengths]}
    return TaskRows(found, LIMIT, first, {"targets": targets}, tokens, (), together)


def whole(batches, step, count):
    return batches.batch(step, np.arange(count))


def test_a_batch_by_hand():
    batch = rows_of([3, 5, 4]).batch(np.array([2, 0]), 5, 7)
    np.testing.assert_array_equal(batch["input_ids"], [[12, 12, 12, 12, 7], [10, 10, 10, 7, 7]])
    np.testing.assert_array_equal(batch["input_mask"], [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(batch["segment_ids"], [[0, 0, 1, 1, 0], [0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(batch["targets"], [2, 0])
    halves = [[0.5, 0.5, 0.5, 0.5, 0], [0.5, 0.5, 0.5, 0, 0]]
    np.testing.assert_array_equal(batch["target_weights"], halves)
    assert {str(v.dtype) for v in batch.values()} == {"int32", "float32"}


def test_rows_are_padded_in_steps_and_never_beyond_the_limit():
    for longest, padded in ((1, 32), (32, 32), (33, 64), (97, 100)):
        assert rows_of([longest, 1]).padded_length(np.array([1, 0])) == padded


@given(
    total=st.integers(1, 12),
    examples=st.integers(1, 9),
    together=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_example_comes_once_an_epoch(total, examples, together, seed):
    """Batches one after the other are epochs one after the other, each in another order."""
    rows = rows_of([3] * total * together, together)
    batches = TaskBatches(rows, 0, examples, seed)
    steps = -(-3 * total // examples)
    size = examples * together
    seen = np.concatenate([whole(batches, step, size)["input_ids"][:, 0] for step in range(steps)])
    numbers = (seen - 10).reshape(-1, together)
    # Rows of one example stay together, in their order.
    np.testing.assert_array_equal(
        numbers % together, np.tile(np.arange(together), (len(numbers), 1))
    )
    order = numbers[:, 0] // together
    for epoch in range(3):
        assert sorted(order[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_epochs_and_seeds_have_their_own_orders():
    def order(seed, epoch):
        batches = TaskBatches(rows_of([3] * 50), 0, 50, seed)
        return whole(batches, epoch, 50)["targets"].tolist()

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(o) for o in orders}) == 4
    assert list(range(50)) not in orders


@given(data=st.data())
def test_any_rows_of_a_step_are_those_of_the_whole_batch(data):
    """Processes make their own rows, at any step, in any order: also how far they are padded."""
    together = data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.integers(1, LIMIT), min_size=3, max_size=8)) * together
    examples = data.draw(st.integers(1, 7))
    size = examples * together
    made = TaskBatches(rows_of(lengths, together), 0, examples, 5)
    steps = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    for step in steps:
        fresh = whole(TaskBatches(rows_of(lengths, together), 0, examples, 5), step, size)
        indices = np.array(data.draw(st.permutations(range(size))))
        indices = indices[: data.draw(st.integers(1, size))]
        part = pickle.loads(pickle.dumps(made)).batch(step, indices)
        assert_identical(part, {name: values[indices] for name, values in fresh.items()})
        assert_identical(made.batch(step, indices), part)


def test_rows_are_numbered_through_the_run():
    """Dropout is a function of the number."""
    batches = TaskBatches(rows_of([3] * 4, 2), 0, 3, 0)
    assert whole(batches, 0, 6)["rows"].tolist() == [0, 1, 2, 3, 4, 5]
    assert batches.batch(2, np.array([4, 1]))["rows"].tolist() == [16, 13]
    assert whole(batches, 0, 6)["row_weights"].tolist() == [1.0] * 6


@given(
    lengths=st.lists(st.integers(1, LIMIT), min_size=1, max_size=12),
    together=st.integers(1, 3),
    examples=st.integers(1, 5),
)
def test_evaluation_reads_every_row_once(lengths, together, examples):
    lengths = [n for n in lengths for _ in range(together)]
    rows = rows_of(lengths, together)
    size = examples * together
    found = eval_batches(rows, 0, size)
    assert sorted(np.concatenate([which for which, _ in found])) == list(range(len(lengths)))
    for which, batch in found:
        assert {len(values) for values in batch.values()} == {size}
        real = len(which)
        assert batch["row_weights"].tolist() == [1.0] * real + [0.0] * (size - real)
        assert batch["input_ids"][:real, 0].tolist() == [i + 10 for i in which]
        # Rows of an example stay together.
        starts = which.reshape(-1, together)
        np.testing.assert_array_equal(
            starts - starts[:, :1], np.arange(together)[None] + 0 * starts
        )
        assert (starts[:, 0] % together == 0).all()
        assert batch["input_ids"].shape[1] == rows.padded_length(which)


# Of create_pretraining_data.truncate_seq_pair: the longer loses its last piece, of equals the
# second, until both fit. (pieces of A, of B, room) to what is left.
@pytest.mark.parametrize(
    ("a", "b", "room", "left"),
    [(5, 3, 5, (3, 2)), (3, 3, 5, (3, 2)), (2, 9, 5, (2, 3)), (9, 1, 5, (4, 1)), (9, 9, 6, (3, 3))],
)
def test_pairs_are_cut_as_the_reference_cuts_them(a, b, room, left):
    kind = SentenceKind(task("pair", max_sequence_length=room + 3), ("0", "1"), TOKENIZER)
    first, second = [f"w{chr(97 + i)}" for i in range(a)], [f"w{chr(107 + i)}" for i in range(b)]
    rows = kind.rows([sentence(" ".join(first), " ".join(second), label="1")])
    expected = ["[CLS]", *first[: left[0]], "[SEP]", *second[: left[1]], "[SEP]"]
    assert rows.ids[0].tolist() == ids(" ".join(expected))
    assert rows.first_lengths.tolist() == [left[0] + 2]
    assert rows.row_arrays["targets"].tolist() == [1]


def test_pairs_are_cut_as_the_library_cuts_them():
    content = (GOLDEN / "tokenizers" / "roberta.json").read_bytes()
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    ours, theirs = (
        LibraryTokenizer(content, named, "roberta"),
        tokenizers.Tokenizer.from_buffer(content),
    )
    for a, b, limit in itertools.product(range(1, 9), range(1, 9), (9, 10)):
        first, second = " ".join("a" * a), " ".join("b" * b)
        pair = task("pair", max_sequence_length=limit)
        kind = SentenceKind(pair, ("0", "1"), ours)
        theirs.enable_truncation(limit, strategy="longest_first")
        (row,) = kind.rows([sentence(first, second, label="1")]).ids
        assert row.tolist() == theirs.encode(first, second).ids


def test_one_text_is_cut_at_its_end():
    kind = SentenceKind(task("classify", max_sequence_length=8), ("0", "1"), TOKENIZER)
    rows = kind.rows([sentence(" ".join(["until"] * 5), label="0"), sentence("wa", label="1")])
    assert rows.ids[0].tolist() == ids("[CLS] un ##til un ##til un ##til [SEP]")
    assert rows.ids[1].tolist() == ids("[CLS] wa [SEP]")
    assert rows.first_lengths.tolist() == [8, 3]


def test_of_a_choice_each_text_is_read_with_the_first():
    kind = ChoiceKind(task("choice"), ("0", "1"), TOKENIZER)
    rows = kind.rows(
        [sentence("wa", "wb", "wc wd", label="1"), sentence("wa", "we", "", label="0")]
    )
    assert [row.tolist() for row in rows.ids] == [
        ids("[CLS] wa [SEP] wb [SEP]"),
        ids("[CLS] wa [SEP] wc wd [SEP]"),
        ids("[CLS] wa [SEP] we [SEP]"),
        ids("[CLS] wa [SEP] [SEP]"),
    ]
    assert rows.rows_per_example == 2 and rows.row_arrays["targets"].tolist() == [1, 1, 0, 0]


def test_answers_of_texts_are_softmaxes_by_label():
    kind = SentenceKind(task("classify"), ("no", "yes"), TOKENIZER)
    examples = [sentence("wa"), sentence("wb")]
    rows = kind.rows(examples)
    assert rows.row_arrays == {}
    outputs = [np.array([0.0, np.log(3.0)], np.float32), np.array([1000.0, 0.0], np.float32)]
    first, second = kind.answers(outputs, rows, examples)
    assert first["label"] == "yes" and second["label"] == "no"
    assert first["probabilities"] == pytest.approx({"no": 0.25, "yes": 0.75})
    assert second["probabilities"] == pytest.approx({"no": 1.0, "yes": 0.0})


def test_answers_of_choices_and_regressions():
    choice = ChoiceKind(task("choice"), ("0", "1"), TOKENIZER)
    examples = [sentence("wa", "wb", "wc", label="1"), sentence("wa", "wb", "wc", label="1")]
    rows = choice.rows(examples)
    outputs = [np.array([x], np.float32) for x in (0.0, 1.0, 5.0, 4.0)]
    assert [a["label"] for a in choice.answers(outputs, rows, examples)] == ["1", "0"]
    assert choice.scores(outputs, rows, examples) == {"accuracy": 0.5}
    regress = RegressionKind(task("regress"), (), TOKENIZER)
    examples = [sentence("wa", "wb", label=x) for x in (1.0, 2.0, 4.0)]
    rows = regress.rows(examples)
    outputs = [np.array([x], np.float32) for x in (-1.0, 0.0, 2.0)]
    assert regress.answers(outputs, rows, examples)[0] == {"value": -1.0}
    assert regress.scores(outputs, rows, examples) == pytest.approx({"spearman": 1, "pearson": 1})


def test_scores_of_labels_have_f1_of_two_alone():
    for labels in (("a", "b"), ("a", "b", "c")):
        kind = SentenceKind(task("classify", labels=labels), labels, TOKENIZER)
        examples = [sentence("wa", label=label) for label in labels]
        outputs = list(np.eye(len(labels), dtype=np.float32))
        found = kind.scores(outputs, kind.rows(examples), examples)
        assert ("f1" in found) == (len(labels) == 2) and set(found.values()) == {1.0}


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (
            ("tsv:glue/dev_matched.tsv", "csv:dev_mismatched.csv.gz"),
            ("dev_matched", "dev_mismatched"),
        ),
        (("tfds:glue/mnli:validation_matched", "tsv:x"), ("validation_matched", "x")),
        # Equal names: whole sources, wherever a folder lies.
        (
            ("tsv:/here/./a/dev.tsv", "tsv:/here/./b/dev.tsv"),
            ("tsv:./a/dev.tsv", "tsv:./b/dev.tsv"),
        ),
        (("tsv:only.tsv",), ()),
    ],
)
def test_the_examples_of_each_source_are_a_part_with_its_rows(sources, names):
    kind = ChoiceKind(task("choice"), ("0", "1"), TOKENIZER)
    examples = [sentence("wa", "wb", "wc", label="0") for _ in range(3 * len(sources))]
    parts = kind.split_by_source(examples, dict.fromkeys(sources, 3))
    assert tuple(part.name for part in parts) == names
    assert [part.first for part in parts] == [0, 6][: len(names)]
    assert all(len(part.rows.ids) == 6 and len(part.examples) == 3 for part in parts)
