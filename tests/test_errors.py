"""What `main` does with errors of every kind, in processes of their own where that matters."""

import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
from broken import call, tree

from bert_jax import cli, config
from bert_jax.errors import InputError
from bert_jax.storage.workdir import lock


def bug(*_):
    raise RuntimeError("first line\nsecond \x1b[2J line")


def test_an_error_of_ours_is_one_line_and_exit_1(copy_of_run, monkeypatch):
    monkeypatch.setattr(config, "load", bug)
    code, err = call("config small.py")
    assert code == 1
    assert err == (
        "bert-jax: internal error: RuntimeError: first line; run again with --debug for the "
        "traceback\n"
    )


def test_debug_before_or_after_the_command_shows_tracebacks(copy_of_run, monkeypatch):
    with pytest.raises(InputError):
        call("--debug config small.py --set seed=x")
    monkeypatch.setattr(config, "load", bug)
    with pytest.raises(RuntimeError):
        call("config small.py --debug")


def process(*args: object, stdout=subprocess.PIPE, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bert_jax.cli", *map(str, args)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(cli.__file__).parents[1])} | env,
        check=False,
        timeout=300,
        text=True,
    )


@pytest.mark.long
def test_nothing_but_the_line_reaches_standard_error(copy_of_run):
    """Of a whole process: no warning, no log, no traceback of a library's thread."""
    for file in pathlib.Path("run/checkpoints").rglob("*"):
        if file.is_file() and "metadata" not in file.name.lower():
            os.truncate(file, 10)
    before = tree(copy_of_run)
    done = process("evaluate", "--workdir", "run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "run/checkpoints/22: damaged" in done.stderr
    assert tree(copy_of_run) == before


@pytest.mark.long
def test_a_device_that_is_not_there_is_named(copy_of_run):
    before = tree(copy_of_run)
    new = ("--workdir", "new", "--set", "run.corpus_dir=")
    done = process("pretrain", "small.py", *new, JAX_PLATFORMS="none")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "JAX_PLATFORMS=none: " in done.stderr and "JAX_PLATFORMS=cpu" in done.stderr
    assert tree(copy_of_run) == before


def test_output_to_a_full_disk_is_named(copy_of_run):
    if not pathlib.Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = process("config", "small.py", stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (74, 1)
    assert "standard output: No space left on device" in done.stderr


@pytest.mark.long
def test_a_terminal_without_unicode_shows_escapes(copy_of_run):
    for file in (pathlib.Path("vocab.txt"), pathlib.Path("text/all.txt")):
        file.write_text(file.read_text().replace("w", "é"), encoding="utf-8")
    new = ("--workdir", "new", "--set", "run.corpus_dir=", "--set", "corpus.case=cased")
    assert call(f"prepare {shlex.join(new)} small.py")[0] == 0
    done = process("show", "small.py", *new, "--rows", "8", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and "\\xe9" in done.stdout


@pytest.mark.parametrize("folder", ["run", "new/corpus"])
def test_a_folder_that_another_process_holds_is_named(folder, copy_of_run):
    """And keeps its lock: what another process made is not ours to remove."""
    from etils import epath

    holder = lock(epath.Path(folder))
    with holder:
        before = tree(copy_of_run)
        workdir = folder.split("/")[0]
        code, err = call(f"pretrain small.py --workdir {workdir} --set run.corpus_dir=new/corpus")
        assert (code, err.count("\n")) == (2, 1)
        assert f"{folder}: in use by process {os.getpid()} of {socket.gethostname()} since" in err
        assert "; wait for it" in err
        assert tree(copy_of_run) == before


@pytest.mark.long
def test_a_refused_start_leaves_an_existing_run_to_go_on(copy_of_run):
    """All checkpoints damaged, then one put back as told: the run goes on to the same end."""
    lines = pathlib.Path("run/metrics.jsonl").read_bytes()
    states = sorted(pathlib.Path("run/checkpoints").glob("*/state"))
    for state in states:
        shutil.move(state, f"away-{state.parent.name}")
    code, err = call("pretrain small.py --workdir run")
    assert code == 2 and "put the files back" in err
    shutil.move(f"away-{states[0].parent.name}", states[0])
    assert call("pretrain small.py --workdir run") == (0, "")
    assert pathlib.Path("run/metrics.jsonl").read_bytes() == lines


def test_a_model_that_does_not_fit_into_memory_is_named(copy_of_run):
    before = tree(copy_of_run)
    code, err = call("pretrain small.py --workdir new --set model.intermediate_size=2000000000")
    assert (code, err.count("\n")) == (2, 1), err
    assert "memory" in err and "batch_size" in err
    assert tree(copy_of_run) == before


def test_flags_before_the_command_are_refused(copy_of_run):
    code, err = call("--workdir=elsewhere --set=seed=2 config small.py")
    assert code == 2 and "--workdir=elsewhere" in err
