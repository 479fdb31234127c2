"""Findings on how text falls into documents: the same of plain text and of a prepared corpus."""

import numpy as np

from bert_jax.doctor.finding import Finding, severity, share

# With half of the documents of one sentence, most pairs of such text are random by need.
_ONE_SENTENCE = 0.5
_ONE_SENTENCE_NOTE = 0.1
# Each repeat is learned by heart a little; at one in ten it shows in every epoch.
_REPEATED = 0.1
# One document that is half the text is what the model learns, and half of B's come from it.
_DOMINATES = 0.5
_DOMINATES_NOTE = 0.2


def one_sentence(ones: int, documents: int, layout: str, example: str) -> Finding | None:
    """On documents of a single sentence, after which nothing follows."""
    value = ones / documents
    if value <= _ONE_SENTENCE_NOTE:
        return None
    # Documents that all are single lines were not written that way.
    split = layout == "sentences_by_line" and value > _ONE_SENTENCE
    return Finding(
        severity(value, _ONE_SENTENCE),
        f"{ones:,} of {documents:,} documents ({share(value)}) have one sentence"
        + (": is there a blank line after every line?" if split else ""),
        example,
        "nothing follows a document's last sentence, so the next sentence is random by need: the "
        "label says nothing of the text, and pairs are short",
        "in corpus.layout=sentences_by_line a blank line ends a document: keep those between "
        "documents alone"
        if split
        else "join texts that belong together into documents of several sentences",
    )


def repeated(repeats: int, documents: int, handling: str, example: str) -> Finding | None:
    """On documents whose whole text stood before."""
    if not repeats or handling == "drop":
        return None
    value = repeats / documents
    return Finding(
        severity(value, _REPEATED),
        f"{repeats:,} of {documents:,} documents ({share(value)}) repeat an earlier one",
        example,
        "what repeats is learned by heart; a random next sentence may be the true one",
        "--set corpus.repeated_documents=drop",
    )


def dominating(lengths: np.ndarray, unit: str, example: str) -> Finding | None:
    """On a document longer than all others together, or nearly; `lengths` [documents]."""
    value = float(lengths.max() / lengths.sum())
    # Of five documents one is easily a fifth.
    if value <= _DOMINATES_NOTE or len(lengths) * value < 4:
        return None
    return Finding(
        severity(value, _DOMINATES),
        f"the longest of {len(lengths):,} documents holds {share(value)} of the text "
        f"({int(lengths.max()):,} {unit}, the median {int(np.median(lengths)):,})",
        example,
        "the model learns that one document; held out, it alone would decide the score",
        "cut it into documents of its chapters or articles",
    )
