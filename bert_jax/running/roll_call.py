"""How the processes of a run find each other: where each stands, and who is there.

On the hosts of a TPU pod jax knows where the others are, and of SLURM's tasks `srun` says it.
Elsewhere three variables do, the same on all except for the number: JAX_COORDINATOR_ADDRESS
(host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID. Without them a run is one process.

jax connects all processes in one call, which aborts each of them, without a word of who is missing,
when one does not come. So they report to process 0 before, and it tells all of them the same: to go
on, or who is missing.
"""

import contextlib
import json
import multiprocessing.connection
import os
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from bert_jax.errors import InputError, Unavailable

# Seconds to connect, and between two attempts; bytes of a message.
_HEAR, _RETRY, _LONGEST = 5.0, 0.1, 4096


class Place(NamedTuple):
    """A process's place among those of a run."""

    address: str  # host:port of process 0
    number: int  # of the process, from 0
    count: int  # of processes


def own_place() -> Place | None:
    """Returns this process's place as the environment has it; None if it has none."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if given.get(names[2]) == "1":
        return None
    if not given:
        return _in_slurm()
    with contextlib.suppress(KeyError, ValueError):
        place = Place(given[names[0]], int(given[names[1]]), int(given[names[2]]))
        if 0 <= place.number < place.count:
            return place
    shown = ", ".join(f"{name}={given.get(name, '')}" for name in names)
    raise InputError(
        f"{shown}: set all three, JAX_PROCESS_ID to a whole number below JAX_NUM_PROCESSES, or none"
    )


def _in_slurm() -> Place | None:
    """Returns this task's place in the step that `srun` started; None outside of one or alone."""
    from jax._src.clusters.slurm_cluster import SlurmCluster as Step  # jax has no public name

    if not Step.is_env_present() or Step.get_process_count() == 1:
        return None
    address = Step.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT"))
    return Place(address, Step.get_process_id(), Step.get_process_count())


def wait_for_all(place: Place, limit: float) -> None:
    """Waits until all processes have reported to process 0, `limit` seconds at most.

    Raises:
      Unavailable: some have not in time; the same message on all.
    """
    host, _, port = place.address.rpartition(":")
    if not host or ".." in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"JAX_COORDINATOR_ADDRESS={place.address}: write it as host:port")
    call = _hear_all if place.number == 0 else _report
    error, late = call(place, host.strip("[]"), int(port), limit)
    if error:
        raise Unavailable(error) if late else InputError(error)


def _hear_all(place: Place, host: str, port: int, limit: float) -> tuple[str, bool]:
    """Returns the error that all processes get, "" for none, and whether some are late."""
    deadline, here, error = time.monotonic() + limit, {0: socket.gethostname()}, ""
    numbers: dict[Connection, int] = {}  # -1: unknown yet
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(place, port))
        while not error and len(here) < place.count and time.monotonic() < deadline:
            left = max(deadline - time.monotonic(), 0.0)
            for ready in multiprocessing.connection.wait([server, *numbers], left):
                if ready is server:
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


def _listen(place: Place, port: int) -> socket.socket:
    # As jax's own service will, a moment later.
    host, _, bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")
    host = host.strip("[]")
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    at = (host, int(bound) if bound.isdecimal() else port)
    try:
        return socket.create_server(at, family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise InputError(
            f"JAX_COORDINATOR_ADDRESS={place.address}: process 0 cannot listen there "
            f"({error.strerror or error}); name a free port of the machine it runs on"
        ) from error


def _report(place: Place, host: str, port: int, limit: float) -> tuple[str, bool]:
    """Tells process 0 who this is, and returns its answer to all."""
    deadline, me = time.monotonic() + limit, socket.gethostname()
    while True:
        try:
            line = _connection(socket.create_connection((host, port), timeout=_HEAR))
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


def _connection(line: socket.socket) -> Connection:
    """Returns a socket as a line of messages; one that ends within a message ends the line."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 500_000))
    return Connection(line.detach())
