"""Answers to questions of both editions of SQuAD: the second and third table of the paper.

    bert-jax benchmark squad --from bases/bert --data data --out runs/squad

Source: Rajpurkar et al. 2016 and 2018, the four files of https://rajpurkar.github.io/SQuAD-explorer
in data/squad/. The settings are those of sections 4.2 and 4.3 of Devlin et al. 2018; a question of
SQuAD 2.0 has no answer where the score of none exceeds a threshold chosen on dev-v2.0.json.
Hardware: an accelerator, hours.
Expected: on dev-v1.1.json the published values that the table shows.
"""

from bert_jax.config import (
    Finetuning,
    Optimizer,
    PredictionFile,
    Run,
    Suite,
    SuiteScore,
    SuiteTask,
    Task,
)

_SITE = "https://rajpurkar.github.io/SQuAD-explorer/dataset"


def tasks() -> tuple[SuiteTask, ...]:
    """SQuAD 1.1 with 3 epochs of 32 rows, SQuAD 2.0 with 2 epochs of 48."""
    paper = (SuiteScore(name="f1", dev="88.5"), SuiteScore(name="exact_match", dev="80.8"))
    unpublished = (SuiteScore(name="f1"), SuiteScore(name="exact_match"))
    return (
        _task("SQuAD-1.1", "v1.1", paper, 3.0, 32, no_answer="never"),
        _task("SQuAD-2.0", "v2.0", unpublished, 2.0, 48, no_answer="possible"),
    )


def _task(name: str, version: str, scores, epochs: float, batch_size: int, no_answer) -> SuiteTask:
    dev = f"squad:squad/dev-{version}.json"
    task = Task(
        kind="span",
        train=(f"squad:squad/train-{version}.json",),
        validation=(dev,),
        no_answer=no_answer,
        max_sequence_length=384,
    )
    experiment = Finetuning(
        name=name,
        task=task,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=Optimizer(name="adamw", peak_learning_rate=5e-5, warmup_steps=0),
        run=Run(log_every=100, eval_every=10**6, checkpoint_every=1_000, eval_batch_size=64),
    )
    return SuiteTask(
        experiment=experiment,
        scores=scores,
        download=f"download {_SITE}/train-{version}.json and dev-{version}.json",
        predictions=(PredictionFile(source=dev, output=f"{name}-dev.json"),),
    )


def suite() -> Suite:
    """Both editions."""
    return Suite(
        name="squad",
        tasks=tasks(),
        published="BERT-Base, a single model (Devlin et al. 2018, Table 2)",
    )
