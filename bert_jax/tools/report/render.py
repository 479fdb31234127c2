"""How it is shown: tables as text, CSV and HTML, and pages of one file that need nothing else.

Everything shown comes from text that may be hostile: the templates escape all values, and a
Content-Security-Policy lets no script run and nothing load.
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
    """Cells as text; `cells.html` shows it on a page."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # columns on the left that hold words; the others hold numbers

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], words: int = 1) -> "PageTable":
        """Returns the table of rows by column; what one of them does not have is left empty."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return cls(columns, [[row.get(name, "") for name in columns] for row in rows], words)

    def lines(self) -> Iterator[str]:
        """Yields it for a terminal: words on the left of their columns, numbers on the right."""
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            yield "  ".join(
                cell.ljust(width) if number < self.words else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            )

    def csv(self) -> str:
        """Returns it for other programs."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()


def percent(share: float) -> str:
    """Formats a share: 0.123 as 12.3 %."""
    return f"{100 * share:.1f} %"


def page(template: str, **values: Any) -> str:
    """Returns a page, written from a template, which extends `base.html`."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return _environment().get_template(template).render(now=now, **values)


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
        "shown": printable,
        "field": _breakable,
    }
    return environment


def _breakable(path: str) -> markupsafe.Markup:
    """Returns a field's name that a narrow column breaks between its words, never inside one."""
    return markupsafe.Markup(re.sub(r"([._])", r"\1<wbr>", str(markupsafe.escape(path))))
