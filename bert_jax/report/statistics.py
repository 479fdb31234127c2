"""What a corpus is like, and what the model is shown of it."""

import dataclasses
import itertools
import random

import numpy as np

from bert_jax.config import Experiment, Phase
from bert_jax.data import corpus, draws, pairs
from bert_jax.data.stream import Stream
from bert_jax.section import printable
from bert_jax.show import Piece, row_pieces
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.prepared import Prepared

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
    """One row of a batch, decoded."""

    row: int
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
      unused: share of the vocabulary that the part looked at never uses.
      planned: one a phase.
      examples: of each phase, a few rows of its first batch.
    """

    splits: dict[str, dict[str, int]]
    repeated: int
    unknown: float
    sentence_lengths: Histogram
    document_lengths: Histogram
    top_pieces: list[tuple[str, float]]
    unused: float
    planned: list[Planned]
    examples: list[list[Example]]

    @classmethod
    def of(cls, experiment: Experiment, prepared: Prepared) -> "Statistics":
        """Looks at the training split; large ones in part."""
        stream = corpus.open_stream(prepared.folder, "train")
        train = prepared.manifest["splits"]["train"]
        counts = _counts(stream, prepared.tokenizer.size)
        shares = counts / counts.sum()
        commonest = np.argsort(-counts, kind="stable")[:_TOP_PIECES]
        starts = stream.sentence_offsets
        return cls(
            splits=prepared.manifest["splits"],
            repeated=prepared.manifest["documents_repeated"],
            unknown=train["unknown_tokens"] / train["tokens"],
            sentence_lengths=_histogram(np.diff(_spread(starts, _SENTENCES))),
            document_lengths=_histogram(
                np.diff(starts[_spread(stream.document_offsets, _SENTENCES)])
            ),
            top_pieces=[
                (printable(prepared.tokenizer.piece(int(i))), float(shares[i])) for i in commonest
            ],
            unused=float((counts == 0).mean()),
            planned=[
                _planned(stream, experiment, number, phase)
                for number, phase in enumerate(experiment.phases)
            ],
            examples=[
                _examples(experiment, prepared, number) for number in range(len(experiment.phases))
            ],
        )


def _spread(offsets: np.ndarray, most: int) -> np.ndarray:
    """The first offsets: a mapped file is read in order, and documents are shuffled by nobody."""
    return np.asarray(offsets[: most + 1])


def _counts(stream: Stream, size: int) -> np.ndarray:
    return np.bincount(stream.ids[:_PIECES], minlength=size)


def _histogram(lengths: np.ndarray) -> Histogram:
    lengths = lengths.astype(np.int64)
    largest = int(lengths.max())
    edges = np.geomspace(1, largest + 1, _BINS + 1)
    counts, _ = np.histogram(lengths, edges)
    return Histogram(
        edges.tolist(), (counts / len(lengths)).tolist(), float(np.median(lengths)), largest
    )


def _planned(stream: Stream, experiment: Experiment, number: int, phase: Phase) -> Planned:
    names = (experiment.seed, "train", number, 0)
    scalars = draws.Scalars(random.Random("/".join(map(str, names))))
    order = scalars.document_order(len(stream.document_offsets) - 1)
    length = phase.sequence_length
    plan = pairs.plan(stream, order, length, experiment.data.short_seq_prob, scalars)
    rows = np.fromiter(itertools.islice(plan, _ROWS), pairs.ROW_DTYPE)
    wanted = rows["a_length"].astype(np.int64) + rows["b_length"]
    kept = np.minimum(wanted, length - pairs.SPECIAL_TOKENS)
    return Planned(
        length,
        float(rows["is_random_next"].mean()),
        float((kept + pairs.SPECIAL_TOKENS).mean() / length),
        float(1 - kept.sum() / wanted.sum()),
    )


def _examples(experiment: Experiment, prepared: Prepared, number: int) -> list[Example]:
    rows = np.arange(min(_EXAMPLES, experiment.phases[number].batch_size))
    batch = prepared.train_batches(experiment, number).batch(0, rows)
    tokenizer: Tokenizer = prepared.tokenizer
    return [
        Example(
            int(batch["rows"][i]),
            bool(batch["next_sentence_labels"][i]),
            row_pieces(batch, i, tokenizer),
        )
        for i in range(len(rows))
    ]
