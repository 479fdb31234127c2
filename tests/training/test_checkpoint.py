"""A checkpoint is what was saved, or it is named, put aside, and the one before is used."""

import errno
import itertools
import json
import pathlib
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from broken import tree
from compare import assert_identical
from etils import epath
from fake_gcs import Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.path import atomicity
from small_run import final_state, pretrain, write_text

from bert_jax import loaded
from bert_jax.config import Run
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import retry
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.training import checkpoint
from bert_jax.training.checkpoint import Checkpoints, Damaged
from bert_jax.training.checksums import checksums
from bert_jax.training.objective import Pretraining


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The experiment file and a finished run, with checkpoints 16, 20 and 22."""
    folder = tmp_path_factory.mktemp("trust")
    file = write_text(folder)
    assert pretrain(file, folder / "run", "run.keep_best=0")[0] == "finished"
    return file, folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy to be damaged."""
    shutil.copytree(finished[1], tmp_path / "run")
    return tmp_path / "run"


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
    orbax_refuses,
    flipped_bit,
    *(
        pytest.param(damage, marks=pytest.mark.long)
        for damage in (cut_off, empty, no_metadata, no_arrays, other_window, other_step)
    ),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage, finished, run):
    file, undisturbed = finished
    damage(run / "checkpoints" / "22")
    outcome, shown = pretrain(file, run, "run.keep_best=0")
    assert outcome == "finished"
    assert "checkpoints/22: damaged, cannot be restored (" in shown
    assert "now damaged-22, going on from step 20" in shown
    assert (run / "checkpoints" / "damaged-22").exists()
    assert (run / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()
    assert_identical(final_state(run)[1], final_state(undisturbed)[1])


def test_readers_use_the_one_before_and_touch_nothing(finished, run, capsys):
    cut_off(run / "checkpoints" / "22")
    other_window(run / "checkpoints" / "20")
    trained = loaded.Loaded.of(epath.Path(run), "params")
    assert trained.step == 16
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("step 16 is used instead" in line for line in said)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"16", "20", "22"}


def test_where_all_are_damaged_nothing_is_begun_anew(finished, run):
    file, _ = finished
    for step in ("16", "20", "22"):
        flipped_bit(run / "checkpoints" / step)
    with pytest.raises(InputError, match=r"(?s)22: damaged.*20: damaged.*16: damaged.*--workdir"):
        pretrain(file, run, "run.keep_best=0")
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"16", "20", "22"}


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(finished, run):
    """Of the newest it is said; without any the run stops as it is."""
    file, _ = finished
    lines = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints" / "22")
    outcome, shown = pretrain(file, run, "run.keep_best=0")
    assert outcome == "finished" and f"{run}/checkpoints/22: damaged" in shown
    assert (run / "metrics.jsonl").read_bytes() == lines
    shutil.rmtree(run / "checkpoints")
    before = tree(run)
    with pytest.raises(InputError, match=r"checkpoints/22: .*another --workdir"):
        pretrain(file, run, "run.keep_best=0")
    assert tree(run) == before


def test_what_is_whole_is_known_before_the_next_save(finished, tmp_path, monkeypatch):
    """So that a kill in between leaves the step of the newest."""
    seen = {}
    save, has_ended = Checkpoints.save, Checkpoints.has_ended

    def watched(self, step, *args):
        seen[step] = json.loads((tmp_path / "run" / "saved.json").read_text())["step"]
        save(self, step, *args)

    def late(self, step):
        self._opened.wait()
        return has_ended(self, step)

    monkeypatch.setattr(Checkpoints, "save", watched)
    monkeypatch.setattr(Checkpoints, "has_ended", late)
    pretrain(finished[0], tmp_path / "run", "run.checkpoint_every=10")
    assert seen == {10: 0, 20: 10, 22: 20}


def test_an_older_one_that_nothing_can_be_said_of_is_put_aside_too(finished, run):
    file, _ = finished
    orbax_refuses(run / "checkpoints" / "16")
    shutil.rmtree(run / "checkpoints" / "22")
    outcome, shown = pretrain(file, run, "run.keep_best=0")
    assert outcome == "finished" and "now damaged-16, going on from step 20" in shown


