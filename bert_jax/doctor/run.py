"""A run: its losses and gradients, its time, and the corpus it was trained on."""

import itertools
import math
import statistics
from typing import Any

from bert_jax.config import Experiment, Finetuning
from bert_jax.doctor import corpus
from bert_jax.doctor.finding import Finding, Rule, share
from bert_jax.errors import reading
from bert_jax.model import losses
from bert_jax.storage import mirror
from bert_jax.storage.workdir import COMPLETE, Workdir, load_experiment
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.lines import Lines, Spikes

Line = dict[str, Any]


def examine(workdir: Workdir) -> list[Finding]:
    """Examines a run and, where it is at hand, its corpus."""
    experiment = load_experiment(workdir)
    workdir = Workdir(workdir.root, experiment.run.corpus_dir, workdir.remote)
    findings = damaged_lines(experiment, workdir) + examine_lines(experiment, workdir)
    if mirror.exists(workdir.corpus / COMPLETE):
        lengths = tuple(sorted({phase.sequence_length for phase in experiment.phases}))
        return findings + corpus.examine(workdir.corpus, lengths)
    # Measured, since the corpus is not here to be planned.
    with reading(workdir.metrics):
        filled = [line["filled"] for line in _read(workdir)[0][-10:] if "filled" in line]
        if filled:
            where = f"in the last {len(filled)} lines"
            findings += corpus.PADDING.check(1 - statistics.fmean(filled), where=where)
    return findings


def examine_lines(experiment: Experiment, workdir: Workdir) -> list[Finding]:
    """Examines what a run has written down, without its corpus."""
    timings = Lines(workdir.timings).read()
    with reading(workdir.metrics):
        train, evaluations = _read(workdir)
        steps = [line["step"] for line in train[-1:]]
        steps += [int(name) for name in mirror.names(workdir.checkpoints) if name.isdecimal()]
        done = max(steps, default=0)
        findings = _warmup(experiment, done) + _curves(experiment, train, evaluations, done)
        findings += in_steps(train)
    if base := experiment.init_from:
        vectors = _newest(experiment, workdir).get("notes", {}).get("vectors")
        findings += [_MOVED.finding("note", base=base)] if vectors else []
    with reading(workdir.timings):
        return (
            unfinished(experiment.total_steps, workdir, timings, done) + findings + in_time(timings)
        )


def in_steps(train: list[Line]) -> list[Finding]:
    """Examines lines of training for steps that went wrong."""
    return _skipped(train) + _jumps(train)


def in_time(timings: list[Line]) -> list[Finding]:
    """Examines timings for what was no training."""
    return _rolled_back(timings) + _time(timings) + _done_twice(timings)


def _read(workdir: Workdir) -> tuple[list[Line], list[Line]]:
    """Returns the lines of training and of evaluations."""
    lines = Lines(workdir.metrics).read()
    train, evaluations = (
        [line for line in lines if line.get("kind") == kind] for kind in ("train", "evaluation")
    )
    return train, evaluations


# --- what was written down ---

_LINES_DAMAGED = Rule(
    "{name}: {damage}",
    0, 0,
    "the run is refused when it is to go on, and curves have a hole",
    "put the whole file back, or remove it to go on without its lines",
)  # fmt: skip
_MOVED = Rule(
    "init_from={base} is a base of sentence vectors, and this run does not train vectors",
    0, math.inf,
    "masked LM moves them: texts that mean the same may no longer lie near each other",
    "score similarities before and after (docs/interop.md, Using a base); embed with the base",
)  # fmt: skip
_UNFINISHED = Rule(
    "the run {ended} at step {done:,} of {total:,}",
    0, math.inf,
    "the last part of the schedule, at low rates, brings much of what a run gains",
    "run the same command again; it goes on from the newest checkpoint",
)  # fmt: skip
# The paper warms up for 1% of its steps. With half, the peak is hardly used.
_LONG_WARMUP = Rule(
    "the learning rate warms up for {warmup:,} of {total:,} steps",
    0.5, 0.5,
    "the peak rate is reached when the run is nearly over: little is learned",
    "a smaller optimizer.warmup_steps: a hundredth to a tenth of all steps",
)  # fmt: skip
_WARMING_UP = Rule(
    "the learning rate is still warming up: step {done:,} of {warmup:,}",
    0, math.inf,
    "losses of this part say little of the rest",
    "wait; or, if the run is meant to be short, a smaller optimizer.warmup_steps",
)  # fmt: skip
# A bad batch happens; one step in a hundred is the run on its way out.
_SKIPPED = Rule(
    "{bad:,} of {steps:,} steps were skipped: loss or gradient not finite",
    0, 0.01,
    "their text taught nothing; many in a row are a run that has run away",
    "a lower optimizer.peak_learning_rate or a longer optimizer.warmup_steps",
)  # fmt: skip
_ROLLED_BACK = Rule(
    "roll-backs over steps without a finite loss or gradient: {times}; steps left out: {skipped}",
    0, math.inf,
    "the update before them may have broken the parameters, or the hardware failed",
    "`bert-jax show --step {step}` shows its text; more than once: a lower "
    "optimizer.peak_learning_rate",
)  # fmt: skip
_JUMPS = Rule(
    "jumps in the loss of single steps: {count}",
    0, math.inf,
    "one batch unlike all others, or a rate too high for this part of the run",
    "`bert-jax show --step {step}` shows its text",
)  # fmt: skip


