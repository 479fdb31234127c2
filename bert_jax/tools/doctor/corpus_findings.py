"""Examines a prepared corpus: its vocabulary, documents, splits and pairs.

Memory stays bounded: ids are read in blocks, and of a large corpus only a sample of pairs is made.
"""

from collections.abc import Callable, Iterator

import numpy as np
from etils import epath

from bert_jax.data import corpus as corpus_lib
from bert_jax.data import draws, pairs
from bert_jax.data.stream import Stream
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tools.doctor import finding
from bert_jax.tools.doctor.finding import Finding, FindingRule, example, format_share

TextAt = Callable[[int], str]  # decodes the text from a position of the stream

# Sentences of a block.
_BLOCK = 1 << 20
# Tokens decoded for an example.
_SHOWN = 30


def examine(folder: epath.Path, lengths: tuple[int, ...] = (128, 512)) -> list[Finding]:
    """Examines the corpus in a folder.

    `lengths` are the sequence lengths of pairs, by default the paper's; () if training has none.
    """
    folder = corpus_lib.ensure_local(folder)
    manifest = corpus_lib.open_manifest(folder)
    tokenizer = corpus_lib.open_tokenizer(folder, manifest)
    train = corpus_lib.open_stream(folder, "train")
    validation = corpus_lib.open_stream(folder, "validation")
    corpus_lib.verify(folder)

    def text_of(stream: Stream) -> TextAt:
        return lambda start: tokenizer.decode(stream.ids[start : start + _SHOWN].tolist())

    text_at = text_of(train)
    sentence_findings = _one_sentence(train, text_at) if lengths else []
    sentence_findings += _long_sentences(train, text_at)
    findings = sentence_findings + _dominant_document(train, validation, text_of)
    if manifest["settings"]["repeated_documents"] == "keep":
        count = sum(split["documents"] for split in manifest["splits"].values())
        repeated = manifest["documents_repeated"]
        findings += finding.check_documents(finding.REPEATED, repeated, count, example="")
    # Words that the text itself marks as unknown are no fault of the vocabulary.
    marks_unknown = manifest["settings"].get("unknown_word")
    vocabulary_findings = [] if marks_unknown else _check_vocabulary(train, tokenizer)
    findings += vocabulary_findings
    # Sentences of [UNK] look the same without being duplicates.
    if all(f.severity == "note" for f in vocabulary_findings):
        findings += find_leaked_sentences(train, validation, text_of(validation))
    # A fault of the sentences also shows in the pairs; only the cause is reported.
    if all(f.severity == "note" for f in sentence_findings):
        for length in lengths:
            findings += _check_pairs(train, text_at, length)
    return findings


# --- sentences and documents ---

# Tokens of the longest row; a longer text is no sentence.
_LONG = 512


def _one_sentence(train: Stream, text_at: TextAt) -> list[Finding]:
    single = np.flatnonzero(np.diff(train.document_offsets) == 1)
    if not len(single):
        return []
    start = int(train.sentence_offsets[train.document_offsets[single[0]]])
    total = len(train.document_offsets) - 1
    first = example(f"train document {single[0]}", text_at(start))
    return finding.check_documents(finding.ONE_SENTENCE, len(single), total, first)


def _dominant_document(
    train: Stream, validation: Stream, text_of: Callable[[Stream], TextAt]
) -> list[Finding]:
    largest, largest_example, total = 0, "", 0
    for name, stream in (("train", train), ("validation", validation)):
        sizes = np.diff(stream.document_offsets)
        total += int(sizes.sum())
        if sizes.max() > largest:
            document, largest = int(sizes.argmax()), int(sizes.max())
            start = int(stream.sentence_offsets[stream.document_offsets[document]])
            largest_example = example(f"{name} document {document}", text_of(stream)(start))
    return finding.check_dominance(largest, total, largest_example)


