"""Masking: the choice of predicted tokens and their replacements.

`create_masked_lm_predictions` of google-research/bert (Devlin et al. 2018, section 3.1, task 1):
15 % of the length, specials counted, rounded half to even, at least 1, at most max_predictions;
80 % become [MASK], 10 % stay, 10 % become any token of the vocabulary, specials included. Settings
change the shares and the masking unit: tokens, words, or spans of words (Joshi et al. 2020,
SpanBERT, section 3.1).

Shape letters: B rows, S sequence, P predictions, W words.
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
    unit: Literal["piece", "whole_word", "span"]

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
    # bool [B, S], neither special nor padding; the candidates of a text are contiguous.
    is_candidate: np.ndarray
    length: np.ndarray  # int64 [B], specials counted


class Masked(NamedTuple):
    """Masked rows."""

    input_ids: np.ndarray  # int32 [B, S], some replaced
    positions: np.ndarray  # int32 [B, P], ascending, 0 after the last
    ids: np.ndarray  # int32 [B, P], the original ids, 0 after the last
    weights: np.ndarray  # float32 [B, P], 1, and 0 after the last


def mask(rows: Rows, draws: Draws, policy: Policy, max_predictions: int, ids: Ids) -> Masked:
    """Masks copies of rows; `max_predictions` is P."""
    input_ids, is_candidate, length = rows
    num_candidates = np.count_nonzero(is_candidate, axis=1)
    wanted = np.clip(np.rint(length * policy.share).astype(np.int64), 1, max_predictions)
    # Arrays with an entry for each predicted token, in the order of choice within each row: `row`;
    # `candidate`, numbered within the row; `slot`, the entry's number in the row; `kind_slot`, the
    # slot whose draw gives the kind of replacement, one for all tokens of a span.
    if policy.unit == "piece":
        order = draws.candidate_order(num_candidates)
        num_predicted = np.minimum(wanted, num_candidates)
        row, slot = ragged_indices(num_predicted)
        candidate = order[row, slot].astype(np.int64)
        kind_slot = slot
    else:
        words = _words(rows, num_candidates, ids.continues)
        first_slot = None
        if policy.unit == "whole_word":
            row, candidate = _whole_words(words, wanted, draws)
        else:
            row, candidate, first_slot = _spans(words, wanted, draws)
        num_predicted = np.bincount(row, minlength=len(num_candidates))
        row, slot = ragged_indices(num_predicted)
        kind_slot = slot if first_slot is None else first_slot
    kinds, random_ids = draws.replacements(
        num_predicted, ids.vocab_size, policy.mask_share, policy.random_share
    )
    kind, random_id = kinds[row, kind_slot], random_ids[row, slot]
    row_start = row * input_ids.shape[1]
    # Indices into the flattened rows.
    first_candidates = np.cumsum(num_candidates) - num_candidates
    index = np.flatnonzero(is_candidate)[first_candidates[row] + candidate]
    original = input_ids.ravel()
    new = np.where(kind == draws_lib.MASK, ids.mask, original[index])
    new = np.where(kind == draws_lib.RANDOM, random_id, new)

    masked = input_ids.copy()
    masked.ravel()[index] = new
    index.sort()  # within rows, since the entries are row after row: `row_start` still fits
    filled = np.arange(max_predictions) < num_predicted[:, None]
    table = np.zeros((2, len(input_ids), max_predictions), np.int32)
    table[0, filled] = index - row_start
    table[1, filled] = original[index]
    return Masked(masked, table[0], table[1], filled.astype(np.float32))


def ragged_indices(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, column) of all entries of rows with these lengths, row after row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


class _Words(NamedTuple):
    """The words of rows."""

    counts: np.ndarray  # int64 [B], the number of words
    # int64 [B, W + 1], the first candidate of each word; after the last word the number of
    # candidates of the row.
    first: np.ndarray
    # int64 [B, W], ascending with the text of each word; no meaning after the last word.
    text_number: np.ndarray


def _words(rows: Rows, num_candidates: np.ndarray, continues: np.ndarray) -> _Words:
    input_ids, is_candidate, _ = rows
    # As in the reference, a token that continues a word at the front of a truncated B belongs to
    # the last word of A. The first candidate starts a word.
    starts = ~np.take(continues, input_ids) & is_candidate
    np.put_along_axis(starts, np.argmax(is_candidate, axis=1)[:, None], True, 1)
    counts = np.count_nonzero(starts, axis=1)
    most = int(counts.max())
    is_word = np.arange(most + 1) < counts[:, None]
    first = np.repeat(num_candidates[:, None], most + 1, axis=1)
    first[is_word] = (np.cumsum(is_candidate, axis=1) - is_candidate)[starts]
    text_number = np.zeros((len(counts), most), np.int64)
    # Numbers a text by the specials before it.
    text_number[is_word[:, :-1]] = np.cumsum(~is_candidate, axis=1)[starts]
    return _Words(counts, first, text_number)


def _whole_words(words: _Words, wanted: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, candidate) of the predicted tokens, in the order in which words are accepted.

    `wanted`, int64 [B], is the number of tokens to predict. A word that would exceed it is skipped,
    and a later one may still fit.
    """
    counts, first, _ = words
    most = first.shape[1] - 1
    order = draws.candidate_order(counts)
    in_order = np.arange(len(order))[:, None] * most + order
    size = np.take(np.diff(first), in_order, mode="clip")
    # Entries after the last word never fit.
    size[np.arange(most) >= counts[:, None]] = np.iinfo(size.dtype).max
    accepted = np.zeros(order.shape, bool)
    left = wanted.copy()
    for column, extra in enumerate(size.T):
        fits = accepted[:, column] = extra <= left
        left -= extra * fits
        if not left.any():
            break
    index = np.flatnonzero(accepted)
    row, sizes = index // most, size.ravel()[index]
    start = first[row, order.ravel()[index]]
    return np.repeat(row, sizes), np.repeat(start, sizes) + ragged_indices(sizes)[1]


