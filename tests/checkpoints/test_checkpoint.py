"""A checkpoint is what was saved, or it is named, put aside, and the one before is used."""

import errno
import json
import pathlib
import shutil
import time
import types

import jax
import jax.numpy as jnp
import pytest
from broken import asked, fails, said, tree  # the first three run a command
from etils import epath
from orbax.checkpoint._src.futures import synchronization
from small_run import assert_same_run, hooked, pretrain, saves_in

from bert_jax.checkpoints import layout, load, save
from bert_jax.checkpoints.load import Checkpoints, Damaged
from bert_jax.checkpoints.save import Saver
from bert_jax.config import Run
from bert_jax.errors import InputError, Unavailable
from bert_jax.pretraining import loaded_model
from bert_jax.storage import retry
from bert_jax.storage.mirror import open_workdir
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.checksums import checksums
from bert_jax.training.objective import Pretraining
from bert_jax.training.step import abstract_state


def again(run: pathlib.Path) -> tuple[str, str]:
    return pretrain(pathlib.Path("small.py"), run)


def names(run: pathlib.Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


KEPT = {"16", "20", "22"}


def empty(step: pathlib.Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def no_metadata(step: pathlib.Path) -> None:
    (step / "_CHECKPOINT_METADATA").unlink()


def cut_off(step: pathlib.Path) -> None:
    for path in step.rglob("*"):
        if path.is_file() and "metadata" not in path.name.lower():
            path.write_bytes(path.read_bytes()[:10])


def no_arrays(step: pathlib.Path) -> None:
    shutil.rmtree(step / "state")


def flipped_bit(step: pathlib.Path) -> None:
    """In the middle of the largest file, which holds arrays."""
    path = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def other_window(step: pathlib.Path) -> None:
    """A sum of the metrics that would go into the next line."""
    path = step / "_CHECKPOINT_METADATA"
    found = json.loads(path.read_text())
    found["custom_metadata"]["window"]["masked_lm_loss"][0] += 1
    path.write_text(json.dumps(found))


def other_step(step: pathlib.Path) -> None:
    """The checkpoint of another step under this one's name."""
    shutil.rmtree(step)
    shutil.copytree(step.parent / "16", step)


def orbax_refuses(step: pathlib.Path) -> None:
    """Its own part of the metadata, which it reads of all checkpoints where it is opened."""
    path = step / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": 5}))


DAMAGES = [
    *(orbax_refuses, flipped_bit, cut_off, empty, no_metadata, no_arrays, other_window, other_step)
]


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_read(damage, run):
    damage(run / "checkpoints" / "22")
    found = newest(run)
    assert found.step == 20 and "checkpoints/22: damaged, cannot be" in found.damaged[22]
    assert names(run) == KEPT


@pytest.mark.long
def test_a_run_puts_a_damaged_checkpoint_aside_and_comes_to_the_same_bits(finished_run, run):
    """Also an older one that Orbax cannot read, and that would keep it from opening any."""
    flipped_bit(run / "checkpoints" / "22")
    orbax_refuses(run / "checkpoints" / "16")
    outcome, shown = again(run)
    assert outcome == "finished" and "now damaged-22, resuming from step 20" in shown
    assert "now damaged-16" in shown
    assert {"damaged-22", "damaged-16", "22", "20"} <= names(run)
    assert_same_run(run, finished_run / "run")


def test_readers_use_the_one_before_and_touch_nothing(run, capsys):
    cut_off(run / "checkpoints" / "22")
    other_window(run / "checkpoints" / "20")
    trained = loaded_model.LoadedModel.of(open_workdir(run))
    assert trained.step == 16
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("step 16 is used instead" in line for line in said)
    assert names(run) == KEPT


@pytest.mark.long
def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(run):
    """Of the newest it is said; without any the run stops as it is."""
    lines = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints" / "22")
    outcome, shown = again(run)
    assert outcome == "finished" and f"{run}/checkpoints/22: damaged" in shown
    assert (run / "metrics.jsonl").read_bytes() == lines
    shutil.rmtree(run / "checkpoints")
    before = tree(run)
    with pytest.raises(InputError, match=r"checkpoints/22: .*another --workdir"):
        again(run)
    assert tree(run) == before


@pytest.mark.long
def test_what_is_whole_is_known_before_the_next_save(copy_of_run, monkeypatch):
    """So that a kill in between leaves the step of the newest."""
    seen, look = {}, Saver.poll

    def watch(step, path):
        seen[step] = json.loads((copy_of_run / "other" / "saved.json").read_text())["step"]

    def late(self):
        if self._is_saving:
            self._orbax.wait()
        look(self)

    monkeypatch.setattr(Saver, "poll", late)
    with hooked(on_save=watch):
        pretrain(pathlib.Path("small.py"), copy_of_run / "other", "run.checkpoint_every=10")
    assert seen == {10: 0, 20: 10, 22: 20}


def test_of_two_damaged_ones_of_a_step_both_are_kept(run):
    with saves_in(run) as saved:
        assert saved.checkpoints.folder.rename_damaged(22) == "damaged-22"
        (run / "checkpoints" / "22").mkdir()
        assert saved.checkpoints.folder.rename_damaged(22) == "damaged-22-1"
    assert names(run) == {"16", "20", "damaged-22", "damaged-22-1"}


def test_a_kill_while_newer_ones_are_removed_leaves_no_half_one(run, monkeypatch):
    def killed(path, missing_ok=False):
        if path.exists():
            next(f for f in pathlib.Path(path).rglob("*") if f.is_file()).unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(type(epath.Path(run)), "rmtree", killed)

    def sent():  # before anything is gone; else the next start would miss it, and end there
        assert json.loads((run / "saved.json").read_text())["step"] == 0
        assert saved.checkpoints.steps == [22, 20, 16]
        calls.append("sent")

    calls = []
    with pytest.raises(KeyboardInterrupt), saves_in(run) as saved:
        saved.delete_after(0, sent)
    monkeypatch.undo()
    assert calls == ["sent"]
    with saves_in(run) as saved:
        assert saved.checkpoints.steps == [20, 16] and not saved.checkpoints.unreadable()
        saved.delete_after(0, lambda: None)
        assert not saved.checkpoints.steps
    assert not list((run / "checkpoints").glob("*"))


def test_one_that_goes_while_all_are_looked_at_is_not_damaged(run, monkeypatch):
    read = load.Checkpoints.metadata

    def removed(self, step):
        shutil.rmtree(run / "checkpoints" / f"{step}")  # as a run at work does
        return read(self, step)

    monkeypatch.setattr(load.Checkpoints, "metadata", removed)
    assert load.Checkpoints(epath.Path(run / "checkpoints")).unreadable() == {}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("PERMISSION_DENIED: Error opening state"), "may not be used"),
        (PermissionError(errno.EACCES, "Permission denied"), "checkpoints"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "too little memory"),
    ],
)
def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_damaged(error, words, run, monkeypatch):
    """Nor is one for which there is too little memory."""
    monkeypatch.setattr(load.ocp, "load", failing(error))
    with pytest.raises(InputError, match=words) as refused:
        newest(run)
    assert not isinstance(refused.value, Damaged)