def _long_sentences(train: Stream, text_at: TextAt) -> list[Finding]:
    sizes: list[int] = []
    longest_start = 0
    for start in range(0, len(train.sentence_offsets) - 1, _BLOCK):
        offsets = train.sentence_offsets[start : start + _BLOCK + 1]
        lengths = np.diff(offsets)
        if lengths.max() > max(sizes, default=_LONG):
            longest_start = int(offsets[lengths.argmax()])
        sizes += lengths[lengths > _LONG].tolist()
    longest = example("the longest", text_at(longest_start))
    return finding.check_lengths(sizes, len(train.ids), f"{_LONG} tokens", longest)


# --- whether the vocabulary fits the text ---

# BERT's own vocabulary leaves one token in thousands unknown on English. At one in a hundred,
# every row of 128 tokens has one.
UNKNOWN = FindingRule(
    "{value} of tokens are unknown",
    0.001, 0.01,
    "all unknown words become the same token, which the model learns to predict",
    "a vocabulary made for this text, except for a run from a base: --set corpus.tokenizer=train; "
    "for a script of thousands of characters, such as Chinese, --set corpus.tokenizer_kind=unigram",
)  # fmt: skip
# Share of tokens with capitals: a quarter of a cased vocabulary, none of an uncased one (except
# special tokens).
_CAPITALS_NONE, _CAPITALS_MANY = 0.005, 0.05
CASE = FindingRule(
    "text is read as {case}, but the vocabulary is {other} ({capitals} of its tokens have a "
    "capital)",
    0, 0,
    "words with a capital are unknown or split into letters, or tokens with a capital never occur",
    "--set corpus.case={other}",
)  # fmt: skip


def _check_vocabulary(train: Stream, tokenizer: Tokenizer) -> list[Finding]:
    """Checks that the vocabulary fits the case of the text, and that few words are unknown."""
    counts = train.unigrams
    tokens = [tokenizer.token(i) for i in range(tokenizer.size)]
    words = [token.removeprefix("##").removeprefix("\u2581") for token in tokens]
    with_case = [word for word in words if word.isalpha() and word.lower() != word.upper()]
    capitals = sum(word != word.lower() for word in with_case) / max(len(with_case), 1)
    unknown = float(counts[tokenizer.unk_id] / counts.sum())
    # A vocabulary without capitals is right for a text without them: then no word is unknown.
    # A tokenizer.json ("library") counts as cased, but may lower text by itself.
    if tokenizer.case == "cased":
        is_low = capitals < _CAPITALS_NONE and unknown > UNKNOWN.note_over
        differs = is_low and tokenizer.kind != "library"
    else:
        differs = capitals > _CAPITALS_MANY
    if differs:
        other = "uncased" if tokenizer.case == "cased" else "cased"
        return CASE.check(1.0, case=tokenizer.case, other=other, capitals=format_share(capitals))
    first = _first_unknown(train, tokenizer) if unknown > UNKNOWN.note_over else ""
    return UNKNOWN.check(unknown, first)


def _first_unknown(train: Stream, tokenizer: Tokenizer) -> str:
    """Returns an example: the text around the first unknown word."""
    block = 1 << 24
    for start in range(0, len(train.ids), block):
        hits = np.flatnonzero(train.ids[start : start + block] == tokenizer.unk_id)
        if len(hits):
            position = start + int(hits[0])
            ids = train.ids[max(position - 8, 0) : position + 8].tolist()
            return example(f"train, token {position:,}", tokenizer.decode(ids))
    return ""


# --- text that is both trained on and held out ---

# Shorter sentences repeat by nature ("There is more."); longer ones are compared by their start.
_MIN_TOKENS, _PREFIX_TOKENS = 12, 32
# Sentences of a block.
_COMPARED_BLOCK = 1 << 16
# Documents of any collection share set phrases. The model recites held-out text that it was trained
# on: if this is a tenth of that text, the score shifts by more than with any change of recipe.
LEAKED = FindingRule(
    "{value} of held-out sentences of 12 tokens or more are trained on too",
    0.02, 0.1,
    "the held-out score is too good: the model has seen the answers",
    "remove near duplicates of documents; equal documents are always in the same split",
)  # fmt: skip


