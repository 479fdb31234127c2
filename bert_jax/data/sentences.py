"""Rows of full sentences, one document after another (Liu et al. 2019, RoBERTa, FULL-SENTENCES).

A row is `[CLS] text [SEP] text ... [SEP]`: as many sentences as fit, in their order, across
documents, with a [SEP] at the end of each document. The next row begins with the next sentence. An
epoch's first row is cut at a random length, so that every epoch cuts the text elsewhere. A sentence
longer than a row is truncated.

Rows are planned like pairs: a row's first sentence determines the first sentence of the next row,
which is computed for all sentences of a block at once.

Shape letters: B rows, S sequence.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.data import draws, pairs
from bert_jax.data.masking import Rows
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError

# [CLS] and the last [SEP]; each [SEP] between documents takes the position of a token of text.
SPECIAL_TOKENS = 2

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

    `of_a` is the number of sentences of a row; `of_b` and `target` are 0. Lengths count specials.
    """
    if stream.tokens < sequence_length - SPECIAL_TOKENS:
        raise InputError(
            f"corpus: the {stream.tokens} tokens of a split do not fill a row of "
            f"{sequence_length}; give more text, change corpus.validation_share, or shorten rows "
            "(phases.N.sequence_length, data.eval_sequence_length)"
        )
    most = sequence_length - SPECIAL_TOKENS
    total = len(stream.sentence_offsets) - 1
    row_first = draws.Counter(key, np.zeros(1, np.int64)).first_length(most)
    result, begin = [], 0
    for start in range(0, total, _BLOCK):
        stop = min(start + _BLOCK, total)
        # A sentence has at least one token, so that every row of the block ends in this range.
        offsets = stream.sentence_offsets[start : stop + most + 1].astype(np.int64)
        document = stream.documents_of(np.arange(start, start + len(offsets) - 1))
        # Tokens up to the end and the start of each sentence, with a [SEP] for every document that
        # ended before.
        ends, starts = offsets[1:] + document, offsets[:-1] + document
        index = np.arange(stop - start)
        capacity = np.where(index + start == 0, row_first, most)
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

    [SEP]s between documents count.
    """
    first = chunks["sentence"].astype(np.int64)
    after = first + chunks["of_a"]
    tokens = np.asarray(stream.sentence_offsets).astype(np.int64)
    borders = stream.documents_of(after - 1) - stream.documents_of(first)
    total = tokens[after] - tokens[first] + borders
    return np.minimum(total, sequence_length - SPECIAL_TOKENS), total


def rows(
    stream: Stream, chunks: np.ndarray, sequence_length: int, pad: int, cls: int, sep: int
) -> FullSentences:
    """Builds rows of `plan`, [B], of S tokens; `pad`, `cls` and `sep` are ids."""
    most = sequence_length - SPECIAL_TOKENS
    offsets, bounds = np.asarray(stream.sentence_offsets), np.asarray(stream.document_offsets)
    first = chunks["sentence"].astype(np.int64)
    after = first + chunks["of_a"]
    start, end = offsets[first].astype(np.int64), offsets[after].astype(np.int64)
    document = stream.documents_of(first)
    borders = stream.documents_of(after - 1) - document
    length = np.minimum(end - start + borders, most)
    # A [SEP] for each document that ends within the row: (row, number of the border).
    row = np.repeat(np.arange(len(chunks)), borders)
    number = np.arange(len(row)) - np.repeat(np.cumsum(borders) - borders, borders)
    ends = offsets[bounds[document[row] + number + 1].astype(np.int64)].astype(np.int64)
    is_border = np.zeros((len(chunks), sequence_length), bool)
    is_border[row, 1 + ends - start[row] + number] = True

    column = np.arange(sequence_length)
    last = 1 + length[:, None]  # the column of the last [SEP]
    real = column <= last
    before = np.cumsum(is_border, axis=1) - is_border
    source = start[:, None] + column - 1 - before
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
        Rows(input_ids, text, length + SPECIAL_TOKENS),
        ((before + 1) * real).astype(np.int32),
        (positions * real).astype(np.int32),
    )
