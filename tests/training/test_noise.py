"""Dropout's bits: which they are, and that no two places draw the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples

from bert_jax.config import Adapt
from bert_jax.model import decoder, heads, layers
from bert_jax.model.encoder import Loop
from bert_jax.tasks.task_objective import TaskObjective

LAYERS = samples.MODEL.num_hidden_layers


def test_a_row_s_bits_are_the_words_of_its_key_whatever_is_left_of_the_last():
    """A key is folded with the row's number, then with each place on the way."""
    key, rows = jax.random.key(5), np.array([3, 2**31], np.uint32)

    @jax.jit
    def drawn(rows):
        noise = layers.RowNoise.of(key, rows).at(3).at(1)
        own = jax.vmap(lambda row: functools.reduce(jax.random.fold_in, (row, 3, 1), key))(rows)
        words = [
            jax.vmap(lambda k, n=n: jax.random.bits(k, (9, n), jnp.uint32))(own) for n in (2, 6)
        ]
        return [noise.keep((2, 9, width), 0.25) for width in (5, 24)], words

    for found, words in zip(*drawn(rows), strict=True):
        expected = np.asarray(words).view(np.uint8)[..., : found.shape[-1]] >= 64
        np.testing.assert_array_equal(found, expected)


class Places:
    """A noise that notes where it is drawn; numbers of layers that are traced stand for all."""

    def __init__(self, drawn, way=()):
        self._drawn, self._way = drawn, way

    def at(self, place):
        place = place if isinstance(place, int) else "layer"
        return Places(self._drawn, (*self._way, place))

    def keep(self, shape, rate):
        for number in range(LAYERS):
            self._drawn.append(tuple(number if p == "layer" else p for p in self._way))
            if "layer" not in self._way:
                break
        return jnp.ones(shape, bool)

    def scale(self, rate):
        return 1.0


def forwards():
    """Of each model that draws noise: its parameters, what runs it, and how often it draws."""
    modern = dataclasses.replace(samples.MODEL, kind="modern", global_every=1)
    batch = {name: jnp.ones((2, 6), jnp.int32) for name in ("input_ids", "input_mask")}
    batch |= {"segment_ids": jnp.zeros((2, 6), jnp.int32), "decoder_ids": batch["input_ids"]}
    batch["masked_lm_positions"] = jnp.ones((2, 1), jnp.int32)
    every_layer = 3 * LAYERS
    for cfg in (samples.MODEL, modern):
        params = functools.partial(heads.init_params, cfg)
        run = functools.partial(heads.pretraining_logits, cfg)
        yield cfg.kind, params, run, batch, 1 + every_layer
    cfg = samples.MODEL

    def generate(params, batch, noise, loop):
        return decoder.target_logits(decoder.merge_params(cfg, params), batch, noise, loop)

    of_tags = TaskObjective(cfg, "labels", "tokens", 2, 1, Adapt(features="mixed"))

    def tag(params, batch, noise, loop):
        return of_tags.logits(params, None, batch, noise, loop)

    yield "generate", functools.partial(decoder.init_params, cfg), generate, batch, 2 + 8 * LAYERS
    yield "tag", of_tags.init_params, tag, batch, 1 + every_layer + 3


@pytest.mark.parametrize(
    ("make", "run", "batch", "draws"),
    [pytest.param(*case[1:], id=case[0]) for case in forwards()],
)
def test_no_two_places_of_a_model_draw_the_same(make, run, batch, draws):
    drawn = []
    params = jax.eval_shape(make, jax.random.key(0))
    jax.eval_shape(lambda params: run(params, batch, Places(drawn), Loop()), params)
    assert len(drawn) == draws
    assert len(set(drawn)) == draws
