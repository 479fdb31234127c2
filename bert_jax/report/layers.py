"""W/layers.html: what each layer knows, and where heads look in a text."""

import datetime
from typing import Any

import numpy as np
from etils import epath

from bert_jax.report import figures
from bert_jax.report.figures import Figure
from bert_jax.report.page import template
from bert_jax.storage.workdir import write_atomic


def write(
    path: epath.Path,
    name: str,
    record: dict[str, Any],
    attention: tuple[list[str], np.ndarray] | None,
) -> None:
    """Writes a page that needs nothing else.

    Args:
      path: of the page.
      name: of the run or the base.
      record: what the layers know (`tasks.layers.record_of`); empty if they were not asked.
      attention: the pieces of a text, and float [L, H, S, S], where each of them looks.
    """
    tasks, pictures, maps = record.get("tasks", []), [], None
    if tasks:
        plot = figures.of_layers(tasks)
        pictures.append(Figure(plot.title, figures.LAYERS, figures.draw(plot, "layers")))
    if attention is not None:
        maps = {"pieces": attention[0], "svg": figures.draw_maps(attention[1], "attention")}
    page = template("layers.html").render(
        name=name,
        step=record.get("step"),
        tasks=tasks,
        figures=pictures,
        maps=maps,
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    write_atomic(path, page)
