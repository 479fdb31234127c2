"""A fine-tuning: its scores and losses, and its examples where they are at hand."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from bert_jax.config import Finetuning, Task
from bert_jax.doctor import run
from bert_jax.doctor.finding import Finding, Rule
from bert_jax.errors import InputError, printable, reading
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.examples import Question, Sentence, Tagged
from bert_jax.text import unknown
from bert_jax.training.lines import Lines, in_vain

Line = dict[str, Any]


def examine(workdir: Workdir) -> list[Finding]:
    """Examines a fine-tuned run and, where they can be read, its examples."""
    experiment = load_experiment(workdir, Finetuning)
    findings = run.damaged_lines(experiment, workdir) + examine_lines(experiment, workdir)
    try:
        train, held_out = (
            examples_lib.read(experiment.task, sources, "labelled")
            for sources in (experiment.task.train, experiment.task.validation)
        )
    except InputError:  # moved or changed since: the run does not need them any more
        return findings
    return findings + _examples(experiment.task, train, held_out)


def examine_lines(experiment: Finetuning, workdir: Workdir) -> list[Finding]:
    """Examines what a fine-tuning has written down, without its examples."""
    lines = Lines(workdir.metrics).read()
    timings = Lines(workdir.timings).read()
    with reading(workdir.predictions):
        written = {line["kind"]: line for line in Lines(workdir.predictions).read()}
        task, mistakes = written.get("task", {}), written.get("mistakes", {})
        total = task.get("total_steps", math.inf)
        findings = _texts(task) + _answers(mistakes)
    with reading(workdir.metrics):
        train = [line for line in lines if line.get("kind") == "train"]
        scored = [line for line in lines if line.get("kind") == "scores"]
        done = max((line["step"] for line in (*train, *scored)), default=0)
        losses = [(line["step"], line["loss"]) for line in scored]
        whole = done >= total or in_vain(losses, experiment.patience)
        warmup = experiment.warmup_share * total if task else 0
        findings += _risen([line for line in train if line["step"] > warmup])
        findings += _scores(experiment, scored, task, whole) + run.in_steps(train)
    with reading(workdir.timings):
        if task and not whole:
            findings = run.unfinished(int(total), workdir, timings, done) + findings
        return findings + run.in_time(timings)


# --- what was written down ---

_UNKNOWN = Rule(
    "{value} of the pieces of {name} are [UNK]",
    unknown.MOST, 0.2,
    "the model sees nothing there, and answers alike whatever stands in its place",
    "a base whose vocabulary is of this language and script",
)  # fmt: skip
_CUT = Rule(
    "{value} of the texts of {name} fill task.max_sequence_length, so most of them are cut",
    0.1, math.inf,
    "what decides may stand in the part that is not read",
    "a larger task.max_sequence_length, if the base has as many positions",
)  # fmt: skip
_GUESSING = Rule(
    "{name} {score:.4f} is no better than guessing ({guess})",
    0, 0,
    "nothing was learned, or not what is asked",
    "look at the examples with `bert-jax show`; another optimizer.peak_learning_rate, more epochs, "
    "or another base",
)  # fmt: skip
_PAST_ITS_BEST = Rule(
    "{name} was {best:.4f} at step {at:,}, and is {last:.4f} at step {step:,}",
    0, math.inf,
    "the last steps learned the training examples by heart",
    "fewer epochs, or more examples",
)  # fmt: skip
# Of what the training loss had fallen by.
_RISEN = Rule(
    "the training loss has risen from {low:.3f} at its best to {high:.3f}",
    0.5, 0.5,
    "what was learned is lost; it seldom comes back by itself",
    "start again with a lower optimizer.peak_learning_rate or a larger warmup_share",
)  # fmt: skip
_TOO_SURE = Rule(
    "probabilities are off by {value} in the mean (expected calibration error)",
    0.1, math.inf,
    "how sure the model says it is does not tell how often it is right",
    "fewer epochs; answers are the same, but do not choose by their probabilities",
)  # fmt: skip
_NEVER = Rule(
    "never answered: {names}, which are {value} of the truth",
    0, math.inf,
    "these examples are all wrong; scores that count every example alike hardly show it",
    "more examples of them, or task.score=macro_f1 to see it",
)  # fmt: skip

# Fewer lines make no curve; standard errors that are chance; a rise that is more than noise.
_LINES, _CHANCE, _RISE = 8, 2.0, 0.1
# Entities and spans that nobody guesses: a score of nothing.
_NOTHING = 0.01
# Of fewer answers the error is mostly noise, which only adds to it.
_CALIBRATED = 200
_CORRELATIONS = ("pearson", "spearman")


def _texts(task: Line) -> list[Finding]:
    findings = []
    for rule, shares in ((_UNKNOWN, task.get("unknown", {})), (_CUT, task.get("cut", {}))):
        for name, share in shares.items():
            findings += rule.check(share, name=f"task.{name}")
    return findings


def _answers(mistakes: Line) -> list[Finding]:
    counted = sum(one["count"] for one in mistakes.get("calibration", ()))
    error = mistakes["calibration_error"] if counted >= _CALIBRATED else 0.0
    findings = _TOO_SURE.check(error)
    if "confusion" in mistakes:
        labels, counts = mistakes["confusion"]["labels"], mistakes["confusion"]["counts"]
        answered = [sum(column) for column in zip(*counts, strict=True)]
        there = [sum(row) for row in counts]
        never = [i for i, count in enumerate(answered) if not count and there[i]]
        names = ", ".join(printable(labels[i]) for i in never)
        findings += _NEVER.check(sum(there[i] for i in never) / sum(there), names=names)
    return findings


def _risen(train: list[Line]) -> list[Finding]:
    losses = [line["loss"] for line in train if "loss" in line]
    if len(losses) < _LINES:
        return []
    cuts = [round(i * len(losses) / 4) for i in range(5)]
    quarters = [losses[a:b] for a, b in itertools.pairwise(cuts)]
    best, last = min(quarters, key=statistics.fmean), quarters[-1]
    start, low, high = (statistics.fmean(part) for part in (quarters[0], best, last))
    if high - low <= max(_CHANCE * run.error_of_means(last, best), _RISE * low):
        return []
    value = (high - low) / (start - low) if start > low else math.inf
    where = f"metrics.jsonl: step {train[-1]['step']}"
    return _RISEN.check(value, where, low=low, high=high)


def _scores(
    experiment: Finetuning, scored: list[Line], task: Line, finished: bool
) -> list[Finding]:
    if not scored:
        return []
    name, last = experiment.task.main_score, scored[-1]
    guess = task.get("guess")
    level, words = (guess[1], f"{guess[0]}: {guess[1]:.4f}") if guess else (0.0, "which scores 0")
    where = f"metrics.jsonl: step {last['step']}, {last['examples']:,} examples"
    if last["score"] <= level + _chance(name, level, last["examples"], guess):
        severity = "problem" if finished else "note"
        return [_GUESSING.finding(severity, where, name=name, score=last["score"], guess=words)]
    best = max(scored, key=lambda line: line["score"])
    drop = best["score"] - last["score"]
    if drop <= _chance(name, best["score"], last["examples"], "a score"):
        return []
    values = {"best": best["score"], "at": best["step"], "last": last["score"]}
    return _PAST_ITS_BEST.check(drop, where, name=name, step=last["step"], **values)


def _chance(name: str, score: float, examples: int, guess: Any) -> float:
    """Returns by how much a score may differ by chance: of accuracies so, of others about."""
    if name in _CORRELATIONS:
        return _CHANCE / math.sqrt(examples)
    if not guess:
        return _NOTHING
    share = min(max(score, 0.0), 1.0)
    return _CHANCE * math.sqrt(share * (1 - share) / examples)


# --- examples ---

# A few repeat in any set; over a tenth, what is scored is memory.
_OVERLAP = Rule(
    "{same:,} of {examples:,} validation examples ({value}) stand among the training examples",
    0.0, 0.1,
    "they are scored by memory, so that the score is higher than on new text",
    "leave them out of task.train",
)  # fmt: skip
_CONTRADICTION = Rule(
    "{same:,} of {examples:,} training examples ({value}) have the text of another, and another "
    "label",
    0.01, 0.2,
    "no model can have them all right",
    "decide on one label for each text",
)  # fmt: skip


def _examples(task: Task, train: Sequence[Any], held_out: Sequence[Any]) -> list[Finding]:
    labels: dict[Any, set[Any]] = {}
    for one in train:
        text, label = _text_and_label(one)
        labels.setdefault(text, set()).add(label)
    same = [one for one in held_out if _text_and_label(one)[0] in labels]
    place = printable(same[0].place) if same else ""
    counts = {"same": len(same), "examples": len(held_out)}
    findings = _OVERLAP.check(len(same) / len(held_out), place, **counts)
    torn = [one for one in train if len(labels[_text_and_label(one)[0]]) > 1]
    if task.kind == "generate":  # there are many ways to say it
        torn = []
    place = printable(torn[0].place) if torn else ""
    counts = {"same": len(torn), "examples": len(train)}
    return findings + _CONTRADICTION.check(len(torn) / len(train), place, **counts)


def _text_and_label(example: Sentence | Tagged | Question) -> tuple[Any, Any]:
    if isinstance(example, Sentence):
        return example.texts, example.label
    if isinstance(example, Tagged):
        return example.words, example.tags
    # People mark several spans of one answer.
    return (example.question, example.context), example.possible
