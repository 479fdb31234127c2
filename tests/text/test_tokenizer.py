"""Text to ids, against the reference, another implementation, and itself."""

import collections
import io
import json
import os
import string
import sys
import unicodedata

import numpy as np
import plain
import pytest
import samples
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.errors import InputError
from bert_jax.text import library, tokenizer, vocabulary
from bert_jax.text.tokenizer_training import train_sentencepiece, train_wordpiece
from bert_jax.tools.conformance import golden

SAMPLE = golden.FOLDER / "sample_text.txt"
CASES = ("uncased", "cased")


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(golden.vocabulary()) + "\n")
    return path


@pytest.fixture(scope="module")
def bert(vocab_file):
    return {case: tokenizer.load(vocab_file, case) for case in CASES}


def too_new(char):
    """Whether the Unicode tables of this Python do not know the character."""
    return unicodedata.category(char) == "Cn"


# --- A second implementation, one character at a time ---


@pytest.mark.parametrize("case", CASES)
@given(text=st.text(st.characters(max_codepoint=127)) | st.text())
def test_words_of_any_text_are_those_of_the_plain_implementation(case, text):
    words = tokenizer.basic_tokens(text, case)
    assert words == plain.words(text, case)
    # An ideograph at the end sends ASCII, which has a shorter way, the general one.
    assert tokenizer.basic_tokens(text + " \u4e00", case) == [*words, "\u4e00"]


@pytest.mark.parametrize("case", CASES)
def test_every_character_is_taken_as_by_the_plain_implementation(case):
    # Between letters, so that a blank, a mark and nothing at all differ.
    chars = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    chars = [c for c in chars if ord(c) < 0x30000 and not too_new(c)]
    for start in range(0, len(chars), 997):
        text = " ".join(f"a{c}B" for c in chars[start : start + 997])
        assert tokenizer.basic_tokens(text, case) == plain.words(text, case)


# --- An implementation nobody here wrote ---

ALPHABET = (
    string.ascii_letters + string.digits + string.punctuation + " \n\t" + "éÅñüßø" + "中文日本"
)


@pytest.fixture(scope="module")
def other(bert):
    vocab = {piece: i for i, piece in enumerate(bert["uncased"].vocab)}
    made = tokenizers.BertWordPieceTokenizer(vocab, lowercase=True)
    # It has the specials recognised in text; ours, as the reference, does not.
    raw = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = made.normalizer, made.pre_tokenizer
    raw.model.max_input_chars_per_word = 200
    return raw


@given(text=st.text(ALPHABET, max_size=120))
def test_ids_equal_those_of_the_tokenizers_library(bert, other, text):
    assert bert["uncased"].encode(text) == other.encode(text, add_special_tokens=False).ids


# --- WordPiece ---


def test_a_literal_separator_is_three_pieces(bert):
    small = tokenizer.WordPiece([*vocabulary.SPECIALS, "[", "]", "sep", "mask"], "uncased")
    pieces = [small.token(i) for i in small.encode("[SEP][MASK]")]
    assert pieces == ["[", "sep", "]", "[", "mask", "]"]
    assert bert["uncased"].encode("[SEP]")[0] == bert["uncased"].vocab.index("[")


def test_pieces_that_go_on_a_word_are_marked(bert):
    wordpiece = bert["uncased"]
    ids = wordpiece.encode("unaffable day")
    assert wordpiece.continues[ids].tolist() == [False, True, True, False]
    assert wordpiece.decode(ids) == "unaffable day"


def test_the_cache_changes_no_ids(bert):
    small = tokenizer.WordPiece(bert["uncased"].vocab, "uncased")
    small.ids_of_word = library.WordCache(small._match_longest, most=3)
    text = SAMPLE.read_text()
    assert small.encode(text) == bert["uncased"].encode(text)


# --- Training ---


def prose(lines=250):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdeéf"), rng.integers(1, 7))) for _ in range(150)]
    return [" ".join(rng.choice(words, 9)) + " ." for _ in range(lines)]


def counted(lines):
    return samples.word_counts(collections.Counter(" ".join(lines).split()))


def test_a_trained_vocabulary_starts_with_the_specials_and_spells_its_text():
    vocab = train_wordpiece(counted(prose()), 200)
    assert len(vocab) == len(set(vocab)) == 200
    assert tuple(vocab[:5]) == vocabulary.SPECIALS
    trained = tokenizer.WordPiece(vocab, "cased")
    for line in prose():
        assert trained.unk_id not in trained.encode(line)
        assert trained.decode(trained.encode(line)) == line


def test_a_vocabulary_too_small_for_the_characters_is_refused_by_name():
    with pytest.raises(InputError, match=r"model\.vocab_size=9: "):
        train_wordpiece(counted(prose()), 9)
    for kind in ("unigram", "bpe"):
        with pytest.raises(InputError, match=r"model\.vocab_size=9: "):
            train_sentencepiece(counted(prose()), 9, kind)


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def sentence_model(request):
    return request.param, train_sentencepiece(counted(prose()), 100, request.param)


