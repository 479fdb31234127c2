"""A prepared corpus: its vocabulary, its documents, its splits, and the pairs planned of them.

Memory stays bounded: ids are read in blocks, and of many documents or rows a sample is planned.
"""

from collections.abc import Callable, Iterator

import numpy as np
from etils import epath

from bert_jax.data import corpus as corpus_lib
from bert_jax.data import draws, pairs
from bert_jax.data.stream import Stream
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tools.doctor import finding
from bert_jax.tools.doctor.finding import Finding, FindingRule, example, share

TextAt = Callable[[int], str]  # the text from a piece of the stream on

# Sentences looked at at once.
_BLOCK = 1 << 20
# Pieces decoded for an example.
_SHOWN = 30


def examine(folder: epath.Path, lengths: tuple[int, ...] = (128, 512)) -> list[Finding]:
    """Examines a prepared corpus.

    Args:
      folder: the corpus folder.
      lengths: sequence lengths to plan pairs for, the paper's by default; of none, no pairs are
        learned.
    """
    folder = corpus_lib.local_corpus(folder)
    manifest = corpus_lib.open_manifest(folder)
    tokenizer = corpus_lib.open_tokenizer(folder, manifest)
    train = corpus_lib.open_stream(folder, "train")
    validation = corpus_lib.open_stream(folder, "validation")
    corpus_lib.verify(folder)

    def text_of(stream: Stream) -> TextAt:
        return lambda start: tokenizer.decode(stream.ids[start : start + _SHOWN].tolist())

    text_at = text_of(train)
    causes = _one_sentence(train, text_at) if lengths else []
    causes += _long_sentences(train, text_at)
    findings = causes + _dominant_document(train, validation, text_of)
    if manifest["settings"]["repeated_documents"] == "keep":
        count = sum(split["documents"] for split in manifest["splits"].values())
        number = manifest["documents_repeated"], count, ""
        findings += finding.check_documents(finding.REPEATED, *number)
    # What the text itself calls unknown is no fault of the vocabulary.
    is_named = manifest["settings"].get("unknown_word")
    words = [] if is_named else _vocabulary(train, tokenizer)
    findings += words
    # Sentences of [UNK] are alike, and no duplicates.
    if all(one.severity == "note" for one in words):
        findings += near_duplicates(train, validation, text_of(validation))
    # What a plan looks like follows from its sentences; named once, by its cause.
    if all(one.severity == "note" for one in causes):
        for length in lengths:
            findings += _plan(train, text_at, length)
    return findings


# --- sentences and documents ---

# A sentence longer than the longest example is none.
_LONG = 512


def _one_sentence(train: Stream, text_at: TextAt) -> list[Finding]:
    single = np.flatnonzero(np.diff(train.document_offsets) == 1)
    if not len(single):
        return []
    at = int(train.sentence_offsets[train.document_offsets[single[0]]])
    number = len(single), len(train.document_offsets) - 1
    where = example(f"train document {single[0]}", text_at(at))
    return finding.check_documents(finding.ONE_SENTENCE, *number, where)


def _dominant_document(
    train: Stream, validation: Stream, text_of: Callable[[Stream], TextAt]
) -> list[Finding]:
    largest, where, total = 0, "", 0
    for name, stream in (("train", train), ("validation", validation)):
        sizes = np.diff(stream.document_offsets)
        total += int(sizes.sum())
        if sizes.max() > largest:
            document, largest = int(sizes.argmax()), int(sizes.max())
            at = int(stream.sentence_offsets[stream.document_offsets[document]])
            where = example(f"{name} document {document}", text_of(stream)(at))
    return finding.dominant_document(largest, total, where)


def _long_sentences(train: Stream, text_at: TextAt) -> list[Finding]:
    sizes: list[int] = []
    at = 0
    for start in range(0, len(train.sentence_offsets) - 1, _BLOCK):
        offsets = train.sentence_offsets[start : start + _BLOCK + 1]
        lengths = np.diff(offsets)
        if lengths.max() > max(sizes, default=_LONG):
            at = int(offsets[lengths.argmax()])
        sizes += lengths[lengths > _LONG].tolist()
    where = example("the longest", text_at(at))
    return finding.long_sentences(sizes, len(train.ids), f"{_LONG} pieces", where)


# --- whether the vocabulary fits the text ---

# BERT's own vocabulary leaves one piece in thousands unknown on English. At one in a hundred,
# every example of 128 holds one.
UNKNOWN = FindingRule(
    "{value} of pieces are unknown",
    0.001, 0.01,
    "whatever stood there is one and the same piece, which the model learns to predict",
    "a vocabulary made for this text: --set corpus.tokenizer=train; for thousands of characters "
    "--set corpus.tokenizer_kind=unigram",
)  # fmt: skip
# Pieces with capitals: a cased vocabulary has a quarter, an uncased one none (except specials).
_CAPITALS_NONE, _CAPITALS_MANY = 0.005, 0.05
CASE = FindingRule(
    "text is read as {case}, and the vocabulary is {other} ({capitals} of its pieces hold a "
    "capital)",
    0, 0,
    "words with a capital are unknown or fall into letters, or pieces with one never occur",
    "--set corpus.case={other}",
)  # fmt: skip


