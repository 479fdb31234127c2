"""A pod on this machine: starts several processes of one run, watches them, explains their end.

Each process gets virtual CPU devices and its process number; the number is printed before each line
of its output. When a process fails, the others are killed; then its exit code and the last lines of
each process are printed.
"""

import collections
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple, TextIO

from bert_jax import errors, system
from bert_jax.config import code as custom_code
from bert_jax.errors import InputError

# Seconds in which the other processes may end by themselves after one has failed.
_GRACE = 5.0
_POLL = 0.1
# Seconds to read the rest of a pipe after its process ended; a grandchild may keep the pipe open.
_DRAIN = 2.0
# Last lines of each process that are printed again when one fails.
_LAST_LINES = 20


class PodResult(NamedTuple):
    """The outcome of a pod."""

    # 0: all have finished; 75: stopped on request; else the exit code of the first process that
    # failed, or 128 plus the signal's number if a signal killed it.
    code: int
    stop_requested: bool  # whether this process received SIGTERM or SIGINT


@dataclasses.dataclass
class _Member:
    """A process of the pod, with the last lines of its output."""

    number: int
    process: subprocess.Popen
    tail: collections.deque[str]
    code: int | None = None
    ended_by_us: bool = False

    @property
    def failed(self) -> bool:
        return self.code not in (None, errors.FINISHED, errors.STOPPED)

    def send(self, signal_number: int) -> None:
        """Sends a signal to the process and its descendants, unless the process has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal_number)


def run(
    command: Sequence[str],
    *,
    processes: int,
    devices: int,
    arrive_within: float,
    hang_after: float,
    slices: int = 1,
) -> PodResult:
    """Runs a command in several processes at once, until all have ended.

    Forwards SIGTERM and SIGINT to all processes.

    Args:
      devices: virtual devices of each process.
      arrive_within: seconds in which all processes must have connected.
      hang_after: seconds without a step after which a process counts as hung and ends itself.
      slices: number of slices, groups of equally many processes; a late slice may join later.
    """
    environment = os.environ | custom_code.environment() | _addresses(processes, slices)
    flag = "--xla_force_host_platform_device_count="
    others = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(flag)]
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*others, f"{flag}{devices}"]),
        "BERT_JAX_ARRIVE_WITHIN": str(arrive_within),
        "BERT_JAX_HANG_AFTER": str(hang_after),
        # Number of XLA's threads; by default each process would use all cores.
        "NPROC": str(max(system.cores() // processes, 1)),
        "PYTHONUNBUFFERED": "1",
    }
    members: list[_Member] = []
    stop_requested = False

    def forward(signal_number: int, frame: object) -> None:
        nonlocal stop_requested
        del frame
        stop_requested = True
        for member in members:
            member.send(signal_number)

    handlers = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in range(processes):
            process = _start(command, environment | {"JAX_PROCESS_ID": str(number)})
            members.append(_Member(number, process, collections.deque(maxlen=_LAST_LINES)))
            if stop_requested:  # during the start of the processes
                members[-1].send(signal.SIGTERM)
        failed = _watch(members)
    finally:
        for member in members:
            member.send(signal.SIGKILL)
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)
    # A process whose peer died fails in turn (jax aborts it), so it is not the cause.
    causes = [m for m in failed if m.code not in (-signal.SIGABRT, errors.PEER_LOST)]
    first = next(iter([*causes, *failed]), None)
    if first is None:
        stopped = any(member.code == errors.STOPPED for member in members)
        return PodResult(errors.STOPPED if stopped else errors.FINISHED, stop_requested)
    for line in _explain(first, members):
        _print(f"pod: {line}", sys.stderr)
    return PodResult(_shell_code(first.process.returncode), stop_requested)


def _addresses(processes: int, slices: int) -> dict[str, str]:
    """Returns the variables by which the processes find each other, with free ports."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(slices)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        address = ",".join(f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        # With several slices no port: each coordinator takes the port of its address above.
        "JAX_COORDINATOR_BIND_ADDRESS": address if slices == 1 else "127.0.0.1:",
        "JAX_NUM_PROCESSES": str(processes),
    }


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # else Ctrl-C would reach each process twice
            preexec_fn=system.die_with_parent,
        )
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be run ({error.strerror or error})") from error


def _watch(members: Sequence[_Member]) -> list[_Member]:
    """Prints the output until all have ended; kills the others soon after one has failed.

    Returns the processes that failed by themselves, in the order in which this was noticed.
    """
    readers = []
    for member in members:
        for pipe, out in ((member.process.stdout, sys.stdout), (member.process.stderr, sys.stderr)):
            args = (member, pipe, out)
            readers.append(threading.Thread(target=_print_output, args=args, daemon=True))
            readers[-1].start()
    failed: list[_Member] = []
    deadline = None
    while any(member.code is None for member in members):
        time.sleep(_POLL)
        for member in members:
            if member.code is None and member.process.poll() is not None:
                member.code = member.process.returncode
                if member.failed and not member.ended_by_us:
                    failed.append(member)
        if failed and deadline is None:
            deadline = time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            for member in members:
                member.ended_by_us = member.ended_by_us or member.code is None
                member.send(signal.SIGKILL)
    drain_end = time.monotonic() + _DRAIN
    for reader in readers:
        reader.join(max(drain_end - time.monotonic(), 0.0))
    return failed


def _print_output(member: _Member, pipe: IO[bytes], out: TextIO) -> None:
    """Prints each line of a pipe with the process's number before it."""
    for line in pipe:
        text = line.removesuffix(b"\n").decode(errors="replace")
        member.tail.append(text)
        _print(f"[{member.number}] {text}", out)


_PRINTING = threading.Lock()


def _print(line: str, out: TextIO) -> None:
    """Prints a line; neither a closed pipe nor a full disk ends or blocks the pod."""
    with _PRINTING:
        try:
            out.write(f"{line}\n")
            out.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _explain(first: _Member, members: Sequence[_Member]) -> Iterator[str]:
    """Yields which process failed first and how, then the last lines of every process."""
    code = first.process.returncode
    if all(member.code == code and not member.ended_by_us for member in members):
        if code == -signal.SIGTERM:
            yield "stopped before there was anything to save; run the same command again"
            return
        yield f"all processes ended with exit code {_shell_code(code)}"
        return
    role = ", the coordinator," if first.number == 0 else ""
    end = f"ended with exit code {code}"
    if code < 0:
        end = f"was killed by {signal.Signals(-code).name}"
    yield f"process {first.number} of {len(members)}{role} {end}, and the others were ended"
    for member in (*(m for m in members if m is not first), first):
        yield from (f"[{member.number}] {line}" for line in list(member.tail))


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
