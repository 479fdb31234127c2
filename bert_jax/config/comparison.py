"""A table of experiments that differ in a few fields: what `bert-jax compare` runs and measures."""

import dataclasses
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from bert_jax.config.data import Data
from bert_jax.config.fields import Count, FolderName, Problem, Section, minimum
from bert_jax.config.pretraining import Experiment, Parallelism, Run
from bert_jax.config.text_corpus import source_name
from bert_jax.errors import InputError

# The columns of a table with their units; those in HELD_OUT are measured on held-out text.
COLUMNS = {
    "loss": "held-out loss, nats per token",
    "below_unigrams": "nats below the unigram baseline",
    "accuracy": "accuracy on masked tokens",
    "next_sentence": "next-sentence accuracy",
    "cpu_seconds": "seconds of CPU",
    "steps": "steps",
    "real_tokens": "tokens without padding",
}
HELD_OUT = ("loss", "below_unigrams", "accuracy", "next_sentence")
# Seconds of CPU until held-out loss is so many nats below the unigram baseline, e.g. reach:2.5.
REACH = re.compile(r"reach:(\d+(?:\.\d+)?)")
# Columns WORD:TASKFILE. `probe` scores the encoder as `run.probes` does, also on minimal pairs;
# `finetune` fine-tunes on the task. suite:SUITE:FOLDER is a column for each task of a suite, whose
# files are in the folder. Settings may follow, each after a blank.
TASKS = {"probe": "TASKFILE", "finetune": "TASKFILE", "suite": "SUITE:FOLDER"}


@dataclass(frozen=True, kw_only=True)
class Row(Section, role="identity", label="row"):
    """One experiment of a table."""

    # Name of the row and of its runs' folders.
    name: FolderName
    # What the row trains; the table sets its name, seeds, budget and corpus folder.
    experiment: Experiment


@dataclass(frozen=True, kw_only=True)
class Table(Section, role="identity", label="table"):
    """The experiments to compare, the columns to measure and the budget of each run."""

    # Name of the table and of its folder runs/NAME.
    name: FolderName
    # The experiments, the baseline first.
    rows: tuple[Row, ...]
    # Keys of COLUMNS, reach:NAT, probe:TASKFILE, finetune:TASKFILE or suite:SUITE:FOLDER.
    columns: tuple[str, ...]
    # Each row is run once with each seed; the table shows means over seeds.
    seeds: tuple[int, ...] = (0,)
    # Steps of each run; phases, warm-up and decay keep their shares; 0: the experiment's own.
    steps: Count = 0
    # Seconds of CPU for the steps of each run, instead of `steps`; 0: no such budget.
    cpu_seconds: Annotated[float, minimum(0)] = 0.0

    def _problems(self) -> Iterator[Problem]:
        if self.steps and self.cpu_seconds:
            yield "cpu_seconds", f"table.steps={self.steps} is set, too; remove one of the two"
        names = {"rows": [row.name for row in self.rows], "columns": self.columns}
        for name, values in {**names, "seeds": self.seeds}.items():
            if not values:
                yield name, "name at least one"
            for value in values:
                if list(values).count(value) > 1:
                    raise InputError(f"table.{name}: {value!r} is given twice; remove one")
        if min(self.seeds) < 0:
            yield "seeds", "must be at least 0"
        for column in self.columns:
            word, _, file = column.partition(":")
            known = column in COLUMNS or REACH.fullmatch(column)
            if not known and not (word in TASKS and file):
                forms = (*COLUMNS, "reach:NAT", *(f"{word}:{file}" for word, file in TASKS.items()))
                near = difflib.get_close_matches(column, COLUMNS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(forms)}"
                yield "columns", f"{column!r} is no column; {hint}"
        measures_seconds = any(c == "cpu_seconds" or REACH.fullmatch(c) for c in self.columns)
        unique_rows: dict[Experiment, Row] = {}  # rows that differ only in placement are run once
        for row in self.rows if measures_seconds or self.cpu_seconds else ():
            plain = {"name": "x", "parallelism": Parallelism(), "run": Run()}
            first = unique_rows.setdefault(dataclasses.replace(row.experiment, **plain), row)
            if row.experiment.parallelism != first.experiment.parallelism:
                raise InputError(
                    f"table.rows: {row.name} differs from {first.name} only in parallelism, and "
                    "both would show the same seconds; move it to another table"
                )
        # Losses are comparable only on the same text, tokens and row length.
        held_out_columns = [c for c in self.columns if c in HELD_OUT or REACH.fullmatch(c)]
        first = self.rows[0]
        for row in self.rows[1:] if held_out_columns else ():
            first_fields = held_out_fields(first.experiment)
            for field, value in held_out_fields(row.experiment).items():
                if value != first_fields[field]:
                    raise InputError(
                        f"table.rows: {row.name} has {field}={value!r}, {first.name} has "
                        f"{first_fields[field]!r}: column {held_out_columns[0]} needs the same "
                        "held-out rows; set the same value for both, or remove the column"
                    )


# Fields of `Data` that decide what is predicted on held-out rows, the most important first, and
# fields that decide which rows there are.
_QUESTION_FIELDS = ("objective", "attention", "code")
_ROW_FIELDS = ("eval_sequence_length", "eval_max_predictions_per_seq", "eval_rows", "eval_seed")
_ROW_FIELDS += ("short_seq_prob",)


def held_out_fields(experiment: Experiment) -> dict[str, object]:
    """Returns the fields that decide the held-out rows and what is predicted on them."""
    corpus, data = experiment.corpus, experiment.data
    # Held-out rows are drawn from all sources by size.
    sources = tuple(map(source_name, corpus.sources))
    corpus = dataclasses.replace(corpus, mixture=(), temperature=0.0, sources=sources)
    if data.row_kind == "sentences":
        data = dataclasses.replace(data, short_seq_prob=Data.short_seq_prob)  # only used by pairs
    return {
        **{f"data.{name}": getattr(data, name) for name in _QUESTION_FIELDS},
        **{f"corpus.{f.name}": getattr(corpus, f.name) for f in dataclasses.fields(corpus)},
        "model.vocab_size": experiment.model.vocab_size,
        **{f"data.{name}": getattr(data, name) for name in _ROW_FIELDS},
    }
