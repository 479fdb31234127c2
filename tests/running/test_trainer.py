"""What the loop does beside the steps."""

import contextlib
import json
import os
import pathlib
import shutil
import types
from unittest import mock

import jax
import numpy as np
import pytest
from etils import epath
from rich.console import Console
from small_run import hooked, pretrain, saves_in

from bert_jax import config
from bert_jax.checkpoints.load import Checkpoints
from bert_jax.config import Run
from bert_jax.data import batches, stream
from bert_jax.errors import InputError, Unavailable
from bert_jax.model import losses
from bert_jax.pretraining import evaluators, prepared_corpus
from bert_jax.running import session, start
from bert_jax.running.job import Evaluator, PhaseBatches
from bert_jax.running.progress import Clock, Progress
from bert_jax.running.start import Divergence, RunFailure, RunState
from bert_jax.running.trainer import Trainer
from bert_jax.storage.json_lines import JsonLines
from bert_jax.text import tokenizer
from bert_jax.training import step


@pytest.fixture
def file(copy_of_run):
    """An experiment, in a folder that may be changed."""
    return pathlib.Path("small.py")


@pytest.fixture
def undisturbed(finished_run):
    return finished_run / "run"


def test_a_run_that_is_stopped_before_its_first_step_has_saved_nothing(file, monkeypatch):
    monkeypatch.setattr(Trainer, "_train", lambda self: None)
    assert "stopped at step 0, nothing to save; run" in pretrain(file, pathlib.Path("w"))[1]


@pytest.mark.long
def test_the_host_reads_the_device_once_a_log_interval(file, tmp_path, monkeypatch):
    """And one step late: the read of step 3 happens when step 4 is under way."""
    reads, reads_before_step = [], []
    fetch, array = jax._src.array.ArrayImpl._value.fget, jax._src.array.ArrayImpl

    def counted(self):
        reads.append(self.shape)
        return fetch(self)

    def count_reads(done, batch):
        reads_before_step.append(len(reads))
        return batch

    monkeypatch.setattr(array, "_value", property(counted))
    with hooked(change_batch=count_reads):
        pretrain(file, tmp_path / "w", "run.eval_every=100", "run.checkpoint_every=100")
    in_phase = reads_before_step[:14]
    steps_with_reads = [i for i in range(1, 14) if in_phase[i] > in_phase[i - 1]]
    # Batch i, counted from 0, is made once steps 1 to i are dispatched; lines are due at 3, 6, ...
    assert steps_with_reads == [4, 7, 10, 13]
    # Besides the metrics: the step with the highest loss, and two counters of the state.
    reads_per_line = len(losses.names("mlm_nsp")) + len(step.OWN_METRICS) + 3
    assert all(in_phase[i] - in_phase[i - 1] == reads_per_line for i in steps_with_reads)


def test_a_checkpoint_s_loss_is_that_of_masked_lm(undisturbed):
    """Of pairs it would decide by the noise of a few documents."""
    lines = [json.loads(line) for line in (undisturbed / "metrics.jsonl").open()]
    (scored,) = (x for x in lines if x["kind"] == "evaluation" and x["step"] == 22)
    saved = Checkpoints(epath.Path(undisturbed / "checkpoints"))
    losses = {step: saved.metadata(step)["held_out_loss"] for step in saved.steps}
    assert losses == {22: scored["masked_lm_loss"], 20: None, 16: None}
    right = scored["next_sentence_accuracy"]
    error = (right * (1 - right) / scored["rows"]) ** 0.5
    assert scored["next_sentence_error"] == pytest.approx(error)


def test_a_file_that_vanishes_between_listing_and_stat_is_named(copy_of_run):
    prepared = prepared_corpus.PreparedCorpus.open(epath.Path(copy_of_run / "corpus"))
    ids = copy_of_run / "corpus" / "stream" / "train" / "ids.bin"
    experiment = config.load("small.py")
    prepared.train_batches(experiment, 0)
    ids.rename(copy_of_run / "ids.bin")
    ids.symlink_to("nowhere")  # is listed, and is not there
    with pytest.raises(InputError, match=r"ids\.bin"):
        prepared.require_unchanged()
    ids.unlink()
    (copy_of_run / "ids.bin").rename(ids)
    # Another phase keeps the stamps, else a change just before it would go unnoticed.
    known = prepared.stamps.copy()
    os.utime(ids)
    prepared.train_batches(experiment, 1)
    assert prepared.stamps == known


