"""`bert-jax COMMAND`: parses the command line, runs the command and reports its errors."""

import argparse
import difflib
import errno
import io
import os
import sys
import textwrap
from collections.abc import Sequence

from absl import app, flags, logging

from bert_jax import __version__, errors
from bert_jax.cli import (
    check_commands,
    exchange_commands,
    inspect_commands,
    train_commands,
    use_commands,
    vector_commands,
)
from bert_jax.cli.parsing import Command, CommandTable, Parser
from bert_jax.config.code import allow_code_file, was_used
from bert_jax.errors import FAILED, FINISHED, InputError, printable
from bert_jax.interop import hub
from bert_jax.process import prepare_process
from bert_jax.storage import retry
from bert_jax.system import restart_in_utf8_mode

_LAUNCH = CommandTable()


@_LAUNCH.add("launch", "start a run in several processes, here or on rented machines")
def launch(args: argparse.Namespace) -> int:
    """Starts a run in several processes."""
    from bert_jax.launch.__main__ import main

    return main(args.argv)


# The commands in the order of the help.
GROUPS = {
    "train": train_commands.COMMANDS,
    "use": CommandTable({**use_commands.COMMANDS, **vector_commands.COMMANDS}),
    "exchange": exchange_commands.COMMANDS,
    "inspect": inspect_commands.COMMANDS,
    "check": check_commands.COMMANDS,
    "launch": _LAUNCH,
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

# Former flags of `pretrain`, and the commands that replace them.
_FORMER_FLAGS = {
    "--text": "auto TEXT --hours H",
    "--hours": "auto TEXT --hours H",
    "--base": "auto TEXT --hours H --base B",
    "--fork": "fork RUN/checkpoints/STEP --workdir NEW",
    "--decay-from": "decay RUN/checkpoints/STEP --workdir NEW",
    "--extend": "extend --workdir W",
}


def _summary(name: str, command: Command) -> str:
    return textwrap.fill(
        command.summary, 100, initial_indent=f"    {name:<24}", subsequent_indent=28 * " "
    )


def _program_parser() -> Parser:
    """Returns the parser of the options before COMMAND; its help lists all exit codes."""
    parser = Parser("bert-jax", "plain text in, a pre-trained BERT out", errors.TRAINING_EXIT_CODES)
    lines = ["commands (`bert-jax COMMAND --help` describes one):"]
    for title, commands in GROUPS.items():
        lines += ["", f"  {title}:", *(_summary(*item) for item in commands.items())]
    parser.usage = "bert-jax [--debug] COMMAND ..."
    parser.epilog = "\n".join([*lines, "", parser.epilog or ""])
    parser.add_argument("--version", action="version", version=f"bert-jax {__version__}")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of a command. `.command` is the Command to run."""
    try:
        return _parse(list(argv))
    except flags.Error as error:  # an invalid value of one of absl's flags
        raise InputError(str(error)) from error


def _parse(argv: list[str]) -> argparse.Namespace:
    command_index = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    program = _program_parser()
    is_debugging = program.parse_args(argv[:command_index]).debug
    if command_index == len(argv):
        program.error("COMMAND is missing")
    name, rest = argv[command_index], argv[command_index + 1 :]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise InputError(f"{name}: no such command; {hint}")
    _reject_old_syntax(name, rest)
    chosen = COMMANDS[name]
    namespace = argparse.Namespace(command=chosen, argv=rest, debug=is_debugging)
    if name == "launch":  # it has a parser of its own
        return namespace
    parser = chosen.parser(name)
    # `parse_intermixed_args` allows positional arguments between flags, but mishandles "--".
    parse_rest = parser.parse_args if "--" in rest else parser.parse_intermixed_args
    return parse_rest(rest, namespace)


def _reject_old_syntax(name: str, words: Sequence[str]) -> None:
    """Raises InputError for a flag or word that has become a command."""
    if name == "conformance" and list(words[:1]) == ["instances"]:
        raise InputError("conformance instances: is now `bert-jax conformance-instances`")
    if name == "pretrain":
        for flag in (word.partition("=")[0] for word in words):
            if flag in _FORMER_FLAGS:
                raise InputError(f"{flag}: is now a command, `bert-jax {_FORMER_FLAGS[flag]}`")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command in this process and returns its exit code; `--help` raises SystemExit.

    Args:
      argv: the arguments. If None, they are those of sys.argv, and the command runs under absl.app,
        which ends the process with the exit code: the function does not return.
    """
    if argv is None:
        restart_in_utf8_mode()
        if sys.stderr.isatty():
            logging.get_absl_handler().setFormatter(None)  # plain messages
        app.run(_run, flags_parser=_parse_or_exit)
        raise AssertionError("absl.app.run ends the process")
    try:
        args = parse(argv)
    except InputError as error:
        return _report(error, argv)
    return _run(args)


def _parse_or_exit(argv: Sequence[str]) -> argparse.Namespace:
    try:
        args = parse(argv[1:])
    except InputError as error:
        raise SystemExit(_report(error, argv[1:])) from None
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.WARNING)  # absl.app would set INFO
    return args


def _run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code; prints an error in one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the encoding may be ASCII
    prepare_process()
    retry.control.reset(report=lambda line: print(line, file=sys.stderr))  # shows retries
    try:
        code_file = getattr(args, "code", None)
        if getattr(args, "cache_dir", None):
            # An environment variable, because child processes inherit it.
            os.environ["BERT_JAX_CACHE_DIR"] = os.path.abspath(args.cache_dir)
        if code_file:
            allow_code_file(code_file)
        if getattr(args, "base", None):
            args.base = hub.fetch_base(args.base)  # downloads a hub model
        exit_code = args.command.run(args)
        if code_file and exit_code == FINISHED and not was_used(code_file):
            print(
                f"--code {printable(code_file)}: this command did not use it; remove --code",
                file=sys.stderr,
            )
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:
        _drop_output()
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if args.debug and isinstance(error, Exception):
            raise
        return _report(error, args.argv)


def _report(error: BaseException, argv: Sequence[str]) -> int:
    if isinstance(error, KeyError) and str(error.args[0]).endswith("://"):
        # etils raises KeyError("s3://") for an address that it has no backend for.
        path = next((word for word in argv if error.args[0] in word), error.args[0])
        error = InputError(f"{path}: not a local path or a bucket (gs://); download it first")
    if isinstance(error, OSError):
        kind: type[Exception] = InputError
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = errors.DiskFull
            # Our own writes set error.filename; if it is None, standard output failed.
            if error.filename is None:
                error.filename = "standard output"
                _drop_output()
        if error.filename is not None:
            error = kind(f"{error.filename}: {error.strerror}")
    line, code = errors.message_and_code(error)
    print(line, file=sys.stderr)
    return code


def _drop_output() -> None:
    """Redirects standard output to the null device, so that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