@pytest.mark.long
def test_of_two_damaged_ones_of_a_step_both_are_kept(finished, run):
    file, _ = finished
    for _ in range(2):
        cut_off(run / "checkpoints" / "22")
        assert pretrain(file, run, "run.keep_best=0")[0] == "finished"
    names = {p.name for p in (run / "checkpoints").iterdir()}
    assert {"damaged-22", "damaged-22-1", "22"} <= names


def test_a_kill_while_newer_ones_are_removed_leaves_no_half_one(run, monkeypatch):
    folder = epath.Path(run / "checkpoints")

    def killed(path, missing_ok=False):
        if path.exists():
            next(f for f in pathlib.Path(path).rglob("*") if f.is_file()).unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(type(folder), "rmtree", killed)
    with pytest.raises(KeyboardInterrupt), Checkpoints(folder, Run(), "write") as saved:
        saved.forget_after(0)
    monkeypatch.undo()
    with Checkpoints(folder, Run(), "write") as saved:
        assert saved.steps == [20, 16] and not saved.unreadable()
        saved.forget_after(0)
        assert not saved.steps
    assert not list((run / "checkpoints").glob("*"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("PERMISSION_DENIED: Error opening state"), "may not be used"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "too little memory"),
    ],
)
def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_damaged(
    error, words, finished, run, monkeypatch
):
    """Nor is one for which there is too little memory."""
    monkeypatch.setattr(checkpoint.ocp, "load", failing(error))
    with pytest.raises(InputError, match=words) as refused:
        newest_state(run)
    assert not isinstance(refused.value, Damaged)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"16", "20", "22"}


def failing(*errors: Exception, then=None):
    """A function that raises these one after the other, and then does what `then` does."""
    left = list(errors)

    def fail(*args, **kwargs):
        if then is None or left:
            raise left.pop(0) if then else errors[0]
        return then(*args, **kwargs)

    return fail


PASSING = [
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.EMFILE, "Too many open files"),
    ConnectionResetError("reset by peer"),
    TimeoutError(),
    ValueError("UNAVAILABLE: Error reading state: HTTP response code: 503"),
    ValueError("RESOURCE_EXHAUSTED: Cannot allocate memory"),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_a_fault_that_passes_while_one_is_read_damages_nothing(error, finished, run, monkeypatch):
    """Of its metadata, of its arrays, and of the list of checkpoints."""
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.01)
    with monkeypatch.context() as patch:
        for owner, name in (
            (checkpoint.ocp, "load"),
            (checkpoint.ocp, "metadata"),
            (checkpoint, "checkpoint_steps"),
        ):
            patch.setattr(owner, name, failing(error, error, error, then=getattr(owner, name)))
        assert newest_state(run)[0] == 22


def test_a_storage_that_stays_away_is_unavailable_and_nothing_is_renamed(
    finished, run, monkeypatch
):
    file, _ = finished
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(retry.again, "__kwdefaults__", retry.again.__kwdefaults__ | {"seconds": 1})
    monkeypatch.setattr(checkpoint.ocp, "load", failing(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(Unavailable, match="out of reach for 1 seconds"):
        pretrain(file, run, "run.keep_best=0")
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"16", "20", "22"}


def now_and_then(function):
    """The function, of whose calls the second and third fail, and the last of a run.

    A run saves six times; where failing calls are made again at once, it calls more often.
    """
    calls = itertools.count(1)

    def fail(*args, **kwargs):
        if next(calls) in (2, 3, 6, 8):
            raise OSError(errno.EIO, "Input/output error")
        return function(*args, **kwargs)

    return fail


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (checkpoint.ocp.training.Checkpointer, "save_async"),
        pytest.param(atomicity, "on_commit_callback", marks=pytest.mark.long),
    ],
)
def test_a_save_that_fails_for_a_while_is_made_up_for(owner, name, finished, tmp_path, monkeypatch):
    """At its beginning, and behind the next steps, where a later one takes its place."""
    file, undisturbed = finished
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(owner, name, now_and_then(getattr(owner, name)))
    outcome, shown = pretrain(file, tmp_path / "w", "run.keep_best=0")
    assert outcome == "finished"
    names = {p.name for p in (tmp_path / "w" / "checkpoints").iterdir()}
    assert "22" in names and all(name.isdecimal() for name in names)
    assert_identical(final_state(tmp_path / "w")[1], final_state(undisturbed)[1])
    lines = (tmp_path / "w" / "metrics.jsonl").read_bytes()
    assert lines == (undisturbed / "metrics.jsonl").read_bytes()
    assert name == "save_async" or "a checkpoint could not be written for now" in shown


