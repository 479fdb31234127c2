"""The values measured on a table's runs, stored in the table's folder.

A value is stored under hashes of its inputs: settings, custom code, corpus, base and examples. So
no value is measured twice, whatever else changes in the table or in the package, and a value that
was measured with another corpus or other examples is not shown.
"""

import dataclasses
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

import bert_jax
from bert_jax import config
from bert_jax.config import Experiment, Finetuning, Section, Table
from bert_jax.config.comparison import COLUMNS, REACH
from bert_jax.errors import InputError, prefix_errors
from bert_jax.storage.workdir import Workdir, read_json, translate_os_errors, write_json
from bert_jax.tasks import adaptation, examples
from bert_jax.tasks.probes import Probes
from bert_jax.tools.report import render

# Since version 2, keys of values include a hash of the text and the weights that were read.
FORMAT_VERSION = 2
# Minimal pairs that are scored for each run, equally many of each paradigm.
MINIMAL_PAIRS = 5_000
_WHOLE_NUMBERS = ("cpu_seconds", "steps", "real_tokens")
AGAIN = "* measured again: its text or its examples have changed since it was first measured"
_OLDER = "it lacks hashes of the text; choose another --workdir, where everything is run again"
_REMEDY = "remove it; all values are then measured again, and finished runs are kept"


@dataclasses.dataclass(frozen=True)
class Column:
    """A quantity that is measured on each run."""

    name: str  # as in table.columns
    title: str  # for people
    task: Finetuning | None = None  # the task of a probe or a fine-tuning; else None
    examples: str = ""  # hash of the task's examples

    @classmethod
    def all_of(cls, name: str) -> "list[Column]":
        """Reads a column; for a suite, a column suite:SUITE:FOLDER:TASK for each of its tasks."""
        kind, _, address = name.partition(":")
        if kind != "suite":
            return [cls.of(name)]
        address, *settings = address.split(" ")
        with prefix_errors(f"table.columns: {name}"):
            tasks = config.load_suite(address.partition(":")[0]).tasks
        return [cls.of(" ".join([f"suite:{address}:{t.name}", *settings])) for t in tasks]

    @classmethod
    def of(cls, name: str) -> "Column":
        """Returns a column; reads its task and examples, so that errors are found before a run."""
        kind, _, rest = name.partition(":")
        if name in COLUMNS:
            return cls(name, COLUMNS[name])
        if REACH.fullmatch(name):
            return cls(name, f"seconds of CPU to {rest} nat below the unigram baseline")
        settings = []
        while "=" in rest.rpartition(" ")[2]:
            rest, _, setting = rest.rpartition(" ")
            settings.insert(0, setting)
        with prefix_errors(f"table.columns: {name}"):
            task = _read_suite_task(rest) if kind == "suite" else config.load(rest, Finetuning)
            task = config.override(task, settings)
            is_pairs = task.task.kind == "minimal_pairs"
            if kind == "probe" and settings:
                raise InputError("a probe takes no settings; remove them, or write finetune:")
            if kind == "probe":
                examples_hash = Probes([rest], MINIMAL_PAIRS, name).sha256
                title = f"{task.name}, minimal pairs" if is_pairs else task.name
            elif is_pairs:
                raise InputError("minimal pairs cannot be learned from; write probe:")
            else:
                splits = (task.task.train, task.task.validation)
                labelled = (examples.iterate(task.task, split, "labelled") for split in splits)
                hashes = [examples.sha256(split) for split in labelled]
                examples_hash = short_hash(hashes)
                title = f"{task.name}, fine-tuned"
        return cls(name, f"{title} ({task.task.main_score})", task, examples_hash[:16])

    @property
    def heading(self) -> str:
        """The heading in table.txt: a file's name; a task's name if it has settings or a suite."""
        if self.task is not None and ("=" in self.name or self.name.startswith("suite:")):
            return self.task.name
        return self.name.rpartition("/")[2]

    def text(self, value: float) -> str:
        """Formats a value of the column."""
        is_whole = self.name in _WHOLE_NUMBERS or REACH.fullmatch(self.name)
        return f"{value:,.0f}" if is_whole else f"{value:.3f}"


def _read_suite_task(address: str) -> Finetuning:
    """Returns the fine-tuning that SUITE:FOLDER:TASK names."""
    suite, _, rest = address.partition(":")
    folder, _, name = rest.rpartition(":")
    (task,) = (task for task in config.load_suite(suite).tasks if task.name == name)
    return config.locate_files(task.experiment, folder)


@dataclasses.dataclass(frozen=True)
class TableRun:
    """A run of a row of the table, with one of its seeds."""

    row: str  # name of the row
    seed: int
    experiment: Experiment  # with the table's steps and seed
    input_hash: str  # hash of the corpus and of the initial weights; "" before it is known
    folder: epath.Path  # workdir of the run


