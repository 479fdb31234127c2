"""The state on disk, by Orbax; nothing else imports it.

A checkpoint is the state of training.step and a little JSON beside it: what the run is, what it
ran on, and the metrics summed since the last line was written, so that the lines of a resumed run
are those of an uninterrupted one.
"""

import importlib.metadata
import os
import platform
from typing import Any, Literal

import jax
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from bert_jax.config import InputError
from bert_jax.workdir import named_errors

FORMAT_VERSION = 1

_PACKAGES = ("bert-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Checkpoints:
    """The checkpoints of one run, the newest `keep` of them.

    Saving is asynchronous: the state is copied, written behind the next steps, and counts only
    once it is whole. Opened to `read`, nothing is touched: a run may be saving meanwhile.
    """

    def __init__(self, folder: epath.Path, keep: int, access: Literal["read", "write"]):
        logging.set_verbosity(logging.ERROR)
        saving = ocp.options.ArrayOptions.Saving(use_compression=False)
        loading = ocp.options.PyTreeOptions.Loading(partial_load=True)
        context = ocp.Context(
            array_options=ocp.options.ArrayOptions(saving=saving),
            pytree_options=ocp.options.PyTreeOptions(loading=loading),
        )
        with named_errors(folder):
            self._checkpointer = ocp.training.Checkpointer(
                folder.absolute(),
                context=context,
                preservation_policy=ocp.training.preservation_policies.LatestN(keep),
                cleanup_tmp_directories=access == "write",
            )
        self._folder = folder

    @property
    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
        """Begins to save; an earlier save is finished first."""
        with named_errors(self._folder):
            metadata = {"format_version": FORMAT_VERSION, **metadata}
            self._checkpointer.save_async(step, state, force=True, custom_metadata=metadata)

    def wait(self) -> None:
        """Returns when the last save is on disk."""
        with named_errors(self._folder):
            self._checkpointer.wait()

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """The state of a step, laid out as `abstract_state` says, and its metadata.

        Args:
          step: one of the steps saved.
          abstract_state: tree of `jax.ShapeDtypeStruct` with shardings; a part of the state's
            tree restores that part.

        Raises:
          InputError: the checkpoint is of another format or does not fit.
        """
        where = self._folder / str(step)
        metadata = self._checkpointer.metadata(step).custom_metadata or {}
        if metadata.get("format_version") != FORMAT_VERSION:
            raise InputError(
                f"{where}: format_version {metadata.get('format_version')!r}, "
                f"this version reads {FORMAT_VERSION}"
            )
        try:
            state = self._checkpointer.load(step, abstract_state)
        except Exception as error:  # Orbax raises many kinds; each means it cannot be read
            reason = str(error).split("\n")[0][:200]
            raise InputError(
                f"{where}: cannot be restored ({reason}); remove this folder to go on from the "
                "checkpoint before it"
            ) from error
        return state, metadata

    def close(self) -> None:
        """Finishes what is being saved."""
        with named_errors(self._folder):
            self._checkpointer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def environment() -> dict[str, Any]:
    """What arithmetic depends on beside the run: equal environments give equal bits."""
    return {
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "devices": [jax.devices()[0].device_kind, jax.device_count()],
        "processes": jax.process_count(),
        "cpu": _cpu_model(),
        "threads": len(os.sched_getaffinity(0)),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
