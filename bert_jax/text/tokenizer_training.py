"""Trains tokenizers on counted words, with one function for each kind.

WordPiece is the reference's. Byte BPE and Unigram give a tokenizer.json, which alone determines the
ids with the usual library (see `text.library`), so it can be exported unchanged. There the special
tokens follow the model's own tokens, so that text never yields them.
"""

import collections
import dataclasses
import io
import re

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.config import Corpus
from bert_jax.errors import InputError
from bert_jax.text import library, merges, vocabulary
from bert_jax.text.tokenizer import SentencePiece, Tokenizer, WordPiece
from bert_jax.text.vocabulary import CLS, MASK, PAD, SEP, SPECIAL_NAMES, UNK, WordCounts

# SentencePiece repeats each word as often as it occurs, and builds a suffix array of this text with
# 20 bytes of memory per byte. So counts are scaled down to this number of bytes.
_UNIGRAM_BYTES = 10_000_000
# Fixed, since the trained model depends on the number of threads.
_SENTENCEPIECE_THREADS = 16


def train(counted: WordCounts, vocab_size: int, corpus: Corpus) -> Tokenizer:
    """Trains a tokenizer of `Corpus.tokenizer_kind` with `vocab_size` ids on counted words.

    For WordPiece the words are those of `basic_tokens`; for the others the text between blanks.
    """
    kind, unused = corpus.tokenizer_kind, corpus.unused_pieces
    if kind == "wordpiece":
        return WordPiece(train_wordpiece(counted, vocab_size, unused), corpus.case)
    if kind == "bpe":
        model = train_sentencepiece(counted, vocab_size, kind, unused)
        return SentencePiece(model, corpus.case)
    trained = {"byte_bpe": _byte_bpe, "unigram": _unigram}[kind](counted, vocab_size, corpus)
    _add_specials(trained, vocab_size)
    return library.LibraryTokenizer(trained.to_str().encode(), SPECIAL_NAMES, library.FILE)


def train_wordpiece(counted: WordCounts, vocab_size: int, unused_pieces: int = 0) -> list[str]:
    """Trains a WordPiece vocabulary; special tokens have the ids 0 to 4.

    The words are those of `basic_tokens`, as when encoding. The last tokens are [unused], at least
    `unused_pieces` of them, and more if the text is too small.
    """
    alphabet, continuing = counted.alphabet()
    vocab = [*vocabulary.SPECIALS, *alphabet, *continuing]
    room = vocab_size - unused_pieces - len(vocab)
    pairs = merges.learn(counted.words, counted.counts, alphabet, continuing, room)
    vocab += dict.fromkeys(left + right.removeprefix("##") for left, right in pairs)
    if len(vocab) > vocab_size - unused_pieces:
        raise InputError(
            f"model.vocab_size={vocab_size}: the characters of this text alone are {len(vocab)} "
            "tokens; set it to more"
        )
    return vocab + vocabulary.unused(vocab_size - len(vocab))


def train_sentencepiece(
    counted: WordCounts,
    vocab_size: int,
    kind: str,
    unused_pieces: int = 0,
    normalization: str = "nmt_nfkc",
) -> bytes:
    """Trains a SentencePiece model (`unigram` or `bpe`) and returns it serialised.

    Special tokens have the ids 0 to 4 as control pieces, which text never yields. [unused] ones
    follow, at least `unused_pieces` of them, and more if the text is too small.
    """
    missing = 0
    while True:
        model, pairs = io.BytesIO(), zip(counted.words, counted.counts, strict=True)
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(f"{word}\t{count}" for word, count in pairs),
                input_format="tsv",
                model_writer=model,
                model_type=kind,
                vocab_size=vocab_size,
                normalization_rule_name=normalization,
                pad_id=0,
                unk_id=1,
                bos_id=-1,
                eos_id=-1,
                pad_piece=PAD,
                unk_piece=UNK,
                control_symbols=[CLS, SEP, MASK, *vocabulary.unused(unused_pieces + missing)],
                num_threads=_SENTENCEPIECE_THREADS,
                minloglevel=2,
            )
            return model.getvalue()
        except RuntimeError as error:
            most = re.search(r"set it to a value <= (\d+)", str(error))
            if missing or most is None or int(most[1]) >= vocab_size:
                reason = str(error).strip().split("] ")[-1]
                raise InputError(
                    f"model.vocab_size={vocab_size}: SentencePiece cannot train on this text: "
                    f"{reason}"
                ) from error
            missing = vocab_size - int(most[1])


