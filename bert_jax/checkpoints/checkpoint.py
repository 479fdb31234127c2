"""Reads checkpoints with Orbax, which only this module and `checkpoints.saves` import.

A checkpoint is the state of training.step and a little JSON next to it: what the run is, what it
ran on, and the metrics summed since the last line was written, so that the lines of a resumed run
are those of an uninterrupted one. The JSON holds a checksum of every array, the same on any mesh,
and one of itself: Orbax restores a flipped bit without a word.

A checkpoint is damaged if the checksums of its arrays differ in two reads, or if Orbax fails to
restore it. Errors of the network or the machine are not damage (storage.retry): the read is retried
for ten minutes.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.utils import checkpoint_steps

from bert_jax import config, foreign
from bert_jax.config import Experiment
from bert_jax.config.fields import Section
from bert_jax.errors import InputError, Unavailable
from bert_jax.process import logger
from bert_jax.storage import retry
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import absolute, translate_os_errors
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.checksums import checksums, path_of

T = TypeVar("T")
Saved = TypeVar("Saved", bound=Section)
FORMAT_VERSION = 2
_UNSEALED_VERSION = 1  # had no checksums
# Prefix of the folders of damaged checkpoints, before their step.
ASIDE = "damaged-"


class Damaged(InputError):
    """A checkpoint that was read whole and is not what was saved."""


@dataclasses.dataclass
class Restored:
    """A checkpoint that was read; of step 0, which has none, what would be read."""

    step: int  # steps done
    state: Any  # what was asked for of the state, as it was saved
    metadata: dict[str, Any]  # the JSON that was saved with it
    damaged: dict[int, str]  # newer checkpoints that cannot be used: {step: why}


class Checkpoints:
    """The checkpoints of one run, to be read: nothing is touched, the run may be saving meanwhile.

    `checkpoints.saves` writes them.
    """

    def __init__(self, folder: epath.Path):
        self._folder, self._storage = folder, storage_of(folder)
        self._was_allowed = False

    def cached_lists(self) -> contextlib.AbstractContextManager[None]:
        """Caches lists of the folder inside the context, which must not change it."""
        return self._storage.cached_lists(self._folder)

    @property
    def steps(self) -> list[int]:
        """Returns the steps of whole checkpoints, the newest first; some may be damaged."""

        def listed() -> list[int]:
            if not self._folder.exists():
                return []
            return sorted(checkpoint_steps(absolute(self._folder)), reverse=True)

        return self._again(listed)

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the JSON that was saved with the state; raises as `restore`."""

        def read(folder: epath.Path) -> dict[str, Any]:
            metadata = dict(typing.cast("dict[str, Any]", ocp.metadata(folder).custom_metadata))
            version, seal = metadata["format_version"], metadata.pop("sha256", None)
            if version != _UNSEALED_VERSION and seal != sha256_of(metadata):
                raise ValueError("its metadata were changed")
            if version == FORMAT_VERSION and metadata["step"] != step:
                raise ValueError(f"it is of step {metadata['step']}")
            return metadata

        metadata = self._read(step, read)
        if (version := metadata["format_version"]) != FORMAT_VERSION:
            ours = f"this version reads {FORMAT_VERSION}; use the bert-jax that wrote it"
            raise InputError(f"{self._folder / str(step)}: format_version {version!r}, {ours}")
        return metadata

    def experiment(self, step: int, kind: type[Saved] = Experiment) -> Saved:
        """Returns the experiment that the checkpoint belongs to, an `Experiment` or the like."""
        where = f"{self._folder / str(step)}"
        return config.from_json(json.dumps(self.metadata(step)["experiment"]), where, kind)

    def restore(self, step: int, abstract_state: Any) -> Restored:
        """Reads the state of a step, laid out as `abstract_state` says, and compares its checksums.

        That is a tree of `jax.ShapeDtypeStruct` with shardings; a part of it restores that part.

        Raises:
          Damaged: it is not what was written.
          Unavailable: the storage has not answered for ten minutes.
        """
        return self._load_verified(step, abstract_state, lambda what, error: error)

    def _load_verified(
        self, step: int, abstract_state: Any, agreed: Callable[[str, str], str]
    ) -> Restored:
        """Loads a checkpoint and verifies its checksums, in all processes together.

        Reads once more if checksums differ: a bit may have flipped in transit. See `newest`.
        """
        error = ""
        for _ in range(2):
            restored, error = None, ""  # frees the first state: two may not fit in memory
            try:
                restored = self._load(step, abstract_state)
            except Damaged as damage:
                error = str(damage)
            if error := agreed(f"{step} read", error):
                break  # `_load` has read it twice already
            assert restored is not None
            if not (error := agreed(f"{step} checked", self._changed(restored))):
                return restored
        raise Damaged(error)

    def _load(self, step: int, abstract_state: Any) -> Restored:
        """Reads the metadata and the state of a step; each process by itself."""
        metadata = self.metadata(step)

        def read(folder: epath.Path) -> Any:
            with mesh_lib.translate_memory_errors():
                state = ocp.load(folder, abstract_state)
            for path, leaf in jax.tree.leaves_with_path(state):
                if not isinstance(leaf, jax.Array):
                    raise ValueError(f"{path_of(path)} is not there")
            return state

        return Restored(step, self._read(step, read), metadata, {})

    def _changed(self, restored: Restored) -> str:
        """Returns which array is not what was saved, in words; "" if all are.

        All processes that hold a part of the state compute its checksums together.
        """
        saved = restored.metadata["checksums"]
        with mesh_lib.translate_memory_errors():
            now = checksums(restored.state)
        names = [name for name, checksum in now.items() if saved.get(name) != checksum]
        return self._damage(restored.step, f"{names[0]} is not what was saved") if names else ""

    def abstract_state(self, step: int, place: jax.sharding.Sharding) -> Any:
        """Returns all that a checkpoint holds, to lie at `place`, as `restore` takes it."""
        saved = self.metadata(step)["checksums"]

        def read(folder: epath.Path) -> Any:
            tree = ocp.metadata(folder).metadata
            if {path_of(path) for path, _ in jax.tree.leaves_with_path(tree)} != saved.keys():
                raise ValueError("it lists other arrays than were saved")
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
            )

        return self._read(step, read)

    def newest(
        self,
        abstract_state: Any,
        at_most: int | None = None,
        agreed: Callable[[str, str], str] = lambda what, error: error,
    ) -> Restored | None:
        """Reads the newest checkpoint, of step `at_most`, that is not damaged; None: there is none.

        `agreed` takes what was done and the error of this process, or "", and gives the first of
        any: all come to it before they compute anything together. See also `restore`.
        """
        damaged: dict[int, str] = {}
        for step in (step for step in self.steps if at_most is None or step <= at_most):
            try:
                restored = self._load_verified(step, abstract_state, agreed)
            except Damaged as damage:
                damaged[step] = str(damage)
            else:
                return dataclasses.replace(restored, damaged=damaged)
        if damaged:
            raise InputError(
                f"{'; '.join(damaged.values())}: no checkpoint is left to go on from; put the "
                "files back, or choose another --workdir to start again"
            )
        return None

    def find_step(self, which: str) -> int:
        """Returns the step of a checkpoint: `newest`, `best` by its held-out loss, or a step."""
        steps, unreadable = self.steps, self.unreadable()
        whole = [step for step in steps if step not in unreadable]
        if not whole:
            words = (f"{why}; put the files back" for why in unreadable.values())
            raise InputError("; ".join(words) or f"{self._folder}: no checkpoint yet")
        if which == "newest":
            return whole[0]
        losses = {step: self.metadata(step)["held_out_loss"] for step in whole}
        known = [(loss, step) for step, loss in losses.items() if loss is not None]
        if which == "best" and known:
            return min(known)[1]
        if which.isdecimal() and int(which) in steps:
            return int(which)
        raise InputError(
            f"--checkpoint {which}: {self._folder} has none of this step or name; there are "
            f"{', '.join(map(str, steps))}, of which {len(known)} were evaluated"
        )

    def read(self, which: str, abstract_state: Any) -> Restored:
        """Reads the checkpoint of that name; of damaged ones the newest is the one before."""
        restored = self.newest(abstract_state) if which == "newest" else None
        if restored is None:
            return self.restore(self.find_step(which), abstract_state)
        for why in restored.damaged.values():
            logger.warning("%s; step %d is used instead", why, restored.step)
        return restored

    def unreadable(self) -> dict[int, str]:
        """Returns the checkpoints whose metadata cannot be read: {step: why}."""
        damaged = {}
        for step in self.steps:
            try:
                self.metadata(step)
            except Damaged as error:
                if step in self.steps:  # a run at work may have removed it
                    damaged[step] = str(error)
        return damaged

    def _again(self, work: Callable[[], T]) -> T:
        """Does what can be repeated with the folder, again after each passing fault."""
        with translate_os_errors(self._folder), orbax_client(self._folder):
            denied = "wait" if self._was_allowed else "refuse"
            done = retry.again(work, str(self._folder), denied=denied)
        self._was_allowed = self._storage.is_bucket  # whose tokens expire
        return done

    def _read(self, step: int, read: Callable[[epath.Path], T]) -> T:
        """Reads something of a checkpoint's folder, again after each passing fault.

        It is damaged if that fails once more where all files that are listed can be opened.
        """
        named = InputError | Unavailable | MemoryError | PermissionError
        named |= jax.errors.JaxRuntimeError

        def once(all_open: bool = False) -> T:
            try:
                with _independent_reads():
                    return read(absolute(self._folder / str(step)))
            except Exception as error:
                if isinstance(error, named) or retry.passes(error):
                    raise
                if all_open:
                    reason = str(error).split("\n")[0][:200]
                    raise Damaged(self._damage(step, reason)) from error
            _require_open(self._folder / str(step))
            return once(all_open=True)

        return self._again(once)

    def _damage(self, step: int, reason: str) -> str:
        return f"{self._folder / str(step)}: damaged, cannot be restored ({reason})"


