"""Next-sentence pairs, planned from sentence lengths alone, and their truncation.

The algorithm is that of google-research/bert, create_pretraining_data.py
(`create_instances_from_document`, `truncate_seq_pair`), which also reuses sentences that a random B
replaces: a row is a text A with a text B, which follows A in half of the rows (Devlin et al. 2018,
section 3.1, task 2). The random choices are in data.draws; no choice depends on an id.

With swapped pairs (Lan et al. 2019, ALBERT, section 3.1) B always follows A, and half of the pairs
exchange A and B. So every chunk needs two sentences: a single sentence at the end of its document
joins the chunk before it, and a document of one sentence gives no pair.
ALBERT's code gives a chunk of one sentence a random B, labelled as if it were swapped.

A chunk is the sentences from which one pair is made. All its draws depend only on its first
sentence, and so does the first sentence of the next chunk. For every sentence of a block, `plan`
computes where the next chunk would start if a chunk started there; the plan follows these links.
The random B of a chunk does not change the chain; it is drawn when the row is made.
"""

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from bert_jax.data.draws import CounterDraws, Draws, Removals, SequentialDraws, permutation
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError

# [CLS] A [SEP] B [SEP]
NUM_SPECIALS = 3

# What half of the pairs are: pairs with B from another document, or with A and B swapped.
PairKind = Literal["pairs", "swapped_pairs"]

# `is_random_next` is the label; for swapped pairs it tells that A and B were swapped.
ROW_DTYPE = np.dtype(
    [
        ("a_offset", np.uint64),
        ("a_length", np.uint32),
        ("b_offset", np.uint64),
        ("b_length", np.uint32),
        ("is_random_next", np.bool_),
    ]
)

# Sentences processed at once: few enough for the cache.
_BLOCK = 1 << 15
# Documents sampled at once.
_SAMPLED = 256


class Pairs(NamedTuple):
    """Pairs after truncation, int64 [B] each: the starts and lengths of A and B."""

    a_start: np.ndarray
    a_length: np.ndarray
    b_start: np.ndarray
    b_length: np.ndarray


class _Block(NamedTuple):
    """The sentences of some documents, one after another."""

    sentence: np.ndarray  # int64 [N], their numbers in the split
    offsets: np.ndarray  # int64 [N or more], the first tokens of these and of later sentences
    document_end: np.ndarray  # int64 [N], one past the document's last sentence, as an index here
    target: np.ndarray  # int64 [N], the target length of the document's pairs in tokens


def chunk_dtype(stream: Stream) -> np.dtype:
    """Returns the type of a plan's chunks, 10 bytes each up to 2**32 sentences, else 14.

    `sentence` is a chunk's first sentence, `of_a` the number of sentences in A, `of_b` the number
    in B, 0 if B is from another document. `target` is the target length of the pair in tokens.
    """
    sentence = np.uint32 if len(stream.sentence_offsets) <= 2**32 else np.uint64
    counts = [(name, np.uint16) for name in ("of_a", "of_b", "target")]
    return np.dtype([("sentence", sentence), *counts])


def plan(
    stream: Stream,
    sequence_length: int,
    short_seq_prob: float,
    key: tuple[int, int],
    kind: PairKind = "pairs",
) -> np.ndarray:
    """Plans one pass over the documents, in their order; `chunk_dtype` [chunks].

    `sequence_length` counts specials; `short_seq_prob` is the share of documents that are cut into
    shorter pairs.
    """
    max_tokens = sequence_length - NUM_SPECIALS
    document_offsets, total = stream.document_offsets, len(stream.sentence_offsets) - 1
    result, begin = [], 0
    for start in range(0, total, _BLOCK):
        stop = min(start + _BLOCK, total)
        # A sentence has at least one token, so a chunk that starts in the block ends in this range.
        offsets = stream.sentence_offsets[start : stop + max_tokens].astype(np.int64)
        first_document = int(np.searchsorted(document_offsets, np.uint64(start), "right")) - 1
        stop_document = int(np.searchsorted(document_offsets, np.uint64(stop)))
        bounds = document_offsets[first_document : stop_document + 1].astype(np.int64)
        documents = np.arange(first_document, stop_document)
        targets = CounterDraws(key, documents).target_length(max_tokens, short_seq_prob)
        counts = np.diff(np.clip(bounds, start, stop))  # of the document's sentences in the block
        document_end = np.repeat(bounds[1:], counts) - start
        block = _Block(np.arange(start, stop), offsets, document_end, np.repeat(targets, counts))
        chunks, begin = _chunks(stream, block, key, begin, kind)
        begin -= stop - start
        result.append(chunks)
    return _require_chunks(np.concatenate(result), "document")