def failing(*errors: Exception, then=None):
    """A function that raises the errors in turn, then calls `then`; if None, always the first."""
    left = list(errors)

    def fail(*args, **kwargs):
        if then is None or left:
            raise left.pop(0) if then else errors[0]
        return then(*args, **kwargs)

    return fail


TRANSIENT = [
    OSError(errno.ESTALE, "Stale file handle"),
    TimeoutError(),
    ValueError("UNAVAILABLE: Error reading state: HTTP response code: 503"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=str)
def test_a_transient_fault_while_one_is_read_damages_nothing(error, run, monkeypatch):
    """Of its metadata, of its arrays, and of the list of checkpoints."""
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.01)
    for owner, name in (
        (load.ocp, "load"),
        (load.ocp, "metadata"),
        (layout, "checkpoint_steps"),
    ):
        monkeypatch.setattr(owner, name, failing(error, error, error, then=getattr(owner, name)))
    assert newest(run).step == 22


@pytest.mark.parametrize("name", ["load", "metadata"])
def test_a_read_leaves_the_number_in_names_of_barriers_as_it_is(name, run, monkeypatch):
    """Processes may read, and fail to read, unequally often, and still meet in the next save."""
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.01)
    read = getattr(load.ocp, name)
    faults = [TimeoutError(), TimeoutError()]

    def fail_after(*args, **kwargs):
        done = read(*args, **kwargs)
        if faults:
            raise faults.pop()
        return done

    monkeypatch.setattr(load.ocp, name, fail_after)
    operations = synchronization.OperationIdGenerator
    before = operations.next_operation_id()
    assert newest(run).step == 22 and not faults
    assert operations.get_current_operation_id() == str(before)
    assert operations.next_operation_id() == before + 1


