"""A run: its losses and gradients, its time, and the corpus it was trained on."""

import math
from typing import Any

from bert_jax.config import Experiment
from bert_jax.doctor import corpus, curves
from bert_jax.doctor.finding import Finding, severity, share
from bert_jax.storage import mirror
from bert_jax.storage.workdir import COMPLETE, Workdir, load_experiment
from bert_jax.training import divergence
from bert_jax.training import lines as lines_lib
from bert_jax.training.checkpoint import Checkpoints

# Waiting for data is time bought for nothing. A tenth is worth a setting, a third is a fault.
_DATA, _DATA_NOTE = 0.3, 0.1
# Evaluation and checkpoints are bought on purpose: only a remark.
_EVALUATION_NOTE, _CHECKPOINT_NOTE = 0.3, 0.2
# Steps done twice, after kills; stopping on request loses none.
_REPEATED, _REPEATED_NOTE = 0.2, 0.02
# A bad batch happens; one step in a hundred is the run on its way out.
_SKIPPED = 0.01
# As in doctor.corpus; measured, where the corpus is not here to be planned.
_PADDING, _PADDING_NOTE = 0.5, 0.25
# The paper warms up for 1% of its steps. With half, the peak is hardly used.
_WARMUP = 0.5


def examine(workdir: Workdir) -> list[Finding]:
    """Findings on a run and, where it is at hand, on its corpus.

    Raises:
      InputError: no run here, or damaged files.
    """
    experiment = load_experiment(workdir)
    workdir = Workdir(workdir.root, experiment.run.corpus_dir, workdir.remote)
    found = _damaged_lines(experiment, workdir) + examine_lines(experiment, workdir)
    if mirror.exists(workdir.corpus / COMPLETE):
        lengths = tuple(sorted({phase.sequence_length for phase in experiment.phases}))
        return found + corpus.examine(workdir.corpus, lengths)
    padding = _padding(_of_kind(lines_lib.Lines(workdir.metrics).read(), "train"))
    return found + ([padding] if padding else [])


def _damaged_lines(experiment: Experiment, workdir: Workdir) -> list[Finding]:
    """On lines that are not those that the newest checkpoint was saved with."""
    if not mirror.names(workdir.checkpoints):
        return []
    with Checkpoints(workdir.checkpoints, experiment.run, "read") as saved:
        newest = saved.newest_step()
        metadata = {} if newest is None else saved.metadata(newest)
    found = []
    for name, written in metadata.get("lines", {}).items():
        damage = lines_lib.Lines(workdir.root / name).damage(metadata["step"], written)
        if damage:
            found.append(
                Finding(
                    "problem",
                    f"{name}: {damage}",
                    f"{name}: the checkpoint of step {newest} says what was written",
                    "the run is refused when it is to go on, and curves have a hole",
                    "put the whole file back, or remove it to go on without its lines",
                )
            )
    return found


def examine_lines(experiment: Experiment, workdir: Workdir) -> list[Finding]:
    """Findings on what a run has written down, without its corpus.

    Raises:
      InputError: a damaged file.
    """
    lines = lines_lib.Lines(workdir.metrics).read()
    timings = lines_lib.Lines(workdir.timings).read()
    train, evaluations = _of_kind(lines, "train"), _of_kind(lines, "evaluation")
    done = _done(workdir, train)
    found = [_unfinished(experiment, workdir, timings, done), _warmup(experiment, done)]
    found += curves.findings(experiment, train, evaluations, done)
    found += [_skipped(train), _rolled_back(timings), _jumps(train)]
    found += [*_time(timings), _repeated(timings)]
    return [finding for finding in found if finding]


def _of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("kind") == kind]


def _done(workdir: Workdir, train: list[dict[str, Any]]) -> int:
    """Steps done, by the newest checkpoint or the last line."""
    steps = [line["step"] for line in train[-1:]]
    steps += [int(name) for name in mirror.names(workdir.checkpoints) if name.isdecimal()]
    return max(steps, default=0)


def _unfinished(
    experiment: Experiment, workdir: Workdir, timings: list[dict[str, Any]], done: int
) -> Finding | None:
    if done >= experiment.total_steps or mirror.is_going_on(workdir):
        return None
    ends = [line["outcome"] for line in timings[-1:] if line.get("kind") == "end"]
    return Finding(
        "note",
        f"the run {'has ' + ends[0] if ends else 'was killed'} at step {done:,} of "
        f"{experiment.total_steps:,}",
        "",
        "the last part of the schedule, at low rates, brings much of what a run gains",
        "run the same command again; it goes on from the newest checkpoint",
    )


def _warmup(experiment: Experiment, done: int) -> Finding | None:
    warmup, total = experiment.optimizer.warmup_steps, experiment.total_steps
    if warmup > _WARMUP * total:
        return Finding(
            "problem",
            f"the learning rate warms up for {warmup:,} of {total:,} steps",
            "",
            "the peak rate is reached when the run is nearly over: little is learned",
            "a smaller optimizer.warmup_steps: a hundredth to a tenth of all steps",
        )
    if 0 < done < warmup:
        return Finding(
            "note",
            f"the learning rate is still warming up: step {done:,} of {warmup:,}",
            "",
            "losses of this part say little of the rest",
            "wait; or, if the run is meant to be short, a smaller optimizer.warmup_steps",
        )
    return None


