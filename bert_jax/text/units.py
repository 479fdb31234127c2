"""Where in a text its words stand: an answer is a part of the text itself."""

import functools

from bert_jax.text.tokenizer import Case, Tokenizer, basic_tokens


def units(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """The stretches of a text that a tokenizer cuts into pieces one by one.

    Words between blanks; with WordPiece, punctuation marks and CJK ideographs stand alone.

    Returns:
      (first character, one past the last) of each, in order.
    """
    found: list[tuple[int, int]] = []
    start = 0
    for place, char in enumerate(text):
        kind = _kind(char, tokenizer.case) if tokenizer.kind == "wordpiece" else _plain(char)
        if kind == "of a word":
            continue
        if start < place:
            found.append((start, place))
        if kind == "alone":
            found.append((place, place + 1))
        start = place + 1
    if start < len(text):
        found.append((start, len(text)))
    return found


@functools.cache
def _kind(char: str, case: Case) -> str:
    """What the tokenizer does at a character between two letters."""
    words = len(basic_tokens(f"a{char}a", case))
    return {1: "of a word", 2: "blank"}.get(words, "alone")


def _plain(char: str) -> str:
    return "blank" if char.isspace() else "of a word"
