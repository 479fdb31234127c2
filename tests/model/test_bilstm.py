"""ELMo's language models against NumPy in float64, and what each direction sees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lstm import lstm
from scipy.special import logsumexp

from bert_jax.config import Data, Model
from bert_jax.conformance.rule import difference
from bert_jax.errors import InputError
from bert_jax.model import flops, heads, layers
from bert_jax.model.attention import Packing
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import attention_probabilities, encode, of_text
from bert_jax.training import objective as objective_lib

CFG = Model(
    kind="bilstm",
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=1,
    intermediate_size=24,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
)
HALF = CFG.hidden_size // 2
LENGTHS = (12, 7, 3)
LEARNED = objective_lib.of(
    CFG,
    Data(objective="bidirectional_lm", eval_sequence_length=12, eval_max_predictions_per_seq=10),
)


@pytest.fixture(scope="module")
def params():
    """Large enough for gates that close, and for states that are clipped."""
    drawn = heads.init_params(CFG, jax.random.key(0))
    leaves, tree = jax.tree.flatten(drawn)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    large = [
        0.8 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, large)


@pytest.fixture(scope="module")
def batch():
    """Three rows, of which every piece between [CLS] and [SEP] is predicted."""
    ids = np.random.default_rng(0).integers(5, 60, (3, 12))
    mask = np.arange(12) < np.array(LENGTHS)[:, None]
    text = mask[:, 2:] > 0
    arrays = {
        "input_ids": ids * mask,
        "segment_ids": np.zeros_like(ids),
        "input_mask": mask,
        "masked_lm_positions": np.arange(1, 11) * text,
        "masked_lm_ids": ids[:, 1:-1] * text,
    }
    made = {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}
    return made | {"masked_lm_weights": jnp.asarray(text, jnp.float32)}


def hidden_of(params, batch, outputs="all", mask=None, cfg=CFG, noise=None):
    encoder = heads.merge(cfg, params).encoder
    mask = batch["input_mask"] if mask is None else mask
    return encode(
        encoder, cfg, batch["input_ids"], batch["segment_ids"], mask, noise, Loop(), outputs
    )


def test_states_and_losses_are_those_of_numpy_in_float64(params, batch):
    """Of rows without their padding; it changes nothing."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table, stacked = wide["encoder"]["embeddings"]["word"]["embedding"], wide["encoder"]["layers"]
    bias = wide["masked_lm"]["output_bias"][: CFG.vocab_size]
    states = np.asarray(hidden_of(params, batch))
    sums, hits, clipped = np.zeros(2), np.zeros(2), 0
    for row, length in enumerate(LENGTHS):
        ids = np.asarray(batch["input_ids"])[row, :length]
        for direction, order in enumerate((slice(None), slice(None, None, -1))):
            x = table[ids[order]]
            every = [x]
            for layer in range(CFG.num_hidden_layers):
                made = lstm(
                    x,
                    stacked["gates"]["kernel"][layer, direction],
                    stacked["gates"]["bias"][layer, direction],
                    stacked["projection"]["kernel"][layer, direction],
                )
                clipped += (np.abs(made) == 3).sum()
                x = made if layer == 0 else x + made
                every.append(x)
            ours = states[:, row, :length, direction * HALF :][..., :HALF]
            assert max(difference(ours, np.array(every)[:, order]).values()) < 3e-6
            # Of each piece of the text the state that comes before it in this direction.
            logits = x[:-2] @ table[: CFG.vocab_size].T + bias
            targets = ids[order][1:-1]
            of_targets = logits[np.arange(len(targets)), targets]
            sums[direction] += (logsumexp(logits, axis=1) - of_targets).sum()
            hits[direction] += (logits.argmax(axis=1) == targets).sum()
    assert clipped > 10
    count = sum(LENGTHS) - 2 * len(LENGTHS)
    found = LEARNED.forward(params, None, batch, None, Loop("dots"))
    assert tuple(found) == LEARNED.metrics
    for direction, task in enumerate(("next_piece", "previous_piece")):
        np.testing.assert_allclose(found[f"{task}_loss"], [sums[direction], count], rtol=1e-5)
        np.testing.assert_array_equal(found[f"{task}_accuracy"], [hits[direction], count])
    loss = LEARNED.loss(found, LEARNED.counts(batch))
    np.testing.assert_allclose(loss, sums.sum() / count, rtol=1e-5)


def influence(of, places):
    """Which inputs each of `of`'s outputs hangs on, bool: gradients that are not 0."""
    jacobian = np.asarray(jax.jacrev(of)(jnp.zeros((places, HALF))))
    return np.abs(jacobian).sum(axis=-1) > 0


