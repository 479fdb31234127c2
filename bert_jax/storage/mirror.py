"""Copies of the small files of a run in its bucket: a thread uploads what this machine writes.

A failed upload is repeated half a minute later. (`copies` copies corpora, and Orbax writes
checkpoints to the bucket itself.)

    gs://B/W/OWNER       the process that owns the run
    CACHE/runs/NAME/     the local folder of a run that trains here, with .owner.json (see below)
    CACHE/views/NAME/    the small files of a run that is only read

A process that starts a run becomes its owner: it replaces the token in OWNER with its own. It reads
OWNER again before each upload and each checkpoint, and ends if it finds another token. So the
process that started last wins, and no process waits for another.

If the local folder and the bucket differ at a start, it depends on the previous owner which files
win. If it wrote into this local folder, .owner.json has its token, and the local files win: the
bucket may lack some lines. Otherwise another machine has continued the run, and the bucket's files
win.
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

from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage import buckets, retry
from bert_jax.storage.locks import Holder, is_locked
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import (
    COMPLETE,
    RUN_FILES,
    SWEEP,
    Workdir,
    absolute,
    cache_folder,
    holds_finetuning,
    load_experiment,
    replace_atomically,
    require_run_among,
    translate_os_errors,
    write_atomic,
)

OWNER = "OWNER"
_LOCAL_OWNERS = ".owner.json"  # in the local folder of a run: the tokens of owners that wrote there
_VIEW_FILES = (*RUN_FILES, "plan.json", SWEEP)

# Seconds between two uploads, and the largest share of time that uploads may take.
_UPLOAD_EVERY, _UPLOAD_SHARE = 30.0, 0.05
# A run in a bucket counts as killed after so many seconds without a line in timings.jsonl.
_KILLED_AFTER = 900.0


def open_workdir(root: epath.PathLike, corpus_dir: str = "", to_write: bool = False) -> Workdir:
    """Opens the workdir of a run, on this machine or in a bucket.

    For a run in a bucket, the workdir has local copies of the files. By default this function
    downloads them. With `to_write`, `Mirror` downloads and uploads them.
    """
    if to_write and corpus_dir:
        _require_corpus_outside_other_runs(epath.Path(root), epath.Path(corpus_dir))
    if not buckets.is_in_bucket(root):
        return Workdir(root, corpus_dir)
    remote = epath.Path(os.fspath(root).rstrip("/"))
    local = cache_folder_of("runs" if to_write else "views", remote)
    if to_write:
        require_run_among(remote, storage_of(remote).names(remote) - {OWNER})
    else:
        _sync_from_bucket(remote, local, _VIEW_FILES)
    return Workdir(local, corpus_dir, remote)


def _require_corpus_outside_other_runs(root: epath.Path, corpus_dir: epath.Path) -> None:
    """Raises InputError if a new corpus would be made in the workdir of another run.

    A fork often shares the corpus of its parent, and then has none in its own workdir. A
    folder that holds the run's workdir is never another run's, even if it has an experiment.json,
    as that of `verify-resume` does.
    """
    storage, folder = storage_of(corpus_dir), absolute(corpus_dir)
    is_workdir = storage.exists(folder / "experiment.json")
    other, own = folder if is_workdir else folder.parent, absolute(root)
    if (
        storage.exists(folder / COMPLETE)
        or not storage.exists(other / "experiment.json")
        or other in own.parents
        or (other == own and not is_workdir)
    ):
        return
    run, used = open_workdir(other), folder
    if not holds_finetuning(run):
        used = run.with_corpus(load_experiment(run).run.corpus_dir).corpus
    remedy = f"the run in {other} uses {used}: set run.corpus_dir={used}"
    if absolute(used) == folder:
        remedy = f"{other} is the workdir of another run: choose another run.corpus_dir"
    raise InputError(f"run.corpus_dir={corpus_dir}: no prepared corpus here; {remedy}")


def is_running(workdir: Workdir) -> bool:
    """Returns whether a process is working on a run.

    For a run in a bucket this is a guess, from the time in OWNER and the last line of
    timings.jsonl.
    """
    if workdir.remote is None:
        return is_locked(workdir.root)
    holder, last_time, last_kind = read_holder(workdir), 0.0, ""
    started = holder.since if holder else 0.0
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, IndexError):
        # Whole lines end with a newline, so the last part is empty or an incomplete line.
        line = json.loads(workdir.timings.read_bytes().split(b"\n")[-2])
        last_time, last_kind = line["time"], line["kind"]
    has_ended = last_kind == "end" and last_time >= started
    return not has_ended and time.time() - max(started, last_time) < _KILLED_AFTER


def read_holder(workdir: Workdir, seconds: float | None = None) -> Holder | None:
    """Returns the process that holds a run: its lock, or OWNER in a bucket; None if unknown."""
    path = workdir.root / "lock" if workdir.remote is None else workdir.remote / OWNER
    with translate_os_errors(path), contextlib.suppress(FileNotFoundError):
        return Holder.parse(storage_of(path).read(path, seconds=seconds))
    return None


def _sync_from_bucket(remote: epath.Path, folder: epath.Path, names: Iterable[str]) -> None:
    """Makes files of a local folder equal to the bucket's; removes files that the bucket lacks."""
    objects = buckets.list_objects(remote, "/")
    with translate_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = folder / name
            if name not in objects:
                path.unlink(missing_ok=True)
            elif not buckets.has_same_content(path, objects[name]):
                data = storage_of(remote).read(remote / name, entry=objects[name])
                with replace_atomically(path) as temporary:
                    temporary.write_bytes(data)


