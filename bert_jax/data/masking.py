"""Masking: the choice of predicted tokens and their replacements.

`create_masked_lm_predictions` of google-research/bert (Devlin et al. 2018, section 3.1, task 1):
15 % of the length, specials counted, rounded half to even, at least 1, at most the table's width;
80 % become [MASK], 10 % stay, 10 % become any token of the vocabulary, specials included. Settings
change the shares and the masking unit: tokens, words, or spans of words (Joshi et al. 2020,
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
    """The special ids of a vocabulary, its size, and which tokens continue a word."""

    pad: int
    cls: int
    sep: int
    mask: int
    vocab_size: int
    continues: np.ndarray  # bool [vocab_size]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Ids":
        """Returns the ids of a tokenizer."""
        specials = tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id
        return cls(*specials, tokenizer.size, tokenizer.continues)


class Policy(NamedTuple):
    """The masks of a step: the share of predicted tokens and of their replacements."""

    share: float  # of a row's length that is predicted
    mask_share: float  # of predicted tokens that become [MASK]
    random_share: float  # of predicted tokens that become any token; the others stay
    # The masking unit. As in the reference, a token that continues a word at the front of a
    # truncated B belongs to the last word of A.
    units: Literal["piece", "whole_word", "span"]

    @classmethod
    def of(cls, data: Data, step: int, steps: int) -> "Policy":
        """Returns the policy of a step in a run of `steps`; the share changes linearly."""
        share = data.masked_lm_prob
        if data.final_masked_lm_prob and steps > 1:
            share += (data.final_masked_lm_prob - share) * step / (steps - 1)
        return cls(share, data.mask_share, data.random_share, data.masking)


# The policy for held-out rows in all runs, so that runs can be compared.
HELD_OUT = Policy(0.15, 0.8, 0.1, "piece")


class Rows(NamedTuple):
    """Rows before they are masked: pairs, or sentences of one document after another."""

    input_ids: np.ndarray  # int32 [B, S]
    # bool [B, S], the candidates: neither specials nor padding; one stretch for each text.
    text: np.ndarray
    length: np.ndarray  # int64 [B], specials counted


class Masked(NamedTuple):
    """Masked rows."""

    input_ids: np.ndarray  # int32 [B, S], some replaced
    positions: np.ndarray  # int32 [B, P], ascending, 0 after the last
    ids: np.ndarray  # int32 [B, P], the original ids, 0 after the last
    weights: np.ndarray  # float32 [B, P], 1, and 0 after the last


def mask(rows: Rows, draws: Draws, policy: Policy, max_predictions: int, ids: Ids) -> Masked:
    """Masks rows, whose arrays stay; `max_predictions` is P."""
    input_ids, text, length = rows
    count = np.count_nonzero(text, axis=1)
    targets = np.clip(np.rint(length * policy.share).astype(np.int64), 1, max_predictions)
    # Candidates are numbered through a row's texts. (row, candidate) lists the predicted ones of
    # each row in the order of their choice, `slot` numbers them from 0, and the kind of a
    # replacement is the draw of `kind_slot`.
    if policy.units == "piece":
        order = draws.candidate_order(count)
        num = np.minimum(targets, count)
        row, slot = _entries(num)
        candidate = order[row, slot].astype(np.int64)
        kind_slot = slot
    else:
        words = _words(input_ids, text, count, ids.continues)
        first = None
        if policy.units == "whole_word":
            row, candidate = _whole_words(words, targets, draws)
        else:
            row, candidate, first = _spans(words, targets, draws)
        num = np.bincount(row, minlength=len(count))
        row, slot = _entries(num)
        kind_slot = slot if first is None else first
    kinds, random_ids = draws.replacements(
        num, ids.vocab_size, policy.mask_share, policy.random_share
    )
    kind, random_id = kinds[row, kind_slot], random_ids[row, slot]
    row_start = row * input_ids.shape[1]
    # Indices into the flattened rows.
    index = np.flatnonzero(text)[(np.cumsum(count) - count)[row] + candidate]
    original = input_ids.ravel()
    new = np.where(kind == draws_lib.MASK, ids.mask, original[index])
    new = np.where(kind == draws_lib.RANDOM, random_id, new)

    masked = input_ids.copy()
    masked.ravel()[index] = new
    index.sort()
    filled = np.arange(max_predictions) < num[:, None]
    table = np.zeros((2, len(count), max_predictions), np.int32)
    table[0, filled] = index - row_start
    table[1, filled] = original[index]
    return Masked(masked, table[0], table[1], filled.astype(np.float32))


def _entries(num: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, slot) of a table with `num` [B] filled slots in each row, row after row."""
    row = np.repeat(np.arange(len(num)), num)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num)


