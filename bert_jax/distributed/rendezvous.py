"""The rendezvous: how the processes of a run find each other at a start.

On the hosts of a TPU pod JAX finds the other processes, and under SLURM `srun` names them.
Elsewhere three variables do: JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES
and JAX_PROCESS_ID. Without these variables a run is one process.

JAX connects all processes in one call. If one is missing, the call aborts every process without
naming the missing one. So all processes report to process 0 first, which answers all of them: with
the numbers of missing processes, or without an error.

For a run on several slices, JAX_COORDINATOR_ADDRESS names the first process of each slice,
separated by commas. Processes are numbered slice by slice, equally many in each. Slices may be
missing: all processes report to all first processes, and `distributed.slices` decides which train.
"""

import contextlib
import functools
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_messages
from typing import Any, NamedTuple

from bert_jax import foreign
from bert_jax.distributed.slices import Arrivals, SlicePolicy
from bert_jax.errors import InputError, Unavailable

# Seconds to connect, and between two attempts; maximum bytes of a message.
_CONNECT, _RETRY, _MOST_BYTES = 5.0, 0.1, 4096
# Seconds until all processes have accepted a decision about the slices.
_ACCEPT = 60.0

Address = tuple[str, int]  # host and port


class ProcessInfo(NamedTuple):
    """The data by which a process connects to the other processes of its run."""

    address: str  # host:port of process 0; with several slices, of the first process of each
    number: int  # of this process, from 0
    count: int  # of all processes


def read_process_info() -> ProcessInfo | None:
    """Reads how to connect from the environment; None for a run of one process."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if given.get(names[2]) == "1":
        return None
    if not given:
        return _read_slurm_step()
    with contextlib.suppress(KeyError, ValueError):
        process = ProcessInfo(given[names[0]], int(given[names[1]]), int(given[names[2]]))
        if 0 <= process.number < process.count:
            return process
    shown = ", ".join(f"{name}={given.get(name, '')}" for name in names)
    raise InputError(
        f"{shown}: set all three, JAX_PROCESS_ID to a whole number below JAX_NUM_PROCESSES, or none"
    )


def _read_slurm_step() -> ProcessInfo | None:
    """Reads the step that `srun` started; None without one, or if it has only one task."""
    step = foreign.slurm_cluster()
    if not step.is_env_present() or step.get_process_count() == 1:
        return None
    address = step.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT"))
    return ProcessInfo(address, step.get_process_id(), step.get_process_count())


def wait_for_all(process: ProcessInfo, limit: float) -> None:
    """Waits until all processes have reported to process 0, `limit` seconds at most.

    Raises:
      Unavailable: some are missing; the message is the same on all processes.
    """
    meet = _await_reports if process.number == 0 else _report
    error, is_late = meet(process, _parse_address(process.address), limit)
    if error:
        raise Unavailable(error) if is_late else InputError(error)


def _parse_address(address: str) -> Address:
    host, _, port = address.rpartition(":")
    if not host or ".." in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"JAX_COORDINATOR_ADDRESS={address}: write it as host:port")
    return host.strip("[]"), int(port)


def _await_reports(process: ProcessInfo, address: Address, limit: float) -> tuple[str, bool]:
    """Returns the error that all processes get ("" for none), and whether some are late."""
    deadline, hosts, error = time.monotonic() + limit, {0: socket.gethostname()}, ""
    numbers: dict[Connection, int] = {}  # of processes; -1: not known yet
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(process, address[1]))
        while not error and len(hosts) < process.count and time.monotonic() < deadline:
            seconds_left = max(deadline - time.monotonic(), 0.0)
            for ready in wait_for_messages([server, *numbers], seconds_left):
                if not isinstance(ready, Connection):  # the server: a process connects
                    numbers[stack.enter_context(_make_connection(server.accept()[0]))] = -1
                    continue
                try:
                    number, count, name = json.loads(ready.recv_bytes(_MOST_BYTES))
                    number = int(number)
                except (OSError, EOFError, ValueError, TypeError):  # a stranger, or it has left
                    hosts.pop(numbers.pop(ready), None)
                    ready.close()
                    continue
                if number in hosts or count != process.count:
                    error = (
                        f"process {number} of {count} ({name}) called while {sorted(hosts)} of "
                        f"{process.count} were here; give each its own JAX_PROCESS_ID, and all the "
                        "same JAX_NUM_PROCESSES"
                    )
                hosts[number], numbers[ready] = name, number
        is_late = not error and len(hosts) < process.count
        if is_late:
            missing = [number for number in range(process.count) if number not in hosts]
            error = (
                f"process {', '.join(map(str, missing[:8]))}{' and more' * (len(missing) > 8)} of "
                f"{process.count} did not arrive within {limit:g} seconds at {process.address}; "
                "see its own output for the reason, and start all of them again"
            )
        for connection in numbers:
            with contextlib.suppress(OSError):  # JAX will notice that this process has left
                connection.send_bytes(json.dumps([error, is_late]).encode())
    return error, is_late


def _listen(process: ProcessInfo, port: int) -> socket.socket:
    # Listens as JAX's own service will, a moment later.
    host, _, bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")
    host = host.strip("[]")
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    address = (host, int(bound) if bound.isdecimal() and port else port)
    try:
        return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise InputError(
            f"JAX_COORDINATOR_ADDRESS={process.address}: process 0 cannot listen there "
            f"({error.strerror or error}); name a free port of the machine it runs on"
        ) from error


def _report(process: ProcessInfo, address: Address, limit: float) -> tuple[str, bool]:
    """Reports this process to process 0; returns the answer, which all processes get."""
    deadline, own_host = time.monotonic() + limit, socket.gethostname()
    while True:
        try:
            connection = _connect(address)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"JAX_COORDINATOR_ADDRESS={process.address}: process 0 did not answer there "
                    f"within {limit:g} seconds ({error.strerror or error}); check that it runs, "
                    f"and that process {process.number} ({own_host}) can reach it"
                ) from error
            time.sleep(_RETRY)
    with connection, contextlib.suppress(OSError, EOFError):
        connection.send_bytes(json.dumps([process.number, process.count, own_host]).encode())
        if connection.poll(limit + _CONNECT):  # process 0 started no later and gives up by itself
            error, is_late = json.loads(connection.recv_bytes())
            return error, is_late
    return (
        f"process 0 left {process.address} before all {process.count} processes had arrived; see "
        "its own output for the reason"
    ), True


def _connect(address: Address) -> Connection:
    return _make_connection(socket.create_connection(address, timeout=_CONNECT))


def _make_connection(socket_: socket.socket) -> Connection:
    """Returns a connection for messages; a message that breaks off closes the connection."""
    socket_.settimeout(None)
    socket_.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 500_000))
    return Connection(socket_.detach())


# --- several slices -----------------------------------------------------------------------------


class Membership(NamedTuple):
    """The slices that take part in a run since its last start."""

    process: ProcessInfo  # of this process, numbered among the processes that train
    slices: tuple[int, ...]  # numbers of the slices that train, among the booked ones
    policy: SlicePolicy
    listener: "LateJoinListener | None"  # on process 0, where later slices wait

    @property
    def bind(self) -> str:
        """Returns where JAX's service listens on process 0, not on the port of the listener."""
        host = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")[0] or "[::]"
        return f"{host}:{self.process.address.rpartition(':')[2]}"


