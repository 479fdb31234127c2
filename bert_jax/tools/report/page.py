"""Writes the report: one self-contained HTML file, written once or repeatedly during a run."""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jinja2
import numpy as np
from etils import epath

from bert_jax import config
from bert_jax.checkpoints.load import Checkpoints
from bert_jax.config import Experiment, Finetuning
from bert_jax.errors import InputError, printable, translate_parser_errors
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import Workdir, write_atomic
from bert_jax.tools.report import curves, figures, run_comparison, times
from bert_jax.tools.report.figures import Figure
from bert_jax.tools.report.render import PageTable, percent, render_template
from bert_jax.tools.report.run_record import Line, Record, corpus_statistics

# Numbers of evaluations and of sample predictions in the tables, spread over the run.
_EVALUATIONS = 8
_PREDICTIONS = 5


def write(
    workdirs: Sequence[str],
    out: str | None,
    every: int | None,
    log: Callable[[str], None],
    price_per_chip_hour: float | None = None,
) -> None:
    """Writes the page of a run, or one that compares several.

    The page goes to `out`; by default into the workdir, or into the current folder if it compares
    several runs. It is written every `every` seconds while one of the runs is running. With a
    price, in any currency, costs are shown.
    """
    records = _read(workdirs)
    for record in records:
        _require_undamaged(record)
    path = _page_path(records, out)
    refresh = _write_page(path, records, every, price_per_chip_hour)
    log(f"report: {path}")
    while refresh is not None:
        try:
            time.sleep(refresh)
        except KeyboardInterrupt:
            _write_page(path, records, None, price_per_chip_hour)
            raise
        records = _read(workdirs)
        refresh = _write_page(path, records, every, price_per_chip_hour)
    for record in records:
        prefix = f"{record.label}: " if len(records) > 1 else ""
        if record.reason:
            log(f"{prefix}{record.state} at step {record.steps_done:,}: {printable(record.reason)}")
        log(prefix + record.goodput.describe(price_per_chip_hour))


def _require_undamaged(record: Record) -> None:
    """Raises InputError if lines have changed since the newest checkpoint was saved."""
    workdir, metadata = record.workdir, dict[str, Any]()
    with contextlib.suppress(InputError):  # a page does not need checkpoints
        checkpoints = Checkpoints(workdir.checkpoints)
        metadata = checkpoints.metadata(checkpoints.find_step("newest"))
    for name, tally in metadata.get("lines", {}).items():  # a number of lines, and their hash
        if damage := JsonLines(workdir.root / name).find_damage(metadata["step"], tally):
            raise InputError(
                f"{workdir.address}/{name}: {damage}; restore the whole file, or remove it to "
                "continue without its lines"
            )


def _write_page(
    path: epath.Path, records: list[Record], every: int | None, price_per_chip_hour: float | None
) -> int | None:
    """Writes the page; returns the seconds after which to write it again, or None."""
    refresh = every if any(record.state == "running" for record in records) else None
    storage_of(path).write(path, render_page(records, refresh, price_per_chip_hour))
    return refresh


def _read(workdirs: Sequence[str]) -> list[Record]:
    roots: dict[str, str] = {}
    for root in workdirs:
        path = root if "://" in root else os.path.realpath(root)
        if path in roots:
            raise InputError(f"{root}: the same run as {roots[path]}; name each run once")
        roots[path] = root
    records = [Record.read(root) for root in workdirs]
    labels = [record.label for record in records]
    if len(set(labels)) < len(labels):
        for record in records:
            record.label = str(record.workdir.address)
    return records


def _page_path(records: list[Record], out: str | None) -> epath.Path:
    if out is not None:
        path = epath.Path(os.path.realpath(out))
        if path.exists() and not os.path.isfile(path):
            raise InputError(f"--out {out}: is not a file; name a file")
        if not path.parent.exists():
            raise InputError(f"--out {out}: folder {path.parent} does not exist; make it first")
        return path
    if len(records) > 1:
        return epath.Path("comparison.html")
    return records[0].workdir.address / "report.html"


# --- the page ---


def render_page(
    records: list[Record], refresh: int | None = None, price_per_chip_hour: float | None = None
) -> str:
    """Returns the page of a run, or of several compared."""
    paths = ", ".join(str(record.workdir.address) for record in records)
    files = f"{paths}: metrics.jsonl, predictions.jsonl, timings.jsonl, origin.json or plan.json"
    with translate_parser_errors(files):
        if len(records) > 1:
            values = _comparison_values(records)
        else:
            values = _run_values(records[0], price_per_chip_hour)
        try:
            return render_template(
                "page.html",
                title=" · ".join(record.label for record in records),
                refresh=refresh,
                runs=records,
                learning=_learning(records),
                **values,
            )
        except jinja2.UndefinedError as error:
            raise LookupError(error.message) from error


