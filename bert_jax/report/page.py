"""The report: one HTML file that needs nothing else, written once or for as long as a run goes on.

Everything shown comes from text that may be hostile: the template escapes all values, and a
Content-Security-Policy lets no script run and nothing load.
"""

import contextlib
import datetime
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jinja2
import markupsafe
from etils import epath

from bert_jax import config
from bert_jax.doctor import run
from bert_jax.errors import InputError, printable, reading
from bert_jax.report import figures, times
from bert_jax.report.records import CorpusStatistics, Line, Record
from bert_jax.storage import mirror
from bert_jax.storage.workdir import named_errors
from bert_jax.training.pretraining import Prepared

# Evaluations that stand in the tables, spread over the run.
_ROWS = 8
_PREDICTIONS = 5


def write(
    workdirs: Sequence[str],
    out: str | None,
    every: int | None,
    what: Literal["page", "events"],
    log: Callable[[str], None],
    price_per_chip_hour: float | None = None,
) -> None:
    """Writes the page of a run, or one that compares several.

    Args:
      workdirs: of the runs.
      out: where the page goes; None: into the workdir, or into this folder where several are
        compared.
      every: seconds after which it is written again while one of the runs goes on; None: once.
      what: `events` writes TensorBoard event files into each workdir, too.
      log: gets a line with where the page is, and at the end what came of the time.
      price_per_chip_hour: in any currency; None: costs are left out.

    Raises:
      InputError: no run there, a damaged file, or a page that cannot be written.
    """
    records = _read(workdirs)
    path = _place(records, out)
    with contextlib.ExitStack() as stack:
        events = []
        if what == "events":
            events = [stack.enter_context(contextlib.closing(Events(r))) for r in records]
        refresh = _write_page(path, records, every, price_per_chip_hour)
        log(f"report: {path}")
        while refresh is not None:
            try:
                time.sleep(refresh)
            except KeyboardInterrupt:
                _write_page(path, records, None, price_per_chip_hour)
                raise
            records = _read(workdirs)
            for record, files in zip(records, events, strict=False):
                files.add(record)
            refresh = _write_page(path, records, every, price_per_chip_hour)
    for record in records:
        which = f"{record.label}: " if len(records) > 1 else ""
        log(which + times.goodput(record.timings).line(price_per_chip_hour))


def _write_page(
    path: epath.Path, records: list[Record], every: int | None, price_per_chip_hour: float | None
) -> int | None:
    """Writes the page; returns the seconds after which it renews itself, if it does."""
    goes_on = any(record.state == "running" for record in records)
    refresh = every if goes_on else None
    mirror.write(path, render(records, refresh, price_per_chip_hour))
    return refresh


def _read(workdirs: Sequence[str]) -> list[Record]:
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
    """Returns the page of a run, or of several compared.

    Args:
      records: one or more.
      refresh_seconds: the browser loads the page again after so many; None: never.
      price_per_chip_hour: in any currency; None: costs are left out.

    Raises:
      InputError: lines that no run has written.
    """
    several = len(records) > 1
    root = ", ".join(str(record.workdir.named) for record in records)
    files = f"{root}: metrics.jsonl, predictions.jsonl, timings.jsonl, origin.json or plan.json"
    with reading(files):
        try:
            return template("page.html").render(
                title=" · ".join(record.label for record in records),
                now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
                refresh=refresh_seconds,
                runs=[_summary(record, price_per_chip_hour) for record in records],
                figures=figures.of_comparison(records) if several else figures.of_run(records[0]),
                differing=_differing(records) if several else [],
                detail=None if several else _detail(records[0], price_per_chip_hour),
            )
        except jinja2.UndefinedError as error:
            raise LookupError(error.message) from error


@functools.cache
def template(name: str, package: str = "bert_jax.report") -> jinja2.Template:
    """Returns a template of a package, which may include those of the report."""
    packages = dict.fromkeys((package, "bert_jax.report"))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(one, ".") for one in packages]),
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
    return environment.get_template(name)


def _summary(record: Record, price: float | None) -> dict[str, Any]:
    """Returns what stands at the top about each run."""
    goodput = times.goodput(record.timings)
    return {
        "label": record.label,
        "name": record.experiment.name,
        "state": record.state,
        "done": record.done,
        "total": record.experiment.total_steps,
        "left": record.seconds_left,
        "evaluation": record.evaluation[-1] if record.evaluation else None,
        **{
            name: record.recent(name)
            for name in ("real_tokens_per_second", "padding", "utilisation", "real_utilisation")
        },
        "seconds": goodput.seconds,
        "goodput": goodput.share,
        "chip_hours": goodput.chip_hours,
        "cost": None if price is None else goodput.cost(price),
    }


