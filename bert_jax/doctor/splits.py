"""Text that is both trained on and held out."""

from collections.abc import Callable

import numpy as np

from bert_jax.data.stream import Stream
from bert_jax.doctor.finding import Finding, example, severity, share

# Shorter sentences repeat by nature ("he said nothing."); of longer ones the first pieces tell.
_LEAST, _COMPARED = 12, 32
# Sentences compared at once.
_BLOCK = 1 << 16

# A document is a near duplicate if most of its long sentences are trained on.
_DUPLICATE = 0.5
_SENTENCES = 3
# Held-out text that was trained on is recited: a tenth of it shifts the score by more than any
# change of recipe.
_LEAKED = 0.1
# Formulas and boilerplate are shared by every collection.
_LEAKED_NOTE = 0.02


def near_duplicates(
    train: Stream, validation: Stream, text_at: Callable[[int], str]
) -> Finding | None:
    """On held-out documents whose sentences stand in the training split too.

    `text_at` is the text from a piece of the validation split on.
    """
    places, hashes = (np.concatenate(a) for a in zip(*_hashes(validation), strict=True))
    if not len(hashes):
        return None
    known = np.unique(hashes)
    seen = np.zeros(len(known), bool)
    for _, others in _hashes(train):
        at = np.minimum(np.searchsorted(known, others), len(known) - 1)
        seen[at[known[at] == others]] = True
    leaked = seen[np.searchsorted(known, hashes)]
    documents = np.searchsorted(validation.document_offsets, places, "right") - 1
    count = len(validation.document_offsets) - 1
    long = np.bincount(documents, minlength=count)
    shared = np.bincount(documents, leaked, minlength=count)
    duplicates = np.flatnonzero((long >= _SENTENCES) & (shared > _DUPLICATE * long))
    value = float(leaked.mean())
    if value <= _LEAKED_NOTE and not len(duplicates):
        return None
    # The first sentence of a duplicate, or of whatever is shared.
    shown = leaked & np.isin(documents, duplicates) if len(duplicates) else leaked
    first = int(places[shown.argmax()])
    text = text_at(int(validation.sentence_offsets[first]))
    return Finding(
        severity(value, _LEAKED),
        f"{share(value)} of held-out sentences of {_LEAST} pieces or more are trained on too; "
        f"{len(duplicates):,} of {count:,} held-out documents are near duplicates",
        example(f"validation document {documents[shown.argmax()]}", text),
        "the held-out score flatters the model: it has seen the answers",
        "take out the near duplicates; equal documents are kept on one side already",
    )


def _hashes(stream: Stream):
    """(numbers, uint64 hashes) of the long sentences, block by block."""
    rng = np.random.default_rng(0)
    # Odd, so that no bit of an id is lost.
    weights = rng.integers(1 << 63, size=_COMPARED, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    column = np.arange(_COMPARED)
    sentences = len(stream.sentence_offsets) - 1
    for start in range(0, sentences, _BLOCK):
        offsets = stream.sentence_offsets[start : start + _BLOCK + 1].astype(np.int64)
        lengths = np.diff(offsets)
        long = np.flatnonzero(lengths >= _LEAST)
        index = offsets[long, None] + column
        within = column < lengths[long, None]
        ids = stream.ids[np.where(within, index, 0)].astype(np.uint64) + np.uint64(1)
        hashes = (np.where(within, ids, 0) * weights).sum(1, dtype=np.uint64)
        yield start + long, hashes + lengths[long].astype(np.uint64) * weights[0]
