"""Batches to devices. Grain carries them; it holds no state of ours.

A batch is a function of its step (data.batches), so the feed starts at any step, a checkpoint need
not know of it, and a process that makes batches may be killed: another one makes them again.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from bert_jax import foreign, system
from bert_jax.data.batches import Batch

MakeBatch = Callable[[int, np.ndarray], Batch]

# Of what Grain raises when a process of its own ends by itself.
_WORKER_DIED = "Worker process was terminated unexpectedly"
# How often that may happen in one phase.
_DEATHS = 3


class Feed:
    """Iterates over the global batches of steps [first, last), each cut over the devices.

    `make_batch` makes some rows of a step on the host. `prefetch` batches are made ahead, by so
    many `workers`, which are processes, or for 0 in a thread; `say` shows that some have died.
    """

    def __init__(
        self,
        make_batch: MakeBatch,
        first: int,
        last: int,
        batch_size: int,
        sharding: NamedSharding,
        prefetch: int,
        workers: int,
        say: Callable[[str], None],
    ):
        self._make_batch, self._next, self._last = make_batch, first, last
        self._sharding = sharding
        self._batch_size = batch_size
        self._rows = local_rows(sharding, batch_size)
        self._prefetch, self._workers, self._say = prefetch, workers, say
        self._deaths = 0
        self._flags = contextlib.ExitStack()  # until the end: new processes may be started
        self._iterator = self._host_batches()

    def _host_batches(self) -> grain.DatasetIterator:
        """Batches from the next step on."""
        make_batch, rows = self._make_batch, self._rows

        def host_batch(step: int) -> Batch:
            return make_batch(int(step), rows)

        steps = grain.MapDataset.range(self._next, self._last).map(host_batch)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetch)
        dataset = steps.to_iter_dataset(options)
        if self._workers:
            self._flags.enter_context(foreign.mark_flags_as_parsed())
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=self._prefetch),
                worker_init_fn=_die_with_parent,
            )
        return iter(dataset)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        return self

    def __next__(self) -> dict[str, jax.Array]:
        while True:
            try:
                batch = next(self._iterator)
                break
            except RuntimeError as error:
                if not (self._workers and _WORKER_DIED in str(error)):
                    raise
                self._replace_workers()
        self._next += 1
        return place(batch, self._rows, self._batch_size, self._sharding)

    def _replace_workers(self) -> None:
        """Goes on with new processes or, where they die again and again, without any."""
        self._iterator.close()
        self._deaths += 1
        if self._deaths < _DEATHS:
            self._say(f"data: a worker process was killed; {self._workers} new ones go on")
        else:
            self._say(
                f"data: worker processes were killed {_DEATHS} times; batches are made without "
                "them from here on. Has the machine too little memory for "
                f"run.data_workers={self._workers}?"
            )
            self._workers = 0
        self._iterator = self._host_batches()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        with self._flags:
            self._iterator.close()


def local_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """Returns the rows that this process's devices hold, rising; they need not be one range."""
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[s] for s in slices]))


def place(
    host: Batch, rows: np.ndarray, batch_size: int, sharding: NamedSharding
) -> dict[str, jax.Array]:
    """Places this process's rows of a batch as parts of global arrays of `batch_size` rows.

    `host` holds arrays [len(rows), ...]; `rows` says which of the global batch they are.
    """
    if sharding.num_devices == 1:
        return _on_one_device(sharding)(host)
    devices = sharding.addressable_devices_indices_map((batch_size,))
    # All of a device's arrays in one call: for small batches calls are what costs.
    parts = []
    for device, index in devices.items():
        here = np.searchsorted(rows, np.arange(batch_size)[index])
        parts.append(jax.device_put({name: values[here] for name, values in host.items()}, device))
    return {
        name: jax.make_array_from_single_device_arrays(
            (batch_size, *values.shape[1:]), sharding, [part[name] for part in parts]
        )
        for name, values in host.items()
    }


@functools.lru_cache
def _on_one_device(sharding: NamedSharding) -> Callable[[Batch], dict[str, jax.Array]]:
    """Returns a program that does nothing: its call takes arrays in an eighth of the time."""
    return jax.jit(lambda batch: batch, out_shardings=sharding)


def place_all(batches: Sequence[Batch], sharding: NamedSharding) -> Iterator[dict[str, jax.Array]]:
    """Places whole host batches, each process its rows."""
    for batch in batches:
        size = len(batch["row_weights"])
        rows = local_rows(sharding, size)
        yield place({k: v[rows] for k, v in batch.items()}, rows, size, sharding)


def put(tree: Any, shardings: Any) -> Any:
    """Places host arrays, the same on all processes, as global arrays.

    `shardings` is a tree like that of the arrays, or one sharding for all.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def place_one(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(place_one, tree, shardings)


def _die_with_parent(index: int, count: int) -> None:
    """Calls `die_with_parent`, as grain calls what a worker does first."""
    del index, count
    system.die_with_parent()
