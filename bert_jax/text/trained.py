"""Tokenizers trained on the words of a corpus, one function a kind.

WordPiece is the reference's. Of byte BPE and Unigram a tokenizer.json is all that decides the ids,
computed by the library that everybody computes it with (see `text.library`), so that it can leave
as it is. Specials stand behind the pieces there, and are no pieces of the model's own: text never
yields them.
"""

import collections

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.config import Corpus
from bert_jax.errors import InputError
from bert_jax.text import library, merges, vocabulary
from bert_jax.text.tokenizer import SentencePiece, Tokenizer, WordPiece
from bert_jax.text.vocabulary import CLS, MASK, PAD, SEP, UNK, WordCounts

# SentencePiece writes every word as often as it occurs, and sorts what follows each byte of that:
# 20 bytes of memory a byte. So counts are shares of so many bytes.
_UNIGRAM_BYTES = 10_000_000


def train(counted: WordCounts, vocab_size: int, corpus: Corpus) -> Tokenizer:
    """Trains a tokenizer of `Corpus.tokenizer_kind` and of so many ids on counted words.

    The words are as `basic_tokens` gives them for WordPiece; for the others what stands between
    blanks.
    """
    kind, unused = corpus.tokenizer_kind, corpus.unused_pieces
    if kind == "wordpiece":
        return WordPiece(vocabulary.train_wordpiece(counted, vocab_size, unused), corpus.case)
    if kind == "bpe":
        model = vocabulary.train_sentencepiece(counted, vocab_size, kind, unused)
        return SentencePiece(model, corpus.case)
    trained = {"byte_bpe": _byte_bpe, "unigram": _unigram}[kind](counted, vocab_size, corpus)
    _add_specials(trained, vocab_size)
    return library.Library(trained.to_str().encode(), vocabulary.NAMED, library.FILE)


def _byte_bpe(counted: WordCounts, vocab_size: int, corpus: Corpus) -> tokenizers.Tokenizer:
    """Trains byte BPE as ModernBERT has it (GPT-2's, behind NFC), without specials.

    A blank is put before a text, other than there: text is cut sentence by sentence, and the first
    word of one is the same piece as within a text.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = _normalizer([normalizers.NFC()], corpus)
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trained.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(alphabet) - len(vocabulary.SPECIALS) - corpus.unused_pieces
    if room < 0:
        raise InputError(
            f"model.vocab_size={vocab_size}: bytes, specials and corpus.unused_pieces alone are "
            f"{vocab_size - room} pieces; set it to more"
        )
    cut = _pre_tokenize(trained, counted)
    made = merges.learn(cut.words, cut.counts, alphabet, (), room)
    pieces = dict.fromkeys([*alphabet, *(left + right for left, right in made)])
    trained.model = models.BPE({piece: i for i, piece in enumerate(pieces)}, made)
    return trained


def _unigram(counted: WordCounts, vocab_size: int, corpus: Corpus) -> tokenizers.Tokenizer:
    """Trains Unigram as XLM-R has it, by SentencePiece's trainer, without specials but [UNK]."""
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.normalizer = _normalizer([normalizers.Nmt(), normalizers.NFKC()], corpus)
    # SentencePiece puts its own mark before words.
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    counted = _scale_counts(_pre_tokenize(trained, counted), _UNIGRAM_BYTES)
    model = vocabulary.train_sentencepiece(
        counted, vocab_size, "unigram", corpus.unused_pieces, "identity"
    )
    trained.model = models.Unigram([(UNK, 0.0), *vocabulary.scores(model)], unk_id=0)
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trained.decoder = decoders.Metaspace()
    return trained


def _scale_counts(counted: WordCounts, most: int) -> WordCounts:
    """Returns words with counts in the same proportions, and at least 1, that are as many bytes."""
    sizes = [len(word.encode()) for word in counted.words]
    whole = sum(size * count for size, count in zip(sizes, counted.counts, strict=True))
    if whole <= most:
        return counted
    shares = (max(1, count * most // whole) for count in counted.counts)
    return WordCounts.of(dict(zip(counted.words, shares, strict=True)))


def _normalizer(steps: list[normalizers.Normalizer], corpus: Corpus) -> normalizers.Normalizer:
    lower = [normalizers.Lowercase()] if corpus.case == "uncased" else []
    return normalizers.Sequence([*steps, *lower])


def _pre_tokenize(untrained: tokenizers.Tokenizer, counted: WordCounts) -> WordCounts:
    """Returns words as a tokenizer's normalizer and pre-tokenizer cut them."""
    counts: collections.Counter[str] = collections.Counter()
    for word, count in zip(counted.words, counted.counts, strict=True):
        plain = untrained.normalizer.normalize_str(word)
        for part, _ in untrained.pre_tokenizer.pre_tokenize_str(plain):
            counts[part] += count
    return WordCounts.of(counts)


def _add_specials(trained: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Adds the specials, [unused] pieces up to `vocab_size`, and [CLS] A [SEP] B [SEP]."""
    mask = tokenizers.AddedToken(MASK, lstrip=True, special=True)  # as ModernBERT and RoBERTa
    trained.add_special_tokens([UNK, CLS, SEP, PAD, mask])
    lacking = vocab_size - trained.get_vocab_size()
    trained.add_special_tokens(vocabulary.unused(lacking))
    trained.post_processor = processors.TemplateProcessing(
        single=f"{CLS}:0 $A:0 {SEP}:0",
        pair=f"{CLS}:0 $A:0 {SEP}:0 $B:1 {SEP}:1",
        special_tokens=[(piece, trained.token_to_id(piece)) for piece in (CLS, SEP)],
    )
