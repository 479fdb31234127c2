"""Errors that users see in one line, and the exit codes of commands."""

import contextlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

FINISHED, FAILED, BAD_INPUT = 0, 1, 2
UNAVAILABLE, STOPPED, INTERRUPTED, LOST = 74, 75, 130, 134

# What they mean, of any command; `exit_codes` adds what one command means by its own.
_CODES = {
    FINISHED: "finished",
    FAILED: "failure",
    BAD_INPUT: "bad input or usage",
    UNAVAILABLE: "the machine or the network failed (a full disk, a bucket out of reach)",
    INTERRUPTED: "Ctrl-C",
}
# Of commands that train.
CODES_OF_RUNS = {
    UNAVAILABLE: "the machine or the network failed (a bucket out of reach, a host that did not\n"
    "       arrive, a hang, a full disk); run again to go on, as every launcher does",
    STOPPED: "stopped on request with the state saved; run again to go on",
    INTERRUPTED: "Ctrl-C before training, or a second one during it",
    LOST: "of a run in several processes: another of them, or the coordinator, was lost",
}


def exit_codes(own: Mapping[int, str]) -> str:
    """Returns every exit code and what it means, to end a command's help; `own` go first."""
    meanings = sorted((_CODES | dict(own)).items())
    return "exit codes:\n" + "".join(f"  {code:<4} {meaning}\n" for code, meaning in meanings)


class _OneLine(Exception):
    """An error of one line, whatever file names, text and errors of others it quotes."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InputError(_OneLine):
    """Bad input or usage: what is at fault, where, and what to do."""


class Unavailable(_OneLine):
    """A machine or a network that fails for now; the same command, run again, may succeed."""


class DiskFull(Unavailable):
    """A full disk where something is to be written; waiting does not make space."""


# What a parser raises on a file that is not what was written.
_DAMAGE = (ArithmeticError, AttributeError, EOFError, LookupError, RecursionError, TypeError)
_DAMAGE += (ValueError, zipfile.BadZipFile)


@contextlib.contextmanager
def reading(
    path: str | os.PathLike[str], remedy: str = "put the whole file back"
) -> Iterator[None]:
    """Turns whatever parsing a file that we wrote can raise into one line that names the file."""
    try:
        yield
    except _DAMAGE as error:
        what = f"{type(error).__name__}: {error}"
        raise InputError(f"{path}: damaged ({what}); {remedy}") from error


@contextlib.contextmanager
def calling_rust(message: str) -> Iterator[None]:
    """Turns the errors and panics of a Rust library into InputError: `message` and the reason.

    pyo3 raises a panic as a BaseException, so `except Exception` does not catch it.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise InputError(f"{message} ({type(error).__name__}: {error})") from error


def json_object(content: str | bytes, where: object, remedy: str = "") -> dict[str, Any]:
    """Returns the JSON object that a text is; errors begin with `where` and end with `remedy`."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}){remedy}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: not a JSON object{remedy}")
    return value


@contextlib.contextmanager
def prefix_errors(where: str) -> Iterator[None]:
    """Prefixes input errors with the location of the input: a flag, a field, a file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def printable(text: str) -> str:
    """Returns the text with control characters as escapes: a corpus may hold terminal commands."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def excerpt(text: str, longest: int = 40) -> str:
    """Returns the beginning of a text in quotes, and how long the text is if that is not all."""
    is_whole = len(text) <= longest
    return repr(text) if is_whole else f"{text[:longest]!r}... ({len(text)} characters)"


def pluralize(count: int, one: str) -> str:
    """Returns a number and its noun: 1 file, 2,000 files."""
    return f"{count:,} {one}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Formats seconds: 4210.0 as 1 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    return f"{days} d {hours_left} h" if days > 2 else f"{hours} h {minutes} min"


def of_error(error: BaseException) -> tuple[str, int]:
    """Returns the line that is printed for an error, and the exit code."""
    if isinstance(error, _OneLine):
        return f"bert-jax: {error}", UNAVAILABLE if isinstance(error, Unavailable) else BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        return "bert-jax: interrupted", INTERRUPTED
    message = printable(str(error).strip().split("\n")[0][:300])
    return (
        f"bert-jax: internal error: {type(error).__name__}: {message}; run again with --debug for "
        "the traceback",
        FAILED,
    )
