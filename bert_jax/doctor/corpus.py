"""A prepared corpus: its vocabulary, its documents, its splits, and the pairs planned of them.

Memory stays bounded: ids are read in blocks, and of many documents or rows a sample is planned.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
from etils import epath

from bert_jax.data import corpus as corpus_lib
from bert_jax.data import draws, pairs
from bert_jax.data.stream import Stream
from bert_jax.doctor import finding
from bert_jax.doctor.finding import Finding, Rule, example, share
from bert_jax.errors import quantity
from bert_jax.text.tokenizer import Tokenizer

TextAt = Callable[[int], str]  # the text from a piece of the stream on

# Sentences looked at at once.
_BLOCK = 1 << 20
# Pieces decoded for an example.
_SHOWN = 30


def examine(folder: epath.Path, lengths: tuple[int, ...] = (128, 512)) -> list[Finding]:
    """Examines a prepared corpus.

    Args:
      folder: the corpus folder.
      lengths: sequence lengths to plan for; the paper's by default.
    """
    folder = corpus_lib.here(folder)
    manifest = corpus_lib.open_manifest(folder)
    tokenizer = corpus_lib.open_tokenizer(folder, manifest)
    train = corpus_lib.open_stream(folder, "train")
    validation = corpus_lib.open_stream(folder, "validation")
    corpus_lib.verify(folder)

    def text_of(stream: Stream) -> TextAt:
        return lambda start: tokenizer.decode(stream.ids[start : start + _SHOWN].tolist())

    text_at = text_of(train)
    settings = manifest["settings"]
    causes = _one_sentence(settings["layout"], train, text_at) + _long_sentences(train, text_at)
    findings = causes + finding.repeated(
        manifest["documents_repeated"],
        sum(manifest["layouts"].values()),
        settings["repeated_documents"],
        "",
    )
    held_out = len(validation.document_offsets) - 1
    findings += _dominating(train, text_at)
    findings += FEW_HELD_OUT.check(_HELD_OUT_DOCUMENTS - held_out, documents=held_out)
    words = _vocabulary(train, tokenizer)
    findings += words
    # Sentences of [UNK] or of letters are alike, and no duplicates.
    if all(one.severity == "note" for one in words):
        findings += near_duplicates(train, validation, text_of(validation))
    # What a plan looks like follows from its sentences; named once, by its cause.
    if all(one.severity == "note" for one in causes):
        for length in lengths:
            findings += _plan(train, text_at, length, length == min(lengths))
    return findings


# --- sentences and documents ---

# A sentence longer than the longest example is none: a splitter's failure, or no prose.
_LONG = 512
LONG_SENTENCES = Rule(
    "{count} of over 512 pieces, {value} of the text (the longest {longest:,})",
    0.01, 0.1,
    "no example holds them: most of each is cut off",
    "if they are several sentences, the splitter did not see it: is corpus.language right, do "
    "quotation marks match? corpus.layout=sentences_by_line takes your own sentences",
)  # fmt: skip
# The rows of one document are no independent draws: few documents, whatever the number of rows,
# leave a score to chance.
_HELD_OUT_DOCUMENTS = 30
FEW_HELD_OUT = Rule(
    "{documents} documents are held out",
    0, math.inf,
    "rows of one document resemble each other, so a held-out score rests on that many draws: the "
    "error shown with next sentence is too small",
    "raise corpus.validation_share, or cut the text into more documents",
)  # fmt: skip


def _one_sentence(layout: str, train: Stream, text_at: TextAt) -> list[Finding]:
    single = np.flatnonzero(np.diff(train.document_offsets) == 1)
    if not len(single):
        return []
    at = int(train.sentence_offsets[train.document_offsets[single[0]]])
    where = example(f"train document {single[0]}", text_at(at))
    documents = len(train.document_offsets) - 1
    return finding.one_sentence(len(single), documents, layout, where)


def _long_sentences(train: Stream, text_at: TextAt) -> list[Finding]:
    count = pieces = longest = at = 0
    for start in range(0, len(train.sentence_offsets) - 1, _BLOCK):
        offsets = train.sentence_offsets[start : start + _BLOCK + 1]
        lengths = np.diff(offsets)
        long = lengths[lengths > _LONG]
        count += len(long)
        pieces += int(long.sum())
        if len(long) and long.max() > longest:
            longest, at = int(long.max()), int(offsets[lengths.argmax()])
    where = example("the longest", text_at(at))
    return LONG_SENTENCES.check(
        pieces / len(train.ids), where, count=quantity(count, "sentence"), longest=longest
    )


def _dominating(train: Stream, text_at: TextAt) -> list[Finding]:
    starts = train.sentence_offsets[train.document_offsets]
    lengths = np.diff(starts)
    longest = int(lengths.argmax())
    where = example(f"train document {longest}", text_at(int(starts[longest])))
    return finding.dominating(lengths, "pieces", where)


# --- whether the vocabulary fits the text ---

# BERT's own vocabulary leaves one piece in thousands unknown on English. At one in a hundred,
# every example of 128 holds one.
UNKNOWN = Rule(
    "{value} of pieces are unknown",
    0.001, 0.01,
    "whatever stood there is one and the same piece, which the model learns to predict",
    "a vocabulary made for this text: --set corpus.tokenizer=train; for thousands of characters "
    "--set corpus.tokenizer_kind=unigram",
)  # fmt: skip
_CASE = (
    "text is read as {case}, and the vocabulary is {other} ({capitals} of its pieces hold a "
    "capital)"
)
# Pieces with capitals: a cased vocabulary has a quarter, an uncased one none (except specials).
_CAPITALS_NONE, _CAPITALS_MANY = 0.005, 0.05
TOO_LOW = Rule(
    _CASE,
    0, 0,
    "every word with a capital is unknown or falls into letters",
    "--set corpus.case=uncased",
)  # fmt: skip
TOO_HIGH = Rule(
    _CASE,
    0, 0,
    "text is lower-cased first: pieces with capitals never occur, names are cut up",
    "--set corpus.case=cased",
)  # fmt: skip
# English holds "a", "i", "s" and digits as pieces of one letter; words of a language that the
# vocabulary was not made for fall into letters.
LETTERS = Rule(
    "{value} of pieces are single letters",
    0.15, 0.3,
    "words fall into letters: the vocabulary is of another language or script, and examples hold "
    "few words",
    "a vocabulary made for this text: --set corpus.tokenizer=train, or a larger model.vocab_size",
)  # fmt: skip
# A vocabulary trained on the text uses nearly all of its pieces.
UNUSED = Rule(
    "{count:,} of {pieces:,} pieces ({value}) never occur in the training split",
    0.3, math.inf,
    "their rows are parameters that learn nothing but to be unlikely",
    "--set corpus.tokenizer=train with a smaller model.vocab_size, unless another text follows",
)  # fmt: skip
# Scripts that write without blanks, where a piece of one character is a word: Thai to Khmer, and
# from CJK radicals on.
_NO_BLANKS = ((0x0E00, 0x17FF), (0x2E80, 0x10FFFF))


def _vocabulary(train: Stream, tokenizer: Tokenizer) -> list[Finding]:
    """Looks at unknown words, words in letters, pieces never used, and upper against lower case."""
    counts = train.unigrams
    pieces = [tokenizer.piece(i) for i in range(tokenizer.size)]
    words = [piece.removeprefix("##").removeprefix("\u2581") for piece in pieces]
    unknown = float(counts[tokenizer.unk_id] / counts.sum())
    where = ""
    if unknown > UNKNOWN.note_over:
        at = _first(train, tokenizer.unk_id)
        around = tokenizer.decode(train.ids[max(at - 8, 0) : at + 8].tolist())
        where = example(f"train, piece {at:,}", around)
    findings = _case(words, tokenizer.case, unknown) + UNKNOWN.check(unknown, where)
    for cause in findings:
        # What else looks odd follows from it.
        if cause.severity == "problem":
            return [cause]

    lettered = np.array([word.isalpha() and not _without_blanks(word) for word in words])
    single = lettered & np.array([len(word) == 1 for word in words])
    commonest = np.argsort(-np.where(single, counts, 0))[:10]
    # Of all pieces: a few Latin letters in Chinese text are no fault.
    value = float(counts[single].sum() / counts.sum())
    findings += LETTERS.check(
        value, example("the commonest", " ".join(pieces[i] for i in commonest))
    )

    specials = {getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "cls", "sep", "mask")}
    unused = [i for i in np.flatnonzero(counts == 0) if i not in specials]
    where = example("the first", " ".join(pieces[i] for i in unused[:10]))
    value = len(unused) / len(pieces)
    return findings + UNUSED.check(value, where, count=len(unused), pieces=len(pieces))


def _case(words: list[str], case: str, unknown: float) -> list[Finding]:
    """Looks whether text and vocabulary differ in case."""
    words = [word for word in words if word.isalpha() and word.lower() != word.upper()]
    capitals = sum(word != word.lower() for word in words) / max(len(words), 1)
    # Text without capitals gives a vocabulary without, and nothing unknown.
    if case == "cased" and capitals < _CAPITALS_NONE and unknown > UNKNOWN.note_over:
        rule, other = TOO_LOW, "in lower case"
    elif case == "uncased" and capitals > _CAPITALS_MANY:
        rule, other = TOO_HIGH, "cased"
    else:
        return []
    return rule.check(1.0, case=case, other=other, capitals=share(capitals))


def _without_blanks(word: str) -> bool:
    return any(low <= ord(word[0]) <= high for low, high in _NO_BLANKS)


def _first(train: Stream, token_id: int) -> int:
    """Returns where an id that occurs stands first."""
    step = 1 << 24
    for start in range(0, len(train.ids), step):
        hits = np.flatnonzero(train.ids[start : start + step] == token_id)
        if len(hits):
            return start + int(hits[0])
    raise ValueError(f"{token_id} does not occur")


# --- text that is both trained on and held out ---

# Shorter sentences repeat by nature ("There is more."); of longer ones the first pieces tell.
_LEAST, _COMPARED = 12, 32
# Sentences compared at once.
_COMPARED_BLOCK = 1 << 16
# A document is a near duplicate if most of its long sentences are trained on.
_DUPLICATE, _SENTENCES = 0.5, 3
# Formulas and boilerplate are shared by every collection. Held-out text that was trained on is
# recited: a tenth of it shifts the score by more than any change of recipe.
LEAKED = Rule(
    "{value} of held-out sentences of 12 pieces or more are trained on too; {duplicates:,} of "
    "{documents:,} held-out documents are near duplicates",
    0.02, 0.1,
    "the held-out score flatters the model: it has seen the answers",
    "take out the near duplicates; equal documents are kept on one side already",
)  # fmt: skip


def near_duplicates(train: Stream, validation: Stream, text_at: TextAt) -> list[Finding]:
    """Finds held-out documents whose sentences stand in the training split too.

    `text_at` gives the text from a piece of the validation split on.
    """
    places, hashes = (np.concatenate(a) for a in zip(*_hashes(validation), strict=True))
    if not len(hashes):
        return []
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
    # The first sentence of a duplicate, or of what is shared.
    first = int((leaked & np.isin(documents, duplicates) if len(duplicates) else leaked).argmax())
    text = text_at(int(validation.sentence_offsets[int(places[first])]))
    return LEAKED.check(
        value,
        example(f"validation document {documents[first]}", text),
        named=len(duplicates) > 0,
        duplicates=len(duplicates),
        documents=count,
    )


def _hashes(stream: Stream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (numbers, uint64 hashes) of the long sentences, block by block."""
    rng = np.random.default_rng(0)
    # Odd, so that no bit of an id is lost.
    weights = rng.integers(1 << 63, size=_COMPARED, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    column = np.arange(_COMPARED)
    sentences = len(stream.sentence_offsets) - 1
    for start in range(0, sentences, _COMPARED_BLOCK):
        offsets = stream.sentence_offsets[start : start + _COMPARED_BLOCK + 1].astype(np.int64)
        lengths = np.diff(offsets)
        long = np.flatnonzero(lengths >= _LEAST)
        index = offsets[long, None] + column
        within = column < lengths[long, None]
        ids = stream.ids[np.where(within, index, 0)].astype(np.uint64) + np.uint64(1)
        hashes = (np.where(within, ids, 0) * weights).sum(1, dtype=np.uint64)
        yield start + long, hashes + lengths[long].astype(np.uint64) * weights[0]


# --- the pairs that a plan makes ---

# What is planned of a large corpus: a share of 100,000 rows is known to a third of a percent.
_ROWS = 100_000
# The reference's plan gives 0.5 and a little more, for chunks of one long sentence. At 0.75 always
# saying "random" is right three times in four.
RANDOM = Rule(
    "{value} of next sentences are random {where}",
    0.6, 0.75,
    "a chunk of one sentence has no next of its own; always saying `random` is right as often",
    "longer documents, shorter sentences (corpus.layout, corpus.language) or a longer "
    "phases.N.sequence_length",
)  # fmt: skip
# A chunk ends behind the sentence that fills it: half a sentence is cut off as a rule, a tenth of
# the text at 128, a third at 64. With much more, pairs are sentences without beginning and end.
LOST = Rule(
    "{value} of the pieces of pairs are cut off {where}",
    0.4, 0.6,
    "sentences are longer than an example: text is lost, and pairs have no beginning and end",
    "a longer phases.N.sequence_length; are there sentences at all (corpus.layout, "
    "corpus.language)?",
)  # fmt: skip
# Short documents do not fill an example. Beyond half, most of the arithmetic is on padding.
PADDING = Rule(
    "{value} of examples is padding {where}",
    0.3, 0.5,
    "time and memory are spent on positions that hold nothing",
    "a shorter phases.N.sequence_length, or longer documents",
)  # fmt: skip


def _plan(train: Stream, text_at: TextAt, length: int, is_shortest: bool) -> list[Finding]:
    """Looks at pairs planned of all documents, or of a sample of many, at a sequence length."""
    # No short pairs: whether a long document is cut into them is chance, again in each epoch, and
    # would hide what the text is like.
    rows = pairs.sample(train, length, 0.0, draws.key_of("doctor"), _ROWS)
    sample = "" if len(rows) < _ROWS else f" (in a sample of {len(rows):,} rows)"
    where = f"at length {length}{sample}"
    wanted = rows["a_length"].astype(np.int64) + rows["b_length"]
    used = np.minimum(wanted, length - pairs.SPECIAL_TOKENS)
    lost = 1 - float(used.sum() / wanted.sum())
    findings = []
    # Sentences that overflow an example have no next either: named once, by their cause.
    if lost <= LOST.problem_over:
        findings += RANDOM.check(float(rows["is_random_next"].mean()), where=where)
    # The middle one, since the longest is an exception.
    middle = rows[np.argsort(wanted, kind="stable")[len(rows) // 2]]
    pair = f"a pair of {middle['a_length']:,} and {middle['b_length']:,} pieces"
    findings += LOST.check(lost, example(pair, text_at(int(middle["a_offset"]))), where=where)
    padding = 1 - float((used + pairs.SPECIAL_TOKENS).mean() / length)
    # Short examples are needed, long ones may be left out.
    rule = PADDING if is_shortest else dataclasses.replace(PADDING, problem_over=math.inf)
    return findings + rule.check(padding, where=where)
