"""The curves of a report: which ones, and Matplotlib's drawings of them as inline SVG.

Matplotlib because its SVG needs no script: a page of it opens anywhere, in a mail too, under a
Content-Security-Policy that lets nothing run. Colours are written as CSS variables, so that one
picture serves a light and a dark page.
"""

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from bert_jax.model import losses
from bert_jax.report.records import Histogram, Line, Record

# --- drawing ---

# Points a curve is thinned out to; each is the mean of those it stands for.
_POINTS = 400
# Of what utilisation is a share, below its picture.
ON_A_CPU = (
    "on a CPU, of a large product timed as the run began. Other work on the machine slows that: "
    "then the shares are too high, over 100 % even."
)
_SIZE = (4.0, 2.6)  # inches, at 96 dots
# Stand-ins that Matplotlib can draw with, and the variables that the page defines.
_INK, _FAINT = "#010101", "#020202"
COLOURS = tuple(f"#0300{i:02x}" for i in range(6))
_VARIABLES = {
    _INK: "var(--ink)",
    _FAINT: "var(--line)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)},
}
_STYLE = {
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "text.parse_math": False,
    "font.size": 8.5,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Curve:
    """Points to draw."""

    x: Sequence[float]  # rising, often steps
    y: Sequence[float]  # as many
    label: str  # in the legend; "" for none
    colour: int = 0  # index into COLOURS
    style: str = "line"  # `line`, `points` (joined, each marked) or `dashes`
    errors: Sequence[float] = ()  # half-lengths of error bars, or none


@dataclass(frozen=True)
class Plot:
    """A small picture."""

    title: str  # what is drawn, with its unit
    curves: list[Curve]  # what to draw; a plot without any point is left out of the page
    # Horizontal lines, (height, label).
    levels: list[tuple[float, str]] = field(default_factory=list)
    scale: str = "linear"  # of y, `linear`, `log` or `percent`
    x_label: str = "step"  # under the picture

    @property
    def empty(self) -> bool:
        """Returns whether there is nothing to draw."""
        return not any(len(curve.x) for curve in self.curves)


@contextlib.contextmanager
def _axes(
    name: str, size: tuple[float, float] = _SIZE, grid: Literal["x", "y", ""] = ""
) -> Iterator[Axes]:
    """Gives axes of a picture to draw on, in the page's style."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        axes = Canvas(figsize=size, layout="constrained").add_subplot()
        if grid:
            axes.grid(axis=grid)
            axes.set_axisbelow(True)
        yield axes


def draw(plot: Plot, name: str, marks: Sequence[int] = ()) -> str:
    """Returns the plot as an <svg> element.

    `name` tells it apart from the page's other elements; vertical lines stand at `marks`.
    """
    with _axes(name, grid="y") as axes:
        for at in marks:
            axes.axvline(at, color=_FAINT, linewidth=1)
        for height, label in plot.levels:
            axes.axhline(height, color=_INK, linewidth=1, linestyle=(0, (3, 3)), label=label)
        for one in plot.curves:
            _draw_curve(axes, one)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(_NUMBER)
        if plot.scale == "log":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(_PERCENT if plot.scale == "percent" else _NUMBER)
        axes.set_xlabel(plot.x_label)
        if any(curve.label for curve in plot.curves) or plot.levels:
            axes.legend(fontsize=8, handlelength=1.6, loc="best")
        return _svg(axes, name)


def draw_histogram(histogram: Histogram, x_label: str, name: str) -> str:
    """Returns the histogram as an <svg> element; x is logarithmic."""
    with _axes(name, grid="y") as axes:
        axes.stairs(histogram.shares, histogram.edges, fill=True, color=COLOURS[0])
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_NUMBER)
        axes.yaxis.set_major_formatter(_PERCENT)
        axes.set_xlabel(x_label)
        return _svg(axes, name)


def draw_dots(
    names: Sequence[str], values: Sequence[float], errors: Sequence[float], name: str
) -> str:
    """Returns values as points with error bars, a line each, the first on top, as <svg>."""
    with _axes(name, (_SIZE[0], 0.6 + 0.26 * len(names)), grid="x") as axes:
        places = range(len(names))
        axes.errorbar(
            values, places, xerr=errors, color=COLOURS[0], linestyle="", marker="o", markersize=4
        )
        axes.set_yticks(places, names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(_NUMBER)
        return _svg(axes, name)


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns at most a few hundred points: the last x and the mean y of consecutive groups."""
    size = -(-len(x) // _POINTS) or 1
    groups = range(0, len(x), size)
    return (
        [x[min(i + size, len(x)) - 1] for i in groups],
        [sum(y[i : i + size]) / len(y[i : i + size]) for i in groups],
    )


def _draw_curve(axes: Axes, curve: Curve) -> None:
    colour = COLOURS[curve.colour % len(COLOURS)]
    # Matplotlib leaves labels that begin with _ out of the legend.
    label = f"\u200b{curve.label}" if curve.label else None
    if len(curve.errors):
        axes.errorbar(
            curve.x, curve.y, curve.errors, color=colour, label=label,
            marker="o", markersize=3, linewidth=1.4, elinewidth=1,
        )  # fmt: skip
        return
    x, y = thin(curve.x, curve.y)
    look = {"points": {"marker": "o", "markersize": 3}, "dashes": {"linestyle": "--"}}
    style = "points" if len(x) == 1 else curve.style  # of a single one a line shows nothing
    axes.plot(x, y, color=colour, label=label, **look.get(style, {}))


def short(value: float, _: object = None) -> str:
    """Formats a number: 12000 as 12k, 0.0001 as 1e-4."""
    if value == 0:
        return "0"
    for limit, letter in _LETTERS:
        if abs(value) >= limit:
            return f"{value / limit:.4g}{letter}"
    if abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    return f"{value:.4g}"


_LETTERS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_NUMBER = FuncFormatter(short)
_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g} %")


def _svg(axes: Axes, name: str) -> str:
    """Returns the element alone, with the page's colours, and ids that no other picture has."""
    buffer = io.StringIO()
    axes.figure.savefig(
        buffer,
        format="svg",
        transparent=True,
        metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style).*?</\1>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{name}-", text)
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, variable)
    # The page decides how wide it is.
    return re.sub(r' (width|height)="[^"]*pt"', "", text, count=2)


