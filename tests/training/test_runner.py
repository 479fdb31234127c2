"""What the loop does beside the steps."""

import io
import json
import shutil
import time

import jax
import pytest
from rich.console import Console
from small_run import write_text

from bert_jax import predict, resolve
from bert_jax.config import InputError
from bert_jax.training import metrics, runner, session, step
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.progress import Progress
from bert_jax.workdir import Workdir


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    return folder, write_text(folder)


def pretrain(file, workdir, *settings):
    """Runs in this process; returns the outcome and what was shown."""
    experiment = resolve.override(resolve.load(str(file)), settings)
    console = Console(record=True, width=200, file=io.StringIO())
    place = Workdir(workdir, experiment.run.corpus_dir)
    outcome = session.pretrain(experiment, place, "keep", Progress(console))
    return outcome, console.export_text()


def test_the_host_reads_the_device_once_a_log_interval(text, tmp_path, monkeypatch):
    """And one step late: the read of step 3 happens when step 4 is under way."""
    _, file = text
    reads, reads_before_step = [], []
    fetch, array = jax._src.array.ArrayImpl._value.fget, jax._src.array.ArrayImpl

    def counted(self):
        reads.append(self.shape)
        return fetch(self)

    make = step.make_train_step

    def make_counting(*args):
        train_step = make(*args)

        def counting(*args):
            reads_before_step.append(len(reads))
            return train_step(*args)

        return counting

    monkeypatch.setattr(array, "_value", property(counted))
    monkeypatch.setattr(step, "make_train_step", make_counting)
    pretrain(file, tmp_path / "w", "run.eval_every=100", "run.checkpoint_every=100")
    in_phase = reads_before_step[:14]
    steps_with_reads = [i for i in range(1, 14) if in_phase[i] > in_phase[i - 1]]
    # Before step i the loop has dispatched steps 1 to i; lines are due at 3, 6, 9, 12.
    assert steps_with_reads == [4, 7, 10, 13]
    window = len(step.METRIC_NAMES)
    assert all(in_phase[i] - in_phase[i - 1] == window for i in steps_with_reads)


def test_a_run_whose_loss_is_never_finite_fails_by_name(text, tmp_path):
    _, file = text
    rate = "optimizer.peak_learning_rate=1e30"
    outcome, shown = pretrain(file, tmp_path / "a", rate)
    assert outcome == "failed"
    assert "failed: the held-out loss of step 6" in shown and "peak_learning_rate" in shown
    outcome, shown = pretrain(file, tmp_path / "b", rate, "run.eval_every=100")
    assert outcome == "failed" and "failed: no finite loss" in shown


def test_saved_steps_are_the_newest_few(text, tmp_path):
    _, file = text
    pretrain(file, tmp_path / "w", "run.keep_checkpoints=2")
    kept = {path.name for path in (tmp_path / "w" / "checkpoints").iterdir()}
    assert kept == {"20", "22"}


def test_reading_a_run_leaves_a_save_under_way_alone(text, tmp_path):
    _, file = text
    pretrain(file, tmp_path / "w")
    under_way = tmp_path / "w" / "checkpoints" / "99.orbax-checkpoint-tmp"
    under_way.mkdir()
    (under_way / "half").write_text("x")
    experiment = resolve.load(str(file))
    place = Workdir(tmp_path / "w", experiment.run.corpus_dir)
    assert predict.load_params(experiment, place)[1] == 22
    # Orbax clears up in the background: what a writer would have removed is gone by then.
    time.sleep(1.5)
    assert (under_way / "half").exists()
    with Checkpoints(place.checkpoints, 3, "write"):
        time.sleep(1.5)
    assert not under_way.exists()


def test_another_corpus_under_a_run_is_refused(text, tmp_path):
    _, file = text
    pretrain(file, tmp_path / "w", "run.checkpoint_every=5")
    manifest = tmp_path / "w" / "other" / "manifest.json"
    shutil.copytree(text[0] / "corpus", manifest.parent)
    changed = json.loads(manifest.read_text())
    changed["versions"]["numpy"] = "0"
    manifest.write_text(json.dumps(changed))
    with pytest.raises(InputError, match="not the corpus this run was trained on"):
        pretrain(file, tmp_path / "w", f"run.corpus_dir={manifest.parent}")


def test_text_in_brackets_is_shown_as_it_is(capsys):
    Progress(Console(width=80)).say("[SEP] [bold]x[/bold]")
    assert "[SEP] [bold]x[/bold]" in capsys.readouterr().out


def test_lines_survive_a_kill_in_the_middle_of_one(tmp_path):
    from etils import epath

    lines = metrics.Lines(epath.Path(tmp_path / "m.jsonl"))
    for number in (1, 2, 3):
        lines.append({"step": number, "x": 0.1})
    with open(tmp_path / "m.jsonl", "a") as file:
        file.write('{"step": 4, "x"')
    assert [line["step"] for line in lines.read()] == [1, 2, 3]
    lines.forget_after(2)
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "x": 0.1}\n{"step": 2, "x": 0.1}\n'


def test_phase_of_a_step(text):
    experiment = resolve.load(str(text[1]))
    assert [runner.phase_of(experiment, n) for n in (0, 13, 14, 21)] == [
        (0, 0),
        (0, 0),
        (1, 14),
        (1, 14),
    ]
    with pytest.raises(ValueError):
        runner.phase_of(experiment, 22)
