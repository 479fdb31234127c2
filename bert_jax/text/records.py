"""Records of text files, each with the number of its first line: rows of CSV and TSV, and JSON.

CSV is what Python's `csv` reads: quoted cells may hold commas, newlines and doubled quotation
marks. In TSV, as GLUE has it, a line is a row, tabs separate columns and quotation marks mean
nothing. Blank lines are no rows.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from bert_jax.errors import InputError

Row = tuple[int, list[str]]

# Characters of a CSV cell; Python's own limit is 131,072.
_LONGEST_CELL = 2**31 - 1
# Half of a surrogate pair.
_HALF = re.compile("[\ud800-\udfff]")


def rows(kind: str, lines: Iterable[str], path: str) -> Iterator[Row]:
    """Yields line number from 1 and cells of each row of a `csv` or `tsv` file's decoded lines."""
    return _csv(lines, path) if kind == "csv" else _tsv(lines)


def _tsv(lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if row := line.removesuffix("\n").removesuffix("\r"):
            yield number, row.split("\t")


def _csv(lines: Iterable[str], path: str) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    # Strict: a quotation mark that is never closed would take in the rest of the file.
    reader = csv.reader(lines, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"{path}:{number}: not CSV ({error}); quote cells that hold commas, newlines or "
                "quotation marks, and double the marks inside"
            ) from error
        if cells:
            yield number, cells


def of_json(text: str, place: str) -> Any:
    """Returns what JSON says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not JSON ({error})") from error


def of_utf8(data: bytes, place: str) -> str:
    """Returns the text of a record's bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not UTF-8 ({error})") from error


def encodable(text: str) -> str:
    """Returns a text in which halves of surrogate pairs, which JSON can spell, are U+FFFD."""
    if _HALF.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
