"""Documents to sentences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.text import sentence_splitter
from bert_jax.text.documents import Document


def split(text: str, language: str = "en") -> list[str]:
    return sentence_splitter.split(Document("a", (text,), "paragraphs_by_line", 0), language)


SPEECH = [
    "The head is a noble and honest one.",
    "It is the growth of the brain that causes these little commotions.",
    "The fits are at this age a good symptom; in fact, they are Nature's remedy.",
    "They may last for seven years, or even for ten.",
    "But the attacks will be milder, and the intervals longer, when she has turned fourteen.",
    "For the intellect you need have no fear whatever.",
    "Only keep her quiet, and never force her to learn.",
]


def test_a_long_speech_in_quotation_marks_is_split():
    found = split(f'"{" ".join(SPEECH)}" He left. She stayed.')
    assert [sentence.strip('"') for sentence in found] == [*SPEECH, "He left.", "She stayed."]


def test_an_apostrophe_that_opens_nothing_swallows_nothing():
    text = "'Tis time they were in bed. " + " ".join(SPEECH * 20)
    assert max(map(len, split(text))) < 400


def test_a_short_speech_stays_whole():
    assert split('"Stop. Go." He left.') == ['"Stop. Go."', "He left."]


@pytest.mark.parametrize("blank", ["\u00a0", "\u2009", "\u2028", "\u3000", "\x85"])
def test_a_wide_blank_before_a_full_stop_is_taken(blank):
    text = f"It holds vitamin C{blank}. The end. Nothing else."
    assert "".join("".join(split(text)).split()) == "".join(text.split())
    assert len(split(text)) >= 2


@given(
    st.text(max_size=300) | st.text(st.sampled_from("aB. !?\"'()“”。「」é"), max_size=2_000),
    st.sampled_from(["en", "zh", "ar"]),
)
def test_no_letter_is_lost_or_moved(text, language):
    text = text.replace("\n", " ")
    joined = "".join("".join(split(text, language)).split())
    assert joined == "".join(text.split())
