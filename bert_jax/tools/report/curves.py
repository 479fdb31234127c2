"""The plots of a report: learning curves of runs, and measurements of their steps.

Plots leave out what is not comparable between runs; see `run_comparison`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from bert_jax.config import Experiment, Finetuning
from bert_jax.model import losses
from bert_jax.tools.report import figures, run_comparison
from bert_jax.tools.report.figures import Curve, Figure, Plot
from bert_jax.tools.report.run_comparison import AXES, Axis
from bert_jax.tools.report.run_record import Line, Record

# The loss of guessing between two equally common labels.
_COIN = [(math.log(2), "ln 2")]
_GUESSING = (
    "At ln 2 = 0.693, dashed, the model gives both answers equal probability. Its loss stays there "
    "until it learns the task, late in the training."
)
_BEYOND = "Below the dashed line the model knows more than how often each token occurs."
_ON_PAIRS = (
    "Bars are one standard error, if held-out pairs are independent. Dashed: the accuracy of "
    "always giving the commoner label."
)
_OTHER_ROWS = "Held-out rows differ, so losses in nat are not comparable: see above."
_OVERCONFIDENT = "A held-out loss that rises while scores stay high shows an overconfident model."
_PROBED = "The score of a linear layer on the frozen encoder. Dashed: the majority baseline."
_UTILISATION = (
    "The rate of useful matrix operations, as a share of the devices' peak rate; on a CPU, as a "
    "share of the rate of a large matrix product at the start of the run. If other work slows down "
    "that product, the shares are too high, even over 100 %."
)
# Fields of a line of scores that are no metrics; `score` repeats the main metric.
_NOT_SCORES = ("step", "kind", "loss", "score", "examples", "no_answer_threshold")
_LAYERS = (
    "Score of a linear layer on each layer, minus the score of guessing, as a share of this "
    "difference for the best layer; layer 0 is the embeddings."
)


def learning_plots(records: Sequence[Record], axis: Axis = AXES[0]) -> list[Plot]:
    """Returns learning curves of runs over an axis that all of them have; some plots may be empty.

    Lines show training, points held-out evaluations; each of several runs has its own colour.
    """
    # Runs with the same label have the same colour.
    colours = {label: i for i, label in enumerate(dict.fromkeys(r.label for r in records))}
    rows_differ = bool(run_comparison.explain_losses(records))
    compares_training = not rows_differ and not run_comparison.masks_differ(records)
    runs = [(record, _held_out(record), axis.converter(record)) for record in records]

    def plot(
        title: str, name: str, note: str = "", bars: str = "", kind: type = Experiment, **more: Any
    ) -> Plot:
        curves, labelled = [], set[str]()
        for record, evaluations, convert in runs:
            if not isinstance(record.experiment, kind):
                continue
            train = record.train if compares_training or kind is Finetuning else []
            parts = ((train, "training", "line", ""), (evaluations, "held-out", "points", bars))
            for colour, (lines, label, style, part_bars) in enumerate(parts):
                if len(records) > 1:
                    label, colour = record.label, colours[record.label]
                    style = style if colour < len(figures.COLOURS) else "dashes"
                one = curve(lines, name, label, colour, style, part_bars)
                if len(one.x):
                    assert convert is not None  # all runs have the axis
                    legend = "" if label in labelled else label
                    curves.append(dataclasses.replace(one, x=convert(one.x), label=legend))
                    labelled.add(label)
        return Plot(title, curves, x_label=axis.name, note=note, **more)

    newest: Line = {}  # fields of the newest evaluations of all pre-trainings
    for record in records:
        if record.evaluation and isinstance(record.experiment, Experiment):
            newest |= record.evaluation[-1]
    plots = []
    if rows_differ:
        plots.append(plot("Nats below its own unigram baseline", "below_unigrams", _OTHER_ROWS))
        plots.append(plot("Token accuracy", "token_accuracy", scale="percent"))
    # Titles by objective, of those over pairs and of those over tokens.
    for task, name in (losses.PAIRS if rows_differ else losses.TOKENS | losses.PAIRS).items():
        is_pair, title = task in losses.PAIRS, name[0].upper() + name[1:]
        title = title.replace(" ", "-") if is_pair else title
        loss, accuracy = f"{task}_loss", f"{task}_accuracy"
        # An earlier phase may learn another task, which is not evaluated and has no baseline.
        is_scored = loss in newest
        unigrams = _level(newest, "unigram_loss", "unigrams") if is_scored else []
        levels, note = (_COIN, _GUESSING) if is_pair else (unigrams, _BEYOND if is_scored else "")
        plots.append(plot(f"{title} loss, nat", loss, note, levels=levels))
        levels, note = _level(newest, f"{task}_majority", "majority"), _ON_PAIRS if is_pair else ""
        bars = f"{task}_error" if is_pair else ""
        title = f"{title} accuracy"
        plots.append(plot(title, accuracy, note, bars, levels=levels, scale="percent"))
    plots += [plot(name.replace("_", " "), name) for name in _custom_metrics(newest)]
    return plots + _finetuning_plots(records, plot) + _probe_plots(records, plot)


def _finetuning_plots(records: Sequence[Record], plot: Callable[..., Plot]) -> list[Plot]:
    tuned = [record for record in records if isinstance(record.experiment, Finetuning)]
    tasks = [r.experiment.task for r in records if isinstance(r.experiment, Finetuning)]
    main = ", ".join(dict.fromkeys(task.main_score for task in tasks))
    # Retrieval has up to three baselines: BM25, the model before training, and mean vectors.
    kinds = ("task", "untrained", "mean_vectors")
    lines = [run.newest_prediction(kind) for run in tuned[:1] for kind in kinds]
    guesses = [line["guess"] for line in lines if line.get("guess")]
    baselines = ("BM25", "before training", "mean vectors")
    levels = [(score, name if name in baselines else "guessing") for name, score in guesses]
    note = run_comparison.explain_scores(records)
    if levels and levels[0][1] == "guessing" and not note:
        note = "Dashed: the best score of an answer that ignores the text."
    plots = [
        plot(f"Validation score: {main}", "score", note, kind=Finetuning, levels=levels),
        plot("Loss", "loss", _OVERCONFIDENT, kind=Finetuning),
    ]
    names = [name for record in tuned[:1] for name in score_names(record)]
    # `score` is drawn above. Accuracy is drawn again: training lines have it, but no `score`.
    if names[:1] != ["accuracy"]:
        names = names[1:]
    for name in names:
        scale, title = "percent" if name == "accuracy" else "linear", name.replace("_", " ")
        plots.append(plot(title.capitalize(), name, kind=Finetuning, scale=scale))
    return plots


def _probe_plots(records: Sequence[Record], plot: Callable[..., Plot]) -> list[Plot]:
    """Returns the plots of probes, made by `plot`; for a single run also those of its layers."""
    newest = [record.probes[-1] for record in records if record.probes]
    plots = []
    for name in dict.fromkeys(name for line in newest for name in line["scores"]):
        levels = [(x["majority"][name], "majority") for x in newest[:1] if name in x["majority"]]
        plots.append(plot(f"Probe {name}", f"probe {name}", _PROBED, levels=levels))
    if len(records) == 1:
        plots += _minimal_pairs(records[0])
        plots.append(layer_plot(records[0].layers))
    return plots


def score_names(record: Record) -> list[str]:
    """Returns the names of a fine-tuning's scores, the main one first."""
    assert isinstance(record.experiment, Finetuning)
    newest, main = (record.evaluation or [{}])[-1], record.experiment.task.main_score
    return sorted((name for name in newest if name not in _NOT_SCORES), key=lambda n: n != main)


