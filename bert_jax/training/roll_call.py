"""Who is there: the processes of a run report to process 0 before jax connects them.

jax waits for all and then ends every process without a word of who is missing; here process 0 hears
each, and tells all of them the same: to go on, or who is missing. A line of JSON either way.
"""

import contextlib
import json
import os
import socket
import time
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from bert_jax.config import InputError

# Seconds for a connection to say who it is: others than ours may knock.
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
      InputError: some have not in time, or two have one number; the same message on all.
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
    deadline = time.monotonic() + limit
    here: dict[int, tuple[socket.socket, str]] = {}
    refused: list[socket.socket] = []
    complaint = ""
    with _listen(place, port) as server:
        while len(here) < place.count - 1 and not complaint:
            waits = [server, *(connection for connection, _ in here.values())]
            ready = wait(waits, max(deadline - time.monotonic(), 0.0))
            # Having reported, a process is silent until it is answered: it has left.
            for number in [n for n, (connection, _) in here.items() if connection in ready]:
                here.pop(number)[0].close()
            if server in ready:
                complaint = _admit(server.accept()[0], place, here, refused)
            elif time.monotonic() >= deadline:
                complaint = _missing(place, here, limit)
        for connection in (*refused, *(connection for connection, _ in here.values())):
            _send(connection, {"complaint": complaint})
            connection.close()
    if complaint:
        raise InputError(complaint)


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


def _admit(
    connection: socket.socket,
    place: Place,
    here: dict[int, tuple[socket.socket, str]],
    refused: list[socket.socket],
) -> str:
    """Takes down who reports; returns a complaint about them, or ""."""
    said = _hear(connection, _HEAR)
    number, count, host = (said.get(name) for name in ("number", "count", "host"))
    if type(number) is not int or type(count) is not int or not isinstance(host, str):
        connection.close()  # not one of ours
        return ""
    if number in here or number == 0:
        refused.append(connection)
        other = here[number][1] if number else socket.gethostname()
        return (
            f"two processes are number {number} of {place.count} (on {other} and {host}); give "
            "each its own JAX_PROCESS_ID"
        )
    here[number] = (connection, host)
    if count != place.count:
        return (
            f"process {number} ({host}) was told of {count} processes, process 0 "
            f"({socket.gethostname()}) of {place.count}; give all the same JAX_NUM_PROCESSES"
        )
    return ""


def _missing(place: Place, here: dict[int, tuple[socket.socket, str]], limit: float) -> str:
    absent = [str(number) for number in range(1, place.count) if number not in here]
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
                raise InputError(
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
        raise InputError(
            f"process 0 left {place.address} before all {place.count} processes had arrived; see "
            "why in its own output"
        )
    if complaint:
        raise InputError(complaint)


def _send(connection: socket.socket, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever has left is missed by jax
        connection.sendall(json.dumps(what).encode() + b"\n")


def _hear(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """A line of JSON; an empty object for silence or anything else."""
    try:
        connection.settimeout(seconds)
        with connection.makefile("rb") as file:
            said = json.loads(file.readline(_LONGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