@dataclasses.dataclass
class Results:
    """A table with its columns, its runs, and the values measured so far."""

    table: Table
    root: epath.Path  # the table's folder, on this machine
    columns: list[Column]
    # {`short_hash` of a row's experiment: CPU seconds of a step of each phase}.
    costs: dict[str, list[float]]
    # {`hash_of`: {hash of text, weights and examples: [value, version of bert_jax, whether another
    # hash had a value before]}}. A value is None if the run does not have the quantity.
    values: dict[str, dict[str, list[Any]]]
    # The runs, all rows with the first seed first; empty before their steps are known.
    members: list[TableRun] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, table: Table, root: str) -> "Results":
        """Reads the table's values from its folder, which may be new."""
        folder = Workdir(root).root
        columns = [column for name in table.columns for column in Column.all_of(name)]
        titles = [column.title for column in columns]
        for column in columns:
            if titles.count(column.title) > 1:
                raise InputError(
                    f"table.columns: {column.name}: there are two tasks of this name; rename one"
                )
            if column.task is None or column.name.startswith("probe:"):
                continue
            for row in table.rows:
                with prefix_errors(f"table.columns: {column.name}"):
                    adaptation.require_usable(row.experiment.model, column.task, f"row {row.name}")
        with translate_os_errors(folder):
            names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        record: dict[str, Any] = {"costs": {}, "values": {}}
        if "table.json" in names:
            record = read_json(folder / "table.json", FORMAT_VERSION, _OLDER, _REMEDY)
        elif names - {"lock"}:
            raise InputError(
                f"{folder}: holds other files and no table; choose another folder with --workdir"
            )
        return cls(table, folder, columns, record["costs"], record["values"])

    def write(self) -> None:
        """Writes `table.json`."""
        runs = [
            {
                "row": member.row,
                "seed": member.seed,
                "read": member.input_hash,
                "steps": member.experiment.total_steps,
                "values": {c.name: (self.find(member, c) or [None])[0] for c in self.columns},
            }
            for member in self.members
        ]
        record = {
            "format_version": FORMAT_VERSION,
            "name": self.table.name,
            "runs": runs,
            "costs": self.costs,
            "values": self.values,
        }
        write_json(self.root / "table.json", record)

    def find(self, member: TableRun, column: Column) -> list[Any]:
        """Returns the entry of `values` for a run and a column; [] if it was not measured yet."""
        entries = self.values.get(hash_of(column, member.experiment), {})
        return entries.get(f"{member.input_hash}{column.examples}", [])

    def keep(self, member: TableRun, column: Column, value: float | None) -> None:
        """Stores a value of a run, and writes the table."""
        entries = self.values.setdefault(hash_of(column, member.experiment), {})
        key = f"{member.input_hash}{column.examples}"
        entries[key] = [value, bert_jax.__version__, bool(entries)]
        self.write()

    def row_values(self, row: str, column: Column) -> list[list[Any]]:
        """Returns the entries of `values` for a row's runs and a column."""
        entries = (self.find(member, column) for member in self.members if member.row == row)
        return [entry for entry in entries if entry]

    def summarize(self, row: str, column: Column) -> tuple[int, float, float]:
        """Returns the number of a row's values, their mean, and its standard error, or nan."""
        values = [value for value, *_ in self.row_values(row, column) if value is not None]
        mean = statistics.fmean(values) if values else math.nan
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
        return len(values), mean, error

    def cell(self, row: str, column: Column) -> str:
        """Formats mean and error, or "-" without a value; a * refers to the footnote."""
        _, mean, error = self.summarize(row, column)
        if math.isnan(mean):
            return "-"
        mark = "*" * any(again for *_, again in self.row_values(row, column))
        return column.text(mean) + ("" if math.isnan(error) else f" +- {column.text(error)}") + mark

    def page_table(self, headings: Sequence[str]) -> render.PageTable:
        """Returns the table with a line for each row: its name, number of runs, and cells."""
        rows = []
        for row in self.table.rows:
            runs = max(self.summarize(row.name, column)[0] for column in self.columns)
            cells = [self.cell(row.name, column) for column in self.columns]
            rows.append([row.name, str(runs), *cells])
        return render.PageTable(["row", "runs", *headings], rows)

    @property
    def footnote(self) -> str:
        """The explanation of a * in cells; "" if there is none."""
        entries = (
            e for row in self.table.rows for c in self.columns for e in self.row_values(row.name, c)
        )
        return AGAIN if any(again for _, _, again in entries) else ""

    def lines(self) -> Iterator[str]:
        """Yields the table as text."""
        yield from self.page_table([column.heading for column in self.columns]).lines()
        if self.footnote:
            yield self.footnote


@functools.cache
def hash_of(column: Column, experiment: Experiment) -> str:
    """Returns a hash of the settings on which a value depends."""
    sections = [experiment] if column.task is None else [experiment, column.task]
    name = column.name if REACH.fullmatch(column.name) else column.name.partition(":")[0]
    return short_hash([name, *map(_nondefault_fields, sections)])


def short_hash(value: Any) -> str:
    """Returns the first 16 digits of a hash of a section's identity fields, or of a JSON value."""
    value = _nondefault_fields(value) if isinstance(value, Section) else value
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _nondefault_fields(section: Any) -> list[Any]:
    """Lists identity fields that differ from their defaults, except the section's name.

    They change what a run computes. A field that a later version adds does not change the hash.
    """
    fields: list[Any] = []
    for f in dataclasses.fields(section):
        value, default = getattr(section, f.name), f.default
        if f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        role = value.role if isinstance(value, Section) else section.role
        # A `name` with a default selects something, such as an optimizer; others are labels.
        is_label = f.name == "name" and default is dataclasses.MISSING
        if value == default or role != "identity" or is_label:
            continue
        if isinstance(value, Section):
            fields.append([f.name, _nondefault_fields(value)])
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            fields.append([f.name, [_nondefault_fields(item) for item in value]])
        else:
            fields.append([f.name, value])
    return fields