def _held_out(record: Record) -> list[Line]:
    """Returns lines of evaluations and probes; adds metrics comparable between different rows."""
    probes = [
        {"step": line["step"]} | {f"probe {name}": x for name, x in line["scores"].items()}
        for line in record.probes
    ]
    lines = []
    for line in record.evaluation:
        comparable = {}
        if losses.find_task(line, losses.TOKENS):
            loss, accuracy = losses.token_metrics(line)
            comparable = {"below_unigrams": line["unigram_loss"] - loss, "token_accuracy": accuracy}
        lines.append(line | comparable)
    return lines + probes


def _custom_metrics(line: Line) -> list[str]:
    known = ("step", "kind", "unigram_loss", "perplexity", "rows")
    names = [name for name in line if name not in known and not losses.is_known(name)]
    return names if len(names) > 1 else []  # each evaluation has `loss`


def _minimal_pairs(record: Record) -> list[Plot]:
    """Returns a plot for each task of minimal pairs: accuracy on all, and by linguistic field."""
    lines = [line for line in record.probes if "minimal_pairs" in line]
    tasks = dict.fromkeys(task for line in lines for task in line["minimal_pairs"])
    plots = []
    for task in tasks:
        scored = [line for line in lines if task in line["minimal_pairs"]]
        scores = [{"step": x["step"]} | x["minimal_pairs"][task] for x in scored]
        fields = dict.fromkeys(name for score in scores for name in score["fields"])
        curves = [curve(scores, "accuracy", "all" if fields else "", 0, "points", "error")]
        for colour, name in enumerate(fields, 1):
            by_field = [{"step": s["step"]} | s["fields"].get(name, {}) for s in scores]
            curves.append(curve(by_field, "accuracy", name, colour, "points", "error"))
        note = "Share of pairs whose acceptable text is the likelier one; bars are standard errors."
        title, chance = f"Minimal pairs {task}", [(0.5, "chance")]
        plots.append(Plot(title, curves, chance, "percent", note=note))
    return plots


