"""Plans of epochs as files, in the cache of this host.

A plan of `data.plans` is a file: its chunks (`data.pairs`) in the random order in which the
epoch takes them, 10 bytes each. Where examples share rows (`data.packing`), which ones do stands
before them: 8 bytes a row and 4 an example.

    CACHE/plans/NAME.plan       a plan; NAME is a hash of all that it hangs on
    CACHE/plans/NAME.plan.tmp   one that is being made; its maker holds a lock on it

A file that is cut off or changed is removed, and made again.
"""

import contextlib
import fcntl
import os
import struct
import zlib
from typing import NamedTuple

import numpy as np

from bert_jax.data import packing
from bert_jax.storage.workdir import named_errors, no_link

# Plans that a host keeps, those used last: three runs need as many.
_KEPT = 8
# What a file begins with: magic; chunks, examples of packed rows, packed rows; CRC-32 of them all.
_HEAD = struct.Struct("<16sQQQQ")
_MAGIC = b"bert_jax plan\n\0\0"
# Chunks written at once.
_WRITTEN = 1 << 20


class Plan(NamedTuple):
    """An epoch's chunks in their random order, and its packed rows."""

    chunks: np.ndarray
    packs: packing.Packs | None


def read(path: str, dtype: np.dtype) -> Plan | None:
    """Returns a plan, mapped; None if it is not there, or not as it was made."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD.size)
            size = os.fstat(file.fileno()).st_size - _HEAD.size
        magic, count, examples, rows, checksum = _HEAD.unpack(head)
        kinds = [*_arrays_of_packs(examples, rows), (dtype, count)]
        if magic != _MAGIC or not count or size != sum(k.itemsize * n for k, n in kinds):
            raise ValueError
        whole = np.memmap(path, np.uint8, "r", offset=_HEAD.size, shape=(size,))
        if zlib.crc32(whole) != checksum:
            raise ValueError
        arrays, at = [], 0
        for kind, number in kinds:
            arrays.append(whole[at : at + kind.itemsize * number].view(kind))
            at += kind.itemsize * number
        plan = Plan(arrays[-1], packing.Packs(*arrays[:-1]) if rows else None)
    except FileNotFoundError:
        return None
    except (ValueError, struct.error):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return plan


def _arrays_of_packs(examples: int, rows: int) -> list[tuple[np.dtype, int]]:
    """Returns type and length of each array of `packing.Packs` in a file."""
    return [(np.dtype(np.uint64), rows + 1), (np.dtype(np.uint32), examples)] if rows else []


def locked(path: str) -> int | None:
    """Returns the temporary file of a plan, locked for its maker; None if another one makes it."""
    temporary = f"{path}.tmp"
    file = no_link(temporary, os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(OSError):  # held by another, or no longer there
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), os.stat(temporary)):
            if not os.path.exists(path):
                return file
            os.unlink(temporary)
    os.close(file)
    return None


def write(path: str, plan: np.ndarray, order: np.ndarray, packs: packing.Packs | None) -> None:
    """Writes a plan, whose temporary file is locked, in this order of its chunks."""
    temporary, checksum = f"{path}.tmp", 0
    try:
        with named_errors(path), open(temporary, "wb") as file:
            file.seek(_HEAD.size)
            for array in () if packs is None else packs:
                checksum = zlib.crc32(array.view(np.uint8), checksum)
                file.write(array.view(np.uint8))
            for start in range(0, len(plan), _WRITTEN):
                chunks = plan[order[start : start + _WRITTEN]].tobytes()
                checksum = zlib.crc32(chunks, checksum)
                file.write(chunks)
            counts = (0, 0) if packs is None else (len(packs.slots), len(packs))
            file.seek(0)
            file.write(_HEAD.pack(_MAGIC, len(plan), *counts, checksum))
            file.flush()
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _prune(os.path.dirname(path))


def _prune(folder: str) -> None:
    """Removes the plans that were not used for longest, and what makers left that were killed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        used = {e.path: e.stat().st_mtime for e in entries if e.name.endswith(".plan")}
        for path in sorted(used, key=used.__getitem__)[:-_KEPT]:
            os.unlink(path)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".tmp"):
                file = locked(entry.path.removesuffix(".tmp"))
                if file is not None:
                    os.unlink(entry.path)
                    os.close(file)
