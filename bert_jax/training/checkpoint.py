"""The state on disk, by Orbax; nothing else imports it.

A checkpoint is the state of training.step and a little JSON beside it: what the run is, what it
ran on, and the metrics summed since the last line was written, so that the lines of a resumed run
are those of an uninterrupted one. The JSON holds a checksum of every array, the same on any mesh,
and one of itself: Orbax restores a flipped bit without a word.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.utils import checkpoint_steps

from bert_jax import resolve
from bert_jax.config import Experiment, InputError, Run
from bert_jax.errors import Unavailable
from bert_jax.section import Section
from bert_jax.storage.workdir import absolute, named_errors
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import silence
from bert_jax.training.checksums import checksums, path_of
from bert_jax.training.kept import Kept

Claim = TypeVar("Claim", bound=Section)
FORMAT_VERSION = 2
_UNSEALED_VERSION = 1  # had no checksums

# Of folders of checkpoints that were found damaged, before their step.
ASIDE = "damaged-"
# Orbax's, after the step of one that is not whole; it removes them before it saves.
_UNFINISHED = ".orbax-checkpoint-tmp"

# What is no damage, as Orbax and those below it say it: no memory, no right, no answer.
_NOT_DAMAGE = re.compile(
    r"RESOURCE_EXHAUSTED|PERMISSION_DENIED|Permission denied|UNAVAILABLE|DEADLINE_EXCEEDED"
    r"|UNAUTHENTICATED"
)


class Damaged(InputError):
    """A checkpoint that cannot be read, or holds other bits than were saved."""


@dataclasses.dataclass
class Restored:
    """A checkpoint that was read.

    Attributes:
      step: steps done.
      state: what was asked for of the state, as it was saved.
      metadata: what was saved beside it.
      damaged: newer checkpoints that cannot be used: {step: why}.
    """

    step: int
    state: Any
    metadata: dict[str, Any]
    damaged: dict[int, str]


class Checkpoints:
    """The checkpoints of one run.

    Saving is asynchronous: the state is copied, written behind the next steps, and counts only
    once it is whole. Opened to `read`, nothing is touched: a run may be saving meanwhile.

    Args:
      folder: where they are.
      run: which are kept.
      access: whether this is the run itself.
    """

    def __init__(self, folder: epath.Path, run: Run, access: Literal["read", "write"]):
        silence.keep()
        self._folder, self._access = folder, access
        self._kept = Kept(run)
        self._opened: ocp.training.Checkpointer | None = None

    @property
    def _checkpointer(self) -> ocp.training.Checkpointer:
        """Orbax's own, to write. It cannot be opened where one checkpoint is not readable."""
        if self._opened is None:
            for step in self.steps:
                self._kept.losses[step] = self.metadata(step)["held_out_loss"]
            self._opened = ocp.training.Checkpointer(
                absolute(self._folder),
                context=_context(),
                preservation_policy=self._kept,
                cleanup_tmp_directories=True,
            )
        return self._opened

    @property
    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, the newest first; one may be damaged nevertheless."""
        with named_errors(self._folder):
            if not self._folder.exists():
                return []
            return sorted(checkpoint_steps(absolute(self._folder)), reverse=True)

    def finish(self) -> None:
        """Waits until what is being saved is on disk; a save that fails leaves nothing.

        Raises:
          InputError: it could not be written; DiskFull of a full disk.
        """
        try:
            with named_errors(self._folder):
                if self._opened is not None:
                    self._opened.wait()
        except (InputError, Unavailable):
            self._remove_unfinished()
            raise

    def save(
        self, step: int, state: Any, metadata: dict[str, Any], held_out_loss: float | None = None
    ) -> None:
        """Begins to save; an earlier save must be finished.

        Args:
          step: steps done.
          state: of training.step.
          metadata: JSON that is kept beside it.
          held_out_loss: by which the best are told; None if it was not evaluated at this step.

        Raises:
          InputError: it cannot be written; DiskFull of a full disk.
        """
        metadata = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "checksums": checksums(state),
            "held_out_loss": held_out_loss,
            **metadata,
        }
        self._kept.losses[step] = held_out_loss
        with named_errors(self._folder):
            self._checkpointer.save_async(
                step,
                state,
                force=True,
                custom_metadata=metadata | {"sha256": _sha256(metadata)},
            )

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved beside the state.

        Raises:
          Damaged: it cannot be read, or is not what was written.
          InputError: it is of another format.
        """
        with self._damage(step), _alone():
            found = ocp.metadata(absolute(self._folder / str(step))).custom_metadata
            if not isinstance(found, dict) or not found:
                raise ValueError("nothing says what run it belongs to")
            version = found.get("format_version")
            said = found.pop("sha256", None)
            if version != _UNSEALED_VERSION and said != _sha256(found):
                raise ValueError("what is said of it was changed")
            if version == FORMAT_VERSION:
                if found["step"] != step:
                    raise ValueError(f"it is of step {found['step']}")
                return found
        raise InputError(
            f"{self._folder / str(step)}: format_version {version!r}, this version reads "
            f"{FORMAT_VERSION}; use the bert-jax that wrote it"
        )

    def claim(self, step: int, kind: type[Claim] = Experiment) -> Claim:
        """The claim that the checkpoint belongs to, an `Experiment` or the like.

        Raises:
          InputError: it is of another kind.
        """
        where = f"{self._folder / str(step)}"
        return resolve.from_json(json.dumps(self.metadata(step)["experiment"]), where, kind)

    def restore(self, step: int, abstract_state: Any) -> Restored:
        """The state of a step, laid out as `abstract_state` says, with its checksums compared.

        Args:
          step: one of the steps saved.
          abstract_state: tree of `jax.ShapeDtypeStruct` with shardings; a part of the state's
            tree restores that part.

        Raises:
          Damaged: it cannot be read, or is not what was written.
          InputError: it is of another format, may not be read, or does not fit into memory.
        """
        metadata = self.metadata(step)
        with mesh_lib.named_memory(), self._damage(step), _alone():
            state = ocp.load(absolute(self._folder / str(step)), abstract_state)
            said = metadata["checksums"]
            for name, found in checksums(state).items():
                if said.get(name) != found:
                    raise ValueError(f"{name} is not what was saved")
        return Restored(step, state, metadata, {})

    def abstract_state(self, step: int, place: jax.sharding.Sharding) -> Any:
        """All that a checkpoint holds, as `restore` takes it, whatever it is of.

        Args:
          step: one of the steps saved.
          place: where all arrays are to lie.

        Raises:
          Damaged: it cannot be read, or does not hold what was written.
        """
        said = self.metadata(step)["checksums"]
        with self._damage(step), _alone():
            tree = ocp.metadata(absolute(self._folder / str(step))).metadata
            if {path_of(path) for path, _ in jax.tree.leaves_with_path(tree)} != said.keys():
                raise ValueError("it lists other arrays than were saved")
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
            )

    def newest(
        self,
        abstract_state: Any,
        at_most: int | None = None,
        agreed: Callable[[int, str], str] = lambda step, complaint: complaint,
    ) -> Restored | None:
        """The newest checkpoint that is not damaged; None if there is none at all.

        Args:
          abstract_state: see `restore`.
          at_most: no newer one than of this step; any if None.
          agreed: (step, complaint) to the complaint of all processes; "" if nobody has any.

        Raises:
          InputError: see `restore`; or all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in self.steps:
            if at_most is not None and step > at_most:
                continue
            restored, complaint = None, ""
            try:
                restored = self.restore(step, abstract_state)
            except Damaged as error:
                complaint = str(error)
            complaint = agreed(step, complaint)
            if restored is not None and not complaint:
                return dataclasses.replace(restored, damaged=damaged)
            damaged[step] = complaint
        if damaged:
            raise InputError(
                f"{'; '.join(damaged.values())}: no checkpoint is left to go on from; put the "
                "files back, or choose another --workdir to start anew"
            )
        return None

    def named(self, which: str) -> int:
        """The step of the checkpoint that is called so.

        Args:
          which: a step, or `best`: the lowest held-out loss of those that have one.

        Raises:
          InputError: there is no such checkpoint.
        """
        if which == "best":
            losses = {}
            for step in self.steps:
                with contextlib.suppress(Damaged):
                    losses[step] = self.metadata(step)["held_out_loss"]
            known = [(loss, step) for step, loss in losses.items() if loss is not None]
            if known:
                return min(known)[1]
        elif which.isdecimal() and int(which) in self.steps:
            return int(which)
        there = ", ".join(map(str, self.steps))
        raise InputError(
            f"--checkpoint {which}: {self._folder} has none of this step or name; there are {there}"
            + ("; none of them was evaluated" if which == "best" else "")
        )

    def newest_step(self) -> int | None:
        """The newest step of whose checkpoint the metadata are whole; None if there is none.

        Raises:
          InputError: there are only damaged ones, or one of another format.
        """
        unreadable = self.unreadable()
        readable = [step for step in self.steps if step not in unreadable]
        if unreadable and not readable:
            raise InputError(f"{'; '.join(unreadable.values())}: put the files back")
        return max(readable, default=None)

    def unreadable(self) -> dict[int, str]:
        """Checkpoints of which nothing can be said: {step: why}."""
        found = {}
        for step in self.steps:
            try:
                self.metadata(step)
            except Damaged as error:
                found[step] = str(error)
        return found

    def set_aside(self, step: int) -> epath.Path:
        """Renames a damaged checkpoint, so that it is no longer counted; by one process for all."""
        number = 0
        while (aside := self._folder / f"{ASIDE}{step}{f'-{number}' if number else ''}").exists():
            number += 1
        with named_errors(self._folder):
            (self._folder / str(step)).rename(aside)
        return aside

    def look_again(self) -> None:
        """To be called once some were taken away: else their steps, done again, cannot be saved."""
        if self._opened is not None:
            self._opened.reload()

    def forget_after(self, step: int) -> None:
        """Removes newer checkpoints: of steps that will be done again, otherwise.

        All processes call it, and `look_again` once they have met.
        """
        self.finish()
        if jax.process_index():
            return
        with named_errors(self._folder):
            for newer in self.steps:
                if newer > step:
                    # Half removed under its own name it would be a damaged one, perhaps the last.
                    gone = self._folder / f"{newer}{_UNFINISHED}"
                    gone.rmtree(missing_ok=True)
                    (self._folder / str(newer)).rename(gone)
                    gone.rmtree()

    @contextlib.contextmanager
    def _damage(self, step: int) -> Iterator[None]:
        """Orbax raises many kinds of error; most mean that the folder is not as it was saved."""
        folder = self._folder / str(step)
        try:
            yield
        except (InputError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            reason = str(error).split("\n")[0][:200]
            if _NOT_DAMAGE.search(str(error)):
                raise InputError(f"{folder}: cannot be read now ({reason}); run again") from error
            raise Damaged(f"{folder}: damaged, cannot be restored ({reason})") from error

    def close(self) -> None:
        """Finishes what is being saved; a save that failed leaves nothing."""
        try:
            with named_errors(self._folder):
                if self._opened is not None:
                    self._opened.close()
        finally:
            self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Else a full disk would stay full. Nothing is being saved any more."""
        if self._access == "read" or jax.process_index():
            return
        with contextlib.suppress(OSError, ValueError):  # epath's word for a folder not empty
            for path in self._folder.glob(f"*{_UNFINISHED}"):
                path.rmtree()
            self._folder.rmdir()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _context(**options: Any) -> ocp.Context:
    saving = ocp.options.ArrayOptions.Saving(use_compression=False)
    loading = ocp.options.PyTreeOptions.Loading(partial_load=True)
    return ocp.Context(
        array_options=ocp.options.ArrayOptions(saving=saving),
        pytree_options=ocp.options.PyTreeOptions(loading=loading),
        **options,
    )


def _alone() -> ocp.Context:
    """Each process reads for itself: else one that fails would leave the others waiting for it."""
    me = jax.process_index()
    if jax.process_count() == 1:
        return _context()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
    )
    return _context(multiprocessing_options=alone)


def _sha256(metadata: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
