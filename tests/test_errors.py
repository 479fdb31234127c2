"""What `main` does with errors of every kind, in processes of their own where that matters."""

import os
import pathlib
import shlex
import shutil
import socket

import pytest
from broken import call, fails, tree
from small_run import run_bert_jax

from bert_jax import config
from bert_jax.errors import InputError
from bert_jax.storage.locks import lock


def bug(*_):
    raise RuntimeError("first line\nsecond \x1b[2J line")


def test_an_error_of_ours_is_one_line_and_exit_1(copy_of_run, monkeypatch):
    monkeypatch.setattr(config, "load", bug)
    assert fails("config small.py", code=1) == (
        "bert-jax: internal error: RuntimeError: first line; run again with --debug for the "
        "traceback\n"
    )


def test_debug_before_or_after_the_command_shows_tracebacks(copy_of_run, monkeypatch):
    with pytest.raises(InputError):
        call("--debug config small.py --set seed=x")
    monkeypatch.setattr(config, "load", bug)
    with pytest.raises(RuntimeError):
        call("config small.py --debug")


@pytest.mark.long
def test_nothing_but_the_line_reaches_standard_error(copy_of_run):
    """Of a whole process: no warning, no log, no traceback of a library's thread."""
    for file in pathlib.Path("run/checkpoints").rglob("*"):
        if file.is_file() and "metadata" not in file.name.lower():
            os.truncate(file, 10)
    before = tree(copy_of_run)
    done = run_bert_jax("evaluate", "--workdir", "run", devices=4)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr
    assert b"run/checkpoints/22: damaged" in done.stderr
    assert tree(copy_of_run) == before


@pytest.mark.long
def test_a_device_that_is_not_there_is_named(copy_of_run):
    before = tree(copy_of_run)
    new = ("--workdir", "new", "--set", "run.corpus_dir=")
    done = run_bert_jax("pretrain", "small.py", *new, devices=4, JAX_PLATFORMS="none")
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr
    assert b"JAX_PLATFORMS=none: " in done.stderr and b"JAX_PLATFORMS=cpu" in done.stderr
    assert tree(copy_of_run) == before


def test_output_to_a_full_disk_is_named(copy_of_run):
    if not pathlib.Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = run_bert_jax("config", "small.py", devices=4, stdout=full)
    assert (done.returncode, done.stderr.count(b"\n")) == (74, 1)
    assert b"standard output: No space left on device" in done.stderr


@pytest.mark.long
def test_a_terminal_without_unicode_shows_escapes(copy_of_run):
    for file in (pathlib.Path("vocab.txt"), pathlib.Path("text/all.txt")):
        file.write_text(file.read_text().replace("w", "é"), encoding="utf-8")
    new = ("--workdir", "new", "--set", "run.corpus_dir=", "--set", "corpus.case=cased")
    assert call(f"prepare {shlex.join(new)} small.py")[0] == 0
    words = ("show", "small.py", *new, "--rows", "8")
    done = run_bert_jax(*words, devices=4, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"") and b"\\xe9" in done.stdout


@pytest.mark.parametrize(
    ("folder", "setting"), [("run", "--workdir"), ("new/corpus", "run.corpus_dir")]
)
def test_a_folder_that_another_process_holds_is_named(folder, setting, copy_of_run):
    """With the setting that names it. It keeps its lock: another process made that."""
    from etils import epath

    with lock(epath.Path(folder)):
        before = tree(copy_of_run)
        workdir = folder.split("/")[0]
        words = f"pretrain small.py --workdir {workdir} --set run.corpus_dir=new/corpus"
        holder = f"{folder}: in use by process {os.getpid()} of {socket.gethostname()} since"
        line = fails(words, holder, "; wait for it")
        assert {name for name in ("--workdir", "run.corpus_dir") if name in line} == {setting}
        assert tree(copy_of_run) == before


@pytest.mark.long
def test_a_refused_start_leaves_an_existing_run_to_go_on(copy_of_run):
    """All checkpoints damaged, then one put back as told: the run goes on to the same end."""
    lines = pathlib.Path("run/metrics.jsonl").read_bytes()
    states = sorted(pathlib.Path("run/checkpoints").glob("*/state"))
    for state in states:
        shutil.move(state, f"away-{state.parent.name}")
    fails("pretrain small.py --workdir run", "files from a copy")
    shutil.move(f"away-{states[0].parent.name}", states[0])
    assert call("pretrain small.py --workdir run") == (0, "")
    assert pathlib.Path("run/metrics.jsonl").read_bytes() == lines


def test_a_model_that_does_not_fit_into_memory_is_named(copy_of_run):
    before = tree(copy_of_run)
    words = "pretrain small.py --workdir new --set model.intermediate_size=2000000000"
    fails(words, "memory", "batch_size")
    assert tree(copy_of_run) == before


def test_flags_before_the_command_are_refused(copy_of_run):
    fails("--workdir=elsewhere --set=seed=2 config small.py", "--workdir=elsewhere")
