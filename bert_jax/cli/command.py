"""What a command is: a function whose docstring is its manual; and steps that several share."""

import argparse
import dataclasses
import keyword
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from etils import epath

from bert_jax import config
from bert_jax.config import Experiment, Section
from bert_jax.errors import FAILED, FINISHED, STOPPED, InputError
from bert_jax.storage import buckets, mirror
from bert_jax.storage.workdir import COMPLETE, Workdir, holds_finetuning, load_experiment

# Exit codes of runs, by how they ended.
CODES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}

T = typing.TypeVar("T", bound=Section)
Function = Callable[[argparse.Namespace], int]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: its function, what it does, its arguments, what else its help shows."""

    function: Function
    summary: str  # the first line of its docstring
    arguments: str  # the rest, as `add_arguments` reads them
    fields: type[Section] | None  # whose settings the help lists
    codes: Mapping[int, str]  # exit codes that mean something of this command's own


COMMANDS: dict[str, Command] = {}


def command(
    name: str | None = None,
    fields: type[Section] | None = None,
    codes: Mapping[int, str] = types.MappingProxyType({}),
) -> Callable[[Function], Function]:
    """Makes a function a command, which is called as the function is."""

    def register(function: Function) -> Function:
        called = name or function.__name__.strip("_").replace("_", "-")
        summary, _, arguments = (function.__doc__ or "").partition("\n")
        COMMANDS[called] = Command(function, summary, arguments, fields, codes)
        return function

    return register


# Arguments of several commands, by the words that stand for them in a manual.
SHARED = {
    "EXPERIMENT": """
        EXPERIMENT: a .py file that defines experiment(), the name of one that is shipped (tiny,
            bert_base), or a resolved config as .json
        """,
    "SAVED_EXPERIMENT": """
        [EXPERIMENT]: a .py file that defines experiment(), the name of one that is shipped (tiny,
            bert_base), or a resolved config as .json; left out: the config saved in --workdir
        """,
    "WORKDIR": "--workdir W: where the run lives [runs/NAME]",
    "RUN_OR_BASE": "--workdir W (required): a run or a base",
    "SETTINGS": """
        --set FIELD=VALUE...: change a field of the experiment, e.g. phases.0.steps=100; may be
            repeated
        """,
    "CACHE": """
        --cache-dir D: this machine's folder for compiled programs and for copies of corpora in
            buckets [$BERT_JAX_CACHE_DIR, or bert_jax in the user's cache folder]
        """,
    "CODE": """
        --code FILE: the .py file of an experiment's own objective or encoder; it is run only if its
            hash is the one that the config names
        """,
    "CHECKPOINT": """
        --checkpoint STEP (= newest): of a run: newest, best (by held-out loss), or a step
        """,
    "COLUMNS": """
        --text COLUMN: column of the text, or of the first of two [as the task says, else sentence]
        --second COLUMN: column of the second text of a pair or a regression
        --label COLUMN: column of the answer [as the task says, else label]
        --header (first_line | none): whether the first line of a .tsv or .csv names its columns;
            none: they are numbered from 0 [as the task says, else first_line]
        --broken-rows (stop | skip): whether a row that is no example ends the command, or is left
            out and counted [as the task says, else stop]
        """,
    "TUNED_BASE": "--from BASE: of a fine-tuned run: the folder of its base, if it was moved",
    "PRICE": """
        --price-per-chip-hour X (float from 0): price of one chip for an hour, in any currency, to
            show costs
        """,
    "POOLING": """
        --pooling (mean | cls | last): a text's vector: mean of its tokens, or that of [CLS], or of
            the last token [as the run or base says, else mean]
        """,
    # Which vectors `embed`, `serve` and `search` give.
    "FEATURES": """
        --layers N,N (numbers = -1): layers whose vectors are taken: 0 the embeddings, 1 the first,
            -1 the last
        --combine (concat | mean = concat): how vectors of several layers become one
        --max-length N (int = 0): most tokens of a text, longer texts are cut; 0: as the run or base
            says, else all positions of the model
        --batch-tokens N (int = 0): tokens that a device works on at a time; 0: 512 on a CPU, 16384
            elsewhere
        --dimensions N (int = 0): keep the first N numbers of each vector alone; 0: all
        """,
    "NORMALIZE": """
        --normalize (yes or no): scale each vector to length 1 [as the run or base says]
        """,
}

# Fields of a task, by the flag of COLUMNS that sets them.
COLUMNS = {
    "text": "text_column",
    "second": "second_column",
    "label": "label_column",
    "header": "header",
    "broken_rows": "broken_rows",
}

_DECLARED = re.compile(
    r"(?P<open>\[)?(?P<name>[\w-]+)(?: (?P<metavar>'[^']+'|[^\s(]\S*?))?(?P<many>\.{3})?\]?"
    r"(?: \((?P<kind>[^)=]*?)(?: ?= (?P<default>[^)]*))?\))?: (?P<help>.*)"
)
_CHOICES = {"Kind": typing.get_args(config.Kind)}


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers as in -4,-3,-2,-1") from error


_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "numbers": _numbers}


def _type(kind: str, flag: str) -> Callable[[str], Any] | None:
    """Returns what makes a value of a word: `int`, `int from 1`, `int from 1 to 64`; None: text."""
    name, _, bounds = kind.partition(" from ")
    least, _, most = bounds.partition(" to ")
    if not bounds:
        return _TYPES.get(name)
    wanted = f"from {bounds}" if most else f"at least {least}"

    def within(text: str) -> Any:
        value = _TYPES[name](text)
        if not float(least) <= value <= float(most or sys.float_info.max):
            raise InputError(f"{flag} {text}: must be {wanted}")
        return value

    within.__name__ = name  # which argparse shows for what is no number
    return within


def add_arguments(parser: argparse.ArgumentParser, manual: str) -> None:
    """Adds the arguments of a manual.

    `NAME: help` is a word, `[NAME]` one that may be left out, `--flag: help` a flag that is given
    or not, `--flag VALUE: help` one with a value. `...` after it says that it may be repeated. In
    parentheses follow a type, words to choose from, `required` or `several`; and `= DEFAULT`. Words
    of SHARED alone on a line stand for what these have.
    """
    for text in re.split(r"\n(?=\S)", textwrap.dedent(manual).strip()):
        if ":" not in text:
            for word in text.split():
                add_arguments(parser, SHARED[word])
            continue
        match = _DECLARED.fullmatch(" ".join(text.split()))
        assert match is not None, text
        name, metavar, kind, default = match.group("name", "metavar", "kind", "default")
        options: dict[str, Any] = {"help": match["help"] + (f" [{default}]" if default else "")}
        if kind == "yes or no":
            options["action"] = argparse.BooleanOptionalAction
        elif not name.startswith("--"):
            name, options["metavar"] = name.lower(), name
            nargs = {("[", None): "?", ("[", "..."): "*", (None, "..."): "+"}
            options["nargs"] = nargs.get(match.group("open", "many"))
        elif metavar is None and not kind:
            options["action"] = "store_true"
        else:
            options |= {"metavar": metavar, "default": default, "type": _type(kind or "", name)}
            if match["many"]:
                options |= {"action": "append", "default": []}
            if (metavar or "").startswith("["):
                options |= {"metavar": metavar.strip("[]"), "nargs": "?", "const": ""}
            if keyword.iskeyword(name[2:]):  # no name of an attribute
                options["dest"] = (metavar or "kind").lower()
        if kind == "required":
            options["required"] = True
        elif kind == "several":
            options |= {"nargs": "+", "default": []}
        elif kind in _CHOICES or "|" in (kind or ""):
            options["choices"] = _CHOICES.get(kind) or kind.split(" | ")
        parser.add_argument(name, **options)


# --- what commands share ---


def experiment_of(args: argparse.Namespace, access: Literal["read", "write"] = "read"):
    """Returns the experiment that the arguments name, and its workdir; see mirror.open_workdir."""
    if args.experiment is None:
        experiment = saved_experiment(args, Experiment)
    else:
        experiment = config.override(config.load(args.experiment), args.set)
    return experiment, workdir_of(args, experiment, access)


def saved_experiment(args: argparse.Namespace, kind: type[T]) -> T:
    """Returns the experiment of the run in --workdir, and what --set says of it."""
    if not args.workdir:
        raise InputError("name an EXPERIMENT, or the --workdir of a run")
    return config.override(load_experiment(mirror.open_workdir(args.workdir), kind), args.set)


def workdir_of(args: argparse.Namespace, experiment: Experiment, access: Literal["read", "write"]):
    """Returns the workdir that the arguments name, or the experiment's; see mirror.open_workdir."""
    root = args.workdir or f"runs/{experiment.name}"
    return mirror.open_workdir(root, experiment.run.corpus_dir, access)


def require_run(place: str) -> None:
    """Raises InputError if no run and no base lies in a folder, before jax is loaded to read it."""
    if "://" not in place:  # a bucket is asked once
        run = mirror.open_workdir(place)
        if not (run.root / "base.json").exists() and not holds_finetuning(run):
            load_experiment(run)


def require_file(flag: str, path: str | None) -> None:
    """Raises InputError unless a file can be written there, before there is anything to write."""
    if path is None or "://" in path:
        return
    if os.path.isdir(path):
        raise InputError(f"{flag} {path}: is a folder; name a file")
    folder = os.path.dirname(path) or "."
    while not os.path.exists(folder):
        folder = os.path.dirname(folder) or "."
    if not os.path.isdir(folder):
        raise InputError(f"{flag} {path}: {folder} is a file where a folder is needed")


def require_corpus(workdir: Workdir) -> None:
    """Raises InputError if a run has no prepared corpus, before jax is loaded to read its rows."""
    if not buckets.exists(workdir.corpus / COMPLETE):
        raise InputError(f"{workdir.corpus}: no prepared corpus here; run `bert-jax prepare` first")


def is_finetuned(args: argparse.Namespace, *others: str, tuned: tuple[str, ...] = ("base",)):
    """Returns whether --workdir has a fine-tuned run; refuses flags of what it has not.

    Args:
      args: of the command.
      others: flags that no fine-tuned run takes.
      tuned: those that only such a run takes.
    """
    require_run(args.workdir)
    is_tuned = holds_finetuning(mirror.open_workdir(args.workdir))
    for name in others if is_tuned else tuned:
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            flag = name.replace("base", "from").replace("_", "-")
            runs = "no" if is_tuned else "only a"
            why = f"{runs} fine-tuned run takes this; leave it out"
            raise InputError(f"--{flag}: {args.workdir}: {why}")
    return is_tuned


def columns_of(args: argparse.Namespace) -> dict[str, str]:
    """Returns the fields of a task that the flags of COLUMNS set."""
    given = {field: getattr(args, flag) for flag, field in COLUMNS.items()}
    return {field: value for field, value in given.items() if value is not None}


def trained_of(args: argparse.Namespace):
    """Returns the model of the run or base in --workdir, as --checkpoint names it.

    Of a fine-tuned run it is the encoder as it was adapted.
    """
    require_run(args.workdir)
    is_tuned = "base" in args and is_finetuned(args)
    from bert_jax.pretraining.loaded import Loaded
    from bert_jax.running.environment import keep_compiled_programs

    keep_compiled_programs()
    if is_tuned:
        from bert_jax.tasks.predict import TaskModel

        return TaskModel(args.workdir, args.base, args.checkpoint).encoder()
    return Loaded.of(epath.Path(args.workdir), which=args.checkpoint)


def input_lines() -> Iterator[tuple[str, str]]:
    """Yields (where, line) of standard input."""
    from bert_jax.text import lines

    return lines.decoded(sys.stdin.buffer, "standard input")


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)
