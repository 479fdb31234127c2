"""The reference's rules hold; one that is broken is noticed; deviations are told."""

import dataclasses
import hashlib
import pathlib

import jax
import numpy as np
import optax
import pytest

from bert_jax import cli, config
from bert_jax.conformance import (
    checks,
    data_rules,
    deviations,
    golden,
    loss_rules,
    model_rules,
    optimizer_rules,
    pytorch,
    tokenizer_rules,
)
from bert_jax.conformance.rule import Rule
from bert_jax.data import draws, masking, pairs
from bert_jax.model import attention, encoder, heads, layers, losses
from bert_jax.text import tokenizer
from bert_jax.training import optimizer, step

ROOT = pathlib.Path(__file__).parents[2]
BASE = str(ROOT / "experiments" / "bert_base.py")


def test_the_certified_recipe_is_as_reviewed(capsys):
    """Every rule holds, and every deviation is explained; read the diff after a change."""
    assert cli.main(["conformance", BASE]) == 0
    expected = (ROOT / "tests" / "golden" / "conformance_bert_base.txt").read_text()
    assert capsys.readouterr().out == expected


def test_the_vocabulary_is_the_released_one():
    text = "".join(f"{piece}\n" for piece in golden.vocabulary())
    assert hashlib.md5(text.encode()).hexdigest() == "64800d5d8528ce344256daf115d4965e"


def test_the_files_of_the_package_are_all_used_and_small():
    files = {path for path in golden.FOLDER.rglob("*") if path.is_file()}
    assert {path.name for path in files} == {
        *golden.INSTANCES,
        "sample_text.txt",
        "bert_base_uncased_vocab.txt.gz",
        "tokenization_uncased_vocab.json",
        "paper_adam_trajectory.npz",
        *("config.json", "model.safetensors", "batch.npz", "outputs.npz", "grads.npz"),
    }
    assert sum(path.stat().st_size for path in files) < 3e6
    assert golden.config()["hidden_size"] == pytorch.CONFIG.hidden_size == 64


# --- A broken rule is noticed -------------------------------------------------------------------


def no_put_back(whole):
    """Plans without the rows that put-back sentences would give."""

    def plan(*arguments):
        end = -1
        for row in whole(*arguments):
            if row["is_random_next"][0] and row["a_offset"][0] == end:
                continue
            yield row
            end = row["a_offset"][0] + row["a_length"][0]

    return plan


def first_words_of_all(self, counts, vocab_size):
    kinds, ids = draws.Counter._replacements(self, counts, vocab_size - 5)
    return kinds, ids + 5


def without_word_groups(*arguments, **named):
    return MASK(*arguments, **{**named, "continues": None})


def cut_at_the_back(self, victims):
    for _ in range(int(victims.lead[0] + victims.rest[0])):
        self._rng.random()
    return np.array([0]), np.array([0])


def every_sentence_short(self, most, share):
    return np.array([self._rng.randint(2, most)])


def mostly_next(self, asked):
    return np.array([bool(asked[0]) and self._rng.random() < 0.4])


def never_random(self, asked):
    return np.array([False])


def this_document(self, documents, this, asked):
    return this


def label_0_is_none(logits, labels, weights):
    return CLASSIFICATION(logits, labels, weights * (labels > 0))


def as_it_is(char):
    return char


def normal(cfg):
    return jax.nn.initializers.normal(cfg.initializer_range)


def linear_decay(cfg, total, step):
    return SCHEDULE(dataclasses.replace(cfg, schedule="linear"), total, step)


def late_start(cfg, total, step):
    return SCHEDULE(cfg, total, step + 1)


MASK, CLASSIFICATION, SCHEDULE = masking.mask, losses.classification, optimizer.schedule
draws.Counter._replacements = draws.Counter.replacements