def layer_plot(layer_scores: dict[str, Any]) -> Plot:
    """Returns a plot of the result of `tools.layer_scores.score_layers`; both may be empty."""
    curves = []
    for number, task in enumerate(layer_scores.get("tasks", ())):
        scores, guess = task["scores"], task["guess"]
        best = max(*scores, guess) - guess
        shares = [(score - guess) / best if best else 0.0 for score in scores]
        curves.append(Curve(range(len(shares)), shares, task["name"], number, "points"))
    title = "What each layer knows"
    return Plot(title, curves, scale="percent", x_label="layer", note=_LAYERS)


def step_plots(*records: Record) -> list[Plot]:
    """Returns plots of learning rate, gradient norm and speed.

    For a single run the speed is drawn with and without padding.
    """
    single, optimizer = len(records) == 1, records[0].experiment.optimizer
    clips = [(optimizer.clip_norm, "clip")] if single and optimizer.clip == "global" else []

    def make_curves(kind: Literal["train", "windows"], name: str, other: str = "") -> list[Curve]:
        if not single:
            return [curve(getattr(r, kind), name, r.label, i) for i, r in enumerate(records)]
        labels = {name: "without padding", other: "with padding"} if other else {name: ""}
        lines = getattr(records[0], kind)
        return [curve(lines, key, label, i) for i, (key, label) in enumerate(labels.items())]

    tokens = make_curves("windows", "real_tokens_per_second", "tokens_per_second")
    utilisation = make_curves("windows", "real_utilisation", "utilisation")
    norms, note = make_curves("train", "gradient_norm"), "Mean norm of the steps, before clipping."
    return [
        Plot("Learning rate", make_curves("train", "learning_rate")),
        Plot("Gradient norm", norms, clips, scale="log", note=note),
        Plot("Tokens per second", tokens, note="Over training steps and their waits for data."),
        Plot("Utilisation", utilisation, scale="percent", note=_UTILISATION),
    ]


def corpus_figures(statistics: dict[str, Any]) -> list[Figure]:
    """Returns histograms of the lengths of a corpus's sentences and documents."""
    pictures = []
    for unit in ("sentence", "document"):
        lengths = statistics[f"{unit}_lengths"]
        median, longest = np.median(lengths), lengths.max()
        note = f"Half have at most {median:,.0f} tokens; the longest has {longest:,}."
        svg = figures.draw_histogram(lengths, "tokens", f"lengths-{unit}")
        pictures.append(Figure(f"{unit.capitalize()} length", note, svg))
    return pictures


def curve(
    lines: Sequence[Line],
    name: str,
    label: str,
    colour: int = 0,
    style: str = "line",
    bars: str = "",
) -> Curve:
    """Returns the curve of the field `name`, from lines that have it; `bars` is that of errors."""
    lines = [line for line in lines if name in line]
    steps, errors = [line["step"] for line in lines], [line[bars] for line in lines if bars]
    return Curve(steps, [line[name] for line in lines], label, colour, style, errors)


def _level(line: Line, name: str, label: str) -> list[tuple[float, str]]:
    return [(line[name], label)] if name in line else []
