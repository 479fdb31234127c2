"""The reference's rules hold; one that is broken is noticed; deviations are named."""

import dataclasses
import hashlib
import pathlib

import numpy as np
import optax
import pytest

from bert_jax import cli, config
from bert_jax.conformance import (
    command,
    data_rules,
    deviations,
    golden,
    model_rules,
    optimizer_rules,
)
from bert_jax.conformance.rule import Rule
from bert_jax.data import draws, masking, pairs
from bert_jax.model import attention, losses
from bert_jax.text import tokenizer
from bert_jax.training import optimizer, step

ROOT = pathlib.Path(__file__).parents[2]
BASE = str(ROOT / "experiments" / "bert_base.py")


@pytest.mark.long
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
    assert golden.config()["hidden_size"] == golden.CONFIG.hidden_size == 64


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


def without_word_groups(*arguments, **named):
    rows, policy = arguments[:-1], arguments[-1]
    return MASK(*rows, policy._replace(units="piece"), **named)


def cut_at_the_back(self, removals):
    for _ in range(int(removals.lead[0] + removals.rest[0])):
        self._rng.random()
    return np.array([0]), np.array([0])


MASK = masking.mask

# What is broken, and which rule says so.
BROKEN = [
    (data_rules, pairs, "one_by_one", no_put_back(pairs.one_by_one), "put back"),
    (data_rules, draws.Sequential, "front_cuts", cut_at_the_back, "token by token"),
    (data_rules, masking, "mask", without_word_groups, "whole words masked"),
    (data_rules, np, "rint", np.floor, "15 % of the length"),
    (data_rules, tokenizer, "_UNACCENTED", {}, "uncased"),
    (optimizer_rules, optimizer, "scale_by_bert_adam", optax.scale_by_adam, "bias correction"),
    (model_rules, attention, "MASKED_SCORE", 0.0, "post-norm"),
    (optimizer_rules, losses, "MASKED_LM_EPS", 0.0, "each core divides"),
]


def forget():
    for kept in (step.make_train_step, step.make_eval_step, step.make_init, step.abstract_state):
        kept.cache_clear()


@pytest.mark.parametrize(
    ("part", "owner", "name", "wrong", "rule"),
    [
        pytest.param(
            *broken,
            id=f"{broken[2]}: {broken[4]}",
            # Each compiles a model.
            marks=[pytest.mark.long] if broken[1] in (attention, losses) else [],
        )
        for broken in BROKEN
    ],
)
def test_a_broken_rule_is_noticed(part, owner, name, wrong, rule, monkeypatch):
    monkeypatch.setattr(owner, name, wrong)
    forget()  # else a step would be found that was made before
    checked = next(each for each in part.check() if rule in each.says)
    forget()
    assert not checked.holds, checked.line("measured")


def test_a_rule_that_fails_is_shown_and_is_exit_code_1(monkeypatch, capsys):
    rules = [
        Rule("data", "holds", "this with that", 0),
        Rule("data", "is near", "this with that", 3e-7, 1e-6),
        Rule("loss", "is far", "this with that", 0.25, 1e-6),
        Rule("loss", "is no number", "this with that", float("nan"), 1e-6),
    ]
    monkeypatch.setattr(command, "check", lambda: iter(rules))
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
        ("data.objective=mlm", "no next sentences"),
        ("data.objective=mlm data.attention=per_document", "do not see each other"),
        ("data.objective=mlm_sop", "swapped"),
        (
            "data.objective=causal model.direction=left_to_right "
            "phases.0.max_predictions_per_seq=127 phases.1.max_predictions_per_seq=511 "
            "data.eval_max_predictions_per_seq=127",
            "from left to right",
        ),
        ("data.dupe_factor=0", "dynamic"),
        ("data.dupe_factor=5", "5 static passes"),
        ("data.short_seq_prob=0.2", "0.1"),
        ("data.masking=span", "SpanBERT"),
        ("data.masked_lm_prob=0.1", "15 %"),
        ("data.final_masked_lm_prob=0.1 data.dupe_factor=0", "the paper's stays"),
        ("data.mask_share=0.7", "80 %"),
        ("data.random_share=0.0", "10 %"),
        ("optimizer.name=adamw", "3.16"),
        ("optimizer.name=lamb", "You et al."),
        ("optimizer.name=stable_adamw", "Wortsman"),
        ("optimizer.eps=1e-8", "1e-6"),
        ("optimizer.schedule=wsd optimizer.decay_steps=9", "stays at its peak"),
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
    changed = deviations.find(config.override(CERTIFIED, change.split()))
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
    """A new field of identity needs a word here, or a reason to stand in this list."""
    looked_at = set(deviations._FIELDS) | {
        *(f"model.{n}" for n in ("hidden_size", "num_hidden_layers", "num_attention_heads")),
        *("model.intermediate_size", "model.dropout_rng"),
        *(f"corpus.{n}" for n in ("sources", "layout", "tokenizer", "tokenizer_kind")),
        *("corpus.validation_share", "data.objective", "data.dupe_factor", "data.masking"),
        *("optimizer.name", "optimizer.clip", "optimizer.reference_replicas"),
        # The last two are parts of the schedule.
        *(f"optimizer.{n}" for n in ("schedule", "decay_steps", "decay_shape")),
        *(f"phases.{i}.{f.name}" for i in (0, 1) for f in dataclasses.fields(config.Phase)),
    }
    same_experiment = {
        *("name", "seed", "corpus.text_field", "corpus.encoding", "corpus.language"),
        "corpus.case",  # the paper released both
        # Of model.kind=modern alone.
        *("model.global_every", "model.local_window"),
        *("model.global_rotary_base", "model.local_rotary_base"),
        *(f"data.eval_{n}" for n in ("sequence_length", "max_predictions_per_seq", "rows", "seed")),
        # Of runs that go well, where the reference has nothing.
        *("optimizer.bad_steps_in_a_row", "optimizer.after_bad_steps"),
    }
    fields = {path for path, _ in config.flatten(CERTIFIED, "identity")}
    assert fields == looked_at | same_experiment
