"""Two BiLSTM layers between an encoder's layers and the head for tags.

BERT's feature-based approach (Devlin et al. 2018, section 5.3 and Table 7) reads some layers of a
frozen encoder; ELMo's (Peters et al. 2018, section 3.3) all of them, mixed by trained weights. The
encoder runs at each step; a frozen encoder has no dropout and no gradient.

Shape letters: B rows, S sequence, D width, L layers of the encoder, N features of each token.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.config import Features, Model
from bert_jax.errors import InputError
from bert_jax.model import layers, lstm
from bert_jax.training.sharding import Rule

_LAST = 4
# The number of layers that `adapt.features` needs.
_NEEDED = {"second_to_last": 2, "sum_last_four": _LAST, "concat_last_four": _LAST}


def rules(features: Features) -> tuple[Rule, ...]:
    """Returns rules that replicate the parameters of a tagger; () without a tagger."""
    gates = (Rule("tagger/(lower|upper)/gates/(kernel|bias)"),) if features else ()
    return (*gates, Rule("tagger/mixture/(weights|scale)")) if features == "mixed" else gates


class Mixture(nnx.Module):
    """A sum of all layers with the softmax of `weights` [L + 1], times `scale` [].

    Weight decay applies to kernels, embeddings and, as in the paper, to these weights.
    """

    def __init__(self, count: int):
        self.weights = nnx.Param(jnp.zeros(count, jnp.float32))
        self.scale = nnx.Param(jnp.ones([], jnp.float32))

    def __call__(self, every: jax.Array) -> jax.Array:
        """[L + 1, B, S, D] -> float32 [B, S, D]."""
        shares = jax.nn.softmax(self.weights[...])
        return self.scale[...] * jnp.einsum("l,lbsd->bsd", shares, every.astype(jnp.float32))


class Tagger(nnx.Module):
    """Two BiLSTM layers as wide as the encoder, over the layers that `features` selects."""

    def __init__(self, cfg: Model, features: Features, *, rngs: nnx.Rngs):
        width = cfg.hidden_size
        reads = width * (_LAST if features == "concat_last_four" else 1)
        if features == "mixed":
            self.mixture = Mixture(cfg.num_hidden_layers + 1)
        self.lower = lstm.both_directions(reads, width // 2, rngs=rngs)
        self.upper = lstm.both_directions(width, width // 2, rngs=rngs)


def read(tagger: Tagger, features: Features, every: jax.Array) -> jax.Array:
    """Returns the features of each token: [L + 1, B, S, D] of all layers -> float32 [B, S, N]."""
    every = every.astype(jnp.float32)
    last = every[-_LAST:]
    if features == "mixed":
        return tagger.mixture(every)
    if features == "sum_last_four":
        return last.sum(axis=0)
    if features == "concat_last_four":
        return jnp.concatenate(list(last), axis=-1)
    return every[{"embeddings": 0, "second_to_last": -2, "last": -1}[features]]


def run(
    tagger: Tagger,
    features: Features,
    every: jax.Array,
    input_mask: jax.Array,
    noise: layers.Noise | None,
    rate: float,
) -> jax.Array:
    """Runs the two layers over the encoder's features, with dropout on the input of each.

    Maps [L + 1, B, S, D] and `input_mask`, int32 [B, S], 0 for padding, to [B, S, D]. All but the
    mask are of the compute type.
    """
    x = read(tagger, features, every)
    for number, layer in enumerate((tagger.lower, tagger.upper)):
        site = None if noise is None else noise.at(number)
        x = layers.dropout(x, site, rate).astype(every.dtype)
        x = lstm.run_both(layer, jnp.stack([x, x]), input_mask)
    return x.astype(every.dtype)


def require_layers(model: Model, features: Features, where: str) -> None:
    """Raises InputError, which names `where`, unless the encoder has the layers for `features`."""
    needed = _NEEDED.get(features, 1)
    if model.num_hidden_layers < needed:
        raise InputError(
            f"adapt.features={features}: {where} has {model.num_hidden_layers} layers, but "
            f"{needed} are needed; choose embeddings, last or mixed"
        )
    if features and model.hidden_size % 2:
        raise InputError(
            f"adapt.features={features}: {where} has model.hidden_size={model.hidden_size}, which "
            "must be even for two directions; remove it"
        )
