"""What a run leaves behind, damaged: the report shows what it says, or refuses it."""

import contextlib
import json
import pathlib
import shutil

import pytest
from compare import assert_identical
from damage import REFUSED, damage, few, result
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from bert_jax import config
from bert_jax.checkpoints.load import Checkpoints
from bert_jax.config import Parallelism
from bert_jax.storage import workdir
from bert_jax.storage.workdir import load_experiment, with_checksum
from bert_jax.tools.plan import estimate
from bert_jax.tools.plan import report as plan_report
from bert_jax.tools.report import figures, page
from bert_jax.tools.report.run_record import Record
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining
from bert_jax.training.step import abstract_state

# Lines have no checksum: a damaged one is shown, if it can be.
LINES = ["metrics.jsonl", "predictions.jsonl", "timings.jsonl"]
FILES = [*LINES, "origin.json", "plan.json", "experiment.json"]
SECONDS = dict.fromkeys(estimate.TERMS, 0.1) | {"total": 0.9}
# As plan.report gives it, without what no report shows.
PLAN = {
    "format_version": plan_report.FORMAT_VERSION,
    "experiment": "small",
    "versions": {"libtpu": "0.0.1"},
    "slices": [
        {
            "topology": "v5e:4x4",
            "chips": 16,
            "device_memory": 2**34,
            "phases": [
                {"phase": 0, "outcome": "fits", "memory": {"peak": 2**30}, "seconds": SECONDS}
                | {"utilisation": 0.5, "hours": 2.0},
                {"phase": 1, "outcome": "too large", "memory": {}, "hours": None},
            ],
        }
    ],
}


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory):
    """The workdir of a finished and planned run; its paths are relative."""
    folder = tmp_path_factory.mktemp("random") / "run"
    shutil.copytree(finished_run, folder)
    (folder / "run" / "plan.json").write_text(json.dumps(with_checksum(PLAN)))
    with contextlib.chdir(folder):
        yield pathlib.Path("run")


def written(run: pathlib.Path) -> str:
    text = page.render_page([Record.read(str(run))])
    text.encode()  # it can be written
    return text


@given(data=st.data())
def test_a_report_shows_what_the_files_say_or_refuses_them(run, data):
    name = data.draw(st.sampled_from(FILES))
    file = run / name
    with pytest.MonkeyPatch.context() as patch, damage(file, data) as content:
        for name_of_slow in ("draw", "draw_histogram"):  # a second
            patch.setattr(figures, name_of_slow, lambda *_: "")
        if result(lambda: written(run), name) is REFUSED:
            return
        record = Record.read(str(run))
    if name == "predictions.jsonl":
        # The end of a last line that was cut off is left out, and nothing else.
        assert record.predictions == [json.loads(line) for line in content.split(b"\n")[:-1]]
    elif name == "plan.json":
        assert {key: record.plan.get(key) for key in PLAN} == PLAN
    elif name == "experiment.json":
        assert record.experiment == config.from_json(content.decode(), name)


@pytest.mark.long
@pytest.mark.parametrize("name", LINES)
@few(0.02)
@given(data=st.data())
def test_lines_that_are_read_can_be_drawn(run, name, data):
    with damage(run / name, data, f"drawn: {name}"):
        result(lambda: written(run), name)


# --- checkpoints ---


@pytest.fixture(scope="module")
def checkpoints(run):
    """What the run keeps, the shape of its state, and its checkpoints by step."""
    experiment = load_experiment(workdir.Workdir("run"))
    one = mesh_lib.one_device()
    whole = abstract_state(Pretraining(experiment.model), experiment.optimizer, Parallelism(), one)
    saved = Checkpoints(epath.Path("run/checkpoints"))
    return experiment, whole, {step: saved.restore(step, whole) for step in saved.steps}


@pytest.mark.long
@pytest.mark.parametrize("names", ["_CHECKPOINT_METADATA", "state/**/*"])
@few(0.1)
@given(data=st.data())
def test_a_checkpoint_is_what_was_saved_or_the_one_before_is_used(run, checkpoints, names, data):
    experiment, whole, saved = checkpoints
    folder = run / "checkpoints" / str(max(saved))
    files = sorted(p for p in folder.glob(names) if p.is_file() and p.stat().st_size)
    file = data.draw(st.sampled_from(files))
    kind = "d/*" if file.parent.name == "d" else file.name
    with damage(file, data, f"checkpoint/{kind}"):
        opened = Checkpoints(epath.Path(folder.parent))
        found = result(lambda: opened.restore_newest(whole), folder)
        claim = result(lambda: opened.experiment(opened.find_step("newest")), folder)
    if found is not REFUSED:
        assert (str(folder) in found.damaged.get(max(saved), "")) == (found.step != max(saved))
        assert_identical(found.state, saved[found.step].state)
        assert found.metadata == saved[found.step].metadata
    assert claim is REFUSED or claim == experiment