def test_a_storage_that_stays_away_is_unavailable_and_nothing_is_renamed(run, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(
        retry.call_with_retries,
        "__kwdefaults__",
        retry.call_with_retries.__kwdefaults__ | {"seconds": 1},
    )
    monkeypatch.setattr(load.ocp, "load", failing(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(Unavailable, match="out of reach for 1 seconds"):
        again(run)
    assert names(run) == KEPT


def test_a_checkpoint_of_another_format_is_named(run):
    path = run / "checkpoints" / "22" / "_CHECKPOINT_METADATA"
    found = json.loads(path.read_text())
    found["custom_metadata"]["format_version"] = 1
    path.write_text(json.dumps(found))
    with pytest.raises(InputError, match="format_version 1, this version reads 2"):
        again(run)


def test_checksums_are_computed_only_after_all_have_read(run, monkeypatch):
    """Else one that could not read would leave the others waiting in a computation."""
    seen = []

    def agreed(what: str, complaint: str) -> str:
        seen.append(what)
        return "another could not" if what == "22 read" else complaint

    def counted(tree):
        seen.append("checksums")
        return checksums(tree)

    monkeypatch.setattr(load, "checksums", counted)
    assert newest(run, agreed).step == 20
    assert seen == ["22 read", "20 read", "checksums", "20 checked"]


def newest(run: pathlib.Path, *agreed, folder=None) -> load.Restored:
    """Restores the newest whole checkpoint; `agreed` exchanges errors with other processes."""
    experiment = load_experiment(Workdir(run))
    mesh = mesh_lib.one_device()
    abstract = abstract_state(
        Pretraining(experiment.model), experiment.optimizer, experiment.parallelism, mesh
    )
    saved = Checkpoints(folder or epath.Path(run / "checkpoints"))
    return saved.restore_newest(abstract, None, *agreed)  # None: up to the last step


@pytest.mark.long
def test_checkpoints_are_listed_and_verified(run):
    out = said(f"checkpoints {run} --verify").splitlines()
    assert [line.split()[0] for line in out[1:4]] == ["22", "20", "16"]
    assert all(line.split()[1] > "2026" for line in out[1:4])  # the year of the save
    assert out[1].endswith("newest, best") and "finished" in out[4]
    assert not [*run.rglob("array_metadatas")], "they have no checksum, so none is written"
    assert [line.split()[:2] for line in out[5:]] == [["step", f"{n}:"] for n in (22, 20, 16)]

    flipped_bit(run / "checkpoints" / "20")
    other_window(run / "checkpoints" / "16")
    out = said(f"checkpoints {run}").splitlines()
    assert out[3].endswith("damaged") and "damaged" not in out[2]  # which is not read
    code, out, _ = asked(f"checkpoints {run} --verify")
    assert code == 1
    assert "20: damaged" in out.splitlines()[6] and "16: damaged" in out.splitlines()[7]
    fails(f"checkpoints {run}/nowhere", "nowhere")


def test_the_newest_the_best_and_named_steps_are_kept(tmp_path):
    """The best by their losses when they were saved, also after another start."""
    run = Run(keep_checkpoints=2, keep_best=1, keep_every=9, keep_steps=(12,))
    state = {"x": jnp.zeros(3)}
    for steps in ({3: 9.0, 6: 3.0, 9: None}, {12: 4.0, 15: None, 18: 5.0, 20: None, 21: 3.5}):
        with saves_in(tmp_path, run) as saved:
            for step, loss in steps.items():
                saved.save(step, state, {}, loss)
                saved.wait()
    assert saved.checkpoints.steps == [21, 20, 18, 12, 9, 6]


def test_the_newest_from_before_the_last_recompute_check_is_kept():
    """Only a later one may hold what a faulty device computed."""
    retention = save._Retention(Run(keep_checkpoints=2, keep_best=0, replay_every=10))
    saved = [types.SimpleNamespace(step=step) for step in (4, 8, 12, 16, 20)]
    assert retention.should_preserve(saved, context=None) == [False, True, False, True, True]


def test_reading_leaves_a_save_under_way_alone(run):
    """Orbax, opened by a writer, removes it in the background, in less than a second."""
    under_way = run / "checkpoints" / "99.orbax-checkpoint-tmp"
    under_way.mkdir()
    (under_way / "half").write_text("x")
    assert newest(run).step == 22
    time.sleep(1.0)
    assert (under_way / "half").exists()
    with saves_in(run):
        assert not under_way.exists()


@pytest.mark.long
def test_an_older_checkpoint_may_be_asked_for(run):
    saved = Checkpoints(epath.Path(run / "checkpoints"))
    assert [saved.find_step(which) for which in ("20", "16", "best")] == [20, 16, 22]
    for which in ("17", "x"):
        with pytest.raises(InputError, match="it has those of steps 22, 20, 16"):
            saved.find_step(which)