def _vocabulary(train: Stream, tokenizer: Tokenizer) -> list[Finding]:
    """Looks at upper against lower case, and at unknown words."""
    counts = train.unigrams
    pieces = [tokenizer.piece(i) for i in range(tokenizer.size)]
    words = [piece.removeprefix("##").removeprefix("\u2581") for piece in pieces]
    with_case = [word for word in words if word.isalpha() and word.lower() != word.upper()]
    capitals = sum(word != word.lower() for word in with_case) / max(len(with_case), 1)
    unknown = float(counts[tokenizer.unk_id] / counts.sum())
    # Text without capitals gives a vocabulary without, and nothing unknown; a tokenizer.json, which
    # counts as cased, may lower text by itself.
    is_low = capitals < _CAPITALS_NONE and unknown > UNKNOWN.note_over
    is_low &= tokenizer.kind != "library"
    if is_low if tokenizer.case == "cased" else capitals > _CAPITALS_MANY:
        other = "uncased" if is_low else "cased"
        return CASE.check(1.0, case=tokenizer.case, other=other, capitals=share(capitals))
    where = _around(train, tokenizer) if unknown > UNKNOWN.note_over else ""
    return UNKNOWN.check(unknown, where)


def _around(train: Stream, tokenizer: Tokenizer) -> str:
    """Returns an example of unknown words: where the first stands."""
    step = 1 << 24
    for start in range(0, len(train.ids), step):
        hits = np.flatnonzero(train.ids[start : start + step] == tokenizer.unk_id)
        if len(hits):
            at = start + int(hits[0])
            ids = train.ids[max(at - 8, 0) : at + 8].tolist()
            return example(f"train, piece {at:,}", tokenizer.decode(ids))
    return ""


# --- text that is both trained on and held out ---

# Shorter sentences repeat by nature ("There is more."); of longer ones the first pieces tell.
_LEAST, _COMPARED = 12, 32
# Sentences compared at once.
_COMPARED_BLOCK = 1 << 16
# Formulas and boilerplate are shared by every collection. Held-out text that was trained on is
# recited: a tenth of it shifts the score by more than any change of recipe.
LEAKED = FindingRule(
    "{value} of held-out sentences of 12 pieces or more are trained on too",
    0.02, 0.1,
    "the held-out score flatters the model: it has seen the answers",
    "take out near duplicates of documents; equal ones are kept on one side already",
)  # fmt: skip


def near_duplicates(train: Stream, validation: Stream, text_at: TextAt) -> list[Finding]:
    """Finds held-out sentences that stand in the training split too.

    `text_at` gives the text from a piece of the validation split on.
    """
    places, hashes = (np.concatenate(a) for a in zip(*_hashes(validation), strict=True))
    if not len(hashes):
        return []
    known, which = np.unique(hashes, return_inverse=True)
    seen = np.zeros(len(known), bool)
    for _, others in _hashes(train):
        at = np.minimum(np.searchsorted(known, others), len(known) - 1)
        seen[at[known[at] == others]] = True
    leaked = seen[which]
    if not leaked.any():
        return []
    at = places[leaked.argmax()]
    document = np.searchsorted(validation.document_offsets, at, "right") - 1
    text = text_at(int(validation.sentence_offsets[at]))
    return LEAKED.check(float(leaked.mean()), example(f"validation document {document}", text))


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
RANDOM = FindingRule(
    "{value} of next sentences are random {where}",
    0.6, 0.75,
    "a chunk of one sentence has no next of its own; always saying `random` is right as often",
    "longer documents, shorter sentences (corpus.layout, corpus.language) or a longer "
    "phases.N.sequence_length",
)  # fmt: skip
# A chunk ends behind the sentence that fills it: half a sentence is cut off as a rule, a tenth of
# the text at 128, a third at 64. With much more, pairs are sentences without beginning and end.
LOST = FindingRule(
    "{value} of the pieces of pairs are cut off {where}",
    0.4, 0.6,
    "sentences are longer than an example: text is lost, and pairs have no beginning and end",
    "a longer phases.N.sequence_length; are there sentences at all (corpus.layout, "
    "corpus.language)?",
)  # fmt: skip


def _plan(train: Stream, text_at: TextAt, length: int) -> list[Finding]:
    """Looks at pairs planned of all documents, or of a sample of many, at a sequence length."""
    # No short pairs: whether a long document is cut into them is chance, again in each epoch, and
    # would hide what the text is like.
    rows = pairs.sample(train, length, 0.0, draws.key_of("doctor"), _ROWS)
    sample = "" if len(rows) < _ROWS else f" (in a sample of {len(rows):,} rows)"
    where = f"at length {length}{sample}"
    wanted = rows["a_length"].astype(np.int64) + rows["b_length"]
    lost = 1 - float(np.minimum(wanted, length - pairs.SPECIAL_TOKENS).sum() / wanted.sum())
    # The middle one, since the longest is an exception.
    middle = rows[np.argsort(wanted, kind="stable")[len(rows) // 2]]
    pair = f"a pair of {middle['a_length']:,} and {middle['b_length']:,} pieces"
    findings = LOST.check(lost, example(pair, text_at(int(middle["a_offset"]))), where=where)
    # Sentences that overflow an example have no next either: named once, by their cause.
    if lost <= LOST.problem_over:
        findings += RANDOM.check(float(rows["is_random_next"].mean()), where=where)
    return findings
