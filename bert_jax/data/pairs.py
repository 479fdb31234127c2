"""Next-sentence pairs, decided on sentence lengths alone, and their truncation.

The algorithm is that of google-research/bert, create_pretraining_data.py
(`create_instances_from_document`, `truncate_seq_pair`), put-back of unused sentences included:
one example is a piece of text A and, half of the time, what follows it (Devlin et al. 2018,
section 3.1, task 2). Its random choices are those of `draws`; it never looks at an id.

With swapped pairs (Lan et al. 2019, ALBERT, section 3.1) B is what follows A always, and in half of
the pairs the two change places. Nothing else is drawn: a chunk has two sentences at least, one that
would be left alone at the end of its document joins the chunk before it, and a document of one
sentence gives no pair. ALBERT's code gives a chunk of one sentence a random B, as if it were
swapped.

A chunk is the sentences from which one pair is made. All its draws hang on the sentence it begins
with, and therefore so does the sentence that the next chunk begins with. That one is computed for
all sentences of a block at once, and a plan is the chunks that are met on the way from the first
sentence to the last. Which random B a chunk gets changes none of it, and is decided when its pair
is asked for.
"""

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from bert_jax.data.draws import Counter, Draws, Removals, Sequential, permutation
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError

# [CLS] A [SEP] B [SEP]
SPECIAL_TOKENS = 3

# What becomes of half of the pairs: B is of another document, or A and B change places.
Units = Literal["pairs", "swapped_pairs"]

# `is_random_next` is the label: of swapped pairs, that they were swapped.
ROW_DTYPE = np.dtype(
    [
        ("a_offset", np.uint64),
        ("a_length", np.uint32),
        ("b_offset", np.uint64),
        ("b_length", np.uint32),
        ("is_random_next", np.bool_),
    ]
)

# Sentences looked at at once: few enough for the cache.
_BLOCK = 1 << 15
# Documents sampled at once.
_SAMPLED = 256


class Pairs(NamedTuple):
    """Pairs after truncation, int64 [B] each: where A and B start, how long they are."""

    a_start: np.ndarray
    a_length: np.ndarray
    b_start: np.ndarray
    b_length: np.ndarray


def chunk_dtype(stream: Stream) -> np.dtype:
    """Returns the type of a plan's chunks, 10 bytes each up to 2**32 sentences, else 14.

    `sentence` is the one it begins with, `of_a` how many of its sentences make A, `of_b` how many
    make B: 0 where B is of another document. `target` is how many tokens the pair aims at.
    """
    sentence = np.uint32 if len(stream.sentence_offsets) <= 2**32 else np.uint64
    names, counts = ("of_a", "of_b", "target"), (np.uint16, np.uint16, np.uint16)
    return np.dtype([("sentence", sentence), *zip(names, counts, strict=True)])


def plan(
    stream: Stream,
    sequence_length: int,
    short_seq_prob: float,
    key: tuple[int, int],
    units: Units = "pairs",
) -> np.ndarray:
    """Plans one pass over the documents, in their order; `chunk_dtype` [chunks].

    The length of the examples counts specials; `short_seq_prob` is the share of documents cut into
    shorter pairs.
    """
    most = sequence_length - SPECIAL_TOKENS
    document_offsets, total = stream.document_offsets, len(stream.sentence_offsets) - 1
    result, begin = [], 0
    for start in range(0, total, _BLOCK):
        stop = min(start + _BLOCK, total)
        # A sentence has a token at least, so that a chunk ends in what is seen.
        offsets = stream.sentence_offsets[start : stop + most].astype(np.int64)
        document = int(np.searchsorted(document_offsets, np.uint64(start), "right")) - 1
        after = int(np.searchsorted(document_offsets, np.uint64(stop)))
        bounds = document_offsets[document : after + 1].astype(np.int64)
        numbers = np.arange(document, after)
        target = Counter(key, numbers).target_length(most, short_seq_prob)
        size = np.diff(np.clip(bounds, start, stop))
        sentence, target = np.arange(start, stop), np.repeat(target, size)
        end = np.repeat(bounds[1:], size) - start
        chunks, begin = _chunks(stream, sentence, offsets, end, target, key, begin, units)
        begin -= stop - start
        result.append(chunks)
    chunks = np.concatenate(result)
    if not len(chunks):
        raise InputError(
            "data.objective=mlm_sop: no document has two sentences; give longer ones, or take mlm"
        )
    return chunks


