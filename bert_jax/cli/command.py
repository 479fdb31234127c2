"""What a command is, and the arguments and steps that several share."""

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from bert_jax import config
from bert_jax.config import Experiment, Section
from bert_jax.errors import FAILED, FINISHED, STOPPED, InputError

# Exit codes of runs, by how they ended.
CODES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}

T = typing.TypeVar("T", bound=Section)
# Adds an argument to a command's parser.
Argument = Callable[[argparse.ArgumentParser], Any]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: its function, what adds its arguments, and what else its help shows."""

    function: Callable[[argparse.Namespace], int]
    arguments: tuple[Argument, ...]
    fields: type[Section] | None  # whose settings the help lists
    codes: Mapping[int, str]  # exit codes that mean something of this command's own


COMMANDS: dict[str, Command] = {}


def command(
    *arguments: Argument,
    name: str | None = None,
    fields: type[Section] | None = None,
    codes: Mapping[int, str] = types.MappingProxyType({}),
) -> Callable[[Callable[[argparse.Namespace], int]], Callable[[argparse.Namespace], int]]:
    """Makes a function a command, which is called as the function is and takes these arguments."""

    def register(function: Callable[[argparse.Namespace], int]):
        called = name or function.__name__.strip("_").replace("_", "-")
        COMMANDS[called] = Command(function, arguments, fields, codes)
        return function

    return register


def argument(*names: str, **options: Any) -> Argument:
    """Declares an argument as `argparse` takes it."""
    return lambda parser: parser.add_argument(*names, **options)


def flag(name: str, help: str, **options: Any) -> Argument:
    """Declares a flag that is given or not."""
    return argument(name, action="store_true", help=help, **options)


def settings(of: str = "experiment", example: str = "phases.0.steps=100") -> Argument:
    """Declares `--set`, for the fields of an experiment or of a task's file."""
    return argument(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help=f"change a field of the {of}, e.g. {example}; may be repeated",
    )


EXPERIMENT = argument(
    "experiment",
    metavar="EXPERIMENT",
    help="a .py file that defines experiment(), the name of one that is shipped (tiny, bert_base), "
    "or a resolved config as .json",
)
SAVED_EXPERIMENT = argument(
    "experiment",
    metavar="EXPERIMENT",
    nargs="?",
    help="a .py file that defines experiment(), the name of one that is shipped (tiny, bert_base), "
    "or a resolved config as .json; left out: the config saved in --workdir",
)
WORKDIR = argument("--workdir", metavar="W", help="where the run lives [runs/NAME]")
CACHE = argument(
    "--cache-dir",
    metavar="D",
    help="this machine's folder for compiled programs and for copies of corpora in buckets "
    "[$BERT_JAX_CACHE_DIR, or bert_jax in the user's cache folder]",
)
CODE = argument(
    "--code",
    metavar="FILE",
    help="the .py file of an experiment's own objective or encoder; it is run only if its hash is "
    "the one that the config names",
)
CHECKPOINT = argument(
    "--checkpoint",
    default="newest",
    metavar="STEP",
    help="of a run: newest, best (by held-out loss), or a step [newest]",
)
TUNED_BASE = argument(
    "--from",
    dest="base",
    metavar="BASE",
    help="of a fine-tuned run: the folder of its base, if it was moved",
)
PRICE = argument(
    "--price-per-chip-hour",
    type=float,
    metavar="X",
    help="price of one chip for an hour, in any currency, to show costs",
)


# --- what commands share ---


def experiment_of(args: argparse.Namespace, access: Literal["read", "write"] = "read"):
    """Returns the experiment that the arguments name, and its workdir; see mirror.opened."""
    if args.experiment is None:
        experiment = saved_experiment(args, Experiment)
    else:
        experiment = config.override(config.load(args.experiment), args.set)
    return experiment, workdir_of(args, experiment, access)


def saved_experiment(args: argparse.Namespace, kind: type[T]) -> T:
    """Returns the experiment of the run in --workdir, and what --set says of it."""
    from bert_jax.storage import mirror
    from bert_jax.storage.workdir import load_experiment

    if not args.workdir:
        raise InputError("name an EXPERIMENT, or the --workdir of a run")
    return config.override(load_experiment(mirror.opened(args.workdir), kind), args.set)


def workdir_of(args: argparse.Namespace, experiment: Experiment, access: Literal["read", "write"]):
    """Returns the workdir that the arguments name, or the experiment's own; see mirror.opened."""
    from bert_jax.storage import mirror

    root = args.workdir or f"runs/{experiment.name}"
    return mirror.opened(root, experiment.run.corpus_dir, access)


def trained_of(args: argparse.Namespace):
    """Returns the model of the run or base in --workdir, as --checkpoint names it."""
    from etils import epath

    from bert_jax.loaded import Loaded
    from bert_jax.training.environment import keep_compiled_programs

    keep_compiled_programs()
    return Loaded.of(epath.Path(args.workdir), which=args.checkpoint)


def input_lines() -> Iterator[tuple[str, str]]:
    """Yields (where, line) of standard input."""
    from bert_jax.text import lines

    return lines.decoded(sys.stdin.buffer, "standard input")


def asked_lines() -> Iterator[tuple[str, str, str | None]]:
    """Yields (where, A, B) of the lines of standard input that hold something."""
    for where, line in input_lines():
        a, tab, b = line.partition("\t")
        if line.strip():
            yield where, a, b if tab else None


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)