def damaged_lines(experiment: Experiment | Finetuning, workdir: Workdir) -> list[Finding]:
    """Looks for lines that are not those that the newest checkpoint was saved with."""
    findings, metadata = [], _newest(experiment, workdir)
    for name, written in metadata.get("lines", {}).items():
        damage = Lines(workdir.root / name).damage(metadata["step"], written)
        if damage:
            where = f"{name}: the checkpoint of step {metadata['step']} says what was written"
            findings.append(_LINES_DAMAGED.finding("problem", where, name=name, damage=damage))
    return findings


def _newest(experiment: Experiment | Finetuning, workdir: Workdir) -> dict[str, Any]:
    """Returns the metadata of the newest checkpoint; {} if there is none."""
    if not mirror.names(workdir.checkpoints):
        return {}
    with Checkpoints(workdir.checkpoints, experiment.run, "read") as saved:
        newest = saved.newest_step()
        return {} if newest is None else saved.metadata(newest)


def unfinished(total: int, workdir: Workdir, timings: list[Line], done: int) -> list[Finding]:
    """Reports a run that has not done all of its steps, and does not go on."""
    if done >= total or mirror.is_going_on(workdir):
        return []
    outcomes = [line["outcome"] for line in timings[-1:] if line.get("kind") == "end"]
    ended = f"has {outcomes[0]}" if outcomes else "was killed"
    return [_UNFINISHED.finding("note", ended=ended, done=done, total=total)]


def _warmup(experiment: Experiment, done: int) -> list[Finding]:
    warmup, total = experiment.optimizer.warmup_steps, experiment.total_steps
    findings = _LONG_WARMUP.check(warmup / total, warmup=warmup, total=total)
    if not findings and 0 < done < warmup:
        findings = [_WARMING_UP.finding("note", done=done, warmup=warmup)]
    return findings


def _skipped(train: list[Line]) -> list[Finding]:
    steps = [line["step"] for line in train]
    spans = [b - a for a, b in zip([0, *steps], steps, strict=False)]
    bad = [
        round(line.get("bad_steps", 0.0) * span) for line, span in zip(train, spans, strict=True)
    ]
    if not sum(bad):
        return []
    first = next(number for number, count in enumerate(bad) if count)
    return _SKIPPED.check(
        max(sum(bad) / steps[-1], bad[-1] / max(spans[-1], 1)),
        f"metrics.jsonl: {bad[first]} of the {spans[first]} steps up to {steps[first]}",
        bad=sum(bad),
        steps=steps[-1],
    )


def _rolled_back(timings: list[Line]) -> list[Finding]:
    back = [line for line in timings if line.get("kind") == "roll_back"]
    if not back:
        return []
    first, last = back[0]["bad"]
    return _ROLLED_BACK.check(
        len(back),
        f"timings.jsonl: steps {first} to {last}",
        times=len({tuple(line["bad"]) for line in back}),  # one that a kill undid comes again
        skipped=len(back[-1]["skipped"]),
        step=max(first - 1, 0),
    )


