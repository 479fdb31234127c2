"""What a corpus is like, and what the model is shown of it."""

import dataclasses

import numpy as np

from bert_jax.config import Experiment
from bert_jax.data import batches, corpus, draws, pairs
from bert_jax.data.stream import Stream
from bert_jax.errors import printable
from bert_jax.predict import Piece, row_pieces
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.pretraining import Prepared

# Enough for shares to a tenth of a percent, few enough for a corpus of any size.
_SENTENCES = 200_000
_PIECES = 20_000_000
_ROWS = 20_000

_TOP_PIECES = 40
_EXAMPLES = 3
_BINS = 24


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Shares between edges that grow by a constant factor."""

    edges: list[float]
    shares: list[float]
    median: float
    largest: float


@dataclasses.dataclass(frozen=True)
class Planned:
    """What the pairs of a phase are like, from the first of its plan.

    Attributes:
      sequence_length: of the phase.
      random_next: share of pairs whose B is random.
      filled: share of positions that are no padding.
      truncated: share of the pairs' tokens that are cut off.
    """

    sequence_length: int
    random_next: float
    filled: float
    truncated: float


@dataclasses.dataclass(frozen=True)
class Example:
    """A pair as the model is given it, decoded."""

    is_random_next: bool
    pieces: list[Piece]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A corpus in numbers.

    Attributes:
      splits: counts of each split, from the manifest.
      repeated: documents whose whole text stood before.
      unknown: share of [UNK] in the training split.
      sentence_lengths: in pieces.
      document_lengths: in pieces.
      top_pieces: (piece, share), the commonest.
      unused: share of the vocabulary, specials left out, that the part looked at never uses.
      looked_at: pieces of the training split that were counted.
      planned: one a phase.
      examples: of each phase, a few pairs of its first plan, masked.
    """

    splits: dict[str, dict[str, int]]
    repeated: int
    unknown: float
    sentence_lengths: Histogram
    document_lengths: Histogram
    top_pieces: list[tuple[str, float]]
    unused: float
    looked_at: int
    planned: list[Planned]
    examples: list[list[Example]]

    @classmethod
    def of(cls, experiment: Experiment, prepared: Prepared) -> "Statistics":
        """Looks at the training split; large ones in part."""
        stream = corpus.open_stream(prepared.folder, "train")
        train = prepared.manifest["splits"]["train"]
        counts = np.bincount(stream.ids[:_PIECES], minlength=prepared.tokenizer.size)
        phases = experiment.phases
        rows = [_plan(stream, experiment, n, p.sequence_length) for n, p in enumerate(phases)]
        shares = counts / counts.sum()
        commonest = np.argsort(-counts, kind="stable")[:_TOP_PIECES]
        starts = stream.sentence_offsets
        return cls(
            splits=prepared.manifest["splits"],
            repeated=prepared.manifest["documents_repeated"],
            unknown=train["unknown_tokens"] / train["tokens"],
            sentence_lengths=_histogram(np.diff(_first(starts, _SENTENCES))),
            document_lengths=_histogram(
                np.diff(starts[_first(stream.document_offsets, _SENTENCES)])
            ),
            top_pieces=[
                (printable(prepared.tokenizer.piece(int(i))), float(shares[i])) for i in commonest
            ],
            unused=float((counts[_no_specials(prepared.tokenizer)] == 0).mean()),
            looked_at=int(counts.sum()),
            planned=[_planned(r, p.sequence_length) for r, p in zip(rows, phases, strict=True)],
            examples=[
                _examples(stream, r, experiment, prepared, number) for number, r in enumerate(rows)
            ],
        )


def _first(offsets: np.ndarray, most: int) -> np.ndarray:
    """The first offsets, which are read in order: the rest of a large file stays on disk."""
    return np.asarray(offsets[: most + 1])


def _no_specials(tokenizer: Tokenizer) -> np.ndarray:
    """Ids that text may yield."""
    specials = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id)
    return np.setdiff1d(np.arange(tokenizer.size), [*specials, tokenizer.mask_id])


def _histogram(lengths: np.ndarray) -> Histogram:
    lengths = lengths.astype(np.int64)
    largest = int(lengths.max())
    edges = np.geomspace(1, largest + 1, _BINS + 1)
    counts, _ = np.histogram(lengths, edges)
    return Histogram(
        edges.tolist(), (counts / len(lengths)).tolist(), float(np.median(lengths)), largest
    )


def _plan(stream: Stream, experiment: Experiment, phase: int, length: int) -> np.ndarray:
    """Some pairs of a phase's first plan: a whole one takes long on billions of tokens."""
    key = draws.key_of(experiment.seed, "train", phase, 0)
    return pairs.sample(stream, length, experiment.data.short_seq_prob, key, _ROWS)


def _planned(rows: np.ndarray, length: int) -> Planned:
    wanted = rows["a_length"].astype(np.int64) + rows["b_length"]
    kept = np.minimum(wanted, length - pairs.SPECIAL_TOKENS)
    return Planned(
        length,
        float(rows["is_random_next"].mean()),
        float((kept + pairs.SPECIAL_TOKENS).mean() / length),
        float(1 - kept.sum() / wanted.sum()),
    )


def _examples(
    stream: Stream, rows: np.ndarray, experiment: Experiment, prepared: Prepared, number: int
) -> list[Example]:
    """A few pairs from all over the rows, masked as in training."""
    phase = experiment.phases[number]
    chosen = rows[np.linspace(0, len(rows) - 1, min(_EXAMPLES, len(rows))).astype(int)]
    key = draws.key_of(experiment.seed, "train", number)
    batch = batches.execute(
        stream,
        chosen,
        draws.Counter(key, np.arange(len(chosen))),
        prepared.ids,
        experiment.data,
        phase.sequence_length,
        phase.max_predictions_per_seq,
    )
    return [
        Example(bool(row["is_random_next"]), row_pieces(batch, i, prepared.tokenizer))
        for i, row in enumerate(chosen)
    ]
