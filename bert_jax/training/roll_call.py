"""Who is there: the processes of a run report to process 0 before jax connects them.

jax waits for all and then ends every process without a word of who is missing; here process 0 hears
each, and tells all of them the same: to go on, or who is missing. A line of JSON either way.
"""

import contextlib
import json
import os
import selectors
import socket
import time
from typing import Any, NamedTuple

from bert_jax.errors import InputError, Unavailable

# Seconds for process 0 to answer a call, or a stranger on its port to say who it is.
_HEAR = 5.0
_RETRY = 0.1
_LONGEST = 4096


class Place(NamedTuple):
    """A process's place among those of a run.

    Attributes:
      address: host:port of process 0.
      number: of the process, from 0.
      count: of processes.
    """

    address: str
    number: int
    count: int


def answer(place: Place, limit: float) -> None:
    """Returns when all processes have reported.

    Args:
      place: of this process.
      limit: seconds to wait.

    Raises:
      Unavailable: some have not in time; the same message on all.
      InputError: two have one number, or were told of other counts; the same message on all.
    """
    host, _, port = place.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"JAX_COORDINATOR_ADDRESS={place.address}: write it as host:port")
    if place.number == 0:
        _hear_all(place, int(port), limit)
    else:
        _report(place, host.strip("[]"), int(port), limit)


# --- process 0 ----------------------------------------------------------------------------------


def _hear_all(place: Place, port: int, limit: float) -> None:
    """Hears whoever calls, all at the same time: a silent stranger keeps nobody waiting."""
    deadline = time.monotonic() + limit
    attendance = _Attendance(place)
    with _listen(place, port) as server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        said: dict[socket.socket, bytes] = {}  # of those who have not reported yet
        while attendance.missing and not attendance.complaint and time.monotonic() < deadline:
            for key, _ in selector.select(max(deadline - time.monotonic(), 0.0)):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):  # it has hung up
                        caller = server.accept()[0]
                        caller.setblocking(False)
                        selector.register(caller, selectors.EVENT_READ)
                        said[caller] = b""
                    continue
                caller = key.fileobj
                heard = _receive(caller)
                line = said.get(caller, b"") + heard
                if heard and caller in said and b"\n" not in line and len(line) < _LONGEST:
                    said[caller] = line
                elif said.pop(caller, None) is None or not attendance.admit(caller, line):
                    # Not one of ours; or it has reported, and should be silent: it has left.
                    selector.unregister(caller)
                    attendance.leave(caller)
                    caller.close()
        late = bool(attendance.missing) and not attendance.complaint
        complaint = _missing(place, attendance, limit) if late else attendance.complaint
        for caller in [key.fileobj for key in selector.get_map().values()]:
            if caller is server:
                continue
            if caller not in said:
                caller.settimeout(_HEAR)
                _send(caller, {"complaint": complaint, "passes": late})
            caller.close()
    if complaint:
        raise Unavailable(complaint) if late else InputError(complaint)


class _Attendance:
    """Who has reported to process 0, and what is wrong with it."""

    def __init__(self, place: Place):
        self.place = place
        self.missing = set(range(1, place.count))
        self.complaint = ""
        self._here: dict[int, tuple[socket.socket, str]] = {0: (None, socket.gethostname())}

    def admit(self, caller: socket.socket, line: bytes) -> bool:
        """Takes down who reports; returns whether it is one of ours."""
        report = _parse(line)
        number, count, host = (report.get(name) for name in ("number", "count", "host"))
        if type(number) is not int or type(count) is not int or not isinstance(host, str):
            return False
        if number in self._here:
            self.complaint = (
                f"two processes are number {number} of {self.place.count} (on "
                f"{self._here[number][1]} and {host}); give each its own JAX_PROCESS_ID"
            )
        elif count != self.place.count:
            self.complaint = (
                f"process {number} ({host}) was told of {count} processes, process 0 "
                f"({socket.gethostname()}) of {self.place.count}; give all the same "
                "JAX_NUM_PROCESSES"
            )
        else:
            self._here[number] = (caller, host)
            self.missing.discard(number)
        return True

    def leave(self, caller: socket.socket) -> None:
        """Forgets one who has hung up."""
        for number in [n for n, (line, _) in self._here.items() if line is caller]:
            del self._here[number]
            self.missing.add(number)


def _listen(place: Place, port: int) -> socket.socket:
    # As jax's own service will, a moment later.
    host, _, bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")
    host = host.strip("[]")
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, int(bound) if bound.isdecimal() else port),
            family=family,
            backlog=128,
            dualstack_ipv6=both,
        )
    except OSError as error:
        raise InputError(
            f"JAX_COORDINATOR_ADDRESS={place.address}: process 0 cannot listen there "
            f"({error.strerror or error}); name a free port of the machine it runs on"
        ) from error


def _missing(place: Place, attendance: _Attendance, limit: float) -> str:
    absent = [str(number) for number in sorted(attendance.missing)]
    shown = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    return (
        f"process {shown} of {place.count} did not arrive within {limit:g} seconds at "
        f"{place.address}; see why in its own output, and start all of them again"
    )


# --- the others ---------------------------------------------------------------------------------


def _report(place: Place, host: str, port: int, limit: float) -> None:
    deadline = time.monotonic() + limit
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_HEAR)
            break
        except UnicodeError as error:
            raise InputError(
                f"JAX_COORDINATOR_ADDRESS={place.address}: no machine can have that name"
            ) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"JAX_COORDINATOR_ADDRESS={place.address}: process 0 did not answer there "
                    f"within {limit:g} seconds ({error.strerror or error}); is it running, and can "
                    f"process {place.number} ({socket.gethostname()}) reach it?"
                ) from error
            time.sleep(_RETRY)
    me = {"number": place.number, "count": place.count, "host": socket.gethostname()}
    with connection:
        _send(connection, me)
        # Process 0 has begun no later than this, and gives up by itself.
        said = _hear(connection, limit + _HEAR)
    complaint = said.get("complaint")
    if not isinstance(complaint, str):
        raise Unavailable(
            f"process 0 left {place.address} before all {place.count} processes had arrived; see "
            "why in its own output"
        )
    if complaint:
        raise Unavailable(complaint) if said.get("passes") else InputError(complaint)


def _send(connection: socket.socket, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever has left is missed by jax
        connection.sendall(json.dumps(what).encode() + b"\n")


def _receive(connection: socket.socket) -> bytes:
    """What has come; nothing if the other side has hung up."""
    try:
        return connection.recv(_LONGEST)
    except OSError:
        return b""


def _hear(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """A line of JSON; an empty object for silence or anything else."""
    try:
        connection.settimeout(seconds)
        with connection.makefile("rb") as file:
            return _parse(file.readline(_LONGEST))
    except OSError:
        return {}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
