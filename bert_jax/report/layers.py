"""W/layers.html: what each layer knows, and where heads look in a text."""

from typing import Any

import numpy as np
from etils import epath

from bert_jax.report import curves, figures
from bert_jax.report.figures import Figure
from bert_jax.report.render import Table, page
from bert_jax.storage.workdir import write_atomic


def write(
    path: epath.Path,
    name: str,
    record: dict[str, Any],
    attention: tuple[list[str], np.ndarray] | None,
) -> None:
    """Writes a page that needs nothing else.

    `record` is as `tasks.layers.record_of` makes it, empty if the layers were not asked;
    `attention` the pieces of a text, and float [L, H, S, S], where each of them looks.
    """
    tasks, pictures, maps = record.get("tasks", []), [], None
    if tasks:
        plot = curves.of_layers(tasks)
        pictures.append(Figure(plot.title, curves.LAYERS, figures.draw(plot, "layers")))
    if attention is not None:
        maps = {"pieces": attention[0], "svg": figures.draw_maps(attention[1], "attention")}
    text = page(
        "layers.html",
        title=f"{name}: layers",
        name=name,
        step=record.get("step"),
        table=table(record) if tasks else None,
        figures=pictures,
        maps=maps,
    )
    write_atomic(path, text)


def table(record: dict[str, Any]) -> Table:
    """Returns a line a task; see `write`."""
    tasks = record["tasks"]
    rows = []
    for one in tasks:
        scores = [f"{value:.3f}" for value in (*one["scores"], one["guess"])]
        rows.append([one["name"], one["score"], *scores, str(one["best"]), f"{one['centre']:.2f}"])
    layers = map(str, range(len(tasks[0]["scores"])))
    return Table(["task", "score", *layers, "guess", "best", "centre"], rows, 2)