def cache_folder_of(kind: str, remote: epath.PathLike) -> epath.Path:
    """Returns the local folder for a folder in a bucket, CACHE/KIND/NAME.

    NAME is a readable part of the address, followed by a hash of the address.
    """
    name = "/".join(buckets.split(remote))
    short = re.sub(r"[^A-Za-z0-9.-]+", "_", name)[-40:]
    return cache_folder() / kind / f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


class Mirror:
    """Uploads the files that one process, `process_index`, writes for a run in a bucket.

    Process 0, which has locked the local folder, writes the small files of the run. Every process
    writes its traces. Inside the context, a thread uploads changed files every half a minute, and
    is busy at most 5 % of the time. For a local run, all methods do nothing.
    """

    def __init__(self, workdir: Workdir, process_index: int = 0):
        self._workdir, self._process_index = workdir, process_index
        self._local, self._remote = workdir.root, workdir.remote
        self.token = ""  # of the owner, once this process has acquired the run
        self._is_first = False  # whether the run had no owner before
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and time of files as uploaded
        self._upload_lock = threading.Lock()
        self._ownership_error: InputError | None = None  # set once another process owns the run
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._upload_regularly, name="mirror", daemon=True)

    def acquire(self, me: Holder) -> None:
        """Makes this process the owner of the run; downloads files that another machine wrote."""
        self.token = me.token
        if self._remote is None:
            return
        previous = read_holder(self._workdir)
        self._is_first = previous is None
        tokens = [me.token]
        if previous is not None and previous.token in self._local_owners():
            tokens.insert(0, previous.token)
        else:
            _sync_from_bucket(self._remote, self._local, RUN_FILES)
        # .owner.json is written before OWNER. If this process is killed in between, OWNER still has
        # the previous token, which .owner.json has kept if the local files won.
        record = json.dumps({"format_version": 1, "tokens": tokens})
        write_atomic(self._local / _LOCAL_OWNERS, record)
        if self._is_first:  # tests the permission to create, then that to replace
            buckets.put(self._remote / OWNER, b"")
        buckets.put(self._remote / OWNER, me.text().encode(), action="replace")

    def require_owned(self) -> None:
        """Raises InputError if an upload has found that another process owns the run."""
        if self._ownership_error is not None:
            raise self._ownership_error

    def flush(self) -> None:
        """Uploads all changed files; retries for `retry.GIVE_UP` seconds if the network fails."""
        if self._remote is not None:
            self._upload(retry.GIVE_UP)

    def discard(self, files: Iterable[str]) -> None:
        """Removes files from the bucket, for a start that is refused after it uploaded them."""
        if self._remote is None:
            return
        self._stop.set()
        with contextlib.suppress(Exception), self._upload_lock:
            self._check_owner(0)
            buckets.remove(self._remote / name for name in files)
            if self._is_first:
                buckets.remove([self._remote / OWNER])
                (self._local / _LOCAL_OWNERS).unlink(missing_ok=True)

    def __enter__(self) -> "Mirror":
        if self._remote is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._remote is not None and not self._stop.is_set():
            self._stop.set()
            with contextlib.suppress(Exception):  # must not hide the error that ends the run
                self._upload(0)

    def _local_owners(self) -> list[str]:
        """Reads the tokens of the owners that wrote into the local folder."""
        try:
            return json.loads((self._local / _LOCAL_OWNERS).read_text())["tokens"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return []

    def _check_owner(self, seconds: float) -> None:
        """Raises InputError if OWNER has another token; accepts a missing or damaged OWNER."""
        owner = read_holder(self._workdir, seconds)
        if owner is not None and owner.token != self.token:
            self._ownership_error = InputError(
                f"{self._remote}: was taken over by {owner}; this process ends"
            )
            raise self._ownership_error

    def _upload_regularly(self) -> None:
        pause = _UPLOAD_EVERY
        while not self._stop.wait(pause):
            start = time.monotonic()
            try:
                self._upload(0)
            except Exception:  # the next upload tries again, and `flush` raises
                if self._ownership_error is not None:
                    return
            pause = max(_UPLOAD_EVERY, (time.monotonic() - start) / _UPLOAD_SHARE)

    def _upload(self, seconds: float) -> None:
        """Uploads changed files; `seconds` limits the time for which a request is retried."""
        assert self._remote is not None
        with self._upload_lock:
            changed = self._changed_files()
            if changed or seconds:  # `flush` checks the owner even if nothing has changed
                self._check_owner(seconds)
            for name, stamp in changed.items():
                with translate_os_errors(self._local / name):
                    data = (self._local / name).read_bytes()
                buckets.put(self._remote / name, data, seconds)
                self._uploaded[name] = stamp

    def _changed_files(self) -> dict[str, tuple[int, int]]:
        """Returns size and time of each file that differs from what was uploaded, by its path."""
        folder = pathlib.Path(self._local)
        paths = [folder / name for name in RUN_FILES] if self._process_index == 0 else []
        paths += (folder / "profile").rglob(f"process_{self._process_index}.*")
        changed = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                stamp = stat.st_size, stat.st_mtime_ns
                name = path.relative_to(folder).as_posix()
                if self._uploaded.get(name) != stamp:
                    changed[name] = stamp
        return changed
