"""Updates and learning-rate schedules.

`bert_adam` is google-research/bert's AdamWeightDecayOptimizer (optimization.py): no bias
correction, weight decay added to the update. `adamw` is Loshchilov and Hutter 2019, `lamb` You et
al. 2019; both are optax's, except for LAMB's trust ratio, which here treats layers separately.
`stable_adamw` is adamw with a rate lowered for each tensor (Wortsman et al. 2023), `muon` has
orthogonal updates for the matrices of layers and adamw for the rest (Jordan et al. 2024).
"""

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from bert_jax.config import Optimizer
from bert_jax.training import muon as muon_lib

Tree = Any
State = optax.OptState

# Biases and layer norms do not decay, as in the reference.
_NO_DECAY = ("bias", "scale", "output_bias")
# The first dimension of leaves below these keys is layers, each of which is one tensor.
_STACKED = {"layers", "lora"}
_EMBEDDINGS = ["encoder", "embeddings"]


def make_optimizer(
    cfg: Optimizer, orthogonalize: muon_lib.Orthogonalize = muon_lib.orthogonalize_local
) -> optax.GradientTransformation:
    """Makes the update for a learning rate of 1: p <- p - lr * update.

    `orthogonalize` is the function that `muon` applies to the matrices, sharded or local.
    """
    if cfg.name == "muon":
        chain = _muon(cfg, orthogonalize)
    elif cfg.name == "stable_adamw":
        chain = [stable_adamw(cfg.b1, cfg.b2, cfg.eps, cfg.weight_decay)]
    else:
        adam = scale_by_bert_adam if cfg.name == "bert_adam" else optax.scale_by_adam
        decay = optax.add_decayed_weights(cfg.weight_decay, mask=decays)
        chain = [adam(cfg.b1, cfg.b2, cfg.eps), decay]
        chain += [scale_by_stacked_trust_ratio()] * (cfg.name == "lamb")
    return optax.chain(*chain, *[scale_by_layer(cfg.layer_decay)] * (cfg.layer_decay < 1.0))


def _muon(
    cfg: Optimizer, orthogonalize: muon_lib.Orthogonalize
) -> list[optax.GradientTransformation]:
    def matrices(params: Tree) -> Tree:
        return jax.tree.map_with_path(muon_lib.is_layer_matrix, params)

    def non_matrices(params: Tree) -> Tree:
        return jax.tree.map(lambda is_matrix: not is_matrix, matrices(params))

    return [
        optax.masked(optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps), non_matrices),
        optax.masked(scale_by_muon(cfg.momentum, orthogonalize), matrices),
        optax.add_decayed_weights(cfg.weight_decay, mask=decays),
        optax.masked(optax.scale(cfg.matrix_learning_rate / cfg.peak_learning_rate), matrices),
    ]


def schedule(cfg: Optimizer, total_steps: int, step: jax.Array) -> jax.Array:
    """Computes the learning rate of a step.

    `paper`: linear decay from step 0 to the end, replaced by a linear rise from 0 during warm-up.
    When warm-up ends, the rate drops from near the peak to peak * (1 - warm-up / total), as in the
    reference (optimization.py, create_optimizer). `linear` and `cosine` decay from the peak. `wsd`
    stays at the peak and decays in the last `decay_steps`: linearly, or by 1 - sqrt(done / all) of
    these steps (Hägele et al. 2024).
    """
    step = step.astype(jnp.float32)
    peak, warmup = cfg.peak_learning_rate, cfg.warmup_steps
    rise = peak * step / max(warmup, 1)
    if cfg.schedule == "wsd":
        # One expression with and without a decay, so that the compiled steps before it give the
        # same bits: a run without a decay may be forked to decay (`checkpoints.fork`).
        done = (step - (total_steps - cfg.decay_steps)) * (1.0 / (cfg.decay_steps or total_steps))
        share = jnp.clip(done, 0.0, 1.0)
        share = jnp.sqrt(share) if cfg.decay_shape == "one_minus_sqrt" else share
        return jnp.where(step < warmup, rise, peak * (1.0 - share))
    done = jnp.clip((step - warmup) / (total_steps - warmup), 0.0, 1.0)
    fall = {
        "paper": peak * (1.0 - jnp.clip(step / total_steps, 0.0, 1.0)),
        "linear": peak * (1.0 - done),
        "cosine": peak * 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    }[cfg.schedule]
    return jnp.where(step < warmup, rise, fall)


def clip(gradient: Tree, max_norm: float) -> tuple[Tree, jax.Array]:
    """Scales a gradient down to at most `max_norm`; returns it and its norm before."""
    norm = optax.global_norm(gradient)
    # If the norm is not finite, the whole gradient becomes NaN, and the step is skipped.
    factor = jnp.where(jnp.isfinite(norm), max_norm / jnp.maximum(norm, max_norm), jnp.nan)
    return jax.tree.map(lambda g: g * factor, gradient), norm


def moments(state: tuple[Any, ...]) -> optax.ScaleByAdamState:
    """Returns the moments in a state of `make_optimizer`: `mu` of gradients, `nu` of squares."""
    return state[0]


