"""Which curves a report draws: what runs have learned, and how their steps went.

What cannot be compared is not drawn as if it could; see `run_comparison`.
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
    "At ln 2 = 0.693, dashed, a model says no more than that both answers are as likely; it stays "
    "there until it has learned what follows, which is late."
)
_BEYOND = "Below the dashed line the model knows more than how often each piece occurs."
_PAIRS = (
    "Bars are one standard error if held-out pairs were independent; dashed, always saying the "
    "commoner label."
)
_OTHER_ROWS = "Held-out rows differ, so that losses in nat do not compare: see above."
_TOO_SURE = "A held-out loss that rises while scores do not fall is a model too sure of itself."
_READ_OFF = "What a linear layer reads off the encoder as it is; dashed, without it."
_USEFUL = (
    "Useful matrix operations, of what the devices can do; on a CPU, of a large product timed as "
    "the run began. Other work on the machine slows that: then the shares are too high, over 100 % "
    "even."
)
# What stands in a line of scores and is none.
_NO_SCORES = ("step", "kind", "loss", "score", "examples", "no_answer_threshold")
_LAYERS = (
    "Of what a linear layer reads off the best layer, beyond a guess, the share that it reads off "
    "each; 0 is the embeddings."
)


def learning_plots(records: Sequence[Record], axis: Axis = AXES[0]) -> list[Plot]:
    """Returns what runs have learned, over an axis that all of them have; some plots may be empty.

    Lines are of training, points of what is held out; of several runs each has a colour.
    """
    # Runs of one label are of one colour.
    colours = {label: i for i, label in enumerate(dict.fromkeys(r.label for r in records))}
    why = run_comparison.no_nats(records)
    trains = not why and not run_comparison.other_masks(records)
    held_out, spent = map(_held_out, records), [axis.of(record) for record in records]
    read = [*zip(records, held_out, spent, strict=True)]

    def plot(
        title: str, name: str, note: str = "", error: str = "", of: type = Experiment, **look: Any
    ) -> Plot:
        curves, named = [], set[str]()
        for record, scored, x in read:
            train = record.train if trains or of is Finetuning else []
            for number, (label, lines) in enumerate((("training", train), ("held-out", scored))):
                colour, style = number, ("line", "points")[number]
                if len(records) > 1:
                    label, colour = record.label, colours[record.label]
                    style = style if colour < len(figures.COLOURS) else "dashes"
                one = curve(lines, name, label, colour, style, error if number else "")
                if len(one.x) and isinstance(record.experiment, of):
                    assert x is not None  # all runs have the axis
                    shown = "" if label in named else label
                    curves.append(dataclasses.replace(one, x=x(one.x), label=shown))
                    named.add(label)
        return Plot(title, curves, x_label=axis.name, note=note, **look)

    newest: Line = {}
    for record in records:
        if record.evaluation and isinstance(record.experiment, Experiment):
            newest |= record.evaluation[-1]
    plots = []
    if why:
        plots.append(plot("Nats below its own unigram line", "below", _OTHER_ROWS))
        plots.append(plot("Piece accuracy", "right", scale="percent"))
    for task, words in (losses.PAIRS if why else losses.TOKENS | losses.PAIRS).items():
        is_pair, title = task in losses.PAIRS, words[0].upper() + words[1:]
        title = title.replace(" ", "-") if is_pair else title
        loss, accuracy = f"{task}_loss", f"{task}_accuracy"
        # Phases before the last may learn something else than held-out rows are scored by.
        is_scored = loss in newest
        unigrams = _level(newest, "unigram_loss", "unigrams") if is_scored else []
        levels, note = (_COIN, _GUESSING) if is_pair else (unigrams, _BEYOND if is_scored else "")
        plots.append(plot(f"{title} loss, nat", loss, note, levels=levels))
        levels, note = _level(newest, f"{task}_majority", "majority"), _PAIRS if is_pair else ""
        error = f"{task}_error" if is_pair else ""
        title = f"{title} accuracy"
        plots.append(plot(title, accuracy, note, error, levels=levels, scale="percent"))
    plots += [plot(name.replace("_", " "), name) for name in _own(newest)]
    return plots + _finetuning_plots(records, plot) + _probe_plots(records, plot)


def _finetuning_plots(records: Sequence[Record], plot: Callable[..., Plot]) -> list[Plot]:
    """Returns the plots of fine-tunings, which `plot` draws."""
    tuned = [record for record in records if isinstance(record.experiment, Finetuning)]
    tasks = [r.experiment.task for r in records if isinstance(r.experiment, Finetuning)]
    main = ", ".join(dict.fromkeys(task.main_score for task in tasks))
    guesses = [record.newest_line("task").get("guess") for record in tuned]
    levels = [(guess[1], "guessing") for guess in guesses[:1] if guess]
    note = run_comparison.no_scores(records)
    if levels and not note:
        note = "Dashed, the score of the best answer that reads no text."
    plots = [
        plot(f"Validation score: {main}", "score", note, of=Finetuning, levels=levels),
        plot("Loss", "loss", _TOO_SURE, of=Finetuning),
    ]
    names = [name for record in tuned[:1] for name in score_names(record)]
    if names[:1] != ["accuracy"]:  # which is known of training, too; others are drawn above
        names = names[1:]
    for name in names:
        scale, title = "percent" if name == "accuracy" else "linear", name.replace("_", " ")
        plots.append(plot(title.capitalize(), name, of=Finetuning, scale=scale))
    return plots


def _probe_plots(records: Sequence[Record], plot: Callable[..., Plot]) -> list[Plot]:
    """Returns the plots of probes, which `plot` draws, and of a run alone those of its layers."""
    newest = [record.probes[-1] for record in records if record.probes]
    plots = []
    for name in dict.fromkeys(name for line in newest for name in line["scores"]):
        levels = [(x["majority"][name], "commonest") for x in newest[:1] if name in x["majority"]]
        plots.append(plot(f"Probe {name}", f"probe {name}", _READ_OFF, levels=levels))
    if len(records) == 1:
        plots += _minimal_pairs(records[0])
        plots.append(layer_plot(records[0].layers))
    return plots


def score_names(record: Record) -> list[str]:
    """Returns the names of a fine-tuning's scores, the main one first."""
    assert isinstance(record.experiment, Finetuning)
    newest, main = (record.evaluation or [{}])[-1], record.experiment.task.main_score
    return sorted((name for name in newest if name not in _NO_SCORES), key=lambda n: n != main)


