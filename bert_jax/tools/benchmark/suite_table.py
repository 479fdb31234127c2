"""The table of a suite: text, CSV and a self-contained page."""

import math
from collections.abc import Callable, Iterator

from bert_jax.storage.workdir import write_atomic
from bert_jax.tools.benchmark.suite_runs import Benchmark, Cell
from bert_jax.tools.report.figures import Figure, draw_dots
from bert_jax.tools.report.render import PageTable, page

_COLUMNS = ("task", "score", "runs", "mean", "deviation", "best", "minutes", "published dev")
_COLUMNS += ("published test",)


def write(benchmark: Benchmark) -> None:
    """Writes `table.txt`, `table.csv` and `table.html` into the folder of a suite."""
    root = benchmark.root
    write_atomic(root / "table.txt", "".join(f"{line}\n" for line in lines(benchmark)))
    write_atomic(root / "table.csv", PageTable(_COLUMNS, list(_rows(benchmark, repr, ""))).csv())
    write_atomic(root / "table.html", _html(benchmark))


def lines(benchmark: Benchmark) -> Iterator[str]:
    """Yields the table as text."""
    yield from _table(benchmark).lines()
    yield from _notes(benchmark)


def _table(benchmark: Benchmark) -> PageTable:
    return PageTable(_COLUMNS, list(_rows(benchmark, lambda share: f"{100 * share:.2f}", "-")), 2)


def _notes(benchmark: Benchmark) -> list[str]:
    notes = ["Scores of the validation examples in percent; deviations (n - 1) are over seeds."]
    published = benchmark.suite.published
    return [*notes, f"Published: {published}"] if published else notes


def _rows(benchmark: Benchmark, text: Callable[[float], str], missing: str) -> Iterator[list[str]]:
    """Yields a row for each score; `text` formats a share, and `missing` is a cell without one."""
    for cell in benchmark.cells:
        for number, score in enumerate(cell.task.scores):
            best = [cell.best["scores"][score.name]] if cell.best else [math.nan]
            values = (missing if math.isnan(x) else text(x) for x in (*cell.mean(score), *best))
            minutes = f"{cell.minutes:.1f}" if cell.seeds and not number else ""
            name = score.title or cell.task.name
            yield [
                *(name, score.name.partition("/")[0], str(len(cell.seeds)), *values, minutes),
                *(score.dev or missing, score.test or missing),
            ]


def _html(benchmark: Benchmark) -> str:
    figures = [Figure("Means", "Bars are standard deviations over seeds.", _dots(benchmark))]
    return page(
        "table.html",
        title=benchmark.suite.name,
        about=f"rules {benchmark.rules}",
        heading="Scores of the validation examples",
        table=_table(benchmark),
        notes=_notes(benchmark),
        details="Chosen settings, and the best run of each task",
        rows=[_detail(cell) for cell in benchmark.cells],
        learning=[("", figures)] if any(cell.seeds for cell in benchmark.cells) else [],
    )


def _detail(cell: Cell) -> dict[str, object]:
    chosen = [f"{name}: {value}" for name, value in cell.settings.items()]
    origin = [f"{cell.best['folder']}, bert-jax {cell.best['version']}"] if cell.best else []
    return {"name": cell.task.name, "lines": chosen, "origin": origin}


def _dots(benchmark: Benchmark) -> str:
    names, means, bars = [], [], []
    for cell in benchmark.cells:
        for score in cell.task.scores if cell.seeds else ():
            mean, deviation = cell.mean(score)
            names.append(f"{score.title or cell.task.name}, {score.name.partition('/')[0]}")
            means.append(mean)
            bars.append(0.0 if math.isnan(deviation) else deviation)
    return draw_dots(names, means, bars, "dots")
