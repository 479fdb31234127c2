"""Tokenizers trained here whose truth is a tokenizer.json: byte BPE and Unigram."""

import collections
import dataclasses

import pytest
import samples
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from bert_jax.config import Corpus
from bert_jax.errors import InputError
from bert_jax.text import tokenizer, tokenizer_training
from bert_jax.text.vocabulary import SPECIALS

TEXT = (
    "We the people of the United States don't know every caf\u00e9, and Na\u00efve readers' words "
    "\u2014 3,000 of them (they're many) \u2014 stand in an Ordinary text. "
) * 3 + "\u6f22\u5b57 \u0395\u03bb\u03bb\u03ac\u03c2 \U0001f600 so-called states, others' others "
COUNTED = samples.word_counts(collections.Counter(TEXT.split()))
SIZES = {"byte_bpe": 330, "unigram": 90}


def made(kind, **changes):
    settings = {"sources": ("text:x",), "tokenizer_kind": kind, "case": "cased"}
    settings |= {"unused_pieces": 7}
    return tokenizer_training.train(COUNTED, SIZES[kind], Corpus(**settings | changes))


@pytest.fixture(scope="module", params=SIZES)
def ours(request):
    return made(request.param)


def test_merges_are_those_of_the_library_s_own_trainer():
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330 - 12, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    theirs.train_from_iterator(TEXT.split(), trainer)
    by_id = sorted(theirs.get_vocab().items(), key=lambda item: item[1])
    ours = made("byte_bpe")
    assert [piece for piece, _ in by_id] == [ours.token(i) for i in range(330 - 12)]
    assert theirs.encode(TEXT).ids == ours.encode(TEXT)


def test_unigram_is_trained_on_so_many_bytes_of_any_text(monkeypatch):
    """Its trainer takes memory by the byte, each word as often as it occurs."""
    given = []

    def train(counted, *others):
        given.append(dict(zip(counted.words, counted.counts, strict=True)))
        return real(counted, *others)

    real = tokenizer_training.train_sentencepiece
    monkeypatch.setattr(tokenizer_training, "train_sentencepiece", train)
    made("unigram")
    counts = dict(zip(COUNTED.words, COUNTED.counts, strict=True))
    assert given[0] == counts
    size = sum(len(word.encode()) * count for word, count in counts.items())
    monkeypatch.setattr(tokenizer_training, "_UNIGRAM_BYTES", size)
    often = {word: 1_000_000 * count for word, count in counts.items()} | {"seldom": 1}
    monkeypatch.setitem(globals(), "COUNTED", samples.word_counts(often))
    made("unigram")
    assert given[1].pop("seldom") == 1
    for word, count in counts.items():
        assert max(1, count - 1) <= given[1][word] <= count


def test_text_comes_back_and_the_first_word_of_a_sentence_is_that_of_any_place(ours):
    assert ours.decode(ours.encode(TEXT)).strip() == TEXT.strip()
    assert ours.encode("people of") == ours.encode_after_space("people") + ours.encode_after_space(
        "of"
    )
    assert not ours.continues[ours.encode("readers'")[0]]


def test_specials_and_unused_pieces_stand_last_and_text_gives_none(ours):
    assert ours.size in SIZES.values()
    last = [ours.token(i) for i in range(ours.size - 7, ours.size)]
    assert [piece.rstrip("0123456789]") for piece in last] == ["[unused"] * 7
    assert last[-1] == f"[unused{unused(ours) - 1}]" and unused(ours) >= 7
    ids = [ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id]
    assert [ours.token(i) for i in ids] == list(SPECIALS)
    found = ours.encode(" ".join([*SPECIALS, *last, "[CLS][SEP]"]))
    named = {i for i in range(ours.size) if ours.token(i) in (*SPECIALS, *last)}
    assert not named - {ours.unk_id} & set(found)


def unused(ours):
    return sum(ours.token(i).startswith("[unused") for i in range(ours.size))


def test_a_pair_is_joined_as_bert_s(ours):
    a, b = ours.encode("people"), ours.encode("states")
    ids, before = tokenizer.add_special_tokens(ours, a, b)
    assert ids.tolist() == [ours.cls_id, *a, ours.sep_id, *b, ours.sep_id]
    assert tokenizer.first_segment_length(ours, ids, before) == len(a) + 2


@pytest.mark.parametrize("kind", SIZES)
def test_uncased_text_is_lower_cased(kind):
    lower = made(kind, case="uncased")
    assert lower.encode("We The PEOPLE") == lower.encode("we the people")
    assert lower.decode(lower.encode("We The PEOPLE")).strip() == "we the people"


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "byte_bpe"])
def test_a_text_too_small_leaves_more_pieces_unused(kind):
    settings = Corpus(sources=("text:x",), tokenizer_kind=kind, unused_pieces=7)
    exact = 90 if kind != "byte_bpe" else 330
    for size in (exact, 2_000):
        one = tokenizer_training.train(COUNTED, size, settings)
        assert one.size == size and (unused(one) == 7 if size == exact else unused(one) > 7)


def test_a_vocabulary_smaller_than_the_bytes_is_refused_by_name():
    settings = Corpus(sources=("text:x",), tokenizer_kind="byte_bpe")
    with pytest.raises(InputError, match=r"model\.vocab_size=260: .* 261 tokens"):
        tokenizer_training.train(COUNTED, 260, settings)
    settings = dataclasses.replace(settings, unused_pieces=100)
    with pytest.raises(InputError, match=r"corpus\.unused_pieces"):
        tokenizer_training.train(COUNTED, 330, settings)
