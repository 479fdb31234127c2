"""The data path written plainly: what the instances are compared with.

Written from the description of google-research/bert's create_pretraining_data and tokenization
(Devlin et al. 2018, section 3.1 and appendix A): characters one by one, documents as lists of
lists of pieces, one generator for all random choices. It gives the reference's instances draw for
draw, which a test checks.
"""

import random
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Document = list[list[str]]

_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


@dataclass(frozen=True)
class Settings:
    """How instances are made."""

    max_seq_length: int
    max_predictions_per_seq: int
    dupe_factor: int = 1
    short_seq_prob: float = 0.1
    masked_lm_prob: float = 0.15
    whole_word_mask: bool = False


@dataclass(frozen=True)
class Instance:
    """One example, as pieces."""

    pieces: list[str]
    segment_ids: list[int]
    positions: list[int]
    labels: list[str]
    is_random_next: bool


# --- text to pieces ---


Case = Literal["cased", "uncased"]


def tokenize(text: str, vocab: dict[str, int], case: Case = "uncased") -> list[str]:
    """WordPiece of a text."""
    return [piece for word in words(text, case) for piece in _pieces(word, vocab)]


def words(text: str, case: Case) -> list[str]:
    """Words and marks of a text, as BasicTokenizer parts them."""
    found = []
    for word in _spaced(text).split():
        if case == "uncased":
            word = _without_accents(word.lower())
        found.extend(_punctuation_apart(word))
    return found


def _spaced(text: str) -> str:
    """Without control characters; blanks for all white space and around CJK ideographs."""
    characters = []
    for char in text:
        if char in " \t\n\r" or unicodedata.category(char) == "Zs":
            characters.append(" ")
        elif char in "\0\ufffd" or unicodedata.category(char) in ("Cc", "Cf"):
            continue
        elif any(low <= ord(char) <= high for low, high in _CJK):
            characters.append(f" {char} ")
        else:
            characters.append(char)
    return "".join(characters)


def _without_accents(word: str) -> str:
    decomposed = unicodedata.normalize("NFD", word)
    return "".join(char for char in decomposed if unicodedata.category(char) != "Mn")


def _punctuation_apart(word: str) -> list[str]:
    parts, new = [], True
    for char in word:
        ascii_mark = char.isascii() and char.isprintable() and not char.isalnum() and char != " "
        if ascii_mark or unicodedata.category(char).startswith("P"):
            parts.append(char)
            new = True
        elif new:
            parts.append(char)
            new = False
        else:
            parts[-1] += char
    return parts


def _pieces(word: str, vocab: dict[str, int]) -> list[str]:
    """The longest piece that fits, again and again; [UNK] if at some place none does."""
    if len(word) > 200:
        return ["[UNK]"]
    found, start = [], 0
    while start < len(word):
        end = len(word)
        while end > start:
            piece = ("##" if start else "") + word[start:end]
            if piece in vocab:
                break
            end -= 1
        if end == start:
            return ["[UNK]"]
        found.append(piece)
        start = end
    return found


# --- pieces to instances ---


def instances(
    documents: Iterable[Document], vocab: dict[str, int], settings: Settings, rng: random.Random
) -> list[Instance]:
    """All instances of all documents, shuffled."""
    documents = list(documents)
    rng.shuffle(documents)
    words = list(vocab)
    found = []
    for _ in range(settings.dupe_factor):
        for place in range(len(documents)):
            found.extend(_of_document(documents, place, words, settings, rng))
    rng.shuffle(found)
    return found


def _of_document(
    documents: Sequence[Document],
    place: int,
    words: Sequence[str],
    settings: Settings,
    rng: random.Random,
) -> list[Instance]:
    document = documents[place]
    most = target = settings.max_seq_length - 3
    if rng.random() < settings.short_seq_prob:
        target = rng.randint(2, most)
    found = []
    i = 0
    while i < len(document):
        chunk, size = [], 0
        while i < len(document) and (not chunk or size < target):
            chunk.append(document[i])
            size += len(document[i])
            i += 1
        cut = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
        a = [piece for sentence in chunk[:cut] for piece in sentence]
        is_random_next = len(chunk) == 1 or rng.random() < 0.5
        if is_random_next:
            b = _from_another(documents, place, target - len(a), rng)
            i -= len(chunk) - cut  # the unused sentences are put back
        else:
            b = [piece for sentence in chunk[cut:] for piece in sentence]
        _truncate(a, b, most, rng)
        pieces = ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
        segment_ids = [0] * (len(a) + 2) + [1] * (len(b) + 1)
        positions, labels = _mask(pieces, words, settings, rng)
        found.append(Instance(pieces, segment_ids, positions, labels, is_random_next))
    return found


def _from_another(
    documents: Sequence[Document], place: int, wanted: int, rng: random.Random
) -> list[str]:
    for _ in range(10):
        other = rng.randint(0, len(documents) - 1)
        if other != place:
            break
    document = documents[other]
    found: list[str] = []
    for sentence in document[rng.randint(0, len(document) - 1) :]:
        found.extend(sentence)
        if len(found) >= wanted:
            break
    return found


def _truncate(a: list[str], b: list[str], most: int, rng: random.Random) -> None:
    while len(a) + len(b) > most:
        longer = a if len(a) > len(b) else b
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()


def _mask(
    pieces: list[str], words: Sequence[str], settings: Settings, rng: random.Random
) -> tuple[list[int], list[str]]:
    """Replaces pieces in place; returns where and what stood there."""
    groups: list[list[int]] = []
    for position, piece in enumerate(pieces):
        if piece in ("[CLS]", "[SEP]"):
            continue
        if settings.whole_word_mask and groups and piece.startswith("##"):
            groups[-1].append(position)
        else:
            groups.append([position])
    rng.shuffle(groups)
    wanted = min(
        settings.max_predictions_per_seq, max(1, round(len(pieces) * settings.masked_lm_prob))
    )
    chosen: list[tuple[int, str]] = []
    for group in groups:
        if len(chosen) >= wanted:
            break
        if len(chosen) + len(group) > wanted:
            continue
        for position in group:
            chosen.append((position, pieces[position]))
            if rng.random() < 0.8:
                pieces[position] = "[MASK]"
            elif rng.random() >= 0.5:
                pieces[position] = words[rng.randint(0, len(words) - 1)]
    chosen.sort()
    return [position for position, _ in chosen], [label for _, label in chosen]