def with_rows(params, extra):
    """Word embeddings with something added to the first rows."""
    table = params["encoder"]["embeddings"]["word"]["embedding"]
    words = {"embedding": table.at[: len(extra)].add(extra)}
    return params | {"encoder": params["encoder"] | {"embeddings": {"word": words}}}


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_no_state_sees_what_its_direction_has_not_read(params, batch, dropout):
    cfg = dataclasses.replace(CFG, hidden_dropout_prob=dropout)
    places = jnp.arange(12)
    row = {"input_ids": places[None], "segment_ids": jnp.zeros((1, 12), jnp.int32)}
    noise = layers.RowNoise.of(jax.random.key(0), jnp.zeros(1, jnp.uint32)) if dropout else None
    mix = jax.random.normal(jax.random.key(2), (HALF,))
    for direction in (0, 1):

        def of(extra, direction=direction):
            given = with_rows(params, extra)
            states = hidden_of(given, row, "all", jnp.ones((1, 12), jnp.int32), cfg, noise)
            return jnp.split(states[:, 0], 2, axis=-1)[direction] @ mix

        found = influence(of, 12)
        read = places <= places[:, None] if direction == 0 else places >= places[:, None]
        assert not (found & ~np.asarray(read)).any()
        if not dropout:
            np.testing.assert_array_equal(found[0], np.eye(12, dtype=bool))
            assert (found[1:] == np.asarray(read)).all()


def test_no_prediction_sees_its_piece_nor_what_comes_after(params):
    """The softmax is kept out: its weights are the embeddings, too."""
    places = jnp.arange(12)
    row = {
        "input_ids": places[None],
        "segment_ids": jnp.zeros((1, 12), jnp.int32),
        "input_mask": jnp.ones((1, 12), jnp.int32),
        "masked_lm_positions": jnp.arange(1, 11)[None],
    }
    mix = jax.random.normal(jax.random.key(2), (12,))
    table = params["encoder"]["embeddings"]["word"]["embedding"]

    def of(extra):
        # What is read lies in the first rows; what is scored are others.
        logits = heads.bidirectional_logits(CFG, with_rows(params, extra), row, None, Loop())
        return logits[:, 0, :, 20:32] @ mix

    found, piece = influence(of, 12), jnp.arange(1, 11)[:, None]
    assert len(table) > 32
    np.testing.assert_array_equal(found[0], places < piece)
    np.testing.assert_array_equal(found[1], places > piece)


def test_texts_that_share_a_row_are_as_they_are_alone(params, batch):
    tokens = np.full((3, 12), 24)
    places, ids, positions = np.zeros(24, int), np.zeros(24, int), np.zeros(24, int)
    start = 0
    for text, length in enumerate(LENGTHS):
        here = np.arange(start, start + length)
        tokens[text, :length] = here
        places[here], positions[here] = text * 12 + np.arange(length), np.arange(length)
        ids[here] = np.asarray(batch["input_ids"])[text, :length]
        start += length
    packing = Packing(*(jnp.asarray(a) for a in (positions[None], tokens, places[None])))
    row = {"input_ids": jnp.asarray(ids)[None], "segment_ids": jnp.zeros((1, 24), jnp.int32)}
    packed = np.asarray(hidden_of(params, row, mask=packing))[:, 0]
    alone = np.asarray(hidden_of(params, batch))
    start = 0
    for text, length in enumerate(LENGTHS):
        here = packed[:, start : start + length]
        np.testing.assert_allclose(here, alone[:, text, :length], atol=1e-5)
        start += length


def test_a_text_is_what_each_direction_comes_to(params, batch):
    hidden = np.asarray(hidden_of(params, batch, "last"))
    ends = hidden[np.arange(3), np.array(LENGTHS) - 1, :HALF]
    wanted = np.concatenate([ends, hidden[:, 0, HALF:]], axis=1)
    found = of_text(CFG, jnp.asarray(hidden), batch["input_mask"])
    np.testing.assert_array_equal(found, wanted)


def test_operations_are_those_of_its_products():
    gates, projection = 2 * HALF * 4 * 24, 24 * HALF
    token = 2 * CFG.num_hidden_layers * (gates + projection)
    assert flops.forward_flops(CFG, 3, 12, 0, 0) == 2 * 36 * token
    softmax = flops.forward_flops(CFG, 3, 12, 10, 0) - flops.forward_flops(CFG, 3, 12, 0, 0)
    assert softmax == 2 * 3 * 10 * 2 * HALF * CFG.vocab_size


def test_there_is_no_attention_to_show(params):
    with pytest.raises(InputError, match=r"model\.kind=bilstm: has no attention"):
        attention_probabilities(heads.merge(CFG, params).encoder, CFG, jnp.zeros((2, 12, 16)))