def _jumps(train: list[Line]) -> list[Finding]:
    spikes = Spikes()
    jumps = [spike for spike in map(spikes.of_line, train) if spike]
    if not jumps:
        return []
    step, loss, usual = jumps[0]
    where = f"metrics.jsonl: {loss:.3f} at step {step}, usually below {usual:.3f}"
    return _JUMPS.check(len(jumps), where, count=len(jumps), step=step)


# --- losses and gradient norms over a run's steps ---

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
# A next-sentence loss this near to that of guessing is guessing.
_GUESSING = 0.98
# Held-out text is harder than what was seen, and dropout makes training text harder in turn: nats.
_GAP, _GAP_NOTE, _WORSE = 0.3, 1.0, 0.1

# Nats that a loss may rise and come back from.
_RISEN = Rule(
    "the training loss has risen by {rise:.2f} nat from its best",
    0.3, 0.3,
    "what was learned is lost; it seldom comes back by itself",
    "start again with a lower optimizer.peak_learning_rate or a longer optimizer.warmup_steps",
)  # fmt: skip
_FLAT = Rule(
    "the training loss has not fallen over the last {lines} lines",
    0, math.inf,
    "steps are spent without gain; the rate may be too high for more, or the model too small",
    "let it go on, as a falling rate often frees it; else a lower optimizer.peak_learning_rate or "
    "a larger model",
)  # fmt: skip
_UNIGRAM = Rule(
    "held-out {what} is no better than counting words ({nats:.3f} nat {side} the unigram line)",
    0, 0,
    "the model has not learned from context yet{few}",
    "another optimizer.peak_learning_rate, a longer warm-up, or more steps; and look at the "
    "examples with `bert-jax show`",
)  # fmt: skip
_CHANCE_WORDS = (
    "held-out {what} is within chance of the majority ({accuracy:.3f} +- {error:.3f}, "
    "majority {majority:.3f})"
)
_NEVER_LEARNED = Rule(
    _CHANCE_WORDS,
    0, 0,
    "the model cannot tell what follows",
    "are documents whole, in order and of several sentences? `bert-jax show` shows the pairs",
)  # fmt: skip
_NOT_YET_LEARNED = Rule(
    _CHANCE_WORDS,
    0, math.inf,
    "it is learned late, and from much text",
    "more steps or more documents; masked words are learned all the same",
)  # fmt: skip
_LONGER_THAN_TRAINED = Rule(
    "held-out examples are {length} long, and the run has seen none over {trained}",
    0, math.inf,
    "positions from {trained} on are not trained yet: held-out scores are lower than they will be",
    "wait for the longer phase, or set data.eval_sequence_length in a new run",
)  # fmt: skip
_OVERFITTING = Rule(
    "held-out text is {gap:.2f} nat harder than training text{since}",
    0, 0,
    "the model learns its text by heart",
    "more text, fewer steps, a smaller model, or more weight_decay and dropout",
)  # fmt: skip
# Every optimizer here divides the gradient's scale out, so that to be clipped always is no finding:
# small batches are, and norms rise as the rate falls (Defazio 2025). A norm of so many times the
# clip is worth knowing, and that many times no healthy network's.
_CLIPPED_LINES = 0.9
_CLIPPED = Rule(
    "the gradient norm lies above optimizer.clip_norm={clip:g} in {over:.0%} of lines after "
    "warm-up",
    10.0, 30.0,
    "every gradient is scaled down to that norm; Adam hardly minds, unless it keeps growing",
    "none needed while the loss falls; else a lower optimizer.peak_learning_rate",
)  # fmt: skip


def _curves(
    experiment: Experiment, train: list[Line], evaluations: list[Line], done: int
) -> list[Finding]:
    train = [line for line in train if losses.learned(line, losses.PIECES)]
    if not train:
        return []
    quarters = _quarters(experiment, train)
    # A model that has learned nothing is flat, and one that has run away is both.
    findings = (
        _risen(quarters, train)
        or _unigram(experiment, evaluations[-1:], done)
        or _flat(experiment, quarters, train)
    )
    if evaluations:
        findings += _pairs(experiment, train, evaluations[-1], done)
        findings += _overfitting(experiment, train, evaluations)
    return findings + _clipped(experiment, train)


