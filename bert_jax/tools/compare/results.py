"""What was measured of a table's runs, kept in its folder.

A value is kept under hashes of all that it is a function of: of settings, own code among them, and
of what was read, a corpus, a base and examples. So what was measured once is not measured again,
whatever else changes in the table, the package among it, and what is of other text is not shown.
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
from bert_jax.tasks import adapted, examples
from bert_jax.tasks.probes import Probes
from bert_jax.tools.report import render

# 2: values are kept by what was read, too.
FORMAT_VERSION = 2
# Minimal pairs that are asked of each run, as many of each paradigm.
PAIRS = 5_000
_WHOLE = ("cpu_seconds", "steps", "real_tokens")
AGAIN = "* measured again: its text or its examples have changed since it was first measured"
_OLDER = "it does not say on which text; choose another --workdir, where all is run again"
_MEND = "remove it; what was measured is then measured again, and finished runs are kept"


@dataclasses.dataclass(frozen=True)
class Column:
    """Something that is measured of each run."""

    name: str  # as the table has it
    title: str  # for people
    task: Finetuning | None = None  # of a column that asks a task; else None
    examples: str = ""  # a hash of those of the task

    @classmethod
    def of(cls, name: str) -> "Column":
        """Reads the file of a task, and its examples, so that what is wrong is known at once."""
        word, _, file = name.partition(":")
        if name in COLUMNS:
            return cls(name, COLUMNS[name])
        if REACH.fullmatch(name):
            return cls(name, f"seconds of CPU to {file} nat below the unigram line")
        settings = []
        while "=" in file.rpartition(" ")[2]:
            file, _, setting = file.rpartition(" ")
            settings.insert(0, setting)
        with prefix_errors(f"table.columns: {name}"):
            task = config.override(config.load(file, Finetuning), settings)
            is_pairs = task.task.kind == "minimal_pairs"
            if word == "probe" and settings:
                raise InputError("a probe takes no settings; remove them, or write finetune:")
            if word == "probe":
                of_task = Probes([file], PAIRS, name).sha256
                title = f"{task.name}, minimal pairs" if is_pairs else task.name
            elif is_pairs:
                raise InputError("nothing is learned from minimal pairs; write probe:")
            else:
                both = (task.task.train, task.task.validation)
                read = (examples.iterate(task.task, sources, "labelled") for sources in both)
                of_task = sha256([examples.sha256(of_split, ()) for of_split in read])
                title = f"{task.name}, fine-tuned"
        return cls(name, f"{title} ({task.task.main_score})", task, of_task[:16])

    @property
    def heading(self) -> str:
        """Returns what stands above it: the file's name, or the task's if it has settings."""
        if self.task is not None and "=" in self.name:
            return self.task.name
        return self.name.rpartition("/")[2]

    def text(self, value: float) -> str:
        """Returns a value for people."""
        whole = self.name in _WHOLE or REACH.fullmatch(self.name)
        return f"{value:,.0f}" if whole else f"{value:.3f}"


@dataclasses.dataclass(frozen=True)
class TableRun:
    """A run of a row with one of the seeds."""

    row: str  # whose
    seed: int
    experiment: Experiment  # with all that the table gives it
    read: str  # a hash of the corpus, and of the weights that it begins with; "" before it is known
    folder: epath.Path  # its workdir


@dataclasses.dataclass
class Results:
    """A table with its columns, the runs it takes, and what was measured of them so far."""

    table: Table  # what is compared
    root: epath.Path  # its folder, of this machine
    columns: list[Column]  # what is measured
    # Seconds of CPU that a step of each phase takes, by `sha256` of the row's experiment.
    costs: dict[str, list[float]]
    # What was measured, by `hash_of` and by what was read: None for what a run does not learn; by
    # which bert_jax; whether it had been measured before, of other text.
    values: dict[str, dict[str, list[Any]]]
    # The runs, all rows with the first seed first; none before their steps are known.
    members: list[TableRun] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, table: Table, root: str) -> "Results":
        """Reads what a folder holds of a table, perhaps nothing."""
        folder = Workdir(root).root
        columns = [Column.of(name) for name in table.columns]
        titles = [column.title for column in columns]
        for column in columns:
            if titles.count(column.title) > 1:
                raise InputError(
                    f"table.columns: {column.name}: there are two tasks of this name; rename one"
                )
            if column.task is None or not column.name.startswith("finetune:"):
                continue
            for row in table.rows:
                with prefix_errors(f"table.columns: {column.name}"):
                    adapted.require_adaptable(row.experiment.model, column.task, f"row {row.name}")
        with translate_os_errors(folder):
            there = {path.name for path in folder.iterdir()} if folder.exists() else set()
        record: dict[str, Any] = {"costs": {}, "values": {}}
        if "table.json" in there:
            record = read_json(folder / "table.json", FORMAT_VERSION, _OLDER, _MEND)
        elif there - {"lock"}:
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
                "read": member.read,
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
        """Returns what was measured of a run, as `values` has it; [] if it is not yet."""
        of_settings = self.values.get(hash_of(column, member.experiment), {})
        return of_settings.get(f"{member.read}{column.examples}", [])

    def keep(self, member: TableRun, column: Column, value: float | None) -> None:
        """Keeps what was measured of a run."""
        known = self.values.setdefault(hash_of(column, member.experiment), {})
        known[f"{member.read}{column.examples}"] = [value, bert_jax.__version__, bool(known)]
        self.write()

    def row_values(self, row: str, column: Column) -> list[list[Any]]:
        """Returns what was measured of a row's runs."""
        runs = (self.find(member, column) for member in self.members if member.row == row)
        return [measured for measured in runs if measured]

    def mean(self, row: str, column: Column) -> tuple[int, float, float]:
        """Returns over how many runs of a row, their mean, and its standard error; nan without."""
        there = [value for value, *_ in self.row_values(row, column) if value is not None]
        mean = statistics.fmean(there) if there else math.nan
        error = statistics.stdev(there) / len(there) ** 0.5 if len(there) > 1 else math.nan
        return len(there), mean, error

    def cell(self, row: str, column: Column) -> str:
        """Returns mean and error for people; - before there is one, and * as `AGAIN` says."""
        _, mean, error = self.mean(row, column)
        if math.isnan(mean):
            return "-"
        mark = "*" * any(again for *_, again in self.row_values(row, column))
        return column.text(mean) + ("" if math.isnan(error) else f" +- {column.text(error)}") + mark

    def page_table(self, headings: Sequence[str]) -> render.PageTable:
        """Returns a line a row: its name, its runs, and what was measured of them."""
        rows = []
        for row in self.table.rows:
            runs = max(self.mean(row.name, column)[0] for column in self.columns)
            cells = [self.cell(row.name, column) for column in self.columns]
            rows.append([row.name, str(runs), *cells])
        return render.PageTable(["row", "runs", *headings], rows)

    @property
    def again(self) -> str:
        """Returns what the marks in cells mean; "" where there are none."""
        measured = (
            m for row in self.table.rows for c in self.columns for m in self.row_values(row.name, c)
        )
        return AGAIN if any(again for _, _, again in measured) else ""

    def lines(self) -> Iterator[str]:
        """Yields the table as text."""
        yield from self.page_table([column.heading for column in self.columns]).lines()
        if self.again:
            yield self.again


@functools.cache
def hash_of(column: Column, experiment: Experiment) -> str:
    """Returns a hash of the settings that a value is a function of."""
    sections = [experiment] if column.task is None else [experiment, column.task]
    name = column.name if REACH.fullmatch(column.name) else column.name.partition(":")[0]
    return sha256([name, *map(_nondefault_fields, sections)])


def sha256(value: Any) -> str:
    """Returns the first 16 digits of a hash of a section's identity, or of what JSON holds."""
    value = _nondefault_fields(value) if isinstance(value, Section) else value
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _nondefault_fields(section: Any) -> list[Any]:
    """Lists fields of identity that have no default, or another value; but not what it is called.

    A field that a later version adds changes nothing.
    """
    given: list[Any] = []
    for f in dataclasses.fields(section):
        value, default = getattr(section, f.name), f.default
        if f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        role = value.role if isinstance(value, Section) else section.role
        is_label = f.name == "name" and default is dataclasses.MISSING  # an optimizer's has one
        if value == default or role != "identity" or is_label:
            continue
        if isinstance(value, Section):
            given.append([f.name, _nondefault_fields(value)])
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            given.append([f.name, [_nondefault_fields(item) for item in value]])
        else:
            given.append([f.name, value])
    return given