# --- which curves ---


@dataclass(frozen=True)
class Figure:
    """A picture on the page: what it shows, in words and as an <svg> element."""

    title: str
    note: str
    svg: str


# Of two labels that are as common, guessing has this loss.
COIN = [(math.log(2), "ln 2")]
LAYERS = (
    "Of what a linear layer reads off the best layer, beyond a guess, the share that it reads off "
    "each; 0 is the embeddings."
)
GUESSING = (
    "At ln 2 = 0.693, dashed, a model says no more than that both answers are as likely; it stays "
    "there until it has learned what follows, which is late."
)


def of_run(record: Record) -> list[Figure]:
    """Returns the pictures of one run."""
    newest = record.evaluation[-1] if record.evaluation else {}
    unigram = _level(newest, "unigram_loss", "unigrams")
    pieces = losses.learned(newest, losses.PIECES) or "masked_lm"
    pairs = losses.learned(newest, losses.PAIRS) or "next_sentence"
    of_pieces, of_pairs = losses.PIECES[pieces].capitalize(), losses.PAIRS[pairs].capitalize()
    of_pieces, of_pairs = of_pieces.replace(" lm", " LM"), of_pairs.replace(" ", "-")
    majority = _level(newest, f"{pairs}_majority", "majority")

    def both(
        title: str, name: str, note: str = "", levels: list = (), error: str = "", **options: str
    ) -> tuple[Plot, str]:
        return Plot(title, train_and_held_out(record, name, error), [*levels], **options), note

    # Of phases that learn something else than held-out rows are scored by.
    others = [
        (task, words.capitalize())
        for task, words in (losses.PIECES | losses.PAIRS).items()
        if f"{task}_loss" not in newest and any(f"{task}_loss" in line for line in record.train)
    ]
    percent = {"scale": "percent"}
    beyond = "Below the dashed line the model knows more than how often each piece occurs."
    errors = (
        "Bars are one standard error if held-out pairs were independent; dashed, always saying the "
        "commoner label."
    )
    plots = [
        both(f"{of_pieces} loss, nat", f"{pieces}_loss", beyond, unigram),
        both(f"{of_pieces} accuracy", f"{pieces}_accuracy", **percent),
        both(
            *(f"{of_pairs} accuracy", f"{pairs}_accuracy", errors, majority, f"{pairs}_error"),
            **percent,
        ),
        both(f"{of_pairs} loss, nat", f"{pairs}_loss", GUESSING, COIN),
        *(both(f"{words} loss, nat", f"{task}_loss") for task, words in others),
        *(both(f"{words} accuracy", f"{task}_accuracy", **percent) for task, words in others),
        *(both(name.replace("_", " "), name) for name in _own(newest)),
        (
            _probes(record),
            "What a linear layer reads off the encoder as it is; dashed, without it.",
        ),
        *_minimal_pairs(record),
        *((of_layers(one["tasks"]), LAYERS) for one in (record.layers,) if one),
        *of_steps(record),
    ]
    return drawn(plots, _phase_starts(record))


