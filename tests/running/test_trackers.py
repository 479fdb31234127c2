"""What trackers are sent: by a thread, once, on and on over resumes, and in nobody's way."""

import json
import os
import pathlib
import shutil
import sys
import time

import pytest
import small_run
from broken import call
from etils import epath

from bert_jax import config
from bert_jax.config.pretraining import TRACKERS
from bert_jax.errors import InputError
from bert_jax.running import trackers
from bert_jax.storage.workdir import Workdir

# Stand-ins, each with as much of the interface as is used; they write calls to the file CALLS.
_NOTE = """
import json, os
def note(*words):
    with open({calls!r}, "a") as file:
        file.write(json.dumps(words) + "\\n")
"""
_RUN = """
class Run:
    def log(self, values, step):
        note("log", step, values)
    def finish(self):
        note("finish")
class Settings(dict):
    pass
def init(**words):
    note("init", {k: v for k, v in words.items() if k != "settings"})
    note("folder", os.environ.get("TRACKIO_DIR"))
    return Run()
"""
_MLFLOW = {
    "entities": """
class Metric:
    def __init__(self, key, value, timestamp, step):
        self.key, self.value, self.step = key, value, step
""",
    "tracking": """
from types import SimpleNamespace as _
class MlflowClient:
    def __init__(self, uri):
        note("client", uri)
    def get_experiment_by_name(self, name):
        return None
    def create_experiment(self, name, artifacts):
        return "1"
    def create_run(self, number, run_name):
        note("init", {"name": run_name})
        return _(info=_(run_id="its own"))
    def update_run(self, run_id, status):
        note("init", {"id": run_id})
    def log_param(self, run_id, name, value):
        pass
    def log_batch(self, run_id, metrics):
        note("log", metrics[0].step, {m.key: m.value for m in metrics})
    def set_terminated(self, run_id):
        note("finish")
""",
}


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Stand-ins for all three, and a function that gives the calls that they had."""
    file = tmp_path / "calls"
    head = _NOTE.format(calls=str(file))
    folder = tmp_path / "modules"
    (folder / "mlflow").mkdir(parents=True)
    for name in ("wandb", "trackio"):
        (folder / f"{name}.py").write_text(head + _RUN)
    for name, text in _MLFLOW.items():
        (folder / "mlflow" / f"{name}.py").write_text(head + text)
    (folder / "mlflow" / "__init__.py").write_text("")
    for name in [m for m in sys.modules if m.split(".")[0] in ("wandb", "trackio", "mlflow")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)
    for variable in ("WANDB_MODE", "TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    yield lambda: [json.loads(line) for line in file.read_text().splitlines()]
    for name in [m for m in sys.modules if m.split(".")[0] in ("wandb", "trackio", "mlflow")]:
        del sys.modules[name]


@pytest.fixture
def run(tmp_path):
    """A workdir with nothing in it, and the experiment."""
    file = small_run.write_text(tmp_path / "text")
    (tmp_path / "run").mkdir()
    return Workdir(epath.Path(tmp_path / "run")), config.load(str(file))


def write(workdir, *lines):
    with open(workdir.metrics, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def train(step, **more):
    return {"step": step, "kind": "train", "loss": 2.0 / step, **more}


def follow(names, run, *lines):
    """Writes lines while they are followed; returns what was said."""
    said = []
    with trackers.run_trackers(names, *run, said.append):
        write(run[0], *lines)
    return said


@pytest.mark.parametrize("name", ["trackio", "wandb", "mlflow"])
def test_each_is_sent_every_line_once_and_goes_on_as_the_same_run(name, calls, run):
    evaluation = {"step": 10, "kind": "evaluation", "loss": 1.5, "scores": {"a": 1}, "why": "no"}
    assert follow((name,), run, train(5), train(10), evaluation) == []
    first = calls()
    # A kill took back step 10; the same lines are written again, and more.
    lines = run[0].metrics.read_text().splitlines(keepends=True)
    run[0].metrics.write_text(lines[0])
    assert follow((name,), run, train(10), evaluation, train(15)) == []
    second = calls()[len(first) :]
    logged = [call[1:] for call in first if call[0] == "log"]
    assert logged == [
        [5, {"train/loss": 0.4}],
        [10, {"train/loss": 0.2}],
        [10, {"evaluation/loss": 1.5, "evaluation/scores/a": 1.0}],
    ]
    assert [call[1:] for call in second if call[0] == "log"] == [[15, {"train/loss": 2 / 15}]]
    assert first[-1] == second[-1] == ["finish"]
    ((began,), (went_on,)) = ([c[1] for c in part if c[0] == "init"] for part in (first, second))
    state = json.loads((run[0].root / "trackers.json").read_text())["trackers"][name]
    assert state["id"] and state["sent"] == {"train": 15, "evaluation": 10}
    if name == "mlflow":
        assert state["id"] == went_on["id"] == "its own"
        uris = [c[1] for c in calls() if c[0] == "client"]
        assert set(uris) == {f"sqlite:///{run[0].root / 'mlflow'}/mlflow.db"}
    else:
        key = {"trackio": "name", "wandb": "id"}[name]
        assert began[key] == went_on[key] == state["id"] and went_on["resume"] == "allow"
        assert began["config"]["model.hidden_size"] == 16


def test_what_they_keep_stays_on_this_machine(calls, run):
    follow(("wandb", "trackio"), run, train(1))
    assert ["folder", os.fspath(run[0].root / "trackio")] in calls()
    (began,) = [c[1] for c in calls() if c[0] == "init" and "dir" in c[1]]
    assert began["dir"] == os.fspath(run[0].root) and began["mode"] == "offline"
    assert not {"WANDB_MODE", "TRACKIO_DIR"} & set(os.environ)


def test_one_that_fails_is_one_line_and_the_others_go_on(calls, run, tmp_path):
    broken = tmp_path / "modules" / "wandb.py"
    broken.write_text(broken.read_text() + "Run.log = lambda *a, **b: 1 / 0\n")
    (said,) = follow(("wandb", "trackio"), run, train(1), train(2))
    assert said.startswith("trackers: wandb: ZeroDivisionError: ") and "without it" in said
    assert [c[1] for c in calls() if c[0] == "log"] == [1, 2]
    shutil.rmtree(tmp_path / "modules")
    sys.modules.pop("trackio")
    with pytest.raises(InputError, match=r"run\.trackers=trackio: needs the \[trackio\] extra"):
        trackers.require_installed(("trackio",))


def test_one_that_hangs_holds_up_nobody(calls, run, tmp_path, monkeypatch):
    slow = tmp_path / "modules" / "wandb.py"
    slow.write_text(slow.read_text() + "import time\nRun.log = lambda *a, **b: time.sleep(3)\n")
    monkeypatch.setattr(trackers, "_END", 0.2)
    begun = time.monotonic()
    (said,) = follow(("wandb",), run, train(1))
    assert time.monotonic() - begun < 2 and said.startswith("trackers: not done")


def test_each_tracker_is_an_extra_of_its_name():
    extras = (pathlib.Path(__file__).parents[2] / "setup.cfg").read_text()
    assert all(f"\n{name} = {name}" in extras for name in TRACKERS)


@pytest.mark.long
def test_a_run_writes_tensorboard_s_event_files_as_it_goes(copy_of_run):
    """Also of lines that were there before; over a resume nothing twice."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    workdir = copy_of_run / "run"
    for _ in range(2):
        shutil.rmtree(workdir / "checkpoints" / "22")
        words = "pretrain small.py --workdir run --set run.trackers=tensorboard"
        assert call(words) == (0, "")
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for kind in ("train", "evaluation"):
        events = accumulator(str(workdir / "tensorboard" / kind))
        events.Reload()
        found = [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors("masked_lm_loss")]
        wanted = [(x["step"], x["masked_lm_loss"]) for x in lines if x["kind"] == kind]
        assert found == [(step, pytest.approx(value)) for step, value in wanted] and wanted
    assert pathlib.Path(workdir / "tensorboard" / "timings").is_dir()
