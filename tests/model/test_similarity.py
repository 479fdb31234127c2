"""What is learned by comparing vectors, against NumPy in float64 written from the papers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from bert_jax.model import similarity
from bert_jax.model.similarity import Texts

SCALE = 20.0


def made(examples=12, behind=2, width=8):
    """Vectors, keys and weights; some texts are alike, and one example has no weight."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(examples, 1 + behind, width)).astype(np.float32)
    keys = np.arange(examples * (1 + behind), dtype=np.uint32).reshape(examples, -1)
    alike = {
        (3, 0): (0, 0),  # asks the same as another
        (5, 1): (1, 1),  # has the same answer
        (6, 1): (2, 0),  # is answered by what another asks
        (7, 2): (4, 1),  # an answer elsewhere is no answer here
    }
    for one, other in alike.items():
        if one[1] <= behind:  # like texts have like vectors
            keys[one], vectors[one] = keys[other], vectors[other]
    weights = np.ones(examples, np.float32)
    weights[-1] = 0.0
    return vectors, keys, weights


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def reference(vectors, keys, weights):
    """Returns the mean loss and the share of hits, one candidate after the other."""
    v = unit(vectors.astype(np.float64))
    losses, hits = [], []
    present = [i for i in range(len(v)) if weights[i]]
    for i in present:
        ask, answer = keys[i, 0], keys[i, 1]
        forward = [(v[i, 0] @ v[i, 1]) * SCALE]
        for j in present:
            for n in range(1, keys.shape[1]):
                same = keys[j, n] in (ask, answer) or (n == 1 and keys[j, 0] == ask)
                if (j, n) != (i, 1) and not same:
                    forward.append((v[i, 0] @ v[j, n]) * SCALE)
        back = [forward[0]]
        for j in present:
            same = keys[j, 0] in (ask, answer) or keys[j, 1] == answer
            if j != i and not same:
                back.append((v[i, 1] @ v[j, 0]) * SCALE)
        losses.append(sum(np.log(np.exp(x).sum()) - x[0] for x in (forward, back)) / 2)
        hits.append(forward[0] >= max(forward))
    return np.mean(losses), np.mean(hits)


@pytest.mark.parametrize("behind", [1, 2])
def test_contrastive_equals_the_loop_over_candidates(behind):
    arrays = vectors, keys, weights = made(behind=behind)
    loss, hits = jax.jit(lambda *x: similarity.contrastive_loss(Texts(*x), SCALE))(*arrays)
    wanted = reference(vectors, keys, weights)
    assert loss[0] / loss[1] == pytest.approx(wanted[0], rel=1e-6)
    assert hits[0] / hits[1] == pytest.approx(wanted[1])


def total(vectors, keys, weights, axes=()):
    sums, _ = similarity.contrastive_loss(Texts(vectors, keys, weights), SCALE, axes)
    return sums[0]


def test_candidates_are_those_of_all_devices_and_gradients_come_back():
    vectors, keys, weights = made()
    whole, wanted = jax.value_and_grad(total)(vectors, keys, weights)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data_0", "data_1"))
    axes = mesh.axis_names
    cut = PartitionSpec(axes)

    def shard(*arrays):
        value, gradient = jax.value_and_grad(functools.partial(total, axes=axes))(*arrays)
        return jax.lax.psum(value, axes), gradient

    over = jax.shard_map(
        shard, mesh=mesh, in_specs=(cut,) * 3, out_specs=(PartitionSpec(), cut), check_vma=False
    )
    value, gradient = jax.jit(over)(vectors, keys, weights)
    assert value == pytest.approx(float(whole), rel=1e-6)
    np.testing.assert_allclose(gradient, wanted, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.long
def test_gradient_of_the_first_text_equals_float64():
    vectors, keys, weights = made(examples=9)
    gradient = np.asarray(jax.grad(total)(vectors, keys, weights))
    step, count = 1e-5, weights.sum()
    for place in ((0, 0, 0), (1, 1, 3), (2, 2, 5)):
        ends = []
        for sign in (1, -1):
            moved = vectors.astype(np.float64)
            moved[place] += sign * step
            ends.append(reference(moved, keys, weights)[0] * count)
        assert gradient[place] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-4)


def test_scored_and_distilled_equal_numpy():
    vectors, keys, weights = made(behind=1)
    rng = np.random.default_rng(1)
    scores = rng.uniform(-1, 1, len(vectors)).astype(np.float32)
    v = unit(vectors.astype(np.float64))
    sums = similarity.cosine_loss(Texts(vectors, keys, weights), scores)
    errors = ((v[:, 0] * v[:, 1]).sum(1) - scores) ** 2
    assert sums[0] / sums[1] == pytest.approx((errors * weights).sum() / weights.sum(), rel=1e-5)

    mine, wanted = v[:, 0], unit(rng.normal(size=v[:, 0].shape))
    there = weights > 0
    mean = np.mean((mine - wanted)[there] ** 2)  # over all numbers of all texts
    apart = (mine @ mine.T - wanted @ wanted.T)[there][:, there] ** 2
    arrays = (mine.astype(np.float32), wanted.astype(np.float32), weights)
    for geometry in (0.0, 5.0):
        sums = similarity.distillation_loss(*arrays, geometry=geometry)
        expected = mean + geometry / mine.shape[1] * apart.mean()
        assert sums[0] / sums[1] == pytest.approx(expected, rel=1e-5)


def test_pooling_reads_no_padding():
    hidden = np.random.default_rng(2).normal(size=(2, 5, 4)).astype(np.float32)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    wanted = {
        "mean": [hidden[0, :3].mean(0), hidden[1].mean(0)],
        "cls": [hidden[0, 0], hidden[1, 0]],
        "last": [hidden[0, 2], hidden[1, 4]],
    }
    for pooling, vectors in wanted.items():
        found = similarity.pool(jnp.asarray(hidden), jnp.asarray(mask), pooling)
        np.testing.assert_allclose(found, vectors, rtol=1e-5, atol=1e-6)