@pytest.mark.long
@pytest.mark.parametrize("change", [pytest.param("manifest", marks=pytest.mark.long), "stream"])
def test_a_corpus_that_changes_under_a_running_run_is_named(change, file, copy_of_run, undisturbed):
    """At the next save, which is not made; what was only written again is no change."""
    folder = copy_of_run
    shutil.copytree(folder / "corpus", folder / "kept")
    ids = folder / "corpus" / "stream" / "train" / "ids.bin"
    good = batches.TrainBatches.batch

    def batch(self, number, rows):
        if number == 3:
            os.utime(ids)
        if number == 10:  # some steps ahead
            patch.undo()
            if change == "manifest":
                path = folder / "corpus" / "manifest.json"
                path.write_text(path.read_text().replace('"keep"', '"drop"'))
            else:
                content = bytearray(ids.read_bytes())
                content[7] ^= 1
                ids.write_bytes(content)
        return good(self, number, rows)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(InputError, match=r"corpus.*(changed|damaged)"),
    ):
        patch.setattr(batches.TrainBatches, "batch", batch)
        pretrain(file, folder / "w")
    assert {p.name for p in (folder / "w" / "checkpoints").iterdir()} <= {"4", "8"}
    shutil.rmtree(folder / "corpus")
    (folder / "kept").rename(folder / "corpus")
    assert pretrain(file, folder / "w")[0] == "finished"
    ours, theirs = (workdir / "metrics.jsonl" for workdir in (folder / "w", undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()


def test_text_in_brackets_is_shown_as_it_is(capsys):
    Progress(Console(width=80)).report("[SEP] [bold]x[/bold]")
    assert "[SEP] [bold]x[/bold]" in capsys.readouterr().out


def test_lines_survive_a_kill_in_the_middle_of_one(tmp_path):
    lines = JsonLines(epath.Path(tmp_path / "m.jsonl"))
    for number in (1, 2, 3):
        lines.append({"step": number, "x": 0.1})
    with open(tmp_path / "m.jsonl", "a") as file:
        file.write('{"step": 4, "x"')
    assert [line["step"] for line in lines.read()] == [1, 2, 3]
    lines.delete_after(2)
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "x": 0.1}\n{"step": 2, "x": 0.1}\n'


def test_the_checkpoint_knows_its_experiment(file, run):
    """Without experiment.json too: another seed must not go on from it."""
    (run / "experiment.json").unlink()
    with pytest.raises(InputError, match="seed: 0 -> 5"):
        pretrain(file, run, "seed=5")


def test_a_finished_run_without_its_lines_is_still_finished(file, run):
    (run / "metrics.jsonl").unlink()
    outcome, shown = pretrain(file, run)
    assert outcome == "finished" and "finished: step 22\n" in shown
    assert "metrics.jsonl: " in shown and "predictions.jsonl: " not in shown


def test_a_full_disk_under_a_checkpoint_is_named(tmp_path, monkeypatch):
    """As tensorstore reports it, a ValueError from below Orbax."""
    with (
        pytest.raises(Unavailable, match="the disk is full"),
        saves_in(tmp_path) as saved,
    ):

        def full(*_, **__):
            raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")

        monkeypatch.setattr(saved._open_orbax(), "save_async", full)
        saved.save(1, {"x": jax.numpy.zeros(3)}, {})


def test_a_line_cut_off_in_timings_is_not_glued_to_the_next(file, run):
    timings = run / "timings.jsonl"
    with timings.open("a") as out:
        out.write('{"step": 22, "ti')
    shutil.rmtree(run / "checkpoints" / "22")
    pretrain(file, run)
    assert JsonLines(epath.Path(timings)).read()[-1]["step"] == 22


def test_watched_sentences_fit_the_model():
    """None has more tokens than the limit, in which [CLS] and [SEP] do not count."""
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "##s"]
    sentences = [[5] * n for n in (8, 9, 12, 20)]
    held_out = stream.make_stream([sentences] * 6)
    tok = tokenizer.WordPiece(vocab, "uncased")
    lengths = {
        most: {len(s.ids) for s in evaluators.mask_sentences(held_out, tok, most)}
        for most in (7, 9, 100)
    }
    assert lengths[7] == set()
    assert lengths[9] == {9} or lengths[9] <= {8, 9}  # or none: the search begins in the middle
    assert max(lengths[100]) > 9


@pytest.mark.long
def test_every_so_many_steps_one_is_checked(file, tmp_path, monkeypatch):
    """By their number, so that a run that goes on checks the same ones."""
    with pytest.raises(InputError, match="check_every=4: only TPUs can check themselves"):
        pretrain(file, tmp_path / "w", "run.check_every=4")
    made, checked = step.make_train_step, []

    def make(*args):
        *usual, options = args if len(args) == 3 else (*args, ())
        train_step = made(*usual)  # no TPU's compiler is here

        def noting(state, *rest):
            checked.extend([int(state["step"])] * (("xla_tpu_enable_sdc_checker", True) in options))
            return train_step(state, *rest)

        return noting

    monkeypatch.setattr(step, "make_train_step", make)
    monkeypatch.setattr(session, "_require_checkable", lambda run, mesh: None)
    assert pretrain(file, tmp_path / "w", "run.check_every=4")[0] == "finished"
    assert checked == [0, 4, 8, 12, 16, 20]


