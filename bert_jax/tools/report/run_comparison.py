"""Several runs on one page: what of them compares, and a table of where each has come to.

What cannot be compared is not drawn as if it could: losses in nats are of the same held-out pieces
alone, and where those differ each run is shown against its own unigram line.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.config import Experiment, Finetuning, source_name
from bert_jax.config.comparison import held_out_fields
from bert_jax.model import flops, losses
from bert_jax.tools.report import figures, times
from bert_jax.tools.report.render import PageTable, percent
from bert_jax.tools.report.run_record import Line, Record

# Unigram lines of the same text that differ by more are not of the same rows; other seeds' do less.
_SAME_LINE = 0.01

# From steps to what was spent up to each.
_Spent = Callable[[Sequence[float]], Sequence[float]]


# --- what curves run over -----------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A quantity that learning is drawn over."""

    name: str  # of a button, and under each picture
    # Gives what a run has spent up to its steps; None where that is not known.
    of: Callable[[Record], _Spent | None]
    text: Callable[[float], str] = figures.short  # an amount of it for people


def _measured(amount: Callable[[Line], float]) -> Callable[[Record], _Spent | None]:
    """Returns an `Axis.of` that adds up what a lap says of one of its steps."""

    def of(record: Record) -> _Spent | None:
        try:
            at, spent = times.totals(record.laps, amount, record.began)
        except KeyError:  # written by an earlier version, or by steps that were not counted
            return None
        return (lambda steps: np.interp(steps, at, spent).tolist()) if len(at) > 1 else None

    return of


def _operations(record: Record) -> _Spent | None:
    """Returns operations up to steps; of a fine-tuning, whose rows have all lengths, None."""
    experiment = record.experiment
    if not isinstance(experiment, Experiment):
        return None
    model, phases, at = experiment.model, experiment.phases, [0, *experiment.ends]
    spent = [0, *itertools.accumulate(p.steps * flops.phase_flops(model, p) for p in phases)]
    others = np.interp(record.began, at, spent)
    return lambda steps: np.maximum(np.interp(steps, at, spent) - others, 0).tolist()


_WHOLE = "{:,.0f}".format
AXES = (
    Axis("steps", lambda record: list, _WHOLE),
    Axis("tokens", _measured(lambda x: x["real_tokens_per_second"] / x["steps_per_second"])),
    Axis("seconds", _measured(lambda x: 1 / x["steps_per_second"]), _WHOLE),
    Axis("CPU seconds", _measured(lambda x: x["cpu_seconds"] / max(x["steps"], 1)), _WHOLE),
    Axis("FLOPs", _operations),
)


# --- what can be compared -----------------------------------------------------------------------


def no_nats(records: Sequence[Record]) -> str:
    """Returns why losses of these pre-trainings do not compare, in words; "" where they do."""
    trained = [r.experiment for r in records if isinstance(r.experiment, Experiment)]
    newest = [record.evaluation[-1] for record in records if record.evaluation]
    lines = [line["unigram_loss"] for line in newest if "unigram_loss" in line]
    why = ", ".join(_differing(map(held_out_fields, trained)))
    if not why and lines and max(lines) > (1 + _SAME_LINE) * min(lines):
        why = "the text, whose unigram lines are not the same"
    if not why:
        return ""
    return (
        f"Held-out rows differ ({why}), so that losses in nat do not compare: how far each run is "
        "below its own unigram line does roughly, and so does the share of pieces that is right."
    )


def no_scores(records: Sequence[Record]) -> str:
    """Returns why scores of these fine-tunings do not compare, in words; "" where they do."""
    tasks = [r.experiment.task for r in records if isinstance(r.experiment, Finetuning)]
    names = ("kind", "label_column", "main_score")
    differing = _differing(
        {name: getattr(task, name) for name in names}
        | {"validation": [*map(source_name, task.validation)]}
        for task in tasks
    )
    why = ", ".join(f"task.{name.removeprefix('main_')}" for name in differing)
    return f"Scores are not of the same task ({why} differ)." if why else ""


def other_masks(records: Sequence[Record]) -> bool:
    """Tells whether pre-trainings mask their training text in several ways."""
    names = ("masked_lm_prob", "final_masked_lm_prob", "mask_share", "random_share", "masking")
    trained = [r.experiment for r in records if isinstance(r.experiment, Experiment)]
    of_data = ({name: getattr(e.data, name) for name in names} for e in trained)
    of_phases = ({"phases": {phase.masked_lm_prob for phase in e.phases}} for e in trained)
    return bool(_differing(of_data) or _differing(of_phases))


def _differing(of_runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the names of what is not the same in all runs."""
    first, *others = [*of_runs] or [{}]
    return [name for name in first if any(other[name] != first[name] for other in others)]


# --- the table ----------------------------------------------------------------------------------


def table(records: Sequence[Record]) -> PageTable:
    """Returns the newest figures of each run; columns that no run has are left out."""
    newest = [evaluation_texts(r, r.evaluation[-1]) if r.evaluation else {} for r in records]
    columns = dict.fromkeys((name for texts in newest for name in texts), "")
    rows = [
        {"run": record.label} | columns | texts | _spent_by(record)
        for record, texts in zip(records, newest, strict=True)
    ]
    return PageTable.of(rows)


def _spent_by(record: Record) -> dict[str, str]:
    known = {axis: axis.of(record) for axis in AXES}
    return {axis.name: axis.text(of([record.steps_done])[0]) for axis, of in known.items() if of}


def evaluation_texts(record: Record, line: Line) -> dict[str, str]:
    """Returns what an evaluation shows, by names for people."""
    if isinstance(record.experiment, Finetuning):
        guess = record.newest_line("task").get("guess")
        return {
            record.experiment.task.main_score: f"{line['score']:.4f}",
            **({"guessing": f"{guess[1]:.4f}"} if guess else {}),
            "held-out loss": f"{line['loss']:.4f}",
            "examples": f"{line['examples']:,}",
        }
    pieces, pairs = losses.find_task(line, losses.TOKENS), losses.find_task(line, losses.PAIRS)
    if not pieces:  # of an objective of the experiment's own
        names = [name for name in line if name not in ("step", "kind")]
        return {f"held-out {name.replace('_', ' ')}": f"{line[name]:,.4g}" for name in names}
    nats, right = losses.token_metrics(line)
    texts = {
        f"{losses.TOKENS[pieces]}, nat": f"{nats:.3f}",
        "below unigrams": f"{line['unigram_loss'] - nats:.3f}",
        "pieces right": percent(right),
    }
    if pairs:
        accuracy, error = line[f"{pairs}_accuracy"], line[f"{pairs}_error"]
        texts[losses.PAIRS[pairs]] = f"{100 * accuracy:.1f} ± {100 * error:.1f} %"
        texts["majority"] = percent(line[f"{pairs}_majority"])
    return texts
