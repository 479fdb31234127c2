"""Where the words of a text stand: what a tokenizer makes of them is what it makes of the text."""

import pathlib

import pytest
import sentencepiece
import tokenizers
from etils import epath
from hypothesis import example, given
from hypothesis import strategies as st

from bert_jax.text import library, tokenizer
from bert_jax.text.tokenizer import word_spans
from bert_jax.tools.conformance import golden

CASES = ("uncased", "cased")

# Python's lower case of a capital sigma looks at the letters around it, over marks that part words.
SIGMA = "\u03a3"
characters = st.characters(exclude_categories=["Cs"], exclude_characters=SIGMA) | st.sampled_from(
    # Words, what stands alone, what goes, what only looks like one of these.
    "aZé\u0301'-/$ß\u0130\u00a0\u2009\u3000\t\n\r\0\u200b\ufeff\ufffd\u4e2d\uf900\u3042\uac00\u2260"
)


@pytest.fixture(scope="module")
def bert():
    return {case: tokenizer.WordPiece(golden.vocabulary(), case) for case in CASES}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A SentencePiece model."""
    prefix = tmp_path_factory.mktemp("model") / "small"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["an old man", "a new mat"] * 5),
        model_prefix=str(prefix),
        vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return tokenizer.load(prefix.with_suffix(".model"))


@pytest.mark.parametrize("case", CASES)
@given(text=st.text(characters, max_size=40))
@example(text="\u4e2d\u0301a")  # a mark after what stands alone
@example(text="a\u2260b\u037e\u1fef")  # parts into a mark, is one, is one only when decomposed
@example(text="na\u0308ive caf\u00e9\u00adx \u1e9e\u0130 '\u0345")
@example(text="x" * 150 + "." + "y" * 250)
def test_pieces_of_the_words_are_those_of_the_text(bert, case, text):
    tokens = bert[case]
    found = list(word_spans(text, tokens))
    assert [i for s, e in found for i in tokens.encode(text[s:e])] == tokens.encode(text)
    # In order, none over another, and nothing between them but what parts words.
    last = 0
    for start, end in found:
        assert last <= start < end
        assert tokens.encode(text[last:start]) == []
        last = end
    assert tokens.encode(text[last:]) == []


def test_a_final_sigma_is_told_by_what_follows_the_word(bert):
    """The one exception: `A'S` as a text, its sigma before a letter, and word by word."""
    text = "\u0391\u03a3'\u0391"
    assert tokenizer.basic_tokens(text, "uncased")[0] == "\u03b1\u03c3"
    words = [text[s:e] for s, e in word_spans(text, bert["uncased"])]
    assert words == ["\u0391\u03a3", "'", "\u0391"]
    assert tokenizer.basic_tokens(words[0], "uncased") == ["\u03b1\u03c2"]


@pytest.mark.parametrize("case", CASES)
def test_marks_and_ideographs_stand_alone(bert, case):
    """Accents stay with their letter, in one character or two; a zero-width blank parts nothing."""
    text = "Caf\u00e9s, e\u0301t\u200bc. \u65e5\u672c\u306e\u5c71\u00a0(3,5$)"
    words = ["Caf\u00e9s", ",", "e\u0301t\u200bc", ".", "\u65e5", "\u672c", "\u306e", "\u5c71"]
    words += ["(", "3", ",", "5", "$", ")"]
    assert [text[s:e] for s, e in word_spans(text, bert[case])] == words


@given(text=st.text(characters, max_size=40))
def test_with_sentencepiece_only_blanks_part_words(pieces, text):
    found = list(word_spans(text, pieces))
    assert [text[s:e] for s, e in found] == text.split()
    assert [s for s, _ in found] == sorted({s for s, _ in found})


@pytest.mark.parametrize("name", ["gemma", "modernbert", "roberta", "xlmr"])
def test_ends_of_tokens_are_those_of_the_library(name):
    """Also of tokens within words, and of a space that is a token of its own."""
    path = pathlib.Path(__file__).parents[1] / f"golden/tokenizers/{name}.json"
    text = "every principal. You see it's the Middle East, with $23 1/2 of our allies\u00e9"
    encoding = tokenizers.Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False)
    wanted = [(i, end) for i, (_, end) in zip(encoding.ids, encoding.offsets, strict=True)]
    assert list(library.read(epath.Path(path)).token_ends(text)) == wanted
