"""The rendezvous: how the processes of a run find each other each time the run is launched.

Three environment variables name the processes: JAX_COORDINATOR_ADDRESS (host:port of process 0),
JAX_NUM_PROCESSES and JAX_PROCESS_ID. Without these variables `srun` names them under SLURM, and on
the hosts of a TPU pod JAX finds them; elsewhere a run is one process.

JAX connects all processes in one call. If one is missing, the call aborts every process without
naming the missing one. So all processes first report to process 0, which replies to all of them,
either with an error that names the missing processes, or without an error.

For a run on several slices, JAX_COORDINATOR_ADDRESS names the first process of each slice,
separated by commas. Processes are numbered slice by slice, equally many in each. Slices may be
missing: every process reports to the first process of every slice, and `distributed.slices` decides
which slices train.
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

from bert_jax import private_apis
from bert_jax.distributed.slices import Arrivals, SlicePolicy
from bert_jax.errors import InputError, Unavailable

_CONNECT_TIMEOUT = 5.0  # seconds for an attempt to connect
_RETRY_INTERVAL = 0.1  # seconds between two attempts to connect
_POLL_INTERVAL = 0.1  # seconds between two checks whether a thread should stop
_MAX_MESSAGE_BYTES = 4096
_ACCEPT_TIMEOUT = 60.0  # seconds for all processes to accept a proposal of slices

# Values of "kind" in a server's message. Never change them: versions are compared only later.
_PROPOSAL = "decided"  # these slices should train; each of their processes must accept
_START = "start"  # all have accepted, so that the run starts
_ALREADY_PROPOSED = "running"  # these slices were proposed before this process arrived

Address = tuple[str, int]  # host and port
# `running.job.Job.fit_to_slices`: (number of active slices, number of configured slices, processes
# per slice) -> the experiment adapted to them, or None if the run cannot train on them.
FitToSlices = Callable[[int, int, int], Any]


class ProcessInfo(NamedTuple):
    """Everything that a process needs to connect to the other processes of its run."""

    address: str  # host:port of process 0; with several slices, of the first process of each
    number: int  # of this process, from 0
    process_count: int  # of the run


def read_process_info() -> ProcessInfo | None:
    """Reads from the environment how to connect; None for one process, and on a TPU pod."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    if values.get("JAX_NUM_PROCESSES") == "1":
        return None
    if not values:
        return _read_slurm_process_info()
    with contextlib.suppress(KeyError, ValueError):
        address, number, count = (values[name] for name in names)
        info = ProcessInfo(address, int(number), int(count))
        if 0 <= info.number < info.process_count:
            return info
    shown = ", ".join(f"{name}={values.get(name, '')}" for name in names)
    raise InputError(
        f"{shown}: set none or all three, JAX_PROCESS_ID to a whole number below JAX_NUM_PROCESSES"
    )


def _read_slurm_process_info() -> ProcessInfo | None:
    """Reads how to connect from the variables of `srun`; None without `srun`, or with one task."""
    cluster = private_apis.slurm_cluster()
    if not cluster.is_env_present() or cluster.get_process_count() == 1:
        return None
    port = os.environ.get("JAX_COORDINATOR_PORT")
    address = cluster.get_coordinator_address(timeout_secs=None, override_coordinator_port=port)
    return ProcessInfo(address, cluster.get_process_id(), cluster.get_process_count())


def wait_for_all(info: ProcessInfo, limit: float) -> None:
    """Waits until all processes have reported to process 0, `limit` seconds at most.

    Raises:
      Unavailable: some are missing; the message is the same on all processes.
    """
    exchange_reports = _collect_reports if info.number == 0 else _report
    error, is_transient = exchange_reports(info, _parse_address(info.address), limit)
    if error:
        raise Unavailable(error) if is_transient else InputError(error)


def _parse_address(address: str) -> Address:
    host, _, port = address.rpartition(":")
    # Python raises UnicodeError when it looks up a host with two dots in a row.
    if not host or ".." in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"JAX_COORDINATOR_ADDRESS={address}: write it as host:port")
    return host.strip("[]"), int(port)


