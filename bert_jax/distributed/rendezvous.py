"""How the processes of a run find each other: where each stands, and who is there.

On the hosts of a TPU pod jax knows where the others are, and of SLURM's tasks `srun` says it.
Elsewhere three variables do, the same on all except for the number: JAX_COORDINATOR_ADDRESS
(host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID. Without them a run is one process.

jax connects all processes in one call, which aborts each of them, without a word of who is missing,
when one does not come. So they report to process 0 before, and it tells all of them the same: to go
on, or who is missing.

Of a run on several slices JAX_COORDINATOR_ADDRESS names the first process of each, with commas in
between; processes are numbered slice by slice, as many in each. Any slice may be missing: all
report to all first processes, and `distributed.slices` decides which of them train.
"""

import contextlib
import functools
import json
import multiprocessing.connection
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bert_jax import foreign
from bert_jax.distributed.slices import RollCall, SlicePolicy
from bert_jax.errors import InputError, Unavailable

# Seconds to connect, and between two attempts; bytes of a message.
_HEAR, _RETRY, _LONGEST = 5.0, 0.1, 4096
# Seconds until all processes have agreed to start.
_AGREE = 60.0


class ProcessPlace(NamedTuple):
    """A process's place among those of a run."""

    address: str  # host:port of process 0; of several slices, of the first process of each
    number: int  # of the process, from 0
    count: int  # of processes


def own_place() -> ProcessPlace | None:
    """Returns this process's place as the environment has it; None if it has none."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if given.get(names[2]) == "1":
        return None
    if not given:
        return _in_slurm()
    with contextlib.suppress(KeyError, ValueError):
        place = ProcessPlace(given[names[0]], int(given[names[1]]), int(given[names[2]]))
        if 0 <= place.number < place.count:
            return place
    shown = ", ".join(f"{name}={given.get(name, '')}" for name in names)
    raise InputError(
        f"{shown}: set all three, JAX_PROCESS_ID to a whole number below JAX_NUM_PROCESSES, or none"
    )


def _in_slurm() -> ProcessPlace | None:
    """Returns this task's place in the step that `srun` started; None outside of one or alone."""
    step = foreign.slurm_cluster()
    if not step.is_env_present() or step.get_process_count() == 1:
        return None
    address = step.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT"))
    return ProcessPlace(address, step.get_process_id(), step.get_process_count())


def wait_for_all(place: ProcessPlace, limit: float) -> None:
    """Waits until all processes have reported to process 0, `limit` seconds at most.

    Raises:
      Unavailable: some have not in time; the same message on all.
    """
    call = _hear_all if place.number == 0 else _report
    error, late = call(place, *_parts(place.address), limit)
    if error:
        raise Unavailable(error) if late else InputError(error)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or ".." in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"JAX_COORDINATOR_ADDRESS={address}: write it as host:port")
    return host.strip("[]"), int(port)


def _hear_all(place: ProcessPlace, host: str, port: int, limit: float) -> tuple[str, bool]:
    """Returns the error that all processes get, "" for none, and whether some are late."""
    deadline, here, error = time.monotonic() + limit, {0: socket.gethostname()}, ""
    numbers: dict[Connection, int] = {}  # -1: unknown yet
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(place, port))
        while not error and len(here) < place.count and time.monotonic() < deadline:
            left = max(deadline - time.monotonic(), 0.0)
            for ready in multiprocessing.connection.wait([server, *numbers], left):
                if not isinstance(ready, Connection):  # `server`: a process connects
                    numbers[stack.enter_context(_connection(server.accept()[0]))] = -1
                    continue
                try:
                    number, count, name = json.loads(ready.recv_bytes(_LONGEST))
                    number = int(number)
                except (OSError, EOFError, ValueError, TypeError):  # a stranger, or it has left
                    here.pop(numbers.pop(ready), None)
                    ready.close()
                    continue
                if number in here or count != place.count:
                    error = (
                        f"process {number} of {count} ({name}) called while {sorted(here)} of "
                        f"{place.count} were here; give each its own JAX_PROCESS_ID, and all the "
                        "same JAX_NUM_PROCESSES"
                    )
                here[number], numbers[ready] = name, number
        late = not error and len(here) < place.count
        if late:
            missing = [number for number in range(place.count) if number not in here]
            error = (
                f"process {', '.join(map(str, missing[:8]))}{' and more' * (len(missing) > 8)} of "
                f"{place.count} did not arrive within {limit:g} seconds at {place.address}; see "
                "why in its own output, and start all of them again"
            )
        for caller in numbers:
            with contextlib.suppress(OSError):  # one that has left is missed by jax
                caller.send_bytes(json.dumps([error, late]).encode())
    return error, late


