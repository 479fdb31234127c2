"""Words as numbers, and counted in files."""

import collections
import string

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from bert_jax.text import tokenizer, vocabulary, words

# Letters, marks, blanks and controls that decide where words end.
CHARACTERS = (
    string.ascii_letters[:6] + "É\u0301ßΣς中\u3000\xa0\u2028\u200d\ufffd\xad'.,-_#[]019 \t\r"
    "\x0b\x0c\x1c\x1d\x1e\x1f\x85\x00\x7f"
)


@hypothesis.given(
    strategies.lists(strategies.text(CHARACTERS, max_size=20), max_size=6),
    strategies.sampled_from(["cased", "uncased"]),
)
def test_many_sentences_are_cut_as_each_by_itself(sentences, case):
    different, indices = tokenizer.Splitter(case).split(sentences)
    expected = [[*tokenizer.basic_tokens(sentence, case), "\n"] for sentence in sentences]
    expected = [word for one in expected for word in one]
    assert [different[index] for index in indices] == expected
    assert different == [*dict.fromkeys(expected)]


def test_numbers_are_the_words_also_where_they_are_counted_in_several_goes(tmp_path, monkeypatch):
    sentences = [["the cat", "", "a dog and a cat"], ["the " + "x" * 201, "Dog é 中文"]]
    expected = [s for batch in sentences for s in batch if s]
    for held in (3, 1_000):
        monkeypatch.setattr(words, "_HELD", held)
        writer = words.NumberWriter(tmp_path, "uncased")
        lengths = np.concatenate([writer.add(batch) for batch in sentences])
        writer.close()
        assert lengths.tolist() == [2, 0, 5, 2, 4]
        listed = words.read_words(tmp_path / "words.txt")
        numbers = np.fromfile(tmp_path / "tokens.bin", np.uint32)
        assert [listed[n] for n in numbers] == [
            word if len(word) <= 200 else ""
            for sentence in expected
            for word in tokenizer.basic_tokens(sentence, "uncased")
        ]
        assert (len(writer.offsets) > 1) == (held == 3)
        counted = words.count([(tmp_path / "counts.json", writer.offsets)] * 2)
        found = dict(zip(counted.words, counted.counts, strict=True))
        assert found == {"the": 4, "cat": 4, "a": 4, "dog": 4, "and": 2, "e": 2, "中": 2, "文": 2}
        assert counted.distinct_words == 8
        assert counted.characters[ord("t")] == 8 and counted.characters[ord("x")] == 0
        assert ord("h") in counted.inner and ord("d") in counted.inner
        assert ord("中") not in counted.inner


def test_of_too_many_words_the_rarest_are_dropped_and_no_letter_is_favoured(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "MAX_TRAINING_WORDS", 100)
    names = [f"{a}{b}" for a in string.ascii_lowercase for b in string.ascii_lowercase]
    writer = words.NumberWriter(tmp_path, "uncased")
    writer.add([" ".join(names), " ".join(names[:20] * 2)])
    writer.close()
    counted = words.count([(tmp_path / "counts.json", writer.offsets)])
    assert counted.distinct_words == len(names) and len(counted.words) == 100
    assert set(names[:20]) <= set(counted.words)
    assert counted.words == sorted(counted.words)
    assert len({word[0] for word in counted.words}) > 20
    assert counted.characters[ord("z")] == 2 * 26  # of all words


def test_a_table_gives_the_ids_of_the_tokenizer():
    pieces = [*vocabulary.SPECIALS, "the", "do", "##g", "##gs", "a"]
    tok = tokenizer.WordPiece(pieces, "uncased")
    table = words.WordTable(["", "", "dogs", "the", "zebra", "a"], tok)
    ids, lengths = table.ids(np.array([3, 2, 1, 5, 4, 2], np.uint32), np.array([2, 1, 3]))
    assert ids.tolist() == [5, 6, 8, 1, 9, 1, 6, 8]
    assert lengths.tolist() == [3, 1, 4]


@pytest.mark.parametrize("case", ["cased", "uncased"])
def test_stretches_between_blanks_are_counted_for_sentencepiece(case, tmp_path):
    texts = ["A b, a b,\nA", "中" * 450, "", "文" * 4_500]
    offsets = words.write_counts(texts, case, tmp_path / "counts")
    counted = words.count([(tmp_path / "counts", offsets)])
    found = collections.Counter(dict(zip(counted.words, counted.counts, strict=True)))
    assert found.pop("中" * 200) == 2 and found.pop("中" * 50) == 1
    assert found.pop("文" * 200) == 20
    assert found == ({"A": 2, "a": 1, "b,": 2} if case == "cased" else {"a": 3, "b,": 2})
