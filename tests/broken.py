"""Helpers: a finished run, the command in this process, a list of files, damage to files."""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator

from small_run import write_text

from bert_jax import cli
from bert_jax.storage.workdir import with_checksum


def finished_run(folder: pathlib.Path) -> pathlib.Path:
    """Text, experiment, corpus and a finished run in `folder`; every path in them is relative."""
    with contextlib.chdir(folder):
        write_text(pathlib.Path("."))
        code, err = call("pretrain small.py --workdir run")
        assert code == 0, err
    return folder


def asked(command: str | list[str], *more: object, stdin: bytes = b"") -> tuple[int, str, str]:
    """Runs `bert-jax COMMAND` here; returns its exit code, standard output and standard error."""
    words = shlex.split(command) if isinstance(command, str) else command
    out, err, before = io.TextIOWrapper(io.BytesIO()), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main([*words, *map(str, more)])
    except SystemExit as error:  # how argparse exits
        code = error.code
    finally:
        sys.stdin = before
    out.flush()
    return code, out.buffer.getvalue().decode(), err.getvalue()


def call(command: str | list[str], stdin: bytes = b"") -> tuple[int, str]:
    """Runs a command; returns its exit code and standard error."""
    code, _, err = asked(command, stdin=stdin)
    return code, err


def said(command: str | list[str], *more: object, stdin: bytes = b"") -> str:
    """Runs a command that must succeed; returns its standard output."""
    code, out, err = asked(command, *more, stdin=stdin)
    assert code == 0, err
    return out


def fails(command: str | list[str], *words: str, code: int = 2, stdin: bytes = b"") -> str:
    """Asserts that a command ends with this exit code and one line with the words; returns it."""
    found, err = call(command, stdin)
    assert (found, err.count("\n")) == (code, 1), err
    assert err.startswith("bert-jax: ") and err[:-1].isprintable(), err
    for word in words:
        assert word in err, err
    return err


def tree(folder: pathlib.Path) -> dict[str, str]:
    """Every file and folder below, with the files' hashes."""
    return dict(_entries(folder))


def _entries(folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        kind = "folder"
        if path.is_file():
            kind = hashlib.sha256(path.read_bytes()).hexdigest()
        yield os.path.relpath(path, folder), kind


def nothing():
    pass


@dataclasses.dataclass(frozen=True)
class Case:
    """A command that must fail, after `breaks` has broken something in the current folder."""

    name: str
    command: str
    words: tuple[str, ...]
    breaks: Callable[[], object] = nothing
    stdin: bytes = b""


def refuses(case: Case) -> None:
    """Asserts that the command fails as it should, and changes no file of the current folder."""
    case.breaks()
    before = tree(pathlib.Path("."))
    fails(case.command, *case.words, stdin=case.stdin)
    assert tree(pathlib.Path(".")) == before


# --- damage: each function returns an action, to be called later ---


# A run and a corpus that are not there yet.
NEW = "small.py --workdir new --set run.corpus_dir="


def write(name: str, content: str | bytes) -> Callable[[], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda: pathlib.Path(name).write_bytes(data)


def replace(name: str, old: str, new: str) -> Callable[[], object]:
    def edit():
        text = pathlib.Path(name).read_text()
        assert old in text
        pathlib.Path(name).write_text(text.replace(old, new))

    return edit


def corrupt(pattern: str, start: float = 0.4, count: int = 40) -> Callable[[], object]:
    """Returns an action that overwrites bytes in the middle of every file that matches."""

    def edit():
        found = [p for p in pathlib.Path(".").glob(pattern) if p.is_file()]
        assert found, pattern
        for file in found:
            data = bytearray(file.read_bytes())
            at = int(len(data) * start)
            data[at : at + count] = b"\xa5" * len(data[at : at + count])
            file.write_bytes(data)

    return edit


def shorten(pattern: str, share: float = 0.5) -> Callable[[], object]:
    def edit():
        found = [p for p in pathlib.Path(".").glob(pattern) if p.is_file()]
        assert found, pattern
        for file in found:
            os.truncate(file, int(file.stat().st_size * share))

    return edit


def remove(name: str) -> Callable[[], object]:
    def edit():
        shutil.rmtree(name) if pathlib.Path(name).is_dir() else pathlib.Path(name).unlink()

    return edit


def texts(*contents: str | bytes) -> Callable[[], object]:
    """Returns an action that replaces the text by these, one per file."""

    def edit():
        shutil.rmtree("text")
        pathlib.Path("text").mkdir()
        for number, content in enumerate(contents):
            data = content.encode() if isinstance(content, str) else content
            pathlib.Path(f"text/{number:02}.txt").write_bytes(data)

    return edit


def change_json(name: str, change: Callable[[dict], object]) -> Callable[[], object]:
    """Returns an action that changes a JSON file, and the checksum if it has one."""

    def edit():
        file = pathlib.Path(name)
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(with_checksum(value) if "checksum" in value else value))

    return edit


def other_vocabulary():
    """Another vocabulary of the same size."""
    lines = pathlib.Path("vocab.txt").read_text().split("\n")
    pathlib.Path("vocab.txt").write_text("\n".join([*lines[:5], *reversed(lines[5:-1]), ""]))
