"""Slices: parts of the devices with a state each, whose gradients alone travel between them."""

import functools

import jax
import numpy as np
import pytest
import samples
from compare import assert_close
from small_run import on_eight
from test_sharding import MUON

from bert_jax import config
from bert_jax.config import Data, Parallelism
from bert_jax.errors import InputError
from bert_jax.pretraining.pretraining_job import require_runnable
from bert_jax.tools.plan import hlo, schedule
from bert_jax.training import step
from bert_jax.training.objective import Pretraining

PACKED = Data(objective="mlm", attention="per_document")
ZERO3 = Parallelism(state="zero3", slices=2)
ZERO1 = Parallelism(state="zero1", slices=2, accumulation=2)


@functools.lru_cache
def undivided(**more):
    """Three steps on one device that holds everything."""
    return samples.run(3, **more)


def check(devices: int, parallelism: Parallelism, **more) -> None:
    """Losses of each step, and parameters, against one device that holds everything."""
    state, seen = samples.run(3, devices, parallelism=parallelism, **more)
    alone, expected = undivided(**more)
    for ours, theirs in zip(seen, expected, strict=True):
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, err_msg=name)
    # Adam divides by the root of a square: where a gradient is all but nothing (a bias of two
    # scores), that lifts its rounding, by the CPU to 2.0e-6. A row too few is 1e-3.
    assert_close(state["params"], alone["params"], 4e-6)


def check_eight() -> None:
    for slices in (1, 2, 4):
        check(8, Parallelism(state="zero1", slices=slices))
        check(8, Parallelism(state="zero3", slices=slices), data=PACKED)
    check(8, Parallelism(slices=2))
    check(8, Parallelism(state="zero3", slices=2, tensor=2))
    check(8, Parallelism(state="zero1", slices=2), optimizer=MUON)


@pytest.mark.parametrize(
    "parallelism", [pytest.param(ZERO1, marks=pytest.mark.long), ZERO3], ids=lambda p: p.state
)
def test_slices_change_nothing(parallelism):
    check(4, parallelism)


@pytest.mark.nightly
def test_slices_change_nothing_on_eight_devices():
    on_eight("import test_slices; test_slices.check_eight()")


@pytest.mark.long
@pytest.mark.parametrize("parallelism", [ZERO1, ZERO3], ids=lambda p: p.state)
def test_between_slices_only_sums_of_shards_travel(parallelism):
    """In the compiled step: each byte of the gradient once a slice, and some numbers."""
    objective, parts = Pretraining(samples.MODEL), parallelism.accumulation_of(0)
    mesh = samples.mesh_of(4, parallelism)
    abstract = step.abstract_state(objective, samples.OPTIMIZER, parallelism, mesh)
    spec = step.StepSpec(objective, samples.OPTIMIZER, parallelism, parts, mesh)
    batch = samples.train_batches().batch(0, np.arange(8))
    window, key = step.empty_window(objective.metrics), step.phase_key(samples.MODEL, 0, 0)
    train_step = step.make_train_step(spec, samples.TOTAL)
    compiled = train_step.lower(abstract, window, batch, key).compile()
    program = schedule.read_program(hlo.parse(compiled.as_text()))
    across = [one for one in program.collectives if len({n // 2 for n in one.group}) > 1]
    early = parallelism == ZERO3  # behind the next layer's work
    assert {one.kind for one in across} == {"all-reduce"}
    assert {one.where for one in across} == ({"entry", "loop"} if early else {"entry"})
    assert len(program.collectives) > 2 * len(across)
    sent = sum(one.count * one.payload for one in across)
    gradient = sum(4 * leaf.size for leaf in jax.tree.leaves(abstract["params"]))
    numbers = 4 * 2 * (len(window) + 2)  # metrics and counts
    assert gradient / 2 <= sent <= gradient / 2 + numbers


@pytest.mark.long
def test_groups_of_rows_that_slices_do_not_divide_are_named():
    settings = ["parallelism.slices=2", "optimizer.clip=per_replica"]
    settings += ["optimizer.reference_replicas=2"]
    experiment = config.override(config.load("experiments/tiny.py"), settings)
    with pytest.raises(InputError, match=r"optimizer.reference_replicas=2.*4 devices"):
        require_runnable(experiment, samples.mesh_of(4, experiment.parallelism))