def _collect_reports(info: ProcessInfo, address: Address, limit: float) -> tuple[str, bool]:
    """Waits on process 0 until all others have reported, and replies to them.

    Returns the error for all processes, "" for none, and whether a new start may succeed.
    """
    hosts = {0: socket.gethostname()}  # {number: host} of the processes that have reported
    process_numbers: dict[Connection, int] = {}  # -1 until the process has reported
    deadline, error = time.monotonic() + limit, ""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(info, address[1]))
        while not error and len(hosts) < info.process_count and time.monotonic() < deadline:
            seconds_left = max(deadline - time.monotonic(), 0.0)
            for ready in wait_for_messages([server, *process_numbers], seconds_left):
                if not isinstance(ready, Connection):  # the server: a process connects
                    connection = stack.enter_context(_make_connection(server.accept()[0]))
                    process_numbers[connection] = -1
                    continue
                try:
                    number, count, host = json.loads(ready.recv_bytes(_MAX_MESSAGE_BYTES))
                    number = int(number)
                except (OSError, EOFError, ValueError, TypeError):
                    # The process has ended, or the sender is not a process of this run.
                    hosts.pop(process_numbers.pop(ready), None)
                    ready.close()
                    continue
                if count != info.process_count:
                    error = f"JAX_NUM_PROCESSES={count} on process {number} ({host}), but "
                    error += f"{info.process_count} on process 0; give all processes the same"
                elif number in hosts:
                    error = f"JAX_PROCESS_ID={number} on {host} and again on {hosts[number]}; "
                    error += "give each process its own"
                hosts[number], process_numbers[ready] = host, number
        is_transient = not error and len(hosts) < info.process_count
        if is_transient:
            missing = [number for number in range(info.process_count) if number not in hosts]
            error = (
                f"process {', '.join(map(str, missing[:8]))}{' and more' * (len(missing) > 8)} of "
                f"{info.process_count} did not arrive within {limit:g} seconds at {info.address}; "
                "see its own output for the reason, and start all of them again"
            )
        for connection in process_numbers:
            with contextlib.suppress(OSError):  # the receiver has ended, which JAX will detect
                connection.send_bytes(json.dumps([error, is_transient]).encode())
    return error, is_transient


def _listen(info: ProcessInfo, port: int) -> socket.socket:
    """Listens at `port`, or as JAX_COORDINATOR_BIND_ADDRESS says; port 0: at any free port."""
    host, _, bind_port = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")
    host = host.strip("[]")
    dual = not host and socket.has_dualstack_ipv6()  # listens on IPv4 and IPv6
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    address = (host, int(bind_port) if bind_port.isdecimal() and port != 0 else port)
    try:
        return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=dual)
    except OSError as error:
        raise InputError(
            f"JAX_COORDINATOR_ADDRESS={info.address}: process 0 cannot listen there "
            f"({error.strerror or error}); name a free port of the machine it runs on"
        ) from error


def _report(info: ProcessInfo, address: Address, limit: float) -> tuple[str, bool]:
    """Reports this process to process 0; returns the reply, as `_collect_reports` does."""
    deadline, own_host = time.monotonic() + limit, socket.gethostname()
    while True:
        try:
            connection = _connect(address)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"JAX_COORDINATOR_ADDRESS={info.address}: process 0 did not answer there "
                    f"within {limit:g} seconds ({error.strerror or error}); check that it runs, "
                    f"and that process {info.number} ({own_host}) can reach it"
                ) from error
            time.sleep(_RETRY_INTERVAL)
    with connection, contextlib.suppress(OSError, EOFError):
        connection.send_bytes(json.dumps([info.number, info.process_count, own_host]).encode())
        # Process 0 began to wait before this connection was made, so it replies within `limit`.
        if connection.poll(limit + _CONNECT_TIMEOUT):
            error, is_transient = json.loads(connection.recv_bytes())
            return error, is_transient
    return (
        f"process 0 ended or closed {info.address} before all {info.process_count} processes had "
        "arrived; see its own output for the reason"
    ), True


def _connect(address: Address) -> Connection:
    return _make_connection(socket.create_connection(address, timeout=_CONNECT_TIMEOUT))


def _make_connection(socket_: socket.socket) -> Connection:
    """Returns a connection for messages, which raises OSError if a message stalls for 0.5 s."""
    socket_.settimeout(None)
    socket_.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 500_000))
    return Connection(socket_.detach())


# --- several slices -----------------------------------------------------------------------------


