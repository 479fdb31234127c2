"""Which tokens are predicted and what stands in their place.

`create_masked_lm_predictions` of google-research/bert (Devlin et al. 2018, section 3.1, task 1):
15 % of the length, specials counted, rounded half to even, at least 1, at most the table's width;
80 % become [MASK], 10 % stay, 10 % become any piece of the vocabulary, specials included. Other
shares can be set, and what is masked at once: pieces, words, or spans of words (Joshi et al. 2020,
SpanBERT, section 3.1).

Shape letters: B rows, S sequence, P predictions, N candidates, G groups (whole words), L words of
the longest span.
"""

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from bert_jax.config import Data
from bert_jax.data import draws as draws_lib
from bert_jax.data.draws import Draws
from bert_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Ids:
    """The ids of a vocabulary that building an example needs, and how many there are."""

    pad: int
    cls: int
    sep: int
    mask: int
    vocab_size: int
    continues: np.ndarray  # bool [vocab_size]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Ids":
        """Returns the ids of a tokenizer."""
        return cls(
            tokenizer.pad_id,
            tokenizer.cls_id,
            tokenizer.sep_id,
            tokenizer.mask_id,
            tokenizer.size,
            tokenizer.continues,
        )


class Policy(NamedTuple):
    """The masks of a step: how much is predicted, and what it becomes."""

    share: float  # of a row's length that is to be predicted
    mask_share: float  # of what is predicted, the part that becomes [MASK]
    random_share: float  # the part that becomes any piece; the rest stays
    # What is masked at once. A word's pieces go on it, and as in the reference such a piece at the
    # front of a truncated B joins the last word of A.
    units: Literal["piece", "whole_word", "span"]

    @classmethod
    def of(cls, data: Data, step: int, steps: int) -> "Policy":
        """Returns that of a step of a run of `steps`; the share comes to its last with the last."""
        share = data.masked_lm_prob
        if data.final_masked_lm_prob and steps > 1:
            share += (data.final_masked_lm_prob - share) * step / (steps - 1)
        return cls(share, data.mask_share, data.random_share, data.masking)


# Of held-out rows, whatever is trained with, so that runs can be compared.
HELD_OUT = Policy(0.15, 0.8, 0.1, "piece")


class Masked(NamedTuple):
    """Masked rows."""

    input_ids: np.ndarray  # int32 [B, S], some replaced
    positions: np.ndarray  # int32 [B, P], rising, 0 behind the last
    ids: np.ndarray  # int32 [B, P], what stood there, 0 behind the last
    weights: np.ndarray  # float32 [B, P], 1, and 0 behind the last


def mask(
    input_ids: np.ndarray,
    text: np.ndarray,
    length: np.ndarray,
    draws: Draws,
    policy: Policy,
    max_predictions: int,
    ids: Ids,
) -> Masked:
    """Masks rows: pairs, or sentences of one document after another.

    Args:
      input_ids: int32 [B, S]; not changed.
      text: bool [B, S], what may be predicted: neither specials nor padding, and as many stretches
        as there are texts.
      length: int64 [B], specials counted.
      max_predictions: P.
    """
    count = np.count_nonzero(text, axis=1)
    wanted = np.clip(np.rint(length * policy.share).astype(np.int64), 1, max_predictions)
    # Candidates are numbered through a row's texts. (row, chosen) lists those of each row in the
    # order in which they were accepted, `slot` numbers them from 0, and what becomes of one is
    # drawn for the slot `like`.
    if policy.units == "piece":
        order = draws.candidate_order(count)
        num = np.minimum(wanted, count)
        row, slot = _entries(num)
        chosen = order[row, slot].astype(np.int64)
        like = slot
    else:
        words = _words(input_ids, text, count, ids.continues)
        first = None
        if policy.units == "whole_word":
            row, chosen = _whole_words(words, wanted, draws)
        else:
            row, chosen, first = _spans(words, wanted, draws)
        num = np.bincount(row, minlength=len(count))
        row, slot = _entries(num)
        like = slot if first is None else first
    kinds, random_ids = draws.replacements(
        num, ids.vocab_size, policy.mask_share, policy.random_share
    )
    kind, random_id = kinds[row, like], random_ids[row, slot]
    row_start = row * input_ids.shape[1]
    # In all rows one after another.
    place = np.flatnonzero(text)[(np.cumsum(count) - count)[row] + chosen]
    original = input_ids.ravel()
    new = np.where(kind == draws_lib.MASK, ids.mask, original[place])
    new = np.where(kind == draws_lib.RANDOM, random_id, new)

    masked = input_ids.copy()
    masked.ravel()[place] = new
    place.sort()
    filled = np.arange(max_predictions) < num[:, None]
    table = np.zeros((2, len(count), max_predictions), np.int32)
    table[0, filled] = place - row_start
    table[1, filled] = original[place]
    return Masked(masked, table[0], table[1], filled.astype(np.float32))