def _skipped(train: list[dict[str, Any]]) -> Finding | None:
    steps = [line["step"] for line in train]
    spans = [b - a for a, b in zip([0, *steps], steps, strict=False)]
    bad = [round(line.get("bad_steps", 0.0) * n) for line, n in zip(train, spans, strict=True)]
    if not sum(bad):
        return None
    first = next(number for number, count in enumerate(bad) if count)
    return Finding(
        severity(max(sum(bad) / steps[-1], bad[-1] / max(spans[-1], 1)), _SKIPPED),
        f"{sum(bad):,} of {steps[-1]:,} steps were skipped: loss or gradient not finite",
        f"metrics.jsonl: {bad[first]} of the {spans[first]} steps up to {steps[first]}",
        "their text taught nothing; many in a row are a run that has run away",
        "a lower optimizer.peak_learning_rate or a longer optimizer.warmup_steps",
    )


def _rolled_back(timings: list[dict[str, Any]]) -> Finding | None:
    back = [line for line in timings if line.get("kind") == "roll_back"]
    if not back:
        return None
    first, last = back[0]["bad"]
    # One that a kill undid comes again.
    times = len({tuple(line["bad"]) for line in back})
    return Finding(
        "note",
        f"roll-backs over steps without a finite loss or gradient: {times}; steps left out: "
        f"{len(back[-1]['skipped'])}",
        f"timings.jsonl: steps {first} to {last}",
        "the update before them may have broken the parameters, or the hardware failed",
        f"`bert-jax show --step {max(first - 1, 0)}` shows its text; more than once: a lower "
        "optimizer.peak_learning_rate",
    )


def _jumps(train: list[dict[str, Any]]) -> Finding | None:
    spikes = divergence.Spikes()
    found = [spike for spike in map(spikes.of_line, train) if spike]
    if not found:
        return None
    step, loss, usual = found[0]
    return Finding(
        "note",
        f"jumps in the loss of single steps: {len(found)}",
        f"metrics.jsonl: {loss:.3f} at step {step}, usually below {usual:.3f}",
        "one batch unlike all others, or a rate too high for this part of the run",
        f"`bert-jax show --step {step}` shows its text",
    )


def _time(timings: list[dict[str, Any]]) -> list[Finding]:
    """Where time went that was no training."""
    # A start's seconds are for preparing and opening, which is paid for once.
    timings = [line for line in timings if line.get("kind") not in ("start", "roll_back")]
    seconds = sum(line["seconds"] for line in timings)
    if not seconds:
        return []
    kinds = (
        ("data", _DATA, _DATA_NOTE, "waiting for data", "raise run.data_workers"),
        ("evaluation", math.inf, _EVALUATION_NOTE, "evaluating", "raise run.eval_every, or lower "
         "data.eval_rows in a new run"),
        ("checkpoint", math.inf, _CHECKPOINT_NOTE, "saving", "raise run.checkpoint_every"),
    )  # fmt: skip
    found = []
    for name, problem_over, note_over, words, remedy in kinds:
        value = sum(line.get(f"{name}_seconds", 0.0) for line in timings) / seconds
        if value > note_over:
            found.append(
                Finding(
                    severity(value, problem_over),
                    f"{share(value)} of the time went into {words}",
                    f"timings.jsonl: {value * seconds:,.0f} of {seconds:,.0f} seconds",
                    "the devices stand idle" if name == "data" else "no steps are done meanwhile",
                    remedy,
                )
            )
    return found


def _repeated(timings: list[dict[str, Any]]) -> Finding | None:
    """On steps done again after a kill: timings.jsonl keeps the lines of lost steps."""
    repeated, before, first = 0, 0, ""
    for line in timings:
        if line.get("kind") == "start" and line["step"] < before:
            repeated += before - line["step"]
            first = first or f"timings.jsonl: from step {before} back to {line['step']}"
        before = line["step"]
    value = repeated / before if before else 0.0
    if value <= _REPEATED_NOTE:
        return None
    return Finding(
        severity(value, _REPEATED),
        f"{repeated:,} steps were done twice, after the run was killed",
        first,
        f"{share(value)} more time; what is computed is the same",
        "a smaller run.checkpoint_every; SIGTERM and Ctrl-C save first, SIGKILL does not",
    )


def _padding(train: list[dict[str, Any]]) -> Finding | None:
    filled = [line["filled"] for line in train[-10:] if "filled" in line]
    if not filled:
        return None
    value = 1 - sum(filled) / len(filled)
    if value <= _PADDING_NOTE:
        return None
    return Finding(
        severity(value, _PADDING),
        f"{share(value)} of examples is padding in the last {len(filled)} lines",
        "",
        "time and memory are spent on positions that hold nothing",
        "a shorter phases.N.sequence_length, or longer documents",
    )