class RendezvousServer:
    """The server on the first process of a slice, to which all processes report.

    If its slice decides which slices train (see `Arrivals`), it proposes these to all processes.
    The run starts when all processes of these slices have accepted. Each process accepts one
    proposal only: if two servers propose at the same time, at most one run starts. The server on
    the run's process 0 stays open, and informs processes that arrive later.
    """

    def __init__(self, info: ProcessInfo, address: Address, arrivals: Arrivals):
        self._info, self._arrivals = info, arrivals
        self._host, port = address
        self._listener = _listen(info, port)
        self._process_numbers: dict[Connection, int] = {}  # -1 until the process has reported
        self._proposal: dict[str, Any] = {}
        self._accepted: set[int] = set()  # processes that have accepted the proposal
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def waiting_slices(self) -> list[int]:
        """Returns the slices that do not train, though all their processes have arrived."""
        return [n for n in self._arrivals.complete_slices() if n not in self._proposal["slices"]]

    def describe_missing(self) -> str:
        """Returns, for an error, which processes of this slice are missing, or "other slices"."""
        first, slice_size = self._info.number, self._arrivals.policy.processes_per_slice
        missing = sorted({*range(first, first + slice_size)} - self._arrivals.arrived.keys())
        return f"process {', '.join(map(str, missing))}" if missing else "other slices"

    def close(self) -> None:
        """Stops the server."""
        self._is_open = False
        self._thread.join()

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._listener)
            while self._is_open:
                sources = [self._listener, *self._process_numbers]
                for ready in wait_for_messages(sources, _POLL_INTERVAL):
                    if not isinstance(ready, Connection):  # the listener: a process connects
                        connection = _make_connection(self._listener.accept()[0])
                        self._process_numbers[stack.enter_context(connection)] = -1
                        continue
                    try:
                        self._receive(ready, *json.loads(ready.recv_bytes(_MAX_MESSAGE_BYTES)))
                    except (OSError, EOFError, LookupError, ValueError, TypeError):
                        # The process has ended, or the sender is not a process of this run.
                        self._arrivals.remove(self._process_numbers.pop(ready, -1))
                        ready.close()
                active = () if self._proposal else self._arrivals.choose_slices(time.monotonic())
                if active:
                    self._propose(active)

    def _receive(self, connection: Connection, number: int, seconds_waited: float) -> None:
        """Handles a report: the first of a process is its arrival, the second its acceptance."""
        if not 0 <= number < self._info.process_count:
            raise ValueError(number)
        if self._process_numbers[connection] == number:  # accepts the proposal
            self._accepted.add(number)
            slice_size = self._arrivals.policy.processes_per_slice
            if len(self._accepted) == len(self._proposal["slices"]) * slice_size:
                self._send(_START)
            return
        # After the machine of a process failed, the connection from before may still be open.
        for old in [key for key, value in self._process_numbers.items() if value == number]:
            del self._process_numbers[old]
            old.close()
        self._process_numbers[connection] = number
        self._arrivals.add(number, time.monotonic() - seconds_waited)
        if self._proposal:
            self._send(_ALREADY_PROPOSED, connection)

    def _propose(self, active_slices: tuple[int, ...]) -> None:
        # JAX's coordinator gets another port, because later processes connect to this server's.
        with _listen(self._info, 0) as free:
            host = f"[{self._host}]" if ":" in self._host else self._host
            address = f"{host}:{free.getsockname()[1]}"
        self._proposal = {"slices": active_slices, "address": address}
        self._send(_PROPOSAL)

    def _send(self, kind: str, *receivers: Connection) -> None:
        """Sends the proposal with this kind to the receivers, by default to all processes."""
        connections = [key for key, number in self._process_numbers.items() if number >= 0]
        for connection in receivers or connections:
            with contextlib.suppress(OSError):  # the receiver has ended, which JAX will detect
                connection.send_bytes(json.dumps(self._proposal | {"kind": kind}).encode())


class _Client:
    """The connections of this process to the servers of all slices, with a thread for each.

    `messages` gets each message of a server with its connection, and None as the last one when the
    server has ended.
    """

    def __init__(self, process_number: int, addresses: list[Address]):
        self.messages = queue.SimpleQueue[tuple[Connection, dict[str, Any] | None]]()
        self._process_number, self._start = process_number, time.monotonic()
        self.stop = threading.Event()  # ends the threads
        for address in addresses:
            threading.Thread(target=self._run, args=(address,), name="slices", daemon=True).start()

    def report(self, connection: Connection) -> None:
        """Sends the number and waiting time of this process; a second report accepts a proposal."""
        report = [self._process_number, time.monotonic() - self._start]
        with contextlib.suppress(OSError):  # the server has ended, which its thread will notice
            connection.send_bytes(json.dumps(report).encode())

    def _run(self, address: Address) -> None:
        """Connects to a server and queues its messages; reconnects if it ends before the first."""
        while not self.stop.wait(_RETRY_INTERVAL):
            with contextlib.suppress(OSError), _connect(address) as connection:
                if self._queue_messages(connection):
                    self.messages.put((connection, None))
                    return

    def _queue_messages(self, connection: Connection) -> bool:
        """Queues a server's messages until it ends; returns whether there were any."""
        has_message = False
        self.report(connection)
        with contextlib.suppress(OSError, EOFError):  # the server has ended
            while not self.stop.is_set():
                if connection.poll(_POLL_INTERVAL):
                    self.messages.put((connection, json.loads(connection.recv_bytes())))
                    has_message = True
        return has_message


