"""The files of predictions that the servers and scripts of benchmarks read.

INDEX and PREDICTION   a table for GLUE (https://gluebenchmark.com/faq), with the names of labels
{ID: ANSWER}           the JSON for the scripts of SQuAD; "" stands for no answer
WORD TAG PREDICTED     the columns for conlleval of CoNLL-2000, a blank line after each sentence
"""

import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from bert_jax.config import PredictionFile
from bert_jax.storage.workdir import replace_atomically, write_atomic
from bert_jax.tasks.examples import Example, Tagged
from bert_jax.tasks.finetuned_model import TaskModel

# The time of all members of an archive: equal predictions give equal bytes.
_TIME = (1980, 1, 1, 0, 0, 0)


def write_predictions(
    model: TaskModel, spec: PredictionFile, rows: Sequence[tuple[str, Example]], path: epath.Path
) -> None:
    """Writes the predictions of a model for `rows`, which `suite_files.read_file` yields."""
    examples = [example for _, example in rows]
    answers = list(model.predict(examples))
    if model.task.kind == "span":
        text = json.dumps({answer["id"]: answer["answer"] for answer in answers}) + "\n"
    elif model.task.kind == "tag":
        text = "".join(_tagged_lines(examples, answers))
    else:
        labels = [_label(answer, spec) for answer in answers]
        lines = (f"{index}\t{label}\n" for (index, _), label in zip(rows, labels, strict=True))
        text = "".join(["index\tprediction\n", *lines])
    write_atomic(path, text)


def _label(answer: dict[str, Any], spec: PredictionFile) -> str:
    """Returns the name of a label, or a number clipped to `spec.number_range`."""
    if "value" not in answer:
        return answer["label"]
    low, high = spec.number_range or (-math.inf, math.inf)
    return f"{min(max(answer['value'], low), high):.4f}"


def _tagged_lines(examples: Sequence[Any], answers: Sequence[dict[str, Any]]) -> Iterator[str]:
    for example, answer in zip(examples, answers, strict=True):
        assert isinstance(example, Tagged) and example.tags is not None
        for columns in zip(example.words, example.tags, answer["tags"], strict=True):
            yield " ".join(columns) + "\n"
        yield "\n"


def write_archive(paths: Sequence[epath.Path], archive: epath.Path) -> None:
    """Writes a zip file of files, without folders."""
    with replace_atomically(archive) as temporary, zipfile.ZipFile(temporary, "w") as zipped:
        for path in paths:
            member = zipfile.ZipInfo(path.name, _TIME)
            zipped.writestr(member, path.read_bytes(), zipfile.ZIP_DEFLATED)