# --- Waiting for a plan, saves after bad steps, early stops -------------------------------------


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
    trainer.state = types.SimpleNamespace(done=17)
    trainer.context = types.SimpleNamespace(watchdog=seen, stop=seen)
    phase = PhaseBatches(1, 10, 20, 8, None, None, seen.ready)
    assert trainer._await_plan(phase)
    assert seen.calls == ["ready 7", "pause", "ready 7", "ready 7", "ready 7", "reset"]
    assert trainer._await_plan(phase)
    assert seen.calls[6:] == ["ready 7"]


@pytest.mark.parametrize(
    ("done", "bad", "is_saved"), [(20, 0, True), (20, 2, False), (22, 0, True), (22, 2, True)]
)
def test_a_state_after_bad_steps_is_saved_only_at_the_end(done, bad, is_saved):
    """A bad step has no finite loss; until the end a roll-back needs a state from before it."""
    trainer = Trainer.__new__(Trainer)  # as far as a save needs it
    trainer.job, saves = mock.MagicMock(), mock.MagicMock()
    trainer.job.training = mock.Mock(patience=0, total_steps=22)
    trainer.job.experiment = config.load("experiments/tiny.py")
    trainer.state = RunState(done, {"bad_in_a_row": np.int32(bad)}, {}, (), "", 0, [])
    trainer.state.evaluation = {"step": 18, "loss": 1.0}
    trainer.log, trainer.context = mock.Mock(), mock.Mock(saver=saves)
    trainer._save()
    assert saves.save.called == is_saved and saves.set_unsaved_reason.called != is_saved
    if is_saved:  # the evaluation is of another step
        assert saves.save.call_args.args[3] is None


@pytest.mark.parametrize(
    ("excluded", "policy", "fails"),
    [(54, "roll_back", False), (55, "roll_back", True), (0, "stop", True)],
)
def test_a_run_fails_if_more_steps_are_bad_than_a_state_can_exclude(excluded, policy, fails):
    """At most 64; nine bad steps take ten, as the step before them is excluded, too."""
    experiment = mock.Mock(optimizer=mock.Mock(after_bad_steps=policy))
    with pytest.raises(RunFailure) if fails else contextlib.nullcontext():
        start.require_excludable(Divergence(range(100, 109)), range(excluded), experiment)


@pytest.mark.parametrize(("bad", "in_vain"), [(0, True), (3, False)])
def test_a_state_that_stands_still_over_bad_steps_is_no_reason_to_end(bad, in_vain):
    """Its held-out loss stays what it was; what follows is a roll-back."""
    trainer = Trainer.__new__(Trainer)  # as far as an evaluation needs it
    said, arrays = [], {"params": {}, "bad_in_a_row": np.int32(bad)}
    training = types.SimpleNamespace(patience=2, total_steps=99, evaluators=[])
    trainer.job = types.SimpleNamespace(training=training, report=said.append)
    trainer.state = RunState(0, arrays, {}, (), "", 0, [(10, 1.0)])
    trainer.log, trainer.context = mock.Mock(), mock.Mock(clock=Clock())
    asked = Evaluator("scores", lambda done: True, lambda *of: {"loss": 1.0}, lambda line: "")
    for trainer.state.done in (20, 30):
        trainer._evaluate([asked])
    assert trainer.log.lines.append.call_count == 2
    assert bool(said) == trainer._is_finished == in_vain


def test_an_early_stop_runs_what_is_due_at_the_end():
    """The line of its steps is written, too; neither would come later. Step 30 is to be saved."""
    trainer = Trainer.__new__(Trainer)  # as far as the end of a step needs it
    arrays = {"step": np.int32(30), "params": {}, "bad_in_a_row": np.int32(0)}
    evaluators = [
        Evaluator("scores", lambda done: True, lambda *of: {"loss": 1.0}, lambda line: ""),
        Evaluator("mistakes", lambda done: done == 99, lambda *of: {"wrong": 1}, lambda line: ""),
    ]
    training = types.SimpleNamespace(patience=2, total_steps=99, evaluators=evaluators)
    experiment = mock.Mock(run=Run(log_every=7, checkpoint_every=50, keep_steps=(30,)))
    trainer.job = mock.Mock(training=training, experiment=experiment)
    trainer.state = RunState(30, arrays, {}, (), "", 0, [(10, 1.0), (20, 1.0)])
    trainer.log, trainer.context = mock.Mock(), mock.Mock(clock=Clock())
    trainer._save = mock.Mock()
    trainer._finish_step(mock.Mock(ends_window=False))
    kinds = [call.args[0]["kind"] for call in trainer.log.lines.append.call_args_list]
    assert kinds == ["scores", "mistakes"]
    assert trainer.log.end_window.call_count == 1
    assert trainer._save.call_count == 1
