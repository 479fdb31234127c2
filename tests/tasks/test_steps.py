"""Steps of a task over devices: however they are laid, the same as on one, with dropout on."""

import jax
import kinds
import numpy as np
import pytest
import samples
from compare import assert_close

from bert_jax.config import Adapt, Parallelism
from bert_jax.config.task_kinds import KINDS, TRAINABLE_KINDS
from bert_jax.embeddings import packing
from bert_jax.tasks.adaptation import compile_forward
from bert_jax.tasks.rows import TaskBatches, eval_batches
from bert_jax.training import feed, optimizer, step
from bert_jax.training import mesh as mesh_lib

STEPS, EXAMPLES = 3, 8


def train(objective, rows, parallelism=None, devices=4, steps=STEPS, sharing=False):
    """Steps over shuffled rows, which texts may share; the state and each step's sums."""
    parallelism = parallelism or Parallelism()
    settings, mesh = kinds.OPTIMIZER, samples.mesh_of(devices, parallelism)
    batches = TaskBatches(rows, kinds.TOKENIZER.pad_id, EXAMPLES, 3)
    abstract = step.abstract_state(objective, settings, parallelism, mesh)
    state = jax.device_get(step.init_state(objective, settings, 0))
    fixed = None
    if objective.reads in ("pooled", "tokens"):
        base = kinds.base_params(objective.reads)
        if objective.adapt.how == "full":
            state["params"] |= base
        else:
            fixed = feed.put(base, mesh_lib.replicated(mesh))
    state = feed.put(state, jax.tree.map(lambda s: s.sharding, abstract))
    parts = parallelism.accumulation_of(0)
    make = step.make_train_step(step.StepSpec(objective, settings, parallelism, parts, mesh), 9)
    size = EXAMPLES * rows.rows_per_example
    everything, sharding = np.arange(size), mesh_lib.batch_sharding(mesh)
    seen = []
    for number in range(steps):
        host = batches.batch(number, everything)
        if sharing:
            host = packing.pack_batch(host, batches.lengths(number), size // (devices * parts))
        batch = feed.place(host, everything, size, sharding)
        window = jax.device_put(step.empty_window(objective.metrics), mesh_lib.replicated(mesh))
        key = step.phase_key(objective.model, 0, 0)
        state, window = make(state, window, batch, key, fixed)
        seen.append(jax.device_get(window))
    return jax.device_get(state), seen


def of_kind(kind, adapt=Adapt()):  # noqa: B008
    """An objective, and rows of six examples."""
    rows = kinds.kind_of(kind).rows(kinds.examples(kind, 6))
    return kinds.objective(kind, adapt), rows


def assert_same(found, expected):
    (state, seen), (other_state, other_seen) = found, expected
    for ours, theirs in zip(seen, other_seen, strict=True):
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], 1e-5, 1e-5, err_msg=name)
    assert_close(state["params"], other_state["params"], 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(),
        Parallelism(state="zero3", tensor=2, accumulation=2),
    ],
    ids=["replicated", "zero3"],
)
def test_a_choice_is_learned_alike_on_four_devices(parallelism):
    """Rows of one example must meet on one device, in one micro-batch."""
    found, expected = train(*of_kind("choice"), parallelism), train(*of_kind("choice"), devices=1)
    for state in (found[0], expected[0]):
        # It is added to all choices alike, so that its gradient is rounding, which Adam blows up.
        state["params"]["head"].pop("bias", None)
    assert_same(found, expected)
    for window in found[1]:
        assert window["bad_steps"][0] == 0 and window["loss"][1] == EXAMPLES
    assert len({float(window["loss"][0]) for window in found[1]}) == STEPS


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "adapt", "parallelism"),
    [
        # Micro-batches have different numbers of words, and count as one batch.
        ("tag", Adapt(), Parallelism(state="zero1", accumulation=2)),
        ("classify", Adapt(how="lora", lora_rank=2), Parallelism(tensor=2, accumulation=2)),
    ],
    ids=["tags", "thin matrices"],
)
def test_others_are_learned_alike_on_four_devices(kind, adapt, parallelism):
    task = of_kind(kind, adapt)
    assert_same(train(*task, parallelism), train(*task, devices=1))


@pytest.mark.parametrize(
    ("kind", "adapt"),
    [
        ("pair", Adapt(pooling="mean")),
        pytest.param("choice", Adapt(how="lora", lora_rank=2), marks=pytest.mark.long),
    ],
)
def test_texts_that_share_rows_are_as_those_alone(kind, adapt):
    """With the same dropout, and with segments of pairs."""
    (state, seen), (other, other_seen) = (
        train(*of_kind(kind, adapt), devices=1, steps=1, sharing=sharing)
        for sharing in (False, True)
    )
    for ours, theirs in zip(seen, other_seen, strict=True):
        assert theirs.pop("filled")[1] < ours.pop("filled")[1]
        for name in ours:
            np.testing.assert_allclose(theirs[name], ours[name], 1e-6, err_msg=name)
    gradient, other_gradient = (optimizer.moments(x["optimizer"]).mu for x in (state, other))
    assert_close(other_gradient, gradient, 2e-6)  # of the largest entry, as in test_similar.py


def test_which_kinds_share_rows():
    pooled = {"classify", "pair", "regress", "choice", "rank"}
    vectors = {"similar", "sparse", "multi_vector"}
    for on_cpu, expected in ((True, pooled | vectors), (False, vectors)):
        classes = {kind: KINDS[kind].implementing_class for kind in TRAINABLE_KINDS}
        assert {kind for kind, x in classes.items() if x.packs_rows(x, on_cpu)} == expected


def test_evaluation_is_the_same_however_rows_lie():
    """Of cut parameters on four devices, in other batches; rows come back in their order."""
    objective = kinds.objective("tag")
    kind = kinds.kind_of("tag")
    rows = kind.rows(kinds.examples("tag", 7))
    params = kinds.base_params("tokens") | {
        "head": objective.init_params(jax.random.key(0))["head"]
    }
    found = []
    for devices, parallelism, size in (
        (1, Parallelism(), 3),
        (4, Parallelism(state="zero3", tensor=2), 4),
    ):
        mesh = samples.mesh_of(devices, parallelism)
        batches = eval_batches(rows, kinds.TOKENIZER.pad_id, size)
        places = jax.tree.map(
            lambda s: s.sharding,
            step.abstract_state(objective, kinds.OPTIMIZER, parallelism, mesh)["params"],
        )
        forward = compile_forward(objective, parallelism, mesh)
        found.append(forward(feed.put(params, places), None, batches, rows))
    (ours, loss), (theirs, other_loss) = found
    assert [len(row) for row in ours] == rows.lengths.tolist()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert loss == pytest.approx(other_loss, rel=1e-5)
    # By hand: the mean over words.
    losses = []
    for logits, tags, weights in zip(
        ours, rows.token_arrays["targets"], rows.token_arrays["target_weights"], strict=True
    ):
        logits = logits.astype(np.float64)
        nll = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(tags)), tags]
        losses += nll[weights > 0].tolist()
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