def find_leaked_sentences(train: Stream, validation: Stream, text_at: TextAt) -> list[Finding]:
    """Finds held-out sentences that are also in the training split.

    `text_at` decodes the text from a position of the validation split.
    """
    numbers, hashes = (np.concatenate(a) for a in zip(*_hashes(validation), strict=True))
    if not len(hashes):
        return []
    known, inverse = np.unique(hashes, return_inverse=True)
    seen = np.zeros(len(known), bool)
    for _, train_hashes in _hashes(train):
        index = np.minimum(np.searchsorted(known, train_hashes), len(known) - 1)
        seen[index[known[index] == train_hashes]] = True
    leaked = seen[inverse]
    if not leaked.any():
        return []
    number = numbers[leaked.argmax()]
    document = np.searchsorted(validation.document_offsets, number, "right") - 1
    text = text_at(int(validation.sentence_offsets[number]))
    return LEAKED.check(float(leaked.mean()), example(f"validation document {document}", text))


def _hashes(stream: Stream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (numbers, uint64 hashes) of the sentences of `_MIN_TOKENS` or more, block by block."""
    rng = np.random.default_rng(0)
    column = np.arange(_PREFIX_TOKENS)
    # Odd weights keep all bits of an id.
    weights = rng.integers(1 << 63, size=len(column), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    sentences = len(stream.sentence_offsets) - 1
    for start in range(0, sentences, _COMPARED_BLOCK):
        offsets = stream.sentence_offsets[start : start + _COMPARED_BLOCK + 1].astype(np.int64)
        lengths = np.diff(offsets)
        long = np.flatnonzero(lengths >= _MIN_TOKENS)
        index = offsets[long, None] + column
        within = column < lengths[long, None]
        ids = stream.ids[np.where(within, index, 0)].astype(np.uint64) + np.uint64(1)
        hashes = (np.where(within, ids, 0) * weights).sum(1, dtype=np.uint64)
        yield start + long, hashes + lengths[long].astype(np.uint64) * weights[0]


# --- pairs ---

# Pairs made of a large corpus; their shares are exact to a third of a percent.
_ROWS = 100_000
# The reference's code gives slightly more than 0.5, because of chunks of one long sentence. At
# 0.75, always answering "random" is right three times in four.
RANDOM = FindingRule(
    "{value} of next sentences are random {where}",
    0.6, 0.75,
    "a chunk of one sentence has no next sentence; always answering `random` is right as often",
    "longer documents, shorter sentences (corpus.layout, corpus.language) or a longer "
    "phases.N.sequence_length",
)  # fmt: skip
# A chunk ends after the sentence that fills it, so half a sentence is usually cut off: a tenth of
# the text at length 128, a third at 64. If far more is, pairs are parts of sentences.
TRUNCATED_PAIRS = FindingRule(
    "{value} of the tokens of pairs are cut off {where}",
    0.4, 0.6,
    "sentences are longer than a row: text is lost, and pairs have no beginning and end",
    "a longer phases.N.sequence_length; are there sentences at all (corpus.layout, "
    "corpus.language)?",
)  # fmt: skip


def _check_pairs(train: Stream, text_at: TextAt, length: int) -> list[Finding]:
    """Checks the pairs of a sequence length, at most a sample of `_ROWS`."""
    # No short pairs (0.0): they are drawn again in each epoch, and would hide faults of the text.
    rows = pairs.sample(train, length, 0.0, draws.key_of("doctor"), _ROWS)
    sample = "" if len(rows) < _ROWS else f" (in a sample of {len(rows):,} rows)"
    where = f"at length {length}{sample}"
    lengths = rows["a_length"].astype(np.int64) + rows["b_length"]
    lost = 1 - float(np.minimum(lengths, length - pairs.NUM_SPECIALS).sum() / lengths.sum())
    # The example is the median pair, since the longest is an exception.
    median = rows[np.argsort(lengths, kind="stable")[len(rows) // 2]]
    pair = f"a pair of {median['a_length']:,} and {median['b_length']:,} tokens"
    findings = TRUNCATED_PAIRS.check(
        lost, example(pair, text_at(int(median["a_offset"]))), where=where
    )
    # Sentences longer than a row have no next sentence either; only the cause is reported.
    if lost <= TRUNCATED_PAIRS.problem_over:
        findings += RANDOM.check(float(rows["is_random_next"].mean()), where=where)
    return findings
