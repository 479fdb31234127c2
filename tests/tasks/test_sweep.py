"""A sweep: its runs, what is left of it, and its means."""

import json
import pathlib
import signal
import statistics

import pytest
import tuned

from bert_jax import cli, errors
from bert_jax.compare import sweep
from bert_jax.errors import InputError
from bert_jax.running.runner import Trainer
from bert_jax.tasks import job

RATE = "optimizer.peak_learning_rate"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A base and a task; the current folder."""
    tuned.write_base(tmp_path / "base")
    tuned.write_task(tmp_path, "classify", "frozen")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*axes, base="base"):
    words = [word for axis in axes for word in ("--sweep", axis)]
    return cli.main(["finetune", "task.py", "--from", base, "--workdir", "all", *words])


def names(*axes):
    return [member.folder for member in sweep.members("task.py", [], axes)]


def test_runs_are_all_products_named_by_their_values(here):
    found = sweep.members("task.py", ["batch_size=2"], [f"{RATE}=1e-3,2e-3", "seed=4,5"])
    assert [member.folder for member in found] == [
        "peak_learning_rate-1e-3_seed-4",
        "peak_learning_rate-1e-3_seed-5",
        "peak_learning_rate-2e-3_seed-4",
        "peak_learning_rate-2e-3_seed-5",
    ]
    assert [(m.experiment.optimizer.peak_learning_rate, m.experiment.seed) for m in found] == [
        (1e-3, 4),
        (1e-3, 5),
        (2e-3, 4),
        (2e-3, 5),
    ]
    assert {member.experiment.batch_size for member in found} == {2}
    # Where two fields end alike, they are named whole.
    assert names("name=a,b", "optimizer.name=adamw")[0] == "name-a_optimizer.name-adamw"


@pytest.mark.parametrize(
    ("axes", "what"),
    [
        (["seed"], "--sweep seed: write it as FIELD=V1,V2"),
        (["seed="], "each value once"),
        (["seed=1,,2"], "each value once"),
        (["seed=1,1"], "each value once"),
        (["seed=1", "seed=2"], "seed is swept already"),
        (["sed=1"], "did you mean seed"),
        (["seed=1,x"], "--sweep: --set seed=x"),
        (["task.label_column=a b,a/b"], "two runs would both lie in label_column-a_b"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_run(here, capsys, axes, what):
    assert run(*axes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert what in line and not pathlib.Path("all").exists()


def test_a_folder_of_another_thing_is_refused(here, capsys):
    (here / "all").mkdir()
    (here / "all" / "mine").touch()
    assert run("seed=1") == 2
    assert "all: holds a run or other files and no sweep" in capsys.readouterr().err


def test_scores_are_shown_with_means_over_seeds_and_finished_runs_are_kept(
    here, capsys, monkeypatch
):
    axes = ("seed=1,2", f"{RATE}=1e-3,0.5")
    assert run(*axes) == 0
    out = capsys.readouterr().out.splitlines()
    record = json.loads(pathlib.Path("all/sweep.json").read_text())
    assert [r["folder"] for r in record["runs"]] == names(*axes)
    scores = {}
    for found in record["runs"]:
        lines = tuned.lines(f"all/{found['folder']}/metrics.jsonl")
        scored = [line for line in lines if line["kind"] == "scores"]
        assert found["outcome"] == "finished" and found["last"] == scored[-1]
        assert found["best"]["score"] == max(line["score"] for line in scored)
        scores.setdefault(found["settings"][RATE], []).append(scored[-1]["score"])
    for group in record["groups"]:
        two = scores[group["settings"][RATE]]
        assert (group["runs"], group["mean"]) == (2, pytest.approx(sum(two) / 2))
        assert group["deviation"] == pytest.approx(abs(two[0] - two[1]) / 2**0.5)
    rate, two = out[-1].split()[0], scores["0.5"]
    assert (rate, out[-1].split()[1:]) == (
        "0.5",
        ["2", f"{statistics.mean(two):.4f}", f"{statistics.stdev(two):.4f}"],
    )

    monkeypatch.setattr(Trainer, "_phase", None)  # nothing is left to do
    assert run(*axes) == 0
    again = capsys.readouterr().out.splitlines()
    assert sum("holds the finished run" in line for line in again) == 4
    assert again[-9:] == out[-9:]

    # Its scores are of this base, and of no other.
    tuned.write_base("other", seed=1)
    assert run(*axes, base="other") == errors.BAD_INPUT
    assert "holds other weights than those this run adapts" in capsys.readouterr().err


def test_other_settings_under_a_sweep_are_refused_by_name(here, capsys):
    assert run("seed=1") == 0
    text = pathlib.Path("task.py").read_text().replace("batch_size=4", "batch_size=8")
    pathlib.Path("task.py").write_text(text)
    assert run("seed=1,2") == 2
    assert "all/seed-1: this run was started with other settings (batch_size" in (
        capsys.readouterr().err
    )


def test_a_signal_stops_the_sweep_and_it_goes_on(here, capsys, monkeypatch):
    axes = ("seed=1,2,3",)
    finetune, begun = job.finetune, []

    def stopped_in_the_second(experiment, base, root, progress, origin):
        begun.append(root)
        if len(begun) == 2:
            # Once the loop is on, as from outside.
            monkeypatch.setattr(
                progress, "train", lambda line, seconds: signal.raise_signal(signal.SIGTERM)
            )
        return finetune(experiment, base, root, progress, origin)

    text = pathlib.Path("task.py").read_text().replace("log_every=4", "log_every=1")
    pathlib.Path("task.py").write_text(text)
    monkeypatch.setattr(job, "finetune", stopped_in_the_second)
    assert run(*axes) == errors.STOPPED
    assert begun == ["all/seed-1", "all/seed-2"]
    record = json.loads(pathlib.Path("all/sweep.json").read_text())
    assert [r["outcome"] for r in record["runs"]] == ["finished", "stopped", ""]

    monkeypatch.setattr(job, "finetune", finetune)
    assert run(*axes) == 0
    out = capsys.readouterr().out
    assert "all/seed-1 holds the finished run" in out and "resume: from step" in out
    record = json.loads(pathlib.Path("all/sweep.json").read_text())
    assert [r["outcome"] for r in record["runs"]] == ["finished"] * 3


def test_a_run_that_fails_keeps_none_from_going_on(here, capsys, monkeypatch):
    finetune = job.finetune

    def failing(experiment, base, root, progress, origin):
        if experiment.seed == 1:
            return "failed"
        return finetune(experiment, base, root, progress, origin)

    monkeypatch.setattr(job, "finetune", failing)
    assert run("seed=1,2") == errors.FAILED
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in out[-5:-3]] == [["1", "failed"], ["2", "4"]]
    assert out[-1].split()[0] == "1"  # run that counts


def test_an_error_of_the_input_ends_the_sweep(here):
    with pytest.raises(InputError, match="nowhere: no run here"):
        sweep.run(sweep.members("task.py", [], ["seed=1"]), "nowhere", "all", Quiet())
    assert not pathlib.Path("all").exists()


class Quiet:
    def say(self, line):
        pass
