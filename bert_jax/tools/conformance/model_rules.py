"""Compares encoder, heads, losses and metrics with PyTorch's BertForPreTraining or formulas."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import Model
from bert_jax.model import heads, layers, losses
from bert_jax.model.encoder import Loop, padded_vocab_size
from bert_jax.model.kinds import encode
from bert_jax.tools.conformance import golden
from bert_jax.tools.conformance.rule import ReferenceRule, largest_difference, relative

Batch = dict[str, jax.Array]

_rule = functools.partial(ReferenceRule, "model")
_loss_rule = functools.partial(ReferenceRule, "loss")

# Standard deviation of a normal distribution of 0.02, truncated at two standard deviations.
_INITIAL_STD = 0.02 * 0.8796256610342398

# Devlin et al. 2018, section 3: 110M and 340M.
_PAPER = {
    110_106_428: Model(),
    336_226_108: Model(
        hidden_size=1_024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4_096
    ),
}


def check() -> Iterator[ReferenceRule]:
    """Checks the rules of the model and its losses."""
    params, batch = golden.params(), golden.batch()
    yield from _outputs(params, batch)
    loss, gradients = jax.jit(jax.value_and_grad(_loss))(params, batch)
    err = largest_difference(gradients, golden.convert(golden.pytorch("grads")))
    yield _rule("gradients", "those of all parameters with PyTorch's", err, 1e-5)
    yield from _activations_and_layer_norm()
    yield from _initial()
    yield _sizes()
    err = relative(loss, golden.pytorch("outputs")["loss"])
    yield _loss_rule("masked LM + next sentence", "the loss of a batch with PyTorch's", err, 1e-5)
    yield from _metrics()


def _outputs(params: heads.Params, batch: Batch) -> Iterator[ReferenceRule]:
    cfg, expected = golden.CONFIG, golden.pytorch("outputs")
    inputs = (batch["input_ids"], batch["segment_ids"], batch["input_mask"])
    encoder = heads.merge(cfg, params).encoder  # `merge` makes the module of the whole model
    # Without dropout, and with the default loop over the layers.
    hidden = encode(encoder, cfg, *inputs, noise=None, loop=Loop(), outputs="all")
    states = expected["hidden_states"]
    err = relative(hidden[0], states[0])
    yield _rule("word + type + position, then layer norm", "embeddings with PyTorch's", err, 1e-5)
    yield _rule(
        "post-norm layers; attention logits of padding at -10,000",
        f"{len(states) - 1} layers with PyTorch's",
        max(relative(a, b) for a, b in zip(hidden[1:], states[1:], strict=True)),
        1e-5,
    )
    masked_lm, next_sentence = heads.pretraining_logits(cfg, params, batch, noise=None, loop=Loop())
    yield _rule(
        "dense, GELU, layer norm, tied embeddings and a bias",
        "masked LM logits with PyTorch's",
        relative(masked_lm[..., : cfg.vocab_size], expected["prediction_logits"]),
        1e-5,
    )
    err = relative(next_sentence, expected["seq_relationship_logits"])
    yield _rule("tanh of [CLS], then two logits", "next-sentence logits with PyTorch's", err, 1e-5)
    leaked = jax.nn.softmax(masked_lm)[..., cfg.vocab_size :].sum(axis=-1).max()
    yield _rule(
        "padding rows of the vocabulary get no probability",
        f"{padded_vocab_size(cfg) - cfg.vocab_size} probabilities with 0",
        float(leaked),
    )


def _activations_and_layer_norm() -> Iterator[ReferenceRule]:
    x = np.linspace(-6.0, 6.0, 1201)
    by_erf = [0.5 * v * (1.0 + math.erf(v / math.sqrt(2.0))) for v in x]
    by_tanh = 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    for name, expected in (("gelu", by_erf), ("gelu_tanh", by_tanh)):
        err = relative(layers.activation(name, jnp.asarray(x, jnp.float32)), expected)
        yield _rule(f"hidden_act={name}", "1,201 values with float64", err, 1e-6)
    # The variance is so small that the 1e-12 shows.
    small = np.random.default_rng(0).normal(size=(4, 64)) * 1e-6
    centred = small - small.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-12)
    err = relative(layers.LayerNorm(64)(jnp.asarray(small, jnp.float32)), expected)
    compared = "rows of variance 1e-12 with float64"
    yield _rule("layer norm of eps 1e-12, biased variance", compared, err, 1e-5)


def _initial() -> Iterator[ReferenceRule]:
    sizes = {"vocab_size": 10_000, "hidden_size": 64, "intermediate_size": 256}
    cfg = Model(num_hidden_layers=2, num_attention_heads=2, **sizes)
    fresh = jax.jit(functools.partial(heads.init_params, cfg))(jax.random.key(0))
    random_values, differing = [], 0
    for path, leaf in jax.tree.leaves_with_path(fresh):
        name = path[-1].key
        if name in ("kernel", "embedding"):
            # Padding rows are zero.
            used = leaf[: cfg.vocab_size] if leaf.shape[0] > cfg.vocab_size else leaf
            random_values.append(np.asarray(used).ravel())
        else:
            differing += int((np.asarray(leaf) != (1.0 if name == "scale" else 0.0)).sum())
    values = np.concatenate(random_values)
    yield _rule(
        "weights of deviation 0.01759: 0.02 truncated at 2 sigma, not rescaled",
        f"{len(values):,} fresh weights with the distribution",
        abs(float(values.std()) / _INITIAL_STD - 1.0),
        0.01,
    )
    err = max(float(np.abs(values).max()) - 0.04, 0.0)
    yield _rule("no weight beyond 0.04", "the largest fresh weight with 0.04", err, 1e-6)
    yield _rule("biases 0, layer norms 1 and 0", "fresh parameters with 0 and 1", differing)


def _sizes() -> ReferenceRule:
    differing = 0
    for size, cfg in _PAPER.items():
        shapes = jax.eval_shape(functools.partial(heads.init_params, cfg), jax.random.key(0))
        total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        padding = (padded_vocab_size(cfg) - cfg.vocab_size) * (cfg.hidden_size + 1)
        differing += abs(total - padding - size)
    return _rule("110M and 340M parameters", "BASE and LARGE with the released models", differing)


# --- losses ---------------------------------------------------------------------------------------


def _loss(params: heads.Params, batch: Batch) -> jax.Array:
    logits = heads.pretraining_logits(golden.CONFIG, params, batch, noise=None, loop=Loop())
    sums = losses.pretraining(*logits, batch)
    masked_lm, next_sentence = sums["masked_lm_loss"], sums["next_sentence_loss"]
    return masked_lm[0] / masked_lm[1] + next_sentence[0] / next_sentence[1]


def _metrics() -> Iterator[ReferenceRule]:
    """Compares metrics; labels of id 0 count, since only weights mark missing labels."""
    rng = np.random.default_rng(0)
    masked_lm, next_sentence = rng.normal(size=(6, 4, 30)), rng.normal(size=(6, 2))  # logits
    labels = np.where(rng.random((6, 4)) < 0.5, masked_lm.argmax(-1), 0)
    weights = (rng.random((6, 4)) < 0.7).astype(np.float64)
    next_labels = rng.integers(0, 2, 6)
    sums = losses.pretraining(
        jnp.asarray(masked_lm, jnp.float32),
        jnp.asarray(next_sentence, jnp.float32),
        {
            "masked_lm_ids": jnp.asarray(labels),
            "masked_lm_weights": jnp.asarray(weights, jnp.float32),
            "next_sentence_labels": jnp.asarray(next_labels),
            "row_weights": jnp.ones(6),
        },
    )

    def means(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> dict[str, float]:
        label_logits = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
        nll = np.log(np.exp(logits).sum(-1)) - label_logits
        hits = logits.argmax(-1) == labels
        return {
            "loss": (weights * nll).sum() / weights.sum(),
            "accuracy": (weights * hits).sum() / weights.sum(),
        }

    expected = {"masked_lm": means(masked_lm, labels, weights)}
    expected["next_sentence"] = means(next_sentence, next_labels, np.ones(6))
    notes = {"masked_lm": ", and a label of id 0 counts"}
    for task, values in expected.items():
        actual = [float(sums[f"{task}_{name}"][0] / sums[f"{task}_{name}"][1]) for name in values]
        yield _loss_rule(
            f"{task}_loss and {task}_accuracy are weighted means{notes.get(task, '')}",
            "both with float64",
            relative(actual, list(values.values())),
            1e-6,
        )