def join_rendezvous(
    process: ProcessInfo, wait: float, limit: float, fit_to_slices: Callable[[int, int, int], Any]
) -> Membership:
    """Waits until the slice of this process trains; sets libtpu's variables.

    Args:
      wait: seconds to wait for missing slices.
      limit: further seconds to wait for enough slices.
      fit_to_slices: `Job.fit_to_slices`; None if the run cannot use this number of slices.

    Raises:
      Unavailable: too many are missing, or the run that started without this slice has ended.
    """
    addresses = [_parse_address(address) for address in process.address.split(",")]
    hosts, uneven = divmod(process.count, len(addresses))
    if uneven:
        raise InputError(
            f"JAX_NUM_PROCESSES={process.count}: not a multiple of the {len(addresses)} slices "
            "whose first processes JAX_COORDINATOR_ADDRESS names"
        )
    booked = len(addresses)
    fits = functools.cache(lambda taken: fit_to_slices(taken, booked, hosts) is not None)
    membership = _join(process, addresses, SlicePolicy(booked, hosts, wait, limit, fits))
    if os.environ.pop("MEGASCALE_NUM_SLICES", "") and len(membership.slices) > 1:
        os.environ["MEGASCALE_NUM_SLICES"] = str(len(membership.slices))
        os.environ["MEGASCALE_SLICE_ID"] = str(membership.process.number // hosts)
        os.environ["MEGASCALE_COORDINATOR_ADDRESS"] = membership.process.address.rpartition(":")[0]
    return membership


def _join(process: ProcessInfo, firsts: list[Address], policy: SlicePolicy) -> Membership:
    """Reports to the first process of each slice until one of them starts a run with this slice."""
    start, own_slice = time.monotonic(), process.number // policy.hosts
    answers: queue.SimpleQueue[tuple[Connection, dict[str, Any] | None]] = queue.SimpleQueue()
    is_over, arrivals, listener = threading.Event(), Arrivals(policy, own_slice), None

    def report(connection: Connection) -> None:
        """Reports this process and its waiting time; a second report accepts a decision."""
        with contextlib.suppress(OSError):  # a listener that has left is noticed soon
            connection.send_bytes(json.dumps([process.number, time.monotonic() - start]).encode())

    def exchange(address: Address) -> None:
        """Reports to a slice's first process and queues its answers; None once it has left."""
        answered: Connection | None = None
        while answered is None and not is_over.wait(_RETRY):
            with contextlib.suppress(OSError, EOFError), _connect(address) as connection:
                report(connection)
                while not is_over.is_set():
                    if connection.poll(_RETRY):
                        answers.put((connection, json.loads(connection.recv_bytes())))
                        answered = connection
        if answered is not None:
            answers.put((answered, None))

    with contextlib.ExitStack() as stack:
        if process.number % policy.hosts == 0:
            listener = LateJoinListener(process, firsts[own_slice], arrivals)
            stack.callback(listener.close)
        stack.callback(is_over.set)
        for address in firsts:
            threading.Thread(target=exchange, args=(address,), name="slices", daemon=True).start()
        accepted: Connection | None = None  # whose decision this process accepts
        limit: float | None = policy.wait + policy.limit
        while True:
            try:
                connection, answer = answers.get(timeout=limit)
            except queue.Empty:
                missing = "" if listener is None else f" ({listener.missing()} did not arrive)"
                raise Unavailable(
                    f"process {process.number} ({socket.gethostname()}) has waited {limit:g} "
                    f"seconds for enough slices of {process.address}{missing}; see their own "
                    "output for the reason, and start all of them again"
                ) from None
            if accepted not in (None, connection):
                continue  # a second decision, which came too late
            if answer is None:
                raise Unavailable(
                    f"the run that started without slice {own_slice} has ended; run again to resume"
                )
            arrivals.is_decided = True  # this slice must not decide any more
            if accepted is None:
                limit = None  # waits until the run without this slice ends
                if own_slice in answer["slices"] and answer["kind"] == "decided":
                    accepted, limit = connection, _ACCEPT
                    report(connection)
            elif answer["kind"] == "start":
                break
        taken = tuple(answer["slices"])
        number = taken.index(own_slice) * policy.hosts + process.number % policy.hosts
        if number == 0:
            is_over.set()
            stack.pop_all()  # the listener stays open
    member = ProcessInfo(answer["address"], number, len(taken) * policy.hosts)
    return Membership(member, taken, policy, None if number else listener)


class LateJoinListener:
    """The server on a slice's first process, to which all processes report.

    It sends the decision about the slices to all processes, and to those that arrive later, as long
    as process 0 runs. The run starts when all its processes have accepted the decision: if two
    listeners decide at the same time, all processes can accept only one of them.
    """

    def __init__(self, process: ProcessInfo, address: Address, arrivals: Arrivals):
        self._process, self._arrivals = process, arrivals
        self._host, port = address
        self._server = _listen(process, port)
        self._numbers: dict[Connection, int] = {}  # of processes; -1: not known yet
        self._decision: dict[str, Any] = {}
        self._accepted: set[int] = set()  # processes
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="late_join", daemon=True)
        self._thread.start()

    def waiting(self) -> list[int]:
        """Returns the complete slices that do not train."""
        return [n for n in self._arrivals.complete_slices() if n not in self._decision["slices"]]

    def missing(self) -> str:
        """Returns a description of the missing processes of this slice."""
        policy, first = self._arrivals.policy, self._process.number
        missing = {*range(first, first + policy.hosts)} - self._arrivals.arrived.keys()
        return f"process {', '.join(map(str, sorted(missing)))}" if missing else "other slices"

    def close(self) -> None:
        """Stops the server."""
        self._is_open = False
        self._thread.join()

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._server)
            while self._is_open:
                for ready in wait_for_messages([self._server, *self._numbers], _RETRY):
                    if not isinstance(ready, Connection):  # the server: a process connects
                        connection = _make_connection(self._server.accept()[0])
                        self._numbers[stack.enter_context(connection)] = -1
                        continue
                    try:
                        self._receive(ready, *json.loads(ready.recv_bytes(_MOST_BYTES)))
                    except (OSError, EOFError, LookupError, ValueError, TypeError):
                        # A stranger, or the process has left.
                        self._arrivals.remove(self._numbers.pop(ready, -1))
                        ready.close()
                if not self._decision and (taken := self._arrivals.choose_slices(time.monotonic())):
                    self._decide(taken)

    def _receive(self, connection: Connection, number: int, waited: float) -> None:
        if not 0 <= number < self._process.count:
            raise ValueError(number)
        if self._numbers[connection] == number:
            self._accepted.add(number)
            if len(self._accepted) == len(self._decision["slices"]) * self._arrivals.policy.hosts:
                self._send("start")
            return
        for old in [other for other, owner in self._numbers.items() if owner == number]:
            del self._numbers[old]  # its machine went away without closing the connection
            old.close()
        self._numbers[connection] = number
        self._arrivals.add(number, time.monotonic() - waited)
        if self._decision:
            self._send("running", connection)

    def _decide(self, taken: tuple[int, ...]) -> None:
        # JAX's own service gets another, free port: later processes connect to this one.
        with _listen(self._process, 0) as server:
            host = f"[{self._host}]" if ":" in self._host else self._host
            self._decision = {"slices": taken, "address": f"{host}:{server.getsockname()[1]}"}
        self._send("decided")

    def _send(self, kind: str, *receivers: Connection) -> None:
        for connection in receivers or [c for c, number in self._numbers.items() if number >= 0]:
            with contextlib.suppress(OSError):  # JAX will notice that this process has left
                connection.send_bytes(json.dumps(self._decision | {"kind": kind}).encode())
