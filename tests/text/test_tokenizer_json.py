"""Any tokenizer.json: ids, templates and words are those of the library that it was made with."""

import json

import forms
import numpy as np
import pytest
import tokenizers
from etils import epath
from forms import ANGLED, SQUARE
from hypothesis import example, given
from hypothesis import strategies as st

from bert_jax.config import Corpus
from bert_jax.data import corpus
from bert_jax.errors import InputError
from bert_jax.pretraining.loaded_model import Predictor
from bert_jax.text import library, tokenizer
from bert_jax.text.vocabulary import SPECIALS


def with_byte_fallback(content):
    """A Unigram in which a letter without a piece becomes its bytes."""
    parts = json.loads(content)
    parts["model"]["byte_fallback"] = True
    parts["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    (mask,) = (token for token in parts["added_tokens"] if token["content"] == "<mask>")
    mask["id"] = len(parts["model"]["vocab"])
    return json.dumps(parts).encode()


NAMED = forms.NAMED | {"unigram_bytes": ANGLED}
CONTENT = forms.CONTENT | {"unigram_bytes": with_byte_fallback(forms.CONTENT["xlmr"])}
UNIGRAMS = ("xlmr", "unigram_bytes")
OURS = {name: library.LibraryTokenizer(CONTENT[name], NAMED[name], name) for name in NAMED}


def plainly(name):
    """The library itself, told to cut what reads like a special token as plain text."""
    found = tokenizers.Tokenizer.from_buffer(CONTENT[name])
    found.encode_special_tokens = True
    return found


THEIRS = {name: plainly(name) for name in NAMED}
each_form = pytest.mark.parametrize("name", NAMED)

# What the forms treat in ways of their own: specials, added tokens, what normalizers turn into
# blanks or join with them, marks of blanks in the text, contractions.
ODD = ["[MASK]", "<mask>", "</s>", "[SEP]", "<s>", "|||EMAIL_ADDRESS|||", "|||IP_ADDRESS|||", "'s"]
ODD += ["don't", "\u00a8a", "a\u200b", "\u200b", "\u0301e", "\u2581x", "x\u2581", "\ufeff", "\n\n"]
ODD += ["  ", "\t", "\x85", "\u3000", "the", "people", "\U0001f600", "\u4e2d\u6587", "1,000.5%"]
words = st.sampled_from(ODD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
texts = st.lists(words, max_size=9).map(" ".join) | st.text(max_size=20)


@each_form
@given(text=texts)
def test_ids_are_those_of_the_library_and_never_special(name, text):
    text = text.encode("utf-8", "ignore").decode()
    ours = OURS[name]
    special = {ours.cls_id, ours.sep_id, ours.mask_id, ours.pad_id}
    for found, whole in ((ours.encode(text), text), (ours.encode_after_space(text), f" {text}")):
        assert not special & set(found)
        plain = THEIRS[name].encode(whole, add_special_tokens=False).ids
        # Unigram has the names of specials among its pieces, and finds them in a text.
        assert found == [ours.unk_id if i in special and name in UNIGRAMS else i for i in plain]


@each_form
@pytest.mark.parametrize("added", ["New York", "York "])
def test_added_tokens_that_hold_a_blank_are_known(name, added):
    theirs = plainly(name)
    theirs.add_tokens([added])
    ours = library.LibraryTokenizer(theirs.to_str().encode(), NAMED[name], name)
    for text in ("We love New York now", "York now", "New", "We the people"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


def word_pieces(name):
    """A WordPiece of a few words and all letters that the odd texts have; the library's, too."""
    case = name.removeprefix("wordpiece_")
    plain = "".join(ODD + ODD).lower() if case == "uncased" else "".join(ODD)
    letters = sorted({char for word in tokenizer.basic_tokens(plain, case) for char in word})
    vocab = [*SPECIALS, *letters, *(f"##{char}" for char in letters), "the", "##ople", "\u4e2d"]
    ours = tokenizer.WordPiece(list(dict.fromkeys(vocab)), case)
    model = tokenizers.models.WordPiece({p: i for i, p in enumerate(ours.vocab)}, unk_token="[UNK]")
    theirs = tokenizers.Tokenizer(model)
    theirs.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=case == "uncased")
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return ours, theirs


CUT = {name: (OURS[name], THEIRS[name]) for name in NAMED}
CUT |= {f"wordpiece_{case}": word_pieces(f"wordpiece_{case}") for case in ("cased", "uncased")}


@pytest.mark.parametrize("name", CUT)
@given(text=texts)
def test_a_piece_that_begins_no_word_goes_on_one(name, text):
    """So that whole-word masks split none."""
    ours, theirs = CUT[name]
    text = text.encode("utf-8", "ignore").decode()
    if name not in NAMED:  # the reference drops fewer characters than their WordPiece: private ones
        text = "".join(char for char in text if char in " ".join(ODD))
    cut, ids = theirs.encode(text, add_special_tokens=False), ours.encode(text)
    assert len(cut.ids) == len(ids)
    # To Gemma's a whole text is one word; blanks are letters, and part its words.
    begins = [
        at == 0 or word != cut.word_ids[at - 1] or (name == "gemma" and piece[0] == library.BLANK)
        for at, (word, piece) in enumerate(zip(cut.word_ids, cut.tokens, strict=True))
    ]
    goes_on = ours.continues[ids].tolist()
    assert all(first or more for first, more in zip(begins, goes_on, strict=True)), cut.tokens


@each_form
def test_one_text_and_two_are_joined_as_the_library_joins_them(name):
    ours, theirs, (a, b) = OURS[name], THEIRS[name], ("We the people", "of the States.")
    first, second = (ours.encode(text) for text in (a, b))
    assert tokenizer.add_special_tokens(ours, first, None)[0].tolist() == theirs.encode(a).ids
    pair = theirs.encode(a, b)
    ids, before = tokenizer.add_special_tokens(ours, first, second)
    assert ids.tolist() == pair.ids and ids[before:-1].tolist() == second
    of_first = tokenizer.first_segment_length(ours, ids, before)
    assert [int(place >= of_first) for place in range(len(ids))] == pair.type_ids
    assert len(ids) == len(first) + len(second) + tokenizer.special_count(ours, 2)


@each_form
@given(text=texts)
@example(text="a \ufdfa b")  # one character, which NFKC makes four words of
def test_words_have_the_ids_of_the_text_and_stand_where_they_are(name, text):
    text = text.encode("utf-8", "ignore").decode()
    words = list(OURS[name].words(text))
    assert [i for _, _, ids in words for i in ids] == OURS[name].encode(text)
    places = [place for start, end, _ in words for place in (start, end)]
    assert places == sorted(places) and all(0 <= place <= len(text) for place in places)


@each_form
def test_words_are_found(name):
    text = "We the  people, of\nthe States"
    found = [text[start:end] for start, end, _ in OURS[name].words(text)]
    assert "".join(found).replace(" ", "").replace("\n", "") == "Wethepeople,oftheStates"
    assert {"We", "the", "States"} <= set(found) or name == "gemma"
    ids = OURS[name].encode_after_space("people")
    assert OURS[name].decode(ids).strip() == "people" and ids == OURS[name].encode(" people")


@each_form
def test_a_folder_is_the_file_and_the_names_of_its_specials(name, tmp_path):
    OURS[name].save(epath.Path(tmp_path / "saved"))
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == CONTENT[name]
    for place in (tmp_path / "saved", tmp_path / "saved" / "tokenizer.json"):
        read = tokenizer.load(place)
        assert read.sha256 == OURS[name].sha256
        assert read.decode(read.encode("We the people")).strip() == "We the people"
        assert [read.token(i) for i in (read.pad_id, read.mask_id)] == [
            NAMED[name][f"{role}_token"] for role in ("pad", "mask")
        ]


def changed(name, **parts):
    return json.dumps(json.loads(CONTENT[name]) | parts).encode()


ONE = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]


UNENDED = {"pair": [*ONE, {"Sequence": {"id": "B", "type_id": 1}}]}
UNENDED = json.loads(CONTENT["modernbert"])["post_processor"] | UNENDED
# The library opens it, and panics at the first text.
UNKNOWN = UNENDED | {"special_tokens": {}}


def test_a_file_that_cannot_be_computed_with_is_named(tmp_path):
    for content, named, what in (
        (b"{", SQUARE, "JSON"),
        (changed("modernbert", pre_tokenizer={"type": "Unheard"}), SQUARE, "tokenizers library"),
        (
            changed("xlmr", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAA"}),
            *(ANGLED, "tokenizers library"),
        ),
        (changed("modernbert", post_processor=None), SQUARE, "post_processor"),
        (changed("modernbert", post_processor=UNENDED), SQUARE, "post_processor"),
        (changed("modernbert", post_processor=UNKNOWN), SQUARE, "tokenizers library"),
        (CONTENT["modernbert"], SQUARE | {"mask_token": "[M]"}, "mask_token"),
        (CONTENT["modernbert"], SQUARE | {"pad_token": "<none>"}, "<none>"),
    ):
        (tmp_path / "tokenizer.json").write_bytes(content)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
        with pytest.raises(InputError, match=what) as error:
            library.read(epath.Path(tmp_path / "tokenizer.json"))
        assert str(tmp_path) in str(error.value)


def test_a_file_alone_is_read_if_it_has_the_usual_special_tokens(tmp_path):
    """And one that has none is refused once, with everything that it lacks."""
    path = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(show_progress=False)
    made.train_from_iterator(["wa wb wc"], trainer)
    made.save(str(path))
    with pytest.raises(InputError) as error:
        tokenizer.load(path)
    for word in ("pad_token", "unk_token", "mask_token", "post_processor"):
        assert word in str(error.value)
    trainer = tokenizers.trainers.BpeTrainer(show_progress=False, special_tokens=list(SPECIALS))
    made.train_from_iterator(["wa wb wc"], trainer)
    cls, sep = ((piece, made.token_to_id(piece)) for piece in ("[CLS]", "[SEP]"))
    made.post_processor = tokenizers.processors.BertProcessing(sep, cls)
    made.save(str(path))
    read = tokenizer.load(path)
    assert read.encode("wa wb") == made.encode("wa wb", add_special_tokens=False).ids
    assert [read.pad_id, read.mask_id] == [made.token_to_id(p) for p in ("[PAD]", "[MASK]")]
    read.save(epath.Path(tmp_path / "saved"))
    assert tokenizer.load(tmp_path / "saved").sha256 == read.sha256


@pytest.mark.parametrize("name", ["modernbert", "xlmr"])
def test_text_is_prepared_with_it(name, tmp_path):
    (tmp_path / "given").mkdir()
    OURS[name].save(epath.Path(tmp_path / "given"))
    lines = [f"Line {i} of the people [SEP] so." for i in range(40)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines) + "\n")
    of = Corpus(
        sources=(f"text:{tmp_path}/text.txt",),
        layout="sentences_by_line",
        tokenizer=f"{tmp_path}/given/tokenizer.json",
        validation_share=0.2,
    )
    folder = epath.Path(tmp_path / "corpus")
    manifest = corpus.prepare(of, OURS[name].size, folder, lambda line: None)
    assert manifest["tokenizer"]["sha256"] == OURS[name].sha256
    ids = np.fromfile(folder / "stream" / "train" / "ids.bin", np.uint16)
    # Each sentence is cut as behind another.
    written = ",".join(map(str, ["", *ids, ""]))
    cut = [",".join(map(str, ["", *OURS[name].encode(f" {line}"), ""])) for line in lines]
    assert sum(one in written for one in cut) == 32
    assert THEIRS[name].decode(ids.tolist()).count("of the people [SEP] so.") == 32


@pytest.mark.parametrize("name", ["modernbert", "roberta"])
def test_a_mask_takes_the_blank_before_it(name):
    """As those vocabularies' own mask tokens do."""
    text, mask = "We the [MASK] of the States", NAMED[name]["mask_token"]
    theirs = tokenizers.Tokenizer.from_buffer(CONTENT[name])
    expected = theirs.encode(text.replace("[MASK]", mask), add_special_tokens=False).ids
    assert Predictor.encode(Predictor(None, OURS[name]), text) == expected
