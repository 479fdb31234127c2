"""Files of a table, for people and tools: text, CSV, and a self-contained page with plots."""

import dataclasses
import math

from bert_jax import config
from bert_jax.config import Table
from bert_jax.storage.workdir import Workdir, write_atomic
from bert_jax.tools.compare.results import Results
from bert_jax.tools.report import curves, run_comparison
from bert_jax.tools.report.figures import Figure, draw_all, draw_dots
from bert_jax.tools.report.render import PageTable, render_template
from bert_jax.tools.report.run_record import Record


def write(results: Results) -> None:
    """Writes `table.txt`, `table.csv` and `table.html` into the folder of a table."""
    root = results.root
    write_atomic(root / "table.txt", "".join(f"{line}\n" for line in results.lines()))
    write_atomic(root / "table.csv", _csv(results))
    write_atomic(root / "table.html", _html(results))


def _csv(results: Results) -> str:
    """Returns a line for each row: its name, then mean, standard error and runs of each column."""
    rows = []
    for row in results.table.rows:
        cells = {"row": row.name}
        for column in results.columns:
            count, mean, error = results.summarize(row.name, column)
            cells[column.name] = "" if math.isnan(mean) else repr(mean)
            cells[f"{column.name}_error"] = "" if math.isnan(error) else repr(error)
            cells[f"{column.name}_runs"] = str(count)
        rows.append(cells)
    return PageTable.of(rows).csv()


def _html(results: Results) -> str:
    details, before = [], None
    for row in results.table.rows:
        changed = [] if before is None else config.differences(before, row.experiment, "all")
        changed = [line for line in changed if not line.startswith("name: ")]
        origin = {f"text {run.input_hash}" for run in results.members if run.row == row.name}
        entries = (entry for c in results.columns for entry in results.row_values(row.name, c))
        origin |= {f"measured by bert-jax {version}" for _, version, _ in entries}
        details.append({"name": row.name, "lines": changed, "origin": sorted(origin, reverse=True)})
        before = row.experiment
    details += [
        {"name": column.title, "lines": [], "origin": [f"examples {column.examples}"]}
        for column in results.columns
        if column.examples
    ]
    figures = [*_dots(results), *_curves(results)]
    return render_template(
        "table.html",
        title=results.table.name,
        about=_describe_budget(results.table),
        heading="Means and standard errors over seeds",
        table=results.page_table([column.title for column in results.columns]),
        notes=[results.footnote] if results.footnote else [],
        details_heading="What each row changes from the previous row, and the data of its values",
        details=details,
        learning=[("", figures)] if figures else [],
    )


def _describe_budget(table: Table) -> str:
    budget = "each run does the steps of its experiment"
    if table.steps:
        budget = f"{table.steps:,} steps a run"
    elif table.cpu_seconds:
        budget = f"{table.cpu_seconds:,.0f} seconds of CPU a run"
    return f"{budget}; seeds {', '.join(map(str, table.seeds))}"


def _dots(results: Results) -> list[Figure]:
    """Returns a picture of each column: means and errors of each row."""
    pictures = []
    for number, column in enumerate(results.columns):
        means = {row.name: results.summarize(row.name, column) for row in results.table.rows}
        known = {name: mean for name, mean in means.items() if mean[0]}
        if known:
            runs, values, errors = zip(*known.values(), strict=True)
            bars = [0.0 if math.isnan(error) else error for error in errors]
            svg = draw_dots([*known], values, bars, f"dots-{number}")
            note = "Bars are standard errors of the mean over seeds." if max(runs) > 1 else ""
            pictures.append(Figure(column.title, note, svg))
    return pictures


def _curves(results: Results) -> list[Figure]:
    """Returns held-out losses over steps and over CPU seconds, a colour for each row."""
    records = []
    for member in results.members:
        if Workdir(member.folder).metrics.exists():
            record = Record.read(str(member.folder))
            # Training lines of so many runs would hide the held-out points.
            records.append(dataclasses.replace(record, label=member.row, train=[]))
    plots = []
    axes = [axis for axis in run_comparison.AXES if axis.name in ("steps", "CPU seconds")]
    for axis in axes:
        if all(axis.converter(record) for record in records):
            # The first plot shows held-out losses, or their distance from unigrams if rows differ.
            plots += [plot for plot in curves.learning_plots(records, axis) if not plot.empty][:1]
    return draw_all(plots, (), "curve")
