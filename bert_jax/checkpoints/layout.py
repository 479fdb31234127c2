"""The folders of a run's checkpoints: lists, renames and deletes them.

    W/checkpoints/STEP/                         a complete checkpoint
    W/checkpoints/STEP.orbax-checkpoint-tmp/    a checkpoint that is being written or deleted
    W/checkpoints/damaged-STEP/                 a checkpoint that was found to be damaged

A checkpoint is the training state (`training.step.State`) and its metadata, in JSON: the
experiment, the environment, and the sums of metrics since the last line of metrics.jsonl, so that a
resumed run writes the same lines as one without interruption. Orbax does not detect a flipped bit,
so the metadata have a checksum of every array, the same on any mesh, and one of the metadata.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.utils import checkpoint_steps

from bert_jax import private_apis
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import retry
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import absolute, translate_os_errors

T = TypeVar("T")

FORMAT_VERSION = 2
DAMAGED_PREFIX = "damaged-"
# Orbax adds this to the name of an incomplete checkpoint, and deletes such folders before it saves.
_UNFINISHED = ".orbax-checkpoint-tmp"
# Orbax writes this file into a complete checkpoint in a bucket.
_COMMITTED = "commit_success.txt"


class Damaged(InputError):
    """A checkpoint has other checksums than it should, or its readable files cannot be restored."""


def list_steps(folder: epath.Path) -> list[int]:
    """Returns the steps of complete checkpoints, newest first; does not retry."""
    return sorted(checkpoint_steps(absolute(folder)), reverse=True) if folder.exists() else []


class CheckpointFolder:
    """The folder of one run's checkpoints, on a disk or in a bucket."""

    def __init__(self, path: epath.Path):
        self.path, self._storage = path, storage_of(path)
        self._had_access = False  # whether a bucket has granted access before

    def cache_reads(self) -> contextlib.AbstractContextManager[None]:
        """Caches reads of the folder in a bucket; nothing may change it inside the context."""
        return self._storage.cache_reads(self.path)

    @property
    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, newest first; some may be damaged."""
        return self.retry(lambda: list_steps(self.path))

    def step_path(self, step: int) -> epath.Path:
        """Returns the folder of one checkpoint."""
        return self.path / str(step)

    def retry(self, work: Callable[[], T]) -> T:
        """Calls `work`, which uses the folder, and retries it after transient errors."""
        with translate_os_errors(self.path), retry_orbax_requests(self.path):
            # Once access has worked, a denial means that a token has expired: wait for a new one.
            denied = "wait" if self._had_access else "refuse"
            result = retry.call_with_retries(work, str(self.path), denied=denied)
        self._had_access = self._storage.is_bucket
        return result

    @contextlib.contextmanager
    def translate_write_errors(self) -> Iterator[None]:
        """Raises Unavailable instead of OSError and ValueError when it writes to a bucket.

        Such an error is transient: the run has tested its access at the start, and no other program
        writes there. A corrupt response or a stale listing raises either.
        """
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore raises ValueError for everything
            if not self._storage.is_bucket:
                raise
            reason = str(error).partition("\n")[0][:200]
            raise Unavailable(f"{self.path}: {reason}; run again to resume") from error

    def rename_damaged(self, step: int) -> str:
        """Renames a damaged checkpoint, so that it no longer counts.

        Returns its new name; "" if it does not exist. Called by process 0 only.
        """
        folder = self.step_path(step)

        def rename() -> str:
            if not folder.exists():
                return ""
            target, number = self.path / f"{DAMAGED_PREFIX}{step}", 0
            while target.exists():  # an earlier attempt in a bucket may have moved a part of it
                number += 1
                target = self.path / f"{DAMAGED_PREFIX}{step}-{number}"
            # If this succeeds in spite of an error, the next attempt finds no folder.
            with self.translate_write_errors():
                folder.rename(target)
            if self._storage.is_bucket:  # Orbax deletes folders without this file as unfinished
                (target / _COMMITTED).write_text("")
            return target.name

        return self.retry(rename)

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, after it was renamed: what a kill leaves counts as incomplete."""
        folder, renamed = self.step_path(step), self.path / f"{step}{_UNFINISHED}"

        def rename_and_delete() -> None:
            renamed.rmtree(missing_ok=True)
            if folder.exists():
                with self.translate_write_errors():
                    folder.rename(renamed)
                renamed.rmtree()

        self.retry(rename_and_delete)

    def delete_unfinished(self) -> None:
        """Deletes incomplete checkpoints, and the folder if it is empty then; ignores errors.

        No save may be running. Orbax does this as well, but when a save starts, which is too late
        if that save needs the space.
        """
        with contextlib.suppress(Exception), retry_orbax_requests(self.path):
            for path in self.path.glob(f"*{_UNFINISHED}"):
                path.rmtree()
            self.path.rmdir()  # raises an error, which is ignored, unless the folder is empty


def orbax_settings() -> ocp.Context:
    """Returns the Orbax settings of all checkpoints."""
    settings = ocp.Context()
    settings.array.saving.use_compression = False
    # The array metadata store repeats the shapes of the arrays, and has no checksum.
    settings.array.saving.array_metadata_store = None
    settings.pytree.loading.partial_load = True
    return settings


def retry_orbax_requests(folder: epath.Path) -> contextlib.AbstractContextManager[None]:
    """Makes Orbax retry requests to a bucket inside the context; no change for a local folder."""
    if not storage_of(folder).is_bucket:
        return contextlib.nullcontext()
    return private_apis.use_bucket_client(_retrying_file_system)


@functools.cache
def _retrying_file_system() -> Any:
    from bert_jax.storage.gcs import RetryingFileSystem

    # No cache: lists must show new objects of other processes. etils requires finalize_on_close.
    return RetryingFileSystem(use_listings_cache=False, finalize_on_close=True)


def hash_json(metadata: dict[str, Any]) -> str:
    """Returns a checksum of a checkpoint's metadata, which have the checksums of its arrays."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
