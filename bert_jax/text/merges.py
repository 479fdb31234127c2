"""Learns the merges of a WordPiece or BPE vocabulary from counted words.

Reproduces Hugging Face's trainer of byte-pair encoding (tokenizers 0.23, models/bpe/trainer.rs):
the same words give the same merges in the same order. That trainer takes only texts, so each word
would have to be passed as often as it occurs, and needs 0.9 KB per word.
"""

import heapq
from collections.abc import Sequence

import numpy as np

# Pairs that occur less often are not merged.
_MIN_COUNT = 2


def learn(
    words: Sequence[str],
    counts: Sequence[int],
    alphabet: Sequence[str],
    continuing: Sequence[str],
    size: int,
) -> list[tuple[str, str]]:
    """Returns merges of the most frequent pairs, which yield up to `size` new tokens.

    Words are distinct and not empty; `counts` has how often each occurs. Characters outside the
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
        left, right, word_ids = pair
        pairs.append((tokens[left], tokens[right]))
        token = tokens[left] + tokens[right].removeprefix(mark)
        if token not in ids:
            ids[token] = len(tokens)
            tokens.append(token)
        merger.merge(left, right, ids[token], word_ids)
    return pairs


class _Merger:
    """The words as tokens, with the counts of all pairs of adjacent tokens.

    As in Hugging Face's trainer, a pair may be queued several times, each time with only the words
    in which the latest merge created it, and its count is not reduced when it is merged: the order
    of merges depends on this.
    """

    def __init__(self, words: Sequence[str], counts: np.ndarray, tokens: Sequence[str]):
        self._word_counts = counts
        text = np.frombuffer("".join(words).encode("utf-32-le", "replace"), np.uint32)
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        starts = np.cumsum(lengths) - lengths
        is_first = np.zeros(len(text), bool)
        is_first[starts] = True
        # Two tables from characters to tokens: for the first character of a word, and for others.
        table = np.full((2, int(text.max(initial=0)) + 1), -1, np.int32)
        for number, token in enumerate(tokens):
            code_point = ord(token[-1])
            if code_point < table.shape[1]:
                table[int(len(token) > 1), code_point] = number
        if max(map(len, tokens), default=0) == 1:  # none is `##c`
            table[1] = table[0]
        known = table[0][text] >= 0
        word_ids = np.repeat(np.arange(len(words), dtype=np.int32), lengths)[known]
        # int32, the tokens of all words; each word keeps its start when it becomes shorter.
        self._tokens = np.where(is_first, table[0][text], table[1][text])[known]
        self._lengths = np.bincount(word_ids, minlength=len(words)).astype(np.int32)
        self._starts = np.cumsum(self._lengths) - self._lengths
        is_pair = word_ids[1:] == word_ids[:-1]
        keys = _pair_keys(self._tokens[:-1][is_pair], self._tokens[1:][is_pair])
        holders = word_ids[:-1][is_pair]
        self._pair_counts: dict[int, int] = {}
        self._queue: list[tuple[int, int, int, np.ndarray]] = []
        self._queued = 0
        self._add_counts(keys, self._word_counts[holders])
        self._push(keys, holders)

    def pop(self) -> tuple[int, int, np.ndarray] | None:
        """Returns the most frequent pair (ties: the smallest ids) and ids of words that have it."""
        while self._queue:
            negative, key, number, holders = self._queue[0]
            count = self._pair_counts[key]
            if count != -negative:
                heapq.heapreplace(self._queue, (-count, key, number, holders))
                continue
            if count < _MIN_COUNT:
                return None
            heapq.heappop(self._queue)
            return key >> 32, key & 0xFFFFFFFF, holders
        return None

    def merge(self, left: int, right: int, new: int, word_ids: np.ndarray) -> None:
        """Replaces each pair `left, right` by `new` in the words `word_ids`."""
        positions, row = self._locate(word_ids, self._lengths[word_ids])
        tokens = self._tokens[positions]
        at = _find_pairs(tokens, row, left, right)
        if not len(at):
            return
        vanishing = _find_vanishing(tokens, row, at)
        keys = _pair_keys(tokens[vanishing], tokens[vanishing + 1])
        self._add_counts(keys, -self._word_counts[word_ids[row[vanishing]]])
        # Between two adjacent merged pairs, the trainer temporarily has the pair `new, left`.
        transient_rows = row[at[1:][at[1:] == at[:-1] + 2]]
        tokens[at] = new
        is_kept, is_merged = np.ones(len(tokens), bool), np.zeros(len(tokens), bool)
        is_kept[at + 1], is_merged[at] = False, True
        tokens, is_merged = tokens[is_kept], is_merged[is_kept]
        lengths = np.bincount(row[is_kept], minlength=len(word_ids))
        positions, row = self._locate(word_ids, lengths)
        self._tokens[positions], self._lengths[word_ids] = tokens, lengths
        created = np.flatnonzero((is_merged[:-1] | is_merged[1:]) & (row[:-1] == row[1:]))
        keys, holders = _pair_keys(tokens[created], tokens[created + 1]), word_ids[row[created]]
        self._add_counts(keys, self._word_counts[holders])
        if len(transient_rows):
            transient = np.full(len(transient_rows), (new << 32) | left)
            self._add_counts(transient, np.zeros(len(transient), np.int64))
            keys = np.append(keys, transient)
            holders = np.append(holders, word_ids[transient_rows])
        self._push(keys, holders)

    def _locate(self, word_ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions of tokens of words, and each one's index in `word_ids`."""
        row = np.repeat(np.arange(len(word_ids)), lengths)
        shifts = self._starts[word_ids] - (np.cumsum(lengths) - lengths)
        return np.arange(len(row)) + shifts[row], row

    def _add_counts(self, keys: np.ndarray, counts: np.ndarray) -> None:
        if not len(keys):
            return
        pair_counts = self._pair_counts
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        firsts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        sums = np.add.reduceat(counts[order], firsts)
        for key, value in zip(keys[firsts].tolist(), sums.tolist(), strict=True):
            pair_counts[key] = pair_counts.get(key, 0) + value

    def _push(self, keys: np.ndarray, holders: np.ndarray) -> None:
        """Queues pairs with the words in which they are new."""
        if not len(keys):
            return
        order = np.lexsort((holders, keys))
        keys, holders = keys[order], holders[order]
        is_new_key = np.concatenate([[True], keys[1:] != keys[:-1]])
        is_unique = is_new_key | np.concatenate([[True], holders[1:] != holders[:-1]])
        keys, holders, is_new_key = keys[is_unique], holders[is_unique], is_new_key[is_unique]
        firsts = np.flatnonzero(is_new_key)
        bounds = [*firsts.tolist(), len(keys)]
        for number, key in enumerate(keys[firsts].tolist()):
            count = self._pair_counts[key]
            if count >= _MIN_COUNT:
                word_ids = holders[bounds[number] : bounds[number + 1]].copy()
                heapq.heappush(self._queue, (-count, key, self._queued, word_ids))
                self._queued += 1


def _find_pairs(tokens: np.ndarray, row: np.ndarray, left: int, right: int) -> np.ndarray:
    """Returns the positions of a pair in tokens of words; of overlapping ones every other one."""
    at = np.flatnonzero((tokens[:-1] == left) & (tokens[1:] == right) & (row[:-1] == row[1:]))
    if left == right:  # from the left
        begin = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) > 1, at, 0))
        at = at[(at - begin) % 2 == 0]
    return at


def _find_vanishing(tokens: np.ndarray, row: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns the positions of pairs that merges at `at` remove, apart from the merged pairs."""
    before = at[(at > 0) & (row[at - 1] == row[at])] - 1
    after = at[at + 2 < len(tokens)] + 1
    after = after[row[after] == row[after + 1]]
    return np.concatenate([before, after[~np.isin(after, before)]])


def _pair_keys(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns int64 keys of pairs of ids; the keys sort as the pairs do."""
    return (left.astype(np.int64) << 32) | right
