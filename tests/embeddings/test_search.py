"""The nearest texts: exact, and each text is embedded once."""

import hashlib
import json
import types

import broken
import numpy as np
import pytest
from scipy.sparse import csr_array

from bert_jax.checkpoints.base import TextVectors
from bert_jax.embeddings import search
from bert_jax.embeddings.embed import Embedded, VectorOptions
from bert_jax.embeddings.forms import FORMS, TokenVectors
from bert_jax.errors import InputError

MODEL = types.SimpleNamespace(
    model="m",
    tokenizer=types.SimpleNamespace(sha256="t"),
    params={"a": np.ones(3, np.float32)},
    vectors=None,
)


class Letters:
    """An embedder of letters counted, of length 1; remembers what it was given."""

    width, max_length, features, truncated_texts = 26, 9, VectorOptions(normalize=True), 0
    form, form_name, settings = FORMS["dense"], "dense", TextVectors()

    def __init__(self):
        self.given, self.roles = [], []

    def split_text(self, text):
        return text.split("|")

    def embed(self, texts, role="document"):
        return self.embed_lines(enumerate(texts), role)

    def embed_lines(self, lines, role="document"):
        for _, text in lines:
            assert role in ("document", "query")
            self.given.append(text)
            self.roles.append(role)
            counts = np.array([text.count(chr(97 + i)) for i in range(26)], np.float32)
            yield Embedded(self.shape(counts / np.linalg.norm(counts)), None, np.ones(1))

    def shape(self, vector):
        return vector[None]


class SparseLetters(Letters):
    """The same as sparse vectors."""

    form, form_name = FORMS["sparse"], "sparse"

    def shape(self, vector):
        return csr_array(vector[None])


class TokenLetters(Letters):
    """A vector for each different letter, whose lengths are the counts."""

    form, form_name = FORMS["multi_vector"], "multi_vector"

    def shape(self, vector):
        (found,) = np.nonzero(vector)
        return TokenVectors(np.diag(vector)[found], np.array([len(found)]))


def index_of(tmp_path, embedder, model=MODEL, cut="beginning", path=None):
    path = (path or tmp_path) / "texts.txt"
    return search.Index(str(path), tmp_path / "vectors", model, embedder, lambda line: None, cut)


def write(tmp_path, *lines):
    (tmp_path / "texts.txt").write_text("".join(f"{line}\n" for line in lines))


def test_what_is_new_alone_is_embedded_and_a_text_that_went_is_not_found(tmp_path):
    write(tmp_path, "abc", "", "xyz", "abc", "aab")
    first, later = Letters(), Letters()
    (answers,) = index_of(tmp_path, first).nearest(["ab"], 9)
    assert first.given == ["abc", "xyz", "aab", "ab"]
    assert first.roles == ["document", "document", "document", "query"]
    assert [(answer.line, answer.text) for answer in answers] == [
        (5, "aab"),
        (1, "abc"),
        (3, "xyz"),
    ]
    np.testing.assert_allclose([a.score for a in answers], [0.9486833, 0.8164966, 0], rtol=1e-6)
    write(tmp_path, "zz", "aab", "xyz")
    (answers,) = index_of(tmp_path, later).nearest(["ab"], 9)
    assert later.given == ["zz", "ab"]
    assert [answer.line for answer in answers] == [2, 1, 3]


def test_each_passage_of_a_text_is_a_text(tmp_path):
    write(tmp_path, "aab|xyz", "abc", "xyz")
    first, later = Letters(), Letters()
    (answers,) = index_of(tmp_path, first, cut="passages").nearest(["ab"], 9)
    assert [(answer.line, answer.text) for answer in answers] == [
        (1, "aab"),
        (2, "abc"),
        (1, "xyz"),
    ]
    # Vectors of both ways lie in one folder, by their texts.
    (answers,) = index_of(tmp_path, later).nearest(["ab"], 9)
    assert later.given == ["aab|xyz", "ab"]
    assert [answer.line for answer in answers] == [2, 1, 3]


@pytest.mark.parametrize(
    ("embedder", "name", "left"),
    [
        (Letters, "keys", 20),
        (Letters, "vectors", 26 * 4 + 3),
        (Letters, "keys", 0),
        (SparseLetters, "keys", 20),
        (SparseLetters, "ends", 15),
        (SparseLetters, "vectors", 3 * 8 + 3),
        (TokenLetters, "vectors", 5 * 26 * 4 + 3),
        (TokenLetters, "keys", 0),
    ],
)
def test_what_a_kill_cut_off_is_embedded_again(embedder, name, left, tmp_path):
    write(tmp_path, "abc", "xyz", "aab")
    expected = index_of(tmp_path, embedder()).nearest(["ab"], 3)
    with (tmp_path / "vectors" / name).open("r+b") as file:
        file.truncate(left)
    again = embedder()
    assert index_of(tmp_path, again).nearest(["ab"], 3) == expected
    assert again.given[:-1] == ["abc", "xyz", "aab"][bool(left) :]


