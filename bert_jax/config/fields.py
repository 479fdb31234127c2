"""Sections of configuration: dataclasses whose fields are checked where they are built."""

import math
import os
import re
import reprlib
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from bert_jax.errors import InputError

# No size, count or interval is larger, and arrays are indexed with no more bits.
_INTEGERS = 2**32
# Bytes of a folder's name, as file systems allow them.
_LONGEST_NAME = 255
# A function of a file, and the file's hash; see `config.code`.
CODE = re.compile(r"([\w.-]+\.py):([A-Za-z_]\w*):([0-9a-f]{64})")


class Section:
    """Base of the sections: a field is checked for its type, then `_validate` for its value."""

    role: ClassVar[Literal["identity", "placement"]]
    label: ClassVar[str]

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is ClassVar:
                continue
            value = getattr(self, name)
            if hint is float and type(value) is int:
                try:
                    object.__setattr__(self, name, float(value))
                except OverflowError as error:
                    where = f"{self.label}.{name}"
                    raise InputError(
                        f"{where}: must be a finite number, not one so large"
                    ) from error
                continue
            if hint == tuple[float, ...] and isinstance(value, tuple):
                small = [type(one) is int and abs(one) < _INTEGERS for one in value]
                value = tuple(map(lambda one, is_: float(one) if is_ else one, value, small))
                object.__setattr__(self, name, value)
            if hint == tuple[int, ...] and type(value) is int:
                value = (value,)
                object.__setattr__(self, name, value)
            _check_type(f"{self.label}.{name}", value, hint)
        self._validate()

    def _validate(self) -> None:
        """Raises InputError if values are impossible."""

    def _require(self, holds: bool, name: str, why: str) -> None:
        if not holds:
            raise InputError(f"{self.label}.{name}={getattr(self, name)!r}: {why}")

    def _require_at_least(self, least: float, *names: str) -> None:
        for name in names:
            self._require(getattr(self, name) >= least, name, f"must be at least {least}")

    def _require_folder_name(self, name: str) -> None:
        value = getattr(self, name)
        self._require(
            value.isprintable()
            and not set(value) & set("/\\ ")
            and value[:1] not in ("", ".")
            and len(value.encode()) <= _LONGEST_NAME,
            name,
            "must be usable as a folder name, short, without blanks or slashes",
        )

    def _require_code(self, name: str) -> None:
        value = getattr(self, name)
        self._require(
            value == "" or CODE.fullmatch(value) is not None,
            name,
            "must be FILE:FUNCTION:SHA256, as bert_jax.config.own(FUNCTION) gives it",
        )

    def _require_share(self, *names: str) -> None:
        for name in names:
            self._require(0.0 <= getattr(self, name) < 1.0, name, "must be in [0, 1)")


def _check_type(where: str, value: object, hint: Any) -> None:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise InputError(f"{where}={value!r}: choose one of {', '.join(get_args(hint))}")
    elif get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise InputError(
                f"{where}={reprlib.repr(value)}: expected a tuple; write (A, B), and of one (A,)"
            )
        for i, item in enumerate(value):
            _check_type(f"{where}[{i}]", item, get_args(hint)[0])
    elif type(value) is not hint:
        raise InputError(f"{where}={value!r}: expected {hint.__name__}")
    elif hint is float and not math.isfinite(value):
        raise InputError(f"{where}={value!r}: must be a finite number")
    elif hint is int and abs(value) >= _INTEGERS:
        raise InputError(f"{where}: {str(value)[:20]}... is too large; must be below 2**32")
    elif hint is str:
        _check_text(where, value)


def _check_text(where: str, value: str) -> None:
    """Raises InputError for what no path and no file of ours can hold."""
    try:
        sound = b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        sound = False
    if not sound:
        raise InputError(f"{where}={value!r}: holds a NUL or half of a surrogate pair")
