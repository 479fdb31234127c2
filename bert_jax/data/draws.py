"""The sources of random choices; the rules that use them are in data.pairs and data.masking.

`SequentialDraws` consumes one `random.Random` in the order of calls of google-research/bert
(create_pretraining_data.py), for conformance. `CounterDraws` computes every draw from (key, row,
column, purpose), so a batch depends only on its rows, and an epoch may be planned in any order.

Shape letters: B rows, N candidates, P predictions.
"""

import functools
import hashlib
import random
from dataclasses import dataclass

import numpy as np

# What a replaced token becomes (Devlin et al. 2018, section 3.1).
MASK, KEEP, RANDOM = 0, 1, 2

# The purposes of draws: the fourth word of a Philox counter.
_FRONT_CUTS_A, _FRONT_CUTS_B, _CANDIDATES, _REPLACEMENTS, _PERMUTATION = range(5)
_TARGET, _CHUNK, _RANDOM_NEXT = range(5, 8)
_SPANS, _FIRST_LENGTH = range(8, 10)

# Length of a span in words: geometric with this p, truncated (Joshi et al. 2020, SpanBERT).
LONGEST_SPAN = 10
_SPAN_P = 0.2
_SPAN_PROBABILITIES = (1 - _SPAN_P) ** np.arange(LONGEST_SPAN) * _SPAN_P
_SPAN_PROBABILITIES /= _SPAN_PROBABILITIES.sum()

# Attempts to draw another document before the same one is kept (`create_instances_from_document`).
_ATTEMPTS = 10

# Counters processed at once: enough to hide NumPy's overhead, few enough for the cache.
_BLOCK = 1 << 13


@dataclass(frozen=True)
class Removals:
    """The tokens that A and B lose in truncation, and in which order (`truncate_seq_pair`).

    First the longer side loses `from_longer` tokens. Then B and A lose `alternating` tokens in
    turn, B first, since a tie takes from B.
    """

    a_is_longer: np.ndarray  # bool [B], A is the longer side
    from_longer: np.ndarray  # int64 [B]
    alternating: np.ndarray  # int64 [B]

    @property
    def a_total(self) -> np.ndarray:
        """Tokens that A loses, int64 [B]."""
        return np.where(self.a_is_longer, self.from_longer, 0) + self.alternating // 2

    @property
    def b_total(self) -> np.ndarray:
        """Tokens that B loses, int64 [B]."""
        return np.where(self.a_is_longer, 0, self.from_longer) + (self.alternating + 1) // 2