def test_a_script_of_thousands_of_characters_is_kept_but_for_the_rarest():
    """Chinese is by character: one that has no piece is [UNK] wherever it stands."""
    counts = {chr(0x4E00 + i): 40_000 // (i + 1) for i in range(3_000)} | {"\u9fa0": 1}
    text = [" ".join(character * count) for character, count in counts.items()]
    found = set(train_wordpiece(counted(text), 20_000))
    unknown = sum(count for character, count in counts.items() if character not in found)
    assert 0 < unknown <= 0.0005 * sum(counts.values())


def test_sentencepiece_training_is_deterministic_on_any_number_of_cores(
    sentence_model, monkeypatch
):
    kind, model = sentence_model
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert train_sentencepiece(counted(prose()), 100, kind) == model


def test_specials_of_a_trained_sentencepiece_model_are_ids_0_to_4(sentence_model):
    trained = tokenizer.SentencePiece(sentence_model[1], "uncased")
    assert trained.size == 100
    assert [trained.token(i) for i in range(5)] == list(vocabulary.SPECIALS)
    ids = (trained.pad_id, trained.unk_id, trained.cls_id, trained.sep_id, trained.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert trained.appended == []
    assert not trained.continues[:5].any()


def test_text_gives_no_special_id_of_a_sentencepiece_model(sentence_model):
    trained = tokenizer.SentencePiece(sentence_model[1], "cased")
    ids = {*trained.encode(" ".join(vocabulary.SPECIALS) + " abcde"), *trained.encode("[MASK]")}
    assert not ids & {0, 2, 3, 4}
    line = prose()[0]
    assert trained.decode(trained.encode(line)) == line


# --- SentencePiece models from elsewhere ---


def foreign_model(**options):
    """As others train them: <unk>, <s>, </s>, and what the options say."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(prose()),
        model_writer=model,
        vocab_size=90,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def test_a_model_without_specials_gets_them_appended_and_recorded(tmp_path):
    (tmp_path / "x.model").write_bytes(foreign_model())
    loaded = tokenizer.load(tmp_path / "x.model", "cased")
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    ids = [loaded.pad_id, loaded.cls_id, loaded.sep_id, loaded.mask_id]
    assert ids == [90, 91, 92, 93]
    assert loaded.size == len(loaded.continues) == 94
    assert [loaded.token(i) for i in ids] == names
    # Id 0 is <unk> here; padding with it would make padding look like text.
    assert loaded.unk_id == 0
    loaded.save(tmp_path / "folder")
    record = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    assert record["appended"] == names
    assert record["specials"] == {"pad": 90, "unk": 0, "cls": 91, "sep": 92, "mask": 93}


def test_specials_that_a_model_has_are_used():
    loaded = tokenizer.SentencePiece(
        foreign_model(pad_id=3, control_symbols=["[CLS]", "[SEP]"]), "cased"
    )
    assert loaded.token(loaded.pad_id) == "<pad>"
    assert loaded.pad_id == 3
    assert [loaded.token(i) for i in (loaded.cls_id, loaded.sep_id)] == ["[CLS]", "[SEP]"]
    assert loaded.appended == ["[MASK]"]
    assert loaded.mask_id == 90


def test_a_special_that_is_a_user_defined_symbol_is_not_given_by_text():
    model = foreign_model(user_defined_symbols=["[MASK]", "[SEP]", "[CLS]"])
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    loaded = tokenizer.SentencePiece(model, "cased")
    assert loaded.appended == ["[PAD]"]
    assert loaded.mask_id == processor.piece_to_id("[MASK]")
    assert loaded.mask_id in processor.encode("abc [MASK] abc")
    ids = loaded.encode("abc [MASK] abc [SEP][CLS]")
    assert not {*ids} & {loaded.mask_id, loaded.sep_id, loaded.cls_id, loaded.pad_id}
    assert ids.count(loaded.unk_id) >= 3


# --- Folders and files ---


@pytest.fixture(params=["wordpiece", "foreign"])
def any_tokenizer(request):
    if request.param == "wordpiece":
        return tokenizer.WordPiece(train_wordpiece(counted(prose()), 200), "cased")
    return tokenizer.SentencePiece(foreign_model(), "cased")


def test_a_saved_tokenizer_loads_as_it_was(any_tokenizer, tmp_path):
    any_tokenizer.save(tmp_path / "folder")
    loaded = tokenizer.load(tmp_path / "folder", "uncased")  # the folder knows its case
    for name in ("kind", "case", "size", "sha256", "pad_id", "unk_id", "cls_id", "mask_id"):
        assert getattr(loaded, name) == getattr(any_tokenizer, name), name
    np.testing.assert_array_equal(loaded.continues, any_tokenizer.continues)
    for line in [*prose(), "Éx [SEP] ü 中"]:
        assert loaded.encode(line) == any_tokenizer.encode(line)


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path, bert):
    assert bert["cased"].sha256 != bert["uncased"].sha256
    tokenizer.WordPiece([*vocabulary.SPECIALS, "a"], "cased").save(tmp_path / "a")
    record = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    for change in ({"kind": "x"}, {"case": None}):
        (tmp_path / "a" / "tokenizer.json").write_text(json.dumps({**record, **change}))
        with pytest.raises(InputError, match=r"tokenizer\.json"):
            tokenizer.load(tmp_path / "a")
    model, file = foreign_model(), tmp_path / "x.model"
    for content in (b"", model[: len(model) // 2], b"text", bytes(99)):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"x\.model: "):
            tokenizer.load(file)
    file = tmp_path / "vocab.txt"
    for name in vocabulary.SPECIALS:
        file.write_text("\n".join([*(s for s in vocabulary.SPECIALS if s != name), "a"]))
        with pytest.raises(InputError, match=rf"vocab\.txt: .*\[{name[1:-1]}\]"):
            tokenizer.load(file)
    file.write_bytes(b"[PAD]\n\xff")
    for path in (file, tmp_path / "none.txt", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            tokenizer.load(path)


def test_a_vocabulary_may_end_its_lines_in_either_way_and_begin_with_a_mark(tmp_path):
    pieces = [*vocabulary.SPECIALS, "a", "##b"]
    for end, mark in (("\n", "\ufeff"), ("\r\n", "")):
        (tmp_path / "vocab.txt").write_bytes((mark + end.join(pieces)).encode())
        assert vocabulary.read_vocab(tmp_path / "vocab.txt") == pieces
