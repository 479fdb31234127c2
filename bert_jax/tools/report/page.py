"""The report: one HTML file that needs nothing else, written once or while a run goes on."""

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
from bert_jax.checkpoints.checkpoint import Checkpoints
from bert_jax.config import Experiment, Finetuning
from bert_jax.errors import InputError, reading
from bert_jax.pretraining.pretraining import Prepared
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import Workdir, write_atomic
from bert_jax.tools.report import curves, figures, run_comparison, times
from bert_jax.tools.report.figures import Figure
from bert_jax.tools.report.render import PageTable, page, percent
from bert_jax.tools.report.run_record import Line, Record, corpus_statistics

# Evaluations that stand in the tables, spread over the run.
_ROWS = 8
_PREDICTIONS = 5


def write(
    workdirs: Sequence[str],
    out: str | None,
    every: int | None,
    log: Callable[[str], None],
    price_per_chip_hour: float | None = None,
) -> None:
    """Writes the page of a run, or one that compares several.

    It goes to `out`; else into the workdir, or into this folder where several are compared. It is
    written again after `every` seconds while one of the runs goes on. Without a price, which is in
    any currency, costs are left out.
    """
    records = _read(workdirs)
    for record in records:
        _require_whole(record)
    path = _place(records, out)
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
        which = f"{record.label}: " if len(records) > 1 else ""
        log(which + record.goodput.line(price_per_chip_hour))


def _require_whole(record: Record) -> None:
    """Refuses lines that are not those that the newest checkpoint was saved with."""
    workdir, metadata = record.workdir, dict[str, Any]()
    with contextlib.suppress(InputError):  # of checkpoints, without which there is a page, too
        saved = Checkpoints(workdir.checkpoints)
        metadata = saved.metadata(saved.find_step("newest"))
    for name, written in metadata.get("lines", {}).items():
        if damage := JsonLines(workdir.root / name).damage(metadata["step"], written):
            raise InputError(
                f"{workdir.named}/{name}: {damage}; put the whole file back, or remove it to go on "
                "without its lines"
            )


def _write_page(
    path: epath.Path, records: list[Record], every: int | None, price_per_chip_hour: float | None
) -> int | None:
    """Writes the page; returns the seconds after which it renews itself, if it does."""
    goes_on = any(record.state == "running" for record in records)
    refresh = every if goes_on else None
    storage_of(path).write(path, render(records, refresh, price_per_chip_hour))
    return refresh


def _read(workdirs: Sequence[str]) -> list[Record]:
    named: dict[str, str] = {}
    for root in workdirs:
        where = root if "://" in root else os.path.realpath(root)
        if where in named:
            raise InputError(f"{root}: the same run as {named[where]}; name each once")
        named[where] = root
    records = [Record.read(root) for root in workdirs]
    labels = [record.label for record in records]
    if len(set(labels)) < len(labels):
        for record in records:
            record.label = str(record.workdir.named)
    return records


def _place(records: list[Record], out: str | None) -> epath.Path:
    if out is not None:
        path = epath.Path(os.path.realpath(out))
        if path.exists() and not os.path.isfile(path):
            raise InputError(f"--out {out}: is no file; name one")
        if not path.parent.exists():
            raise InputError(f"--out {out}: no folder {path.parent}")
        return path
    if len(records) > 1:
        return epath.Path("comparison.html")
    return records[0].workdir.named / "report.html"


# --- the page ---


def render(
    records: list[Record],
    refresh_seconds: int | None = None,
    price_per_chip_hour: float | None = None,
) -> str:
    """Returns the page of a run, or of several compared."""
    several = len(records) > 1
    root = ", ".join(str(record.workdir.named) for record in records)
    files = f"{root}: metrics.jsonl, predictions.jsonl, timings.jsonl, origin.json or plan.json"
    with reading(files):
        try:
            return page(
                "page.html",
                title=" · ".join(record.label for record in records),
                refresh=refresh_seconds,
                runs=records,
                learning=_learning(records),
                **_comparison_values(records)
                if several
                else _single_run_values(records[0], price_per_chip_hour),
            )
        except jinja2.UndefinedError as error:
            raise LookupError(error.message) from error


def _learning(records: list[Record]) -> list[tuple[str, list[Figure]]]:
    """Returns pictures of what was learned, by the axis that they are over.

    Several runs are drawn over each axis that all of them have; a run alone over steps, with how
    these went.
    """
    if len(records) == 1:
        plots = [*curves.learning_plots(records), *curves.step_plots(*records)]
        ends = getattr(records[0].experiment, "ends", ())[:-1]  # of phases
        begun = [end for end in ends if end < records[0].steps_done]
        by_axis = {"steps": figures.draw_figures(plots, begun)}
    else:
        by_axis = {
            axis.name: figures.draw_figures(
                curves.learning_plots(records, axis), (), f"axis{number}"
            )
            for number, axis in enumerate(run_comparison.AXES)
            if all(axis.of(record) for record in records)
        }
    return [(axis, pictures) for axis, pictures in by_axis.items() if pictures]


def _comparison_values(records: list[Record]) -> dict[str, Any]:
    """Returns what stands on the page of several runs alone."""
    return {
        "table": run_comparison.table(records),
        "notes": [
            *filter(None, (run_comparison.no_nats(records), run_comparison.no_scores(records)))
        ],
        "steps": figures.draw_figures(curves.step_plots(*records)),
        "differing": _differing(records),
    }


