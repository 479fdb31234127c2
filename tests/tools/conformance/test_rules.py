"""The reference's rules hold; one that is broken is noticed; deviations are named."""

import dataclasses
import hashlib
import pathlib

import optax
import pytest

from bert_jax import cli, config
from bert_jax.data import masking, pairs
from bert_jax.model import attention
from bert_jax.text import tokenizer
from bert_jax.tools.conformance import checklist, data_rules, golden, model_rules, optimizer_rules
from bert_jax.tools.conformance.rule import ReferenceRule
from bert_jax.training import optimizer, step

ROOT = pathlib.Path(__file__).parents[3]
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
    assert golden.CONFIG.hidden_size == 64


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


def without_word_groups(*arguments):
    *rows, policy, most, ids = arguments
    return MASK(*rows, policy._replace(unit="piece"), most, ids)


MASK = masking.mask

# What is broken, and which rule says so.
BROKEN = [
    (data_rules, pairs, "reference_pairs", no_put_back(pairs.reference_pairs), "put back"),
    (data_rules, masking, "mask", without_word_groups, "whole words masked"),
    (data_rules, tokenizer, "_UNACCENTED", {}, "uncased"),
    (optimizer_rules, optimizer, "scale_by_bert_adam", optax.scale_by_adam, "bias correction"),
    # It compiles a model.
    pytest.param(model_rules, attention, "MASKED_SCORE", 0.0, "post-norm", marks=pytest.mark.long),
]


def forget():
    for kept in (step.make_train_step, step.make_eval_step, step.make_init, step.abstract_state):
        kept.cache_clear()


@pytest.mark.parametrize(("part", "owner", "name", "wrong", "rule"), BROKEN)
def test_a_broken_rule_is_noticed(part, owner, name, wrong, rule, monkeypatch):
    monkeypatch.setattr(owner, name, wrong)
    forget()  # else a step would be found that was made before
    checked = next(each for each in part.check() if rule in each.rule)
    forget()
    assert not checked.holds, checked.line("measured")


def test_a_rule_that_fails_is_shown_and_is_exit_code_1(monkeypatch, capsys):
    rules = [
        ReferenceRule("data", "holds", "this with that", 0),
        ReferenceRule("data", "is near", "this with that", 3e-7, 1e-6),
        ReferenceRule("loss", "is far", "this with that", 0.25, 1e-6),
        ReferenceRule("loss", "is no number", "this with that", float("nan"), 1e-6),
    ]
    monkeypatch.setattr(checklist, "check", lambda: iter(rules))
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


def test_a_setting_that_leaves_the_paper_is_named_with_the_paper_s_and_its_comment():
    changes = {
        "model.hidden_act": ("gelu_tanh", "'gelu'", "tanh approximation"),
        "corpus.repeated_documents": ("drop", "'keep'", "whole text"),
        "optimizer.name": ("adamw", "'bert_adam'", "3.16 times"),
        "phases.1.batch_size": (512, "256", "Rows per step"),
    }
    before = checklist.deviations(CERTIFIED)
    for setting, (value, papers, comment) in changes.items():
        changed = config.override(CERTIFIED, [f"{setting}={value}"])
        ((named, why),) = [each for each in checklist.deviations(changed) if each not in before]
        assert named == f"{setting}={value!r}"
        assert why.startswith(f"the paper has {papers}. ") and comment in why


def test_a_phase_that_is_left_out_is_named():
    whole = checklist.deviations(CERTIFIED)
    changed = checklist.deviations(dataclasses.replace(CERTIFIED, phases=CERTIFIED.phases[:1]))
    names = [each[0] for each in changed if each not in whole]
    assert "phases.1.steps='absent'" in names


def test_the_larger_recipe_deviates_as_the_smaller():
    large = config.load(str(ROOT / "experiments" / "bert_large.py"))
    assert checklist.deviations(large) == checklist.deviations(CERTIFIED)
