"""Tokens against the reference's FullTokenizer, and its rules on single characters."""

import functools
import sys
import unicodedata
from collections.abc import Iterator

from bert_jax.conformance import golden
from bert_jax.conformance.rule import Rule, count_of_different
from bert_jax.text import tokenizer

_rule = functools.partial(Rule, "tokenizer")


def check() -> Iterator[Rule]:
    """Yields the rules of the tokenizer, compared."""
    rows = golden.tokens()
    compared = f"{len(rows)} odd texts with the reference's"
    uncased, cased = golden.tokenizer("uncased"), golden.tokenizer("cased")
    ids = [uncased.encode(row["text"]) for row in rows]
    yield _rule(
        "uncased: lower case, NFD, accents and controls away, longest match",
        f"ids of {compared}",
        count_of_different(ids, [row["lower"] for row in rows]),
    )
    yield _rule(
        "an id is a line of the vocabulary",
        f"pieces of {compared}",
        count_of_different(
            [[uncased.piece(i) for i in row] for row in ids], [row["lower_tokens"] for row in rows]
        ),
    )
    yield _rule(
        "cased: as it is, accents too",
        f"pieces of {compared}",
        count_of_different(
            [[cased.piece(i) for i in cased.encode(row["text"])] for row in rows],
            [row["cased_tokens"] for row in rows],
        ),
    )
    yield _characters()
    unknown, words = uncased.unk_id, ("a" * 200, "a" * 201, "\u00e1" * 200)
    found = [uncased.encode(word) == [unknown] for word in words]
    yield _rule(
        "words of over 200 characters are [UNK]",
        "words of 200 and 201",
        count_of_different(found, [False, True, False]),
    )
    literal = uncased.encode("[PAD][CLS] [SEP][MASK]")
    specials = {uncased.pad_id, uncased.cls_id, uncased.sep_id, uncased.mask_id}
    yield _rule(
        "text never gives a special",
        "pieces of the specials' names",
        sum(i in specials for i in literal),
    )


def _characters() -> Rule:
    """Between letters a blank, a mark, an ideograph and nothing at all differ."""
    differing = 0
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        category = unicodedata.category(char)
        if char in "\t\n\r" or category in ("Zs", "Zl", "Zp"):
            expected = ["a", "b"]
        elif char in "\0\ufffd" or category in ("Cc", "Cf"):
            expected = ["ab"]
        elif category == "Co":
            expected = [f"a{char}b"]
        elif category[0] == "P" or char in "$+<=>^`|~":
            expected = ["a", char, "b"]
        else:
            continue
        differing += tokenizer.basic_tokens(f"a{char}b", "cased") != expected
    return _rule(
        "Cc and Cf go, blanks and punctuation part words, Co stays",
        "every such character between letters",
        differing,
    )