def _entries(num: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, slot) of a table with `num` [B] filled slots in each row, row after row."""
    row = np.repeat(np.arange(len(num)), num)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num)


class _Words(NamedTuple):
    """The words of rows."""

    count: np.ndarray  # int64 [B]
    # int64 [B, G + 1], the candidate that each starts with; behind a row's last word the number of
    # its candidates.
    first: np.ndarray
    # int64 [B, G], the number of the text in which it starts, rising; behind the last word without
    # meaning.
    text: np.ndarray


def _words(
    input_ids: np.ndarray, text: np.ndarray, count: np.ndarray, continues: np.ndarray
) -> _Words:
    starts = ~np.take(continues, input_ids) & text
    np.put_along_axis(starts, np.argmax(text, axis=1)[:, None], True, 1)  # the first always does
    groups = np.count_nonzero(starts, axis=1)
    most = int(groups.max())
    there = np.arange(most + 1) < groups[:, None]
    first = np.repeat(count[:, None], most + 1, axis=1)
    first[there] = (np.cumsum(text, axis=1) - text)[starts]
    number = np.zeros((len(count), most), np.int64)
    number[there[:, :-1]] = np.cumsum(~text, axis=1)[starts]
    return _Words(groups, first, number)


def _whole_words(words: _Words, wanted: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, candidate) of the chosen pieces, in the order in which words were accepted.

    A word that would exceed the number to predict is passed over, and a later one may still fit.
    """
    groups, first, _ = words
    most = first.shape[1] - 1
    order = draws.candidate_order(groups)
    in_order = np.arange(len(order))[:, None] * most + order
    size = np.take(np.diff(first), in_order, mode="clip")
    # Behind the last word: fits nowhere.
    size[np.arange(most) >= groups[:, None]] = np.iinfo(size.dtype).max
    accepted = np.zeros(order.shape, bool)
    left = wanted.copy()
    for place, extra in enumerate(size.T):
        fits = accepted[:, place] = extra <= left
        left -= extra * fits
        if not left.any():
            break
    taken = np.flatnonzero(accepted)
    row, sizes = taken // most, size.ravel()[taken]
    start = first[row, order.ravel()[taken]]
    return np.repeat(row, sizes), np.repeat(start, sizes) + _entries(sizes)[1]


def _spans(
    words: _Words, wanted: np.ndarray, draws: Draws
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (row, candidate, slot of its span's first) of the chosen pieces, span after span.

    Words are taken in a random order. From one that is not masked yet a span begins, of as many
    words as are drawn for it; it ends with its text, or where the next word would exceed the number
    to predict, and goes over words that are masked already. Where the reference cuts a span within
    a word to mask just as many pieces as it wants, here words stay whole.
    """
    groups, first, text = words
    most = first.shape[1] - 1
    size = np.diff(first)
    end = _ends(text, groups)
    order = draws.candidate_order(groups)
    length = draws.span_lengths(groups)  # pyrefly: ignore[missing-attribute]: never `Sequential`
    reach = np.arange(draws_lib.LONGEST_SPAN)
    span = np.full(size.shape, most)  # the number of the span that took the word; none
    left = wanted.copy()
    for number in range(most):
        row = np.flatnonzero((left > 0) & (number < groups))
        if not len(row):
            break
        begin = order[row, number].astype(np.int64)
        free = span[row, begin] == most
        row, begin = row[free, None], begin[free, None]
        word = np.minimum(begin + reach, most - 1)
        inside = (reach < length[row, begin]) & (begin + reach < end[row, begin])
        new = inside & (span[row, word] == most)
        extra = np.cumsum(size[row, word] * new, axis=1)
        new &= extra <= left[row]
        span[np.broadcast_to(row, word.shape)[new], word[new]] = number
        left[row[:, 0]] -= np.max(extra * new, axis=1, initial=0)
    row, word = np.nonzero(span < most)
    in_turn = np.lexsort((word, span[row, word], row))
    row, word = row[in_turn], word[in_turn]
    sizes = size[row, word]
    number = np.repeat(span[row, word], sizes)
    start, row = np.repeat(first[row, word], sizes), np.repeat(row, sizes)
    slot = _entries(np.bincount(row, minlength=len(groups)))[1]
    begins = np.ones(len(row), bool)
    begins[1:] = (row[1:] != row[:-1]) | (number[1:] != number[:-1])
    entry = np.maximum.accumulate(np.where(begins, np.arange(len(row)), 0))
    return row, start + _entries(sizes)[1], slot[entry]


def _ends(text: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns for each word the number of the first that starts in a later text, int64 [B, G]."""
    word = np.arange(text.shape[1])
    last = np.ones(text.shape, bool)  # of its text
    last[:, :-1] = text[:, 1:] != text[:, :-1]
    last |= word >= groups[:, None] - 1
    ends = np.where(last, word + 1, text.shape[1])
    return np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
