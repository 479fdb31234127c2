"""Writes the words of a corpus as numbers, and counts them to train a vocabulary.

For each part of the corpus, a range of documents (data.parts), one file has the counts of its words
in sections by a hash of the word. The sections of all files are then summed one after another, so
counts are exact and memory is bounded for any size of corpus. The 250,000 most frequent words train
the vocabulary; a hash breaks ties, so that no initial letter is favoured.
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

# Maximum number of distinct words that train a vocabulary.
MAX_TRAINING_WORDS = 250_000

# Replaces the placeholder of omitted words in a text: becomes [UNK] because of its length.
_OVERLONG_WORD = f" {'a' * (MAX_WORD + 1)} "

# Characters of a whitespace-separated word that are counted for SentencePiece.
_MAX_COUNTED = 4_000
_SECTIONS = 64
# Distinct words held in memory while counting; then the counts are written.
_HELD = 300_000


class WordNumbers(dict):
    """Numbers words by first use; `first` ends a sentence, `first + 1` is any overlong word."""

    def __init__(self, first: int = 0):
        super().__init__({"\n": first, "": first + 1})
        self._first = first

    def __missing__(self, word: str) -> int:
        if len(word) > MAX_WORD:  # WordPiece maps all of them to [UNK]
            return self[""]
        self[word] = number = self._first + len(self)
        return number


class NumberWriter:
    """Writes sentences as the numbers of their words, and the words with their counts.

    FOLDER/tokens.bin   uint32, the number of each word
    FOLDER/words.txt    the words, in the order of their numbers; a word may occur twice
    FOLDER/counts.json  how often each occurs: one JSON object after another, see `offsets`
    """

    def __init__(self, folder: pathlib.Path, case: Case, unknown_word: str = ""):
        self._splitter = Splitter(case)
        self._unknown_word = unknown_word  # placeholder of omitted words in the text, e.g. <unk>
        self._numbers = WordNumbers()
        self._first = 0
        self._counts = np.zeros(0, np.int64)
        names = ("tokens.bin", "words.txt", "counts.json")
        files = [open(folder / name, "wb") for name in names]  # noqa: SIM115
        self._number_file, self._word_file, self._count_file = files
        # For each write of counts.json: where the sections begin, and where the last one ends.
        self.offsets: list[list[int]] = []
        # Number of words longer than MAX_WORD: all are [UNK], and none trains a vocabulary.
        self.long_words = 0

    def add(self, sentences: Iterable[str]) -> np.ndarray:
        """Writes sentences; returns how many words each has, int64."""
        if self._unknown_word:
            sentences = list(sentences)
            # Their replacements are counted as long words below.
            self.long_words -= sum(s.count(self._unknown_word) for s in sentences)
            sentences = (s.replace(self._unknown_word, _OVERLONG_WORD) for s in sentences)
        words, indices = self._splitter.split(sentences)
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.uint32)[indices]
        self.long_words += int((numbers == self._first + 1).sum())
        is_end = numbers == self._first
        ends = np.flatnonzero(is_end)
        numbers = numbers[~is_end]
        self._number_file.write(numbers.tobytes())
        counts = np.bincount(numbers - np.uint32(self._first), minlength=len(self._numbers))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        if len(self._numbers) > _HELD:
            self._flush()
        return np.diff(ends, prepend=-1) - 1

    def close(self) -> None:
        """Writes the rest and closes the files."""
        self._flush()
        for file in (self._number_file, self._word_file, self._count_file):
            file.close()

    def _flush(self) -> None:
        words = list(self._numbers)
        # The first two words become empty lines, so that line N is the word with number N.
        self._word_file.write("\n".join(["", *words[1:], ""]).encode())
        counted = zip(words[2:], self._counts[2:].tolist(), strict=True)
        self.offsets.append(_write_sections({w: n for w, n in counted if n}, self._count_file))
        self._first += len(words)
        self._numbers, self._counts = WordNumbers(self._first), np.zeros(0, np.int64)


class WordTable:
    """The ids of each word of a part, to convert word numbers to ids."""

    def __init__(self, words: Sequence[str], tokenizer: WordPiece):
        ids = [tokenizer.ids_of_word[word] if word else [tokenizer.unk_id] for word in words]
        self._lengths = np.fromiter(map(len, ids), np.uint8, len(ids))
        self._ids = np.fromiter(
            (i for word_ids in ids for i in word_ids),
            np.min_scalar_type(tokenizer.size),
            int(self._lengths.sum(dtype=int)),
        )
        self._starts = np.cumsum(self._lengths, dtype=np.int64) - self._lengths

    def ids(self, numbers: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of sentences, and the number of ids of each, int64.

        `counts` has the number of words of each sentence, all above 0.
        """
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths, dtype=np.int64)
        # The id at position i of the result is at i + shifts[i] in the table.
        shifts = np.repeat(self._starts[numbers] - (ends - lengths), lengths)
        first_words = np.cumsum(counts, dtype=np.int64) - counts
        id_counts = np.add.reduceat(lengths, first_words, dtype=np.int64)
        return self._ids[np.arange(len(shifts)) + shifts], id_counts


def read_words(path: pathlib.Path) -> list[str]:
    """Returns the words of a part, in the order of their numbers."""
    return path.read_bytes().decode().split("\n")[:-1]


def write_counts(texts: Iterable[str], case: Case, path: pathlib.Path) -> list[list[int]]:
    """Counts the words between whitespace for SentencePiece; returns `NumberWriter.offsets`.

    Words of over 200 characters, as in scripts without whitespace, are counted in chunks of 200.
    What follows the first 4,000 characters is ignored, since SentencePiece skips longer sentences.
    """
    offsets: list[list[int]] = []
    counts: dict[str, int] = {}
    with open(path, "wb") as file:
        for text in texts:
            text = text.lower() if case == "uncased" else text
            for word, count in collections.Counter(text.split()).items():
                for start in range(0, min(len(word), _MAX_COUNTED), MAX_WORD):
                    chunk = word[start : start + MAX_WORD]
                    counts[chunk] = counts.get(chunk, 0) + count
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
                    content = file.read(bounds[section + 1] - bounds[section])
                    for word, number in json.loads(content).items():
                        counts[word] = counts.get(word, 0) + number
        counted.add(counts)
        # Similar words have similar checksums, which Knuth's factor spreads over 32 bits.
        kept += [(-n, _hash(word) * 2654435761 & 0xFFFFFFFF, word) for word, n in counts.items()]
        if len(kept) > MAX_TRAINING_WORDS:
            kept.sort()
            del kept[MAX_TRAINING_WORDS:]
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