def sample(
    stream: Stream,
    sequence_length: int,
    short_seq_prob: float,
    key: tuple[int, int],
    most: int,
    units: Units = "pairs",
) -> np.ndarray:
    """Draws pairs of whole documents at random, at most so many; ROW_DTYPE [rows].

    The arguments are those of `plan`, of which these are rows in another order.
    """
    order = permutation(key, 0, len(stream.document_offsets) - 1)
    result, count = [np.empty(0, chunk_dtype(stream))], 0
    while count < most and len(order):
        documents, order = order[:_SAMPLED], order[_SAMPLED:]
        first, last = (stream.document_offsets[documents + i].astype(np.int64) for i in (0, 1))
        size = last - first
        ends = np.cumsum(size)
        sentence = np.arange(ends[-1]) + np.repeat(first - (ends - size), size)
        lengths = stream.sentence_offsets[sentence + 1] - stream.sentence_offsets[sentence]
        offsets = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
        wanted = Counter(key, documents).target_length(
            sequence_length - SPECIAL_TOKENS, short_seq_prob
        )
        end, target = np.repeat(ends, size), np.repeat(wanted, size)
        chunks, _ = _chunks(stream, sentence, offsets, end, target, key, 0, units)
        result.append(chunks)
        count += len(chunks)
    chunks = np.concatenate(result)[:most]
    if not len(chunks):
        raise InputError(
            "data.objective=mlm_sop: no held-out document has two sentences; give longer ones, or "
            "take mlm"
        )
    return rows(stream, chunks, Counter(key, chunks["sentence"]), units)


def _chunks(
    stream: Stream,
    sentence: np.ndarray,
    offsets: np.ndarray,
    document_end: np.ndarray,
    target: np.ndarray,
    key: tuple[int, int],
    begin: int,
    units: Units,
) -> tuple[np.ndarray, int]:
    """Returns the chunks that are met from a sentence on, and the sentence after them.

    Sentences are int64 [N], numbers in the split; `offsets`, int64 [at least N], where these start
    and those that follow them; `document_end`, int64 [N], one past the last of its document, and
    `begin`, the first chunk's first, are counted from here.
    """
    here = np.arange(len(sentence))
    of_a, of_b = _cut(offsets, here, document_end, target, Counter(key, sentence), units)
    # The sentences that a random B displaces are put back.
    met, begin = follow_chain((here + of_a + of_b).tolist(), begin)
    chunks = np.empty(len(met), chunk_dtype(stream))
    chunks["sentence"], chunks["target"] = sentence[met], target[met]
    chunks["of_a"], chunks["of_b"] = of_a[met], of_b[met]
    if units == "swapped_pairs":
        chunks = chunks[chunks["of_b"] > 0]
    return chunks, begin


def follow_chain(following: list[int], begin: int) -> tuple[list[int], int]:
    """Returns what is met on the way from `begin`, and what follows behind the last."""
    met = []
    while begin < len(following):
        met.append(begin)
        begin = following[begin]
    return met, begin


