"""Reads checkpoints with Orbax and verifies their checksums.

A checkpoint is damaged if the checksums of its arrays differ from the saved ones in both of two
reads, or if Orbax fails to restore it. Errors of the network or the machine are not damage: the
read is retried for ten minutes (storage.retry).
"""

import contextlib
import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from bert_jax import config, private_apis
from bert_jax.checkpoints import layout
from bert_jax.checkpoints.layout import CheckpointFolder, Damaged
from bert_jax.config import Experiment
from bert_jax.config.fields import Section
from bert_jax.errors import InputError, Unavailable
from bert_jax.process import logger
from bert_jax.storage import retry
from bert_jax.storage.workdir import absolute
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.checksums import checksums, path_of

T = TypeVar("T")
SectionT = TypeVar("SectionT", bound=Section)
# Errors that do not mean that a checkpoint is damaged.
_NO_DAMAGE = (InputError, Unavailable, MemoryError, PermissionError, jax.errors.JaxRuntimeError)
# A barrier: (its name, the error of this process or "") -> the first error of all processes. It is
# called before each joint computation, where the others would wait for a failed process forever.
ExchangeErrors = Callable[[str, str], str]


@dataclasses.dataclass
class Restored:
    """The content of a checkpoint, or the initial state at step 0, which has no checkpoint."""

    step: int  # steps done
    state: Any  # the requested part of the state
    metadata: dict[str, Any]  # saved with the state; see `layout`
    damaged: dict[int, str]  # newer checkpoints that cannot be used: {step: reason}


