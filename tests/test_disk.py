"""A disk that is full, fills up, or may not be written: real ones, small, mounted here."""

import contextlib
import pathlib
import shutil
import subprocess
import time
import types

import jax
import numpy as np
import pytest
from broken import call, fails, tree
from etils import epath
from small_run import hooked, pretrain, saves_in

from bert_jax.config import Run
from bert_jax.errors import DiskFull
from bert_jax.running.progress import Clock, Profile
from bert_jax.running.trainer import Trainer
from bert_jax.storage import copies
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir

FULL = "the disk is full; free some space"


class Disk:
    """A file system of its own."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def mount(self, options: str) -> None:
        """Mounts it anew, or again with other options."""
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.folder],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"a disk cannot be mounted here: {done.stderr.decode().strip()}")

    def fill(self) -> None:
        """Puts into `others` what there is space for."""
        with contextlib.suppress(OSError), open(self.folder / "others", "wb", 0) as file:
            while file.write(b"x" * 512):
                pass


@pytest.fixture
def disk(tmp_path):
    if shutil.which("mount") is None:
        pytest.skip("a disk cannot be mounted here: there is no mount")
    (tmp_path / "disk").mkdir()
    yield Disk(tmp_path / "disk")
    # Lazily: a memory map of a refused run may still be there.
    subprocess.run(["umount", "--lazy", tmp_path / "disk"], check=False, capture_output=True)


@pytest.mark.parametrize("size", [4, 300])
def test_a_corpus_that_does_not_fit_leaves_what_is_whole(size, disk, copy_of_run):
    """Kilobytes that end in the words of its text, and in the stream."""
    disk.mount(f"size={size}k")
    command = f"small.py --workdir {disk.folder}/w --set run.corpus_dir="
    for name in ("prepare", "pretrain"):
        fails(f"{name} {command}", f"{disk.folder}/w/corpus", FULL, code=74)
        left = {pathlib.Path(name) for name, kind in tree(disk.folder).items() if kind != "folder"}
        assert all(
            path.parts[:3] == ("w", "corpus", "parts") or path.name == "lock" for path in left
        )
        assert not any(part.endswith(".tmp") for path in left for part in path.parts)
    disk.mount("remount,size=4m")
    assert call(f"prepare {command}") == (0, "")


def test_vectors_that_do_not_fit_leave_nothing(disk, copy_of_run):
    disk.mount("size=40k")
    out = f"{disk.folder}/v.npz"
    words = f"embed --workdir run text/all.txt --pooling tokens --out {out}"
    fails(words, f"{out}: {FULL}", code=74)
    assert not tree(disk.folder)


@pytest.mark.long
def test_a_disk_that_fills_up_in_a_run_costs_no_checkpoint(disk, copy_of_run, caplog):
    """With more space the same command goes on, and the run is that of an endless disk."""
    disk.mount("size=1m")
    command = f"pretrain small.py --workdir {disk.folder}/w"
    often = "--set run.checkpoint_every=1 --set run.keep_checkpoints=99"
    fails(f"{command} {often}", f"{disk.folder}/w/checkpoints: {FULL}", code=74)
    assert not caplog.records  # else the one line is lost among them
    saved = [path.name for path in (disk.folder / "w" / "checkpoints").iterdir()]
    assert saved and all(name.isdecimal() for name in saved)
    disk.mount("remount,size=20m")
    assert call(command) == (0, "")
    lines = (disk.folder / "w" / "metrics.jsonl").read_bytes()
    assert lines == pathlib.Path("run/metrics.jsonl").read_bytes()


@pytest.mark.long
def test_a_run_may_go_on_where_its_checkpoints_do_not_fit(disk, copy_of_run):
    """It tries again at each; there is space again before the last."""
    disk.mount("size=3m")
    saved = []

    def watch(step, path):
        saved.append(step)
        if step == 6:
            disk.fill()
        if step == 18:
            (disk.folder / "others").unlink()

    settings = ("run.checkpoint_every=3", "run.when_disk_is_full=go_on")
    with hooked(on_save=watch):
        outcome, shown = pretrain("small.py", disk.folder / "w", *settings)
    assert outcome == "finished"
    assert saved == [3, 6, 9, 12, 15, 18, 21, 22]
    assert "without a new checkpoint: " in shown and "the disk is full" in shown
    kept = {path.name for path in (disk.folder / "w" / "checkpoints").iterdir()}
    assert "22" in kept and all(name.isdecimal() for name in kept)
    lines = (disk.folder / "w" / "metrics.jsonl").read_bytes()
    assert lines == pathlib.Path("run/metrics.jsonl").read_bytes()


def test_a_run_whose_first_checkpoint_does_not_fit_trains_no_step_and_leaves_nothing(
    disk, copy_of_run, monkeypatch
):
    disk.mount("size=100k")
    monkeypatch.setattr(Trainer, "_train", None)
    workdir = f"{disk.folder}/w"
    fails(f"pretrain small.py --workdir {workdir}", f"{workdir}/checkpoints: ", code=74)
    assert not tree(disk.folder)


@pytest.mark.long
def test_a_disk_on_which_not_all_checkpoints_fit_is_a_note_and_leftovers_go(disk, copy_of_run):
    disk.mount("size=600k")
    left = disk.folder / "w" / "checkpoints" / "4.orbax-checkpoint-tmp"
    left.mkdir(parents=True)
    (left / "array").write_bytes(bytes(400_000))
    outcome, shown = pretrain("small.py", disk.folder / "w", "run.checkpoint_every=22")
    assert outcome == "finished" and shown.count(f"{disk.folder}/w/checkpoints: ") == 1
    assert not left.exists()


def test_of_a_line_that_does_not_fit_nothing_is_kept(disk):
    disk.mount("size=16k")
    lines = JsonLines(epath.Path(disk.folder) / "lines", "go_on")
    lines.append({"step": 1, "text": "x" * 3000})
    disk.fill()
    lines.append({"step": 2, "text": "x" * 3000})  # its beginning fits into the file's last block
    assert [line["step"] for line in lines.read()] == [1]
    (disk.folder / "others").unlink()
    lines.append({"step": 3})
    assert [line["step"] for line in lines.read()] == [1, 2, 3]


@pytest.mark.long
def test_lines_that_do_not_fit_are_named_and_written_later(disk, copy_of_run, monkeypatch):
    disk.mount("size=8m")
    append = JsonLines.append

    def fill(self, line):
        if line["step"] == 9:
            while not (disk.folder / "w" / "checkpoints" / "5").exists():
                time.sleep(0.01)
            disk.fill()
        # Longer than what is left in the file's last block.
        append(self, line | {f"more_{number}": 0.5 for number in range(400)})

    command = f"pretrain small.py --workdir {disk.folder}/w --set run.checkpoint_every=5"
    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "append", fill)
        fails(command, f"{disk.folder}/w/metrics.jsonl: {FULL}", code=74)
    (disk.folder / "others").unlink()
    assert call(command) == (0, "")
    lines = JsonLines(disk.folder / "w" / "metrics.jsonl").read()
    assert [line["step"] for line in lines if line["kind"] == "train"][-1] == 22


@pytest.mark.long
def test_a_disk_that_may_not_be_written_is_named_and_may_be_read(disk, copy_of_run):
    disk.mount("size=20m")
    shutil.copytree("run", disk.folder / "run")
    shutil.copytree("corpus", disk.folder / "corpus")
    disk.mount("remount,ro")
    before = tree(disk.folder)
    for command in ("prepare small.py --set run.corpus_dir=", "pretrain small.py"):
        for workdir in ("new", "run"):
            there = f"{disk.folder}/{workdir}"
            fails(f"{command} --workdir {there}", there, "Read-only file system")
    here = f"--workdir {disk.folder}/run"
    corpus = f"--set run.corpus_dir={disk.folder}/corpus"
    # Runs may share a corpus that an administrator made.
    other = f"pretrain small.py --workdir other {corpus} --set seed=3"
    for command in (f"evaluate {here} {corpus}", f"show {here} {corpus}", other):
        assert call(command) == (0, "")
    assert tree(disk.folder) == before


def test_a_copy_that_does_not_fit_leaves_nothing_half(disk, objects):
    source, target = epath.Path("gs://bucket/ids.bin"), epath.Path(disk.folder)
    objects.put("ids.bin", bytes(range(250)) * 400, {})
    disk.mount("size=60k")
    with pytest.raises(DiskFull, match=r"ids\.bin: the disk is full; free some space"):
        copies.download(source, target)
    assert not tree(disk.folder)
    disk.mount("remount,size=1m")
    copies.download(source, target)
    assert (target / "ids.bin").read_bytes() == bytes(range(250)) * 400


@pytest.mark.long
@pytest.mark.parametrize("full", ["workdir", "scratch"])
def test_a_profile_that_does_not_fit_is_said_and_leaves_nothing(full, disk, tmp_path, monkeypatch):
    """In the workdir, and in the folder where jax writes it first."""
    disk.mount("size=4k")
    (tmp_path / "scratch").mkdir()
    scratch = disk.folder if full == "scratch" else tmp_path / "scratch"
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    folder = disk.folder if full == "workdir" else tmp_path
    told = []
    profile = Profile((1, 3), Workdir(folder), 0, told.append, Clock(None))
    try:
        for done in range(5):
            with profile.step(done, None):
                pass
    finally:
        jax._src.profiler._profile_state.reset()  # jax takes a trace it could not write for one on
    assert len(told) == 1
    assert "no profile of steps 2 to 3: " in told[0] and "the disk is full" in told[0]
    assert not tree(scratch) and not (folder / "profile").exists()


@pytest.mark.parametrize(
    ("free", "when_full", "expected"),
    [
        (999, "stop", "fails"),
        (1000, "stop", "ends with exit code 74"),
        (999, "go_on", "continues without checkpoints"),
        (3000, "stop", ""),  # three checkpoints: two to keep, and the next during its save
    ],
)
def test_a_run_tells_at_its_start_what_becomes_of_too_little_space(
    free, when_full, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    run = Run(keep_checkpoints=2, keep_best=0, when_disk_is_full=when_full)
    with contextlib.ExitStack() as stack:
        if expected == "fails":
            stack.enter_context(pytest.raises(DiskFull, match="free some space and run again"))
        saves_in(tmp_path, run).require_space({"params": np.zeros(250, np.float32)})
    told = capsys.readouterr().out
    assert (expected in told and "run.keep_checkpoints=2" in told) or expected in ("", "fails")
    assert bool(told) == (expected not in ("", "fails"))