# What is broken, and which rule says so.
BROKEN = [
    (data_rules, draws.Sequential, "is_random", mostly_next, "B is random"),
    (data_rules, draws.Sequential, "is_random", never_random, "B is random where"),
    (data_rules, draws.Sequential, "target_length", every_sentence_short, "documents shuffled"),
    (data_rules, draws.Sequential, "other_document", this_document, "of another document"),
    (data_rules, draws.Sequential, "instance_order", lambda s, n: list(range(n)), "instances last"),
    (data_rules, draws.Sequential, "front_cuts", cut_at_the_back, "token by token"),
    (data_rules, pairs, "one_by_one", no_put_back(pairs.one_by_one), "put back"),
    (data_rules, np, "rint", np.floor, "15 % of the length"),
    (data_rules, masking, "mask", without_word_groups, "whole words masked"),
    (data_rules, masking, "mask", without_word_groups, "joins the last word"),
    (data_rules, draws.Counter, "replacements", first_words_of_all, "replacements are any piece"),
    (data_rules, draws, "RANDOM", 1, "80 % [MASK], 10 % kept, 10 % replaced, drawn"),
    (data_rules, tokenizer.WordPiece, "encode", lambda self, text: [1], "a blank line opens"),
    (tokenizer_rules, tokenizer, "MAX_WORD", 100, "over 200 characters"),
    (tokenizer_rules, tokenizer, "_UNACCENTED", {}, "uncased"),
    (tokenizer_rules, tokenizer, "_CLEAN", {}, "Cc and Cf go"),
    (tokenizer_rules, tokenizer, "_CLEAN", tokenizer._Table(as_it_is), "uncased"),
    (tokenizer_rules, tokenizer, "_APART", {}, "cased: as it is"),
    (optimizer_rules, optimizer, "scale_by_bert_adam", optax.scale_by_adam, "bias correction"),
    (optimizer_rules, optimizer, "scale_by_bert_adam", optax.scale_by_adam, "first update"),
    (optimizer_rules, optimizer, "schedule", linear_decay, "decay counts from step 0"),
    (optimizer_rules, optimizer, "schedule", late_start, "rate of step 0"),
    (optimizer_rules, optimizer, "_NO_DECAY", ("bias", "output_bias"), "do not decay"),
    (optimizer_rules, optimizer, "clip", lambda g, n: (g, optax.global_norm(g)), "each core clips"),
    (model_rules, layers, "_LAYER_NORM_EPS", 1e-11, "eps 1e-12"),
    (model_rules, layers, "_LAYER_NORM_EPS", 1e-6, "word + type"),
    (model_rules, attention, "_MASKED_SCORE", 0.0, "post-norm"),
    (model_rules, layers, "activation", lambda name, x: jax.nn.gelu(x), "hidden_act=gelu"),
    (model_rules, layers, "activation", lambda name, x: jax.nn.gelu(x), "tied embeddings"),
    (model_rules, heads, "_NO_PIECE", 0.0, "rows that pad"),
    (model_rules, encoder, "initializer", normal, "no weight beyond"),
    (loss_rules, losses, "MASKED_LM_EPS", 0.0, "each core divides"),
    (loss_rules, losses, "classification", label_0_is_none, "masked_lm_loss"),
]


# Each compiles a model.
SLOW = (model_rules, loss_rules)


@pytest.mark.parametrize(
    ("part", "owner", "name", "wrong", "rule"),
    [
        pytest.param(
            *broken,
            id=f"{broken[2]}: {broken[4]}",
            marks=[pytest.mark.long] if broken[0] in SLOW or broken[2] == "clip" else [],
        )
        for broken in BROKEN
    ],
)
def test_a_broken_rule_is_noticed(part, owner, name, wrong, rule, monkeypatch):
    monkeypatch.setattr(owner, name, wrong)
    step.make_train_step.cache_clear()  # else a step would be found that was made before
    found = next(each for each in part.check() if rule in each.says)
    step.make_train_step.cache_clear()
    assert not found.holds, checks.line(found, "measured")


