"""A command, its parser, and converters of its arguments."""

import argparse
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from absl.flags import argparse_flags

from bert_jax import errors, foreign
from bert_jax.errors import InputError


class Parser(argparse_flags.ArgumentParser):
    """A parser that raises InputError for bad usage. It also takes absl's flags."""

    def __init__(
        self,
        program: str,
        summary: str,
        codes: Mapping[int, str],
        parents: Sequence[argparse.ArgumentParser] = (),
    ):
        super().__init__(
            prog=program,
            usage=f"{program} [options] [arguments]",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=errors.format_exit_codes(codes),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=list(parents),
            allow_abbrev=False,
        )
        foreign.accept_negative_lists(self)  # values such as -4,-3, which look like flags
        self.add_argument("--debug", action="store_true", help="show tracebacks of errors")

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def _add_nothing(parser: Parser) -> None:
    pass


class Command(NamedTuple):
    """A command: what it does, its summary for the help, and its arguments."""

    run: Callable[[argparse.Namespace], int]  # returns the exit code
    summary: str
    add_arguments: Callable[[Parser], None] = _add_nothing
    parents: tuple[argparse.ArgumentParser, ...] = ()
    codes: Mapping[int, str] = types.MappingProxyType(
        {}
    )  # meanings that differ from `errors.format_exit_codes`

    def parser(self, name: str) -> Parser:
        """Returns the parser of the command."""
        parser = Parser(f"bert-jax {name}", self.summary, self.codes, self.parents)
        self.add_arguments(parser)
        return parser


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns a converter of an argument that accepts whole numbers from `least` to `most`."""

    def convert(text: str) -> int:
        value = int(text)
        _require_within(text, value, least, most)
        return value

    convert.__name__ = "int"  # shown in argparse's message "invalid int value"
    return convert


def number(least: float, most: float | None = None) -> Callable[[str], float]:
    """Returns a converter of an argument that accepts finite numbers from `least` to `most`."""

    def convert(text: str) -> float:
        value = float(text)
        _require_within(text, value, least, most)
        return value

    convert.__name__ = "float"
    return convert


def _require_within(text: str, value: float, least: float, most: float | None) -> None:
    if not least <= value <= (sys.float_info.max if most is None else most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text} must be {bounds}")


def integers(text: str) -> tuple[int, ...]:
    """Converts an argument such as -4,-3,-2,-1."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers as in -4,-3,-2,-1") from error
