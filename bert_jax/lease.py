"""Who holds a folder, and the lock on a folder in a bucket.

No system frees a bucket's lock when its holder dies, so the holder writes again and again that it
lives. The lock is a series of objects,

    W/lock/000001, 000002, ...

of which the newest says who holds the folder, or that it was given back. To take it is to create
the next number, which one process alone can; the newest is never removed while something else lies
in the folder, so that no number is given twice.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from etils import epath

from bert_jax import bucket
from bert_jax.config import InputError

FORMAT_VERSION = 1

# Seconds between two signs of life; for how long a holder is watched without one until it counts
# as dead, whatever the clocks say, since those of two machines may differ; between two looks at it.
BEAT, SILENCE, LOOK = 10.0, 90.0, 3.0

# Seconds since 1970: the year 9999, up to which times can be written.
_LAST = 253402300800.0


@dataclasses.dataclass
class Holder:
    """Who holds a folder.

    Attributes:
      token: differs for each time it is taken.
      host: the machine's name.
      machine: the boot and the space of process ids in which `process` has its meaning; "" if the
        system does not say.
      process: its id.
      began: when that process began, as the system counts, so that another of the same id is known.
      since: when the folder was taken, in seconds since 1970.
      beat: when the holder last said that it lives.
      state: `released` once it has given the folder back.
    """

    token: str
    host: str
    machine: str
    process: int
    began: str
    since: float
    beat: float
    state: str = "held"

    @classmethod
    def me(cls) -> "Holder":
        """This process, now."""
        now, process = time.time(), os.getpid()
        host = socket.gethostname()
        return cls(uuid.uuid4().hex, host, _machine(), process, _began(process), now, now)

    @classmethod
    def parse(cls, data: bytes) -> "Holder | None":
        """What `text` wrote; None if it is something else, of another version, say."""
        try:
            found = json.loads(data)
            if found.pop("format_version") != FORMAT_VERSION:
                return None
            holder = cls(**found)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return holder if holder._is_sound() else None

    def _is_sound(self) -> bool:
        """Whether every field can be what `me` wrote there."""
        texts = (self.token, self.host, self.machine, self.began, self.state)
        times = (self.since, self.beat)
        return (
            all(type(text) is str for text in texts)
            and all(type(number) is float and 0 <= number < _LAST for number in times)
            and type(self.process) is int
            and 0 < self.process < 2**32
        )

    def text(self) -> str:
        """For a file."""
        return json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}) + "\n"

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.process} of {self.host} since {since}"


def in_use(folder: epath.PathLike, holder: Any, more: str = "") -> InputError:
    """What to raise where somebody else holds the folder."""
    return InputError(
        f"{folder}: in use by {holder or 'another process'}{more}; "
        "wait for it, or choose another folder with --workdir"
    )


@contextlib.contextmanager
def held(folder: epath.Path) -> Iterator[None]:
    """Holds a folder of a bucket for this process.

    If what is done meanwhile fails and leaves nothing, the lock goes, too. A process that was taken
    for dead, and was not, ends at once when it notices.

    Raises:
      InputError: another process holds it.
    """
    lease = _Lease.take(folder)
    try:
        yield
    except BaseException:
        lease.stop()
        with contextlib.suppress(Exception):  # what failed is told, and may be the network
            alone = {path.name for path in folder.iterdir()} == {"lock"}
            lease.leave("nothing" if alone else "released")
        raise
    lease.stop()
    lease.leave("released")


def is_held(folder: epath.Path) -> bool:
    """Whether a process holds a folder of a bucket, as far as is known at once."""
    numbers = _numbers(folder)
    holder = _read(folder, numbers[-1]) if numbers else None
    if holder is None or holder.state == "released":
        return False
    return _lives_here(holder) if _is_here(holder) else time.time() - holder.beat < SILENCE


class _Lease:
    def __init__(self, folder: epath.Path, number: int, holder: Holder):
        self._folder, self._number, self._holder = folder, number, holder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name="lease", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, folder: epath.Path) -> "_Lease":
        while True:
            numbers = _numbers(folder)
            before = numbers[-1] if numbers else 0
            last = _read(folder, before) if numbers else None
            if last is not None:
                last = _last_of(folder, before, last)
            holder, number = Holder.me(), before + 1
            if not _create(folder, number, holder):
                continue  # somebody was faster, and is told of next time
            others = [other for other in _numbers(folder) if other != number]
            # One that lives after all has written meanwhile; a higher one has taken us for dead.
            if max(others, default=0) > number or (others and _read(folder, before) != last):
                _place(folder, number).unlink(missing_ok=True)
                raise in_use(folder, _read(folder, max(others)))
            for other in others:
                _place(folder, other).unlink(missing_ok=True)
            return cls(folder, number, holder)

    def stop(self) -> None:
        """Ends the signs of life."""
        self._stop.set()
        self._thread.join()

    def leave(self, what: str) -> None:
        """Gives the folder back, as `released`; or removes the lock: `nothing` remains."""
        place = _place(self._folder, self._number)
        with contextlib.suppress(Exception):  # else it counts as dead before long
            if what == "nothing":
                place.unlink()
            else:
                self._holder.state = what
                place.write_text(self._holder.text())

    def _live(self) -> None:
        while not self._stop.wait(BEAT):
            with contextlib.suppress(Exception):  # the network; the next one may arrive
                self._holder.beat = time.time()
                _place(self._folder, self._number).write_text(self._holder.text())
                # Afterwards: who takes the folder creates, then looks whether we have written.
                newest = _numbers(self._folder)[-1]
                if newest > self._number:
                    _end(self._folder, _read(self._folder, newest))


def _end(folder: epath.Path, other: Holder | None) -> None:
    """Ends the process: nothing it writes may reach a folder that another holds."""
    print(
        f"bert-jax: {folder}: taken over by {other or 'another process'}, since this one did not "
        "answer for long; it ends here",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _last_of(folder: epath.Path, number: int, holder: Holder) -> Holder | None:
    """What a holder that has given the folder back, or lives no more, has written last.

    Raises:
      InputError: it lives.
    """
    if holder.state == "released" or (_is_here(holder) and not _lives_here(holder)):
        return holder
    if not _is_here(holder):
        print(f"bert-jax: {folder}: held by {holder}; looking whether it lives", file=sys.stderr)
        end, now = time.monotonic() + SILENCE, holder
        while now == holder and time.monotonic() < end:
            time.sleep(LOOK)
            now = _read(folder, number)
        if now is None or now == holder or now.state == "released":
            return now
        holder = now
    ago = f", last heard of {max(time.time() - holder.beat, 0):.0f} s ago"
    raise in_use(folder, holder, ago)


def _is_here(holder: Holder) -> bool:
    """Whether its process, if it lives, is one that this machine can see."""
    return holder.machine != "" and holder.machine == _machine()


def _lives_here(holder: Holder) -> bool:
    return _began(holder.process) == holder.began


def _place(folder: epath.Path, number: int) -> epath.Path:
    return folder / "lock" / f"{number:06}"


def _numbers(folder: epath.Path) -> list[int]:
    place = folder / "lock"
    try:
        names = [path.name for path in place.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def _read(folder: epath.Path, number: int) -> Holder | None:
    place = _place(folder, number)
    try:
        holder = Holder.parse(bucket.read(place))
    except FileNotFoundError:
        return None
    if holder is None:  # its holder may live
        raise InputError(
            f"{place}: damaged, or of another version; remove it if nothing is at work in {folder}"
        )
    return holder


def _create(folder: epath.Path, number: int, holder: Holder) -> bool:
    if bucket.create(_place(folder, number), holder.text().encode()):
        return True
    # A write whose answer was lost is tried again, and finds itself.
    found = _read(folder, number)
    return found is not None and found.token == holder.token


def _machine() -> str:
    """Where a process id has one meaning: this boot, and this space of ids (a container's own)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(process: int) -> str:
    """When a process of this machine began; "" if there is none."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            # Its second field is a name, which may hold anything.
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
