"""The state on disk, by Orbax; nothing else imports it.

A checkpoint is the state of training.step and a little JSON beside it: what the run is, what it
ran on, and the metrics summed since the last line was written, so that the lines of a resumed run
are those of an uninterrupted one.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import jax
from absl import logging as absl_logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from bert_jax import resolve
from bert_jax.config import Experiment, InputError
from bert_jax.workdir import absolute, named_errors

FORMAT_VERSION = 1

_PACKAGES = ("bert-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Checkpoints:
    """The checkpoints of one run, the newest `keep` of them.

    Saving is asynchronous: the state is copied, written behind the next steps, and counts only
    once it is whole. Opened to `read`, nothing is touched: a run may be saving meanwhile.
    """

    def __init__(self, folder: epath.Path, keep: int, access: Literal["read", "write"]):
        # What Orbax logs as an error it raises too, and each of its threads and tasks logs it anew.
        absl_logging.set_verbosity(absl_logging.FATAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        sys.unraisablehook = _overhear_closed_loops
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        saving = ocp.options.ArrayOptions.Saving(use_compression=False)
        loading = ocp.options.PyTreeOptions.Loading(partial_load=True)
        context = ocp.Context(
            array_options=ocp.options.ArrayOptions(saving=saving),
            pytree_options=ocp.options.PyTreeOptions(loading=loading),
        )
        with named_errors(folder):
            self._checkpointer = ocp.training.Checkpointer(
                absolute(folder),
                context=context,
                preservation_policy=ocp.training.preservation_policies.LatestN(keep),
                cleanup_tmp_directories=access == "write",
            )
        self._folder, self._access = folder, access

    @property
    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
        """Begins to save; an earlier save is finished first."""
        metadata = {"format_version": FORMAT_VERSION, **metadata}
        with named_errors(self._folder):
            self._checkpointer.save_async(step, state, force=True, custom_metadata=metadata)

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved beside the state.

        Raises:
          InputError: the checkpoint is damaged or of another format.
        """
        with self._damage(step):
            found = self._checkpointer.metadata(step).custom_metadata
            if not found:
                raise ValueError("nothing says what run it belongs to")
        if found.get("format_version") != FORMAT_VERSION:
            raise InputError(
                f"{self._folder / str(step)}: format_version {found.get('format_version')!r}, "
                f"this version reads {FORMAT_VERSION}; use the bert-jax that wrote it"
            )
        return found

    def claim(self, step: int) -> Experiment:
        """The experiment that the checkpoint belongs to."""
        where = f"{self._folder / str(step)}"
        return resolve.from_json(json.dumps(self.metadata(step)["experiment"]), where)

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """The state of a step, laid out as `abstract_state` says, and its metadata.

        Args:
          step: one of the steps saved.
          abstract_state: tree of `jax.ShapeDtypeStruct` with shardings; a part of the state's
            tree restores that part.

        Raises:
          InputError: the checkpoint is damaged or of another format.
        """
        metadata = self.metadata(step)
        with self._damage(step):
            return self._checkpointer.load(step, abstract_state), metadata

    @contextlib.contextmanager
    def _damage(self, step: int) -> Iterator[None]:
        """Orbax raises many kinds of error; each means that the folder cannot be read."""
        try:
            yield
        except Exception as error:
            reason = str(error).split("\n")[0][:200]
            raise InputError(
                f"{self._folder / str(step)}: damaged, cannot be restored ({reason}); move this "
                "folder away to go on from the checkpoint before it"
            ) from error

    def close(self) -> None:
        """Finishes what is being saved; a save that failed leaves nothing."""
        try:
            with named_errors(self._folder):
                self._checkpointer.close()
        finally:
            if self._access == "write" and jax.process_index() == 0:
                self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Else a full disk would stay full. Nothing is being saved any more."""
        with contextlib.suppress(OSError, ValueError):  # epath's word for a folder not empty
            for path in self._folder.glob("*.orbax-checkpoint-tmp"):
                path.rmtree()
            self._folder.rmdir()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _overhear_closed_loops(unraisable: Any) -> None:
    """Passes over what threads of a failed load say when Orbax has gone: their loop is closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def versions() -> dict[str, str]:
    """Of the packages that a step is made of."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def environment() -> dict[str, Any]:
    """What arithmetic depends on beside the run: equal environments give equal bits."""
    return {
        "versions": versions(),
        "devices": [jax.devices()[0].device_kind, jax.device_count()],
        "processes": jax.process_count(),
        "cpu": _cpu_model(),
        "threads": len(os.sched_getaffinity(0)),
        "flags": {
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "jax_threefry_partitionable": jax.config.jax_threefry_partitionable,
            "jax_default_matmul_precision": str(jax.config.jax_default_matmul_precision),
        },
    }


def _cpu_model() -> str:
    """Its name and what it can do: on rented machines the name alone says little."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines())
        found = {name.strip(): value.strip() for name, value in fields.items()}
        features = hashlib.sha256(found["flags"].encode()).hexdigest()[:8]
        return f"{found['model name']} ({features})"
    except (OSError, ValueError, KeyError):
        return platform.processor() or platform.machine()