class _Words(NamedTuple):
    """The words of rows."""

    count: np.ndarray  # int64 [B]
    # int64 [B, G + 1], the first candidate of each word; after the last word the number of
    # candidates of the row.
    first: np.ndarray
    # int64 [B, G], the number of the text in which each word starts, ascending; no meaning after
    # the last word.
    text: np.ndarray


def _words(
    input_ids: np.ndarray, text: np.ndarray, count: np.ndarray, continues: np.ndarray
) -> _Words:
    starts = ~np.take(continues, input_ids) & text
    np.put_along_axis(starts, np.argmax(text, axis=1)[:, None], True, 1)  # the first starts a word
    groups = np.count_nonzero(starts, axis=1)
    most = int(groups.max())
    is_word = np.arange(most + 1) < groups[:, None]
    first = np.repeat(count[:, None], most + 1, axis=1)
    first[is_word] = (np.cumsum(text, axis=1) - text)[starts]
    number = np.zeros((len(count), most), np.int64)
    number[is_word[:, :-1]] = np.cumsum(~text, axis=1)[starts]
    return _Words(groups, first, number)


def _whole_words(words: _Words, targets: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, candidate) of the predicted tokens, in the order in which words are accepted.

    A word that would exceed the target is skipped, and a later one may still fit.
    """
    groups, first, _ = words
    most = first.shape[1] - 1
    order = draws.candidate_order(groups)
    in_order = np.arange(len(order))[:, None] * most + order
    size = np.take(np.diff(first), in_order, mode="clip")
    # Entries after the last word never fit.
    size[np.arange(most) >= groups[:, None]] = np.iinfo(size.dtype).max
    accepted = np.zeros(order.shape, bool)
    left = targets.copy()
    for column, extra in enumerate(size.T):
        fits = accepted[:, column] = extra <= left
        left -= extra * fits
        if not left.any():
            break
    index = np.flatnonzero(accepted)
    row, sizes = index // most, size.ravel()[index]
    start = first[row, order.ravel()[index]]
    return np.repeat(row, sizes), np.repeat(start, sizes) + _entries(sizes)[1]


def _spans(
    words: _Words, targets: np.ndarray, draws: Draws
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (row, candidate, slot of the span's first token) of the predicted tokens, by span.

    Words are visited in a random order. A word that is not masked yet begins a span, whose length
    in words is drawn. The span ends with its text, or before a word that would exceed the target;
    it skips words that are masked already. The reference cuts a span within a word to predict
    exactly the target; here words stay whole.
    """
    groups, first, text = words
    most = first.shape[1] - 1
    size = np.diff(first)
    end = _ends(text, groups)
    order = draws.candidate_order(groups)
    length = draws.span_lengths(groups)  # pyrefly: ignore[missing-attribute]: always a `Counter`
    reach = np.arange(draws_lib.LONGEST_SPAN)
    span = np.full(size.shape, most)  # the number of the span of each word; `most`: none
    left = targets.copy()
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
    by_span = np.lexsort((word, span[row, word], row))
    row, word = row[by_span], word[by_span]
    sizes = size[row, word]
    number = np.repeat(span[row, word], sizes)
    start, row = np.repeat(first[row, word], sizes), np.repeat(row, sizes)
    slot = _entries(np.bincount(row, minlength=len(groups)))[1]
    begins = np.ones(len(row), bool)
    begins[1:] = (row[1:] != row[:-1]) | (number[1:] != number[:-1])
    entry = np.maximum.accumulate(np.where(begins, np.arange(len(row)), 0))
    return row, start + _entries(sizes)[1], slot[entry]


def _ends(text: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns for each word the number of the first word in a later text, int64 [B, G]."""
    word = np.arange(text.shape[1])
    is_last = np.ones(text.shape, bool)  # in its text
    is_last[:, :-1] = text[:, 1:] != text[:, :-1]
    is_last |= word >= groups[:, None] - 1
    ends = np.where(is_last, word + 1, text.shape[1])
    return np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
