"""A suite: the tasks of a benchmark, such as GLUE, which `bert-jax benchmark` runs and tabulates.

A suite file defines `suite()`, which returns a `Suite`. Sources are relative to the folder that
`--data` names.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from bert_jax.config.fields import FieldRule, FolderName, PositiveCount, Problem, Section
from bert_jax.config.finetuning import Finetuning

# How the settings of each task are chosen; see `SuiteTask`.
Rules = Literal["paper", "one", "intermediate"]

_Range = Annotated[
    tuple[float, ...], FieldRule(lambda ends: len(ends) in (0, 2), "give the lowest and highest")
]


@dataclass(frozen=True, kw_only=True)
class SuiteScore(Section, role="identity", label="score"):
    """A row of the table of a suite: which score it shows, with published values in percent."""

    # A score of the kind of the task, such as f1; or SCORE/FILE, with the main score of the task
    # and the name of one of its validation files without ending.
    name: str
    # Name in the table; empty: the name of the task.
    title: str = ""
    # Published value on the validation examples; empty: none.
    dev: str = ""
    # Published value on the test examples; empty: none.
    test: str = ""


@dataclass(frozen=True, kw_only=True)
class PredictionFile(Section, role="identity", label="predictions"):
    """The file of examples that the best run predicts, and the file of predictions that it writes.

    The form of the predictions follows from the kind of the task: for a label or number a table
    with the columns `index` and `prediction`, as GLUE takes it; for `span` the JSON of SQuAD's
    script, {ID: ANSWER}; for `tag` the columns of conlleval: word, tag, predicted tag.
    """

    # Source of the examples, as in `task.validation`. A table names its columns in its first line.
    source: str
    # Name of the file of predictions.
    output: FolderName
    # For a table: column of the index.
    index_column: str = "index"
    # For a table: columns of the texts; empty: those of the task.
    text_columns: tuple[str, ...] = ()
    # For numbers: the range to which predictions are limited; empty: any.
    number_range: _Range = ()
    # Name of a zip archive in which the output is put, too; empty: none.
    archive: str = ""
    # What to download if the file is missing; empty: as for the task.
    download: str = ""


@dataclass(frozen=True, kw_only=True)
class SuiteTask(Section, role="identity", label="suite_task"):
    """A task of a suite.

    The rules decide which runs there are. `paper`: `sweep` with the first seed, then `seeds` runs
    with the settings that have the highest main score on the validation examples. `one`: `seeds`
    runs of the experiment as it is. `intermediate`: as `paper`, and the runs start from the best
    run of the task `start`.
    """

    # The fine-tuning; its name is the name of the task.
    experiment: Finetuning
    # The scores of the table.
    scores: tuple[SuiteScore, ...]
    # What to download if a file is missing, and where to put it.
    download: str
    # Settings to try: FIELD=V1,V2 for each field, as in `finetune --sweep`; empty: no search.
    sweep: tuple[str, ...] = ()
    # Number of seeds.
    seeds: PositiveCount = 1
    # For the rules `intermediate`: the earlier task that this one starts from; empty: the base.
    start: str = ""
    # The files that the best run predicts.
    predictions: tuple[PredictionFile, ...] = ()

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.experiment.name

    def _problems(self) -> Iterator[Problem]:
        task = self.experiment.task
        files = (re.split("[/:]", source)[-1].partition(".")[0] for source in task.validation)
        known = {*task.spec.scores, *(f"{task.main_score}/{file}" for file in files)}
        if not self.scores or not {score.name for score in self.scores} <= known:
            yield "scores", f"name at least one, each from {', '.join(sorted(known))}"


@dataclass(frozen=True, kw_only=True)
class Suite(Section, role="identity", label="suite"):
    """The tasks of a benchmark, in the order of the table and of the runs."""

    # Name of the suite.
    name: FolderName
    tasks: tuple[SuiteTask, ...]
    # Where the published values come from.
    published: str = ""

    def _problems(self) -> Iterator[Problem]:
        names = [task.name for task in self.tasks]
        outputs = [file.output for task in self.tasks for file in task.predictions]
        if not names:
            yield "tasks", "name at least one"
        for name in (*names, *outputs):
            if names.count(name) + outputs.count(name) > 1:
                yield "tasks", f"two tasks or files are called {name}; rename one"
        for number, task in enumerate(self.tasks):
            if task.start and task.start not in names[:number]:
                yield f"tasks.{number}.start", f"{task.name}: name an earlier task, or ''"


def locate_files(experiment: Finetuning, folder: str) -> Finetuning:
    """Returns an experiment of a suite with the paths of its files."""
    task = experiment.task
    train, validation = (
        tuple(locate_source(source, folder) for source in sources)
        for sources in (task.train, task.validation)
    )
    task = dataclasses.replace(task, train=train, validation=validation)
    return dataclasses.replace(experiment, task=task)


def locate_source(source: str, folder: str) -> str:
    """Returns a source of a suite with the path of its file.

    `/./` marks the part that differs between machines, see `config.source_name`.
    """
    word, _, path = source.partition(":")
    is_elsewhere = word == "tfds" or os.path.isabs(path)
    return source if is_elsewhere else f"{word}:{folder.rstrip('/')}/./{path}"