def _single_run_values(record: Record, price: float | None) -> dict[str, Any]:
    """Returns what stands on the page of a single run alone."""
    environment = record.starts[-1].get("environment", {}) if record.starts else {}
    of_one = {
        "record": record,
        "tiles": _tiles(record, price),
        "parts": [(times.PARTS[name], x) for name, x in record.goodput.parts.items() if x],
        "goodput": record.goodput.line(price),
        "evaluations": _evaluations(record),
        "config": [(path, _text(value)) for path, value in config.flatten(record.experiment)],
        "environment": sorted((name, _text(value)) for name, value in environment.items()),
    }
    if isinstance(record.experiment, Finetuning):
        return of_one | {"own": "tuned.html"}
    statistics, why = _statistics(record.workdir, record.experiment)
    return of_one | {
        "own": "pretraining.html",
        "predictions": _spread(record.predictions, _PREDICTIONS),
        "statistics": statistics,
        "no_statistics": why,
        "corpus_figures": curves.corpus_figures(statistics) if statistics else [],
        "plan": _plan(record.plan) if record.plan.get("slices") else None,
    }


def _tiles(record: Record, price: float | None) -> Iterator[tuple[str, str]]:
    """Yields the newest figures of a run, and what they are."""
    if record.evaluation:
        for name, text in run_comparison.evaluation_texts(record, record.evaluation[-1]).items():
            yield text, name
    if task := record.newest_line("task"):
        yield f"{task['examples']['train']:,}", "examples to learn from"
        for name, share in task["unknown"].items():
            yield percent(share), f"unknown pieces of {name}"
    rate, padding = record.recent("real_tokens_per_second"), record.recent("padding")
    if rate is not None and padding is not None:
        yield f"{rate:,.0f}", f"tokens a second; padding is {percent(padding)}"
    used, real = record.recent("utilisation"), record.recent("real_utilisation")
    if used is not None:
        more = "" if real is None else f"; {percent(real)} without padding"
        yield percent(used), f"utilisation of the devices{more}"
    goodput = record.goodput
    if goodput.share is not None:
        yield percent(goodput.share), "goodput: of all time, in steps that counted"
    cost = None if price is None else goodput.cost(price)
    if cost is not None:
        yield f"{cost:,.2f}", f"cost so far, of {goodput.chip_hours:,.2f} chip-hours"


def _evaluations(record: Record) -> PageTable | None:
    """Returns a line for some of the evaluations; None before there is one."""
    rows = []
    for line in _spread(record.evaluation, _ROWS):
        if isinstance(record.experiment, Finetuning):
            names = [*curves.score_names(record), "loss"]
            texts = {name: f"{line[name]:.4f}" if name in line else "" for name in names}
        else:
            texts = run_comparison.evaluation_texts(record, line)
        rows.append({"step": f"{line['step']:,}"} | texts)
    return PageTable.of(rows, 0) if rows else None


def _plan(plan: dict[str, Any]) -> PageTable:
    """Returns a row for each phase on each slice of a plan (tools.plan.report)."""
    # What of `phase["seconds"]` each column of times adds up.
    terms = {
        "step": ("total",),
        "products": ("products",),
        "kernels": ("kernels",),
        "memory": ("copies", "prefetch"),
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
    return corpus_statistics(experiment, Prepared.open(folder))


def _statistics(workdir: Workdir, experiment: Experiment) -> tuple[dict[str, Any] | None, str]:
    """Returns those of the corpus, made once a process; or why there are none."""
    try:
        return _cached_statistics(workdir.corpus, experiment), ""
    except InputError as error:
        return None, str(error)


def _differing(records: list[Record]) -> list[tuple[str, list[str]]]:
    """Returns fields that are not the same in all experiments, with each one's value.

    If both pre-trainings and fine-tunings are compared, only fields that both have are returned.
    """
    tables = [dict(config.flatten(record.experiment)) for record in records]
    paths = dict.fromkeys(path for table in tables for path in table)
    if len({type(record.experiment) for record in records}) > 1:
        paths = [path for path in paths if all(path in table for table in tables)]
    rows = [(path, [_text(table.get(path, "absent")) for table in tables]) for path in paths]
    return [row for row in rows if len(set(row[1])) > 1]


def _spread(lines: list[Line], most: int) -> list[Line]:
    """Returns at most `most` lines, spread evenly, the newest among them."""
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
    record: dict[str, Any],
    attention: tuple[list[str], np.ndarray] | None,
) -> None:
    """Writes W/layers.html: what each layer knows, and where heads look in a text.

    `record` is as `tasks.layers.score_layers` makes it, empty if the layers were not asked;
    `attention` the pieces of a text, and float [L, H, S, S], where each of them looks.
    """
    maps = None
    if attention is not None:
        maps = {"pieces": attention[0], "svg": figures.draw_maps(attention[1], "attention")}
    text = page(
        "layers.html",
        title=f"{name}: layers",
        name=name,
        step=record.get("step"),
        table=table_of_layers(record) if record else None,
        figures=figures.draw_figures([curves.layer_plot(record)]),
        maps=maps,
    )
    write_atomic(path, text)


def table_of_layers(record: dict[str, Any]) -> PageTable:
    """Returns a line a task; see `write_layers`."""
    tasks = record["tasks"]
    rows = []
    for one in tasks:
        scores = [f"{value:.3f}" for value in (*one["scores"], one["guess"])]
        rows.append([one["name"], one["score"], *scores, str(one["best"]), f"{one['centre']:.2f}"])
    layers = map(str, range(len(tasks[0]["scores"])))
    return PageTable(["task", "score", *layers, "guess", "best", "centre"], rows, 2)
