"""Vocabularies cut to what a text uses, and with words more, of all forms that are read."""

import json

import forms
import pytest
import tokenizers
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.errors import InputError
from bert_jax.text import library
from bert_jax.text.tokenizer import WordPiece
from bert_jax.text.vocabulary_edits import add_words, count_changes, count_tokens, trim

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
LETTERS = [f"{before}{letter}" for before in ("", "##") for letter in "abehlnopst'"]
PIECES = [*SPECIALS, *LETTERS, "the", "##th", "people", "peo", "##ple", "##let", "on", "##on"]

FORMS = forms.OURS | {"wordpiece": WordPiece(PIECES, "uncased")}
each_form = pytest.mark.parametrize("name", FORMS)
words = st.sampled_from(["the", "people", "nation", "let", "then", "a", "o'er", "states", "not"])
words |= st.text(st.sampled_from("abehlnopst' \n,\u00e9\u4e2d\U0001f600"), max_size=5)
texts = st.lists(st.lists(words, max_size=8).map(" ".join), min_size=1, max_size=4)


def rows(tokenizer, texts):
    for text in texts:
        yield tokenizer.encode(text)
        yield tokenizer.encode_after_space(text)


def pieces(tokenizer, text):
    return [tokenizer.token(i) for i in tokenizer.encode(text)]


@each_form
@given(texts=texts)
def test_a_text_is_cut_as_before_by_what_it_uses(name, texts):
    old = FORMS[name]
    new, begins = trim(old, count_tokens(old, rows(old, texts)), 0, "--keep")
    assert new.size < old.size
    assert [new.token(i) for i in range(new.size)] == [old.token(i) for (i,) in begins]
    if name == "xlmr":  # what is unknown costs ten more than the worst piece
        least = [min(s for _, s in json.loads(t.content)["model"]["vocab"]) for t in (old, new)]
        assert least[0] == least[1]
    for text in texts:
        assert pieces(new, text) == pieces(old, text)
    assert count_changes(begins, rows(old, texts), rows(new, texts)) == (0, 2 * len(texts))
    for role in ("cls_id", "sep_id", "pad_id", "unk_id", "mask_id"):
        assert new.token(getattr(new, role)) == old.token(getattr(old, role))
    assert [new.token(i) for i in new.between_ids] == [old.token(i) for i in old.between_ids]


@each_form
def test_the_commonest_are_kept_with_what_makes_them(name):
    old = FORMS[name]
    text = "the people then let the people not be at the end of that nation on the hell"
    counted = count_tokens(old, rows(old, [text]))
    least = trim(old, 0 * counted, 0, "--keep")[0].size
    every = trim(old, counted, 0, "--keep")[0].size
    assert least + 10 < every
    for most in range(least, every, 3):
        new, begins = trim(old, counted, most, "--keep")
        assert new.size == most
        if name not in ("wordpiece", "xlmr"):  # these have all bytes
            assert new.unk_id not in new.encode(text)
        texts = [text, "the"]
        differ, count = count_changes(begins, rows(old, texts), rows(new, texts))
        assert 2 <= differ <= count == 4
    with pytest.raises(InputError, match="--keep 4"):
        trim(old, counted, 4, "--keep")


@each_form
def test_words_become_pieces_that_begin_as_what_stood_for_them(name, tmp_path):
    old, file = FORMS[name], tmp_path / "words.txt"
    file.write_text("\ufeffnonapostle\n\nhellenon\nthe\n", "utf-8")
    if name == "gemma":  # its merges run over whole texts
        with pytest.raises(InputError, match=r"^tokenizer\.json: no token can be added"):
            add_words(old, epath.Path(file))
        return
    new, begins, ids = add_words(old, epath.Path(file))
    count = len(ids)
    is_known = len(old.encode_after_space("the")) == 1
    assert count == 2 + (not is_known)
    slots = sum(piece.startswith("[unused") for piece in map(old.token, range(old.size)))
    assert new.size == old.size + max(count - slots, 0)
    for word in ("nonapostle", "hellenon"):
        (made,) = new.encode_after_space(word)
        assert made in ids
        assert begins[made] == tuple(old.encode_after_space(word)) and len(begins[made]) > 1
        before = new.encode(f"people {word}, let {word}s")
        assert before.count(made) >= 1
    for text in ("the people let then nation", "people non apostle's hello", "a  b\n\nc \u4e2d"):
        if is_known or "the" not in text:
            assert pieces(new, text) == pieces(old, text)
    shared = [i for i in range(min(old.size, new.size)) if begins[i] == (i,)]
    if name != "xlmr":  # whose mask stands behind its own pieces
        assert len(shared) >= old.size - min(slots, count)
    file.write_text("hellenon\ntwo words\n")
    with pytest.raises(InputError, match=r"words.txt:2: 'two words'"):
        add_words(old, epath.Path(file))


@pytest.mark.parametrize("name", forms.NAMED)
def test_the_library_reads_what_was_cut_with_the_same_ids(name, tmp_path):
    old = FORMS[name]
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": old.pad_id, "pad_type_id": 0, "pad_token": old.token(old.pad_id)}
    content = json.dumps(json.loads(old.content) | {"padding": padding}).encode()
    old = library.LibraryTokenizer(content, old.special_names, name)
    text = "the people, let them\n\nnot be [MASK] <mask> at  the end of that nation's hell"
    new, _ = trim(old, count_tokens(old, rows(old, [text])), 0, "--keep")
    new.save(epath.Path(tmp_path))
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.encode_special_tokens = True
    assert plain.padding["pad_id"] == new.pad_id
    found = plain.encode(text, "people").ids
    parts = [new.cls_id, *new.encode(text), *new.between_ids, *new.encode("people"), new.sep_id]
    if name != "xlmr":  # Unigram has the names of specials among its pieces
        assert found == parts
    special = {t["id"]: t["content"] for t in json.loads(new.content)["added_tokens"]}
    assert all(plain.id_to_token(i) == content for i, content in special.items())
    assert library.read(epath.Path(tmp_path / "tokenizer.json")).sha256 == new.sha256