def _held_out(record: Record) -> list[Line]:
    """Returns lines of evaluations, with what compares on other held-out rows, and of probes."""
    probes = [
        {"step": line["step"]} | {f"probe {name}": x for name, x in line["scores"].items()}
        for line in record.probes
    ]
    lines = []
    for line in record.evaluation:
        more = {}
        if losses.find_task(line, losses.TOKENS):
            nats, right = losses.token_metrics(line)
            more = {"below": line["unigram_loss"] - nats, "right": right}
        lines.append(line | more)
    return lines + probes


def _own(line: Line) -> list[str]:
    """Returns what of an evaluation an objective of the experiment's own has brought."""
    known = ("step", "kind", "unigram_loss", "perplexity", "rows")
    names = [name for name in line if name not in known and not losses.is_known(name)]
    return names if len(names) > 1 else []  # the loss alone is that of the others


def _minimal_pairs(record: Record) -> list[Plot]:
    """Returns a plot for each task of minimal pairs: all of them, and its fields."""
    lines = [line for line in record.probes if "minimal_pairs" in line]
    tasks = dict.fromkeys(task for line in lines for task in line["minimal_pairs"])
    plots = []
    for task in tasks:
        there = [line for line in lines if task in line["minimal_pairs"]]
        answers = [{"step": x["step"]} | x["minimal_pairs"][task] for x in there]
        fields = dict.fromkeys(name for answer in answers for name in answer["fields"])
        curves = [curve(answers, "accuracy", "all" if fields else "", 0, "points", "error")]
        for colour, name in enumerate(fields, 1):
            ours = [{"step": a["step"]} | a["fields"].get(name, {}) for a in answers]
            curves.append(curve(ours, "accuracy", name, colour, "points", "error"))
        note = "How often the acceptable text is the likelier one; bars are errors."
        title, chance = f"Minimal pairs {task}", [(0.5, "chance")]
        plots.append(Plot(title, curves, chance, "percent", note=note))
    return plots


def layer_plot(record: dict[str, Any]) -> Plot:
    """Returns a plot of what layers know; see `tasks.layers.score_layers`."""
    curves = []
    for number, task in enumerate(record.get("tasks", ())):
        scores, guess = task["scores"], task["guess"]
        most = max(*scores, guess) - guess
        shares = [(score - guess) / most if most else 0.0 for score in scores]
        curves.append(Curve(range(len(shares)), shares, task["name"], number, "points"))
    title = "What each layer knows"
    return Plot(title, curves, scale="percent", x_label="layer", note=_LAYERS)


def step_plots(*records: Record) -> list[Plot]:
    """Returns plots of how steps went: of what is learned nothing.

    A run by itself shows how much of it is padding, too.
    """
    alone, clip = len(records) == 1, records[0].experiment.optimizer
    clipped = [(clip.clip_norm, "clip")] if alone and clip.clip == "global" else []

    def make_curves(lines: Literal["train", "laps"], name: str, padded: str = "") -> list[Curve]:
        names = {name: "without padding", padded: "with padding"} if padded else {name: ""}
        return [
            curve(getattr(record, lines), one, label if alone else record.label, i + j)
            for i, record in enumerate(records)
            for j, (one, label) in enumerate(names.items() if alone else [(name, "")])
        ]

    tokens = make_curves("laps", "real_tokens_per_second", "tokens_per_second")
    used = make_curves("laps", "real_utilisation", "utilisation")
    norms, before = (
        make_curves("train", "gradient_norm"),
        "Mean of the steps' norms before the clip.",
    )
    return [
        Plot("Learning rate", make_curves("train", "learning_rate")),
        Plot("Gradient norm", norms, clipped, scale="log", note=before),
        Plot("Tokens a second", tokens, note="Over training steps and their waits for data."),
        Plot("Utilisation", used, scale="percent", note=_USEFUL),
    ]


def corpus_figures(statistics: dict[str, Any]) -> list[Figure]:
    """Returns the pictures of a corpus: how long sentences and documents are."""
    pictures = []
    for what in ("sentence", "document"):
        lengths = statistics[f"{what}_lengths"]
        median, longest = np.median(lengths), lengths.max()
        note = f"Half have at most {median:,.0f} pieces; the longest has {longest:,}."
        svg = figures.draw_histogram(lengths, "pieces", f"lengths-{what}")
        pictures.append(Figure(f"{what.capitalize()} length", note, svg))
    return pictures


def curve(
    lines: Sequence[Line],
    name: str,
    label: str,
    colour: int = 0,
    style: str = "line",
    error: str = "",
) -> Curve:
    """Returns the values of a name over steps, of those lines that hold it."""
    there = [line for line in lines if name in line]
    steps, errors = [line["step"] for line in there], [line[error] for line in there if error]
    return Curve(steps, [line[name] for line in there], label, colour, style, errors)


def _level(line: Line, name: str, label: str) -> list[tuple[float, str]]:
    return [(line[name], label)] if name in line else []
