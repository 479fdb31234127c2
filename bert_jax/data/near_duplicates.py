"""Finds near-duplicate documents, and documents that hold text of evaluation sets.

Words are compared without case and punctuation. For tokenizers other than WordPiece, tokens take
the place of words. Documents are near duplicates if they have the same minima in one of 16 bands of
8 MinHashes of their n-grams of five words (Broder 1997; Penedo et al. 2024, FineWeb, section 3.4,
have 14 such bands). Documents whose n-grams have the Jaccard similarity s are found with
probability 1 - (1 - s^8)^16: .06 for s = .5, .61 for .7, .95 for .8, .9999 for .9. rensa (the
[dedup] extra) computes the MinHashes.

    LOCATION/compared-HASH/bands.bin          uint64 [BANDS, documents]: a hash of each band; 0 for
                                              a document of fewer than five words
    LOCATION/compared-HASH/contaminated.bin   bool [documents]: holds 13 words of an evaluation set
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax.config import Corpus
from bert_jax.data.parts import (
    DOCUMENT,
    SharedTokenizer,
    hash_inputs,
    load_tokenizer,
    map_file,
)
from bert_jax.data.work_items import Tick, WorkItem, local_file
from bert_jax.errors import InputError, prefix_errors
from bert_jax.text import line_reader, words
from bert_jax.text import sources as text_sources
from bert_jax.text.tokenizer import Case, basic_tokens

# Bands of MinHashes and the number in each; words of an n-gram whose hashes are minimised.
BANDS, _ROWS, _MINHASH_WORDS = 16, 8, 5
# Number of words in a row that a document may not share with an evaluation set (Brown et al. 2020,
# appendix C).
NGRAM = 13
# Tokens that are compared at once, so that their hashes stay in the processor's cache. A longer
# document is compared with others by so many of its first tokens.
_BLOCK = 1 << 18
# Tokens of the next block that an n-gram may need: 13 words with their punctuation.
_OVERLAP = 64
# Lines of an evaluation set that are split at once.
_LINES = 1 << 12
# Knuth's multiplier of a linear congruential generator with 64 bits.
_MULTIPLIER = np.uint64(6364136223846793005)
# Marks of a preceding blank in tokens of SentencePiece and of byte BPE.
_BLANKS = "\u2581\u0120"


def fingerprint_evaluation(corpus: Corpus) -> tuple[tuple[str, str], ...]:
    """Returns the path and the SHA-256 of each file of `corpus.evaluation_files`.

    Raises InputError if a file cannot be read as text, or a library that is needed is missing.
    """
    if is_used(corpus) and importlib.util.find_spec("rensa") is None:
        raise InputError(
            "corpus.near_duplicates=drop and corpus.evaluation_files need rensa, which is not "
            "installed: pip install 'bert-jax[dedup]'"
        )
    for path in corpus.evaluation_files:
        if "://" not in path and not os.path.isfile(path):
            raise InputError(f"corpus.evaluation_files: {path}: no such file")
        with prefix_errors("corpus.evaluation_files"):
            for _ in line_reader.read_file(path):
                pass
    return tuple((path, text_sources.sha256(path)) for path in corpus.evaluation_files)


def is_used(corpus: Corpus) -> bool:
    """Returns whether documents are compared at all."""
    return corpus.near_duplicates == "drop" or bool(corpus.evaluation_files)


@dataclasses.dataclass(frozen=True)
class CompareDocuments(WorkItem):
    """Hashes the bands of the documents of a part, and compares them with evaluation sets."""

    read: WorkItem  # the item that read the part
    case: Case
    tokenizer: SharedTokenizer | None  # of the tokens that it wrote; None: it wrote words
    evaluation: tuple[tuple[str, str], ...]  # files with their hashes

    @property
    def bytes(self) -> int:
        return self.read.bytes

    @property
    def name(self) -> str:
        library = importlib.metadata.version("rensa")
        return "compared-" + hash_inputs(self.read.name, self.evaluation, library)

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as scratch:
            tokens, bounds, table = self._open(pathlib.Path(scratch))
            documents = len(bounds) - 1
            bands = np.zeros((BANDS, documents), np.uint64)
            contaminated = np.zeros(documents, bool)
            ngrams = _evaluation_ngrams(self.evaluation, self.case, self.tokenizer)
            for first, last, start, stop in _blocks(bounds):
                hashes = table[tokens[start:stop]]
                ends = np.clip(bounds[first : last + 1] - start, 0, stop - start)
                hashes, ends = _without_punctuation(hashes, ends)
                if start == bounds[first]:  # only the first block of a long document
                    bands[:, first:last] = hash_bands(hashes, ends)
                if len(ngrams):
                    contaminated[first:last] |= _shares_ngram(hashes, ends, ngrams)
                tick(self.bytes * (stop - start) / max(int(bounds[-1]), 1))
        bands.tofile(folder / "bands.bin")
        contaminated.tofile(folder / "contaminated.bin")
        return {"documents": documents}

    def _open(self, scratch: pathlib.Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the tokens, the bounds of documents, and a hash by token: of each known word."""
        dtypes = {"tokens.bin": np.uint32, "sentences.bin": np.uint32, "documents.bin": DOCUMENT}
        files = (local_file(self.read, name, scratch) for name in dtypes)
        tokens, lengths, documents = map(map_file, files, dtypes.values())
        sentence_ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        counts = documents["sentences"].astype(np.int64)
        bounds = sentence_ends[np.concatenate([[0], np.cumsum(counts)])]
        if self.tokenizer is None:
            names = words.read_words(local_file(self.read, "words.txt", scratch))
        else:
            tokenizer = load_tokenizer(self.tokenizer)
            names = [tokenizer.token(number) for number in range(tokenizer.size)]
        return tokens, bounds, _hash_words(names)


