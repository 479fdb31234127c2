"""Commands, their arguments and parsers, and converters of arguments."""

import argparse
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from absl.flags import argparse_flags

from bert_jax import errors, private_apis
from bert_jax.errors import InputError


class Argument:
    """An argument of a command.

    Args:
      *names: the flags, or the name of a positional argument.
      group: title of its group in the help; "" for the command's own arguments.
      **options: those of `ArgumentParser.add_argument`. Callers end `help` with the default in
        brackets.
    """

    def __init__(self, *names: str, group: str = "", **options: Any):
        if options.get("action") == "store_true":
            options.setdefault("default", False)
        self.names, self.group, self.options = names, group, options
        self.dest = options.get("dest", names[0].lstrip("-").replace("-", "_"))
        self.default = options.get("default")


class Parser(argparse_flags.ArgumentParser):
    """A parser that raises InputError for bad usage. It also takes absl's flags."""

    def __init__(
        self,
        program: str,
        summary: str,
        exit_codes: Mapping[int, str],
        arguments: Sequence[Argument] = (),
    ):
        super().__init__(
            prog=program,
            usage=f"{program} [options] [arguments]",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=errors.format_exit_codes(exit_codes),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        private_apis.accept_negative_lists(self)  # values such as -4,-3, which look like flags
        self.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        groups: dict[str, Any] = {"": self}
        for argument in arguments:
            if argument.group not in groups:
                groups[argument.group] = self.add_argument_group(argument.group)
            groups[argument.group].add_argument(*argument.names, **argument.options)

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def find_changed_flags(args: argparse.Namespace, flags: Iterable[str]) -> dict[Argument, Any]:
    """Returns {argument: value} of the flags whose value is not their default."""
    selected = (argument for argument in args.command.arguments if argument.names[0] in flags)
    values = {argument: getattr(args, argument.dest) for argument in selected}
    return {argument: value for argument, value in values.items() if value != argument.default}


def reject_flags(args: argparse.Namespace, flags: Iterable[str], reason: str) -> None:
    """Raises InputError for the first of the flags whose value is not its default."""
    for argument in find_changed_flags(args, flags):
        flag = argument.names[0]
        raise InputError(f"{flag}: {reason}; remove {flag}")


Handler = Callable[[argparse.Namespace], int]  # executes a command; returns the exit code


class Command(NamedTuple):
    """A command: its function, its summary for the help, and its arguments."""

    run: Handler
    summary: str
    arguments: tuple[Argument, ...]
    exit_codes: Mapping[int, str]  # overrides for `errors.format_exit_codes`

    def parser(self, name: str) -> Parser:
        """Returns the parser of the command."""
        return Parser(f"bert-jax {name}", self.summary, self.exit_codes, self.arguments)


class CommandTable(dict[str, Command]):
    """Commands by name, in the order of the help."""

    def add(
        self,
        name: str,
        summary: str,
        *arguments: Argument,
        exit_codes: Mapping[int, str] = types.MappingProxyType({}),
    ) -> Callable[[Handler], Handler]:
        """Returns a decorator that adds a function as a command; see `Command`."""

        def decorate(run: Handler) -> Handler:
            self[name] = Command(run, summary, arguments, exit_codes)
            return run

        return decorate


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


def integer_list(text: str) -> tuple[int, ...]:
    """Converts an argument such as -4,-3,-2,-1."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers as in -4,-3,-2,-1") from error
