"""The words of a corpus, part by part: as numbers, and counted for the training of a vocabulary.

Each part of the corpus leaves a file of its words with their counts, in sections by a hash of the
word; sections of all files are added up one after another. So the counts are exact, whatever the
size of the corpus, and memory is bounded. Of more than 250,000 different words those that occur
most often train the vocabulary; of equally frequent ones some that a hash chooses, which favours no
letter.
"""

import collections
import json
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

import numpy as np

from bert_jax.text.tokenizer import MAX_WORD, Case, Splitter, WordPiece
from bert_jax.text.vocabulary import WordCounts

# Different words that train a vocabulary.
MOST_WORDS = 250_000

# A word that is unknown for its length.
_UNKNOWN = f" {'a' * (MAX_WORD + 1)} "

_MOST_OF_A_WORD = 4_000
_SECTIONS = 64
# Different words held while counting; a part of more is counted in several goes.
_HELD = 300_000


class WordNumbers(dict):
    """Words met so far, numbered as they came; 0 is the end of a sentence, 1 any long word."""

    def __init__(self, first: int = 0):
        super().__init__({"\n": first, "": first + 1})
        self._first = first

    def __missing__(self, word: str) -> int:
        if len(word) > MAX_WORD:  # all of them are unknown to WordPiece
            return self[""]
        self[word] = number = self._first + len(self)
        return number


class NumberWriter:
    """Writes sentences as the numbers of their words, and the words with their counts.

    FOLDER/tokens.bin   uint32, the number of each word
    FOLDER/words.txt    the words, in the order of their numbers; a word may stand there again
    FOLDER/counts.json  how often each occurs, in sections
    """

    def __init__(self, folder: pathlib.Path, case: Case, unknown_word: str = ""):
        self._splitter = Splitter(case)
        self._unknown_word = unknown_word
        self._numbers = WordNumbers()
        self._first = 0
        self._counts = np.zeros(0, np.int64)
        names = ("tokens.bin", "words.txt", "counts.json")
        files = [open(folder / name, "wb") for name in names]  # noqa: SIM115
        self._tokens, self._words, self._sections = files
        # Where the sections begin and the last one ends, for each time they were written.
        self.offsets: list[list[int]] = []
        # Words of over MAX_WORD characters: all are [UNK], and none trains a vocabulary.
        self.long_words = 0

    def add(self, sentences: Iterable[str]) -> np.ndarray:
        """Writes sentences; returns how many words each has, int64."""
        if self._unknown_word:
            sentences = list(sentences)
            self.long_words -= sum(s.count(self._unknown_word) for s in sentences)
            sentences = (s.replace(self._unknown_word, _UNKNOWN) for s in sentences)
        words = self._splitter.words(sentences)
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.uint32, len(words))
        self.long_words += int((numbers == self._first + 1).sum())
        is_end = numbers == self._first
        ends = np.flatnonzero(is_end)
        numbers = numbers[~is_end]
        self._tokens.write(numbers.tobytes())
        counts = np.bincount(numbers - np.uint32(self._first), minlength=len(self._numbers))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        if len(self._numbers) > _HELD:
            self._flush()
        return np.diff(ends, prepend=-1) - 1

    def close(self) -> None:
        """Ends the files."""
        self._flush()
        for file in (self._tokens, self._words, self._sections):
            file.close()

    def _flush(self) -> None:
        words = list(self._numbers)
        # Lines are words, so the end of a sentence is written as none.
        self._words.write("\n".join(["", *words[1:], ""]).encode())
        counted = zip(words[2:], self._counts[2:].tolist(), strict=True)
        self.offsets.append(_write_sections({w: n for w, n in counted if n}, self._sections))
        self._first += len(words)
        self._numbers, self._counts = WordNumbers(self._first), np.zeros(0, np.int64)


class WordTable:
    """The ids of each word of a part, to make its numbers into ids."""

    def __init__(self, words: Sequence[str], tokenizer: WordPiece):
        ids = [tokenizer.pieces_of[word] if word else [tokenizer.unk_id] for word in words]
        self._lengths = np.fromiter(map(len, ids), np.uint8, len(ids))
        self._ids = np.fromiter(
            (i for word_ids in ids for i in word_ids),
            np.min_scalar_type(tokenizer.size),
            int(self._lengths.sum(dtype=int)),
        )
        self._firsts = np.cumsum(self._lengths, dtype=np.int64) - self._lengths

    def ids(self, numbers: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids of sentences of so many words each, none 0, and how many each has, int64."""
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = np.repeat(self._firsts[numbers] - ends + lengths, lengths)
        firsts = np.cumsum(counts, dtype=np.int64) - counts
        pieces = np.add.reduceat(lengths, firsts, dtype=np.int64)
        return self._ids[starts + np.arange(len(starts))], pieces


def read_words(path: pathlib.Path) -> list[str]:
    """Returns the words of a part, in the order of their numbers."""
    return path.read_bytes().decode().split("\n")[:-1]


def write_stretches(texts: Iterable[str], case: Case, path: pathlib.Path) -> list[list[int]]:
    """Counts what stands between blanks, for SentencePiece; returns offsets as `NumberWriter`.

    What is longer than 200 characters, as in scripts without blanks, comes in stretches, and what
    follows the 4,000th not at all: SentencePiece passes over sentences of more bytes.
    """
    offsets: list[list[int]] = []
    counts: dict[str, int] = {}
    with open(path, "wb") as file:
        for text in texts:
            text = text.lower() if case == "uncased" else text
            for word, count in collections.Counter(text.split()).items():
                for start in range(0, min(len(word), _MOST_OF_A_WORD), MAX_WORD):
                    stretch = word[start : start + MAX_WORD]
                    counts[stretch] = counts.get(stretch, 0) + count
            if len(counts) > _HELD:
                offsets.append(_write_sections(counts, file))
                counts.clear()
        offsets.append(_write_sections(counts, file))
    return offsets


def count(files: Sequence[tuple[pathlib.Path, list[list[int]]]]) -> WordCounts:
    """Sums the counts of words over any number of files."""
    kept: list[tuple[int, int, str]] = []
    counted = WordCounts()
    for section in range(_SECTIONS):
        counts: dict[str, int] = {}
        for path, offsets in files:
            with open(path, "rb") as file:
                for bounds in offsets:
                    file.seek(bounds[section])
                    part = json.loads(file.read(bounds[section + 1] - bounds[section]))
                    for word, number in part.items():
                        counts[word] = counts.get(word, 0) + number
        counted.add(counts)
        # Like words have like checksums, which Knuth's factor scatters over 32 bits.
        kept += [(-n, _hash(word) * 2654435761 & 0xFFFFFFFF, word) for word, n in counts.items()]
        if len(kept) > MOST_WORDS:
            kept.sort()
            del kept[MOST_WORDS:]
    pairs = sorted((word, -negative) for negative, _, word in kept)
    counted.words = [word for word, _ in pairs]
    counted.counts = [number for _, number in pairs]
    return counted


def _write_sections(words: Mapping[str, int], file: IO[bytes]) -> list[int]:
    sections: list[dict[str, int]] = [{} for _ in range(_SECTIONS)]
    for word, number in words.items():
        sections[_hash(word) % _SECTIONS][word] = number
    offsets = [file.tell()]
    for section in sections:
        file.write(json.dumps(section).encode())
        offsets.append(file.tell())
    return offsets


def _hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "surrogatepass"))
