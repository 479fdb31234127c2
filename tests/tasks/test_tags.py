"""Words to rows and back: no word without its tag, however long the sentence."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kinds import TOKENIZER, WORDS, ids, tagged, task

from bert_jax.tasks.labels import TagKind

LABELS = ("B-X", "I-X", "O")
# Of one piece, of two, of three, unknown, and of none.
words = st.sampled_from(["wa", "until", "untils", "zzz", "\u200b", "\u65e5\u672c"])
sentences = st.lists(st.tuples(words, st.sampled_from(LABELS)), min_size=1, max_size=30)


def kind(room, **settings):
    return TagKind(task("tag", max_sequence_length=room + 2, **settings), LABELS, TOKENIZER)


def oracle(rows):
    """Scores that say each row's targets where they count, and nonsense elsewhere."""
    rng = np.random.default_rng(0)
    found = []
    for tags, weights in zip(*rows.token_arrays.values(), strict=True):
        logits = rng.normal(size=(len(tags), len(LABELS))).astype(np.float32)
        logits[weights > 0] = np.eye(len(LABELS))[tags[weights > 0]]
        found.append(logits)
    return found


def test_the_first_piece_of_a_word_carries_its_tag():
    rows = kind(20).rows([tagged(["untils", "wa", "\u200b", "zzz"], ["B-X", "I-X", "O", "B-X"])])
    assert rows.ids[0].tolist() == ids("[CLS] un ##til ##s wa [UNK] [UNK] [SEP]")
    assert rows.token_arrays["target_weights"][0].tolist() == [0, 1, 0, 0, 1, 1, 1, 0]
    assert rows.token_arrays["targets"][0].tolist() == [0, 0, 0, 0, 1, 2, 0, 0]
    assert rows.first_lengths.tolist() == [8]


def test_a_long_sentence_goes_on_in_another_row_and_a_word_longer_than_a_row_is_cut():
    """No other word is cut in two."""
    long = ["wa"] * 5 + ["until", "wb"]
    rows = kind(6).rows([tagged(long), tagged(["wc"]), tagged(["wa", ".........", "wb"])])
    assert [row.tolist() for row in rows.ids] == [
        ids("[CLS] wa wa wa wa wa [SEP]"),
        ids("[CLS] un ##til wb [SEP]"),
        ids("[CLS] wc [SEP]"),
        ids("[CLS] wa [SEP]"),
        ids("[CLS] . . . . . . [SEP]"),
        ids("[CLS] wb [SEP]"),
    ]
    assert [note[0] for note in rows.origins] == [0, 0, 1, 2, 2, 2]


@given(st.lists(sentences, min_size=1, max_size=3), st.integers(6, 20))
def test_answers_invert_rows(given_sentences, room):
    examples = [tagged(*zip(*pairs, strict=True)) for pairs in given_sentences]
    tags = kind(room)
    rows = tags.rows(examples)
    assert max(rows.lengths) <= room + 2
    assert sum(w.sum() for w in rows.token_arrays["target_weights"]) == sum(
        len(e.words) for e in examples
    )
    outputs = oracle(rows)
    for answer, example in zip(tags.answers(outputs, rows, examples), examples, strict=True):
        assert answer == {"words": list(example.words), "tags": list(example.tags)}
    found = tags.scores(outputs, rows, examples)
    assert found["accuracy"] == 1.0
    entities = any(tag != "O" for e in examples for tag in e.tags)
    assert found["entity_f1"] == float(entities) or not entities


def test_a_wrong_tag_costs_its_word():
    examples = [tagged(WORDS[:4], ["O", "B-X", "I-X", "O"])]
    tags = kind(20)
    rows = tags.rows(examples)
    outputs = oracle(rows)
    outputs[0][3] = [0, 0, 5]  # the third word, after [CLS]
    assert tags.scores(outputs, rows, examples) == {"accuracy": 0.75, "entity_f1": 0.0}


def test_entities_are_scored_only_if_they_are_the_score():
    examples = [tagged(["wa", "wb"], ["O", "B-X"])]
    tags = kind(20, score="accuracy")
    rows = tags.rows(examples)
    assert tags.scores(oracle(rows), rows, examples) == {"accuracy": 1.0}
    # Without tags there are answers all the same.
    outputs = [np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]]
    (answer,) = tags.answers(outputs, tags.rows([tagged(["wa", "wb"])]), [tagged(["wa", "wb"])])
    assert answer == {"words": ["wa", "wb"], "tags": ["I-X", "O"]}
