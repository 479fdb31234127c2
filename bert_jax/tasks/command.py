"""Fine-tuning in a workdir, and asking what was tuned."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from etils import epath

from bert_jax.config import Finetuning
from bert_jax.storage import mirror
from bert_jax.storage.workdir import load_experiment, write_atomic
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.job import FinetuningJob
from bert_jax.tasks.predicting import TaskModel
from bert_jax.training import session
from bert_jax.training.progress import Progress


def finetune(
    claim: Finetuning,
    base: str | None,
    root: str | None,
    progress: Progress,
    origin: dict[str, Any] | None = None,
) -> session.Outcome:
    """Adapts a base to a task, or goes on with it.

    Args:
      claim: the task, and how.
      base: a base or a run; None: the one that the claim or the run here names.
      root: the workdir; None: runs/NAME.
      progress: shows what happens.
      origin: see session.run.

    Raises:
      InputError: no base, examples that cannot be read, or a workdir of another run.
    """
    place = root or f"runs/{claim.name}"
    if base is None and not claim.init_from:
        known = mirror.opened(place)
        if known.experiment.exists():
            base = load_experiment(known, Finetuning).init_from
    if base is not None:
        claim = dataclasses.replace(claim, init_from=base)
    workdir = mirror.opened(place, access="write")

    def make() -> FinetuningJob:
        return FinetuningJob(claim, workdir, progress.say)

    return session.run(make, workdir, progress, origin=origin)


def predict(
    root: str,
    base: str | None,
    which: str,
    texts: Sequence[str] | Iterator[tuple[str, str]],
    sources: tuple[str, ...],
    what: Literal["predict", "score"],
    out: str | None,
) -> Iterator[str]:
    """Lines of what a fine-tuned run says: answers as JSON, or scores as JSON.

    Args:
      root: of the run.
      base: where its base lies now; None: where it lay.
      which: of its checkpoints.
      texts: texts given one by one, or (place, line), if there is neither a source nor scores.
      sources: of examples; with `score` none are the run's validation examples.
      what: is told.
      out: a file for the answers; None: they are told.

    Raises:
      InputError: see `TaskModel` and `examples_lib.each`; or a file that cannot be written.
    """
    model = TaskModel(root, base, which)
    task = model.claim.task
    scores = None
    if what == "score":
        examples = examples_lib.read(task, sources or task.validation, "labelled")
        scores, answers = model.score(examples)
    elif sources:
        answers = model.predict(examples_lib.each(task, sources, "unlabelled"))
    else:
        answers = model.predict(
            examples_lib.parse_arguments(task, texts)
            if isinstance(texts, Sequence)
            else examples_lib.parse_lines(task, texts)
        )
    if out is not None:
        write_atomic(epath.Path(out), (f"{_json(answer)}\n" for answer in answers))
    if scores is not None:
        yield _json(scores)
    elif out is None:
        yield from map(_json, answers)


def _json(value: dict[str, Any]) -> str:
    """As people read it; what might command a terminal is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
