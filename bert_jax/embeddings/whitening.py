"""Whitening of text vectors (Su et al. 2021): a linear layer, computed from texts without labels.

The vectors of an encoder have a large common mean, and most of their variance is in a few
directions. So the cosine of two texts is high, whatever they say. The layer subtracts the mean and
makes the variances in all directions almost equal. Mean and variances are those of sample texts.
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

    The `width` principal components with the largest variances are kept, and each is divided by
    sqrt(variance + trace(covariance) / count). The added term is a regularization: few vectors
    underestimate the smallest variances, whose components would become too large.

    Args:
      count: the number of vectors from which mean and covariance were computed.

    Returns:
      `kernel` float32 [D, width] and `bias` float32 [width].
    """
    variances, directions = np.linalg.eigh(covariance)
    order = np.argsort(-variances)[:width]  # the largest first
    variances, directions = variances[order], directions[:, order]
    # The sign of an eigenvector is arbitrary. Here its entry of the largest magnitude is positive,
    # so that all machines compute the same layer.
    largest_entries = directions[np.abs(directions).argmax(axis=0), np.arange(width)]
    kernel = (
        directions * np.sign(largest_entries) / np.sqrt(variances + np.trace(covariance) / count)
    )
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
    """Writes a base with a model's weights, a whitening layer, and vectors of length 1.

    Args:
      model: a run or base with dense vectors, which are pooled hidden states without a Dense layer.
      name: the model's name, which `Base.source` mentions.
      lines: the texts from which the layer is computed. They are embedded as documents, not as
        queries.
      folder: the folder of the base, which must not exist.
      report: prints a line about the layer.
      dimensions: how many numbers a new vector has; 0: as many as the model's vectors have.
    """
    settings = model.vectors or TextVectors()
    if settings.form != "dense":
        raise InputError(f"{name}: its vectors are {settings.form}; only dense ones are whitened")
    if settings.dense_width:
        raise InputError(f"{name}: has a Dense layer already; give a model that has none")
    size, mesh = model.model.hidden_size, mesh_lib.one_device()
    if not 0 <= dimensions <= size:
        raise InputError(
            f"dimensions: {dimensions} must be from 0 to {size}, the model's hidden size"
        )
    embedder = Embedder(model, VectorOptions(normalize=False), mesh)
    count, total, products = 0, np.zeros(size), np.zeros((size, size))
    for embedded in embedder.embed_lines(lines):
        vectors = embedded.vectors.astype(np.float64)
        count += len(vectors)
        total += vectors.sum(axis=0)
        products += vectors.T @ vectors
    mean = total / max(count, 1)
    covariance = products / max(count, 1) - np.outer(mean, mean)
    # Vectors of equal texts differ by rounding; without texts, both sides are 0.
    if np.trace(covariance) <= 1e-9 * (mean @ mean):
        number = pluralize(count, "text")
        raise InputError(f"{number}: the vectors are all equal; give texts that differ")
    layer = whitening_layer(mean, covariance, count, dimensions or size)
    width = len(layer["bias"])
    whitened = dataclasses.replace(
        model,
        params={**model.params, "dense": layer},
        vectors=dataclasses.replace(
            settings, normalize=True, dense_width=width, dense_activation="identity"
        ),
        source=f"{name}, whitened with {count:,} texts",
    )
    base_lib.write(whitened, folder)
    report(f"{folder}: a base with whitened vectors of {width} numbers, from {count:,} texts")
    if truncated := embedder.truncated_texts:
        limit = embedder.token_limit("document")
        report(f"truncated to {limit} tokens: {truncated} of {count} texts")