def with_moments(state: tuple[Any, ...], mean: Tree, square: Tree) -> tuple[Any, ...]:
    """Returns a state of `make_optimizer` with other moments.

    Their count does not change; bert_adam does not use it.
    """
    return (state[0]._replace(mu=mean, nu=square), *state[1:])


def decays(params: Tree) -> Tree:
    """Returns the mask of leaves with weight decay: all but biases and layer norms."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key not in _NO_DECAY, params)


def scale_by_bert_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Returns Adam without bias correction: m / (sqrt(v) + eps)."""

    def update(updates: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        del params
        state = cast(optax.ScaleByAdamState, state)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        return direction, optax.ScaleByAdamState(count=state.count + 1, mu=mu, nu=nu)

    return optax.GradientTransformation(optax.scale_by_adam(b1, b2, eps).init, update)


def stable_adamw(
    b1: float, b2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
    """Returns AdamW whose update, decay included, is divided by max(1, RMS) of each tensor.

    RMS is the root of the mean of g^2 / max(v, eps^2), where v is the corrected mean of squares. It
    is above 1 if gradients grow faster than v (Wortsman et al. 2023, algorithm 2, which corrects
    the means in their betas). Each layer of a stack is a tensor; rows that pad the vocabulary count
    as zeros.
    """
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(updates: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        direction, new_state = adam.update(updates, state)
        new_state = cast(optax.ScaleByAdamState, new_state)
        correction = 1.0 - b2 ** jnp.asarray(new_state.count).astype(jnp.float32)

        def scale(
            path: tuple[Any, ...], u: jax.Array, g: jax.Array, v: jax.Array, p: jax.Array
        ) -> jax.Array:
            if path[-1].key not in _NO_DECAY:
                u = u + weight_decay * p
            square = g * g / jnp.maximum(v / correction, eps * eps)
            mean = jnp.mean(square, axis=_tensor_axes(path, g), keepdims=True)
            return u / jnp.maximum(1.0, jnp.sqrt(mean))

        scaled = jax.tree.map_with_path(scale, direction, updates, new_state.nu, params)
        return scaled, new_state

    return optax.GradientTransformation(adam.init, update)


def scale_by_muon(
    momentum: float, orthogonalize: muon_lib.Orthogonalize
) -> optax.GradientTransformation:
    """Returns orthogonal updates from Nesterov momentum, for stacked matrices [L, in, out].

    If there are more outputs than inputs, updates are multiplied by the root of the ratio, as in
    the author's code and in PyTorch's.
    """

    def update(updates: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        del params
        trace = optax.incremental_update(updates, cast(optax.TraceState, state).trace, 1 - momentum)
        nesterov = optax.incremental_update(trace, updates, momentum)
        leaves, tree = jax.tree.flatten_with_path(nesterov)
        stacks = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        new = orthogonalize(stacks)
        scaled = [
            new[path] * math.sqrt(max(1.0, x.shape[2] / x.shape[1])) for path, x in stacks.items()
        ]
        return jax.tree.unflatten(tree, scaled), optax.TraceState(trace)

    return optax.GradientTransformation(optax.trace(momentum).init, update)


def _tensor_axes(path: tuple[Any, ...], leaf: jax.Array) -> tuple[int, ...]:
    """Returns the dimensions of a tensor: all, or for stacked layers all but the first."""
    return tuple(range(1 if any(key.key in _STACKED for key in path) else 0, leaf.ndim))


def scale_by_layer(decay: float) -> optax.GradientTransformation:
    """Multiplies updates by `decay` once for each layer above; the heads count as one layer.

    With L layers, updates of the top layer are multiplied by decay, updates of the embeddings by
    decay^(L+1) (Howard and Ruder 2018).
    """

    def scale(path: tuple[Any, ...], update: jax.Array, above: jax.Array) -> jax.Array:
        names = [key.key for key in path]
        if names[:2] == ["encoder", "layers"]:  # not a decoder's layers, which are above them
            return update * above.reshape(-1, *[1] * (update.ndim - 1))
        return update * (decay * above[0]) if names[:2] == _EMBEDDINGS else update

    def apply(updates: Tree, _: Tree) -> Tree:
        layers = len(jax.tree.leaves(updates["encoder"]["layers"])[0])
        above = jnp.asarray([decay ** (layers - number) for number in range(layers)], jnp.float32)
        return jax.tree.map_with_path(lambda p, u: scale(p, u, above), updates)

    return optax.stateless(apply)


def scale_by_stacked_trust_ratio() -> optax.GradientTransformation:
    """Scales by LAMB's |p| / |update| for every tensor of every layer; 1 for tensors without decay.

    optax takes one norm for a leaf, which would be one norm for all stacked layers.
    """

    def scale(path: tuple[Any, ...], update: jax.Array, param: jax.Array) -> jax.Array:
        if path[-1].key in _NO_DECAY:
            return update
        axes = _tensor_axes(path, param)

        def norm(x: jax.Array) -> jax.Array:
            return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))

        param_norm, update_norm = norm(param), norm(update)
        usable = (param_norm > 0) & (update_norm > 0)
        return update * jnp.where(usable, param_norm / jnp.where(usable, update_norm, 1.0), 1.0)

    return optax.stateless(functools.partial(jax.tree.map_with_path, scale))
