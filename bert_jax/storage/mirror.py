"""Runs in buckets, which are written here and sent there.

A run writes to a folder of this machine alone; a thread sends its small files to the bucket when
they are due, and what a failing network keeps back goes with the next chance. (For corpora see
`copies`.)

    gs://B/W/OWNER       the start that the run belongs to
    CACHE/runs/NAME/     where a run in a bucket is written, with .owner.json: its last starts
    CACHE/views/NAME/    the small files of a run in a bucket, fetched to be read

Who owns a run: each start writes a token into OWNER, over that of the start before, and reads it
again before each push and each checkpoint. A start that finds another's ends, so that of two the
later wins, and a start waits for nobody. Where the local folder and the bucket differ, the last
owner decides: if it wrote into this local folder, the local files hold lines that may not have been
sent, and win; else another machine went on with the run, and the bucket's files win.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import threading
import time
from collections.abc import Iterable
from typing import Literal

from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage import buckets, retry
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import (
    RUN_FILES,
    Holder,
    Workdir,
    cache_folder,
    in_use,
    new_file,
    require_run,
    translate_os_errors,
    write_atomic,
)

OWNER = "OWNER"
_OWNED = ".owner.json"  # in the local folder of a run: tokens of starts that wrote there
_VIEW_FILES = (*RUN_FILES, "plan.json")

# Seconds between two pushes of what a run has written, and which share of the time they may take.
_SECONDS, _SHARE = 30.0, 0.05
# Seconds without a line after which a run in a bucket counts as killed.
_LATELY = 900.0


def open_workdir(root: epath.PathLike, corpus_dir: str = "") -> Workdir:
    """Opens the workdir of a run to read it; fetches the small files of a run in a bucket."""
    return _open(root, corpus_dir, "views")


def open_to_write(root: epath.PathLike, corpus_dir: str = "") -> Workdir:
    """Opens the workdir of a run to write it.

    For a run in a bucket, this is the folder of this machine that `Mirror` fills and sends.
    """
    return _open(root, corpus_dir, "runs")


def _open(root: epath.PathLike, corpus_dir: str, folder: Literal["views", "runs"]) -> Workdir:
    if not buckets.is_bucket(root):
        return Workdir(root, corpus_dir)
    remote = epath.Path(os.fspath(root).rstrip("/"))
    local = cached(folder, remote)
    if folder == "views":
        _refresh(remote, local, _VIEW_FILES)
    else:
        require_run(remote, storage_of(remote).names(remote) - {OWNER})
    return Workdir(local, corpus_dir, remote)


def is_going_on(workdir: Workdir) -> bool:
    """Returns whether a run is at work, as far as is known.

    Of one in a bucket, opened to `read`: whether its last line is recent.
    """
    if workdir.remote is None:
        return in_use(workdir.root)
    owner, last, kind = holder(workdir), 0.0, ""
    started = owner.since if owner else 0.0
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, IndexError):
        line = json.loads(workdir.timings.read_bytes().split(b"\n")[-2])
        last, kind = line["time"], line["kind"]
    has_ended = kind == "end" and last >= started
    return not has_ended and time.time() - max(started, last) < _LATELY


def holder(workdir: Workdir, seconds: float | None = None) -> Holder | None:
    """Returns who holds a run, or has started one in a bucket last; None: nobody that is known."""
    place = workdir.root / "lock" if workdir.remote is None else workdir.remote / OWNER
    with translate_os_errors(place), contextlib.suppress(FileNotFoundError):
        return Holder.parse(storage_of(place).read(place, seconds=seconds))
    return None


def _refresh(remote: epath.Path, local: epath.Path, files: Iterable[str]) -> None:
    """Makes files of a local folder those of the bucket."""
    there = buckets.listing(remote, "/")
    with translate_os_errors(local):
        local.mkdir(parents=True, exist_ok=True)
        for name in files:
            here = local / name
            if name not in there:
                here.unlink(missing_ok=True)
            elif not buckets.is_same(here, there[name]):
                data = storage_of(remote).read(remote / name, listed=there[name])
                with new_file(here) as temporary:
                    temporary.write_bytes(data)


def cached(kind: str, remote: epath.PathLike) -> epath.Path:
    """Returns the local folder for a place in a bucket: its name for people, and a hash of it."""
    name = "/".join(buckets.split(remote))
    short = re.sub(r"[^A-Za-z0-9.-]+", "_", name)[-40:]
    return cache_folder() / kind / f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


class Mirror:
    """Sends what process `number` writes of a run to the run's bucket; of a local run nothing.

    Process 0, which holds the lock of the local folder, writes the run's small files, and all of
    them their traces. While entered, a thread sends what has changed every half a minute, taking a
    twentieth of the time at most.
    """

    def __init__(self, workdir: Workdir, number: int = 0):
        self._workdir, self._number = workdir, number
        self._local, self._remote = workdir.root, workdir.remote
        self.token = ""  # of the start that the run belongs to
        self._is_first = False  # nobody had started the run before
        self._sent: dict[str, tuple[int, int]] = {}  # (bytes, time) of files that were sent
        self._pushing = threading.Lock()
        self._taken: InputError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._push_again, name="mirror", daemon=True)

    def take(self, me: Holder) -> None:
        """Makes this start the run's owner, and the local files those to go on with."""
        self.token = me.token
        if self._remote is None:
            return
        before, ours = holder(self._workdir), self._owned()
        self._is_first = before is None
        if before is None or before.token not in ours:
            _refresh(self._remote, self._local, RUN_FILES)
        kept = [before.token] if before is not None and before.token in ours else []
        # Before the bucket's: a kill between the two leaves the local files the owner's still.
        tokens = json.dumps({"format_version": 1, "tokens": [*kept, me.token]})
        write_atomic(self._local / _OWNED, tokens)
        if self._is_first:
            buckets.put(self._remote / OWNER, b"")
        buckets.put(self._remote / OWNER, me.text().encode(), right="replace")

    def check(self) -> None:
        """Raises InputError if a push has seen that the run belongs to another start."""
        if self._taken is not None:
            raise self._taken

    def flush(self) -> None:
        """Sends all that has changed, however long it takes while the network is there."""
        if self._remote is not None:
            self._push(retry.GIVE_UP)

    def forget(self, files: Iterable[str]) -> None:
        """Removes what a start has sent that is to leave nothing; as far as that can be done."""
        if self._remote is None:
            return
        self._stop.set()
        with contextlib.suppress(Exception), self._pushing:
            self._require_own(0)
            buckets.remove(self._remote / name for name in files)
            if self._is_first:
                buckets.remove([self._remote / OWNER])
                (self._local / _OWNED).unlink(missing_ok=True)

    def __enter__(self) -> "Mirror":
        if self._remote is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._remote is not None and not self._stop.is_set():
            self._stop.set()
            with contextlib.suppress(Exception):  # a failure is shown, and may be the network
                self._push(0)

    def _owned(self) -> list[str]:
        """Reads the tokens of the starts that wrote into the local folder."""
        try:
            return json.loads((self._local / _OWNED).read_text())["tokens"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return []

    def _require_own(self, seconds: float) -> None:
        """Raises InputError if OWNER is another's; one that cannot be read is not."""
        now = holder(self._workdir, seconds)
        if now is not None and now.token != self.token:
            self._taken = InputError(
                f"{self._remote}: now belongs to {now}, which has started the run after this "
                "one; this one ends here"
            )
            raise self._taken

    def _push_again(self) -> None:
        pause = _SECONDS
        while not self._stop.wait(pause):
            began = time.monotonic()
            try:
                self._push(0)
            except Exception:  # the next one may arrive; a flush waits, and raises
                if self._taken is not None:
                    return
            pause = max(_SECONDS, (time.monotonic() - began) / _SHARE)

    def _push(self, seconds: float) -> None:
        assert self._remote is not None
        with self._pushing:
            changed = self._changed()
            if changed or seconds:
                self._require_own(seconds)
            for name, stamp in changed.items():
                with translate_os_errors(self._local / name):
                    data = (self._local / name).read_bytes()
                buckets.put(self._remote / name, data, seconds)
                self._sent[name] = stamp

    def _changed(self) -> dict[str, tuple[int, int]]:
        """Returns the files that are not sent as they are now."""
        local = pathlib.Path(self._local)
        mine = [local / name for name in RUN_FILES] if self._number == 0 else []
        mine += (local / "profile").rglob(f"process_{self._number}.*")
        changed = {}
        for path in mine:
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                stamp = stat.st_size, stat.st_mtime_ns
                name = path.relative_to(local).as_posix()
                if self._sent.get(name) != stamp:
                    changed[name] = stamp
        return changed
