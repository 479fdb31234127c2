"""Comparison of several runs: the axes of curves, checks of comparability, and a table of results.

Losses in nats are comparable only on the same held-out rows. If these differ, each run is shown
relative to its own unigram baseline.
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

# Unigram baselines of the same rows differ by less than this share, even with different seeds.
_BASELINE_TOLERANCE = 0.01

# A function from steps to the amount spent up to each step.
_Converter = Callable[[Sequence[float]], Sequence[float]]


# --- axes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A quantity over which learning curves are drawn."""

    name: str  # shown on a button, and under each picture
    # Returns the function from a run's steps to what was spent; None if that is not known.
    converter: Callable[[Record], _Converter | None]
    text: Callable[[float], str] = figures.format_short  # formats an amount


def _integral_of(amount: Callable[[Line], float]) -> Callable[[Record], _Converter | None]:
    """Returns an `Axis.converter`; `amount` reads the mean amount of a step from a window."""

    def converter(record: Record) -> _Converter | None:
        try:
            known, spent = times.cumulate(record.windows, amount, record.first_step)
        except KeyError:  # lines of an earlier version, and windows without steps, lack it
            return None
        return (lambda steps: np.interp(steps, known, spent).tolist()) if len(known) > 1 else None

    return converter


def _operations_converter(record: Record) -> _Converter | None:
    """Returns the converter to operations; None for a fine-tuning, whose rows differ in length."""
    experiment = record.experiment
    if not isinstance(experiment, Experiment):
        return None
    model, phases, at = experiment.model, experiment.phases, [0, *experiment.ends]
    spent = [0, *itertools.accumulate(p.steps * flops.phase_step_flops(model, p) for p in phases)]
    before_fork = np.interp(record.first_step, at, spent)
    return lambda steps: np.maximum(np.interp(steps, at, spent) - before_fork, 0).tolist()


_format_int = "{:,.0f}".format
AXES = (
    Axis("steps", lambda record: list, _format_int),  # steps themselves, as a list
    Axis("tokens", _integral_of(lambda x: x["real_tokens_per_second"] / x["steps_per_second"])),
    Axis("seconds", _integral_of(lambda x: 1 / x["steps_per_second"]), _format_int),
    Axis("CPU seconds", _integral_of(lambda x: x["cpu_seconds"] / max(x["steps"], 1)), _format_int),
    Axis("FLOPs", _operations_converter),
)


# --- comparability ------------------------------------------------------------------------------


def explain_losses(records: Sequence[Record]) -> str:
    """Explains why losses of these pre-trainings are not comparable; "" if they are."""
    pretrainings = [r.experiment for r in records if isinstance(r.experiment, Experiment)]
    newest = [record.evaluation[-1] for record in records if record.evaluation]
    baselines = [line["unigram_loss"] for line in newest if "unigram_loss" in line]
    difference = ", ".join(_differing(map(held_out_fields, pretrainings)))
    if not difference and baselines and max(baselines) > (1 + _BASELINE_TOLERANCE) * min(baselines):
        difference = "the text, whose unigram baselines differ"
    if not difference:
        return ""
    return (
        f"Held-out rows differ ({difference}), so losses in nat are not comparable. The distance "
        "of each run from its own unigram baseline and its token accuracy are roughly comparable."
    )


def explain_scores(records: Sequence[Record]) -> str:
    """Explains why scores of these fine-tunings are not comparable; "" if they are."""
    tasks = [r.experiment.task for r in records if isinstance(r.experiment, Finetuning)]
    names = ("kind", "label_column", "main_score")
    differing = _differing(
        {name: getattr(task, name) for name in names}
        | {"validation": [*map(source_name, task.validation)]}
        for task in tasks
    )
    # The setting of `main_score` is called `score`.
    fields = ", ".join(f"task.{name.removeprefix('main_')}" for name in differing)
    return f"Scores are not of the same task ({fields} differ)." if fields else ""


def masks_differ(records: Sequence[Record]) -> bool:
    """Returns whether pre-trainings mask their training text in different ways."""
    names = ("masked_lm_prob", "final_masked_lm_prob", "mask_share", "random_share", "masking")
    pretrainings = [r.experiment for r in records if isinstance(r.experiment, Experiment)]
    fields = ({name: getattr(e.data, name) for name in names} for e in pretrainings)
    phases = ({"phases": {phase.masked_lm_prob for phase in e.phases}} for e in pretrainings)
    return bool(_differing(fields) or _differing(phases))


def _differing(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    first, *others = [*runs] or [{}]
    return [name for name in first if any(other[name] != first[name] for other in others)]


# --- the table ----------------------------------------------------------------------------------


def table(records: Sequence[Record]) -> PageTable:
    """Returns a row with the newest results of each run."""
    newest = [evaluation_texts(r, r.evaluation[-1]) if r.evaluation else {} for r in records]
    columns = dict.fromkeys((name for texts in newest for name in texts), "")
    rows = [
        {"run": record.label} | columns | texts | _spent_texts(record)
        for record, texts in zip(records, newest, strict=True)
    ]
    return PageTable.of(rows)


def _spent_texts(record: Record) -> dict[str, str]:
    axes = [(axis, axis.converter(record)) for axis in AXES]
    return {a.name: a.text(convert([record.steps_done])[0]) for a, convert in axes if convert}


def evaluation_texts(record: Record, line: Line) -> dict[str, str]:
    """Returns {name: formatted value} of an evaluation."""
    if isinstance(record.experiment, Finetuning):
        _, guess = record.newest_prediction("task").get("guess") or (None, None)  # answer, score
        return {
            record.experiment.task.main_score: f"{line['score']:.4f}",
            **({} if guess is None else {"guessing": f"{guess:.4f}"}),
            "held-out loss": f"{line['loss']:.4f}",
            "examples": f"{line['examples']:,}",
        }
    token_task = losses.find_task(line, losses.TOKENS)
    pair_task = losses.find_task(line, losses.PAIRS)
    if not token_task:  # a custom objective
        names = [name for name in line if name not in ("step", "kind")]
        return {f"held-out {name.replace('_', ' ')}": f"{line[name]:,.4g}" for name in names}
    loss, accuracy = losses.token_metrics(line)
    texts = {
        f"{losses.TOKENS[token_task]}, nat": f"{loss:.3f}",
        "below unigrams": f"{line['unigram_loss'] - loss:.3f}",
        "token accuracy": percent(accuracy),
    }
    if pair_task:
        accuracy, error = line[f"{pair_task}_accuracy"], line[f"{pair_task}_error"]
        texts[losses.PAIRS[pair_task]] = f"{100 * accuracy:.1f} ± {100 * error:.1f} %"
        texts["majority"] = percent(line[f"{pair_task}_majority"])
    return texts