def _quarters(experiment: Experiment, train: list[Line]) -> list[list[float]]:
    """Returns losses of pieces of the last phase that has a curve, after warm-up, in four parts."""
    warmup = experiment.optimizer.warmup_steps
    by_phase: dict[int, list[float]] = {}
    for line in train:
        if line["step"] > warmup:
            phase, _ = experiment.phase_at(min(line["step"], experiment.total_steps) - 1)
            by_phase.setdefault(phase, []).append(_nats(line))
    curves = [curve for curve in by_phase.values() if len(curve) >= _LINES]
    if not curves:
        return []
    curve = curves[-1]
    cuts = [round(i * len(curve) / 4) for i in range(5)]
    return [curve[a:b] for a, b in itertools.pairwise(cuts)]


def _nats(line: Line) -> float:
    """Returns the loss of a piece."""
    return line[f"{losses.learned(line, losses.PIECES)}_loss"]


def _words(line: Line) -> str:
    return losses.PIECES[losses.learned(line, losses.PIECES)]


def error_of_means(*quarters: list[float]) -> float:
    """Returns the standard error of a difference of means, from line to line: no slope counts."""
    variance = 0.0
    for quarter in quarters:
        steps = [b - a for a, b in itertools.pairwise(quarter)]
        variance += statistics.fmean(s * s for s in steps) / 2 / len(quarter)
    return math.sqrt(variance)


def _risen(quarters: list[list[float]], train: list[Line]) -> list[Finding]:
    if not quarters:
        return []
    best, last = min(quarters, key=statistics.fmean), quarters[-1]
    low, high = statistics.fmean(best), statistics.fmean(last)
    if high - low <= _CHANCE * error_of_means(last, best):
        return []
    where = (
        f"metrics.jsonl: {_words(train[-1])} {low:.3f} at its best, {high:.3f} at step "
        f"{train[-1]['step']}"
    )
    return _RISEN.check(high - low, where, rise=high - low)


def _flat(experiment: Experiment, quarters: list[list[float]], train: list[Line]) -> list[Finding]:
    step = train[-1]["step"]
    if not quarters or step > _NEAR_THE_END * experiment.total_steps:
        return []
    before, last = quarters[-2:]
    high, low = statistics.fmean(before), statistics.fmean(last)
    if high - low > _CHANCE * error_of_means(before, last):
        return []
    words = _words(train[-1])
    where = f"metrics.jsonl: {words} {high:.3f}, then {low:.3f} up to step {step}"
    return [_FLAT.finding("note", where, lines=len(before) + len(last))]


def _unigram(experiment: Experiment, newest: list[Line], done: int) -> list[Finding]:
    if not newest:
        return []
    last, total = newest[0], experiment.total_steps
    loss, unigram = _nats(last), last["unigram_loss"]
    warmup = experiment.optimizer.warmup_steps
    late = last["step"] >= max(_LEAST_STEPS, _TAKEN_OFF * total, 2 * warmup)
    if unigram - loss > _BELOW or not (late or done >= total):
        return []
    return [
        _UNIGRAM.finding(
            "problem" if late else "note",
            f"metrics.jsonl: step {last['step']}: {loss:.3f}, unigram line {unigram:.3f}",
            what=_words(last),
            nats=abs(unigram - loss),
            side="below" if unigram >= loss else "above",
            few="" if late else f"; {done:,} steps are few for that",
        )
    ]


