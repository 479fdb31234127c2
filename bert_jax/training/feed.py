"""Makes batches ahead with Grain and places them on devices.

A batch is a function of its step (data.batches). So a feed can start at any step, checkpoints need
not include it, and if a process that makes batches is killed, another makes them again.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from bert_jax import private_apis, system
from bert_jax.config import Run
from bert_jax.data.batches import Batch

MakeBatch = Callable[[int, np.ndarray], Batch]

# Words in the error that Grain raises when one of its processes dies.
_WORKER_DIED = "Worker process was terminated unexpectedly"
# After this many deaths in a phase batches are made without worker processes.
_MAX_DEATHS = 3


class Feed:
    """Iterates over the global batches of some steps, sharded over the devices.

    `make_batch` makes some rows of a step on the host. `run.prefetch_batches` batches are made
    ahead, by `run.data_workers` processes or, if 0, by a thread; `report` receives a line if
    workers die.
    """

    def __init__(
        self,
        make_batch: MakeBatch,
        steps: range,
        batch_size: int,
        sharding: NamedSharding,
        run: Run,
        report: Callable[[str], None],
    ):
        self._make_batch, self._steps = make_batch, steps
        self._batch_size, self._sharding = batch_size, sharding
        self._rows = local_rows(sharding, batch_size)
        self._prefetch, self._workers = run.prefetch_batches, run.data_workers
        self._report, self._deaths = report, 0
        # Grain asks whether absl has parsed its flags whenever it starts workers. This stack holds
        # them marked as parsed until the feed ends, since workers may be replaced.
        self._parsed_flags = contextlib.ExitStack()
        self._iterator = self._host_batches()

    def _host_batches(self) -> grain.DatasetIterator:
        """Returns an iterator over host batches of the remaining steps."""
        make_batch, rows = self._make_batch, self._rows

        def host_batch(step: int) -> Batch:
            return make_batch(int(step), rows)

        steps = grain.MapDataset.range(self._steps.start, self._steps.stop).map(host_batch)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetch)
        dataset = steps.to_iter_dataset(options)
        if self._workers:
            self._parsed_flags.enter_context(private_apis.mark_flags_as_parsed())
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
        self._steps = self._steps[1:]
        return place(batch, self._rows, self._batch_size, self._sharding)

    def _replace_workers(self) -> None:
        """Starts new workers; after several deaths, makes batches without workers."""
        self._iterator.close()
        self._deaths += 1
        if self._deaths < _MAX_DEATHS:
            self._report(f"data: a worker process was killed; {self._workers} new ones replace it")
        else:
            self._report(
                f"data: worker processes were killed {_MAX_DEATHS} times; batches are made without "
                "them from now on. Has the machine too little memory for "
                f"run.data_workers={self._workers}?"
            )
            self._workers = 0
        self._iterator = self._host_batches()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        with self._parsed_flags:
            self._iterator.close()


def local_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """Returns the indices of the rows on this process's devices, ascending, maybe with gaps."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices]))


def place(
    host: Batch, rows: np.ndarray, batch_size: int, sharding: NamedSharding
) -> dict[str, jax.Array]:
    """Places this process's rows of a batch as parts of global arrays of `batch_size` rows.

    `host` holds arrays [len(rows), ...]; `rows` are their indices in the global batch.
    """
    if sharding.num_devices == 1:
        return _on_one_device(sharding)(host)
    devices = sharding.addressable_devices_indices_map((batch_size,))
    # One call for all arrays of a device: calls dominate the cost of small batches.
    parts = []
    for device, index in devices.items():
        own = np.searchsorted(rows, np.arange(batch_size)[index])
        parts.append(jax.device_put({name: values[own] for name, values in host.items()}, device))
    return {
        name: jax.make_array_from_single_device_arrays(
            (batch_size, *values.shape[1:]), sharding, [part[name] for part in parts]
        )
        for name, values in host.items()
    }


@functools.lru_cache
def _on_one_device(sharding: NamedSharding) -> Callable[[Batch], dict[str, jax.Array]]:
    """Returns a compiled identity, eight times as fast as `device_put`."""
    return jax.jit(lambda batch: batch, out_shardings=sharding)


def place_all(batches: Sequence[Batch], sharding: NamedSharding) -> Iterator[dict[str, jax.Array]]:
    """Places host batches, of which each process has all rows."""
    for batch in batches:
        size = len(batch["row_weights"])
        rows = local_rows(sharding, size)
        yield place({k: v[rows] for k, v in batch.items()}, rows, size, sharding)


def put(tree: Any, shardings: Any) -> Any:
    """Places host arrays, the same on all processes, as global arrays.

    `shardings` is a tree with the structure of the arrays, or one sharding for all.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def put_leaf(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(put_leaf, tree, shardings)


def _die_with_parent(index: int, count: int) -> None:
    """Calls `die_with_parent` with the arguments of a `worker_init_fn`."""
    del index, count
    system.die_with_parent()
