"""Draws the figures of a report with Matplotlib, as inline SVG.

SVG by Matplotlib needs no script: the page opens anywhere, even in an email, and under a
Content-Security-Policy without scripts. Colours are CSS variables, so that one picture suits a
light and a dark page.
"""

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

# Maximum number of points of a curve; each is the mean of the points that it replaces.
_POINTS = 400
_BINS = 24  # bins of a histogram, whose widths grow by a constant factor
_SIZE = (4.0, 2.6)  # inches
# Placeholder colours for Matplotlib, and the CSS variables of the page that replace them.
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
    """A curve of a plot."""

    x: Sequence[float]  # rising, often steps
    y: Sequence[float]  # one value for each x
    label: str  # in the legend; "" for none
    colour: int = 0  # index into COLOURS
    style: str = "line"  # `line`, `points` (joined, each marked) or `dashes`
    errors: Sequence[float] = ()  # half-lengths of error bars, or none


@dataclass(frozen=True)
class Plot:
    """A small picture with curves."""

    title: str  # the quantity, with its unit
    curves: list[Curve]  # a plot without any point is left out of the page
    # Horizontal lines, (height, label).
    levels: list[tuple[float, str]] = field(default_factory=list)
    scale: str = "linear"  # scale of y: `linear`, `log` or `percent`
    x_label: str = "step"  # under the picture
    note: str = ""  # explanation under the picture

    @property
    def empty(self) -> bool:
        """Returns whether there is nothing to draw."""
        return not any(len(curve.x) for curve in self.curves)


@contextlib.contextmanager
def _axes(
    name: str, size: tuple[float, float] = _SIZE, grid: Literal["x", "y", ""] = ""
) -> Iterator[Axes]:
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        axes = MatplotlibFigure(figsize=size, layout="constrained").add_subplot()
        if grid:
            axes.grid(axis=grid)
            axes.set_axisbelow(True)
        yield axes


def draw(plot: Plot, name: str, marks: Sequence[int] = ()) -> str:
    """Returns the plot as an <svg> element.

    `name` makes the ids of its elements unique on the page; vertical lines are drawn at `marks`.
    """
    with _axes(name, grid="y") as axes:
        for mark in marks:
            axes.axvline(mark, color=_FAINT, linewidth=1)
        for height, label in plot.levels:
            axes.axhline(height, color=_INK, linewidth=1, linestyle=(0, (3, 3)), label=label)
        for curve in plot.curves:
            _draw_curve(axes, curve)
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
        return _svg(axes)


def draw_histogram(lengths: np.ndarray, x_label: str, name: str) -> str:
    """Returns a histogram of lengths, int64 [N] >= 1, as an <svg> element; x is logarithmic."""
    with _axes(name, grid="y") as axes:
        bins = np.geomspace(1, lengths.max() + 1, _BINS + 1).tolist()
        shares = np.full(len(lengths), 1 / len(lengths))
        axes.hist(lengths, bins, weights=shares, color=COLOURS[0], histtype="stepfilled")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_NUMBER)
        axes.yaxis.set_major_formatter(_PERCENT)
        axes.set_xlabel(x_label)
        return _svg(axes)


def draw_dots(
    names: Sequence[str], values: Sequence[float], errors: Sequence[float], name: str
) -> str:
    """Returns a dot plot as <svg>: from the top, a row for each value, with its error bar."""
    with _axes(name, (_SIZE[0], 0.6 + 0.26 * len(names)), grid="x") as axes:
        rows = range(len(names))
        axes.errorbar(
            values, rows, xerr=errors, color=COLOURS[0], linestyle="", marker="o", markersize=4
        )
        axes.set_yticks(rows, names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(_NUMBER)
        return _svg(axes)


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
    style = "points" if len(x) == 1 else curve.style  # a line of a single point is invisible
    marker, line = "o" if style == "points" else None, "--" if style == "dashes" else None
    axes.plot(x, y, color=colour, label=label, marker=marker, markersize=3, linestyle=line)


def format_short(value: float, _position: object = None) -> str:
    """Formats a number: 12000 as 12k, 0.0001 as 1e-4. Matplotlib also passes its position."""
    if value == 0:
        return "0"
    for limit, letter in _LETTERS:
        if abs(value) >= limit:
            return f"{value / limit:.4g}{letter}"
    if abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    return f"{value:.4g}"


_LETTERS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_NUMBER = FuncFormatter(format_short)
_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g} %")


def _svg(axes: Axes) -> str:
    """Returns the <svg> element with the page's colours; its ids depend on the picture's name."""
    buffer = io.StringIO()
    assert isinstance(axes.figure, MatplotlibFigure)  # as made by `_axes`
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
    text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    # The page sets the width.
    return re.sub(r' (width|height)="[^"]*pt"', "", text, count=2)


def draw_maps(maps: np.ndarray, name: str) -> str:
    """Returns attention maps as an <svg> element: a row of squares for each layer, from the top.

    `maps` is float [L, H, S, S]: the attention of each token to all tokens.
    """
    layers, heads, size, _ = maps.shape
    side = size + max(1, size // 12)  # with the gap between squares
    gaps = [(0, 0), (0, 0), (0, side - size), (0, side - size)]
    squares = np.pad(maps**0.5, gaps, constant_values=np.nan)  # the root shows weak attention
    image = squares.swapaxes(1, 2).reshape(layers * side, heads * side)
    with _axes(name, (0.6 + 0.75 * heads, 0.6 + 0.75 * layers)) as axes:
        axes.imshow(image, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        middle = (size - 1) / 2
        axes.set_xticks(np.arange(heads) * side + middle, [*map(str, range(heads))])
        axes.set_yticks(np.arange(layers) * side + middle, [*map(str, range(1, layers + 1))])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        return _svg(axes)


@dataclass(frozen=True)
class Figure:
    """A picture on the page: title, explanation, and the <svg> element."""

    title: str
    note: str
    svg: str


def draw_all(plots: Sequence[Plot], marks: Sequence[int] = (), name: str = "plot") -> list[Figure]:
    """Draws the plots that are not empty; see `draw`."""
    return [
        Figure(plot.title, plot.note, draw(plot, f"{name}-{number}", marks))
        for number, plot in enumerate(plots)
        if not plot.empty
    ]
