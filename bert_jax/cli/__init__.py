"""`bert-jax COMMAND`: from words to a command; each has its arguments above its function."""

import argparse
import difflib
import errno
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from bert_jax import __version__, errors
from bert_jax.cli.command import COMMANDS, add_arguments
from bert_jax.config import Section, explain
from bert_jax.config.code import name_file, was_used
from bert_jax.errors import FAILED, FINISHED, InputError, printable
from bert_jax.process import prepare_process
from bert_jax.system import restart_in_utf8_mode

# Commands enter COMMANDS when they are imported; the help lists them in this order.
# isort: off
from bert_jax.cli import learning, looking, asking, checking  # noqa: F401
# isort: on


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are InputErrors, and whose help ends with the fields of `--set`."""

    def __init__(self, prog: str, what: str, codes: Mapping[int, str]):
        super().__init__(
            prog=prog,
            description=what,
            epilog=errors.exit_codes(codes),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._negative_number_matcher = re.compile(r"-[\d.]")  # a list of them is a value, too
        self.add_argument("--debug", action="store_true", help="show the tracebacks of errors")
        self.fields: type[Section] | None = None

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def format_help(self) -> str:
        """Returns the help; the fields are read from their source only where it is asked for."""
        text = super().format_help()
        return text if self.fields is None else f"{text}\n{explain.fields(self.fields)}\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of a command, with `command`, which is its function."""
    words = list(argv)
    first = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    whole = _Parser("bert-jax", "Plain text in, a pre-trained BERT out.", errors.TRAINING_CODES)
    whole.usage = "bert-jax [--debug] COMMAND ..."
    whole.add_argument("--version", action="version", version=f"bert-jax {__version__}")
    commands = whole.add_argument_group("commands")
    for name, command in COMMANDS.items():
        what = command.summary[0].lower() + command.summary[1:].removesuffix(".")
        commands.add_argument(name, nargs="?", help=what)
    debug = whole.parse_args(words[:first]).debug
    if first == len(words):
        whole.error("name a COMMAND")
    if words[first : first + 2] == ["conformance", "instances"]:
        words[first : first + 2] = ["conformance instances"]
    name, rest = words[first], words[first + 1 :]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise InputError(f"{name}: no such command; {hint}")
    command = COMMANDS[name]
    known = argparse.Namespace(command=command.function, words=rest, debug=debug)
    if name == "launch":  # which has a parser of its own
        return known
    own = _Parser(f"bert-jax {name}", command.summary, command.codes)
    own.fields = command.fields
    add_arguments(own, command.arguments)
    # Words may stand on both sides of flags, or behind a --, which argparse takes as one of two.
    read = own.parse_args if "--" in rest else own.parse_intermixed_args
    return read(rest, known)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; `--help` leaves by SystemExit."""
    if argv is None:
        restart_in_utf8_mode()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal speaks UTF-8
    prepare_process()
    words, args = sys.argv[1:] if argv is None else argv, None
    try:
        args = parse(words)
        if getattr(args, "cache_dir", None):
            # For this process and those it starts: where things lie here is no part of a config.
            os.environ["BERT_JAX_CACHE_DIR"] = os.path.abspath(args.cache_dir)
        if getattr(args, "code", None):
            name_file(args.code)
        code = args.command(args)
        if getattr(args, "code", None) and code == FINISHED and not was_used(args.code):
            print(
                f"--code {printable(args.code)}: this command uses no code of it; leave it out",
                file=sys.stderr,
            )
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if args is not None and args.debug and isinstance(error, Exception):
            raise
        return _report(error, words)


def _report(error: BaseException, words: Sequence[str]) -> int:
    """Prints the error of a command in one line; returns the exit code."""
    if isinstance(error, KeyError) and str(error.args[0]).endswith("://"):
        # etils has no backend for such a path, whichever flag or setting names it.
        path = next((word for word in words if error.args[0] in word), error.args[0])
        error = InputError(f"{path}: not a local path or a bucket (gs://); download it first")
    if isinstance(error, OSError):
        kind: type[Exception] = InputError
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = errors.DiskFull
            if error.filename is None:  # all other files are named where they are written
                error.filename = "standard output"
                _drop_output()
        if error.filename is not None:
            error = kind(f"{error.filename}: {error.strerror}")
    line, code = errors.message_and_code(error)
    print(line, file=sys.stderr)
    return code


def _drop_output() -> None:
    """Sends output nowhere: nobody takes it, and the interpreter must not write to it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
