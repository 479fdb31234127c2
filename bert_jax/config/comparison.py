"""A table of experiments that differ in a few fields: what `bert-jax compare` runs and measures."""

import dataclasses
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from bert_jax.config.corpus import named
from bert_jax.config.data import Data
from bert_jax.config.fields import Count, FolderName, Section, Wrong, at_least
from bert_jax.config.pretraining import Experiment, Parallelism, Run
from bert_jax.errors import InputError

# What is measured of each run (`compare.runs`), and in which unit; of HELD_OUT on held-out text.
COLUMNS = {
    "loss": "held-out loss, nat a piece",
    "below_unigrams": "nat below the unigram line",
    "accuracy": "accuracy of pieces",
    "next_sentence": "next-sentence accuracy",
    "cpu_seconds": "seconds of CPU",
    "steps": "steps",
    "real_tokens": "tokens without padding",
}
HELD_OUT = ("loss", "below_unigrams", "accuracy", "next_sentence")
# Seconds of CPU until held-out loss is so many nat below the unigram line: reach:2.5, say.
REACH = re.compile(r"reach:(\d+(?:\.\d+)?)")
# What is asked of each run: the file of a task follows a colon. `probe` reads off the encoder what
# `run.probes` does, or asks for minimal pairs; `finetune` learns the task, with the settings that
# follow the file, a blank before each.
TASKS = ("probe", "finetune")


@dataclass(frozen=True, kw_only=True)
class Row(Section, role="identity", label="row"):
    """One experiment of a table."""

    # Names the row, and folders of its runs.
    name: FolderName
    # What it runs; the table gives it its name, seeds, budget and corpus folder.
    experiment: Experiment


@dataclass(frozen=True, kw_only=True)
class Table(Section, role="identity", label="table"):
    """Rows, what is measured of them, and how much each may take."""

    # Names the table, and its folder runs/NAME.
    name: FolderName
    # The experiments, the one to start from first.
    rows: tuple[Row, ...]
    # Of COLUMNS, or reach:NAT, probe:TASKFILE and finetune:TASKFILE.
    columns: tuple[str, ...]
    # A run of each row for each; the means are over them.
    seeds: tuple[int, ...] = (0,)
    # Of each run; 0: those of its experiment. Phases, warm-up and decay keep their shares.
    steps: Count = 0
    # Of each run's steps, instead; as many steps are done as fit. 0: no such budget.
    cpu_seconds: Annotated[float, at_least(0)] = 0.0

    def _wrong(self) -> Iterator[Wrong]:
        if self.steps and self.cpu_seconds:
            yield "cpu_seconds", f"table.steps={self.steps} is set, too; give one budget"
        names = {"rows": [row.name for row in self.rows], "columns": self.columns}
        for name, values in {**names, "seeds": self.seeds}.items():
            if not values:
                yield name, "name at least one"
            for value in values:
                if list(values).count(value) > 1:
                    raise InputError(f"table.{name}: {value!r} is there twice; give each once")
        if min(self.seeds) < 0:
            yield "seeds", "must be at least 0"
        for column in self.columns:
            word, _, file = column.partition(":")
            known = column in COLUMNS or REACH.fullmatch(column)
            if not known and not (word in TASKS and file):
                forms = (*COLUMNS, "reach:NAT", *(f"{word}:TASKFILE" for word in TASKS))
                near = difflib.get_close_matches(column, COLUMNS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(forms)}"
                yield "columns", f"{column!r} is no column; {hint}"
        seconds = any(c == "cpu_seconds" or REACH.fullmatch(c) for c in self.columns)
        run: dict[Experiment, Row] = {}  # what differs in placement alone is run once
        for row in self.rows if seconds or self.cpu_seconds else ():
            plain = {"name": "x", "parallelism": Parallelism(), "run": Run()}
            first = run.setdefault(dataclasses.replace(row.experiment, **plain), row)
            if row.experiment.parallelism != first.experiment.parallelism:
                raise InputError(
                    f"table.rows: {row.name} differs from {first.name} in parallelism alone, and "
                    "would be shown its seconds; give it a table of its own"
                )
        # Losses of other text, in other pieces, or of rows of another length do not compare.
        held_out = [c for c in self.columns if c in HELD_OUT or REACH.fullmatch(c)]
        first = self.rows[0]
        for row in self.rows[1:] if held_out else ():
            theirs = of_held_out(first.experiment)
            for field, value in of_held_out(row.experiment).items():
                if value != theirs[field]:
                    raise InputError(
                        f"table.rows: {row.name} has {field}={value!r}, and {first.name} "
                        f"{theirs[field]!r}: column {held_out[0]} compares on the same held-out "
                        "rows alone; give both the same, or leave the column out"
                    )


# Of data, what is asked of held-out rows, the most telling first; and which there are.
_ASKED = ("objective", "attention", "code")
_ROWS = ("eval_sequence_length", "eval_max_predictions_per_seq", "eval_rows", "eval_seed")
_ROWS += ("short_seq_prob",)


def of_held_out(experiment: Experiment) -> dict[str, object]:
    """Returns the fields that decide which held-out rows there are and what is asked of them."""
    corpus, data = experiment.corpus, experiment.data
    # Of all sources by their sizes, and wherever those lie.
    corpus = dataclasses.replace(corpus, mixture=(), sources=tuple(map(named, corpus.sources)))
    if data.units == "sentences":
        data = dataclasses.replace(data, short_seq_prob=Data.short_seq_prob)  # of pairs alone
    return {
        **{f"data.{name}": getattr(data, name) for name in _ASKED},
        **{f"corpus.{f.name}": getattr(corpus, f.name) for f in dataclasses.fields(corpus)},
        "model.vocab_size": experiment.model.vocab_size,
        **{f"data.{name}": getattr(data, name) for name in _ROWS},
    }
