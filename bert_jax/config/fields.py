"""Sections of configuration: dataclasses whose fields are checked where they are built."""

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

# No size, count or interval is larger, and arrays are indexed with no more bits.
_INTEGERS = 2**32
# Bytes of a folder's name, as file systems allow them.
_LONGEST_NAME = 255
# What paths and files of ours cannot hold; other halves of pairs are bytes of paths.
_NO_TEXT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
# A function of a file, and the file's hash; see `config.code`.
CODE = re.compile(r"([\w.-]+\.py):([A-Za-z_]\w*):([0-9a-f]{64})")


class FieldRule(NamedTuple):
    """A condition on the values of a field, which stands in its type, as `Annotated` has it."""

    holds: Callable[[Any], bool]
    why: str


class RequiresValue(NamedTuple):
    """Says, in a field's type, that it means something with some values of another field alone.

    Else it is refused, unless the other is named by its path in the experiment: then a note says
    that it changes nothing (`files.notes`).
    """

    field: str
    values: tuple[str, ...]


# A field, and why its value cannot be.
Wrong = tuple[str, str]


def at_least(least: int) -> FieldRule:
    """Returns the rule of numbers from `least` on."""
    return FieldRule(lambda value: value >= least, f"must be at least {least}")


def among(words: tuple[str, ...]) -> FieldRule:
    """Returns the rule of tuples that hold nothing but these words."""
    return FieldRule(lambda value: {*value} <= {*words}, f"choose from {', '.join(words)}")


def _is_folder_name(value: str) -> bool:
    is_part = value.isprintable() and not set(value) & set("/\\ ") and value[:1] not in ("", ".")
    return is_part and len(value.encode()) <= _LONGEST_NAME


Count = Annotated[int, at_least(0)]
PositiveCount = Annotated[int, at_least(1)]
RowLength = Annotated[int, at_least(8)]
Seed = Annotated[int, FieldRule(lambda value: 0 <= value < 2**32, "must be in [0, 2**32)")]
# XLA's compiler for CPUs ends the process at a matrix with a longer side.
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
        "must be FILE:FUNCTION:SHA256, as bert_jax.config.own(FUNCTION) gives it",
    ),
]


@functools.cache
def fields_of(section: type["Section"]) -> dict[str, tuple[Any, list[Any]]]:
    """Returns of each field of a section its type and its rules."""
    plain = typing.get_type_hints(section)
    whole = typing.get_type_hints(section, include_extras=True)
    names = section.__dataclass_fields__
    return {n: (plain[n], list(getattr(whole[n], "__metadata__", ()))) for n in names}


class Section:
    """Base of the sections: a field is checked by its type and rule, then all by `_wrong`."""

    role: ClassVar[Literal["identity", "placement"]]
    label: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # every section is one

    def __init_subclass__(cls, role: Literal["identity", "placement"], label: str) -> None:
        cls.role, cls.label = role, label

    def __post_init__(self) -> None:
        for name, (hint, rules) in fields_of(type(self)).items():
            value = _converted(getattr(self, name), hint)
            object.__setattr__(self, name, value)
            _check_type(f"{self.label}.{name}", value, hint)
            for rule in rules:
                if isinstance(rule, FieldRule) and not rule.holds(value):
                    self._refuse(name, rule.why)
                if isinstance(rule, RequiresValue) and "." not in rule.field:
                    other = getattr(self, rule.field)
                    if other not in rule.values and not self.is_default(name):
                        where = f"{self.label}.{rule.field}={other}"
                        self._refuse(name, f"has no meaning with {where}; remove it")
        for name, why in self._wrong():
            self._refuse(name, why)

    def _wrong(self) -> Iterator[Wrong]:
        """Yields the fields, or paths as `phases.0.steps`, whose values cannot be, and why."""
        yield from ()

    def _refuse(self, name: str, why: str) -> NoReturn:
        where = name if "." in name else f"{self.label}.{name}"
        raise InputError(f"{where}={self._value_of(name)!r}: {why}")

    def _value_of(self, path: str) -> Any:
        value: Any = self
        for key in path.split("."):
            value = value[int(key)] if key.isdecimal() else getattr(value, key)
        return value

    def is_default(self, name: str) -> bool:
        """Tells whether a field has the value that it has where it is left out."""
        return getattr(self, name) == type(self).__dataclass_fields__[name].default


def _converted(value: Any, hint: Any) -> Any:
    """Returns whole numbers as floats, and one as a tuple, where such are asked for."""
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if hint == tuple[int, ...] and type(value) is int:
        return (value,)
    if hint == tuple[float, ...] and isinstance(value, tuple):
        return tuple(_converted(one, float) for one in value)
    return value


def _check_type(where: str, value: object, hint: Any) -> None:
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            named = filter(None, typing.get_args(hint))  # a field may be empty, too
            raise InputError(f"{where}={value!r}: choose one of {', '.join(named)}")
    elif typing.get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise InputError(
                f"{where}={reprlib.repr(value)}: expected a tuple; write (A, B), and of one (A,)"
            )
        for i, item in enumerate(value):
            _check_type(f"{where}[{i}]", item, typing.get_args(hint)[0])
    elif type(value) is not hint:
        raise InputError(f"{where}={reprlib.repr(value)}: expected {hint.__name__}")
    elif hint is float and not math.isfinite(value):
        raise InputError(f"{where}={value!r}: must be a finite number")
    elif hint is int and abs(value) >= _INTEGERS:
        raise InputError(f"{where}: {str(value)[:20]}... is too large; must be below 2**32")
    elif hint is str and _NO_TEXT.search(value):
        raise InputError(f"{where}={value!r}: holds a NUL or half of a surrogate pair")
