"""Several processes on this machine that are one run: started, watched, and their end explained.

Each gets virtual devices on the CPU and its place among the others; what it says is shown with its
number before each line. When one dies the rest is ended, and why is said last.
"""

import collections
import contextlib
import dataclasses
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import IO, NamedTuple, TextIO

from bert_jax import errors, system
from bert_jax.errors import InputError

# Seconds in which the others may end by themselves once one has failed.
_GRACE = 5.0
_LOOK = 0.1
_LAST_LINES = 5
_TAIL = 400  # lines kept of each process; the stacks of all its threads fit

_ABORTED = "the JAX distributed service detected fatal errors"
_HUNG = re.compile(r"^Timeout \([\d:.]+\)!")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_LIBRARY = "/lib/python"
_ABSENT = re.compile(r"process (?P<who>[\d, ]+)(?: and \d+ more)? of \d+ did not arrive within")
_UNHEALTHY = "tasks are unhealthy (stopped sending heartbeats):"
# C++ prints its stack after its reason.
_NOISE = re.compile(r"^(    @ |\*\*\* |\[Gloo\] |$)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is started.

    Attributes:
      processes: how many.
      devices: virtual devices of each.
      arrive_within: seconds in which all must have found each other.
      hang_after: seconds without a step after which a process ends itself and says where it stood.
    """

    processes: int
    devices: int
    arrive_within: float
    hang_after: float


@dataclasses.dataclass
class _Member:
    """A process of the pod, and what it has said last."""

    number: int
    process: subprocess.Popen
    tail: collections.deque[str]
    code: int | None = None
    ended_by_us: bool = False

    @property
    def failed(self) -> bool:
        return self.code not in (None, errors.FINISHED, errors.STOPPED)


class Ended(NamedTuple):
    """How a pod ended.

    Attributes:
      code: 0: all have finished; 75: stopped on request; else the exit code of the first that
        failed, 128 and the signal's number if it was killed.
      asked: whether the pod as a whole was asked to stop.
    """

    code: int
    asked: bool


def run(command: Sequence[str], shape: Shape) -> Ended:
    """Runs the command in all processes at once, until all have ended.

    SIGTERM and SIGINT are passed on to all.

    Raises:
      InputError: the command cannot be run.
    """
    pod = _Pod(command, shape)
    before = {n: signal.signal(n, pod.pass_on) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        pod.watch()
    finally:
        pod.end_all()
        for number, handler in before.items():
            signal.signal(number, handler)
    codes = [member.code for member in pod.members]
    first = _first_failed(pod.failed)
    if first is None:
        code = errors.STOPPED if errors.STOPPED in codes else errors.FINISHED
        return Ended(code, pod.asked)
    for line in _explain(first, pod.members, shape):
        _print(f"pod: {line}", sys.stderr)
    return Ended(_shell_code(first.code), pod.asked)


class _Pod:
    """The processes, and their output on its way."""

    def __init__(self, command: Sequence[str], shape: Shape):
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[IO[bytes], bytes] = {}
        self.members: list[_Member] = []
        self.asked = False
        self.failed: list[_Member] = []  # in the order in which they were seen to be
        address = f"127.0.0.1:{_free_port()}"
        for number in range(shape.processes):
            process = _start(command, _environment(shape, address, number))
            member = _Member(number, process, collections.deque(maxlen=_TAIL))
            self.members.append(member)
            for pipe, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                self._selector.register(pipe, selectors.EVENT_READ, (member, out))

    def watch(self) -> None:
        """Shows what they say until all have ended; ends the rest when one has failed."""
        deadline = None
        while any(member.code is None for member in self.members):
            self._show(_LOOK)
            for member in self.members:
                if member.code is None and member.process.poll() is not None:
                    member.code = member.process.returncode
                    if member.failed and not member.ended_by_us:
                        self.failed.append(member)
            if self.failed and deadline is None:
                deadline = time.monotonic() + _GRACE
            if deadline is not None and time.monotonic() > deadline:
                self.end_all()
        while self._show(0.0):
            pass

    def pass_on(self, number: int, frame: object) -> None:
        """Gives a signal to all."""
        del frame
        self.asked = True
        for member in self.members:
            if member.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(member.process.pid, number)

    def end_all(self) -> None:
        """Kills those that are left, and what they have started."""
        for member in self.members:
            if member.code is None:
                member.ended_by_us = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(member.process.pid, signal.SIGKILL)

    def _show(self, seconds: float) -> int:
        """Passes on what there is; returns how many pipes had something."""
        events = self._selector.select(seconds) if self._selector.get_map() else []
        if not events and seconds and not self._selector.get_map():
            time.sleep(seconds)  # all have closed their output and some still run
        for key, _ in events:
            member, out = key.data
            new = os.read(key.fd, 1 << 16)
            text = self._unfinished.pop(key.fileobj, b"") + new
            *lines, rest = text.split(b"\n")
            if rest and not new:
                lines.append(rest)
            elif rest:
                self._unfinished[key.fileobj] = rest
            for line in lines:
                shown = line.decode(errors="replace")
                member.tail.append(shown)
                _print(f"[{member.number}] {shown}", out)
            if not new:
                self._selector.unregister(key.fileobj)
        return len(events)


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # else Ctrl-C would reach each twice
            preexec_fn=system.die_with_parent,
        )
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be run ({error.strerror or error})") from error


def _print(line: str, out: TextIO) -> None:
    """Shows a line; a reader who leaves does not end the pod."""
    try:
        print(line, file=out, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _environment(shape: Shape, address: str, number: int) -> dict[str, str]:
    """What a process needs to know beside its command."""
    flag = "--xla_force_host_platform_device_count="
    others = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(flag)]
    cores = system.cores()
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*others, f"{flag}{shape.devices}"]),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(shape.processes),
        "JAX_PROCESS_ID": str(number),
        "BERT_JAX_ARRIVE_WITHIN": str(shape.arrive_within),
        "BERT_JAX_HANG_AFTER": str(shape.hang_after),
        # XLA's threads: each process would take all cores for its own.
        "NPROC": str(max(cores // shape.processes, 1)),
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- why it ended -------------------------------------------------------------------------------


def _first_failed(failed: Sequence[_Member]) -> _Member | None:
    """The one that failed first; one that lost another failed for its sake."""
    by_itself = [m for m in failed if not _aborted(m) and m.code != errors.LOST]
    return next(iter([*by_itself, *failed]), None)


def _aborted(member: _Member) -> bool:
    return member.code == -signal.SIGABRT and any(_ABORTED in line for line in member.tail)


def _explain(first: _Member, members: Sequence[_Member], shape: Shape) -> list[str]:
    """Lines that say what happened, and to whom."""
    who = f"process {first.number} of {shape.processes}"
    alike = [m for m in members if m.code == first.code and not m.ended_by_us]
    absent = [int(n) for line in first.tail for n in _absent(line)]
    if absent:
        return [
            line
            for member in members
            if member.number in absent
            for line in (
                f"process {member.number} never arrived; its last lines:",
                *_last_lines(member),
            )
        ]
    if any(_stood_at(member) for member in members):
        places = [f"process {m.number} stood at {_stood_at(m)}" for m in members if _stood_at(m)]
        silent = [f"process {m.number} did not say where" for m in members if not _stood_at(m)]
        return [f"a hang: nothing was done for {shape.hang_after:g} seconds", *places, *silent]
    if _aborted(first) or first.code == errors.LOST:
        return [_lost(first, members)]
    if first.code == -signal.SIGTERM and len(alike) == len(members):
        return ["stopped before there was anything to save; run the same command again"]
    ended = (
        f"was killed by {signal.Signals(-first.code).name}"
        if first.code < 0
        else f"ended with exit code {first.code}"
    )
    if len(alike) == len(members):
        return [f"all processes ended with exit code {_shell_code(first.code)}"]
    role = ", the coordinator," if first.number == 0 else ""
    return [f"{who}{role} {ended}, and the others were ended", *_last_lines(first)]


def _lost(first: _Member, members: Sequence[_Member]) -> str:
    """Whom jax has missed, as the processes it has aborted say."""
    missed = {number for m in members if _aborted(m) for number in _silent(m.tail)}
    if missed:
        names = ", ".join(map(str, sorted(missed)))
        return f"process {names} was lost: it no longer answered, and jax aborted the others"
    if _aborted(first) and first.number:
        return f"process {first.number} lost the coordinator, process 0, and jax aborted it"
    return f"process {first.number} lost another, and nothing says which"


def _silent(lines: Iterable[str]) -> list[int]:
    """Numbers of the processes that a fatal log of jax calls unhealthy: each on a line."""
    found: list[int] = []
    listed = False
    for line in lines:
        if listed and line.strip().isdecimal():
            found.append(int(line))
        else:
            listed = line.endswith(_UNHEALTHY)
    return found


def _stood_at(member: _Member) -> str:
    """Where a process that ended itself as hung has stood; "" for another."""
    lines = list(member.tail)
    starts = [i for i, line in enumerate(lines) if _HUNG.match(line)]
    if not starts:
        return ""
    # Threads follow one another, the main one last, each with its innermost frame first.
    main = max((i for i, line in enumerate(lines) if _THREAD.match(line)), default=starts[-1])
    frames = [match for line in lines[main:] if (match := _FRAME.match(line))]
    own = [frame for frame in frames if _LIBRARY not in frame["file"]]
    for frame in (*own, *frames):
        return f"{frame['file']}:{frame['line']} in {frame['name']}"
    return "no Python line"


def _absent(line: str) -> list[str]:
    """Numbers of the processes that did not arrive, if that is what the line says."""
    found = _ABSENT.search(line)
    return re.findall(r"\d+", found["who"]) if found else []


def _last_lines(member: _Member) -> list[str]:
    said = [line for line in member.tail if not _NOISE.match(line)]
    return [f"[{member.number}] {line}" for line in said[-_LAST_LINES:]]


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