def sample(
    stream: Stream,
    sequence_length: int,
    short_seq_prob: float,
    key: tuple[int, int],
    max_pairs: int,
    kind: PairKind = "pairs",
) -> np.ndarray:
    """Returns at most `max_pairs` pairs, from documents in a random order; ROW_DTYPE [rows].

    The other arguments are those of `plan`, which has the same pairs in the order of documents.
    """
    order = permutation(key, 0, len(stream.document_offsets) - 1)
    result, count = [np.empty(0, chunk_dtype(stream))], 0
    while count < max_pairs and len(order):
        documents, order = order[:_SAMPLED], order[_SAMPLED:]
        first, last = (stream.document_offsets[documents + i].astype(np.int64) for i in (0, 1))
        size = last - first
        ends = np.cumsum(size)
        sentence = np.arange(ends[-1]) + np.repeat(first - (ends - size), size)
        lengths = stream.sentence_offsets[sentence + 1] - stream.sentence_offsets[sentence]
        offsets = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
        targets = CounterDraws(key, documents).target_length(
            sequence_length - NUM_SPECIALS, short_seq_prob
        )
        block = _Block(sentence, offsets, np.repeat(ends, size), np.repeat(targets, size))
        chunks, _ = _chunks(stream, block, key, 0, kind)
        result.append(chunks)
        count += len(chunks)
    chunks = _require_chunks(np.concatenate(result)[:max_pairs], "held-out document")
    return rows(stream, chunks, CounterDraws(key, chunks["sentence"]), kind)


def _require_chunks(chunks: np.ndarray, documents: str) -> np.ndarray:
    if not len(chunks):  # only swapped pairs need two sentences
        raise InputError(
            f"data.objective=mlm_sop: no {documents} has two sentences; give longer ones, or set "
            "data.objective=mlm"
        )
    return chunks


def _chunks(
    stream: Stream, block: _Block, key: tuple[int, int], begin: int, kind: PairKind
) -> tuple[np.ndarray, int]:
    """Returns the chain of chunks from sentence `begin`, and the sentence after the last chunk.

    Both sentences are indices into the block.
    """
    sentence, offsets, document_end, target = block
    index = np.arange(len(sentence))
    of_a, of_b = _split_chunks(
        offsets, index, document_end, target, CounterDraws(key, sentence), kind
    )
    # A chunk with a random B puts its unused sentences back: the next chunk starts after A.
    chain, begin = follow_chain((index + of_a + of_b).tolist(), begin)
    chunks = np.empty(len(chain), chunk_dtype(stream))
    chunks["sentence"], chunks["target"] = sentence[chain], target[chain]
    chunks["of_a"], chunks["of_b"] = of_a[chain], of_b[chain]
    if kind == "swapped_pairs":
        chunks = chunks[chunks["of_b"] > 0]
    return chunks, begin


def follow_chain(following: list[int], begin: int) -> tuple[list[int], int]:
    """Returns the chain begin, following[begin], ..., and its first index beyond the list."""
    chain = []
    while begin < len(following):
        chain.append(begin)
        begin = following[begin]
    return chain, begin


