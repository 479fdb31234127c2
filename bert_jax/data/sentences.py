"""Rows of full sentences, one document after another (Liu et al. 2019, RoBERTa, FULL-SENTENCES).

A row is `[CLS] text [SEP] text ... [SEP]`: as many sentences as fit, in their order, across
documents, with a [SEP] at the end of each document. The next row begins with the next sentence. An
epoch's first row is cut at a random length, so that every epoch cuts the text elsewhere. A sentence
longer than a row is truncated.

Rows are planned like pairs: for every sentence of a block, `plan` computes where the next row would
start if a row started there. The rows follow these links.

Shape letters: B rows, S sequence.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.data import draws, pairs
from bert_jax.data.masking import Rows, ragged_indices
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError

# [CLS] and the last [SEP]; a [SEP] between documents is counted as text.
NUM_SPECIALS = 2

# Sentences processed at once: few enough for the cache.
_BLOCK = 1 << 15


class FullSentences(NamedTuple):
    """Rows, and the documents of their tokens."""

    rows: Rows
    # int32 [B, S], the number of the document in its row, from 1; 0 for padding. [CLS] belongs to
    # the first document, a [SEP] to the document that it ends.
    document: np.ndarray
    positions: np.ndarray  # int32 [B, S], counted from 0 within each document; 0 for padding


def plan(
    stream: Stream, sequence_length: int, key: tuple[int, int], most_rows: int | None = None
) -> np.ndarray:
    """Plans one pass over the documents, or its first rows; `pairs.chunk_dtype` [rows].

    A chunk is a row here, `of_a` the number of its sentences; `of_b` and `target` are 0. The
    `sequence_length` counts specials.
    """
    if stream.tokens < sequence_length - NUM_SPECIALS:
        raise InputError(
            f"corpus: the {stream.tokens} tokens of a split do not fill a row of "
            f"{sequence_length}; give more text, change corpus.validation_share, or shorten rows "
            "(phases.N.sequence_length, data.eval_sequence_length)"
        )
    max_tokens = sequence_length - NUM_SPECIALS
    total = len(stream.sentence_offsets) - 1
    first_capacity = draws.CounterDraws(key, np.zeros(1, np.int64)).first_length(max_tokens)
    result, begin = [], 0
    for start in range(0, total, _BLOCK):
        stop = min(start + _BLOCK, total)
        # A sentence has at least one token, so a row that starts in the block ends in this range.
        offsets = stream.sentence_offsets[start : stop + max_tokens + 1].astype(np.int64)
        document = stream.documents_of(np.arange(start, start + len(offsets) - 1))
        # Positions in text with a [SEP] after each document; only their differences are used.
        ends, starts = offsets[1:] + document, offsets[:-1] + document
        index = np.arange(stop - start)
        capacity = np.where(index + start == 0, first_capacity, max_tokens)
        following = np.searchsorted(ends, starts[index] + capacity, "right")
        following = np.minimum(np.maximum(following, index + 1), len(ends)).tolist()
        chain, begin = pairs.follow_chain(following, begin)
        chunks = np.zeros(len(chain), pairs.chunk_dtype(stream))
        chunks["sentence"] = np.array(chain) + start
        chunks["of_a"] = np.array(following)[chain] - chain
        begin -= stop - start
        result.append(chunks)
        if most_rows is not None and sum(map(len, result)) >= most_rows:
            break
    return np.concatenate(result)[:most_rows]


def sizes(
    stream: Stream, chunks: np.ndarray, sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of tokens of planned rows after and before truncation, int64 [B] each.

    [CLS] and the last [SEP] are not counted.
    """
    first = chunks["sentence"].astype(np.int64)
    stop = first + chunks["of_a"]
    offsets = np.asarray(stream.sentence_offsets).astype(np.int64)
    borders = stream.documents_of(stop - 1) - stream.documents_of(first)
    total = offsets[stop] - offsets[first] + borders
    return np.minimum(total, sequence_length - NUM_SPECIALS), total


def rows(
    stream: Stream, chunks: np.ndarray, sequence_length: int, pad: int, cls: int, sep: int
) -> FullSentences:
    """Builds rows of `plan`, [B], of S tokens; `pad`, `cls` and `sep` are ids."""
    max_tokens = sequence_length - NUM_SPECIALS
    offsets, bounds = np.asarray(stream.sentence_offsets), np.asarray(stream.document_offsets)
    first = chunks["sentence"].astype(np.int64)
    stop = first + chunks["of_a"]
    start, end = offsets[first].astype(np.int64), offsets[stop].astype(np.int64)
    first_document = stream.documents_of(first)
    borders = stream.documents_of(stop - 1) - first_document
    length = np.minimum(end - start + borders, max_tokens)
    # Each document that ends within the row has a border, a [SEP]. Before border i are [CLS], the
    # row's tokens up to the end of the document, and i [SEP]s.
    row, border = ragged_indices(borders)
    next_sentence = bounds[first_document[row] + border + 1].astype(np.int64)
    is_border = np.zeros((len(chunks), sequence_length), bool)
    is_border[row, 1 + offsets[next_sentence].astype(np.int64) - start[row] + border] = True

    column = np.arange(sequence_length)
    last = 1 + length[:, None]  # the column of the last [SEP]
    real = column <= last
    borders_before = np.cumsum(is_border, axis=1) - is_border
    source = start[:, None] + column - 1 - borders_before
    # Clipped: the columns of specials and padding, overwritten below, may lie outside.
    input_ids = np.take(np.asarray(stream.ids), source, mode="clip").astype(np.int32)
    np.copyto(input_ids, pad, where=~real)
    np.copyto(input_ids, sep, where=is_border | (column == last))
    input_ids[:, 0] = cls
    begins = np.zeros(real.shape, np.int64)
    begins[:, 1:] = np.where(is_border[:, :-1], column[1:], 0)
    positions = column - np.maximum.accumulate(begins, axis=1)
    text = real & (column > 0) & ~is_border & (column < last)
    return FullSentences(
        Rows(input_ids, text, length + NUM_SPECIALS),
        ((borders_before + 1) * real).astype(np.int32),
        (positions * real).astype(np.int32),
    )