def _listen(place: ProcessPlace, port: int) -> socket.socket:
    # As jax's own service will, a moment later.
    host, _, bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")
    host = host.strip("[]")
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    at = (host, int(bound) if bound.isdecimal() and port else port)
    try:
        return socket.create_server(at, family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise InputError(
            f"JAX_COORDINATOR_ADDRESS={place.address}: process 0 cannot listen there "
            f"({error.strerror or error}); name a free port of the machine it runs on"
        ) from error


def _report(place: ProcessPlace, host: str, port: int, limit: float) -> tuple[str, bool]:
    """Tells process 0 who this is, and returns its answer to all."""
    deadline, me = time.monotonic() + limit, socket.gethostname()
    while True:
        try:
            line = _dial((host, port))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"JAX_COORDINATOR_ADDRESS={place.address}: process 0 did not answer there "
                    f"within {limit:g} seconds ({error.strerror or error}); is it running, and can "
                    f"process {place.number} ({me}) reach it?"
                ) from error
            time.sleep(_RETRY)
    with line, contextlib.suppress(OSError, EOFError):
        line.send_bytes(json.dumps([place.number, place.count, me]).encode())
        if line.poll(limit + _HEAR):  # process 0 has begun no later, and gives up by itself
            error, late = json.loads(line.recv_bytes())
            return error, late
    return (
        f"process 0 left {place.address} before all {place.count} processes had arrived; see why "
        "in its own output"
    ), True


def _dial(at: tuple[str, int]) -> Connection:
    return _connection(socket.create_connection(at, timeout=_HEAR))


def _connection(line: socket.socket) -> Connection:
    """Returns a socket as a line of messages; one that ends within a message ends the line."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 500_000))
    return Connection(line.detach())


# --- several slices -----------------------------------------------------------------------------


class Membership(NamedTuple):
    """The slices that train, as one of their processes knows it."""

    place: ProcessPlace  # of this process among those that train
    slices: tuple[int, ...]  # which do, by the numbers they were booked with
    policy: SlicePolicy
    listener: "LateJoinListener | None"  # of process 0, where slices that come later wait

    @property
    def bind(self) -> str:
        """Returns where jax's service listens on process 0: listener and run have a port each."""
        host = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")[0] or "[::]"
        return f"{host}:{self.place.address.rpartition(':')[2]}"


