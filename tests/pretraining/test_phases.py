"""Phases with an objective, a mixture or a base of rotary positions of their own."""

import json
import re

import pytest
from broken import call, fails, said
from compare import assert_identical
from small_run import (
    OBJECTIVES,
    assert_same_run,
    final_state,
    hooked,
    pretrain,
    run_bert_jax,
    write_second_source,
    write_text,
)

MODERN = (
    *("model.kind=modern", "model.global_every=1", "run.keep_checkpoints=9"),
    *("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0"),
)
# The short rows' base is that of the phase, or the model's; then rows are longer.
OWN = (*MODERN, "phases.0.global_rotary_base=20", "model.global_rotary_base=500")
ONE = (*MODERN, "model.global_rotary_base=20")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotary")
    file = write_text(folder)
    for name, settings in (("own", OWN), ("one", ONE)):
        assert pretrain(file, folder / name, *settings)[0] == "finished"
    return folder


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


@pytest.mark.long
def test_each_phase_is_trained_and_scored_with_its_own_base(runs):
    """The first 14 steps are those of a run that has this base throughout, evaluations included."""
    own, one = (lines(runs / name) for name in ("own", "one"))
    places = [(line["step"], line["kind"]) for line in own]
    assert places == [(line["step"], line["kind"]) for line in one]
    assert (12, "evaluation") in places and (18, "evaluation") in places
    for ours, theirs in zip(own, one, strict=True):
        assert (ours == theirs) == (ours["step"] <= 14), ours["step"]


@pytest.mark.long
@pytest.mark.parametrize("step", [12, 22])
def test_a_checkpoint_is_read_with_the_base_it_was_trained_with(runs, step):
    of_line = [x for x in lines(runs / "own") if (x["step"], x["kind"]) == (step, "evaluation")]
    *_, line = said(f"evaluate --workdir {runs}/own --checkpoint {step}").splitlines()
    found = json.loads(line)
    assert found["masked_lm_loss"] == pytest.approx(of_line[0]["masked_lm_loss"], rel=1e-6)
    out = runs / f"exported{step}"
    said(f"export --workdir {runs}/own --checkpoint {step} --as encoder --out {out}")
    fields = json.loads((out / "config.json").read_text())
    assert fields["global_rope_theta"] == (20 if step == 12 else 500)


@pytest.mark.long
def test_a_base_without_a_meaning_is_one_line(runs, tmp_path):
    settings = ["model.kind=modern", "model.global_every=1", "phases.0.global_rotary_base=1"]
    given = " ".join(f"--set {setting}" for setting in settings)
    fails(f"pretrain {runs}/small.py --workdir {tmp_path}/w {given}", "must be over 1, or 0")


PHASES = (*OBJECTIVES["phases"], "run.keep_checkpoints=9", "run.log_every=4")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    assert pretrain(write_text(folder), folder / "both", *PHASES)[0] == "finished"
    return folder


@pytest.mark.long
def test_a_phase_learns_what_it_would_learn_in_a_run_of_its_own(learned):
    """The first steps are those of a run that learns this throughout."""
    alone = (*OBJECTIVES["causal"], "data.attention=whole_row", "run.log_every=4")
    assert pretrain(learned / "small.py", learned / "alone", *alone)[0] == "finished"
    both, one = (
        [line for line in lines(learned / name) if line["kind"] == "train" and line["step"] <= 12]
        for name in ("both", "alone")
    )
    assert both == one and "next_piece_loss" in both[0]


@pytest.mark.long
def test_no_line_has_steps_of_two_objectives(learned):
    """Of lines of four steps the phase of 14 ends within one."""
    trained = [line for line in lines(learned / "both") if line["kind"] == "train"]
    assert [line["step"] for line in trained] == [4, 8, 12, 14, 16, 20, 22]
    for line in trained:
        pieces = {name for name in line if name in ("next_piece_loss", "masked_lm_loss")}
        assert pieces == {"next_piece_loss" if line["step"] <= 14 else "masked_lm_loss"}


def test_what_a_phase_does_not_learn_from_stays_to_the_bit(learned):
    early, late, last = (final_state(learned / "both", step)[1] for step in (4, 12, 22))
    for name in ("pooler", "next_sentence"):
        assert_identical(early["params"][name], late["params"][name])
        assert (last["params"][name]["kernel"] != late["params"][name]["kernel"]).any()
        for moments in ("mu", "nu"):
            of_head = getattr(late["optimizer"][0], moments)[name]
            assert not any(leaf.any() for leaf in of_head.values())


@pytest.mark.long
def test_a_checkpoint_is_read_as_its_phase_learned(learned):
    for step, form, other in ((12, "causal_lm", "masked_lm"), (22, "masked_lm", "causal_lm")):
        export = f"export --workdir {learned}/both --checkpoint {step} --out {learned}/e{step} --as"
        assert call(f"{export} {other}")[0] == 2
        assert call(f"{export} {form}") == (0, "")
    predict = f"predict --workdir {learned}/both --checkpoint 12 w[MASK]"
    fails(predict, "cannot fill a [MASK]")


@pytest.mark.parametrize("step", [12, pytest.param(22, marks=pytest.mark.long)])
def test_held_out_rows_are_of_the_last_objective_from_the_start(learned, step):
    given = [x for x in lines(learned / "both") if (x["step"], x["kind"]) == (step, "evaluation")]
    *_, line = said(f"evaluate --workdir {learned}/both --checkpoint {step}").splitlines()
    found = json.loads(line)
    for name in ("masked_lm_loss", "next_sentence_loss"):
        assert found[name] == pytest.approx(given[0][name], rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "state"), [(2, "zero1"), pytest.param(4, "zero3", marks=pytest.mark.nightly)]
)
def test_phases_are_the_same_on_any_devices(learned, devices, state):
    place = learned / f"{devices}-{state}"
    sets = [x for s in (*PHASES, f"parallelism.state={state}") for x in ("--set", s)]
    done = run_bert_jax(
        "pretrain", f"{learned}/small.py", "--workdir", place, *sets, devices=devices
    )
    assert done.returncode == 0, done.stderr.decode()
    for ours, theirs in zip(lines(place), lines(learned / "both"), strict=True):
        for name, value in theirs.items():
            # A guess that two labels share falls to either by rounding.
            if name.endswith("_loss") or name == "gradient_norm":
                assert ours[name] == pytest.approx(value, rel=2e-5), (ours["step"], name)


@pytest.mark.long
def test_a_run_that_breaks_off_about_a_change_of_mixture_goes_on_bit_exact(tmp_path):
    """Before the change, after it before a save, and in the second phase; shares are printed."""
    file, breaks = write_text(tmp_path), {13, 15, 18}
    settings = write_second_source(tmp_path)

    def break_off(done, batch):
        if done in breaks:
            breaks.remove(done)
            raise RuntimeError("broken off")
        return batch

    _, shown = pretrain(file, tmp_path / "whole", *settings)
    shares = re.findall(r"^mixture: .*/(\w+): ([\d.]+)%, then ([\d.]+)% of rows$", shown, re.M)
    assert [share[:2] for share in shares] == [("text", "100.00"), ("more", "0.00")]
    assert float(shares[1][2]) == pytest.approx(75, abs=5)
    with hooked(change_batch=break_off):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="broken off"):
                pretrain(file, tmp_path / "broken", *settings)
        assert pretrain(file, tmp_path / "broken", *settings)[0] == "finished"
    assert_same_run(tmp_path / "broken", tmp_path / "whole")
