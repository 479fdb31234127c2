"""Batches on devices are the batches of the data engine."""

import hashlib
import multiprocessing
from unittest import mock

import jax
import numpy as np
import pytest
import samples

from bert_jax.config import Parallelism, Run
from bert_jax.errors import InputError
from bert_jax.training import feed
from bert_jax.training import mesh as mesh_lib


def digest(batches) -> list[str]:
    return [
        hashlib.sha256(b"".join(np.asarray(v).tobytes() for _, v in sorted(b.items()))).hexdigest()
        for b in batches
    ]


def global_batches(devices: int, first: int, last: int, workers: int = 0, slices: int = 1):
    mesh = samples.mesh_of(devices, Parallelism(slices=slices))
    sharding = mesh_lib.batch_sharding(mesh)
    train = samples.train_batches()
    run = Run(prefetch_batches=2, data_workers=workers)
    with feed.Feed(train.batch, range(first, last), 8, sharding, run, print) as batches:
        return [jax.device_get(batch) for batch in batches]


def test_global_batches_are_the_same_on_any_devices_and_slices():
    host = samples.train_batches()
    expected = digest(host.batch(step, np.arange(8)) for step in range(5))
    for devices, slices in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4)):
        assert digest(global_batches(devices, 0, 5, slices=slices)) == expected


def test_the_feed_starts_at_any_step():
    assert digest(global_batches(2, 3, 6)) == digest(global_batches(2, 0, 6))[3:]


@pytest.mark.long
def test_worker_processes_give_the_same_batches():
    assert digest(global_batches(2, 0, 4, workers=2)) == digest(global_batches(2, 0, 4))


@pytest.mark.long
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_killed_worker_is_replaced(times):
    """By new ones, and where they are killed again and again by none; the batches stay the same."""
    sharding = mesh_lib.batch_sharding(samples.mesh_of(1))
    said: list[str] = []
    killed = 0
    run, train = Run(prefetch_batches=1, data_workers=1), samples.train_batches()
    with feed.Feed(train.batch, range(40), 8, sharding, run, said.append) as batches:
        found = []
        for batch in batches:
            found.append(jax.device_get(batch))
            workers = multiprocessing.active_children()
            if killed < times and workers:
                killed += 1
                (worker,) = workers
                worker.kill()
                worker.join()  # else it may be found, and killed, again
    assert digest(found) == digest(global_batches(1, 0, 40))
    assert [("new ones" in line, "without them" in line) for line in said] == [
        (number < 3, number == 3) for number in range(1, times + 1)
    ]


def test_rows_follow_the_devices_which_need_not_hold_one_range():
    """Devices in another order, as a torus has them; then one process with every other of them."""
    devices = [jax.devices()[i] for i in (2, 0, 3, 1)]
    mesh = jax.sharding.Mesh(np.array(devices), ("data_0",))
    sharding = mesh_lib.batch_sharding(mesh)
    batch = samples.train_batches().batch(0, np.arange(8))
    placed = feed.place(batch, np.arange(8), 8, sharding)
    for name, values in batch.items():
        np.testing.assert_array_equal(np.asarray(placed[name]), values)
    shard = next(s for s in placed["rows"].addressable_shards if s.device == devices[0])
    assert shard.data.tolist() == [0, 1]
    held = sharding.devices_indices_map((8,))

    class OfOneProcess:
        def addressable_devices_indices_map(self, shape):
            return {device: held[device] for device in (devices[0], devices[2])}

    assert feed.local_rows(OfOneProcess(), 8).tolist() == [0, 1, 4, 5]


def test_an_error_in_a_batch_reaches_the_loop():
    def broken(step, rows):
        raise ValueError("no such row")

    sharding = mesh_lib.batch_sharding(samples.mesh_of(1))
    with (
        feed.Feed(broken, range(2), 8, sharding, Run(), print) as batches,
        pytest.raises(ValueError, match="no such row"),
    ):
        next(batches)


def test_after_a_third_death_no_more_workers_are_started():
    started = []
    killed = feed.Feed.__new__(feed.Feed)
    killed._deaths, killed._workers, killed._report = 0, 2, lambda line: None
    killed._iterator = mock.Mock()
    with mock.patch.object(
        feed.Feed, "_host_batches", lambda self: started.append(self._workers) or mock.Mock()
    ):
        for _ in range(3):
            killed._replace_workers()
    assert started == [2, 2, 0]


@pytest.mark.parametrize(
    ("rows", "parts", "fits"), [(16, 1, True), (16, 4, True), (6, 1, False), (8, 4, False)]
)
def test_each_device_takes_as_many_rows_of_each_micro_batch(rows, parts, fits):
    mesh = samples.mesh_of(4)
    if fits:
        mesh_lib.require_divisible(rows, "phases.0.batch_size", mesh, parts)
    else:
        with pytest.raises(InputError, match=f"phases.0.batch_size={rows}"):
            mesh_lib.require_divisible(rows, "phases.0.batch_size", mesh, parts)
