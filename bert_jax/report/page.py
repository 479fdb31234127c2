"""Records to one HTML file that needs nothing else.

Everything shown comes from text that may be hostile: the template escapes all values, and a
Content-Security-Policy lets no script run and nothing load.
"""

import datetime
import functools
import json
import os
from typing import Any

import jinja2
import markupsafe

from bert_jax import config
from bert_jax.doctor import run
from bert_jax.doctor.finding import Finding
from bert_jax.errors import InputError, printable
from bert_jax.report import figures, times
from bert_jax.report.records import Record
from bert_jax.report.statistics import Statistics
from bert_jax.training.pretraining import Prepared

# Evaluations that stand in the tables, spread over the run.
_ROWS = 8
_PREDICTIONS = 5


def render(
    records: list[Record],
    refresh_seconds: int | None = None,
    price_per_chip_hour: float | None = None,
) -> str:
    """The page of a run, or of several compared.

    Args:
      records: one or more.
      refresh_seconds: the browser loads the page again after so many; None: never.
      price_per_chip_hour: in any currency; None: costs are left out.
    """
    several = len(records) > 1
    return _template().render(
        title=" · ".join(record.label for record in records),
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        refresh=refresh_seconds,
        runs=[_summary(record, price_per_chip_hour) for record in records],
        figures=figures.of_comparison(records) if several else figures.of_run(records[0]),
        differing=_differing(records) if several else [],
        detail=None if several else _detail(records[0], price_per_chip_hour),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bert_jax.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": times.duration,
        "percent": lambda share: f"{100 * share:.1f} %",
        "svg": markupsafe.Markup,
        "shown": printable,
    }
    return environment.get_template("page.html")


def _summary(record: Record, price: float | None) -> dict[str, Any]:
    """What stands at the top about each run."""
    goodput = times.goodput(record.timings)
    return {
        "label": record.label,
        "name": record.experiment.name,
        "state": record.state,
        "done": record.done,
        "total": record.experiment.total_steps,
        "left": record.seconds_left,
        "evaluation": record.evaluation[-1] if record.evaluation else None,
        "tokens_per_second": record.recent("tokens_per_second"),
        "real_tokens_per_second": record.recent("real_tokens_per_second"),
        "utilisation": record.recent("utilisation"),
        "seconds": goodput.seconds,
        "goodput": goodput.share,
        "chip_hours": goodput.chip_hours,
        "cost": None if price is None else goodput.cost(price),
    }


def _detail(record: Record, price: float | None) -> dict[str, Any]:
    """What stands below the curves of a single run."""
    goodput = times.goodput(record.timings)
    statistics, why = _statistics(record)
    starts = [line for line in record.timings if line.get("kind") == "start"]
    return {
        "findings": _findings(record),
        "parts": [
            {"what": times.PARTS[name], "seconds": seconds, "share": seconds / goodput.seconds}
            for name, seconds in goodput.parts.items()
            if seconds
        ],
        "starts": len(starts),
        "goodput": goodput.tell(price),
        "evaluations": _spread(record.evaluation, _ROWS),
        "predictions": _predictions(record),
        "statistics": statistics,
        "no_statistics": why,
        "corpus_figures": figures.of_corpus(statistics) if statistics else [],
        "phases": record.experiment.phases,
        "plan": _plan(record.plan) if record.plan.get("slices") else None,
        "origin": record.origin,
        "config": [(path, _text(value)) for path, value in config.flatten(record.experiment)],
        "environment": sorted((name, _text(value)) for name, value in record.environment.items()),
    }


def _plan(plan: dict[str, Any]) -> dict[str, Any]:
    """A row for each phase on each slice of a plan (plan.report)."""
    rows = []
    for entry in plan["slices"]:
        for phase in entry["phases"]:
            seconds = phase.get("seconds")
            rows.append(
                {
                    "slice": entry["topology"],
                    "chips": entry["chips"],
                    "phase": phase["phase"],
                    "outcome": phase["outcome"],
                    "peak": phase["memory"].get("peak", 0) / 2**30,
                    "memory": entry["device_memory"] / 2**30,
                    "seconds": seconds
                    and seconds | {"links": seconds["collectives"] + seconds["latency"]},
                    "utilisation": phase.get("utilisation"),
                    "hours": phase["hours"],
                }
            )
    return {"rows": rows, "libtpu": plan["versions"]["libtpu"]}


def _findings(record: Record) -> list[Finding]:
    found = run.examine_lines(record.experiment, record.workdir)
    return sorted(found, key=lambda finding: finding.severity != "problem")


@functools.lru_cache(maxsize=4)
def _opened(folder: os.PathLike, resolved: str) -> Statistics:
    return Statistics.of(config.from_json(resolved, "the run"), Prepared.open(folder))


def _statistics(record: Record) -> tuple[Statistics | None, str]:
    """Of the corpus, made once a process; or why there are none."""
    try:
        return _opened(record.workdir.corpus, config.to_json(record.experiment)), ""
    except InputError as error:
        return None, str(error)


def _predictions(record: Record) -> list[dict[str, Any]]:
    """For each sentence: its text, the truth, and what was said at some of the evaluations."""
    lines = _spread(record.predictions, _PREDICTIONS)
    if not lines:
        return []
    newest = lines[-1]["sentences"]
    found = []
    for sentence in newest:
        said = []
        for line in lines:
            same = [s for s in line["sentences"] if s["text"] == sentence["text"]]
            if same:
                said.append({"step": line["step"], **same[0]})
        found.append({"text": sentence["text"], "truth": sentence.get("truth"), "said": said})
    return found


def _differing(records: list[Record]) -> list[tuple[str, list[str]]]:
    """Fields that are not the same in all experiments, with each one's value."""
    tables = [dict(config.flatten(record.experiment)) for record in records]
    paths = dict.fromkeys(path for table in tables for path in table)
    rows = [(path, [_text(table.get(path, "absent")) for table in tables]) for path in paths]
    return [row for row in rows if len(set(row[1])) > 1]


def _spread(lines: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most `most` lines, spread evenly, the newest among them."""
    if len(lines) <= most:
        return lines
    return [lines[round((len(lines) - 1) * i / (most - 1))] for i in range(most)]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=list, ensure_ascii=False)