def of_steps(*records: Record) -> list[tuple[Plot, str]]:
    """Returns plots of how steps went, with a note each: of what is learned nothing.

    A run by itself shows how much of it is padding, too.
    """
    alone = len(records) == 1
    clip = records[0].experiment.optimizer
    clipped = [(clip.clip_norm, "clip")] if alone and clip.clip == "global" else []

    def each(lines: Literal["train", "laps"], name: str, padded: str = "") -> list[Curve]:
        curves = [
            curve(getattr(record, lines), name, "" if alone else record.label, number)
            for number, record in enumerate(records)
        ]
        if not (alone and padded):
            return curves
        both = ((name, "without padding"), (padded, "with padding"))
        return [curve(getattr(records[0], lines), *one, i) for i, one in enumerate(both)]

    tokens = each("laps", "real_tokens_per_second", "tokens_per_second")
    used = each("laps", "real_utilisation", "utilisation")
    return [
        (Plot("Learning rate", each("train", "learning_rate")), ""),
        (
            Plot("Gradient norm", each("train", "gradient_norm"), clipped, scale="log"),
            "Mean of the steps' norms before the clip.",
        ),
        (Plot("Tokens a second", tokens), "Over training steps and their waits for data."),
        (
            Plot("Utilisation", used, scale="percent"),
            "Useful matrix operations, of what the devices can do; " + ON_A_CPU,
        ),
    ]


def of_corpus(statistics: dict[str, Any]) -> list[Figure]:
    """Returns the pictures of a corpus: how long sentences and documents are."""
    pictures = []
    for what in ("sentence", "document"):
        lengths: Histogram = statistics[f"{what}_lengths"]
        note = (
            f"Half have at most {lengths.median:,.0f} pieces; the longest has {lengths.largest:,}."
        )
        svg = draw_histogram(lengths, "pieces", f"lengths-{what}")
        pictures.append(Figure(f"{what.capitalize()} length", note, svg))
    return pictures


def drawn(
    plots: Sequence[tuple[Plot, str]], marks: Sequence[int], name: str = "plot"
) -> list[Figure]:
    """Draws those plots that are not empty, with their notes; see `draw`."""
    return [
        Figure(plot.title, note, draw(plot, f"{name}-{number}", marks))
        for number, (plot, note) in enumerate(plots)
        if not plot.empty
    ]