class Checkpoints:
    """Reads the checkpoints of one run, which may be saving meanwhile; changes nothing."""

    def __init__(self, path: epath.Path):
        self.folder = CheckpointFolder(path)

    @property
    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, newest first; some may be damaged."""
        return self.folder.steps

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata of a checkpoint; raises the errors of `restore`."""

        def read(path: epath.Path) -> dict[str, Any]:
            metadata = dict(typing.cast("dict[str, Any]", ocp.metadata(path).custom_metadata))
            version, checksum = metadata["format_version"], metadata.pop("sha256", None)
            if version != 1 and checksum != layout.hash_json(metadata):  # version 1 had none
                raise ValueError("its metadata were changed")
            if version == layout.FORMAT_VERSION and metadata["step"] != step:
                raise ValueError(f"its metadata are of step {metadata['step']}")
            return metadata

        metadata = self._retry_read(step, read)
        if (version := metadata["format_version"]) != layout.FORMAT_VERSION:
            remedy = f"this version reads {layout.FORMAT_VERSION}; use the bert-jax that wrote it"
            raise InputError(f"{self.folder.step_path(step)}: format_version {version!r}, {remedy}")
        return metadata

    def experiment(self, step: int, kind: type[SectionT] = Experiment) -> SectionT:
        """Returns the experiment of a checkpoint; `kind` is its class, for example `Finetuning`."""
        text = json.dumps(self.metadata(step)["experiment"])
        return config.from_json(text, f"{self.folder.step_path(step)}", kind)

    def unreadable(self) -> dict[int, str]:
        """Returns the checkpoints whose metadata cannot be read: {step: reason}."""
        damaged = {}
        for step in self.steps:
            try:
                self.metadata(step)
            except Damaged as error:
                if step in self.steps:  # a running run may have deleted it meanwhile
                    damaged[step] = str(error)
        return damaged

    def find_step(self, which: str) -> int:
        """Returns the step of a checkpoint: `newest`, `best` by its held-out loss, or a step."""
        steps, unreadable = self.steps, self.unreadable()
        readable = [step for step in steps if step not in unreadable]
        if not readable:
            problems = (f"{why}; restore its files from a copy" for why in unreadable.values())
            raise InputError("; ".join(problems) or f"{self.folder.path}: no checkpoint yet")
        if which == "newest":
            return readable[0]
        losses = {step: self.metadata(step)["held_out_loss"] for step in readable}
        evaluated = [(loss, step) for step, loss in losses.items() if loss is not None]
        if which == "best" and evaluated:
            return min(evaluated)[1]
        if which.isdecimal() and int(which) in steps:
            return int(which)
        raise InputError(
            f"--checkpoint {which}: {self.folder.path} has no such checkpoint; it has those of "
            f"steps {', '.join(map(str, steps))}, of which {len(evaluated)} were evaluated"
        )

    def abstract_state(self, step: int, sharding: jax.sharding.Sharding) -> Any:
        """Returns the abstract state of a whole checkpoint, all with one sharding."""
        saved = self.metadata(step)["checksums"]

        def read(path: epath.Path) -> Any:
            tree = ocp.metadata(path).metadata
            if {path_of(keys) for keys, _ in jax.tree.leaves_with_path(tree)} != saved.keys():
                raise ValueError("Orbax lists other arrays than the saved checksums")
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
            )

        return self._retry_read(step, read)

    def restore_chosen(self, which: str, abstract_state: Any) -> Restored:
        """Restores the checkpoint of `find_step`; for `newest`, skips and reports damaged ones."""
        restored = self.restore_newest(abstract_state) if which == "newest" else None
        if restored is None:  # if there is no newest one, `find_step` raises InputError
            return self.restore(self.find_step(which), abstract_state)
        for reason in restored.damaged.values():
            logger.warning("%s; step %d is used instead", reason, restored.step)
        return restored

    def restore_newest(
        self,
        abstract_state: Any,
        at_most: int | None = None,
        exchange_errors: ExchangeErrors = lambda name, error: error,
    ) -> Restored | None:
        """Restores the newest checkpoint up to step `at_most` that is not damaged.

        Returns None if there are no checkpoints; raises InputError if all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in (step for step in self.steps if at_most is None or step <= at_most):
            try:
                restored = self.restore(step, abstract_state, exchange_errors)
                return dataclasses.replace(restored, damaged=damaged)
            except Damaged as damage:
                damaged[step] = str(damage)
        if damaged:
            raise InputError(
                f"{'; '.join(damaged.values())}: no checkpoint is left to resume from; restore "
                "the files from a copy, or choose another --workdir to start again"
            )
        return None

    def restore(
        self,
        step: int,
        abstract_state: Any,
        exchange_errors: ExchangeErrors = lambda name, error: error,
    ) -> Restored:
        """Reads the state of a step and verifies its checksums, in all processes together.

        Reads once more if checksums differ: a bit may have flipped in transit. `abstract_state` is
        a tree of `jax.ShapeDtypeStruct` with shardings, or a part of the tree.

        Raises:
          Damaged: the state is not the one that was saved.
          Unavailable: the storage has not answered for ten minutes.
        """
        error = ""
        for _ in range(2):
            restored, error = None, ""  # frees the first state: two may not fit in memory
            try:
                restored = self._load_unverified(step, abstract_state)
            except Damaged as damage:
                error = str(damage)
            error = exchange_errors(f"{step} read", error)
            if error or restored is None:
                raise Damaged(error)  # without another attempt: `_retry_read` made two already
            error = exchange_errors(f"{step} checked", self._find_changed_array(step, restored))
            if not error:
                return restored
        raise Damaged(error)

    def _find_changed_array(self, step: int, restored: Restored) -> str:
        """Returns an error if an array does not have the saved checksum, else ""."""
        saved = restored.metadata["checksums"]
        with mesh_lib.translate_memory_errors():
            computed = checksums(restored.state)  # by all processes that have a part
        changed = [name for name, value in computed.items() if saved.get(name) != value]
        return self._damage_message(step, f"{changed[0]} is not what was saved") if changed else ""

    def _load_unverified(self, step: int, abstract_state: Any) -> Restored:
        """Reads the metadata and the state of a step, without waiting for other processes."""
        metadata = self.metadata(step)

        def read(path: epath.Path) -> Any:
            with mesh_lib.translate_memory_errors():
                state = ocp.load(path, abstract_state)
            for key_path, leaf in jax.tree.leaves_with_path(state):
                if not isinstance(leaf, jax.Array):
                    raise ValueError(f"{path_of(key_path)} is missing")
            return state

        return Restored(step, self._retry_read(step, read), metadata, {})

    def _retry_read(self, step: int, read: Callable[[epath.Path], T]) -> T:
        """Calls `read` with a checkpoint's folder, and retries it after transient errors.

        The checkpoint is damaged if reading fails twice although all its files can be opened.
        """
        path = self.folder.step_path(step)

        def read_twice() -> T:
            files_verified = False
            while True:
                try:
                    with _independent_reads():
                        return read(absolute(path))
                except Exception as error:
                    if isinstance(error, _NO_DAMAGE) or retry.is_retryable(error):
                        raise
                    if files_verified:
                        raise Damaged(self._damage_message(step, str(error))) from error
                _require_readable(path)
                files_verified = True

        return self.folder.retry(read_twice)

    def _damage_message(self, step: int, error: str) -> str:
        reason = error.split("\n")[0][:200]
        return f"{self.folder.step_path(step)}: damaged, cannot be restored ({reason})"


@contextlib.contextmanager
def _independent_reads() -> Iterator[None]:
    """Makes reads independent of other processes: none waits for a process that fails.

    Orbax counts the operations of each process, reads included, and names the barriers of a save by
    the count. A process that repeats a read would wait at barriers that no other process reaches.
    So each read leaves the count unchanged: only saves increase it, on all processes at once.
    """
    settings, process = layout.orbax_settings(), jax.process_index()
    if jax.process_count() > 1:
        settings.multiprocessing.primary_host = process
        settings.multiprocessing.active_processes = {process}
        settings.multiprocessing.barrier_sync_key_prefix = f"process_{process}"
    with private_apis.preserve_operation_ids(), settings:
        yield


def _require_readable(folder: epath.Path) -> None:
    """Raises OSError or Unavailable, not `Damaged`, if a listed file cannot be opened."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir():
            _require_readable(path)
            continue
        try:
            with path.open("rb") as file:
                file.read(1)
        except FileNotFoundError as error:
            raise Unavailable(f"{path}: is listed, but cannot be opened (not found)") from error