def context() -> ocp.Context:
    """Returns Orbax's settings as all checkpoints need them."""
    settings = ocp.Context()
    settings.array.saving.use_compression = False
    # Its store of shapes repeats what the arrays say, and nothing would notice a flipped bit there.
    settings.array.saving.array_metadata_store = None
    settings.pytree.loading.partial_load = True
    return settings


def orbax_client(folder: epath.Path) -> contextlib.AbstractContextManager[None]:
    """Has Orbax wait for a bucket as we do while entered; nothing for a folder of this machine."""
    if not storage_of(folder).is_bucket:
        return contextlib.nullcontext()
    return foreign.use_bucket_client(_patient_files)


@functools.cache
def _patient_files() -> Any:
    from bert_jax.storage.gcs import PatientFileSystem

    # The lists of other processes' objects must be new; etils wants the last argument.
    return PatientFileSystem(use_listings_cache=False, finalize_on_close=True)


@contextlib.contextmanager
def _independent_reads() -> Iterator[None]:
    """Makes reads independent of other processes: none waits for a process that fails.

    In each process Orbax counts its operations, reads included, and names the barriers of a save by
    the count. A process that repeats a read would wait at barriers that no other process reaches.
    So the count is reset after each read. Only saves increase the count, and all processes save
    together.
    """
    settings, own = context(), jax.process_index()
    if jax.process_count() > 1:
        settings.multiprocessing.primary_host = own
        settings.multiprocessing.active_processes = {own}
        settings.multiprocessing.barrier_sync_key_prefix = f"process_{own}"
    with foreign.restore_operation_ids(), settings:
        yield


def _require_open(folder: epath.Path) -> None:
    """Raises what keeps a file that is listed from being read; that is no damage of it."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir():
            _require_open(path)
            continue
        try:
            with path.open("rb") as file:
                file.read(1)
        except FileNotFoundError as error:
            raise Unavailable(f"{path}: listed, but not found where it is read") from error


def sha256_of(metadata: dict[str, Any]) -> str:
    """Returns a checksum of JSON: of a checkpoint's metadata, and so of its arrays' checksums."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