def _byte_bpe(counted: WordCounts, vocab_size: int, corpus: Corpus) -> tokenizers.Tokenizer:
    """Trains byte BPE as in ModernBERT (GPT-2's, after NFC), without special tokens.

    Unlike in ModernBERT, a blank is put before a text: sentences are tokenized one by one, and
    their first words should have the same tokens as within a text.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = _normalizer([normalizers.NFC()], corpus)
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trained.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(alphabet) - len(vocabulary.SPECIALS) - corpus.unused_pieces
    if room < 0:
        raise InputError(
            f"model.vocab_size={vocab_size}: bytes, special tokens and corpus.unused_pieces alone "
            f"are {vocab_size - room} tokens; set it to more"
        )
    parts = _pre_tokenize(trained, counted)
    pairs = merges.learn(parts.words, parts.counts, alphabet, (), room)
    tokens = dict.fromkeys([*alphabet, *(left + right for left, right in pairs)])
    trained.model = models.BPE({token: i for i, token in enumerate(tokens)}, pairs)
    return trained


def _unigram(counted: WordCounts, vocab_size: int, corpus: Corpus) -> tokenizers.Tokenizer:
    """Trains Unigram as in XLM-R, with SentencePiece's trainer and no special token but [UNK]."""
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.normalizer = _normalizer([normalizers.Nmt(), normalizers.NFKC()], corpus)
    # SentencePiece's trainer puts its mark before words itself.
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    counted = _scale_counts(_pre_tokenize(trained, counted), _UNIGRAM_BYTES)
    model = train_sentencepiece(counted, vocab_size, "unigram", corpus.unused_pieces, "identity")
    trained.model = models.Unigram([(UNK, 0.0), *_scores(model)], unk_id=0)
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trained.decoder = decoders.Metaspace()
    return trained


def _scores(model: bytes) -> list[tuple[str, float]]:
    """Returns the tokens of a SentencePiece model that text yields, with their scores."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [
        (processor.id_to_piece(i), processor.get_score(i))
        for i in range(processor.get_piece_size())
        if not processor.is_control(i) and not processor.is_unknown(i)
    ]


def _scale_counts(counted: WordCounts, most: int) -> WordCounts:
    """Scales counts down to `most` bytes of text in all; each count is at least 1."""
    sizes = [len(word.encode()) for word in counted.words]
    total = sum(size * count for size, count in zip(sizes, counted.counts, strict=True))
    if total <= most:
        return counted
    counts = [max(1, count * most // total) for count in counted.counts]
    return dataclasses.replace(counted, counts=counts)


def _normalizer(steps: list[normalizers.Normalizer], corpus: Corpus) -> normalizers.Normalizer:
    lower = [normalizers.Lowercase()] if corpus.case == "uncased" else []
    return normalizers.Sequence([*steps, *lower])


def _pre_tokenize(untrained: tokenizers.Tokenizer, counted: WordCounts) -> WordCounts:
    """Splits words by a tokenizer's normalizer and pre-tokenizer."""
    counts: collections.Counter[str] = collections.Counter()
    for word, count in zip(counted.words, counted.counts, strict=True):
        plain = untrained.normalizer.normalize_str(word)
        for part, _ in untrained.pre_tokenizer.pre_tokenize_str(plain):
            counts[part] += count
    pre_tokenized = sorted(counts)
    return WordCounts(pre_tokenized, [counts[word] for word in pre_tokenized])


def _add_specials(trained: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Adds special tokens, [unused] ones up to `vocab_size`, and the template of texts."""
    mask = tokenizers.AddedToken(MASK, lstrip=True, special=True)  # as ModernBERT and RoBERTa
    trained.add_special_tokens([UNK, CLS, SEP, PAD, mask])
    trained.add_special_tokens(vocabulary.unused(vocab_size - trained.get_vocab_size()))
    trained.post_processor = processors.TemplateProcessing(
        single=f"{CLS}:0 $A:0 {SEP}:0",
        pair=f"{CLS}:0 $A:0 {SEP}:0 $B:1 {SEP}:1",
        special_tokens=[(token, trained.token_to_id(token)) for token in (CLS, SEP)],
    )