def test_a_rule_that_fails_is_told_and_is_exit_code_1(monkeypatch, capsys):
    class Part:
        @staticmethod
        def check():
            yield Rule("data", "holds", "this with that", 0)
            yield Rule("data", "is near", "this with that", 3e-7, 1e-6)
            yield Rule("loss", "is far", "this with that", 0.25, 1e-6)
            yield Rule("loss", "is no number", "this with that", float("nan"), 1e-6)

    monkeypatch.setattr(checks, "PARTS", (Part,))
    assert cli.main(["conformance"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok     data      holds: this with that: 0 differ",
        "ok     data      is near: this with that: off by 3.0e-07, at most 1e-06",
        "FAILED loss      is far: this with that: off by 2.5e-01, at most 1e-06",
        "FAILED loss      is no number: this with that: off by nan, at most 1e-06",
        "2 of 4 rules FAILED",
    ]


# --- Deviations ---------------------------------------------------------------------------------


CERTIFIED = config.load(BASE)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("model.compute_dtype=bfloat16", "bfloat16"),
        ("model.hidden_act=gelu_tanh", "erf"),
        ("model.vocab_size=30000", "30,522"),
        ("model.hidden_dropout_prob=0.0", "drops 0.1"),
        ("model.initializer_range=0.01", "0.02"),
        ("model.dropout_rng=rbg16", "6554/65536"),
        ("model.num_hidden_layers=6", "neither BASE"),
        ("corpus.repeated_documents=drop", "keeps documents"),
        ("corpus.tokenizer_kind=unigram", "unigram"),
        ("corpus.tokenizer=some.model", "SentencePiece"),
        ("data.masking=whole_word", "whole words"),
        ("data.dupe_factor=0", "dynamic"),
        ("data.dupe_factor=5", "5 static passes"),
        ("data.short_seq_prob=0.2", "0.1"),
        ("data.masked_lm_prob=0.2", "15 %"),
        ("optimizer.name=adamw", "3.16"),
        ("optimizer.name=lamb", "You et al."),
        ("optimizer.eps=1e-8", "1e-6"),
        ("optimizer.schedule=linear", "step 0"),
        ("optimizer.reference_replicas=16", "32 cores"),
        ("optimizer.gradient_reduction=bfloat16", "rounded to bfloat16"),
        ("optimizer.peak_learning_rate=2e-4", "1e-4"),
        ("optimizer.warmup_steps=1", "10,000"),
        ("optimizer.clip_norm=2.0", "1.0"),
        ("optimizer.weight_decay=0.0", "0.01"),
        ("phases.0.steps=800000", "1,000,000"),
        ("phases.0.steps=800000", "90 %"),
        ("phases.1.batch_size=512", "256"),
        ("phases.1.max_predictions_per_seq=80", "77"),
        ("phases.1.sequence_length=256", "on 128, then on 512"),
    ],
)
def test_a_setting_that_leaves_the_paper_is_named(change, why):
    changed = deviations.find(config.override(CERTIFIED, [change]))
    new = [deviation for deviation in changed if deviation not in deviations.find(CERTIFIED)]
    assert any(why in deviation.why for deviation in new), new


def test_a_global_clip_is_named():
    changed = config.override(
        CERTIFIED, ["optimizer.clip=global", "optimizer.reference_replicas=1"]
    )
    assert deviations.Deviation(
        "optimizer.clip='global'",
        "global clip after the mean: the reference clips on each core before the sum",
    ) in deviations.find(changed)


def test_the_larger_recipe_deviates_as_the_smaller():
    large = config.load(str(ROOT / "experiments" / "bert_large.py"))
    assert deviations.find(large) == deviations.find(CERTIFIED)


def test_every_field_that_decides_what_is_computed_is_looked_at():
    """A new field of the claim needs a word here, or a reason to stand in this list."""
    looked_at = set(deviations._FIELDS) | {
        *(f"model.{n}" for n in ("hidden_size", "num_hidden_layers", "num_attention_heads")),
        *("model.intermediate_size", "model.dropout_rng"),
        *(f"corpus.{n}" for n in ("sources", "layout", "tokenizer", "tokenizer_kind")),
        *("corpus.validation_share", "data.dupe_factor"),
        *("optimizer.name", "optimizer.clip", "optimizer.reference_replicas"),
        *(f"phases.{i}.{f.name}" for i in (0, 1) for f in dataclasses.fields(config.Phase)),
    }
    same_claim = {
        *("name", "seed", "corpus.text_field", "corpus.encoding", "corpus.language"),
        "corpus.case",  # the paper released both
        *(f"data.eval_{n}" for n in ("sequence_length", "max_predictions_per_seq", "rows")),
        # Of runs that go well, where the reference has nothing.
        *("optimizer.bad_steps_in_a_row", "optimizer.after_bad_steps"),
    }
    fields = {path for path, _ in config.flatten(CERTIFIED, "identity")}
    assert fields == looked_at | same_claim
