"""Whether the vocabulary fits the text."""

import numpy as np

from bert_jax.data.stream import Stream
from bert_jax.doctor.finding import Finding, example, severity, share
from bert_jax.text.tokenizer import Tokenizer

# BERT's own vocabulary leaves one piece in thousands unknown on English. At one in a hundred,
# every example of 128 holds one.
_UNKNOWN, _UNKNOWN_NOTE = 0.01, 0.001
# English holds "a", "i", "s" and digits as pieces of one letter; words of a language that the
# vocabulary was not made for fall into letters.
_LETTERS, _LETTERS_NOTE = 0.3, 0.15
# A vocabulary trained on the text uses nearly all of its pieces.
_UNUSED_NOTE = 0.3
# Pieces with capitals: a cased vocabulary has a quarter, an uncased one none (but specials).
_CAPITALS_NONE, _CAPITALS_MANY = 0.005, 0.05
# Scripts that write without blanks, where a piece of one character is a word: Thai to Khmer, and
# from CJK radicals on.
_NO_BLANKS = ((0x0E00, 0x17FF), (0x2E80, 0x10FFFF))


def findings(train: Stream, tokenizer: Tokenizer) -> list[Finding]:
    """On unknown words, words in letters, pieces never used, and upper against lower case."""
    counts = train.unigrams
    pieces = [tokenizer.piece(i) for i in range(tokenizer.size)]
    specials = {getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "cls", "sep", "mask")}
    unknown = float(counts[tokenizer.unk_id] / counts.sum())
    found = [_case(pieces, tokenizer, unknown), _unknown(train, unknown, tokenizer)]
    for cause in found:
        # What else looks odd follows from it.
        if cause and cause.severity == "problem":
            return [cause]
    found += [_letters(counts, pieces), _unused(counts, pieces, specials)]
    return [finding for finding in found if finding]


def _unknown(train: Stream, value: float, tokenizer: Tokenizer) -> Finding | None:
    if value <= _UNKNOWN_NOTE:
        return None
    at = _first(train, tokenizer.unk_id)
    around = tokenizer.decode(train.ids[max(at - 8, 0) : at + 8].tolist())
    return Finding(
        severity(value, _UNKNOWN),
        f"{share(value)} of pieces are unknown",
        example(f"train, piece {at:,}", around),
        "whatever stood there is one and the same piece, which the model learns to predict",
        "a vocabulary made for this text: --set corpus.tokenizer=train; for thousands of "
        "characters --set corpus.tokenizer_kind=unigram",
    )


def _case(pieces: list[str], tokenizer: Tokenizer, unknown: float) -> Finding | None:
    """On text and vocabulary that differ in case."""
    words = [piece.removeprefix("##").removeprefix("\u2581") for piece in pieces]
    words = [word for word in words if word.isalpha() and word.lower() != word.upper()]
    capitals = sum(word != word.lower() for word in words) / max(len(words), 1)
    # Text without capitals gives a vocabulary without, and nothing unknown.
    if tokenizer.case == "cased" and capitals < _CAPITALS_NONE and unknown > _UNKNOWN_NOTE:
        effect = "every word with a capital is unknown or falls into letters"
        other, remedy = "in lower case", "--set corpus.case=uncased"
    elif tokenizer.case == "uncased" and capitals > _CAPITALS_MANY:
        effect = "text is lower-cased first: pieces with capitals never occur, names are cut up"
        other, remedy = "cased", "--set corpus.case=cased"
    else:
        return None
    return Finding(
        "problem",
        f"text is read as {tokenizer.case}, and the vocabulary is {other} ({share(capitals)} of "
        f"its pieces hold a capital)",
        "",
        effect,
        remedy,
    )


def _letters(counts: np.ndarray, pieces: list[str]) -> Finding | None:
    words = [piece.removeprefix("##").removeprefix("\u2581") for piece in pieces]
    lettered = np.array([word.isalpha() and not _without_blanks(word) for word in words])
    single = lettered & np.array([len(word) == 1 for word in words])
    # Of all pieces: a few Latin letters in Chinese text are no fault.
    value = float(counts[single].sum() / counts.sum())
    if value <= _LETTERS_NOTE:
        return None
    commonest = np.argsort(-np.where(single, counts, 0))[:10]
    return Finding(
        severity(value, _LETTERS),
        f"{share(value)} of pieces are single letters",
        example("the commonest", " ".join(pieces[i] for i in commonest)),
        "words fall into letters: the vocabulary is of another language or script, and examples "
        "hold few words",
        "a vocabulary made for this text: --set corpus.tokenizer=train, or a larger "
        "model.vocab_size",
    )


def _without_blanks(word: str) -> bool:
    return any(low <= ord(word[0]) <= high for low, high in _NO_BLANKS)


def _unused(counts: np.ndarray, pieces: list[str], specials: set[int]) -> Finding | None:
    unused = [i for i in np.flatnonzero(counts == 0) if i not in specials]
    value = len(unused) / len(pieces)
    if value <= _UNUSED_NOTE:
        return None
    return Finding(
        "note",
        f"{len(unused):,} of {len(pieces):,} pieces ({share(value)}) never occur in the training "
        "split",
        example("the first", " ".join(pieces[i] for i in unused[:10])),
        "their rows are parameters that learn nothing but to be unlikely",
        "--set corpus.tokenizer=train with a smaller model.vocab_size, unless another text follows",
    )


def _first(train: Stream, token_id: int) -> int:
    """Where an id that occurs stands first."""
    step = 1 << 24
    for start in range(0, len(train.ids), step):
        hits = np.flatnonzero(train.ids[start : start + step] == token_id)
        if len(hits):
            return start + int(hits[0])
    raise ValueError(f"{token_id} does not occur")
