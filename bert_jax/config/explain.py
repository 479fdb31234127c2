"""The fields of an experiment, explained: read from the sections, for help, docs and errors."""

import dataclasses
import difflib
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from bert_jax.config.fields import Section, fields_of
from bert_jax.config.finetuning import Finetuning
from bert_jax.config.pretraining import Experiment
from bert_jax.errors import InputError

# What a value has to be, in words.
TYPES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple[int, ...]: "whole numbers: 1,4",
    tuple[float, ...]: "numbers: 3,1",
    tuple[str, ...]: "texts: A,B",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field, as `--set` names it."""

    path: str  # `model.hidden_size`; of a phase `phases.N.steps`
    type: str  # in words
    choices: tuple[str, ...]  # the values it can have; empty: any of its type
    default: str | None  # as `--set` takes it; None: it must be given
    comment: str  # what it means
    role: str  # of its section, "identity" or "placement"

    def __str__(self) -> str:
        what = f"one of {', '.join(self.choices)}" if self.choices else self.type
        default = "must be given" if self.default is None else f"default {self.default or 'empty'}"
        comment = textwrap.fill(self.comment, 96, initial_indent="    ", subsequent_indent="    ")
        return f"{self.path}: {what}; {default}\n{comment}"


@functools.cache
def settings(root: type[Section]) -> tuple[Setting, ...]:
    """Lists all fields of an `Experiment` or a `Finetuning`, in their order."""
    return tuple(_settings(root, "", None))


def _settings(section: type[Section], path: str, example: Section | None) -> Iterator[Setting]:
    comments = _comments(section)
    for field in dataclasses.fields(section):
        hint, where, default = fields_of(section)[field.name][0], path + field.name, field.default
        if example is not None:
            default = getattr(example, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
        if dataclasses.is_dataclass(inner):
            below = where + (".N." if get_origin(hint) is tuple else ".")
            yield from _settings(inner, below, default if isinstance(default, Section) else None)
            continue
        choices = tuple(filter(None, get_args(hint))) if get_origin(hint) is Literal else ()
        word = TYPES.get(hint, "a word")
        text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        given = None if default is dataclasses.MISSING else text
        yield Setting(where, word, choices, given, comments[field.name], section.role)


@functools.cache
def _comments(section: type[Section]) -> dict[str, str]:
    """Reads the comment lines above each field, from the source of the section."""
    _, _, body = inspect.getsource(sys.modules[section.__module__]).partition(
        f"\nclass {section.__name__}("
    )
    above = re.findall(r"((?:^    # .*\n)+)    (\w+): ", body.partition("\nclass ")[0], re.M)
    return {name: " ".join(re.findall(r"# (.*)", lines)) for lines, name in above}


def sections(root: type[Section]) -> dict[str, list[Setting]]:
    """Groups the fields by their section's path: `model`, `phases.N`, "" for the experiment's."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings(root):
        groups.setdefault(setting.path.rpartition(".")[0], []).append(setting)
    return groups


def fields(root: type[Section]) -> str:
    """Returns all fields as `--help` shows them."""
    lines = ["fields, as --set FIELD=VALUE takes them:"]
    for group in sections(root).values():
        lines += ["", *(textwrap.indent(str(setting), "  ") for setting in group)]
    return "\n".join(lines)


def explain(name: str) -> str:
    """Returns what `config --explain` prints of a field, of a section, or ("") of all."""
    every = {s.path: s for s in settings(Finetuning)}
    for s in settings(Experiment):
        tuned = every.get(s.path, s).default
        default = s.default if tuned == s.default else f"{s.default}, of a fine-tuning {tuned}"
        every[s.path] = dataclasses.replace(s, default=default)
    wanted = ".".join("N" if part.isdecimal() else part for part in name.split("."))
    chosen = [
        s
        for path, s in every.items()
        if not wanted or path == wanted or f"{path}.".startswith((f"{wanted}.", f"{wanted}.N."))
    ]
    if not chosen:
        raise InputError(f"--explain {name}: no such field or section; {suggestion(name, every)}")
    return "\n".join(map(str, chosen))


def suggestion(name: str, known: Any) -> str:
    """Returns the sentence that names the fields nearest to a wrong one.

    It knows slips of the pen, and parts of names and their initials: `lr` is in
    `optimizer.peak_learning_rate`, `hidden` in `model.hidden_size`.
    """
    key = name.rpartition(".")[2].lower()

    def likeness(path: str) -> float:
        field = path.rpartition(".")[2]
        ratio = difflib.SequenceMatcher(None, key, field).ratio()
        initials = "".join(word[0] for word in field.split("_"))
        known_part = len(key) > 2 and (key in field or key.startswith(field))
        return max(ratio, 0.9 * known_part, 0.8 * (len(key) > 1 and initials.endswith(key)))

    best = sorted(known, key=likeness, reverse=True)[:3]
    least = max(0.6, likeness(best[0]) - 0.1)
    near = [path for path in best if likeness(path) > least]
    if not near:
        return "`bert-jax config --explain` lists all"
    return f"did you mean {' or '.join(near)}?"