def test_a_fault_nobody_knows_damages_nothing_if_it_does_not_come_again(run, monkeypatch):
    monkeypatch.setattr(checkpoint.ocp, "load", failing(KeyError("x"), then=checkpoint.ocp.load))
    assert newest_state(run)[0] == 22


def test_files_that_cannot_be_read_plainly_are_not_taken_for_damaged(run, monkeypatch):
    """Orbax's word may be anything."""

    def away(folder):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(retry, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(retry.again, "__kwdefaults__", retry.again.__kwdefaults__ | {"seconds": 1})
    monkeypatch.setattr(checkpoint, "_read_plainly", away)
    cut_off(run / "checkpoints" / "22")
    with pytest.raises(Unavailable):
        newest_state(run)


def test_a_part_that_is_listed_and_not_found_is_not_taken_for_damage(finished, objects):
    """As where one host of several is told that an object is not there."""
    there = finished[1] / "checkpoints"
    for file in there.rglob("*"):
        if file.is_file():
            objects.put(f"run/checkpoints/{file.relative_to(there)}", file.read_bytes(), {})
    for step in (16, 20, 22):
        objects.put(f"run/checkpoints/{step}/commit_success.txt", b"", {})
    parts = objects.files("run/checkpoints/22/")
    part = max(parts, key=lambda name: len(parts[name]))
    left = iter(range(20))
    objects.fault = lambda method, name, kind: (
        Fault(404) if name == part and next(left, None) is not None else None
    )
    remote = epath.Path("gs://bucket/run/checkpoints")
    assert newest_state(finished[1], folder=remote)[0] == 22
    assert next(left, None) is None


def test_a_checkpoint_of_another_format_is_named(finished, run):
    file, _ = finished
    path = run / "checkpoints" / "22" / "_CHECKPOINT_METADATA"
    found = json.loads(path.read_text())
    found["custom_metadata"]["format_version"] = 1
    path.write_text(json.dumps(found))
    with pytest.raises(InputError, match="format_version 1, this version reads 2"):
        pretrain(file, run, "run.keep_best=0")


@pytest.mark.long
def test_every_flipped_bit_is_found(finished, run):
    """Wherever it is: the state is then the one that was saved, or the checkpoint is refused."""
    good, rng = final_state(run)[1], random.Random(0)
    step = run / "checkpoints" / "22"
    files = sorted(p for p in step.rglob("*") if p.is_file() and p.stat().st_size)
    refused = 0
    for _ in range(20):
        path = rng.choice(files)
        content = path.read_bytes()
        at = rng.randrange(len(content))
        changed = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        path.write_bytes(changed)
        number, state = newest_state(run)
        assert number in (22, 20)
        if number == 22:
            assert_identical(state, good)
        refused += number == 20
        path.write_bytes(content)
    assert refused > 1


def test_checksums_are_computed_once_all_have_read(run, monkeypatch):
    """Else one that could not read would leave the others waiting in a computation."""
    seen = []

    def agreed(what: str, complaint: str) -> str:
        seen.append(what)
        return "another could not" if what == "22 read" else complaint

    def counted(tree):
        seen.append("checksums")
        return checksums(tree)

    monkeypatch.setattr(checkpoint, "checksums", counted)
    assert newest_state(run, agreed)[0] == 20
    assert seen == ["22 read", "20 read", "checksums", "20 checked"]


def newest_state(run: pathlib.Path, *agreed, folder=None) -> tuple[int, dict]:
    from bert_jax.training import mesh as mesh_lib
    from bert_jax.training.step import abstract_state

    experiment = load_experiment(Workdir(run))
    mesh = mesh_lib.one_device()
    abstract = abstract_state(
        Pretraining(experiment.model), experiment.optimizer, experiment.parallelism, mesh
    )
    with Checkpoints(folder or epath.Path(run / "checkpoints"), Run(), "read") as saved:
        found = saved.newest(abstract, None, *agreed)
    return found.step, jax.device_get(found.state)


def test_checkpoints_are_listed_and_verified(finished, run, capsys):
    from bert_jax import cli

    assert cli.main(["checkpoints", str(run), "--verify"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:4]] == ["22", "20", "16"]
    assert out[1].endswith("newest, best") and "finished" in out[4]
    loss = next(
        line["masked_lm_loss"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "evaluation" and line["step"] == 22
    )
    assert f" {loss:.3f}, newest" in out[1]
    assert not [*run.rglob("array_metadatas")], "which nothing would compare"
    assert out[5:] == [f"step {n}: every array is what was saved" for n in (22, 20, 16)]

    flipped_bit(run / "checkpoints" / "20")
    other_window(run / "checkpoints" / "16")
    assert cli.main(["checkpoints", str(run)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[3].endswith("damaged") and "damaged" not in out[2]  # which is not read
    assert cli.main(["checkpoints", str(run), "--verify"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "20: damaged" in out[6] and "16: damaged" in out[7]


def test_an_older_checkpoint_may_be_asked_for(finished, run, tmp_path, capsys):
    from bert_jax import cli

    for which, step in (("newest", 22), ("20", 20), ("16", 16), ("best", 22)):
        assert cli.main(["evaluate", "--workdir", str(run), "--checkpoint", which]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == step
    assert cli.main(["predict", "--workdir", str(run), "--checkpoint", "16", "wa [MASK]"]) == 0
    flipped_bit(run / "checkpoints" / "20")
    out = str(tmp_path / "out")
    export = ["export", "--workdir", str(run), "--as", "encoder", "--out", out, "--checkpoint"]
    for which, words in (("17", "there are 22, 20, 16"), ("x", "none of this step or name")):
        assert cli.main([*export, which]) == 2
        assert words in capsys.readouterr().err
    assert cli.main([*export, "16"]) == 0 and "step 16" in capsys.readouterr().out


def test_checkpoints_of_no_run_are_refused(tmp_path, capsys):
    from bert_jax import cli

    assert cli.main(["checkpoints", str(tmp_path / "nowhere")]) == 2
    assert "no run here" in capsys.readouterr().err


# --- checksums ----------------------------------------------------------------------------------


def reference(array: np.ndarray) -> str:
    """Written anew, in Python's integers."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    low = high = 0
    for place, word in enumerate(map(int, bits)):
        first = mixed(word ^ place * 0x9E3779B9 % 2**32)
        second = (first ^ first >> 15) * 0xBB67AE85 % 2**32
        low, high = low + first, high + (second ^ second >> 13)
    return f"{high % 2**32:08x}{low % 2**32:08x}"


@pytest.mark.parametrize("dtype", ["float32", "int32", "float16", "uint8"])
def test_checksums_equal_the_definition(dtype):
    array = np.random.default_rng(0).integers(0, 200, (3, 5, 7)).astype(dtype)
    assert checksums({"a": {"b": array}}) == {"a/b": reference(array)}


@pytest.mark.parametrize("spec", [("data_0",), (None, "data_0"), ()])
def test_checksums_are_the_same_on_any_mesh(spec):
    array = jnp.arange(64.0).reshape(8, 8)
    sharding = NamedSharding(samples.mesh_of(4), PartitionSpec(*spec))
    assert checksums([jax.device_put(array, sharding)]) == checksums([array])


@settings(deadline=None, database=None)
@given(st.data())
def test_two_changes_do_not_cancel_out(data):
    """Two flips of one bit would in a sum of products with odd numbers."""
    array = np.zeros(50, np.uint32)
    places = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=4, unique=True))
    changed = array.copy()
    changed[places] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert checksums([changed]) != checksums([array])
