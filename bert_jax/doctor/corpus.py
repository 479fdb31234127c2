"""A prepared corpus: its vocabulary, its documents, and the pairs that a plan makes of them.

Memory stays bounded: ids are read in blocks, and of many documents or rows a sample is planned.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath

from bert_jax.data import corpus as corpus_lib
from bert_jax.data import draws, pairs
from bert_jax.data.stream import Stream
from bert_jax.doctor import shape, splits, vocabulary
from bert_jax.doctor.finding import Finding, example, severity, share

# What is planned of a large corpus: a share of 100,000 rows is known to a third of a percent.
_ROWS = 100_000

# The reference's plan gives 0.5 and a little more, for chunks of one long sentence. At 0.75 always
# saying "random" is right three times in four.
_RANDOM, _RANDOM_NOTE = 0.75, 0.6
# A chunk ends behind the sentence that fills it: half a sentence is cut off as a rule, a tenth of
# the text at 128, a third at 64. With much more, pairs are sentences without beginning and end.
_LOST, _LOST_NOTE = 0.6, 0.4
# Short documents do not fill an example. Beyond half, most of the arithmetic is on padding.
_PADDING, _PADDING_NOTE = 0.5, 0.3
# A sentence longer than the longest example is none: a splitter's failure, or no prose.
_LONG = 512
_LONG_SHARE, _LONG_NOTE = 0.1, 0.01
# Sentences or documents looked at at once.
_BLOCK = 1 << 20
# Pieces decoded for an example.
_SHOWN = 30

TextAt = Callable[[int], str]  # the text from a piece of the stream on
# The rows of one document are no independent draws: few documents, whatever the number of rows,
# leave a score to chance.
_HELD_OUT_DOCUMENTS = 30


def examine(folder: epath.Path, lengths: tuple[int, ...] = (128, 512)) -> list[Finding]:
    """Findings on a prepared corpus.

    Args:
      folder: the corpus folder.
      lengths: sequence lengths to plan for; the paper's by default.

    Raises:
      InputError: not complete, or damaged.
    """
    folder = corpus_lib.here(folder)
    manifest = corpus_lib.open_manifest(folder)
    tokenizer = corpus_lib.open_tokenizer(folder, manifest)
    train = corpus_lib.open_stream(folder, "train")
    validation = corpus_lib.open_stream(folder, "validation")
    corpus_lib.verify(folder)

    def text_at(start: int) -> str:
        return tokenizer.decode(train.ids[start : start + _SHOWN].tolist())

    def held_out_at(start: int) -> str:
        return tokenizer.decode(validation.ids[start : start + _SHOWN].tolist())

    causes = [_one_sentence(manifest, train, text_at), _long_sentences(train, text_at)]
    found = [*causes, _repeated(manifest), _dominating(train, text_at), _few_held_out(validation)]
    words = vocabulary.findings(train, tokenizer)
    found += words
    # Sentences of [UNK] or of letters are alike, and no duplicates.
    if all(finding.severity == "note" for finding in words):
        found.append(splits.near_duplicates(train, validation, held_out_at))
    # What a plan looks like follows from its sentences; told once, by its cause.
    if not any(cause and cause.severity == "problem" for cause in causes):
        for length in lengths:
            plan = _Plan.make(train, length)
            # Short examples are needed, long ones may be left out.
            padding = plan.padding(_PADDING if length == min(lengths) else 1.0)
            found += [plan.random(), plan.lost(text_at), padding]
    return [finding for finding in found if finding]


def _one_sentence(manifest: dict[str, Any], train: Stream, text_at: TextAt) -> Finding | None:
    ones, first, documents = 0, None, len(train.document_offsets) - 1
    for start in range(0, documents, _BLOCK):
        offsets = train.document_offsets[start : start + _BLOCK + 1]
        single = np.flatnonzero(np.diff(offsets) == 1)
        ones += len(single)
        if first is None and len(single):
            first = start + int(single[0])
    if first is None:
        return None
    at = int(train.sentence_offsets[train.document_offsets[first]])
    where = example(f"train document {first}", text_at(at))
    return shape.one_sentence(ones, documents, manifest["settings"]["layout"], where)


def _long_sentences(train: Stream, text_at: TextAt) -> Finding | None:
    count = pieces = longest = at = 0
    for start in range(0, len(train.sentence_offsets) - 1, _BLOCK):
        offsets = train.sentence_offsets[start : start + _BLOCK + 1]
        lengths = np.diff(offsets)
        long = lengths[lengths > _LONG]
        count += len(long)
        pieces += int(long.sum())
        if len(long) and long.max() > longest:
            longest, at = int(long.max()), int(offsets[lengths.argmax()])
    value = pieces / len(train.ids)
    if value <= _LONG_NOTE:
        return None
    return Finding(
        severity(value, _LONG_SHARE),
        f"{count:,} sentences are longer than {_LONG} pieces and hold {share(value)} of the text "
        f"(the longest {longest:,})",
        example("the longest", text_at(at)),
        "no example holds them: most of each is cut off",
        "if they are several sentences, the splitter did not see it: is corpus.language right, do "
        "quotation marks match? corpus.layout=sentences_by_line takes your own sentences",
    )


def _repeated(manifest: dict[str, Any]) -> Finding | None:
    documents = sum(manifest["layouts"].values())
    handling = manifest["settings"]["repeated_documents"]
    return shape.repeated(manifest["documents_repeated"], documents, handling, "")


def _dominating(train: Stream, text_at: TextAt) -> Finding | None:
    starts = train.sentence_offsets[train.document_offsets]
    lengths = np.diff(starts)
    longest = int(lengths.argmax())
    where = example(f"train document {longest}", text_at(int(starts[longest])))
    return shape.dominating(lengths, "pieces", where)


def _few_held_out(validation: Stream) -> Finding | None:
    documents = len(validation.document_offsets) - 1
    if documents >= _HELD_OUT_DOCUMENTS:
        return None
    return Finding(
        "note",
        f"{documents} documents are held out",
        "",
        "rows of one document resemble each other, so a held-out score rests on that many draws: "
        "the error shown with next sentence is too small",
        "raise corpus.validation_share, or cut the text into more documents",
    )


@dataclasses.dataclass
class _Plan:
    """Rows of a plan of the training split at one sequence length.

    Attributes:
      rows: pairs.ROW_DTYPE.
      length: specials included.
      where: length and, if it is a sample, how large, in words.
    """

    rows: np.ndarray
    length: int
    where: str

    @classmethod
    def make(cls, train: Stream, length: int) -> "_Plan":
        """Plans all documents, or a sample of many."""
        # No short pairs: whether a long document is cut into them is chance, anew in each epoch,
        # and would hide what the text is like.
        rows = pairs.sample(train, length, 0.0, draws.key_of("doctor"), _ROWS)
        sample = "" if len(rows) < _ROWS else f" (in a sample of {len(rows):,} rows)"
        return cls(rows, length, f"at length {length}{sample}")

    @property
    def wanted(self) -> np.ndarray:
        """Pieces of each pair before truncation, int64 [rows]."""
        return self.rows["a_length"].astype(np.int64) + self.rows["b_length"]

    @property
    def used(self) -> np.ndarray:
        """Pieces of each pair after it."""
        return np.minimum(self.wanted, self.length - pairs.SPECIAL_TOKENS)

    @property
    def lost_share(self) -> float:
        """Of pieces, by truncation."""
        return 1 - float(self.used.sum() / self.wanted.sum())

    def random(self) -> Finding | None:
        """On too many random next sentences."""
        value = float(self.rows["is_random_next"].mean())
        # Sentences that overflow an example have no next either: told once, by their cause.
        if value <= _RANDOM_NOTE or self.lost_share > _LOST:
            return None
        return Finding(
            severity(value, _RANDOM),
            f"{share(value)} of next sentences are random {self.where}",
            "",
            "a chunk of one sentence has no next of its own; always saying `random` is right as "
            "often",
            "longer documents, shorter sentences (corpus.layout, corpus.language) or a longer "
            "phases.N.sequence_length",
        )

    def lost(self, text_at: TextAt) -> Finding | None:
        """On text cut off."""
        value = self.lost_share
        if value <= _LOST_NOTE:
            return None
        # The middle one, since the longest is an exception.
        middle = self.rows[np.argsort(self.wanted, kind="stable")[len(self.rows) // 2]]
        return Finding(
            severity(value, _LOST),
            f"{share(value)} of the pieces of pairs are cut off {self.where}",
            example(
                f"a pair of {middle['a_length']:,} and {middle['b_length']:,} pieces",
                text_at(int(middle["a_offset"])),
            ),
            "sentences are longer than an example: text is lost, and pairs have no beginning and "
            "end",
            "a longer phases.N.sequence_length; are there sentences at all (corpus.layout, "
            "corpus.language)?",
        )

    def padding(self, problem_over: float) -> Finding | None:
        """On examples that text does not fill."""
        value = 1 - float((self.used + pairs.SPECIAL_TOKENS).mean() / self.length)
        if value <= _PADDING_NOTE:
            return None
        return Finding(
            severity(value, problem_over),
            f"{share(value)} of examples is padding {self.where}",
            "",
            "time and memory are spent on positions that hold nothing",
            "a shorter phases.N.sequence_length, or longer documents",
        )
