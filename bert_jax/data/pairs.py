"""Next-sentence pairs, decided on sentence lengths alone, and their truncation.

The algorithm is that of google-research/bert, create_pretraining_data.py
(`create_instances_from_document`, `truncate_seq_pair`), put-back of unused sentences included:
one example is a piece of text A and, half of the time, what follows it (Devlin et al. 2018,
section 3.1, task 2). Its random choices are those of `draws`; it never looks at an id.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.draws import ArrayDraws, Scalars, Victims
from bert_jax.data.stream import Stream

# [CLS] A [SEP] B [SEP]
SPECIAL_TOKENS = 3

ROW_DTYPE = np.dtype(
    [
        ("a_offset", np.uint64),
        ("a_length", np.uint32),
        ("b_offset", np.uint64),
        ("b_length", np.uint32),
        ("is_random_next", np.bool_),
    ]
)


class Row(NamedTuple):
    """A pair before truncation: two runs of ids in the stream."""

    a_offset: int
    a_length: int
    b_offset: int
    b_length: int
    is_random_next: bool


class Pairs(NamedTuple):
    """Pairs after truncation, int64 [B] each: where A and B start, how long they are."""

    a_start: np.ndarray
    a_length: np.ndarray
    b_start: np.ndarray
    b_length: np.ndarray


def plan(
    stream: Stream,
    order: Sequence[int],
    sequence_length: int,
    short_seq_prob: float,
    draws: Scalars,
) -> Iterator[Row]:
    """Yields the pairs of one pass over the documents.

    Args:
      stream: the split.
      order: documents as `draws.document_order` shuffled them.
      sequence_length: of the examples, specials included.
      short_seq_prob: share of documents cut into shorter pairs.
      draws: consumed as the rows are pulled.
    """
    sentence_offsets, document_offsets = stream.sentence_offsets, stream.document_offsets
    max_num_tokens = sequence_length - SPECIAL_TOKENS
    for place, document in enumerate(order):
        first, last = int(document_offsets[document]), int(document_offsets[document + 1])
        offsets = sentence_offsets[first : last + 1].tolist()
        sentences = last - first
        target = draws.target_length(max_num_tokens, short_seq_prob)
        i = 0
        while i < sentences:
            # A chunk closes with the sentence that brings it to the target, or with the last.
            end = min(bisect.bisect_left(offsets, offsets[i] + target, i + 1), sentences)
            a_end = i + draws.split_point(end - i)
            a_length = offsets[a_end] - offsets[i]
            if end - i == 1 or draws.is_random():
                other = order[draws.other_document(len(order), place)]
                b_offset, b_length = _random_run(stream, other, target - a_length, draws)
                yield Row(offsets[i], a_length, b_offset, b_length, True)
                i = a_end  # the chunk's other sentences are put back
            else:
                b_length = offsets[end] - offsets[a_end]
                yield Row(offsets[i], a_length, offsets[a_end], b_length, False)
                i = end


def _random_run(stream: Stream, document: int, wanted: int, draws: Scalars) -> tuple[int, int]:
    """Offset and length of whole sentences from a random start: `wanted` ids, at least one."""
    first, last = stream.document_offsets[document : document + 2].tolist()
    start = first + draws.start(last - first)
    offsets = stream.sentence_offsets[start : last + 1]
    offset = int(offsets[0])
    # A search for a Python int would turn the whole array into floats.
    end = int(np.searchsorted(offsets[1:], np.uint64(offset + max(wanted, 1)))) + 1
    return offset, int(offsets[min(end, last - start)]) - offset


def truncate(rows: np.ndarray, sequence_length: int, draws: ArrayDraws) -> Pairs:
    """Cuts pairs down to the sequence length, token by token from the longer side (a tie: B).

    Args:
      rows: ROW_DTYPE [B].
      sequence_length: of the examples, specials included.
      draws: says how many tokens go from the front.
    """
    a_length, b_length = rows["a_length"].astype(np.int64), rows["b_length"].astype(np.int64)
    excess = np.maximum(a_length + b_length - (sequence_length - SPECIAL_TOKENS), 0)
    lead = np.minimum(excess, np.abs(a_length - b_length))
    victims = Victims(a_length > b_length, lead, excess - lead)
    a_front, b_front = draws.front_cuts(victims)
    return Pairs(
        rows["a_offset"].astype(np.int64) + a_front,
        a_length - victims.from_a,
        rows["b_offset"].astype(np.int64) + b_front,
        b_length - victims.from_b,
    )