class SequentialDraws:
    """All draws from one generator in the reference's order, for one row at a time (B = 1).

    `CounterDraws` describes what is drawn; the reference has no spans.
    """

    def __init__(self, rng: random.Random):
        self._rng = rng

    def shuffled_order(self, count: int) -> list[int]:
        """Draws an order of all documents or of all instances."""
        order = list(range(count))
        self._rng.shuffle(order)
        return order

    def target_length(self, max_num_tokens: int, short_seq_prob: float) -> np.ndarray:
        """Calls `random`, then `randint` if the target is short."""
        if self._rng.random() < short_seq_prob:
            return np.array([self._rng.randint(2, max_num_tokens)])
        return np.array([max_num_tokens])

    def split_point(self, sentence_counts: np.ndarray) -> np.ndarray:
        """Calls `randint` if there is a choice."""
        return np.array(
            [self._rng.randint(1, sentence_counts[0] - 1) if sentence_counts[0] >= 2 else 1]
        )

    def draw_random_next(self, needed: np.ndarray) -> np.ndarray:
        """Calls `random` if the draw is needed."""
        return np.array([bool(needed[0]) and self._rng.random() < 0.5])

    def other_document(
        self, document_count: int, current: np.ndarray, needed: np.ndarray
    ) -> np.ndarray:
        """Calls `randint` until the document is another."""
        other = int(current[0])
        for _ in range(_ATTEMPTS * needed[0]):
            other = self._rng.randint(0, document_count - 1)
            if other != current[0]:
                break
        return np.array([other])

    def start_sentence(self, sentence_counts: np.ndarray, needed: np.ndarray) -> np.ndarray:
        """Calls `randint` if the draw is needed."""
        return np.array([self._rng.randint(0, sentence_counts[0] - 1) if needed[0] else 0])

    def front_cuts(self, removals: Removals) -> tuple[np.ndarray, np.ndarray]:
        """Calls `random` for each lost token, in the order of their removal."""
        from_longer, alternating = int(removals.from_longer[0]), int(removals.alternating[0])
        sides = [bool(removals.a_is_longer[0])] * from_longer + [
            bool(i % 2) for i in range(alternating)
        ]
        cuts = {True: 0, False: 0}
        for is_a in sides:
            cuts[is_a] += self._rng.random() < 0.5
        return np.array([cuts[True]]), np.array([cuts[False]])

    def candidate_order(self, counts: np.ndarray) -> np.ndarray:
        """Calls `shuffle`."""
        return np.array([self.shuffled_order(int(counts[0]))])

    def replacements(
        self, counts: np.ndarray, vocab_size: int, mask_share: float, random_share: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Calls `random`, `random`, `randint`, each only if it is needed."""
        kinds, ids = [], []
        for _ in range(int(counts[0])):
            kind, token = MASK, 0
            if self._rng.random() >= mask_share:
                keep_share = (1.0 - random_share - mask_share) / (1.0 - mask_share)
                kind = KEEP if self._rng.random() < keep_share else RANDOM
                if kind == RANDOM:
                    token = self._rng.randint(0, vocab_size - 1)
            kinds.append(kind)
            ids.append(token)
        return np.array([kinds], np.uint8), np.array([ids], np.int64)


class CounterDraws:
    """Draws as a function of (key, row, column, purpose), for any rows in any order.

    B is the length of `rows`. `needed`, bool [B], marks the draws that are used; the others have no
    meaning.

    Args:
      key: the result of `key_of`.
      rows: int64 or uint64 [B]. For a batch the indices of rows in their phase; for a plan the
        indices of documents, or of the first sentences of chunks.
    """

    def __init__(self, key: tuple[int, int], rows: np.ndarray):
        self._key = key
        self._rows = np.asarray(rows, np.uint64)

    def target_length(self, max_num_tokens: int, short_seq_prob: float) -> np.ndarray:
        """Draws target lengths, int64 [B]: the maximum, or with `short_seq_prob` any from 2 to it.

        One random integer decides whether a target is short, another its length.
        """
        words = self._uint32s(_TARGET, 2)
        short = words[:, 0] < short_seq_prob * 2**32
        return np.where(
            short, 2 + bounded_integers(words[:, 1], max_num_tokens - 1), max_num_tokens
        )

    def split_point(self, sentence_counts: np.ndarray) -> np.ndarray:
        """Draws how many sentences of a chunk make A, int64 [B], from 1 to all but one.

        Uses the upper 31 bits of the chunk's draw.
        """
        return 1 + ((self._chunk_draws >> 1) * (sentence_counts - 1) >> 31)

    def draw_random_next(self, needed: np.ndarray) -> np.ndarray:
        """Returns whether B comes from another document, bool [B]: the last bit of the draw."""
        return (self._chunk_draws & 1).astype(bool)

    def other_document(
        self, document_count: int, current: np.ndarray, needed: np.ndarray
    ) -> np.ndarray:
        """Draws another document than `current`, or `current` after ten such draws; int64 [B]."""
        other = bounded_integers(self._random_next_draws[:, 1], document_count)
        again = np.flatnonzero(other == current)
        if len(again):
            # Column 1 repeats the draw above. `argmax` is 0, so takes it, if no attempt differs.
            words = CounterDraws(self._key, self._rows[again])._uint32s(_RANDOM_NEXT, 1 + _ATTEMPTS)
            attempts = bounded_integers(words[:, 1:], document_count)
            column = np.argmax(attempts != current[again, None], axis=1)
            other[again] = attempts[np.arange(len(again)), column]
        return other

    def start_sentence(self, sentence_counts: np.ndarray, needed: np.ndarray) -> np.ndarray:
        """Returns the sentence in its document at which a random B starts; int64 [B]."""
        return bounded_integers(self._random_next_draws[:, 0], sentence_counts)

    def first_length(self, most: int) -> np.ndarray:
        """Draws the number of tokens in the first row of an epoch, from 1 to `most`; int64 [B].

        A shorter first row shifts the borders of all rows from epoch to epoch.
        """
        return 1 + bounded_integers(self._uint32s(_FIRST_LENGTH, 1)[:, 0], most)

    @functools.cached_property
    def _chunk_draws(self) -> np.ndarray:
        """Draws 32 bits for each row, int64 [B]; four consecutive rows share a Philox block."""
        rows = self._rows
        if not len(rows):
            return np.empty(0, np.int64)
        first = rows.min() >> np.uint64(2)
        count = int((rows.max() >> np.uint64(2)) - first) + 1
        if count <= len(rows):  # all blocks from the first to the last
            block, index = first + np.arange(count, dtype=np.uint64), rows - (first << np.uint64(2))
        else:  # a block for each row
            block, index = rows >> np.uint64(2), rows & np.uint64(3)
            index += np.arange(0, 4 * len(rows), 4, dtype=np.uint64)
        words = philox(0, block & _LOW, block >> np.uint64(32), _CHUNK, self._key)
        return words.ravel()[index.view(np.int64)].astype(np.int64)

    @functools.cached_property
    def _random_next_draws(self) -> np.ndarray:
        """Draws for a random B: column 0 is for its start, 1 for the first try of its document."""
        return self._uint32s(_RANDOM_NEXT, 4)

    def front_cuts(self, removals: Removals) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many of the tokens that A and B lose are at the front; int64 [B] each.

        Counts the set bits among one random bit for each token: exactly binomial.
        """
        purposes = np.array([[_FRONT_CUTS_A], [_FRONT_CUTS_B]])
        front_a, front_b = self._binomial(purposes, np.stack([removals.a_total, removals.b_total]))
        return front_a, front_b

    def candidate_order(self, counts: np.ndarray) -> np.ndarray:
        """Returns a random order of each row's candidates, uint32 [B, max(counts)].

        Sorts a random word for each candidate. Entries of row r from counts[r] on mean nothing.
        """
        columns = int(counts.max())
        keys = self._uint32s(_CANDIDATES, columns).astype(np.uint64) << np.uint64(32)
        column = np.arange(columns, dtype=np.uint64)
        keys |= column
        is_unused = column >= counts[:, None].astype(np.uint64)
        np.copyto(keys, np.iinfo(np.uint64).max, where=is_unused)
        # Sorting words that carry their column is several times faster than argsort, and stable.
        keys.sort(axis=1)
        return keys.astype(np.uint32)  # the lower half

    def span_lengths(self, counts: np.ndarray) -> np.ndarray:
        """Draws for each word of text the length of a span from there, int64 [B, max(counts)].

        Lengths are in words and geometric, from 1 to LONGEST_SPAN; 3.8 on average.
        """
        bits = self._uint32s(_SPANS, int(counts.max()))
        return 1 + np.searchsorted(np.cumsum(_SPAN_PROBABILITIES)[:-1] * 2**32, bits, "right")

    def replacements(
        self, counts: np.ndarray, vocab_size: int, mask_share: float, random_share: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws the replacements of predicted tokens: kind uint8 [B, P], a random id [B, P]."""
        columns = int(counts.max())
        words = self._uint32s(_REPLACEMENTS, 2 * columns)
        # Interleaved: the words of a row must not depend on the number of tokens in other rows.
        kind, token = words[:, ::2], words[:, 1::2]
        kinds = np.full(kind.shape, MASK, np.uint8)
        kinds[kind >= int(mask_share * 2**32)] = KEEP
        kinds[kind >= int((1.0 - random_share) * 2**32)] = RANDOM
        return kinds, bounded_integers(token, vocab_size)

    def _uint32s(self, purpose: int, columns: int) -> np.ndarray:
        """Draws random integers of 32 bits, uint32 [B, columns]."""
        blocks = -(-columns // 4)
        out = np.empty((len(self._rows), blocks, 4), np.uint32)
        step = max(1, _BLOCK // max(1, blocks))
        column = np.arange(blocks, dtype=np.uint64)
        for start in range(0, len(self._rows), step):
            rows = self._rows[start : start + step, None]
            low, high = rows & _LOW, rows >> np.uint64(32)
            out[start : start + step] = philox(column, low, high, purpose, self._key)
        return out.reshape(len(self._rows), 4 * blocks)[:, :columns]

    def _binomial(self, purposes: np.ndarray, trials: np.ndarray) -> np.ndarray:
        """Draws Binomial(trials, 1/2), int64 [Q, B]: set bits among `trials` bits of the row.

        The Q purposes are int64 [Q, 1], trials int64 [Q, B].
        """
        # A flat list of (entry, block of 128 bits): each entry has ceil(trials / 128) blocks.
        flat = trials.ravel()
        blocks = -(-flat // 128)
        entry = np.repeat(np.arange(len(flat)), blocks)
        block = np.arange(len(entry)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        row = np.broadcast_to(self._rows, trials.shape).ravel()[entry]
        purpose = np.broadcast_to(purposes, trials.shape).ravel()[entry]
        low, high = row & _LOW, row >> np.uint64(32)
        bits = philox(block, low, high, purpose, self._key)
        # How many of the 32 bits of each integer count.
        widths = flat[entry, None] - 32 * (4 * block[:, None] + np.arange(4))
        widths = np.clip(widths, 0, 32).astype(np.uint64)
        bits = bits.astype(np.uint64) & ((np.uint64(1) << widths) - np.uint64(1))
        counts = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
        return np.bincount(entry, counts, len(flat)).astype(np.int64).reshape(trials.shape)


Draws = CounterDraws | SequentialDraws


def bounded_integers(words: np.ndarray, bound: int | np.ndarray) -> np.ndarray:
    """Maps words to numbers from 0 to `bound` - 1, int64; probabilities are equal up to 2**-32."""
    return (words.astype(np.uint64) * np.asarray(bound, np.uint64) >> np.uint64(32)).view(np.int64)


def permutation(key: tuple[int, int], index: int, count: int) -> np.ndarray:
    """Returns the permutation number `index` of `count` rows, int64: argsort of random integers."""
    order = np.empty(count, np.uint64)
    for start in range(0, count, 4 * _BLOCK):
        part = order[start : start + 4 * _BLOCK]
        blocks = np.arange(start // 4, -(-(start + len(part)) // 4), dtype=np.uint64)
        words = philox(blocks, np.uint64(index), 0, _PERMUTATION, key).ravel()[: len(part)]
        np.left_shift(words, np.uint64(32), out=part, dtype=np.uint64)
        part |= np.arange(start, start + len(part), dtype=np.uint64)
    # Words carry their index in the lower half: sort is several times faster than argsort.
    order.sort()
    order &= _LOW
    return order.view(np.int64)


class ShuffledEpochs:
    """The numbers below `total`, epoch after epoch, each epoch in its own random order."""

    def __init__(self, key: tuple[int, int], total: int):
        self._key, self._total = key, total
        self._orders: dict[int, np.ndarray] = {}  # of the two latest epochs

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Returns the numbers at indices, counted from the start of the first epoch, int64."""
        epochs, slots = np.divmod(indices, self._total)
        numbers = np.empty(len(indices), np.int64)
        for epoch in np.unique(epochs).tolist():
            if epoch not in self._orders:
                if len(self._orders) > 1:
                    del self._orders[min(self._orders)]
                self._orders[epoch] = permutation(self._key, epoch, self._total)
            in_epoch = epochs == epoch
            numbers[in_epoch] = self._orders[epoch][slots[in_epoch]]
        return numbers


def key_of(*names: object) -> tuple[int, int]:
    """Returns a Philox key from names: the first 64 bits of their SHA-256, as two 32-bit words."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    c0: np.ndarray | np.uint64 | int,
    c1: np.ndarray | np.uint64,
    c2: np.ndarray | np.uint64 | int,
    c3: np.ndarray | np.uint64 | int,
    key: tuple[int, int],
) -> np.ndarray:
    """Computes Philox4x32-10 (Salmon et al. 2011) of counters that broadcast against each other.

    The words of counters and key are uint64 below 2**32; returns uint32 [..., 4].
    """
    # Not broadcast at first: with rows [B, 1] and columns [N] the first two rounds multiply only
    # the small arrays.
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in (c0, c1, c2, c3))
    k0, k1 = key
    shift = np.uint64(32)
    for _ in range(10):
        # The product of two 32-bit words fits in 64 bits, and its halves are the new words.
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c2 = (p1 >> shift) ^ c1, (p0 >> shift) ^ c3
        c0 ^= np.uint64(k0)
        c2 ^= np.uint64(k1)
        p0 &= _LOW
        p1 &= _LOW
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1, dtype=np.uint32, casting="unsafe")