def curve(
    lines: list[Line],
    name: str,
    label: str,
    colour: int = 0,
    style: str = "line",
    error: str = "",
    x: Callable[[list[int]], Sequence[float]] = lambda steps: steps,
) -> Curve:
    """Returns the values of a name in those lines that hold it, over what `x` makes of steps."""
    there = [line for line in lines if name in line]
    return Curve(
        x([line["step"] for line in there]),
        [line[name] for line in there],
        label,
        colour,
        style,
        [line[error] for line in there] if error else (),
    )


def train_and_held_out(record: Record, name: str, error: str = "") -> list[Curve]:
    """Returns curves of a name in training and on held-out text."""
    return [
        curve(record.train, name, "training"),
        curve(record.evaluation, name, "held-out", 1, "points", error),
    ]


def _own(line: Line) -> list[str]:
    """Returns what of an evaluation an objective of the experiment's own has brought."""
    known = ("step", "kind", "unigram_loss", "perplexity", "rows")
    names = [name for name in line if name not in known and not losses.is_known(name)]
    return names if len(names) > 1 else []  # the loss alone is that of the others


def _probes(record: Record) -> Plot:
    """Returns a plot of the scores of all probes of a run."""
    newest = record.probes[-1] if record.probes else {"scores": {}, "majority": {}}
    lines = [{"step": line["step"]} | line["scores"] for line in record.probes]
    curves = [
        curve(lines, name, name, number, "points") for number, name in enumerate(newest["scores"])
    ]
    levels = [(value, f"{name}: commonest") for name, value in newest["majority"].items()]
    return Plot("Probes", curves, levels)


def _minimal_pairs(record: Record) -> list[tuple[Plot, str]]:
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
        plot = Plot(f"Minimal pairs {task}", curves, [(0.5, "chance")], "percent")
        plots.append((plot, "How often the acceptable text is the likelier one; bars are errors."))
    return plots


def of_layers(tasks: Sequence[dict[str, Any]]) -> Plot:
    """Returns a plot of what layers know; see `tasks.layers.record_of`."""
    curves = []
    for number, task in enumerate(tasks):
        scores, guess = task["scores"], task["guess"]
        most = max(*scores, guess) - guess
        shares = [(score - guess) / most if most else 0.0 for score in scores]
        curves.append(Curve(range(len(shares)), shares, task["name"], number, "points"))
    return Plot("What each layer knows", curves, scale="percent", x_label="layer")


def draw_maps(maps: np.ndarray, name: str) -> str:
    """Returns where heads look as an <svg> element: a line of squares a layer, the first on top.

    `maps` is float [L, H, S, S], of each piece over all pieces.
    """
    layers, heads, size, _ = maps.shape
    gap = max(1, size // 12)
    canvas = np.full((layers * (size + gap), heads * (size + gap)), np.nan)
    for layer in range(layers):
        for head in range(heads):
            top, left = layer * (size + gap), head * (size + gap)
            canvas[top : top + size, left : left + size] = maps[layer, head] ** 0.5
    with _axes(name, (0.6 + 0.75 * heads, 0.6 + 0.75 * layers)) as axes:
        axes.imshow(canvas, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        middle = (size - 1) / 2
        axes.set_xticks([head * (size + gap) + middle for head in range(heads)], range(heads))
        axes.set_yticks(
            [layer * (size + gap) + middle for layer in range(layers)], range(1, layers + 1)
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        return _svg(axes, name)


def _level(line: Line, name: str, label: str) -> list[tuple[float, str]]:
    return [(line[name], label)] if name in line else []


def _phase_starts(record: Record) -> list[int]:
    """Returns steps at which a phase after the first begins, as far as the run has come."""
    starts, first = [], 0
    for phase in record.experiment.phases[:-1]:
        first += phase.steps
        if first < record.done:
            starts.append(first)
    return starts
