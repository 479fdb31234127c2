"""experiments/elmo.py against NumPy in float64, and as an encoder that the rest can use."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken import fails
from lstm import lstm
from scipy.special import logsumexp

from bert_jax import config
from bert_jax.config import code
from bert_jax.errors import InputError
from bert_jax.model import heads
from bert_jax.model.attention import Packing
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import attention_probabilities, encode, text_vector
from bert_jax.tools.conformance.rule import relative_differences
from bert_jax.training import custom_code
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective as objective_lib

FILE = pathlib.Path(__file__).parents[1] / "experiments" / "elmo.py"
HALF, LENGTHS, CLS, SEP = 8, (12, 7, 3), 1, 2


@pytest.fixture(scope="module")
def elmo():
    """The experiment, with a small encoder."""
    experiment = config.load(str(FILE))
    small = {"vocab_size": 60, "hidden_size": 2 * HALF, "intermediate_size": 24}
    model = dataclasses.replace(experiment.model, max_position_embeddings=64, **small)
    return dataclasses.replace(experiment, model=model)


@pytest.fixture(scope="module")
def learned(elmo):
    return objective_lib.pretraining_objective(elmo.model, elmo.data)


@pytest.fixture(scope="module")
def params(learned):
    """Large enough for gates that close, and for states that are clipped."""
    drawn = learned.init_params(jax.random.key(0))
    leaves, tree = jax.tree.flatten(drawn)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    large = [
        0.7 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, large)


@pytest.fixture(scope="module")
def texts():
    """Rows of ids, of which the first has two documents."""
    rng = np.random.default_rng(0)
    made = [np.r_[CLS, rng.integers(5, 60, length - 2), SEP] for length in LENGTHS]
    made[0][5] = SEP
    return made


def batch_of(texts):
    """A batch in which each row's second piece is masked, and the last row does not count."""
    ids = np.stack([np.pad(text, (0, LENGTHS[0] - len(text))) for text in texts])
    mask = np.arange(LENGTHS[0]) < np.array(LENGTHS)[:, None]
    arrays = {
        "input_ids": np.where(np.arange(LENGTHS[0]) == 1, 4, ids),
        "segment_ids": np.zeros_like(ids),
        "input_mask": mask,
        "masked_lm_positions": np.array([[1, 0]] * 3),
        "masked_lm_ids": np.stack([ids[:, 1], ids[:, 1] * 0], axis=1),
    }
    made = {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}
    weights = {"masked_lm_weights": [[1.0, 0.0]] * 3, "row_weights": [1.0, 1.0, 0.0]}
    return made | {name: jnp.asarray(x) for name, x in weights.items()}, jnp.asarray(ids)


def hidden_of(elmo, params, ids, mask, outputs="all"):
    encoder = heads.merge(elmo.model, params).encoder
    return encode(encoder, elmo.model, ids, jnp.zeros_like(ids), mask, None, Loop(), outputs)


