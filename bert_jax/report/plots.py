"""Curves as inline SVG, by Matplotlib.

Matplotlib because its SVG needs no script: a page of it opens anywhere, in a mail too, under a
Content-Security-Policy that lets nothing run. Colours are written as CSS variables, so that one
picture serves a light and a dark page.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

# Points a curve is thinned out to; each is the mean of those it stands for.
_POINTS = 400
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
    """Points to draw.

    Attributes:
      x: rising, often steps.
      y: as many.
      label: in the legend; "" for none.
      colour: index into COLOURS.
      style: `line`, `points` (joined, each marked) or `dashes`.
      errors: half-lengths of error bars, or none.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str
    colour: int = 0
    style: str = "line"
    errors: Sequence[float] = ()


@dataclass(frozen=True)
class Plot:
    """A small picture.

    Attributes:
      title: what is drawn, with its unit.
      curves: what to draw; a plot without any point is left out of the page.
      levels: horizontal lines, (height, label).
      scale: of y, `linear`, `log` or `percent`.
      x_label: under the picture.
    """

    title: str
    curves: list[Curve]
    levels: list[tuple[float, str]] = field(default_factory=list)
    scale: str = "linear"
    x_label: str = "step"

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(len(curve.x) for curve in self.curves)


@dataclass(frozen=True)
class Bars:
    """A histogram: heights over the edges between which they stand, with logarithmic x."""

    title: str
    edges: Sequence[float]
    heights: Sequence[float]
    x_label: str


def draw(plot: Plot, name: str, marks: Sequence[int] = ()) -> str:
    """The plot as an <svg> element.

    Args:
      plot: what to draw.
      name: tells it apart from the page's other elements.
      marks: where vertical lines stand, at the starts of phases.
    """
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        for at in marks:
            axes.axvline(at, color=_FAINT, linewidth=1)
        for height, label in plot.levels:
            axes.axhline(height, color=_INK, linewidth=1, linestyle=(0, (3, 3)), label=label)
        for curve in plot.curves:
            _draw_curve(axes, curve)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        if plot.scale == "log":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(_short))
        elif plot.scale == "percent":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
        else:
            axes.yaxis.set_major_formatter(FuncFormatter(_short))
        axes.set_xlabel(plot.x_label)
        if any(curve.label for curve in plot.curves) or plot.levels:
            axes.legend(fontsize=8, handlelength=1.6, loc="best")
        return _svg(figure, name)


def draw_bars(bars: Bars, name: str) -> str:
    """The histogram as an <svg> element."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.stairs(bars.heights, bars.edges, fill=True, color=COLOURS[0])
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
        axes.set_xlabel(bars.x_label)
        return _svg(figure, name)


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most a few hundred points: the last x and the mean y of consecutive groups."""
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
    axes.plot(x, y, color=colour, label=label, **look.get(curve.style, {}))


def _short(value: float, _: object = None) -> str:
    """12000 as 12k, 0.0001 as 1e-4."""
    if value == 0:
        return "0"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{letter}"
    if abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    return f"{value:.4g}"


def _svg(figure: Figure, name: str) -> str:
    """The element alone, with the page's colours, and ids that no other picture has."""
    buffer = io.StringIO()
    figure.savefig(
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
