"""Learns the merges of a WordPiece or BPE vocabulary from counted words.

Reproduces Hugging Face's trainer of byte-pair encoding (tokenizers 0.23, models/bpe/trainer.rs):
the same words give the same merges in the same order. That trainer takes only texts, so each word
would have to be passed as often as it occurs, and needs 0.9 KB per word.
"""

import heapq
from collections.abc import Sequence

import numpy as np

# Pairs that occur less often are not merged.
_LEAST_COUNT = 2


def learn(
    words: Sequence[str],
    counts: Sequence[int],
    alphabet: Sequence[str],
    continuing: Sequence[str],
    size: int,
) -> list[tuple[str, str]]:
    """Returns merges of the most frequent pairs, which yield up to `size` new tokens.

    Words are different and not empty; `counts` has how often each occurs. Characters outside the
    alphabet are ignored. `continuing` has the characters that continue words, as `##c`; if it is
    empty, a token is the same at any position of a word. There are fewer new tokens if no pair is
    left that occurs twice.
    """
    tokens = [*alphabet, *continuing]
    merger = _Merger(words, np.array(counts, np.int64), tokens)
    ids = {token: number for number, token in enumerate(tokens)}
    mark = "##" if continuing else ""
    pairs: list[tuple[str, str]] = []
    while len(ids) < len(alphabet) + len(continuing) + size:
        pair = merger.pop()
        if pair is None:
            break
        left, right, holders = pair
        pairs.append((tokens[left], tokens[right]))
        token = tokens[left] + tokens[right].removeprefix(mark)
        if token not in ids:
            ids[token] = len(tokens)
            tokens.append(token)
        merger.merge(left, right, ids[token], holders)
    return pairs


class _Merger:
    """The words as tokens, with the counts of all pairs of adjacent tokens.

    As in Hugging Face's trainer, a pair may be queued several times, each time with the words in
    which it is new, and its count is not reduced when it is merged: the order of merges depends on
    this.
    """

    def __init__(self, words: Sequence[str], counts: np.ndarray, tokens: Sequence[str]):
        self._counts = counts
        text = np.frombuffer("".join(words).encode("utf-32-le", "replace"), np.uint32)
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        starts = np.cumsum(lengths) - lengths
        first = np.zeros(len(text), bool)
        first[starts] = True
        # Two tables from characters to tokens: for the first character of a word, and for others.
        table = np.full((2, int(text.max(initial=0)) + 1), -1, np.int32)
        for number, token in enumerate(tokens):
            code = ord(token[-1])
            if code < table.shape[1]:
                table[int(len(token) > 1), code] = number
        if max(map(len, tokens), default=0) == 1:  # none is `##c`
            table[1] = table[0]
        known = table[0][text] >= 0
        holders = np.repeat(np.arange(len(words), dtype=np.int32), lengths)[known]
        # int32, the tokens of all words; each word keeps its start when it becomes shorter.
        self._tokens = np.where(first, table[0][text], table[1][text])[known]
        self._lengths = np.bincount(holders, minlength=len(words)).astype(np.int32)
        self._starts = np.cumsum(self._lengths) - self._lengths
        inner = holders[1:] == holders[:-1]
        codes = _code(self._tokens[:-1][inner], self._tokens[1:][inner])
        holders = holders[:-1][inner]
        self._pairs: dict[int, int] = {}
        self._queue: list[tuple[int, int, int, np.ndarray]] = []
        self._queued = 0
        self._count(codes, self._counts[holders])
        self._push(codes, holders)

    def pop(self) -> tuple[int, int, np.ndarray] | None:
        """Returns the most frequent pair (ties: the smallest ids) and the words that have it."""
        while self._queue:
            negative, code, number, holders = self._queue[0]
            count = self._pairs[code]
            if count != -negative:
                heapq.heapreplace(self._queue, (-count, code, number, holders))
                continue
            if count < _LEAST_COUNT:
                return None
            heapq.heappop(self._queue)
            return code >> 32, code & 0xFFFFFFFF, holders
        return None

    def merge(self, left: int, right: int, new: int, holders: np.ndarray) -> None:
        """Replaces each pair `left, right` by `new` in the words `holders`."""
        lengths = self._lengths[holders]
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        row = np.repeat(np.arange(len(holders)), lengths)
        where = np.arange(total) + (self._starts[holders] - ends + lengths)[row]
        tokens = self._tokens[where]
        at = np.flatnonzero((tokens[:-1] == left) & (tokens[1:] == right) & (row[:-1] == row[1:]))
        if left == right:  # every other one of overlapping pairs, from the left
            begin = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) > 1, at, 0))
            at = at[(at - begin) % 2 == 0]
        if not len(at):
            return
        # Pairs that vanish: with the token before and the token after, except the merged pair.
        before = at[(at > 0) & (row[at - 1] == row[at])] - 1
        behind = at[at + 2 < total] + 1
        behind = behind[row[behind] == row[behind + 1]]
        gone = np.concatenate([before, behind[~np.isin(behind, before)]])
        # Between two adjacent merged pairs, the trainer temporarily has `new, left`.
        passing = row[at[1:][at[1:] == at[:-1] + 2]]
        self._count(_code(tokens[gone], tokens[gone + 1]), -self._counts[holders[row[gone]]])
        kept = np.ones(total, bool)
        kept[at + 1] = False
        tokens[at] = new
        fresh = np.zeros(total, bool)
        fresh[at] = True
        tokens, row, fresh = tokens[kept], row[kept], fresh[kept]
        lengths = np.bincount(row, minlength=len(holders))
        starts = self._starts[holders] - np.cumsum(lengths) + lengths
        self._tokens[np.arange(len(row)) + starts[row]] = tokens
        self._lengths[holders] = lengths
        come = np.flatnonzero((fresh[:-1] | fresh[1:]) & (row[:-1] == row[1:]))
        codes, owners = _code(tokens[come], tokens[come + 1]), holders[row[come]]
        self._count(codes, self._counts[owners])
        if len(passing):
            extra = np.full(len(passing), (new << 32) | left)
            self._count(extra, np.zeros(len(passing), np.int64))
            codes, owners = np.append(codes, extra), np.append(owners, holders[passing])
        self._push(codes, owners)

    def _count(self, codes: np.ndarray, counts: np.ndarray) -> None:
        """Adds to the counts of pairs."""
        pairs = self._pairs
        if not len(codes):
            return
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        firsts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
        sums = np.add.reduceat(counts[order], firsts)
        for code, value in zip(codes[firsts].tolist(), sums.tolist(), strict=True):
            pairs[code] = pairs.get(code, 0) + value

    def _push(self, codes: np.ndarray, holders: np.ndarray) -> None:
        """Queues pairs with the words in which they are new."""
        if not len(codes):
            return
        order = np.lexsort((holders, codes))
        codes, holders = codes[order], holders[order]
        new_code = np.concatenate([[True], codes[1:] != codes[:-1]])
        single = new_code | np.concatenate([[True], holders[1:] != holders[:-1]])
        codes, holders, new_code = codes[single], holders[single], new_code[single]
        firsts = np.flatnonzero(new_code)
        bounds = [*firsts.tolist(), len(codes)]
        for number, code in enumerate(codes[firsts].tolist()):
            count = self._pairs[code]
            if count >= _LEAST_COUNT:
                part = holders[bounds[number] : bounds[number + 1]].copy()
                heapq.heappush(self._queue, (-count, code, self._queued, part))
                self._queued += 1


def _code(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Encodes pairs of ids as int64, in the order of pairs."""
    return (left.astype(np.int64) << 32) | right
