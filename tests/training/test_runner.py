"""What the loop does beside the steps."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
from etils import epath
from rich.console import Console
from small_run import pretrain, write_text

from bert_jax import config, loaded
from bert_jax.config import Run
from bert_jax.data import batches, plans, stream
from bert_jax.errors import InputError, Unavailable
from bert_jax.model import losses
from bert_jax.storage.workdir import Workdir, sealed
from bert_jax.text import tokenizer
from bert_jax.training import environment as environment_lib
from bert_jax.training import evaluators, session, step
from bert_jax.training import lines as lines_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.job import Evaluator, PhaseBatches
from bert_jax.training.pretraining import Prepared
from bert_jax.training.progress import Clock, Progress
from bert_jax.training.runner import Trainer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    return folder, write_text(folder)


@pytest.fixture(scope="module")
def undisturbed(text):
    """A finished run."""
    folder, file = text
    assert pretrain(file, folder / "undisturbed")[0] == "finished"
    return folder / "undisturbed"


@pytest.fixture
def finished(undisturbed, tmp_path):
    """A copy of it."""
    shutil.copytree(undisturbed, tmp_path / "w")
    return tmp_path / "w"


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
    # Beside the metrics the worst step, and two counters of the state.
    window = len(losses.names("mlm_nsp")) + len(step.OWN_METRICS) + 3
    assert all(in_phase[i] - in_phase[i - 1] == window for i in steps_with_reads)


def test_saved_steps_are_the_newest_the_best_and_every_so_many(text, tmp_path, monkeypatch):
    """The best one by masked LM as measured when it was saved, also after another start."""
    _, file = text
    found = evaluators.evaluate
    calls, noise = iter([9.0, 3.0, 4.0, 5.0, 6.0]), itertools.count()

    def scripted(*args):
        return found(*args) | {"masked_lm_loss": next(calls), "loss": 9.0 - next(noise)}

    monkeypatch.setattr(evaluators, "evaluate", scripted)
    often = ("run.checkpoint_every=3", "run.eval_every=6", "run.keep_checkpoints=2")
    pretrain(file, tmp_path / "w", *often, "run.keep_every=9")
    kept = {path.name for path in (tmp_path / "w" / "checkpoints").iterdir()}
    assert kept == {"9", "12", "18", "21", "22"}
    with monkeypatch.context() as patch:
        patch.setattr(evaluators, "evaluate", lambda *args: found(*args) | {"masked_lm_loss": 4.0})
        pretrain(file, tmp_path / "w", *often, "phases.1.steps=12", length="extend")
    kept = {path.name for path in (tmp_path / "w" / "checkpoints").iterdir()}
    assert kept == {"12", "24", "26"}


def test_reading_a_run_leaves_a_save_under_way_alone(text, finished):
    _, file = text
    under_way = finished / "checkpoints" / "99.orbax-checkpoint-tmp"
    under_way.mkdir()
    (under_way / "half").write_text("x")
    experiment = config.load(str(file))
    place = Workdir(finished, experiment.run.corpus_dir)
    mesh = mesh_lib.make_mesh(experiment.parallelism)
    assert loaded.load_params(experiment, place, Prepared.open(place.corpus), mesh)[1] == 22
    # Orbax clears up in the background: what a writer would have removed is gone by then.
    time.sleep(1.5)
    assert (under_way / "half").exists()
    with Checkpoints(place.checkpoints, Run(), "write"):
        time.sleep(1.5)
    assert not under_way.exists()


def test_another_corpus_under_a_run_is_refused(text, finished):
    _, file = text
    manifest = finished / "other" / "manifest.json"
    shutil.copytree(text[0] / "corpus", manifest.parent)
    changed = json.loads(manifest.read_text())
    changed["versions"]["numpy"] = "0"
    manifest.write_text(json.dumps(sealed(changed)))
    with pytest.raises(InputError, match="not the corpus this run was trained on"):
        pretrain(file, finished, f"run.corpus_dir={manifest.parent}")


@pytest.mark.parametrize(
    "change",
    [
        "manifest",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("stream", "touch", "removed")),
    ],
)
def test_a_corpus_that_changes_under_a_running_run_is_named(
    change, text, undisturbed, tmp_path, monkeypatch
):
    """At the next save, which is not made; a file that was only written anew is no change."""
    folder, file = text
    shutil.copytree(folder / "corpus", tmp_path / "corpus")
    ids = tmp_path / "corpus" / "stream" / "train" / "ids.bin"
    good = batches.TrainBatches.batch

    def batch(self, number, rows):
        if number == 10 and self.rows_per_epoch:  # some steps ahead
            monkeypatch.undo()
            if change == "manifest":
                path = tmp_path / "corpus" / "manifest.json"
                path.write_text(path.read_text().replace('"keep"', '"drop"'))
            elif change == "stream":
                content = bytearray(ids.read_bytes())
                content[7] ^= 1
                ids.write_bytes(content)
            elif change == "touch":
                os.utime(ids)
            else:
                shutil.rmtree(tmp_path / "corpus")
        return good(self, number, rows)

    monkeypatch.setattr(batches.TrainBatches, "batch", batch)
    run = (file, tmp_path / "w", f"run.corpus_dir={tmp_path / 'corpus'}")
    if change == "touch":
        assert pretrain(*run)[0] == "finished"
        return
    with pytest.raises(InputError, match=r"corpus.*(changed|damaged|no prepared corpus)"):
        pretrain(*run)
    assert {p.name for p in (tmp_path / "w" / "checkpoints").iterdir()} <= {"4", "8"}
    shutil.rmtree(tmp_path / "corpus", ignore_errors=True)
    shutil.copytree(folder / "corpus", tmp_path / "corpus")
    assert pretrain(*run)[0] == "finished"
    ours, theirs = (workdir / "metrics.jsonl" for workdir in (tmp_path / "w", undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()


def test_text_in_brackets_is_shown_as_it_is(capsys):
    Progress(Console(width=80)).say("[SEP] [bold]x[/bold]")
    assert "[SEP] [bold]x[/bold]" in capsys.readouterr().out


def test_lines_survive_a_kill_in_the_middle_of_one(tmp_path):
    lines = lines_lib.Lines(epath.Path(tmp_path / "m.jsonl"))
    for number in (1, 2, 3):
        lines.append({"step": number, "x": 0.1})
    with open(tmp_path / "m.jsonl", "a") as file:
        file.write('{"step": 4, "x"')
    assert [line["step"] for line in lines.read()] == [1, 2, 3]
    lines.forget_after(2)
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "x": 0.1}\n{"step": 2, "x": 0.1}\n'


def test_phase_of_a_step(text):
    experiment = config.load(str(text[1]))
    assert [experiment.phase_at(n) for n in (0, 13, 14, 21)] == [
        (0, 0),
        (0, 0),
        (1, 14),
        (1, 14),
    ]
    with pytest.raises(ValueError):
        experiment.phase_at(22)


def test_one_bad_step_is_skipped_whatever_the_log_interval(text, tmp_path, monkeypatch):
    """Its line says so and has no loss; the run goes on."""
    _, file = text
    good = batches.TrainBatches.batch

    def poisoned(self, number, rows):
        batch = good(self, number, rows)
        if number == 4 and self.rows_per_epoch and batch["input_ids"].shape[1] == 16:
            batch["masked_lm_weights"][:] = np.nan
        return batch

    monkeypatch.setattr(batches.TrainBatches, "batch", poisoned)
    outcome, shown = pretrain(file, tmp_path / "w", "run.log_every=1")
    assert outcome == "finished" and "100% of steps skipped" in shown
    lines = lines_lib.Lines(Workdir(tmp_path / "w").metrics).read()
    bad = [line for line in lines if line.get("bad_steps")]
    assert [line["step"] for line in bad] == [5] and "loss" not in bad[0]


def test_a_refused_resume_leaves_the_run_s_config(text, finished, tmp_path):
    _, file = text
    before = (finished / "experiment.json").read_bytes()
    other = tmp_path / "other"
    shutil.copytree(text[0] / "corpus", other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(sealed(manifest | {"documents_repeated": 9})))
    with pytest.raises(InputError):
        pretrain(file, finished, f"run.corpus_dir={other}")
    assert (finished / "experiment.json").read_bytes() == before


def test_the_checkpoint_knows_its_claim(text, finished):
    """Without experiment.json too: another seed must not go on from it."""
    _, file = text
    (finished / "experiment.json").unlink()
    with pytest.raises(InputError, match="seed: 0 -> 5"):
        pretrain(file, finished, "seed=5")


def test_a_finished_run_without_its_lines_is_still_finished(text, finished):
    _, file = text
    (finished / "metrics.jsonl").unlink()
    outcome, shown = pretrain(file, finished)
    assert outcome == "finished" and "finished: step 22\n" in shown
    assert "metrics.jsonl: " in shown and "predictions.jsonl: " not in shown


def test_a_full_disk_under_a_checkpoint_is_named(text, tmp_path, monkeypatch):
    """As tensorstore reports it, a ValueError from below Orbax."""
    folder = tmp_path / "checkpoints"
    with (
        pytest.raises(Unavailable, match="the disk is full"),
        Checkpoints(epath.Path(folder), Run(), "write") as saved,
    ):

        def full(*_, **__):
            raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")

        monkeypatch.setattr(saved._checkpointer, "save_async", full)
        saved.save(1, {"x": jax.numpy.zeros(3)}, {})


def test_a_line_cut_off_in_timings_is_not_glued_to_the_next(text, finished):
    _, file = text
    timings = finished / "timings.jsonl"
    with timings.open("a") as out:
        out.write('{"step": 22, "ti')
    shutil.rmtree(finished / "checkpoints" / "22")
    pretrain(file, finished)
    assert lines_lib.Lines(epath.Path(timings)).read()[-1]["step"] == 22


@pytest.mark.long
def test_a_reader_that_leaves_does_not_end_the_run(text, tmp_path):
    _, file = text
    run = f"{sys.executable} -m bert_jax.cli pretrain {file} --workdir {tmp_path / 'w'}"
    command = f"{run} | head -2 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n", done.stderr
    assert (tmp_path / "w" / "checkpoints" / "22").exists()


def test_watched_sentences_fit_the_model():
    """None is longer than the position table, [CLS] and [SEP] counted."""
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "##s"]
    sentences = [[5] * n for n in (8, 9, 12, 20)]
    held_out = stream.from_documents([sentences] * 6)
    tok = tokenizer.WordPiece(vocab, "uncased")
    lengths = {
        most: {len(s.ids) for s in evaluators.held_out_sentences(held_out, tok, most)}
        for most in (7, 9, 100)
    }
    assert lengths[7] == set()
    assert lengths[9] == {9} or lengths[9] <= {8, 9}
    assert max(lengths[100]) > 9


def test_programs_of_environments_unused_for_a_month_go(tmp_path):
    now, day = time.time(), 24 * 3600
    ages = {"0" * 16: [40, 31], "1" * 16: [40, 29], "2" * 16: [40], "corpora": [40]}
    for name, days in ages.items():
        (tmp_path / name).mkdir()
        for number, age in enumerate(days):
            (tmp_path / name / str(number)).touch()
            os.utime(tmp_path / name / str(number), (now - age * day,) * 2)
    environment_lib.forget_old_environments(epath.Path(tmp_path), ours="2" * 16)
    assert {path.name for path in tmp_path.iterdir()} == {"1" * 16, "2" * 16, "corpora"}


def test_every_so_many_steps_one_is_checked(text, tmp_path, monkeypatch):
    """By their number, so that a run that goes on checks the same ones."""
    _, file = text
    with pytest.raises(InputError, match="check_every=4: only TPUs can check themselves"):
        pretrain(file, tmp_path / "w", "run.check_every=4")
    made, checked = step.make_train_step, []

    def make(*args):
        *usual, options = args if len(args) == 7 else (*args, ())
        train_step = made(*usual)  # no TPU's compiler is here

        def noting(state, *rest):
            checked.extend([int(state["step"])] * (("xla_tpu_enable_sdc_checker", True) in options))
            return train_step(state, *rest)

        return noting

    monkeypatch.setattr(step, "make_train_step", make)
    monkeypatch.setattr(session, "_require_checkable", lambda run, mesh: None)
    assert pretrain(file, tmp_path / "w", "run.check_every=4")[0] == "finished"
    assert checked == [0, 4, 8, 12, 16, 20]


# --- Plans of large corpora --------------------------------------------------------------------


def test_a_stop_waits_for_no_plan(text, undisturbed, tmp_path, monkeypatch):
    """Nor does an exit: what plans is ended, and the next start plans anew."""
    _, file = text
    start, makers = subprocess.Popen, []

    def slow(command, **named):
        makers.append(start([sys.executable, "-c", "import time; time.sleep(100)"], **named))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return makers[-1]

    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(plans, "_IN_MEMORY", 0)
    monkeypatch.setattr(plans.subprocess, "Popen", slow)
    assert pretrain(file, tmp_path / "w")[0] == "stopped"
    (maker,) = makers
    assert maker.returncode == -signal.SIGKILL
    monkeypatch.setattr(plans.subprocess, "Popen", start)
    assert pretrain(file, tmp_path / "w")[0] == "finished"
    one, other = (workdir / "metrics.jsonl" for workdir in (tmp_path / "w", undisturbed))
    assert one.read_bytes() == other.read_bytes()


def test_waiting_for_a_plan_is_no_hang():
    class Recorder:
        requested = False

        def __init__(self):
            self.calls = []

        def pause(self):
            self.calls.append("pause")

        def reset(self, times=1):
            self.calls.append("reset")

        def ready(self, step):
            self.calls.append(f"ready {step}")
            return len(self.calls) > 4

    seen = Recorder()
    trainer = Trainer.__new__(Trainer)
    trainer.done, trainer.watchdog = 17, seen
    phase = PhaseBatches(1, 10, 20, 8, None, seen.ready)
    assert trainer._await_rows(phase, seen)
    assert seen.calls == ["ready 7", "pause", "ready 7", "ready 7", "ready 7", "reset"]
    assert trainer._await_rows(phase, seen)
    assert seen.calls[6:] == ["ready 7"]


@pytest.mark.parametrize(("bad", "in_vain"), [(0, True), (3, False)])
def test_a_state_that_stands_still_over_bad_steps_is_no_reason_to_end(bad, in_vain):
    """Its held-out loss stays what it was; what follows is a roll-back."""
    trainer = Trainer.__new__(Trainer)  # as far as an evaluation needs it
    trainer.job = types.SimpleNamespace(patience=2, total_steps=99, evaluators=[])
    trainer.state = {"params": {}, "bad_in_a_row": np.int32(bad)}
    trainer.clock, metrics = Clock(None), []
    trainer.lines = types.SimpleNamespace(of=lambda file: metrics)
    trainer.pending = None
    trainer.held_out, said = [(10, 1.0)], []
    trainer.say = said.append
    asked = Evaluator("scores", lambda done: True, lambda params: {"loss": 1.0}, lambda line: "")
    for trainer.done in (20, 30):
        trainer._evaluate([asked])
    assert len(metrics) == 2
    assert bool(said) == trainer._is_whole == in_vain