@pytest.mark.parametrize("embedder", [SparseLetters, TokenLetters])
def test_other_forms_find_what_dense_vectors_find(embedder, tmp_path):
    """Texts without equal letters share no token, so that each form has the same scores."""
    write(tmp_path, "abc", "xyz", "aab", "m")
    found = index_of(tmp_path, embedder()).nearest(["ab", "zm"], 9)
    expected = index_of(tmp_path / "dense", Letters(), path=tmp_path).nearest(["ab", "zm"], 9)
    for ours, theirs in zip(found, expected, strict=True):
        assert [hit.line for hit in ours] == [hit.line for hit in theirs]
        scores = [[hit.score for hit in hits] for hits in (ours, theirs)]
        np.testing.assert_allclose(*scores, rtol=1e-6)


@pytest.mark.parametrize("embedder", [Letters, SparseLetters, TokenLetters])
def test_a_file_of_one_text_is_searched(embedder, tmp_path):
    write(tmp_path, "abc")
    index = index_of(tmp_path, embedder())
    assert [[hit.line for hit in hits] for hits in index.nearest(["ab"], 9)] == [[1]]


@pytest.mark.parametrize(
    ("embedder", "offset"),
    [(Letters, 26 * 4), (SparseLetters, 3 * 8 + 4), (TokenLetters, 3 * 26 * 4)],
)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_the_row_of_a_stored_number_that_is_not_finite_is_named(
    embedder, offset, number, tmp_path, monkeypatch
):
    """Row 1 is the vector of "adz"; the file has its texts in another order now."""
    monkeypatch.setattr(embedder.form, "block_texts", 1)
    write(tmp_path, "abc", "adz")
    index_of(tmp_path, embedder())
    with (tmp_path / "vectors" / "vectors").open("r+b") as file:
        file.seek(offset)
        file.write(np.float32(number).tobytes())
    write(tmp_path, "abc", "xyz", "adz")
    with pytest.raises(InputError, match=r"vectors/vectors: row 1 .*not finite"):
        index_of(tmp_path, embedder()).nearest(["ab"], 9)


def test_vectors_of_another_encoder_or_way_are_not_mixed(tmp_path):
    write(tmp_path, "abc")
    index_of(tmp_path, Letters())
    features = VectorOptions(pooling="cls", normalize=True)
    layer = TextVectors(dense_width=26)  # after the pooling
    for name, value in (("features", features), ("max_length", 7), ("settings", layer)):
        otherwise = Letters()
        setattr(otherwise, name, value)
        with pytest.raises(InputError, match=r"made\.json"):
            index_of(tmp_path, otherwise)
    zeros, led = {"a": np.zeros(3, np.float32)}, TextVectors(text_prefix="passage: ")
    for change in ({"params": zeros}, {"vectors": led}):
        other = types.SimpleNamespace(**vars(MODEL) | change)
        with pytest.raises(InputError, match=r"made\.json"):
            index_of(tmp_path, Letters(), other)
    # What stands before questions alone changes no text's vector.
    other.vectors = TextVectors(query_prefix="query: ")
    index_of(tmp_path, Letters(), other)
    (tmp_path / "vectors" / "made.json").unlink()
    with pytest.raises(InputError, match=r"made\.json"):
        index_of(tmp_path, Letters(), other)


@pytest.mark.parametrize("now", [("new", "also new"), ("xyz", "abc")])
def test_a_file_that_changes_meanwhile_is_named(now, tmp_path):
    write(tmp_path, "abc", "xyz")
    index = index_of(tmp_path, Letters())
    write(tmp_path, *now)
    with pytest.raises(InputError, match=r"texts\.txt"):
        index.nearest(["ab"], 1)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_texts_is_named_and_leaves_nothing(content, tmp_path):
    (tmp_path / "texts.txt").write_text(content)
    with pytest.raises(InputError, match=r"texts\.txt"):
        index_of(tmp_path, Letters())
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]


@pytest.mark.long
def test_a_run_is_asked(copy_of_run):
    (copy_of_run / "t.txt").write_text("We the people\nof the United States\n")
    (copy_of_run / "q.txt").write_text("the people\nStates\n")
    search = "search --workdir run t.txt"
    said = broken.said(f"{search} 'We the people' --top 1")
    assert "embedding 2 of 2 texts" in said and "1.000  line 1: We the people" in said
    assert "embedding" not in broken.said(f"{search} --queries q.txt --out near.jsonl --top 5")
    answers = [json.loads(line) for line in (copy_of_run / "near.jsonl").read_text().splitlines()]
    assert [answer["query"] for answer in answers] == ["the people", "States"]
    assert all({near["line"] for near in it["nearest"]} == {1, 2} for it in answers)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--top", "0", "a"],
        ["--queries", "q.txt"],
        ["--out", "o"],
        ["a", "--queries", "q", "--out", "o"],
    ],
)
def test_flags_that_do_not_go_together_are_refused(wrong, copy_of_run):
    (copy_of_run / "t.txt").write_text("a\n")
    broken.fails(["search", "--workdir", "run", "t.txt", *wrong])


def test_vectors_of_former_versions_are_used_again():
    """The text that was hashed before `Features.length` became `VectorOptions.normalize`."""
    features = "Features(pooling=None, layers=(-1,), combine='concat', length='unit', dimensions=0)"
    digest = hashlib.sha256(f"{MODEL.model}/{MODEL.tokenizer.sha256}/{features}/9".encode())
    for name, values in sorted(search.flatten(MODEL.params).items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values).data)
    assert search._fingerprint(MODEL, Letters()) == digest.hexdigest()