def _blocks(bounds: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """Yields blocks: the first document, one past the last; the first token, one past the last.

    A document that is longer than a block gives several, of which each overlaps the next.
    """
    first = 0
    while first < len(bounds) - 1:
        begin = int(bounds[first])
        last = max(int(np.searchsorted(bounds, begin + _BLOCK, "right")) - 1, first + 1)
        end = int(bounds[last])
        for start in range(begin, max(end, begin + 1), _BLOCK):
            yield first, last, start, min(start + _BLOCK + _OVERLAP, end)
        first = last


def _hash_words(names: Sequence[str]) -> np.ndarray:
    """Hashes words without their case, uint64 [names]; 0 for words without letters and digits."""
    import rensa

    is_word = np.array([any(map(str.isalnum, name.lstrip(_BLANKS))) for name in names], bool)
    hashes = rensa.RMinHash.hash_token_sets([[name.lower() for name in names]])[0]
    return np.where(is_word, np.array(hashes, np.uint64) | np.uint64(1), np.uint64(0))


def _without_punctuation(hashes: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes that are not 0, and the bounds of the documents among them."""
    is_word = hashes != 0
    return hashes[is_word], np.concatenate([[0], np.cumsum(is_word)])[ends]


def _hash_ngrams(
    hashes: np.ndarray, ends: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns hashes of the n-grams within documents, and the number of n-grams of each document.

    An n-gram has `length` words.

    `hashes` are those of words, uint64; `ends` are the bounds of documents, int64 [documents + 1].
    """
    count, sizes = max(len(hashes) - length + 1, 0), np.diff(ends)
    runs = hashes[:count].copy()
    for offset in range(1, length):
        runs *= _MULTIPLIER
        runs += hashes[offset : offset + count]
    is_within = np.ones(len(hashes), bool)  # not over the end of a document
    for offset in range(1, length):
        is_within[ends[1:][sizes >= offset] - offset] = False
    return runs[is_within[:count]], np.maximum(sizes - length + 1, 0)


def hash_bands(hashes: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns hashes of each document's bands, uint64 [BANDS, documents]; see `_hash_ngrams`."""
    import rensa

    runs, counts = _hash_ngrams(hashes, ends, _MINHASH_WORDS)
    bands, has_ngrams = np.zeros((BANDS, len(counts)), np.uint64), counts > 0
    if len(runs):
        offsets = np.concatenate([[0], np.cumsum(counts[has_ngrams])])
        matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
            runs, offsets, BANDS * _ROWS, 1
        )
        minima = np.array(matrix.to_rows(), np.uint64).reshape(-1, BANDS, _ROWS)
        values = np.zeros(minima.shape[:2], np.uint64)
        for row in range(_ROWS):
            values = values * _MULTIPLIER + minima[:, :, row]
        bands[:, has_ngrams] = (values | np.uint64(1)).T
    return bands


def _shares_ngram(hashes: np.ndarray, ends: np.ndarray, ngrams: np.ndarray) -> np.ndarray:
    """Returns whether documents hold one of the sorted `ngrams` of 13 words, bool [documents]."""
    runs, counts = _hash_ngrams(hashes, ends, NGRAM)
    index = np.minimum(np.searchsorted(ngrams, runs), len(ngrams) - 1)
    shared = np.concatenate([[0], np.cumsum(ngrams[index] == runs)])
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return np.diff(shared[bounds]) > 0


@functools.lru_cache(maxsize=1)
def _evaluation_ngrams(
    files: tuple[tuple[str, str], ...], case: Case, shared: SharedTokenizer | None
) -> np.ndarray:
    """Returns the hashes of all n-grams of 13 words within lines, uint64, sorted, without repeats.

    Words are those of the corpus: tokens, or, without a tokenizer, those of `basic_tokens`.
    """
    tokenizer = load_tokenizer(shared) if shared else None

    def split(line: str) -> list[str]:
        if tokenizer is None:
            return basic_tokens(line, case)
        return [tokenizer.token(token_id) for token_id in tokenizer.encode_after_space(line)]

    ngrams = [np.zeros(0, np.uint64)]
    texts = (line for path, _ in files for _, line in line_reader.read_file(path))
    while lines := [split(line) for line in itertools.islice(texts, _LINES)]:
        ends = np.concatenate([[0], np.cumsum([*map(len, lines)])])
        hashes = _hash_words([*itertools.chain.from_iterable(lines)])
        ngrams.append(_hash_ngrams(*_without_punctuation(hashes, ends), NGRAM)[0])
    return np.unique(np.concatenate(ngrams))


def find_later_duplicates(parts: Sequence[np.ndarray], order: np.ndarray) -> np.ndarray:
    """Returns which documents have a near duplicate earlier in `order`, bool [documents].

    Args:
      parts: the bands of each part, uint64 [BANDS, documents of the part]. One band of all parts is
        in memory at a time.
      order: the numbers of all documents, int64.
    """
    is_later = np.zeros(len(order), bool)
    for band in range(BANDS):
        values = np.concatenate([part[band] for part in parts])[order]
        repeats = np.ones(len(values), bool)
        repeats[np.unique(values, return_index=True)[1]] = False
        is_later[order[repeats & (values != 0)]] = True
    return is_later
