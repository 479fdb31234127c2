"""Lines of text files, and JSON, with the place of whatever is wrong in them."""

import json
from collections.abc import Iterator
from typing import Any

from bert_jax.errors import InputError
from bert_jax.text import lines as text_lines

_LONGEST_QUOTE = 60


def lines(path: str) -> Iterator[str]:
    """Lines of a UTF-8 file, without their ends (\\n or \\r\\n) and without a byte-order mark.

    Files whose names end in .gz or .zst are uncompressed.

    Raises:
      InputError: no such file, bytes that are not UTF-8, damaged compression.
    """
    for _, line in text_lines.of_file(path):
        yield line.removesuffix("\r")


def parsed(text: str, place: str) -> Any:
    """The JSON value that a text spells.

    Raises:
      InputError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not JSON ({error})") from error


def text_of(value: object, name: str, place: str) -> str:
    """`value` as a text that any tokenizer takes.

    Halves of surrogate pairs, which JSON can spell and no encoding can, become U+FFFD.

    Raises:
      InputError: it is no text, or has nothing but white space.
    """
    if not isinstance(value, str):
        raise InputError(f"{place}: {name} is {kind_of(value)}, not a text")
    if not value.strip():
        raise InputError(f"{place}: {name} is blank; fill it in, or leave the example out")
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def kind_of(value: object) -> str:
    """What JSON calls a value, and a TFDS record as well."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
    }
    return kinds.get(type(value), "null")


def quoted(text: str) -> str:
    """A text in quotation marks, cut if it is long, for messages."""
    return repr(text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}...")
