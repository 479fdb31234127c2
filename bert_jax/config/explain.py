"""Explanations of an experiment's fields, read from the sections, for help, docs and errors."""

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

# The descriptions of the types of values.
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

    path: str  # such as `model.hidden_size`; for a phase `phases.N.steps`
    type: str  # a value of TYPES
    choices: tuple[str, ...]  # the allowed values; empty: any of the type
    default: str | None  # as `--set` takes it; None: the field is required
    comment: str  # the meaning
    role: str  # of its section, "identity" or "placement"

    def __str__(self) -> str:
        values = f"one of {', '.join(self.choices)}" if self.choices else self.type
        default = "must be given" if self.default is None else f"default {self.default or 'empty'}"
        comment = textwrap.fill(self.comment, 96, initial_indent="    ", subsequent_indent="    ")
        return f"{self.path}: {values}; {default}\n{comment}"


@functools.cache
def settings(root: type[Section]) -> tuple[Setting, ...]:
    """Returns all fields of an `Experiment` or a `Finetuning`, in their order."""
    return tuple(_settings(root, "", None))


def _settings(section: type[Section], path: str, example: Section | None) -> Iterator[Setting]:
    comments = _comments(section)
    for field in dataclasses.fields(section):
        hint, default = fields_of(section)[field.name][0], field.default
        if example is not None:
            default = getattr(example, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
        if dataclasses.is_dataclass(inner):
            prefix = path + field.name + (".N." if get_origin(hint) is tuple else ".")
            yield from _settings(inner, prefix, default if isinstance(default, Section) else None)
            continue
        choices = tuple(filter(None, get_args(hint))) if get_origin(hint) is Literal else ()
        text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        text = None if default is dataclasses.MISSING else text
        kind, comment = TYPES.get(hint, "a word"), comments[field.name]
        yield Setting(path + field.name, kind, choices, text, comment, section.role)


@functools.cache
def _comments(section: type[Section]) -> dict[str, str]:
    """Reads the comment lines above each field from the source code of the section."""
    _, _, body = inspect.getsource(sys.modules[section.__module__]).partition(
        f"\nclass {section.__name__}("
    )
    comments = re.findall(r"((?:^    # .*\n)+)    (\w+): ", body.partition("\nclass ")[0], re.M)
    return {name: " ".join(re.findall(r"# (.*)", lines)) for lines, name in comments}


def sections(root: type[Section]) -> dict[str, list[Setting]]:
    """Groups the fields by the path of their section: `model`, `phases.N`, "" for the top."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings(root):
        groups.setdefault(setting.path.rpartition(".")[0], []).append(setting)
    return groups


def fields(root: type[Section]) -> str:
    """Formats all fields for `--help`."""
    lines = ["fields, as --set FIELD=VALUE takes them:"]
    for group in sections(root).values():
        lines += ["", *(textwrap.indent(str(setting), "  ") for setting in group)]
    return "\n".join(lines)


def explain(name: str) -> str:
    """Returns what `config --explain` prints for a field, a section or, given "", all fields."""
    by_path = {s.path: s for s in settings(Finetuning)}
    for s in settings(Experiment):
        tuned = by_path.get(s.path, s).default
        default = s.default if tuned == s.default else f"{s.default}, of a fine-tuning {tuned}"
        by_path[s.path] = dataclasses.replace(s, default=default)
    key = ".".join("N" if part.isdecimal() else part for part in name.split("."))
    matches = [
        s
        for path, s in by_path.items()
        if not key or path == key or f"{path}.".startswith((f"{key}.", f"{key}.N."))
    ]
    if not matches:
        raise InputError(f"--explain {name}: no such field or section; {suggestion(name, by_path)}")
    return "\n".join(map(str, matches))


def suggestion(name: str, known: Any) -> str:
    """Returns a hint that names the known fields most similar to an unknown one.

    Recognizes typing errors, parts of names and initials: `lr` finds
    `optimizer.peak_learning_rate`, `hidden` finds `model.hidden_size`.
    """
    key = name.rpartition(".")[2].lower()

    def similarity(path: str) -> float:
        field = path.rpartition(".")[2]
        ratio = difflib.SequenceMatcher(None, key, field).ratio()
        initials = "".join(word[0] for word in field.split("_"))
        is_part = len(key) > 2 and (key in field or key.startswith(field))
        return max(ratio, 0.9 * is_part, 0.8 * (len(key) > 1 and initials.endswith(key)))

    best = sorted(known, key=similarity, reverse=True)[:3]
    threshold = max(0.6, similarity(best[0]) - 0.1)
    similar = [path for path in best if similarity(path) > threshold]
    if not similar:
        return "`bert-jax config --explain` lists all"
    return f"did you mean {' or '.join(similar)}?"
