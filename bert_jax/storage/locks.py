"""Locks of folders on this machine, and descriptions of the processes that hold them."""

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from typing import IO

from etils import epath

from bert_jax.errors import InputError, translate_parser_errors
from bert_jax.storage.workdir import (
    create_folder,
    open_without_links,
    require_local,
    translate_os_errors,
)

_LOCK_TRIES = 4  # with pauses, since `is_locked` holds a lock for a moment
_HOLDER_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that has locked a folder, or owns a run in a bucket."""

    token: str  # unique for each lock
    host: str  # the name of the machine
    process: int  # the process id
    since: float  # the time of the lock, in seconds since 1970

    @classmethod
    def this_process(cls) -> "Holder":
        """Returns a holder for this process, now."""
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), time.time())

    @classmethod
    def parse(cls, data: bytes) -> "Holder | None":
        """Parses the output of `text`; None for other content, such as a newer format."""
        with contextlib.suppress(InputError, OSError), translate_parser_errors("a holder"):
            record = json.loads(data)
            if record.pop("format_version") == _HOLDER_VERSION:
                holder = cls(**record)
                str(holder)  # fails if a field has another type
                return holder
        return None

    def text(self) -> str:
        """Returns the holder as a line of JSON, which `parse` reads."""
        return json.dumps({"format_version": _HOLDER_VERSION, **dataclasses.asdict(self)}) + "\n"

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.process} of {self.host} since {since}"


@contextlib.contextmanager
def lock(
    folder: epath.Path, address: epath.PathLike | None = None, setting: str = "--workdir"
) -> Iterator[Holder]:
    """Locks the folder for this process, and creates it if needed; yields the holder.

    FOLDER/lock describes the holder. The lock is released at the end of the context, or when the
    process dies. If the body raises before it has made a file, the file `lock` is removed, and so
    is the folder if this call created it.

    Args:
      folder: the folder.
      address: the folder's name in messages; None: the folder.
      setting: the flag or field that names the folder, for messages.
    """
    require_local(folder)
    path = folder / "lock"
    with create_folder(folder):
        with translate_os_errors(path):
            before = {other.name for other in folder.iterdir()}
            file = _open_locked(path, address or folder, setting)
        with file:
            try:
                me = Holder.this_process()
                with translate_os_errors(path):
                    file.truncate(0)
                    file.write(me.text().encode())
                    os.fsync(file)  # from now on, others see it on a shared disk
                yield me
                file.truncate(0)
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(0)
                    if {other.name for other in folder.iterdir()} - before == {"lock"}:
                        path.unlink()  # while locked: later another process may hold it
                raise


def _open_locked(path: epath.Path, address: epath.PathLike, setting: str) -> IO[bytes]:
    """Returns the lock file, opened and locked."""
    tries = 0  # at which another process held the lock
    while True:
        with contextlib.ExitStack() as stack:
            file = open(os.fspath(path), "a+b", buffering=0, opener=open_without_links)  # noqa: SIM115
            stack.callback(file.close)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another holder may have removed the file that this process has opened.
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    stack.pop_all()  # keeps the file open
                    return file
            except BlockingIOError as error:
                tries += 1
                if tries == _LOCK_TRIES:
                    file.seek(0)
                    holder = Holder.parse(file.read()) or "another process"
                    raise InputError(
                        f"{address}: in use by {holder}; wait for it, or choose another folder "
                        f"with {setting}"
                    ) from error
                time.sleep(0.05)


def is_locked(folder: epath.Path) -> bool:
    """Returns whether a process of this machine holds the folder's lock."""
    try:
        with open(os.fspath(folder / "lock"), "rb") as file:
            # Shared, so that two processes that ask do not disturb each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
