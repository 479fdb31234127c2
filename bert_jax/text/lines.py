"""Lines of text: from files, or from whatever else gives bytes."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

from bert_jax.errors import InputError
from bert_jax.text import documents

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """As `decoded`, of files; one whose name ends in .gz or .zst is uncompressed.

    Raises:
      InputError: one is missing (which is seen before any is read), cannot be read, is damaged, or
        is not UTF-8.
    """
    for path in paths:
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file")
    return itertools.chain.from_iterable(map(of_file, paths))


def decoded(raw: Iterable[bytes], name: str) -> Iterator[tuple[str, str]]:
    """(NAME:NUMBER, line) of what yields lines of UTF-8, split at \\n alone.

    Raises:
      InputError: a line is not UTF-8.
    """
    for number, line in enumerate(raw, 1):
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        where = f"{name}:{number}"
        try:
            yield where, line.removesuffix(b"\n").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where}: byte {error.start} of the line is not UTF-8; convert the text"
            ) from error


def of_file(path: str) -> Iterator[tuple[str, str]]:
    """As `read`, of one file; that it is missing is seen when its first line is asked for.

    Raises:
      InputError: it cannot be read, is damaged, or is not UTF-8.
    """
    try:
        with documents.open_bytes(path) as file:
            yield from decoded(file, path)
    except documents.DAMAGED as error:
        raise InputError(
            f"{path}: damaged compressed file ({error}); put the whole file back"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
