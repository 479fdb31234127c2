"""Whitening of text vectors (Su et al. 2021): a linear layer, computed from texts without labels.

The pooled states of an encoder differ mostly in a few directions, which frequent words decide. So
the cosines of all texts are high and tell little. The layer centres the vectors of some texts,
rotates them to their principal components, and scales each component to variance 1.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base, TextVectors
from bert_jax.embeddings.embed import Embedder, TextLine, VectorOptions
from bert_jax.errors import InputError, pluralize
from bert_jax.training import mesh as mesh_lib


def whitening_layer(
    mean: np.ndarray, covariance: np.ndarray, count: int, width: int
) -> dict[str, np.ndarray]:
    """Returns the layer for vectors with this mean, float64 [D], and covariance, float64 [D, D].

    The `width` components of the largest variance are kept. D / `count` times the mean variance is
    added to each variance, because few vectors tell little about the smallest components.

    Returns:
      `kernel` float32 [D, width] and `bias` float32 [width].
    """
    variances, directions = np.linalg.eigh(covariance)  # the smallest first
    variances, directions = variances[::-1][:width], directions[:, ::-1][:, :width]
    added = len(mean) / count * np.trace(covariance) / len(mean)
    # A direction and its opposite are equally right; libraries differ in which they return.
    largest = directions[np.abs(directions).argmax(axis=0), np.arange(width)]
    kernel = directions * np.sign(largest) / np.sqrt(variances + added)
    layer = {"kernel": kernel, "bias": -mean @ kernel}
    return {name: values.astype(np.float32) for name, values in layer.items()}


def whiten(
    model: Base,
    name: str,
    lines: Iterable[TextLine],
    folder: epath.Path,
    report: Callable[[str], None],
    dimensions: int = 0,
) -> None:
    """Writes a base whose vectors pass a whitening layer and have length 1.

    Args:
      model: a run or base that makes dense vectors and has no Dense layer.
      name: describes the model in `Base.source`.
      lines: the texts from which the layer is computed.
      folder: the folder of the base, which must not exist.
      report: prints a line about the layer.
      dimensions: numbers of the new vectors; 0: as many as the model's have.
    """
    settings = model.vectors or TextVectors()
    if settings.form != "dense" or settings.dense_width:
        state = "have a Dense layer already" if settings.form == "dense" else f"are {settings.form}"
        raise InputError(f"--workdir: the model's vectors {state}; name a model without")
    size, mesh = model.model.hidden_size, mesh_lib.one_device()
    if dimensions > size:
        raise InputError(f"--dimensions {dimensions}: the vectors have {size} numbers")
    count, total, products = 0, np.zeros(size), np.zeros((size, size))
    for part in Embedder(model, VectorOptions(normalize=False), mesh).embed_lines(lines):
        vectors = part.vectors.astype(np.float64)
        count += len(vectors)
        total += vectors.sum(axis=0)
        products += vectors.T @ vectors
    mean = total / max(count, 1)
    covariance = products / max(count, 1) - np.outer(mean, mean)
    if np.trace(covariance) <= 1e-9 * (mean @ mean):
        texts = pluralize(count, "text")
        raise InputError(
            f"TEXT_FILE: the vectors of {texts} do not differ; give thousands of texts"
        )
    layer = whitening_layer(mean, covariance, count, dimensions or size)
    width = len(layer["bias"])
    vectors = dataclasses.replace(settings, normalize=True, dense_width=width)
    source = f"{name}, whitened by {count:,} texts"
    params = {**model.params, "dense": layer}
    whitened = dataclasses.replace(model, params=params, vectors=vectors, source=source)
    base_lib.write(whitened, folder)
    report(f"{folder}: a base whose vectors of {width} numbers are whitened by {count:,} texts")
