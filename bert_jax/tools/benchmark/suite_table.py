"""The table of a suite: text, CSV and a self-contained page."""

import math
from collections.abc import Callable, Iterator

from bert_jax.storage.workdir import write_atomic
from bert_jax.tools.benchmark.suite_runs import Benchmark, TaskResult
from bert_jax.tools.report.figures import Figure, draw_dots
from bert_jax.tools.report.render import PageTable, render_template

_COLUMNS = ("task", "score", "runs", "mean", "deviation", "best", "minutes", "published dev")
_COLUMNS += ("published test",)  # dev: the validation examples


def write(benchmark: Benchmark) -> None:
    """Writes `table.txt`, `table.csv` and `table.html` into the folder of a suite."""
    root = benchmark.root
    write_atomic(root / "table.txt", "".join(f"{line}\n" for line in lines(benchmark)))
    table = PageTable(_COLUMNS, list(_rows(benchmark, lambda score: repr(100 * score), "")))
    write_atomic(root / "table.csv", table.csv())
    write_atomic(root / "table.html", _html(benchmark))


def lines(benchmark: Benchmark) -> Iterator[str]:
    """Yields the table as text."""
    yield from _table(benchmark).lines()
    yield from _notes(benchmark)


def _table(benchmark: Benchmark) -> PageTable:
    rows = list(_rows(benchmark, lambda score: f"{100 * score:.2f}", "-"))
    return PageTable(_COLUMNS, rows, text_columns=2)


def _notes(benchmark: Benchmark) -> list[str]:
    notes = ["Scores of the validation examples in percent; deviations (n - 1) are over seeds."]
    published = benchmark.suite.published
    return [*notes, f"Published: {published}"] if published else notes


def _rows(benchmark: Benchmark, text: Callable[[float], str], missing: str) -> Iterator[list[str]]:
    """Yields a row for each score; `text` formats a value, `missing` stands where there is none."""
    for result in benchmark.results:
        for number, score in enumerate(result.task.scores):
            best = [result.best["scores"][score.name]] if result.best else [math.nan]
            values = (missing if math.isnan(x) else text(x) for x in (*result.stats(score), *best))
            # The first row of a task has the minutes of all its runs.
            minutes = f"{result.minutes:.1f}" if result.seed_runs and not number else ""
            # A score's name is METRIC or METRIC/FILE.
            names = [score.title or result.task.name, score.name.partition("/")[0]]
            runs = str(len(result.seed_runs))
            yield [*names, runs, *values, minutes, score.dev or missing, score.test or missing]


def _html(benchmark: Benchmark) -> str:
    figures = [Figure("Means", "Bars are standard deviations over seeds.", _dots(benchmark))]
    return render_template(
        "table.html",
        title=benchmark.suite.name,
        about=f"rules {benchmark.rules}",
        heading="Scores of the validation examples",
        table=_table(benchmark),
        notes=_notes(benchmark),
        details_heading="Chosen settings, and the best run of each task",
        details=[_detail(result) for result in benchmark.results],
        # The template has a place for learning curves, and none for other figures.
        learning=[("", figures)] if any(result.seed_runs for result in benchmark.results) else [],
    )


def _detail(result: TaskResult) -> dict[str, object]:
    chosen = [f"{name}: {value}" for name, value in result.settings.items()]
    origin = [f"{result.best['folder']}, bert-jax {result.best['version']}"] if result.best else []
    return {"name": result.task.name, "lines": chosen, "origin": origin}


def _dots(benchmark: Benchmark) -> str:
    names, means, bars = [], [], []
    for result in benchmark.results:
        for score in result.task.scores if result.seed_runs else ():
            mean, deviation = result.stats(score)
            names.append(f"{score.title or result.task.name}, {score.name.partition('/')[0]}")
            means.append(mean)
            bars.append(0.0 if math.isnan(deviation) else deviation)
    return draw_dots(names, means, bars, "dots")
