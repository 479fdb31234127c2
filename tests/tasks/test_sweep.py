"""A sweep: its runs, what is left of it, and its means."""

import json
import pathlib
import statistics

import pytest
import tuned
from broken import asked, fails, said

from bert_jax import errors
from bert_jax.running.trainer import Trainer
from bert_jax.tools.compare import sweep

RATE = "optimizer.peak_learning_rate"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A base and a task; the current folder."""
    tuned.write_base(tmp_path / "base")
    tuned.write_task(tmp_path, "classify", "frozen")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(*axes, base="base"):
    """Of the command, which are a list since values hold blanks."""
    swept = [word for axis in axes for word in ("--sweep", axis)]
    return ["finetune", "task.py", "--from", base, "--workdir", "all", *swept]


def names(*axes):
    return [member.folder for member in sweep.members("task.py", [], axes)]


def test_runs_are_all_products_named_by_their_values(here):
    found = sweep.members("task.py", ["batch_size=2"], [f"{RATE}=1e-3,2e-3", "seed=4,5"])
    made = [(m.folder, m.experiment.optimizer.peak_learning_rate, m.experiment.seed) for m in found]
    assert made == [
        ("peak_learning_rate-1e-3_seed-4", 1e-3, 4),
        ("peak_learning_rate-1e-3_seed-5", 1e-3, 5),
        ("peak_learning_rate-2e-3_seed-4", 2e-3, 4),
        ("peak_learning_rate-2e-3_seed-5", 2e-3, 5),
    ]
    assert {member.experiment.batch_size for member in found} == {2}
    # Where two fields end alike, they are named whole.
    assert names("name=a,b", "optimizer.name=adamw")[0] == "name-a_optimizer.name-adamw"


def test_what_cannot_be_swept_is_refused_before_anything_is_run(here):
    for axes, what in (
        (["seed"], "--sweep seed: write it as FIELD=V1,V2"),
        (["seed=1,,2"], "each value once"),
        (["seed=1,1"], "each value once"),
        (["seed=1", "seed=2"], "seed is swept already"),
        (["sed=1"], "did you mean seed"),
        (["seed=1,x"], "seed=x"),
        (["task.label_column=a b,a/b"], "label_column-a_b"),
    ):
        fails(words(*axes), what)
        assert not pathlib.Path("all").exists()
    fails(words("seed=1", base="nowhere"), "nowhere")
    (here / "all").mkdir()
    (here / "all" / "mine").touch()
    fails(words("seed=1"), "all: holds a run or other files and no sweep")


@pytest.mark.long
def test_scores_are_shown_with_means_over_seeds_and_finished_runs_are_kept(here, monkeypatch):
    axes = ("seed=1,2", f"{RATE}=0.5")
    out = said(words(*axes)).splitlines()
    record = json.loads(pathlib.Path("all/sweep.json").read_text())
    assert [r["folder"] for r in record["runs"]] == names(*axes)
    scores = []
    for found in record["runs"]:
        lines = tuned.lines(f"all/{found['folder']}/metrics.jsonl")
        scored = [line for line in lines if line["kind"] == "scores"]
        assert found["outcome"] == "finished" and found["last"] == scored[-1]
        assert found["best"]["score"] == max(line["score"] for line in scored)
        scores.append(scored[-1]["score"])
    (group,) = record["groups"]
    mean, deviation = statistics.mean(scores), statistics.stdev(scores)
    assert (group["settings"], group["runs"]) == ({RATE: "0.5"}, 2)
    assert (group["mean"], group["deviation"]) == pytest.approx((mean, deviation))
    assert out[-1].split() == ["0.5", "2", f"{mean:.4f}", f"{deviation:.4f}"]

    monkeypatch.setattr(Trainer, "_train", None)  # nothing is left to do
    again = said(words(*axes)).splitlines()
    assert sum("holds the finished run" in line for line in again) == 2
    assert again[-7:] == out[-7:]

    # Its scores are of this base and of these settings, and of no others.
    monkeypatch.undo()
    monkeypatch.chdir(here)
    tuned.write_base("other", seed=1)
    fails(words(*axes, base="other"), "its weights are not those that this run started from")
    text = pathlib.Path("task.py").read_text().replace("batch_size=4", "batch_size=8")
    pathlib.Path("task.py").write_text(text)
    fails(words(*axes), "this run was started with other settings (batch_size")


def test_a_signal_stops_the_sweep_and_a_run_that_fails_does_not(here, monkeypatch):
    def outcomes(**of_seeds):
        def instead(experiment, base, root, progress, origin):
            begun.append(root)
            return of_seeds[f"of_{experiment.seed}"]

        begun: list[str] = []
        monkeypatch.setattr(sweep, "finetune", instead)
        code, out, _ = asked(words("seed=1,2,3"))
        assert ("failed" in out) == (code == errors.FAILED)
        record = json.loads(pathlib.Path("all/sweep.json").read_text())
        return code, len(begun), [r["outcome"] for r in record["runs"]]

    stopped = outcomes(of_1="failed", of_2="stopped")
    commands = "predict --workdir all wa", "report all", "finetune --workdir all"
    for command in (*commands, "import all --workdir b", "pretrain --workdir all"):
        fails(command, "all: no run here", "sweep", "all/seed-1")
    record = json.loads(pathlib.Path("all/sweep.json").read_text())
    record["runs"][0]["last"], record["runs"][1]["last"] = {"score": 0.5}, {"score": 0.75}
    pathlib.Path("all/sweep.json").write_text(json.dumps(record))
    fails("embed texts.txt --out v.npz --workdir all", "all/seed-2")
    assert stopped == (errors.STOPPED, 2, ["failed", "stopped", ""])
    ended = outcomes(of_1="failed", of_2="failed", of_3="failed")
    assert ended == (errors.FAILED, 3, ["failed"] * 3)
