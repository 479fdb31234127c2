"""Renders tables as text, CSV and HTML, and self-contained pages.

Values may come from hostile text: the templates escape them all, and a Content-Security-Policy
forbids scripts and external resources.
"""

import csv
import datetime
import functools
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import markupsafe

from bert_jax.errors import duration, printable


@dataclass(frozen=True)
class PageTable:
    """A table of text cells; `cells.html` shows it on a page."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1  # number of columns on the left with text; the others hold numbers

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], text_columns: int = 1) -> "PageTable":
        """Returns the table of rows, each {column: cell}; missing cells are left empty."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return cls(columns, [[row.get(name, "") for name in columns] for row in rows], text_columns)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the table: text is aligned to the left, numbers to the right."""
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            yield "  ".join(
                cell.ljust(width) if number < self.text_columns else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            )

    def csv(self) -> str:
        """Returns the table as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()


def percent(share: float) -> str:
    """Formats a share: 0.123 as 12.3 %."""
    return f"{100 * share:.1f} %"


def render_template(template: str, refresh: int | None = None, **values: Any) -> str:
    """Returns the page of a template, which extends `base.html`.

    A browser loads the page again after `refresh` seconds, if it is not None.
    """
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return _environment().get_template(template).render(now=now, refresh=refresh, **values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bert_jax.tools.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration,
        "percent": percent,
        "svg": markupsafe.Markup,
        "printable": printable,
        "breakable": _breakable,
    }
    return environment


def _breakable(path: str) -> markupsafe.Markup:
    """Returns a field's dotted name, in which lines may break only between words."""
    return markupsafe.Markup(re.sub(r"([._])", r"\1<wbr>", str(markupsafe.escape(path))))
