"""Devices that err and compute on: who is found by a replay, and what the run does then."""

import dataclasses
import json
import socket
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from broken import call
from compare import assert_identical
from jax import lax
from small_run import OBJECTIVES, assert_same_run, final_state, on_eight, pretrain

from bert_jax.checkpoints.load import Restored
from bert_jax.config import Parallelism, Run
from bert_jax.distributed.peers import Peers
from bert_jax.errors import InputError, Unavailable
from bert_jax.running import session, start
from bert_jax.running.start import RunState
from bert_jax.running.trainer import Trainer
from bert_jax.training import feed, recompute_check, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

# What errs: the device of this number along DATA, with rows that begin with this one (-1: any),
# in one bit of one number of one gradient: of the layer whose first query weight this is, or (not
# a number) of what is in no layer.
FAULT = {"device": -1, "rows": -1, "leaf": 0, "place": 0, "bit": 0, "layer": np.nan}


@dataclasses.dataclass(frozen=True)
class Faulty(Pretraining):
    """Has `fixed` for a FAULT, before devices add anything up."""

    def forward(self, params, fixed, batch, noise, loop):
        errs = lax.axis_index(mesh_lib.manual_axes()) == fixed["device"]
        errs &= (fixed["rows"] < 0) | (fixed["rows"] == batch["rows"][0].astype(jnp.int32))

        def gather(stacked):
            scanned, whole = loop.gather(stacked)

            def spoilt(scanned):
                layer = whole(scanned)
                is_it = layer.query.kernel[...].ravel()[0] == fixed["layer"]
                return passing(layer, fixed, errs & is_it)

            return scanned, spoilt

        encoder = dict(params["encoder"])
        layers = encoder.pop("layers")
        outside = params | {"encoder": encoder}
        params = passing(outside, fixed, errs & jnp.isnan(fixed["layer"]))
        params["encoder"]["layers"] = layers
        return super().forward(params, None, batch, noise, loop._replace(gather=gather))


@jax.custom_vjp
def passing(tree, fault, errs):
    return tree


def backward(kept, gradient):
    fault, errs = kept
    leaves, tree = jax.tree.flatten(gradient)
    for number, leaf in enumerate(leaves):
        bits = lax.bitcast_convert_type(leaf, jnp.uint32).ravel()
        flip = (errs & (fault["leaf"] == number)) * (
            jnp.uint32(1) << fault["bit"].astype(jnp.uint32)
        )
        flips = jnp.zeros_like(bits).at[fault["place"] % leaf.size].set(flip)
        leaves[number] = lax.bitcast_convert_type((bits ^ flips).reshape(leaf.shape), jnp.float32)
    return jax.tree.unflatten(tree, leaves), None, None


passing.defvjp(lambda tree, fault, errs: (tree, (fault, errs)), backward)

ROWS = 16  # of a batch
SHAPE = dataclasses.replace(samples.SHAPE, batch_size=ROWS)
PER_REPLICA = dataclasses.replace(samples.OPTIMIZER, clip="per_replica", reference_replicas=8)
LAYOUTS = {
    "zero3": (samples.OPTIMIZER, Parallelism(state="zero3", remat="dots")),
    "zero1": (samples.OPTIMIZER, Parallelism(state="zero1")),
    "replicated": (samples.OPTIMIZER, Parallelism(accumulation=2)),
    "groups": (PER_REPLICA, Parallelism()),
    "tensor": (samples.OPTIMIZER, Parallelism(state="zero3", tensor=2)),
    "slices": (samples.OPTIMIZER, Parallelism(state="zero3", slices=2)),
}


def finder(devices, layout):
    """The parameters, and what tells who errs, if it is sure and the last, by faults of replays."""
    spec = Faulty(samples.MODEL), *LAYOUTS[layout]
    mesh, rows = samples.mesh_of(devices, spec[-1]), np.arange(ROWS)
    places = jax.tree.map(lambda leaf: leaf.sharding, step.abstract_state(*spec, mesh))
    state = jax.device_put(step.init_state(*spec[:2], 0), places)
    program = step.make_fingerprints(step.StepSpec(*spec, spec[-1].accumulation_of(0), mesh))
    batch = samples.train_batches(SHAPE).batch(0, rows)
    batch = feed.place(batch, rows, ROWS, mesh_lib.batch_sharding(mesh))
    given = state, None, batch, step.phase_key(samples.MODEL, 0, 0), None

    def find(*faults):
        left = [FAULT | fault for fault in faults]

        def one(params, fixed, *rest):
            return program(params, left.pop(0), *rest)

        try:
            return recompute_check.RecomputeCheck(mesh).wrap_step(lambda *args: "done", one)(*given)
        except recompute_check.SilentCorruption as erred:
            return [device.id for device in erred.devices], erred.is_sure, erred.is_repeated

    return state["params"], find


