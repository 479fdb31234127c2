"""Properties of the encoder and its noise. Its numbers: `tools.conformance.model_rules`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from compare import assert_close, assert_identical

from bert_jax.checkpoints import base as base_lib
from bert_jax.model import attention, heads, layers
from bert_jax.model.encoder import Loop, padded_vocab_size
from bert_jax.model.kinds import encode

CFG = samples.MODEL


@pytest.fixture(scope="module")
def params():
    return heads.init_params(CFG, jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    return {k: jnp.asarray(v) for k, v in samples.train_batches().batch(0, np.arange(8)).items()}


def noise(rows):
    return layers.RowNoise.of(jax.random.key(1), rows)


def test_padding_never_leaks(params, batch):
    """A padded batch is each row alone, cut to its length."""
    model = heads.build_model(CFG, params)
    names = ("input_ids", "segment_ids", "input_mask")
    together = encode(model.encoder, CFG, *(batch[n] for n in names), None, Loop())
    lengths = np.asarray(batch["input_mask"].sum(axis=1))
    assert lengths.min() < lengths.max()
    for row in (np.argmin(lengths), np.argmax(lengths)):
        length = lengths[row]
        alone = (batch[n][row : row + 1, :length] for n in names)
        hidden = encode(model.encoder, CFG, *alone, None, Loop())
        assert_close({"h": together[row, :length]}, {"h": hidden[0]}, 1e-5)


def test_an_only_segment_is_that_of_both_texts(batch):
    one = dataclasses.replace(CFG, type_vocab_size=1)
    encoder = heads.build_model(one, heads.init_params(one, jax.random.key(0))).encoder
    ids, kinds = batch["input_ids"], batch["segment_ids"]
    assert kinds.any()
    found, expected = (encoder.embeddings(ids, of, jnp.float32) for of in (kinds, 0 * kinds))
    assert_identical(found, expected)


def test_layers_of_a_stack_begin_differently(params):
    for name, value in base_lib.flatten(params["encoder"]["layers"]).items():
        assert not name.endswith("kernel") or not np.array_equal(value[0], value[1])


def test_vocabulary_rows_are_a_multiple_of_1024():
    for size, rows in ((30_522, 30_720), (1024, 1024), (1025, 2048), (6, 1024)):
        assert padded_vocab_size(dataclasses.replace(CFG, vocab_size=size)) == rows


@pytest.mark.parametrize("kind", ["threefry8", "rbg16"])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_the_mean(kind, rate):
    if kind == "threefry8":
        drawn = noise(jnp.arange(64, dtype=jnp.uint32))
        probability = round(rate * 256) / 256
    else:
        drawn = layers.ShardNoise(jax.random.key(5, impl="rbg"))
        probability = round(rate * 65_536) / 65_536
    x = jnp.ones((64, 32, 32))
    dropped = layers.dropout(x, drawn, rate)
    deviation = np.sqrt(probability * (1 - probability) / x.size)
    assert abs(float((dropped == 0).mean()) - probability) < 5 * deviation
    assert abs(float(dropped.mean()) - 1) < 6 * deviation / (1 - probability)


def test_no_noise_or_no_rate_drops_nothing():
    x = jnp.ones((2, 4))
    assert layers.dropout(x, None, 0.5) is x
    assert layers.dropout(x, noise(jnp.arange(2, dtype=jnp.uint32)), 0.0) is x


def test_attention_dropout_zeroes_probabilities_and_scales_the_rest():
    """With one value per key, the context is the mean of what is kept, scaled up."""
    b, s, h, d = 4, 16, 2, 4
    query = jnp.zeros((b, s, h, d))
    value = jnp.ones((b, s, h, d))
    drawn = noise(jnp.arange(b, dtype=jnp.uint32))
    context = attention.attend(query, query, value, jnp.ones((b, s)), drawn, 0.25)
    keep = jnp.swapaxes(drawn.keep((b, h, s, s), 0.25), 2, 3)
    expected = keep.mean(axis=-1) * drawn.scale(0.25)
    np.testing.assert_allclose(context[..., 0], jnp.swapaxes(expected, 1, 2), rtol=1e-5)