def _split_chunks(
    offsets: np.ndarray,
    first: np.ndarray,
    document_end: np.ndarray,
    target: np.ndarray,
    draws: Draws,
    kind: PairKind = "pairs",
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of sentences in A and B for each chunk.

    B has 0 if it comes from another document or, for swapped pairs, if the document has only one
    sentence. Sentences start at `offsets`, int64 [N]; the other arrays are int64 [chunks]: their
    first sentences, one past the last sentences of their documents, and their targets.
    """
    # A chunk closes with the sentence that brings it to the target, or with the document's last.
    end = np.minimum(np.searchsorted(offsets, offsets[first] + target), document_end)
    if kind == "swapped_pairs":
        end = np.maximum(end, np.minimum(first + 2, document_end))
        end = np.where(document_end - end == 1, document_end, end)
        of_a = draws.split_point(end - first)
        return of_a, end - first - of_a
    sentences = end - first
    of_a = draws.split_point(sentences)
    is_single = sentences == 1
    return of_a, np.where(is_single | draws.draw_random_next(~is_single), 0, sentences - of_a)


def rows(stream: Stream, chunks: np.ndarray, draws: Draws, kind: PairKind = "pairs") -> np.ndarray:
    """Returns for each chunk its pair before truncation: where A and B are in `stream.ids`.

    Takes `chunk_dtype` [B] and `draws` for the chunks' first sentences; returns ROW_DTYPE [B].
    """
    sentence = chunks["sentence"].astype(np.int64)
    b_first = sentence + chunks["of_a"]
    b_last, is_random = b_first + chunks["of_b"], chunks["of_b"] == 0
    offsets = np.asarray(stream.sentence_offsets)
    result = np.empty(len(chunks), ROW_DTYPE)
    result["is_random_next"] = is_random
    result["a_offset"] = offsets[sentence]
    result["a_length"] = offsets[b_first] - result["a_offset"]
    if kind == "swapped_pairs":
        result["b_offset"] = offsets[b_first]
        result["b_length"] = offsets[b_last] - result["b_offset"]
        swapped = draws.draw_random_next(np.ones(len(chunks), bool))
        for a, b in (("a_offset", "b_offset"), ("a_length", "b_length")):
            old_a, old_b = result[a].copy(), result[b].copy()
            result[a], result[b] = np.where(swapped, (old_b, old_a), (old_a, old_b))
        result["is_random_next"] = swapped
        return result
    target = np.maximum(chunks["target"] - result["a_length"].astype(np.int64), 1)
    first, last = _random_ranges(stream, sentence, target, is_random, draws)
    result["b_offset"] = offsets[np.where(is_random, first, b_first)]
    result["b_length"] = offsets[np.where(is_random, last, b_last)] - result["b_offset"]
    return result


def _random_ranges(
    stream: Stream, sentence: np.ndarray, target: np.ndarray, needed: np.ndarray, draws: Draws
) -> tuple[np.ndarray, np.ndarray]:
    """Draws ranges of sentences in other documents: the first sentence, one past the last.

    The documents of `sentence` are avoided. A range has at least `target` ids, unless its document
    ends before; int64 [B] each. `needed`, bool [B], marks the draws that are used.
    """
    bounds, offsets = np.asarray(stream.document_offsets), np.asarray(stream.sentence_offsets)
    other = draws.other_document(len(bounds) - 1, stream.documents_of(sentence), needed)
    first, last = bounds[other].astype(np.int64), bounds[other + 1].astype(np.int64)
    first += draws.start_sentence(last - first, needed)
    # Binary search for the last sentence that begins before `limit`. It is less than `target` away,
    # since each sentence has at least one token.
    limit, result = offsets[first] + target.astype(np.uint64), first
    step = 1 << int(target.max()).bit_length() - 1
    while step:
        probe = np.minimum(result + step, last - 1)
        result = np.where(offsets[probe] < limit, probe, result)
        step >>= 1
    return first, result + 1


def reference_pairs(
    stream: Stream, sequence_length: int, short_seq_prob: float, draws: SequentialDraws
) -> Iterator[np.ndarray]:
    """Yields the pairs of one pass over the documents, ROW_DTYPE [1] each.

    Draws are made lazily, in the order of the reference.
    """
    offsets = stream.sentence_offsets.astype(np.int64)
    bounds = stream.document_offsets.astype(np.int64)
    chunk = np.empty(1, chunk_dtype(stream))
    for first, last in itertools.pairwise(bounds):
        target = draws.target_length(sequence_length - NUM_SPECIALS, short_seq_prob)
        sentence = np.array([first])
        while sentence[0] < last:
            of_a, of_b = _split_chunks(offsets, sentence, np.array([last]), target, draws)
            chunk["sentence"], chunk["target"] = sentence, target
            chunk["of_a"], chunk["of_b"] = of_a, of_b
            yield rows(stream, chunk, draws)
            # A chunk with a random B puts its unused sentences back.
            sentence += of_a + of_b


def truncated_lengths(rows: np.ndarray, sequence_length: int) -> np.ndarray:
    """Returns the lengths after `truncate`, specials included: ROW_DTYPE [B] -> int64 [B]."""
    length = rows["a_length"].astype(np.int64) + rows["b_length"] + NUM_SPECIALS
    return np.minimum(length, sequence_length)


def truncate(rows: np.ndarray, sequence_length: int, draws: Draws) -> Pairs:
    """Truncates pairs, ROW_DTYPE [B], to the sequence length, which counts specials.

    Each token is removed from the longer side (B in a tie), at the front or the end by a draw.
    """
    a_length, b_length = rows["a_length"].astype(np.int64), rows["b_length"].astype(np.int64)
    total = np.maximum(a_length + b_length - (sequence_length - NUM_SPECIALS), 0)
    from_longer = np.minimum(total, np.abs(a_length - b_length))
    removals = Removals(a_length > b_length, from_longer, total - from_longer)
    a_front, b_front = draws.front_cuts(removals)
    return Pairs(
        rows["a_offset"].astype(np.int64) + a_front,
        a_length - removals.a_total,
        rows["b_offset"].astype(np.int64) + b_front,
        b_length - removals.b_total,
    )
