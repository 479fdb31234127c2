"""Packed rows: each example is what it is in a row of its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from compare import assert_close

from bert_jax.config import Parallelism
from bert_jax.data import batches, packing
from bert_jax.data.packing import Packed
from bert_jax.model import heads, layers
from bert_jax.model.encoder import Loop
from bert_jax.training import step
from bert_jax.training.objective import Pretraining

SHAPE = batches.Shape(sequence_length=32, max_predictions=3, batch_size=16)
LONGER = dataclasses.replace(SHAPE, batch_size=8)
# Of 16 examples each in one row; padding at the end, and a row with one example.
SLOTS = np.arange(4) < np.array([3, 1, 2, 4, 2, 4])[:, None]
DROPOUT = dataclasses.replace(
    samples.MODEL, hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.5
)
# Of layers that attend to a window of places.
MODERN = dataclasses.replace(
    DROPOUT, kind="modern", num_hidden_layers=3, global_every=2, local_window=6
)


@functools.cache
def both():
    """Examples cut short to share rows, by themselves and packed."""
    alone = samples.train_batches(SHAPE).batch(3, np.arange(16))
    most = np.array([32 // n for n in SLOTS.sum(axis=1) for _ in range(n)])
    beyond = np.arange(32) >= most[:, None]
    for name in ("input_ids", "segment_ids", "input_mask"):
        alone[name][beyond] = 0
    late = alone["masked_lm_positions"] >= most[:, None]
    for name in ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights"):
        alone[name][late] = 0
        order = np.argsort(alone["masked_lm_weights"] == 0, axis=1, kind="stable")
        alone[name] = np.take_along_axis(alone[name], order, axis=1)
    packed = packing.share(alone, SLOTS, 9)
    numbers = np.zeros(SLOTS.shape, np.uint32)
    numbers[SLOTS] = alone["rows"]
    packed |= {"rows": np.arange(len(SLOTS), dtype=np.uint32), "examples": numbers}
    return alone, packed


def result(batch, model, loop):
    """Loss, metrics and gradients of a batch."""
    objective = Pretraining(model)
    batch = {name: jnp.asarray(value) for name, value in batch.items()}
    params = heads.init_params(model, jax.random.key(0))
    # Fresh biases and position rows are alike: made different, so that a mix-up shows.
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.05 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    noise = step._noise(model, (), jnp.int32(0), batch, jnp.int32(0), step.phase_key(model, 0, 0))

    def loss(params):
        metrics = objective.forward(params, None, batch, noise, loop)
        return objective.loss(metrics, objective.counts(batch)), metrics

    (value, metrics), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        jax.tree.unflatten(tree, moved)
    )
    return {"loss": value, "metrics": metrics, "gradients": gradients}


@pytest.mark.parametrize(
    ("model", "remat"),
    [
        (DROPOUT, "none"),
        pytest.param(DROPOUT, "dots", marks=pytest.mark.nightly),
        (MODERN, "dots"),
    ],
    ids=["dropout-none", "dropout-dots", "modern"],
)
def test_loss_and_gradients_are_those_of_the_examples_by_themselves(model, remat):
    alone, packed = (result(batch, model, Loop(remat=remat)) for batch in both())
    assert_close(alone, packed, 2e-6)
    assert float(packed["metrics"]["next_sentence_loss"][1]) == 16


def test_examples_of_a_row_do_not_see_each_other():
    """Other pieces in the rest of the rows change nothing of the first examples."""
    _, packed = both()
    numbers = packed["example_numbers"]
    other = packed | {
        "input_ids": np.where(numbers > 1, 99 - packed["input_ids"], packed["input_ids"])
    }
    model = samples.without_dropout()
    params = heads.init_params(model, jax.random.key(0))
    logits = [
        heads.pretraining_logits(model, params, jax.tree.map(jnp.asarray, batch), None, Loop())
        for batch in (packed, other)
    ]
    (masked, following), (others_masked, others_following) = logits
    first = np.take_along_axis(numbers, packed["masked_lm_positions"], axis=1) == 1
    np.testing.assert_array_equal(masked[first], others_masked[first])
    np.testing.assert_array_equal(following[:, 0], others_following[:, 0])
    assert not np.array_equal(masked[~first], others_masked[~first])


def test_an_example_s_noise_is_that_of_its_own_row():
    """Neither the row nor the width fills whole words of four draws."""
    alone, packed = both()
    key, size = jax.random.key(5), 30
    rows = layers.RowNoise.of(key, jnp.asarray(alone["rows"])).at(3)
    shared = layers.PackedNoise.of(
        key,
        jnp.asarray(packed["examples"]),
        *(jnp.asarray(packed[n][:, :size]) for n in ("example_numbers", "positions")),
    ).at(3)
    tokens, drawn = shared.keep((6, size, 6), 0.5), rows.keep((16, size, 6), 0.5)
    scores = shared.keep_scores((6, 3, size, size), 0.5)
    of_scores = rows.keep_scores((16, 3, size, size), 0.5)
    assert shared.scale(0.1) == rows.scale(0.1)
    begins = packed["example_starts"][SLOTS]
    assert (begins % 4 != 0).any()
    for i, (row, begin) in enumerate(zip(np.nonzero(SLOTS)[0], begins, strict=True)):
        length = min(alone["input_mask"][i].sum(), size - begin)
        here = slice(begin, begin + length)
        np.testing.assert_array_equal(tokens[row, here], drawn[i, :length])
        np.testing.assert_array_equal(scores[row, :, here, here], of_scores[i, :, :length, :length])


LAYOUTS = [
    (4, Parallelism(state="zero3", accumulation=(2,), remat="dots"), "global"),
    *(
        pytest.param(*layout, marks=pytest.mark.long)
        for layout in [
            (2, Parallelism(state="zero1", accumulation=(4,), layer_loop="unroll"), "global"),
            (4, Parallelism(tensor=2), "global"),
            (2, Parallelism(state="zero1"), "per_replica"),
        ]
    ),
]


@pytest.mark.parametrize(("devices", "parallelism", "clip"), LAYOUTS)
def test_any_layout_learns_the_same_of_packed_rows(devices, parallelism, clip):
    optimizer = samples.OPTIMIZER
    if clip == "per_replica":
        optimizer = dataclasses.replace(optimizer, clip=clip, reference_replicas=4)
    packed = Packed(3, 6, 0.15, 3)

    def after(devices, parallelism):
        return samples.run(
            3, devices, optimizer=optimizer, parallelism=parallelism, shape=LONGER, packed=packed
        )

    (state, metrics), (alone, alone_metrics) = after(devices, parallelism), after(1, Parallelism())
    assert_close(state["params"], alone["params"], 1e-5)
    for ours, theirs in zip(metrics, alone_metrics, strict=True):
        np.testing.assert_allclose(ours["masked_lm_loss"], theirs["masked_lm_loss"], rtol=1e-5)
        assert ours["next_sentence_loss"][1] == theirs["next_sentence_loss"][1] > 8
        assert ours["filled"][0] / ours["filled"][1] > 0.9