def _learning(records: list[Record]) -> list[tuple[str, list[Figure]]]:
    """Returns pairs (axis, pictures of the learning curves).

    Several runs are drawn over each axis that all of them have. A single run is drawn over steps,
    along with its gradient norm and speed.
    """
    if len(records) == 1:
        plots = [*curves.learning_plots(records), *curves.step_plots(*records)]
        phase_ends = getattr(records[0].experiment, "ends", ())[:-1]
        marks = [end for end in phase_ends if end < records[0].steps_done]
        by_axis = {"steps": figures.draw_all(plots, marks)}
    else:
        by_axis = {}
        for number, axis in enumerate(run_comparison.AXES):
            if all(axis.converter(record) for record in records):
                plots = curves.learning_plots(records, axis)
                by_axis[axis.name] = figures.draw_all(plots, (), f"axis{number}")
    return [(axis, pictures) for axis, pictures in by_axis.items() if pictures]


def _comparison_values(records: list[Record]) -> dict[str, Any]:
    notes = run_comparison.explain_losses(records), run_comparison.explain_scores(records)
    return {
        "table": run_comparison.table(records),
        "notes": [*filter(None, notes)],
        "steps": figures.draw_all(curves.step_plots(*records)),
        "differing": _differing(records),
    }


def _run_values(record: Record, price: float | None) -> dict[str, Any]:
    environment = record.starts[-1].get("environment", {}) if record.starts else {}
    values = {
        "record": record,
        "tiles": _tiles(record, price),
        "parts": [(times.PARTS[name], x) for name, x in record.goodput.parts.items() if x],
        "goodput": record.goodput.describe(price),
        "evaluations": _evaluations(record),
        "config": [(path, _text(value)) for path, value in config.flatten(record.experiment)],
        "environment": sorted((name, _text(value)) for name, value in environment.items()),
    }
    if isinstance(record.experiment, Finetuning):
        return values | {"kind_template": "tuned.html"}
    statistics, why = _statistics(record.workdir, record.experiment)
    return values | {
        "kind_template": "pretraining.html",
        "predictions": _spread(record.predictions, _PREDICTIONS),
        "statistics": statistics,
        "no_statistics": why,
        "corpus_figures": curves.corpus_figures(statistics) if statistics else [],
        "plan": _plan_table(record.plan) if record.plan.get("slices") else None,
    }


def _tiles(record: Record, price: float | None) -> Iterator[tuple[str, str]]:
    """Yields (value, description) of a run's newest results."""
    if record.evaluation:
        for name, text in run_comparison.evaluation_texts(record, record.evaluation[-1]).items():
            yield text, name
    if task := record.newest_prediction("task"):
        yield f"{task['examples']['train']:,}", "training examples"
        for split, share in task["unknown"].items():
            yield percent(share), f"unknown tokens of {split}"
    rate, padding = record.recent("real_tokens_per_second"), record.recent("padding")
    if rate is not None and padding is not None:
        yield f"{rate:,.0f}", f"tokens per second; padding is {percent(padding)}"
    padded, unpadded = record.recent("utilisation"), record.recent("real_utilisation")
    if padded is not None:
        more = "" if unpadded is None else f"; {percent(unpadded)} without padding"
        yield percent(padded), f"utilisation of the devices{more}"
    goodput = record.goodput
    if goodput.share is not None:
        yield percent(goodput.share), "goodput: share of all time in steps that counted"
    cost = None if price is None else goodput.cost(price)
    if cost is not None:
        yield f"{cost:,.2f}", f"cost so far, for {goodput.chip_hours:,.2f} chip-hours"


def _evaluations(record: Record) -> PageTable | None:
    """Returns a table of some of the evaluations; None before the first one."""
    rows = []
    for line in _spread(record.evaluation, _EVALUATIONS):
        if isinstance(record.experiment, Finetuning):
            names = [*curves.score_names(record), "loss"]
            texts = {name: f"{line[name]:.4f}" if name in line else "" for name in names}
        else:
            texts = run_comparison.evaluation_texts(record, line)
        rows.append({"step": f"{line['step']:,}"} | texts)
    return PageTable.of(rows, 0) if rows else None