def found(devices, layout, count):
    """Of so many that err at random, how many are named: always erring, and once with some rows."""
    rng, (params, find) = np.random.default_rng(0), finder(devices, layout)
    assert find({}) == "done"
    layers = params["encoder"]["layers"]
    first = layers["query"]["kernel"][:, 0, 0].tolist()
    inner, every = (len(jax.tree.leaves(tree)) for tree in (layers, params))
    always = once = 0
    for _ in range(count):
        layer = rng.choice([np.nan, *first])
        most = [devices, every - inner if np.isnan(layer) else inner, 2**20, 32, 2]
        device, leaf, place, bit, shift = rng.integers(most).tolist()
        fault = {"device": device, "leaf": leaf, "place": place, "bit": bit, "layer": float(layer)}
        always += find(fault, fault) == ([device], True, True)
        rows = (device - shift) % devices * (ROWS // devices)  # its own, or its neighbour's
        once += find(fault | {"rows": rows}, {}) == ([device], True, False)
    return always, once


@pytest.mark.long
def test_a_device_that_errs_is_named():
    assert found(4, "zero3", 6) == (6, 6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "count"),
    [
        pytest.param("zero3", 100, marks=pytest.mark.nightly),
        *(("groups", 20), ("slices", 20)),
        pytest.param("zero1", 20, marks=pytest.mark.nightly),
        pytest.param("replicated", 20, marks=pytest.mark.nightly),
    ],
)
def test_each_of_a_hundred_is_named(layout, count):
    code = (
        f"import test_recompute_check; found = test_recompute_check.found(8, {layout!r}, {count})"
    )
    on_eight(f"{code}; assert found == ({count}, {count}), found")


@pytest.mark.long
def test_devices_that_share_rows_are_named_together():
    assert finder(4, "tensor")[1]({"device": 1}, {}) == ([2, 3], True, False)


def seen(devices, *wrong):
    """What devices find: nothing but where (device, 0 for its own rows or 1 for others') errs."""
    found = np.zeros((devices, 2, 4), np.float32)
    for number, place in enumerate(wrong):
        found[place] = number + 1
    return found


def test_who_errs_is_decided_by_a_third_device():
    once, twice = seen(4, (2, 0)), seen(4, (0, 1), (2, 0))
    assert recompute_check.find_faulty([(1, once), (2, seen(4))]) == ([{2}, set()], True)
    assert recompute_check.find_faulty([(1, twice), (2, once)]) == ([{0, 2}, {2}], True)
    # Of two devices one that erred once is found by the other; one that keeps erring is not.
    one = seen(2, (1, 0))
    assert recompute_check.find_faulty([(1, one), (1, seen(2))]) == ([{1}, set()], True)
    assert recompute_check.find_faulty([(1, one), (1, one)]) == ([{0, 1}, {0, 1}], False)


def test_a_device_named_twice_is_the_last():
    """So is any that is named before a replay was clean again."""
    replays, last = recompute_check.RecomputeCheck(samples.mesh_of(4)), []
    for place, was_clean in ((1, True), (2, True), (3, False), (2, True)):
        replays._was_clean = was_clean
        last.append(replays._corruption([{place}, set()], is_sure=True).is_repeated)
    assert last == [False, False, True, True]


# --- the run ------------------------------------------------------------------------------------


def sicken(monkeypatch, sick, place=2):
    """A device errs in replays before these steps, the steps too; `sick` may change meanwhile."""
    make_train_step, make_fingerprints = step.make_train_step, step.make_fingerprints

    def train_step(*args):
        def one(state, *rest):
            wrong = 0.01 * (int(state["step"]) in sick)
            state, window = make_train_step(*args)(state, *rest)
            return state | {"params": jax.tree.map(lambda x: x + wrong, state["params"])}, window

        return one

    def replays(spec):
        def one(params, fixed, number, *rest):
            errs = {"device": place if int(number) in sick else -1}
            if isinstance(sick, set) and errs["device"] == place:
                sick.clear()
            faulty = Faulty(spec.objective.model, spec.objective.learns)
            program = make_fingerprints(spec._replace(objective=faulty))
            return program(params, FAULT | errs, number, *rest)

        return one

    monkeypatch.setattr(step, "make_train_step", train_step)
    monkeypatch.setattr(step, "make_fingerprints", replays)