def _pairs(experiment: Experiment, train: list[Line], last: Line, done: int) -> list[Finding]:
    task = losses.learned(last, losses.PAIRS)
    if not task:
        return []
    accuracy, error, majority = (last[f"{task}_{x}"] for x in ("accuracy", "error", "majority"))
    if accuracy > majority + _CHANCE * error or last["step"] < _LEAST_STEPS:
        return []
    guessing = -sum(p * math.log(p) for p in (majority, 1 - majority) if p)
    lines = train[-max(len(train) // 4, 1) :]
    loss = statistics.fmean(line[f"{task}_loss"] for line in lines)
    late = done >= max(_LEAST_STEPS_NEXT_SENTENCE, _TAKEN_OFF * experiment.total_steps)
    where = (
        f"metrics.jsonl: step {last['step']}; in training the loss is {loss:.3f}, guessing "
        f"{guessing:.3f}"
    )
    never = late and loss > _GUESSING * guessing
    rule, severity = (_NEVER_LEARNED, "problem") if never else (_NOT_YET_LEARNED, "note")
    values = {"accuracy": accuracy, "error": error, "majority": majority}
    return [rule.finding(severity, where, what=losses.PAIRS[task], **values)]


def _overfitting(
    experiment: Experiment, train: list[Line], evaluations: list[Line]
) -> list[Finding]:
    last = evaluations[-1]
    where = f"metrics.jsonl: step {last['step']}"
    phase, first = experiment.phase_at(min(last["step"], experiment.total_steps) - 1)
    trained = max(p.sequence_length for p in experiment.phases[: phase + 1])
    length = experiment.data.eval_sequence_length
    if trained < length:
        return [_LONGER_THAN_TRAINED.finding("note", where, length=length, trained=trained)]
    lines = [line for line in train if first < line["step"] <= last["step"]]
    if not lines:
        return []
    loss = _nats(last)
    lines = lines[-max(len(lines) // 4, 1) :]
    gap = loss - statistics.fmean(map(_nats, lines))
    best = min(evaluations, key=_nats)
    worse = loss - _nats(best)
    overfitted = worse > _WORSE and gap > _GAP
    if not overfitted and gap <= _GAP_NOTE:
        return []
    return [
        _OVERFITTING.finding(
            "problem" if overfitted else "note",
            f"{where}: held-out {_words(last)} {loss:.3f}",
            gap=gap,
            since=f", and {worse:.2f} worse than at step {best['step']}" if overfitted else "",
        )
    ]


def _clipped(experiment: Experiment, train: list[Line]) -> list[Finding]:
    optimizer = experiment.optimizer
    lines = [line for line in train if line["step"] > optimizer.warmup_steps]
    # Per replica, the norm is that of sums of gradients already clipped.
    if optimizer.clip != "global" or len(lines) < _LINES:
        return []
    norms = [line["gradient_norm"] for line in lines]
    over = sum(norm > optimizer.clip_norm for norm in norms) / len(norms)
    if over < _CLIPPED_LINES:
        return []
    last = statistics.median(norms[-max(len(norms) // 4, 1) :])
    where = f"metrics.jsonl: {last:.2f} in the last of them"
    return _CLIPPED.check(last / optimizer.clip_norm, where, clip=optimizer.clip_norm, over=over)


# --- where time went that was no training ---

_IDLE = "{{value}} of the time went into {}"
# Waiting for data is time bought for nothing: a tenth is worth a setting, a third is a fault.
# Evaluation and checkpoints are bought on purpose: only a remark.
_WAITS = {
    "data": Rule(
        _IDLE.format("waiting for data"), 0.1, 0.3,
        "the devices stand idle",
        "raise run.data_workers",
    ),
    "evaluation": Rule(
        _IDLE.format("evaluating"), 0.3, math.inf,
        "no steps are done meanwhile",
        "raise run.eval_every, or lower data.eval_rows in a new run",
    ),
    "checkpoint": Rule(
        _IDLE.format("saving"), 0.2, math.inf,
        "no steps are done meanwhile",
        "raise run.checkpoint_every",
    ),
}  # fmt: skip
# After kills; stopping on request loses none.
_DONE_TWICE = Rule(
    "{steps:,} steps were done twice, after the run was killed",
    0.02, 0.2,
    "{more} more time; what is computed is the same",
    "a smaller run.checkpoint_every; SIGTERM and Ctrl-C save first, SIGKILL does not",
)  # fmt: skip


def _time(timings: list[Line]) -> list[Finding]:
    # A start's seconds are for preparing and opening, which is paid for once.
    timings = [line for line in timings if line.get("kind") not in ("start", "roll_back")]
    seconds = sum(line["seconds"] for line in timings)
    findings = []
    for name, rule in _WAITS.items() if seconds else ():
        waited = sum(line.get(f"{name}_seconds", 0.0) for line in timings)
        where = f"timings.jsonl: {waited:,.0f} of {seconds:,.0f} seconds"
        findings += rule.check(waited / seconds, where)
    return findings


def _done_twice(timings: list[Line]) -> list[Finding]:
    """Looks for steps done again after a kill: timings.jsonl keeps the lines of lost steps."""
    steps, before, first = 0, 0, ""
    for line in timings:
        if line.get("kind") == "start" and line["step"] < before:
            steps += before - line["step"]
            first = first or f"timings.jsonl: from step {before} back to {line['step']}"
        before = line["step"]
    value = steps / before if before else 0.0
    return _DONE_TWICE.check(value, first, steps=steps, more=share(value))
