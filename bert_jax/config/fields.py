"""Sections of a config: dataclasses whose fields are checked when an instance is created."""

import dataclasses
import functools
import math
import re
import reprlib
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn

from bert_jax.errors import InputError

# Every whole number is below this in size; indices of arrays have 32 bits.
_INTEGER_LIMIT = 2**32
# Bytes of a folder's name, as file systems allow them.
_LONGEST_NAME = 255
# NUL and lone surrogates. U+DC80 to U+DCFF are allowed: Python uses them for bytes of a path that
# are not UTF-8.
_INVALID_CHARACTERS = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
# A reference to a user's function, FILE:FUNCTION:SHA256; see `config.code`.
CODE = re.compile(r"([\w.-]+\.py):([A-Za-z_]\w*):([0-9a-f]{64})")


class FieldRule(NamedTuple):
    """A condition on the values of a field, given in its `Annotated` type."""

    holds: Callable[[Any], bool]
    reason: str


class RequiresValue(NamedTuple):
    """Restricts a field to certain values of another field; given in its `Annotated` type.

    The annotated field may be set only if the field named `field` has one of `values`. Otherwise
    setting it is an error if `field` is a name of the same section; if it is a path such as
    `model.kind`, only a note says that the setting has no effect (`files.notes_on_settings`).
    """

    field: str
    values: tuple[str, ...]


# A field, and what is wrong with its value.
Problem = tuple[str, str]


def minimum(least: int) -> FieldRule:
    """Returns a rule for numbers: at least `least`."""
    return FieldRule(lambda value: value >= least, f"must be at least {least}")


def subset_of(choices: tuple[str, ...]) -> FieldRule:
    """Returns a rule for tuples: each item is one of `choices`."""
    return FieldRule(lambda value: {*value} <= {*choices}, f"choose from {', '.join(choices)}")


def _is_folder_name(value: str) -> bool:
    is_plain = value.isprintable() and not set(value) & set("/\\ ") and value[:1] not in ("", ".")
    return is_plain and len(value.encode()) <= _LONGEST_NAME


Count = Annotated[int, minimum(0)]
PositiveCount = Annotated[int, minimum(1)]
RowLength = Annotated[int, minimum(8)]
Seed = Annotated[int, FieldRule(lambda value: 0 <= value < 2**32, "must be in [0, 2**32)")]
# XLA's CPU compiler aborts the process at a matrix with a longer side.
Side = Annotated[int, FieldRule(lambda value: 1 <= value < 2**31, "must be in [1, 2**31)")]
Positive = Annotated[float, FieldRule(lambda value: value > 0, "must be positive")]
Share = Annotated[float, FieldRule(lambda value: 0 <= value < 1, "must be in [0, 1)")]
WholeShare = Annotated[float, FieldRule(lambda value: 0 <= value <= 1, "must be in [0, 1]")]
PositiveShare = Annotated[float, FieldRule(lambda value: 0 < value <= 1, "must be in (0, 1]")]
FolderName = Annotated[
    str,
    FieldRule(_is_folder_name, "must be usable as a folder name, short, without blanks or slashes"),
]
Code = Annotated[
    str,
    FieldRule(
        lambda value: value == "" or CODE.fullmatch(value) is not None,
        "must be FILE:FUNCTION:SHA256, as bert_jax.config.own(FUNCTION) returns it",
    ),
]


@functools.cache
def fields_of(section: type["Section"]) -> dict[str, tuple[Any, list[Any]]]:
    """Returns the type and the rules of each field of a section."""
    plain = typing.get_type_hints(section)
    annotated = typing.get_type_hints(section, include_extras=True)
    names = section.__dataclass_fields__
    return {n: (plain[n], list(getattr(annotated[n], "__metadata__", ()))) for n in names}


class Section:
    """Base of the sections. Checks each field by its type and rules, then all by `_problems`."""

    role: ClassVar[Literal["identity", "placement"]]
    label: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # all are dataclasses

    def __init_subclass__(cls, role: Literal["identity", "placement"], label: str) -> None:
        cls.role, cls.label = role, label

    def __post_init__(self) -> None:
        for name, (hint, rules) in fields_of(type(self)).items():
            value = _convert(getattr(self, name), hint)
            object.__setattr__(self, name, value)
            _check_type(f"{self.label}.{name}", value, hint)
            for rule in rules:
                if isinstance(rule, FieldRule) and not rule.holds(value):
                    self._refuse(name, rule.reason)
                if isinstance(rule, RequiresValue) and "." not in rule.field:
                    other = getattr(self, rule.field)
                    if other not in rule.values and not self.is_default(name):
                        where = f"{self.label}.{rule.field}={other}"
                        self._refuse(name, f"has no meaning with {where}; remove it")
        for name, reason in self._problems():
            self._refuse(name, reason)

    def _problems(self) -> Iterator[Problem]:
        """Yields fields with impossible values, or paths such as `phases.0.steps`, with reasons."""
        yield from ()

    def _refuse(self, name: str, reason: str) -> NoReturn:
        where = name if "." in name else f"{self.label}.{name}"
        raise InputError(f"{where}={self._value_of(name)!r}: {reason}")

    def _value_of(self, path: str) -> Any:
        value: Any = self
        for key in path.split("."):
            value = value[int(key)] if key.isdecimal() else getattr(value, key)
        return value

    def is_default(self, name: str) -> bool:
        """Returns whether a field has its default value."""
        return getattr(self, name) == type(self).__dataclass_fields__[name].default


def _convert(value: Any, hint: Any) -> Any:
    """Converts whole numbers to floats and to tuples where the type of a field requires it."""
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if hint == tuple[int, ...] and type(value) is int:
        return (value,)
    if hint == tuple[float, ...] and isinstance(value, tuple):
        return tuple(_convert(item, float) for item in value)
    return value


def _check_type(where: str, value: object, hint: Any) -> None:
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            choices = filter(None, typing.get_args(hint))  # "" is often a choice, too
            raise InputError(f"{where}={value!r}: choose one of {', '.join(choices)}")
    elif typing.get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise InputError(
                f"{where}={reprlib.repr(value)}: expected a tuple; write (A, B), or (A,) for one"
            )
        for i, item in enumerate(value):
            _check_type(f"{where}[{i}]", item, typing.get_args(hint)[0])
    elif type(value) is not hint:
        raise InputError(f"{where}={reprlib.repr(value)}: expected {hint.__name__}")
    elif hint is float and not math.isfinite(value):
        raise InputError(f"{where}={value!r}: must be a finite number")
    elif hint is int and abs(value) >= _INTEGER_LIMIT:
        raise InputError(f"{where}: {str(value)[:20]}... is too large; must be below 2**32")
    elif hint is str and _INVALID_CHARACTERS.search(value):
        raise InputError(f"{where}={value!r}: contains a NUL or half of a surrogate pair")