class Membership(NamedTuple):
    """The slices that take part in a run, which were chosen when it started or resumed."""

    info: ProcessInfo  # of this process, renumbered among the processes of active slices
    slices: tuple[int, ...]  # numbers of the active slices, among all slices of the run
    policy: SlicePolicy
    server: RendezvousServer | None  # on process 0, where slices that arrive later wait

    @property
    def bind_address(self) -> str:
        """Returns where JAX's coordinator listens: not at the port of `server`, which is in use."""
        host = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")[0] or "[::]"
        return f"{host}:{self.info.address.rpartition(':')[2]}"


def join_rendezvous(
    info: ProcessInfo, wait_seconds: float, decision_seconds: float, fit_to_slices: FitToSlices
) -> Membership:
    """Waits until a run starts with the slice of this process; for the seconds see `SlicePolicy`.

    Adapts libtpu's MEGASCALE_* variables if the launcher has set them.

    Raises:
      Unavailable: too few slices have come, or a run has started without this slice and ended.
    """
    addresses = [_parse_address(address) for address in info.address.split(",")]
    slice_count = len(addresses)
    slice_size, remainder = divmod(info.process_count, slice_count)
    if remainder:
        raise InputError(
            f"JAX_NUM_PROCESSES={info.process_count}: not a multiple of the {slice_count} slices "
            "whose first processes JAX_COORDINATOR_ADDRESS names"
        )
    is_usable = functools.cache(lambda n: fit_to_slices(n, slice_count, slice_size) is not None)
    policy = SlicePolicy(slice_count, slice_size, wait_seconds, decision_seconds, is_usable)
    membership = _join(info, addresses, policy)
    uses_megascale = os.environ.pop("MEGASCALE_NUM_SLICES", "") != ""
    if uses_megascale and len(membership.slices) > 1:
        os.environ["MEGASCALE_NUM_SLICES"] = str(len(membership.slices))
        os.environ["MEGASCALE_SLICE_ID"] = str(membership.info.number // slice_size)
        os.environ["MEGASCALE_COORDINATOR_ADDRESS"] = membership.info.address.rpartition(":")[0]
    return membership


def _join(info: ProcessInfo, addresses: list[Address], policy: SlicePolicy) -> Membership:
    """Reports to the servers of all slices until one of them starts a run with this slice."""
    own_slice, index_in_slice = divmod(info.number, policy.processes_per_slice)
    arrivals, server = Arrivals(policy, own_slice), None
    with contextlib.ExitStack() as stack:
        if index_in_slice == 0:
            server = RendezvousServer(info, addresses[own_slice], arrivals)
            stack.callback(server.close)
        client = _Client(info.number, addresses)
        stack.callback(client.stop.set)
        message = _wait_for_start(info, client, server, arrivals)
        active_slices = tuple(message["slices"])
        number = active_slices.index(own_slice) * policy.processes_per_slice + index_in_slice
        if number == 0:
            client.stop.set()
            stack.pop_all()  # so that `server` stays open, for slices that arrive later
    count = len(active_slices) * policy.processes_per_slice
    member = ProcessInfo(message["address"], number, count)
    return Membership(member, active_slices, policy, None if number else server)


def _wait_for_start(
    info: ProcessInfo, client: _Client, server: RendezvousServer | None, arrivals: Arrivals
) -> dict[str, Any]:
    """Accepts the first proposal with this slice; returns the message that starts the run.

    After it has accepted, it ignores other servers. If a run starts without this slice, it waits
    until that run has ended, and raises Unavailable.
    """
    policy, own_slice = arrivals.policy, arrivals.own_slice
    accepted: Connection | None = None  # to the server whose proposal this process has accepted
    timeout: float | None = policy.wait_seconds + policy.decision_seconds
    while True:
        try:
            connection, message = client.messages.get(timeout=timeout)
        except queue.Empty:
            missing = "" if server is None else f" ({server.describe_missing()} did not arrive)"
            event = f"enough slices to arrive at {info.address}{missing}"
            if accepted is not None:
                event = "all processes of the chosen slices to accept the start"
            raise Unavailable(
                f"process {info.number} ({socket.gethostname()}) has waited {timeout:g} seconds "
                f"for {event}; see the output of the others for the reason, and start all again"
            ) from None
        if accepted is not None and connection is not accepted:
            continue  # from a server whose proposal was not accepted
        if message is None:  # the server has ended
            reason = f"the run that started without slice {own_slice} has ended"
            if accepted is not None:
                reason = f"the run of slice {own_slice} ended before all processes were connected"
            raise Unavailable(f"{reason}; run again to resume")
        arrivals.is_decided = True  # so that this slice makes no proposal of its own
        if accepted is not None:
            if message["kind"] == _START:
                return message
        elif message["kind"] == _PROPOSAL and own_slice in message["slices"]:
            accepted, timeout = connection, _ACCEPT_TIMEOUT
            client.report(connection)
        else:
            timeout = None  # the run without this slice may take days