def _spans(
    words: _Words, wanted: np.ndarray, draws: Draws
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (row, candidate, slot of the span's first token) of the predicted tokens, by span."""
    spans, sizes = _assign_spans(words, wanted, draws), np.diff(words.first)
    row, word = np.nonzero(spans < spans.shape[1])
    by_span = np.lexsort((word, spans[row, word], row))
    row, word = row[by_span], word[by_span]
    lengths = sizes[row, word]
    # From here on with an entry for each token.
    span, first = np.repeat(spans[row, word], lengths), np.repeat(words.first[row, word], lengths)
    row = np.repeat(row, lengths)
    slot = ragged_indices(np.bincount(row, minlength=len(spans)))[1]
    is_first = np.ones(len(row), bool)  # of its span
    is_first[1:] = (row[1:] != row[:-1]) | (span[1:] != span[:-1])
    first_entry = np.maximum.accumulate(np.where(is_first, np.arange(len(row)), 0))
    return row, first + ragged_indices(lengths)[1], slot[first_entry]


def _assign_spans(words: _Words, wanted: np.ndarray, draws: Draws) -> np.ndarray:
    """Returns the number of the span of each word, W for words without one; int64 [B, W].

    Words are visited in a random order. A word that is not masked yet begins a span, whose length
    in words is drawn. The span ends with its text, or before a word that would exceed `wanted`; it
    skips words that are masked already. The reference cuts a span within a word to predict exactly
    as many tokens as wanted; here words stay whole.
    """
    counts, first, text_number = words
    most = first.shape[1] - 1
    size = np.diff(first)
    end = _ends(text_number, counts)
    order = draws.candidate_order(counts)
    length = draws.span_lengths(counts)  # pyrefly: ignore[missing-attribute]: `CounterDraws`
    offset = np.arange(draws_lib.LONGEST_SPAN)
    spans = np.full(size.shape, most)
    left = wanted.copy()
    for number in range(most):
        row = np.flatnonzero((left > 0) & (number < counts))
        if not len(row):
            break
        begin = order[row, number].astype(np.int64)
        free = spans[row, begin] == most
        row, begin = row[free, None], begin[free, None]
        word = np.minimum(begin + offset, most - 1)
        inside = (offset < length[row, begin]) & (begin + offset < end[row, begin])
        new = inside & (spans[row, word] == most)
        extra = np.cumsum(size[row, word] * new, axis=1)
        new &= extra <= left[row]
        spans[np.broadcast_to(row, word.shape)[new], word[new]] = number
        left[row[:, 0]] -= np.max(extra * new, axis=1, initial=0)
    return spans


def _ends(text_number: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns for each word the number of the first word in a later text, int64 [B, W]."""
    word = np.arange(text_number.shape[1])
    is_last = np.ones(text_number.shape, bool)  # in its text
    is_last[:, :-1] = text_number[:, 1:] != text_number[:, :-1]
    is_last |= word >= counts[:, None] - 1
    ends = np.where(is_last, word + 1, len(word))
    return np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
