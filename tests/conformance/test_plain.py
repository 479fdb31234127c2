"""The plain data path that instances are compared with is the reference's."""

import random

import plain
import pytest

from bert_jax.conformance import golden


@pytest.fixture(scope="module")
def vocab():
    return {piece: i for i, piece in enumerate(golden.vocabulary())}


def test_its_tokens_equal_the_references(vocab):
    rows = golden.tokens()
    for case, name in (("uncased", "lower_tokens"), ("cased", "cased_tokens")):
        differing = [r["text"] for r in rows if plain.tokenize(r["text"], vocab, case) != r[name]]
        assert rows and not differing, case


@pytest.mark.parametrize("name", golden.INSTANCES)
def test_its_instances_equal_the_references(vocab, name):
    settings, theirs = golden.instances(name)
    documents = [[]]
    for line in (golden.FOLDER / "sample_text.txt").read_text("utf-8").split("\n"):
        if line.strip():
            documents[-1].append(plain.tokenize(line, vocab))
        else:
            documents.append([])
    documents = [[pieces for pieces in document if pieces] for document in documents]
    fields = plain.Settings.__dataclass_fields__
    made_with = plain.Settings(**{k: v for k, v in settings.items() if k in fields})
    rng = random.Random(settings["random_seed"])
    found = plain.instances([d for d in documents if d], vocab, made_with, rng)
    assert len(found) == len(theirs) == settings["instances"]
    for instance, wanted in zip(found, theirs, strict=True):
        assert [vocab[piece] for piece in instance.pieces] == wanted["input_ids"]
        assert instance.segment_ids == wanted["segment_ids"]
        assert instance.positions == wanted["masked_lm_positions"]
        assert [vocab[piece] for piece in instance.labels] == wanted["masked_lm_ids"]
        assert instance.is_random_next == bool(wanted["next_sentence_label"])