def test_states_and_losses_are_those_of_numpy_in_float64(elmo, learned, params, texts):
    """Of rows without their padding; it changes nothing."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table, stacked = wide["encoder"]["embeddings"]["word"]["embedding"], wide["encoder"]["layers"]
    bias, (batch, whole) = wide["softmax"]["output_bias"][:60], batch_of(texts)
    states = np.asarray(hidden_of(elmo, params, whole, batch["input_mask"]))
    sums, hits, count, clipped = np.zeros(2), np.zeros(2), 0, 0
    for row, ids in enumerate(texts):
        for direction, order in enumerate((slice(None), slice(None, None, -1))):
            x = table[ids[order]]
            every = [x]
            for layer in range(2):
                made = lstm(
                    x,
                    stacked["gates"]["kernel"][layer, direction],
                    stacked["gates"]["bias"][layer, direction],
                    stacked["projection"]["kernel"][layer, direction],
                )
                clipped += (np.abs(made) == 3).sum()
                x = made if layer == 0 else x + made
                every.append(x)
            ours = states[:, row, : len(ids), direction * HALF :][..., :HALF]
            assert max(relative_differences(ours, np.array(every)[:, order]).values()) < 1e-5
            if not batch["row_weights"][row]:
                continue
            # Of each piece of the text the state that comes before it in this direction.
            logits, targets = x[:-2] @ table[:60].T + bias, ids[order][1:-1]
            logits, targets = logits[targets != SEP], targets[targets != SEP]
            of_targets = logits[np.arange(len(targets)), targets]
            sums[direction] += (logsumexp(logits, axis=1) - of_targets).sum()
            hits[direction] += (logits.argmax(axis=1) == targets).sum()
            count += len(targets) * (direction == 0)
    assert clipped
    found = learned.forward(params, None, batch, None, Loop("dots"))
    assert tuple(found) == learned.metrics
    for direction, piece in enumerate(("next_piece", "previous_piece")):
        np.testing.assert_allclose(found[f"{piece}_loss"], [sums[direction], count], rtol=1e-5)
        np.testing.assert_array_equal(found[f"{piece}_accuracy"], [hits[direction], count])
    loss = learned.loss(found, learned.counts(batch))
    np.testing.assert_allclose(loss, sums.sum() / count, rtol=1e-5)


@pytest.mark.long
def test_it_keeps_to_the_protocols_and_all_of_it_learns(elmo, learned, params, texts):
    custom_code.require_valid(elmo, mesh_lib.make_mesh(elmo.parallelism))
    batch, _ = batch_of(texts)

    def loss(params):
        return learned.loss(learned.forward(params, None, batch, None, Loop()), (19.0, 19.0))

    for gradient in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
        assert np.abs(gradient).max() > 0


def test_texts_that_share_a_row_are_as_they_are_alone(elmo, params, texts):
    total = sum(LENGTHS)
    tokens, places, start = np.full((3, 12), total), [], 0
    for number, length in enumerate(LENGTHS):
        tokens[number, :length] = start + np.arange(length)
        places += (number * 12 + np.arange(length)).tolist()
        start += length
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    packing = Packing(*(jnp.asarray(a) for a in (positions[None], tokens, [places])))
    packed = hidden_of(elmo, params, jnp.asarray(np.concatenate(texts))[None], packing)[:, 0]
    batch, whole = batch_of(texts)
    alone = np.asarray(hidden_of(elmo, params, whole, batch["input_mask"]))
    there = np.asarray(batch["input_mask"]) > 0
    np.testing.assert_allclose(packed, alone[:, there], atol=1e-5)


def test_a_text_is_what_each_direction_comes_to_and_has_no_attention(elmo, params, texts):
    batch, whole = batch_of(texts)
    hidden = np.asarray(hidden_of(elmo, params, whole, batch["input_mask"], "last"))
    ends = hidden[np.arange(3), np.array(LENGTHS) - 1, :HALF]
    wanted = np.concatenate([ends, hidden[:, 0, HALF:]], axis=1)
    found = text_vector(elmo.model, jnp.asarray(hidden), batch["input_mask"])
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(InputError, match=r"model\.code=.*has no attention"):
        attention_probabilities(heads.merge(elmo.model, params).encoder, elmo.model, found)


def test_tables_have_rows_of_it():
    for name in ("objectives", "objectives_mini"):
        table = config.load_table(str(FILE.parents[1] / "tables" / f"{name}.py"))
        (row,) = [row for row in table.rows if row.name == "elmo"]
        assert code.code_references(row.experiment) == code.code_references(config.load(str(FILE)))


@pytest.mark.long
def test_a_run_of_the_kind_that_it_once_was_is_refused_by_name(tmp_path):
    text = config.to_json(config.load(str(FILE))).replace('"kind": "bert"', '"kind": "bilstm"')
    (tmp_path / "experiment.json").write_text(text)
    fails(f"evaluate --workdir {tmp_path}", "model.kind='bilstm'")
