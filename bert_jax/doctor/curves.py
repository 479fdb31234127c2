"""Losses and gradient norms over a run's steps."""

import itertools
import math
import statistics
from typing import Any

from bert_jax.config import Experiment
from bert_jax.doctor.finding import Finding, severity

Line = dict[str, Any]

# Models of every size stay near the unigram line for hundreds of steps before they take off, the
# larger the longer; next sentence takes off later.
_LEAST_STEPS = 1_000
_LEAST_STEPS_NEXT_SENTENCE = 5_000
# So far into the schedule it should have happened.
_TAKEN_OFF = 0.5
# Nats below the unigram line that are more than luck.
_BELOW = 0.1

# Fewer lines make no curve.
_LINES = 20
# Standard errors that are chance.
_CHANCE = 2.0
# Near the end the rate is so low that a loss may well stand still.
_NEAR_THE_END = 0.9
# Nats that a loss may rise and come back from.
_RISEN = 0.3

# Held-out text is harder than what was seen, and dropout makes training text harder in turn.
_GAP, _GAP_NOTE = 0.3, 1.0
_WORSE = 0.1

# A next-sentence loss this near to that of guessing is guessing.
_GUESSING = 0.98
# Adam divides the gradient's scale out, so being clipped always is only worth knowing; a norm of
# that many times the clip is no healthy network's.
_CLIPPED_LINES, _EXPLODED = 0.9, 30.0


def findings(
    experiment: Experiment, train: list[Line], evaluations: list[Line], done: int
) -> list[Finding]:
    """On the lines of metrics.jsonl.

    Args:
      experiment: what the run was to be.
      train: its lines of kind `train`, in order.
      evaluations: those of kind `evaluation`.
      done: steps done.
    """
    train = [line for line in train if "masked_lm_loss" in line]
    if not train:
        return []
    risen = _risen(experiment, train)
    found = [risen]
    if risen is None:
        # A model that has learned nothing is flat, and one that has run away is both.
        unigram = _unigram(experiment, evaluations, done)
        found += [unigram, None if unigram else _flat(experiment, train)]
    found += [
        _next_sentence(experiment, train, evaluations, done),
        _overfitting(experiment, train, evaluations),
        _clipped(experiment, train),
    ]
    return [finding for finding in found if finding]


def _quarters(experiment: Experiment, train: list[Line]) -> list[list[float]]:
    """Masked LM losses of the last phase that has a curve, after warm-up, in four parts."""
    warmup = experiment.optimizer.warmup_steps
    by_phase: dict[int, list[float]] = {}
    for line in train:
        if line["step"] > warmup:
            phase, _ = experiment.phase_at(min(line["step"], experiment.total_steps) - 1)
            by_phase.setdefault(phase, []).append(line["masked_lm_loss"])
    curves = [losses for losses in by_phase.values() if len(losses) >= _LINES]
    if not curves:
        return []
    losses = curves[-1]
    cuts = [round(i * len(losses) / 4) for i in range(5)]
    return [losses[a:b] for a, b in itertools.pairwise(cuts)]


def _error(quarter: list[float]) -> float:
    """Standard error of a quarter's mean, from line to line, so that a slope does not count."""
    steps = [b - a for a, b in itertools.pairwise(quarter)]
    variance = statistics.fmean(s * s for s in steps) / 2
    return math.sqrt(variance / len(quarter))


def _risen(experiment: Experiment, train: list[Line]) -> Finding | None:
    quarters = _quarters(experiment, train)
    if not quarters:
        return None
    best = min(quarters, key=statistics.fmean)
    rise = statistics.fmean(quarters[-1]) - statistics.fmean(best)
    error = math.hypot(_error(quarters[-1]), _error(best))
    if rise <= max(_RISEN, _CHANCE * error):
        return None
    return Finding(
        "problem",
        f"the training loss has risen by {rise:.2f} nat from its best",
        f"metrics.jsonl: masked LM {statistics.fmean(best):.3f} at its best, "
        f"{statistics.fmean(quarters[-1]):.3f} at step {train[-1]['step']}",
        "what was learned is lost; it seldom comes back by itself",
        "start anew with a lower optimizer.peak_learning_rate or a longer optimizer.warmup_steps",
    )


def _flat(experiment: Experiment, train: list[Line]) -> Finding | None:
    quarters = _quarters(experiment, train)
    if not quarters or train[-1]["step"] > _NEAR_THE_END * experiment.total_steps:
        return None
    before, last = quarters[-2:]
    fall = statistics.fmean(before) - statistics.fmean(last)
    if fall > _CHANCE * math.hypot(_error(before), _error(last)):
        return None
    return Finding(
        "note",
        f"the training loss has not fallen over the last {len(before) + len(last)} lines",
        f"metrics.jsonl: masked LM {statistics.fmean(before):.3f}, then "
        f"{statistics.fmean(last):.3f} up to step {train[-1]['step']}",
        "steps are spent without gain; the rate may be too high for more, or the model too small",
        "let it go on, as a falling rate often frees it; else a lower "
        "optimizer.peak_learning_rate or a larger model",
    )


