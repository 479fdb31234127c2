"""A phase with a base of rotary positions of its own, as ModernBERT has one for rows of 8,192."""

import json

import pytest
from broken import call
from small_run import pretrain, write_text

from bert_jax import cli

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


def test_each_phase_is_trained_and_scored_with_its_own_base(runs):
    """The first 14 steps are those of a run that has this base throughout, evaluations included."""
    own, one = (lines(runs / name) for name in ("own", "one"))
    places = [(line["step"], line["kind"]) for line in own]
    assert places == [(line["step"], line["kind"]) for line in one]
    assert (12, "evaluation") in places and (18, "evaluation") in places
    for ours, theirs in zip(own, one, strict=True):
        assert (ours == theirs) == (ours["step"] <= 14), ours["step"]


@pytest.mark.parametrize("step", [12, 22])
def test_a_checkpoint_is_read_with_the_base_it_was_trained_with(runs, step, capsys):
    of_line = [x for x in lines(runs / "own") if (x["step"], x["kind"]) == (step, "evaluation")]
    assert cli.main(["evaluate", "--workdir", f"{runs}/own", "--checkpoint", str(step)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["masked_lm_loss"] == pytest.approx(of_line[0]["masked_lm_loss"], rel=1e-6)
    out = runs / f"exported{step}"
    assert call(f"export --workdir {runs}/own --checkpoint {step} --as encoder --out {out}")[0] == 0
    fields = json.loads((out / "config.json").read_text())
    assert fields["global_rope_theta"] == (20 if step == 12 else 500)


def test_a_base_without_a_meaning_is_one_line(runs, tmp_path):
    settings = ["model.kind=modern", "model.global_every=1", "phases.0.global_rotary_base=1"]
    given = [x for setting in settings for x in ("--set", setting)]
    code, error = call(["pretrain", f"{runs}/small.py", "--workdir", f"{tmp_path}/w", *given])
    assert code == 2 and error.count("\n") == 1 and "must be over 1, or 0" in error