def _plan_table(plan: dict[str, Any]) -> PageTable:
    """Returns a row for each phase on each slice of a plan (tools.plan.report)."""
    # The terms of `phase["seconds"]`, see `tools.plan.estimate`, that each column adds up.
    terms = {
        "step": ("total",),
        "products": ("products",),
        "kernels": ("kernels",),
        "memory traffic": ("copies", "prefetch"),
        "other": ("other", "random_bits"),
        "links": ("issue", "collectives", "latency", "network"),
    }
    columns = ["slice", "chips", "phase", "memory of a device", *terms, "utilisation", "hours"]
    rows = []
    for entry in plan["slices"]:
        for phase in entry["phases"]:
            cells = [phase["outcome"], *[""] * (len(terms) + 2)]
            if phase["outcome"] == "compiled":
                sizes = phase["memory"]["peak"] / 2**30, entry["device_memory"] / 2**30
                sums = [sum(map(phase["seconds"].__getitem__, names)) for names in terms.values()]
                cells = [
                    "{:.2f} of {:g} GiB".format(*sizes),
                    *(f"{1000 * seconds:.1f} ms" for seconds in sums),
                    *(percent(phase["utilisation"]), f"{phase['hours']:,.1f}"),
                ]
            rows.append([entry["topology"], f"{entry['chips']:,}", str(phase["phase"]), *cells])
    return PageTable(columns, rows)


@functools.lru_cache(maxsize=4)
def _cached_statistics(folder: epath.Path, experiment: Experiment) -> dict[str, Any]:
    return corpus_statistics(experiment, PreparedCorpus.open(folder))


def _statistics(workdir: Workdir, experiment: Experiment) -> tuple[dict[str, Any] | None, str]:
    """Returns (statistics of the corpus, ""), or None and the reason."""
    try:
        return _cached_statistics(workdir.corpus, experiment), ""
    except InputError as error:
        return None, str(error)


def _differing(records: list[Record]) -> list[tuple[str, list[str]]]:
    """Returns fields that are not the same in all experiments, with all values.

    If both pre-trainings and fine-tunings are compared, only fields that both have are returned.
    """
    tables = [dict(config.flatten(record.experiment)) for record in records]
    paths = dict.fromkeys(path for table in tables for path in table)
    if len({type(record.experiment) for record in records}) > 1:
        paths = [path for path in paths if all(path in table for table in tables)]
    rows = [(path, [_text(table.get(path, "absent")) for table in tables]) for path in paths]
    return [row for row in rows if len(set(row[1])) > 1]


def _spread(lines: list[Line], most: int) -> list[Line]:
    """Returns at most `most` lines, spread evenly, including the newest."""
    if len(lines) <= most:
        return lines
    return [lines[round((len(lines) - 1) * i / (most - 1))] for i in range(most)]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=list, ensure_ascii=False)


# --- the page of layers ---


def write_layers(
    path: epath.Path,
    name: str,
    layer_scores: dict[str, Any],
    attention: tuple[list[str], np.ndarray] | None,
) -> None:
    """Writes layers.html: scores of each layer, and the attention of each head in a text.

    `layer_scores` is the result of `tools.layer_scores.score_layers`, or empty; `attention` is a
    pair: a text's tokens, and float [L, H, S, S], the attention of each of them to all.
    """
    maps = None
    if attention is not None:
        maps = {"pieces": attention[0], "svg": figures.draw_maps(attention[1], "attention")}
    text = render_template(
        "layers.html",
        title=f"{name}: layers",
        name=name,
        step=layer_scores.get("step"),
        table=table_of_layers(layer_scores) if layer_scores else None,
        figures=figures.draw_all([curves.layer_plot(layer_scores)]),
        maps=maps,
    )
    write_atomic(path, text)


def table_of_layers(layer_scores: dict[str, Any]) -> PageTable:
    """Returns a row for each task; `tools.layer_scores.layer_record` explains the fields."""
    tasks = layer_scores["tasks"]
    rows = []
    for task in tasks:
        scores = [f"{value:.3f}" for value in (*task["scores"], task["guess"])]
        last = str(task["best"]), f"{task['centre']:.2f}"
        rows.append([task["name"], task["score"], *scores, *last])  # a name of a score, and scores
    layers = map(str, range(len(tasks[0]["scores"])))
    return PageTable(["task", "score", *layers, "guess", "best", "centre"], rows, 2)