def join_rendezvous(
    place: ProcessPlace, wait: float, limit: float, placed: Callable[[int, int, int], Any]
) -> Membership:
    """Waits until this process's slice is one of those that train, and tells libtpu.

    Args:
      wait: seconds for slices that are missing.
      limit: seconds more for those that nothing can be done without.
      placed: what a run is on some of its slices, of so many processes each; None: it cannot be.

    Raises:
      Unavailable: too many are missing, or the run that went on without this slice has ended.
    """
    addresses = [_parts(address) for address in place.address.split(",")]
    hosts, uneven = divmod(place.count, len(addresses))
    if uneven:
        raise InputError(
            f"JAX_NUM_PROCESSES={place.count}: not a multiple of the {len(addresses)} slices whose "
            "first processes JAX_COORDINATOR_ADDRESS names"
        )
    many = len(addresses)
    fits = functools.cache(lambda taken: placed(taken, many, hosts) is not None)
    membership = _join(place, addresses, SlicePolicy(many, hosts, wait, limit, fits))
    if os.environ.pop("MEGASCALE_NUM_SLICES", "") and len(membership.slices) > 1:
        os.environ["MEGASCALE_NUM_SLICES"] = str(len(membership.slices))
        os.environ["MEGASCALE_SLICE_ID"] = str(membership.place.number // hosts)
        os.environ["MEGASCALE_COORDINATOR_ADDRESS"] = membership.place.address.rpartition(":")[0]
    return membership


def _join(place: ProcessPlace, firsts: list[tuple[str, int]], policy: SlicePolicy) -> Membership:
    began, mine = time.monotonic(), place.number // policy.hosts
    words: queue.SimpleQueue[tuple[Connection, dict[str, Any] | None]] = queue.SimpleQueue()
    over, roll, listener = threading.Event(), RollCall(policy, mine), None

    def report(line: Connection) -> None:
        """Says who this is, and since when; the second time it agrees to what was decided."""
        with contextlib.suppress(OSError):  # one that has left is missed soon
            line.send_bytes(json.dumps([place.number, time.monotonic() - began]).encode())

    def call(at: tuple[str, int]) -> None:
        """Reports to a first process, and brings what it says; None: it has left."""
        heard: Connection | None = None
        while heard is None and not over.wait(_RETRY):
            with contextlib.suppress(OSError, EOFError), _dial(at) as line:
                report(line)
                while not over.is_set():
                    if line.poll(_RETRY):
                        words.put((line, json.loads(line.recv_bytes())))
                        heard = line
        if heard is not None:
            words.put((heard, None))

    with contextlib.ExitStack() as stack:
        if place.number % policy.hosts == 0:
            listener = LateJoinListener(place, firsts[mine], roll)
            stack.callback(listener.close)
        stack.callback(over.set)
        for at in firsts:
            threading.Thread(target=call, args=(at,), name="slices", daemon=True).start()
        agreed: Connection | None = None
        limit: float | None = policy.wait + policy.limit
        while True:
            try:
                line, word = words.get(timeout=limit)
            except queue.Empty:
                missing = "" if listener is None else f" ({listener.missing()} did not arrive)"
                raise Unavailable(
                    f"process {place.number} ({socket.gethostname()}) has waited {limit:g} seconds "
                    f"for enough slices of {place.address}{missing}; see why in their own output, "
                    "and start all of them again"
                ) from None
            if agreed not in (None, line):
                continue  # another has decided as well, and too late
            if word is None:
                raise Unavailable(
                    f"the run that went on without slice {mine} has ended; run again to go on"
                )
            roll.goes_on = True  # this slice decides nothing any more
            if agreed is None:
                limit = None  # however long that run takes
                if mine in word["slices"] and word["what"] == "decided":
                    agreed, limit = line, _AGREE
                    report(line)
            elif word["what"] == "go":
                break
        taken = tuple(word["slices"])
        number = taken.index(mine) * policy.hosts + place.number % policy.hosts
        if number == 0:
            over.set()
            stack.pop_all()  # the listener stays open
    here = ProcessPlace(word["address"], number, len(taken) * policy.hosts)
    return Membership(here, taken, policy, None if number else listener)


class LateJoinListener:
    """The place where a slice's first process hears all others; process 0, while a run goes on.

    It says to all of them which slices train once that is decided, and to those that come later.
    The run begins when all its processes have agreed: of two that decide at once one has them all.
    """

    def __init__(self, place: ProcessPlace, at: tuple[str, int], roll: RollCall):
        self._place, self._roll = place, roll
        self._host, port = at
        self._server = _listen(place, port)
        self._lines: dict[Connection, int] = {}  # the numbers of processes; -1: a stranger yet
        self._verdict: dict[str, Any] = {}
        self._agreed: set[int] = set()
        self._open = True
        self._hearing = threading.Thread(target=self._hear, name="door", daemon=True)
        self._hearing.start()

    def waiting(self) -> list[int]:
        """Returns the slices that are whole, and do not train."""
        return [one for one in self._roll.whole() if one not in self._verdict["slices"]]

    def missing(self) -> str:
        """Returns the processes of this slice that are not here, in words."""
        policy, first = self._roll.policy, self._place.number
        away = {*range(first, first + policy.hosts)} - self._roll.here.keys()
        return f"process {', '.join(map(str, sorted(away)))}" if away else "other slices"

    def close(self) -> None:
        """Hears nobody any more."""
        self._open = False
        self._hearing.join()

    def _hear(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._server)
            while self._open:
                for ready in multiprocessing.connection.wait([self._server, *self._lines], _RETRY):
                    if not isinstance(ready, Connection):  # the server: a process connects
                        line = stack.enter_context(_connection(self._server.accept()[0]))
                        self._lines[line] = -1
                        continue
                    try:
                        self._came(ready, *json.loads(ready.recv_bytes(_LONGEST)))
                    except (OSError, EOFError, LookupError, ValueError, TypeError):
                        # A stranger, or it has left.
                        self._roll.left(self._lines.pop(ready, -1))
                        ready.close()
                if not self._verdict and (taken := self._roll.verdict(time.monotonic())):
                    self._decide(taken)

    def _came(self, line: Connection, number: int, waited: float) -> None:
        if not 0 <= number < self._place.count:
            raise ValueError(number)
        if self._lines[line] == number:
            self._agreed.add(number)
            if len(self._agreed) == len(self._verdict["slices"]) * self._roll.policy.hosts:
                self._say("go")
            return
        for old in [one for one, whose in self._lines.items() if whose == number]:
            del self._lines[old]  # of a machine that went without a word
            old.close()
        self._lines[line] = number
        self._roll.came(number, time.monotonic() - waited)
        if self._verdict:
            self._say("goes_on", line)

    def _decide(self, taken: tuple[int, ...]) -> None:
        # jax's own service is at another port: those who come later call here.
        with _listen(self._place, 0) as drawn:
            host = f"[{self._host}]" if ":" in self._host else self._host
            self._verdict = {"slices": taken, "address": f"{host}:{drawn.getsockname()[1]}"}
        self._say("decided")

    def _say(self, what: str, *to: Connection) -> None:
        for line in to or [line for line, number in self._lines.items() if number >= 0]:
            with contextlib.suppress(OSError):  # one that has left is missed by jax
                line.send_bytes(json.dumps(self._verdict | {"what": what}).encode())
