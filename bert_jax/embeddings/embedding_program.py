"""The program on the devices that turns packed rows of texts into vectors.

Shape letters: S tokens of a row, N texts of a row, W width of a vector.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Model, Parallelism
from bert_jax.model import cudnn_attention, heads, similarity
from bert_jax.model.attention import Packing
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import encode
from bert_jax.training import mesh as mesh_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """The hidden states that become vectors, and how they are pooled."""

    # `mean`: the mean of all tokens with [CLS] and [SEP], as in sentence-transformers; `cls`: the
    # vector of [CLS]; `last`: the vector of the last token, [SEP]; `tokens`: one vector for each
    # token, without [CLS] and [SEP]; None: the setting of the run or base, or `mean`.
    pooling: Literal["mean", "cls", "last", "tokens"] | None = None
    # 0 is the embeddings, 1 the first layer; negative numbers count from the last layer, -1.
    layers: tuple[int, ...] = (-1,)
    # Concatenates the vectors of several layers, or averages them.
    combine: Literal["concat", "mean"] = "concat"
    # Whether vectors are scaled to length 1; None: `Embedder` takes the setting of the run or base.
    normalize: bool | None = None
    # Keeps only the first numbers of a vector, before scaling (Kusupati et al. 2022); 0: all.
    dimensions: int = 0


def truncate_layers(depth: int, params: heads.Params) -> heads.Params:
    """Returns parameters whose encoder has only the first `depth` layers."""
    encoder = params["encoder"]
    layers = jax.tree.map(lambda stacked: stacked[:depth], encoder["layers"])
    return params | {"encoder": encoder | {"layers": layers}}


def build(
    model: Model,
    depth: int,
    features: VectorOptions,
    layers: tuple[int, ...],
    settings: TextVectors,
    mesh: jax.sharding.Mesh,
) -> Callable[[heads.Params, dict[str, jax.Array]], jax.Array]:
    """Returns the compiled program: packed rows -> float32 [rows, N, W]; `tokens`: [rows, S, W]."""
    unsupported = cudnn_attention.refusal(model, mesh.devices.flat[0], Parallelism())
    loop = Loop(cudnn=unsupported is None)  # settings of the loop over layers

    def embed_shard(params: heads.Params, batch: dict[str, jax.Array]) -> jax.Array:
        ids = batch["input_ids"]  # [1, S]: each shard has one row
        packing = Packing(batch["positions"], batch["row_indices"][0], batch["slot_indices"])
        module = heads.merge(model, params)
        # All tokens are in segment 0, and there is no dropout.
        inputs = module.encoder, model, ids, jnp.zeros_like(ids), packing, None, loop
        if settings.form == "sparse":
            hidden = packing.unpack(encode(*inputs))  # [N, tokens, W]
            logits = heads.token_logits(module, model, hidden)
            vectors = similarity.saturate(similarity.max_logits(logits, packing.mask))
            return vectors[None, :, : model.vocab_size]
        if settings.form == "multi_vector":
            return similarity.project(encode(*inputs), params["projection"]["kernel"])
        if layers == (depth,):
            states = [encode(*inputs)]
        else:
            all_states = encode(*inputs, outputs="all")
            states = [all_states[layer] for layer in layers]
        states = [hidden.astype(jnp.float32) for hidden in states]
        if features.combine == "concat":
            combined = jnp.concatenate(states, -1)
        else:
            combined = sum(states[1:], states[0]) / len(states)
        vectors = _pool(combined, packing, features.pooling or "mean")
        if settings.dense_width:
            activation = settings.dense_activation
            vectors = similarity.apply_dense(vectors, params["dense"], activation)
        if features.dimensions:
            vectors = vectors[..., : features.dimensions]
        if features.normalize:
            norm = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
        return vectors

    spec = mesh_lib.batch_spec(mesh)
    specs = {"in_specs": (PartitionSpec(), spec), "out_specs": spec}
    return jax.jit(jax.shard_map(embed_shard, mesh=mesh, **specs, check_vma=False))


def _pool(hidden: jax.Array, packing: Packing, pooling: str) -> jax.Array:
    """Pools the tokens of each text: [1, S, W] -> [1, N, W]; `tokens` returns `hidden`."""
    if pooling == "tokens":
        return hidden
    if pooling == "cls":
        first = packing.row_indices[:, 0]
        return jnp.take(hidden, first, axis=1, mode="fill", fill_value=0)
    counts = jnp.maximum(packing.mask.sum(axis=1), 1)  # an empty slot has no token
    if pooling == "last":
        last = jnp.take_along_axis(packing.row_indices, counts[:, None] - 1, axis=1)[:, 0]
        return jnp.take(hidden, last, axis=1, mode="fill", fill_value=0)
    return (packing.unpack(hidden).sum(axis=1) / counts[:, None])[None]