def _detail(record: Record, price: float | None) -> dict[str, Any]:
    """Returns what stands below the curves of a single run."""
    goodput = times.goodput(record.timings)
    statistics, why = _statistics(record)
    findings = run.examine_lines(record.experiment, record.workdir)
    return {
        "findings": sorted(findings, key=lambda finding: finding.severity != "problem"),
        "parts": [
            {"what": times.PARTS[name], "seconds": seconds, "share": seconds / goodput.seconds}
            for name, seconds in goodput.parts.items()
            if seconds
        ],
        "starts": sum(line.get("kind") == "start" for line in record.timings),
        "goodput": goodput.line(price),
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
    """Returns a row for each phase on each slice of a plan (plan.report)."""
    rows = []
    for entry in plan["slices"]:
        for phase in entry["phases"]:
            seconds = phase.get("seconds")
            if seconds:
                seconds = seconds | {"links": seconds["collectives"] + seconds["latency"]}
            rows.append(
                {
                    "slice": entry["topology"],
                    "chips": entry["chips"],
                    "phase": phase["phase"],
                    "outcome": phase["outcome"],
                    "peak": phase["memory"].get("peak", 0) / 2**30,
                    "memory": entry["device_memory"] / 2**30,
                    "seconds": seconds,
                    "utilisation": phase.get("utilisation"),
                    "hours": phase["hours"],
                }
            )
    return {"rows": rows, "libtpu": plan["versions"]["libtpu"]}


@functools.lru_cache(maxsize=4)
def _opened(folder: os.PathLike, experiment: str) -> CorpusStatistics:
    return CorpusStatistics.of(config.from_json(experiment, "the run"), Prepared.open(folder))


def _statistics(record: Record) -> tuple[CorpusStatistics | None, str]:
    """Returns those of the corpus, made once a process; or why there are none."""
    try:
        return _opened(record.workdir.corpus, config.to_json(record.experiment)), ""
    except InputError as error:
        return None, str(error)


def _predictions(record: Record) -> list[dict[str, Any]]:
    """Returns for each sentence its text, the truth, and predictions of some evaluations."""
    lines = _spread(record.predictions, _PREDICTIONS)
    return [
        {
            "text": sentence["text"],
            "truth": sentence.get("truth"),
            "predicted": [
                {"step": line["step"], **same}
                for line in lines
                for same in line["sentences"]
                if same["text"] == sentence["text"]
            ],
        }
        for sentence in (lines[-1]["sentences"] if lines else [])
    ]


def _differing(records: list[Record]) -> list[tuple[str, list[str]]]:
    """Returns fields that are not the same in all experiments, with each one's value."""
    tables = [dict(config.flatten(record.experiment)) for record in records]
    paths = dict.fromkeys(path for table in tables for path in table)
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


# --- TensorBoard ---

# Neither is a curve.
_NOT_SCALARS = ("step", "kind", "time")


class Events:
    """Writes `W/tensorboard/{train,evaluation,probes,timings}` from the start, then adds.

    Raises:
      InputError: the [tensorboard] extra is not installed.
    """

    def __init__(self, record: Record):
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise InputError(
                "--tensorboard: needs the [tensorboard] extra: pip install 'bert-jax[tensorboard]'"
            ) from error
        if record.workdir.remote is not None:
            raise InputError(
                f"--tensorboard: event files are added to, which cannot be done in a bucket; copy "
                f"{record.workdir.named} to this machine"
            )
        self._newest = dict.fromkeys(("train", "evaluation", "probes", "timings"), -1)
        self._writers = {}
        for name in self._newest:
            folder = record.workdir.root / "tensorboard" / name
            with named_errors(folder):
                # TensorBoard adds up the files it finds: an earlier report's would show twice.
                for old in folder.glob("events.out.tfevents.*"):
                    old.unlink()
                self._writers[name] = Writer(str(folder))
        self.add(record)

    def add(self, record: Record) -> None:
        """Writes the lines of steps that are not written yet."""
        wall_times = {line["step"]: line["time"] for line in record.laps}
        probes = [{"step": line["step"]} | line["scores"] for line in record.probes]
        for name, lines in (
            ("train", record.train),
            ("evaluation", record.evaluation),
            ("probes", probes),
            ("timings", record.laps),
        ):
            for line in lines:
                step = line["step"]
                if step > self._newest[name]:
                    for tag, value in line.items():
                        if tag not in _NOT_SCALARS:
                            tag = f"probe/{tag}" if name == "probes" else tag
                            self._writers[name].add_scalar(
                                tag, value, step, wall_time=wall_times.get(step)
                            )
                    self._newest[name] = step
            self._writers[name].flush()

    def close(self) -> None:
        """Ends the files."""
        for writer in self._writers.values():
            writer.close()