def _unigram(experiment: Experiment, evaluations: list[Line], done: int) -> Finding | None:
    if not evaluations:
        return None
    last = evaluations[-1]
    below = last["unigram_loss"] - last["masked_lm_loss"]
    warmup, total = experiment.optimizer.warmup_steps, experiment.total_steps
    late = last["step"] >= max(_LEAST_STEPS, _TAKEN_OFF * total, 2 * warmup)
    if below > _BELOW or not (late or done >= total):
        return None
    return Finding(
        "problem" if late else "note",
        f"held-out masked LM is no better than counting words ({abs(below):.3f} nat "
        f"{'below' if below >= 0 else 'above'} the unigram line)",
        f"metrics.jsonl: step {last['step']}: {last['masked_lm_loss']:.3f}, unigram line "
        f"{last['unigram_loss']:.3f}",
        "the model has not learned from context yet"
        + ("" if late else f"; {done:,} steps are few for that"),
        "another optimizer.peak_learning_rate, a longer warm-up, or more steps; and look at the "
        "examples with `bert-jax show`",
    )


def _next_sentence(
    experiment: Experiment, train: list[Line], evaluations: list[Line], done: int
) -> Finding | None:
    if not evaluations:
        return None
    last = evaluations[-1]
    accuracy, majority = last["next_sentence_accuracy"], last["next_sentence_majority"]
    error = last["next_sentence_error"]
    if accuracy > majority + _CHANCE * error or last["step"] < _LEAST_STEPS:
        return None
    guessing = -sum(p * math.log(p) for p in (majority, 1 - majority) if p)
    lines = train[-max(len(train) // 4, 1) :]
    loss = statistics.fmean(line["next_sentence_loss"] for line in lines)
    late = done >= max(_LEAST_STEPS_NEXT_SENTENCE, _TAKEN_OFF * experiment.total_steps)
    learned_nothing = late and loss > _GUESSING * guessing
    return Finding(
        "problem" if learned_nothing else "note",
        f"held-out next sentence is within chance of the majority ({accuracy:.3f} +- {error:.3f}, "
        f"majority {majority:.3f})",
        f"metrics.jsonl: step {last['step']}; in training the loss is {loss:.3f}, guessing "
        f"{guessing:.3f}",
        "the model cannot tell what follows"
        if learned_nothing
        else "next sentence is learned late, and from much text",
        "are documents whole, in order and of several sentences? `bert-jax show` shows the pairs"
        if learned_nothing
        else "more steps or more documents; masked words are learned all the same",
    )


def _overfitting(
    experiment: Experiment, train: list[Line], evaluations: list[Line]
) -> Finding | None:
    if not evaluations:
        return None
    last = evaluations[-1]
    phase, first = experiment.phase_at(min(last["step"], experiment.total_steps) - 1)
    trained = max(p.sequence_length for p in experiment.phases[: phase + 1])
    length = experiment.data.eval_sequence_length
    if trained < length:
        return Finding(
            "note",
            f"held-out examples are {length} long, and the run has seen none over {trained}",
            f"metrics.jsonl: step {last['step']}",
            f"positions from {trained} on are not trained yet: held-out scores are lower than "
            "they will be",
            "wait for the longer phase, or set data.eval_sequence_length in a new run",
        )
    lines = [line for line in train if first < line["step"] <= last["step"]]
    if not lines:
        return None
    lines = lines[-max(len(lines) // 4, 1) :]
    gap = last["masked_lm_loss"] - statistics.fmean(line["masked_lm_loss"] for line in lines)
    best = min(evaluations, key=lambda line: line["masked_lm_loss"])
    worse = last["masked_lm_loss"] - best["masked_lm_loss"]
    overfitted = worse > _WORSE and gap > _GAP
    if not overfitted and gap <= _GAP_NOTE:
        return None
    since = f", and {worse:.2f} worse than at step {best['step']}" if overfitted else ""
    return Finding(
        "problem" if overfitted else "note",
        f"held-out text is {gap:.2f} nat harder than training text{since}",
        f"metrics.jsonl: step {last['step']}: held-out masked LM {last['masked_lm_loss']:.3f}",
        "the model learns its text by heart",
        "more text, fewer steps, a smaller model, or more weight_decay and dropout",
    )


def _clipped(experiment: Experiment, train: list[Line]) -> Finding | None:
    optimizer = experiment.optimizer
    lines = [line for line in train if line["step"] > optimizer.warmup_steps]
    # Per replica, the norm is that of sums of gradients already clipped.
    if optimizer.clip != "global" or len(lines) < _LINES:
        return None
    norms = [line["gradient_norm"] for line in lines]
    over = sum(norm > optimizer.clip_norm for norm in norms) / len(norms)
    if over < _CLIPPED_LINES:
        return None
    last = statistics.median(norms[-max(len(norms) // 4, 1) :])
    return Finding(
        severity(last / optimizer.clip_norm, _EXPLODED),
        f"the gradient norm lies above optimizer.clip_norm={optimizer.clip_norm:g} in "
        f"{over:.0%} of lines after warm-up",
        f"metrics.jsonl: {last:.2f} in the last of them",
        "every gradient is scaled down to that norm; Adam hardly minds, unless it keeps growing",
        "none needed while the loss falls; else a lower optimizer.peak_learning_rate",
    )
