"""Errors that commands print in one line, and the exit codes of commands."""

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

FINISHED, FAILED, BAD_INPUT = 0, 1, 2
UNAVAILABLE, STOPPED = 74, 75  # EX_IOERR and EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT
PEER_LOST = 134  # 128 + SIGABRT, with which JAX ends a process

# Meanings of the exit codes of all commands. `Command.exit_codes` overrides them and adds others.
_MEANINGS = {
    FINISHED: "finished",
    FAILED: "the run failed, or an internal error",
    BAD_INPUT: "bad input or usage",
    UNAVAILABLE: "the machine or the network failed (a full disk, a bucket out of reach)",
    INTERRUPTED: "Ctrl-C",
}
# The meanings of exit codes for commands that train.
TRAINING_EXIT_CODES = {
    UNAVAILABLE: "the machine or the network failed (a bucket out of reach, a host that did not\n"
    "       arrive, a hang, a full disk); run again to resume (`bert-jax launch` does)",
    STOPPED: "stopped on request with the state saved; run again to resume",
    INTERRUPTED: "Ctrl-C before training, or twice during training",
    PEER_LOST: "the process lost contact with another process of its run or with the coordinator",
}


def format_exit_codes(overrides: Mapping[int, str]) -> str:
    """Formats the exit codes and their meanings, for the end of a command's help."""
    meanings = sorted((_MEANINGS | dict(overrides)).items())
    return "exit codes:\n" + "".join(f"  {code:<4} {meaning}\n" for code, meaning in meanings)


class _OneLineError(Exception):
    """An error whose message is one line, even if it quotes newlines and control characters."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InputError(_OneLineError):
    """Bad input or usage. The message says what is wrong, where, and what to do."""


class Unavailable(_OneLineError):
    """A failure of a machine or a network. The same command may succeed later."""


class DiskFull(Unavailable):
    """A full disk, which does not go away by waiting: the user must free space."""


# Maximum number of characters of a text that a message quotes.
_EXCERPT_CHARACTERS = 60
# Exceptions that parsers raise on a damaged file.
_PARSER_ERRORS = (ArithmeticError, AttributeError, EOFError, LookupError, RecursionError, TypeError)
_PARSER_ERRORS += (ValueError, zipfile.BadZipFile)


@contextlib.contextmanager
def translate_parser_errors(
    path: str | os.PathLike[str], remedy: str = "restore the file"
) -> Iterator[None]:
    """Turns the exceptions of a parser into InputError: the file is damaged."""
    try:
        yield
    except _PARSER_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path}: damaged ({reason}); {remedy}") from error


class TranslateRustErrors:
    """Turns all exceptions and panics within the context into InputError.

    It is for calls of a Rust library. pyo3 raises a panic as a BaseException, so `except Exception`
    does not catch it. `describe` is called on an error only, and returns the message.
    """

    def __init__(self, describe: Callable[[], str]):
        self._describe = describe

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            return
        raise InputError(f"{self._describe()} ({type(error).__name__}: {error})") from error


def json_object(content: str | bytes, where: object, remedy: str = "") -> dict[str, Any]:
    """Parses a JSON object; error messages have the form `WHERE: REASON; REMEDY`."""
    ending = f"; {remedy}" if remedy else ""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}){ending}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: not a JSON object{ending}")
    return value


def require_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises InputError unless an argument of the Python API has one of these values."""
    if value not in choices:
        raise InputError(f"{name}: {value!r} must be one of {', '.join(map(repr, choices))}")


@contextlib.contextmanager
def prefix_errors(where: str) -> Iterator[None]:
    """Prefixes input errors with the location of the input: a flag, a field or a file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def printable(text: str) -> str:
    """Escapes control characters: a corpus may contain ANSI escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def excerpt(text: str) -> str:
    """Returns a text in quotes for a message; a long text is truncated and its length appended."""
    is_short = len(text) <= _EXCERPT_CHARACTERS
    return repr(text) if is_short else f"{text[:_EXCERPT_CHARACTERS]!r}... ({len(text)} characters)"


def pluralize(count: int, noun: str) -> str:
    """Formats a number with its noun: 1 file, 2,000 files."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Formats seconds: 4210.0 as 1 h 10 min; from 3 days on, as days and hours."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    return f"{days} d {hours_left} h" if days > 2 else f"{hours} h {minutes} min"


def message_and_code(error: BaseException) -> tuple[str, int]:
    """Returns the line to print for an error, and the exit code."""
    if isinstance(error, _OneLineError):
        return f"bert-jax: {error}", UNAVAILABLE if isinstance(error, Unavailable) else BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        return "bert-jax: interrupted", INTERRUPTED
    message = printable(str(error).strip().split("\n")[0][:300])
    return (
        f"bert-jax: internal error: {type(error).__name__}: {message}; run again with --debug for "
        "the traceback",
        FAILED,
    )
