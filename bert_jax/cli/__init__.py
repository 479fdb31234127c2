"""`bert-jax COMMAND`: from words to a command; each has its arguments above its function."""

import argparse
import difflib
import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from bert_jax import __version__, errors
from bert_jax.cli.command import COMMANDS, add_arguments
from bert_jax.config import Section, explain
from bert_jax.config.code import name_file, was_used
from bert_jax.errors import FAILED, FINISHED, InputError, printable

# Commands enter COMMANDS when they are imported; the help lists them in this order.
# isort: off
from bert_jax.cli import learning, looking, asking, checking  # noqa: F401
# isort: on


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, and whose help ends with the fields of `--set`."""

    fields: type[Section] | None = None

    def error(self, message: str) -> NoReturn:
        """Leaves with exit code 2."""
        self.exit(errors.BAD_INPUT, f"bert-jax: {printable(message)}; see {self.prog} --help\n")

    def parse_known_args(self, args=None, namespace=None):
        """Takes words behind a flag, too, where a command takes any number of words.

        argparse itself gives such words none, where another stands before the flag.
        """
        known, unknown = super().parse_known_args(args, namespace)
        words = [it.dest for it in self._actions if it.nargs == "*" and not it.option_strings]
        if words and not any(word.startswith("-") for word in unknown):
            setattr(known, words[0], [*getattr(known, words[0]), *unknown])
            unknown = []
        return known, unknown

    def format_help(self) -> str:
        """Returns the help; the fields are read from their source only where it is asked for."""
        text = super().format_help()
        return text if self.fields is None else f"{text}\n{explain.fields(self.fields)}\n"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each sets `command`, its function, and `usage_error`."""
    whole = _Parser(
        prog="bert-jax",
        description="Plain text in, a pre-trained BERT out.",
        epilog=errors.exit_codes(errors.CODES_OF_RUNS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--debug", action="store_true", help="show the tracebacks of errors")
    whole.add_argument("--version", action="version", version=f"bert-jax {__version__}")
    subparsers = whole.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        what = (command.function.__doc__ or "").split("\n")[0]
        sub = subparsers.add_parser(
            name,
            help=what[0].lower() + what[1:].removesuffix("."),
            description=what,
            epilog=errors.exit_codes(command.codes),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.fields = command.fields
        sub.set_defaults(command=command.function, usage_error=sub.error)
        sub.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,  # else it would take back one given before the command
            help="show the tracebacks of errors",
        )
        sub._negative_number_matcher = re.compile(r"-[\d.,-]+")  # a list of them is a value, too
        for argument in command.arguments:
            add_arguments(sub, argument)
    return whole


def _words(argv: Sequence[str]) -> list[str]:
    """Returns the words, `conformance instances` as one; answers a mistyped command."""
    words = list(argv)
    first = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    if words[first : first + 2] == ["conformance", "instances"]:
        words[first : first + 2] = ["conformance instances"]
    for word in words[first : first + 1]:
        if word not in COMMANDS:
            near = difflib.get_close_matches(word, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
            raise InputError(f"{word}: no such command; {hint}")
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a usage error leaves by SystemExit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal speaks UTF-8
    debug = False
    try:
        words = _words(sys.argv[1:] if argv is None else argv)
        if words[:1] == ["launch"]:  # which has a parser of its own
            return checking.launch(argparse.Namespace(words=words[1:]))
        args, unknown = parser().parse_known_args(words)
        if unknown:
            args.usage_error(f"unrecognized arguments: {' '.join(unknown)}")
        debug = args.debug
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
        if debug and isinstance(error, Exception):
            raise
        return _report(error)


def _report(error: BaseException) -> int:
    """Prints in one line what is at fault; returns the exit code."""
    if isinstance(error, OSError):
        kind: type[Exception] = InputError
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = errors.DiskFull
            if error.filename is None:  # all other files are named where they are written
                error.filename = "standard output"
                _drop_output()
        if error.filename is not None:
            error = kind(f"{error.filename}: {error.strerror}")
    line, code = errors.of_error(error)
    print(line, file=sys.stderr)
    return code


def _drop_output() -> None:
    """Sends output nowhere: nobody takes it, and the interpreter must not write to it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