def _cut(
    offsets: np.ndarray,
    first: np.ndarray,
    document_end: np.ndarray,
    target: np.ndarray,
    draws: Draws,
    units: Units = "pairs",
) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many sentences of each chunk make A and B.

    B has 0 where it is of another document; of swapped pairs, where the document has one alone.
    Sentences start at `offsets`, int64 [N]; the other arrays are int64 [B]: each chunk's first
    sentence, one past the last of its document, and its target.
    """
    # A chunk closes with the sentence that brings it to the target, or with the document's last.
    end = np.minimum(np.searchsorted(offsets, offsets[first] + target), document_end)
    if units == "swapped_pairs":
        end = np.maximum(end, np.minimum(first + 2, document_end))
        end = np.where(document_end - end == 1, document_end, end)
        of_a = draws.split_point(end - first)
        return of_a, end - first - of_a
    sentences = end - first
    of_a = draws.split_point(sentences)
    alone = sentences == 1
    return of_a, np.where(alone | draws.is_random(~alone), 0, sentences - of_a)


def rows(stream: Stream, chunks: np.ndarray, draws: Draws, units: Units = "pairs") -> np.ndarray:
    """Returns the pairs of chunks, before truncation: two runs of ids in the stream each.

    From `chunk_dtype` [B], and draws of the sentences with which they begin, to ROW_DTYPE [B].
    """
    sentence = chunks["sentence"].astype(np.int64)
    b_first = sentence + chunks["of_a"]
    b_last, is_random = b_first + chunks["of_b"], chunks["of_b"] == 0
    offsets = np.asarray(stream.sentence_offsets)
    result = np.empty(len(chunks), ROW_DTYPE)
    result["is_random_next"] = is_random
    result["a_offset"] = offsets[sentence]
    result["a_length"] = offsets[b_first] - result["a_offset"]
    if units == "swapped_pairs":
        result["b_offset"] = offsets[b_first]
        result["b_length"] = offsets[b_last] - result["b_offset"]
        swapped = draws.is_random(np.ones(len(chunks), bool))
        for a, b in (("a_offset", "b_offset"), ("a_length", "b_length")):
            one, other = result[a].copy(), result[b].copy()
            result[a], result[b] = np.where(swapped, other, one), np.where(swapped, one, other)
        result["is_random_next"] = swapped
        return result
    wanted = np.maximum(chunks["target"] - result["a_length"].astype(np.int64), 1)
    first, last = _random_runs(stream, sentence, wanted, is_random, draws)
    result["b_offset"] = offsets[np.where(is_random, first, b_first)]
    result["b_length"] = offsets[np.where(is_random, last, b_last)] - result["b_offset"]
    return result


def _random_runs(
    stream: Stream, sentence: np.ndarray, wanted: np.ndarray, asked: np.ndarray, draws: Draws
) -> tuple[np.ndarray, np.ndarray]:
    """Draws whole sentences of other documents from a random start: the first, one past the last.

    `sentence` is of this document, `wanted` the ids to reach where the other has as many, int64 [B]
    each; `asked`, bool [B], says where a run is needed.
    """
    bounds, offsets = np.asarray(stream.document_offsets), np.asarray(stream.sentence_offsets)
    other = draws.other_document(len(bounds) - 1, stream.documents_of(sentence), asked)
    first, last = bounds[other].astype(np.int64), bounds[other + 1].astype(np.int64)
    first += draws.start(last - first, asked)
    # The last sentence that begins before the reach, by halves: a sentence has a token at least.
    reach, result = offsets[first] + wanted.astype(np.uint64), first
    step = 1 << int(wanted.max()).bit_length() - 1
    while step:
        probe = np.minimum(result + step, last - 1)
        result = np.where(offsets[probe] < reach, probe, result)
        step >>= 1
    return first, result + 1


def one_by_one(
    stream: Stream, sequence_length: int, short_seq_prob: float, draws: Sequential
) -> Iterator[np.ndarray]:
    """Yields the pairs of one pass over the documents, ROW_DTYPE [1] each.

    Draws are made in the reference's order, as far as pairs are pulled.
    """
    offsets = stream.sentence_offsets.astype(np.int64)
    bounds = stream.document_offsets.astype(np.int64)
    chunk = np.empty(1, chunk_dtype(stream))
    for first, last in itertools.pairwise(bounds):
        target = draws.target_length(sequence_length - SPECIAL_TOKENS, short_seq_prob)
        sentence = np.array([first])
        while sentence[0] < last:
            of_a, of_b = _cut(offsets, sentence, np.array([last]), target, draws)
            chunk["sentence"], chunk["target"] = sentence, target
            chunk["of_a"], chunk["of_b"] = of_a, of_b
            yield rows(stream, chunk, draws)
            # The sentences that a random B displaces are put back.
            sentence += of_a + of_b


def truncated_lengths(rows: np.ndarray, sequence_length: int) -> np.ndarray:
    """Returns how long `truncate` leaves them, specials included: ROW_DTYPE [B] -> int64 [B]."""
    length = rows["a_length"].astype(np.int64) + rows["b_length"] + SPECIAL_TOKENS
    return np.minimum(length, sequence_length)


def truncate(rows: np.ndarray, sequence_length: int, draws: Draws) -> Pairs:
    """Cuts pairs, ROW_DTYPE [B], down to the sequence length, which counts specials.

    Token by token from the longer side (a tie: B); draws say how many go from the front.
    """
    a_length, b_length = rows["a_length"].astype(np.int64), rows["b_length"].astype(np.int64)
    excess = np.maximum(a_length + b_length - (sequence_length - SPECIAL_TOKENS), 0)
    lead = np.minimum(excess, np.abs(a_length - b_length))
    removals = Removals(a_length > b_length, lead, excess - lead)
    a_front, b_front = draws.front_cuts(removals)
    return Pairs(
        rows["a_offset"].astype(np.int64) + a_front,
        a_length - removals.from_a,
        rows["b_offset"].astype(np.int64) + b_front,
        b_length - removals.from_b,
    )