@pytest.mark.parametrize(
    ("steps", "begun_at", "step", "left"),
    [
        ([8, 4], 0, 4, [4]),
        ([10, 5], 0, 5, [5]),
        ([8], 0, 0, []),  # before its first checkpoint a run began at step 0
        ([8, 6], 6, 6, [6]),  # a fork did not: its oldest checkpoint is the best there is
    ],
)
def test_no_step_after_the_last_good_check_is_kept(steps, begun_at, step, left):
    """The check before step 10 failed, that before step 5 did not."""
    state, saves = RunState(10, {}, {}, (), "", begun_at, []), mock.MagicMock()
    saves.checkpoints.steps = steps
    job = mock.Mock(**{"experiment.run": Run(replay_every=5, checkpoint_every=4)})
    context = mock.Mock(peers=Peers(0, 1, None, 1.0), saver=saves, job=job)
    error = recompute_check.SilentCorruption(jax.devices()[2:3], is_sure=True, is_repeated=False)

    def newest(context, at_most):
        del context
        return Restored(max((one for one in steps if one <= at_most), default=0), {}, {}, {})

    def delete_after(last, send):
        del send
        saves.checkpoints.steps = [one for one in steps if one <= last]

    saves.delete_after = delete_after
    with (
        mock.patch.object(start, "_restore_or_initialize", newest),
        mock.patch.object(start, "_make_state") as go_on,
    ):
        start.roll_back(state, error, "", context, None)
    assert (go_on.call_args.args[0].step, saves.checkpoints.steps) == (step, left)


@pytest.mark.long
def test_a_run_goes_back_before_a_device_that_erred(copy_of_run, finished_run, monkeypatch):
    """To step 4, since of step 8 nobody knows; and it is the run that nothing had disturbed."""
    sicken(monkeypatch, {6, 7, 10})
    outcome, shown = pretrain(copy_of_run / "small.py", copy_of_run / "w", "run.replay_every=5")
    device = f"device 2 of process 0 ({socket.gethostname()})"
    words = f"step 10: {device} came to another result of the same rows; rolling back to step 4"
    assert outcome == "finished" and words in shown
    assert_same_run(copy_of_run / "w", finished_run / "run")
    timings = map(json.loads, (copy_of_run / "w" / "timings.jsonl").read_text().splitlines())
    backs = [x for x in timings if x["kind"] == "roll_back"]
    assert [(x["step"], x["replayed"], x["erred"]) for x in backs] == [(4, 10, [2])]


@pytest.mark.long
def test_a_fork_goes_back_no_further_than_to_where_it_began(copy_of_run, monkeypatch):
    """Also where it was continued by its --workdir, which no longer names the run it left."""
    fork = "fork run/checkpoints/16 --set run.replay_every=4 --set run.checkpoint_every=8"
    assert call(f"{fork} --workdir alone") == (0, "")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train", mock.Mock(side_effect=Unavailable("at once")))
        assert call(f"{fork} --workdir w")[0] == 74
    sicken(monkeypatch, {16})
    outcome, shown = pretrain(copy_of_run / "w" / "experiment.json", copy_of_run / "w")
    assert outcome == "finished" and "; rolling back to step 16" in shown
    assert_identical(*(final_state(copy_of_run / name)[1] for name in ("w", "alone")))


@pytest.mark.long
def test_a_device_that_keeps_erring_ends_the_run(copy_of_run, finished_run, monkeypatch):
    """What it did is gone: the next start, on another machine, goes on from before."""
    settings = "run.replay_every=5", "run.checkpoint_every=2"
    run = copy_of_run / "small.py", copy_of_run / "w", *settings
    with monkeypatch.context() as patch:
        sicken(patch, range(6, 99))
        with pytest.raises(Unavailable, match=r"step 10: device 2 of .*; run again on another"):
            pretrain(*run)
    # Without what is kept for it those of 6, 8 and 10 alone were there.
    assert [path.name for path in (copy_of_run / "w" / "checkpoints").iterdir()] == ["4"]
    assert pretrain(*run)[0] == "finished"
    assert_identical(final_state(copy_of_run / "w")[1], final_state(finished_run / "run")[1])


@pytest.mark.nightly
def test_rows_of_several_documents_are_compared_too(copy_of_run):
    settings = *OBJECTIVES["causal"], "run.replay_every=2", "parallelism.state=zero3"
    outcome, shown = pretrain(copy_of_run / "small.py", copy_of_run / "w", *settings)
    assert outcome == "finished" and "another result" not in shown


@pytest.mark.long
def test_it_takes_two_devices():
    with pytest.raises(InputError, match=r"run.replay_every=5"):
        session._require_checkable(Run(replay_every=5), samples.mesh_of(1))
