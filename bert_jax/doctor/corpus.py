"""A prepared corpus: its vocabulary, its documents, and the pairs that a plan makes of them.

Memory stays bounded: ids are read in blocks, and of many documents or rows a sample is planned.
"""

import itertools
import random
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config import Data
from bert_jax.data import corpus as corpus_lib
from bert_jax.data import draws, pairs
from bert_jax.data.stream import Stream
from bert_jax.doctor import shape, splits, vocabulary
from bert_jax.doctor.finding import Finding, example, severity, share

# What is planned of a large corpus: a share of 100,000 rows is known to a third of a percent.
_DOCUMENTS, _ROWS = 50_000, 100_000

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
# The rows of one document are no independent draws: few documents, whatever the number of rows,
# leave a score to chance.
_HELD_OUT_DOCUMENTS = 30


def examine(
    folder: epath.Path, lengths: tuple[int, ...] = (128, 512), data: Data | None = None
) -> list[Finding]:
    """Findings on a prepared corpus.

    Args:
      folder: the corpus folder.
      lengths: sequence lengths to plan for; the paper's by default.
      data: how pairs are made; the defaults if left out.

    Raises:
      InputError: not complete, or damaged.
    """
    manifest = corpus_lib.open_manifest(folder)
    tokenizer = corpus_lib.open_tokenizer(folder, manifest)
    train = corpus_lib.open_stream(folder, "train")
    validation = corpus_lib.open_stream(folder, "validation")

    def text_at(stream: Stream, start: int) -> str:
        return tokenizer.decode(stream.ids[start : start + 30].tolist())

    causes = [_one_sentence(manifest, train, text_at), _long_sentences(train, text_at)]
    found = [*causes, _repeated(manifest), _dominating(train, text_at), _few_held_out(validation)]
    found += vocabulary.findings(train, tokenizer)
    found.append(splits.near_duplicates(train, validation, text_at))
    # What a plan looks like follows from its sentences; told once, by its cause.
    if not any(cause and cause.severity == "problem" for cause in causes):
        for length in lengths:
            found += _plan(train, length, data or Data(), text_at)
    return [finding for finding in found if finding]


def _one_sentence(manifest: dict[str, Any], train: Stream, text_at: Any) -> Finding | None:
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
    where = example(f"train document {first}", text_at(train, at))
    return shape.one_sentence(ones, documents, manifest["settings"]["layout"], where)


def _long_sentences(train: Stream, text_at: Any) -> Finding | None:
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
        example("the longest", text_at(train, at)),
        "no example holds them: most of each is cut off",
        "if they are several sentences, the splitter did not see it: is corpus.language right, do "
        "quotation marks match? corpus.layout=sentences_by_line takes your own sentences",
    )


def _repeated(manifest: dict[str, Any]) -> Finding | None:
    documents = sum(manifest["layouts"].values())
    handling = manifest["settings"]["repeated_documents"]
    return shape.repeated(manifest["documents_repeated"], documents, handling, "")


def _dominating(train: Stream, text_at: Any) -> Finding | None:
    starts = train.sentence_offsets[train.document_offsets]
    lengths = np.diff(starts)
    longest = int(lengths.argmax())
    where = example(f"train document {longest}", text_at(train, int(starts[longest])))
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


def _plan(train: Stream, length: int, data: Data, text_at: Any) -> list[Finding]:
    """On the rows of a plan at one sequence length."""
    rows, scope = _rows(train, length, data)
    room = length - pairs.SPECIAL_TOKENS
    wanted = rows["a_length"].astype(np.int64) + rows["b_length"]
    used = np.minimum(wanted, room)
    random_share = float(rows["is_random_next"].mean())
    lost = 1 - float(used.sum() / wanted.sum())
    padding = 1 - float((used + pairs.SPECIAL_TOKENS).mean() / length)
    where = f" at length {length}{scope}"
    found = []
    # Sentences that overflow an example have no next either: told once, by their cause.
    if random_share > _RANDOM_NOTE and lost <= _LOST:
        found.append(
            Finding(
                severity(random_share, _RANDOM),
                f"{share(random_share)} of next sentences are random{where}",
                "",
                "a chunk of one sentence has no next of its own; always saying `random` is right "
                "as often",
                "longer documents, shorter sentences (corpus.layout, corpus.language) or a longer "
                "phases.N.sequence_length",
            )
        )
    if lost > _LOST_NOTE:
        at = rows["a_offset"][rows["a_length"].argmax()]
        found.append(
            Finding(
                severity(lost, _LOST),
                f"{share(lost)} of the pieces of pairs are cut off{where}",
                example(f"{rows['a_length'].max():,} pieces", text_at(train, int(at))),
                "sentences are longer than an example: text is lost, and pairs have no beginning "
                "and end",
                "a longer phases.N.sequence_length; are there sentences at all (corpus.layout, "
                "corpus.language)?",
            )
        )
    if padding > _PADDING_NOTE:
        found.append(
            Finding(
                severity(padding, _PADDING),
                f"{share(padding)} of examples is padding{where}",
                "",
                "time and memory are spent on positions that hold nothing",
                "a shorter phases.N.sequence_length, or longer documents",
            )
        )
    return found


def _rows(train: Stream, length: int, data: Data) -> tuple[np.ndarray, str]:
    """Rows of a plan, and words for how many if not all."""
    rng = random.Random(0)
    documents = len(train.document_offsets) - 1
    order = rng.sample(range(documents), min(documents, _DOCUMENTS))
    plan = pairs.plan(train, order, length, data.short_seq_prob, draws.Scalars(rng))
    rows = np.fromiter(itertools.islice(plan, _ROWS), pairs.ROW_DTYPE)
    whole = len(order) == documents and next(plan, None) is None
    return rows, "" if whole else f" (in a sample of {len(rows):,} rows)"
