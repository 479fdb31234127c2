"""Vocabularies: special tokens, BERT's `vocab.txt`, and the word counts to train them with."""

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np
from etils import epath

from bert_jax.errors import InputError

PAD, UNK, CLS, SEP, MASK = SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The special tokens by their roles, as in tokenizer_config.json.
SPECIAL_NAMES = dict(
    zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True)
)

# Minimum number of characters that become tokens (all, if a text has fewer); rarer ones are [UNK].
_MIN_ALPHABET = 1_000
# More characters become tokens if the minimum covers less than this share of the text.
_COVERAGE = 0.9995


@dataclasses.dataclass
class WordCounts:
    """The words of a corpus with their counts."""

    # The words from which a vocabulary is trained (see text.words), sorted.
    words: list[str] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)  # how often each of them occurs
    distinct_words: int = 0  # in the whole corpus
    # The count of each character in the corpus, by its code point.
    characters: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    # Code points of characters after the first one of a word.
    inner: set[int] = dataclasses.field(default_factory=set)

    def add(self, counts: Mapping[str, int]) -> None:
        """Updates all fields but `words` and `counts` with words that were not added before."""
        codes = np.frombuffer("".join(counts).encode("utf-32-le", "replace"), np.uint32)
        lengths = np.fromiter(map(len, counts), np.int64, len(counts))
        weights = np.repeat(np.fromiter(counts.values(), np.int64, len(counts)), lengths)
        sums = np.bincount(codes, weights).astype(np.int64)
        for code in np.flatnonzero(sums).tolist():
            self.characters[code] += int(sums[code])
        is_inner = np.ones(len(codes), bool)
        is_inner[np.cumsum(lengths) - lengths] = False
        self.inner.update(np.flatnonzero(np.bincount(codes[is_inner])).tolist())
        self.distinct_words += len(counts)

    def alphabet(self) -> tuple[list[str], list[str]]:
        """Returns the most frequent characters, and the tokens `##c` of those that continue words.

        Both lists are in the order of code points.
        """
        counts = self.characters
        commonest = sorted(counts, key=lambda code: (-counts[code], code))
        covered = np.cumsum([counts[code] for code in commonest])
        needed = int(np.searchsorted(covered, _COVERAGE * covered[-1])) + 1 if commonest else 0
        characters = sorted(commonest[: max(needed, _MIN_ALPHABET)])
        return [chr(c) for c in characters], [f"##{chr(c)}" for c in characters if c in self.inner]


def read_vocab(path: epath.PathLike) -> list[str]:
    """Reads the tokens of a `vocab.txt`, one per line; the number of the line is the id."""
    try:
        lines = epath.Path(path).read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    if lines and not lines[-1]:
        lines.pop()
    vocab = [line.strip() for line in lines]
    if missing := [name for name in SPECIALS if name not in vocab]:
        raise InputError(
            f"{path}: no {' '.join(missing)} among its {len(vocab)} lines; a BERT vocabulary has "
            "one token per line, and must have these"
        )
    first_lines: dict[str, int] = {}
    for number, token in enumerate(vocab, 1):
        first = first_lines.setdefault(token, number)
        if first != number:
            # No text yields the first id, since the last one wins, but a model could predict it.
            raise InputError(
                f"{path}:{number}: the token {token!r} is already on line {first}; each line is an "
                "id, so write another token there, e.g. [unused1]"
            )
    return vocab


def unused(count: int) -> list[str]:
    """Returns names of tokens that no text yields, as in BERT's own vocabularies."""
    return [f"[unused{number}]" for number in range(count)]
