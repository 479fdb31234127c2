"""Answers to questions of both editions of SQuAD: the second and third table of the paper.

    bert-jax benchmark squad --from bases/bert --data data --out runs/squad

Source: Rajpurkar et al. 2016 and 2018, the four files of https://rajpurkar.github.io/SQuAD-explorer
in data/squad/. The settings are those of sections 4.2 and 4.3 of Devlin et al. 2018; a question of
SQuAD 2.0 has no answer where the score of none exceeds a threshold chosen on dev-v2.0.json.
Hardware: an accelerator, hours.
Expected: on dev-v1.1.json the published values that the table shows.
"""

from typing import Any

from glue import RUN

from bert_jax.config import Finetuning, PredictionFile, Suite, SuiteScore, SuiteTask, Task

_SITE = "https://rajpurkar.github.io/SQuAD-explorer/dataset"


def _task(version: str, dev: tuple[str, str], fields: dict[str, Any], **options: Any) -> SuiteTask:
    """Returns a task with published F1 and exact match; `fields` are those of `Task`."""
    name, held_out = f"SQuAD-{version}", f"squad:squad/dev-v{version}.json"
    task = Task(
        kind="span",
        train=(f"squad:squad/train-v{version}.json",),
        validation=(held_out,),
        max_sequence_length=384,
        **fields,
    )
    names = ("f1", "exact_match")
    return SuiteTask(
        experiment=Finetuning(name=name, task=task, run=RUN, **options),
        scores=tuple(SuiteScore(name=n, dev=value) for n, value in zip(names, dev, strict=True)),
        download=f"download {_SITE}/train-v{version}.json and dev-v{version}.json",
        predictions=(PredictionFile(source=held_out, output=f"{name}-dev.json"),),
    )


def tasks() -> tuple[SuiteTask, ...]:
    """The rate is 5e-5; there is no search."""
    return (
        _task("1.1", ("88.5", "80.8"), {}, epochs=3.0, batch_size=32),
        _task("2.0", ("", ""), {"no_answer": "possible"}, epochs=2.0, batch_size=48),
    )


def suite() -> Suite:
    """Both editions."""
    published = "BERT-Base, a single model (Devlin et al. 2018, Table 2)"
    return Suite(name="squad", tasks=tasks(), published=published)
