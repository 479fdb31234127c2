"""The files of a suite's tasks: finds and checks all of them before anything is run."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bert_jax import config
from bert_jax.config import PredictionFile, Suite, SuiteTask
from bert_jax.errors import InputError, prefix_errors
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import formats
from bert_jax.tasks.examples import Example, Sentence, Tally

# With a larger share of broken rows a file probably has another format, even if the task says
# `broken_rows="skip"`.
_MOST_BROKEN = 0.05


class CheckedTask(NamedTuple):
    """A task of a suite whose files were read."""

    task: SuiteTask
    folder: str  # holds the files
    examples_hash: str  # of the training and validation examples
    input_hashes: Mapping[str, str]  # {file of predictions: hash of the examples to predict}


def load_tasks(suite: Suite, folder: str, settings: Sequence[str]) -> list[CheckedTask]:
    """Reads all files of a suite, and applies the `--set` strings to its experiments.

    Raises InputError first for missing files, then for files with too many broken rows.
    """
    for task in suite.tasks:
        _require_files(task, folder)
    checked = []
    for task in suite.tasks:
        with prefix_errors(f"{suite.name}: {task.name}"):
            experiment = config.override(task.experiment, settings)
            task = dataclasses.replace(task, experiment=experiment)
            located_task = config.locate_files(experiment, folder).task
            splits = (_read_split(located_task, name) for name in ("train", "validation"))
            examples_hash = "-".join(examples_lib.sha256(split) for split in splits)
            rows = {f.output: read_file(f, located_task, folder) for f in task.predictions}
            hashes = {key: examples_lib.sha256(e for _, e in pairs) for key, pairs in rows.items()}
        checked.append(CheckedTask(task, folder, examples_hash, hashes))
    return checked


def _require_files(task: SuiteTask, folder: str) -> None:
    fields = task.experiment.task
    advice = dict.fromkeys((*fields.train, *fields.validation), task.download)
    advice |= {file.source: file.download or task.download for file in task.predictions}
    for source, what_to_download in advice.items():
        kind, _, path = config.locate_source(source, folder).partition(":")
        if kind != "tfds" and not os.path.isfile(path):
            raise InputError(f"{os.path.normpath(path)}: no such file; {what_to_download}")


def _read_split(task: config.Task, split: str) -> Iterator[Example]:
    """Yields the labelled examples of a split; at its end, refuses files with many broken rows."""
    tally, count = Tally(), 0
    for example in examples_lib.iterate(task, getattr(task, split), "labelled", tally):
        count += 1
        yield example
    if len(tally.broken) > _MOST_BROKEN * (count + len(tally.broken)):
        raise InputError(
            f"{len(tally.broken):,} of {count + len(tally.broken):,} rows of {split} are broken, "
            f"so the file has another format; the first: {tally.broken[0][1]}"
        )


def read_file(
    file: PredictionFile, task: config.Task, folder: str
) -> Iterator[tuple[str, Example]]:
    """Yields the index and the example of each row of a file to predict.

    A blank text is an example here, since the file of predictions needs all rows. Files of `span`
    and `tag` have labels, but no index: it is "".
    """
    source = config.locate_source(file.source, folder)
    if task.kind in ("span", "tag"):
        yield from (("", row) for row in examples_lib.iterate(task, (source,), "labelled"))
        return
    columns = (file.index_column, *(file.text_columns or task.text_columns))
    seen: dict[str, str] = {}  # locations by index
    for location, (index, *texts) in formats.read_columns(source, "first_line", columns):
        if index in seen:
            raise InputError(f"{location}: {seen[index]} has the index {index!r}, too; remove one")
        seen[index] = location
        yield index, Sentence(location, tuple(texts), None)
    if not seen:
        raise InputError(f"{file.source}: holds no examples")
