"""How the processes of a run find each other: where each stands, and who is there.

On the hosts of a TPU pod jax knows where the others are, and of SLURM's tasks `srun` says it.
Elsewhere three variables do, the same on all except for the number: JAX_COORDINATOR_ADDRESS
(host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID. Without them a run is one process.

jax connects all processes in one call, which aborts each of them, without a word of who is missing,
when one does not come. So they report to process 0 before, and it tells all of them the same: to go
on, or who is missing.

A run may be booked on slices: groups of hosts, as many in each, of which one or the other may be
away for hours. JAX_COORDINATOR_ADDRESS then names the first process of each, with commas in
between; processes are numbered slice by slice, and report to all first ones, and `running.slices`
decides which of them train. Else a run is one slice, which is to be whole.
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

from bert_jax.errors import InputError, Unavailable
from bert_jax.running.slices import RollCall, Terms

# Seconds to connect, and between two attempts; bytes of a message.
_HEAR, _RETRY, _LONGEST = 5.0, 0.1, 4096
# Seconds until all processes have agreed to start.
_AGREE = 60.0


class Place(NamedTuple):
    """A process's place among those of a run."""

    address: str  # host:port of process 0; of several slices, of the first process of each
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


# --- who is there -------------------------------------------------------------------------------


class Met(NamedTuple):
    """The slices that train, as one of their processes knows it."""

    place: Place  # of this process among those that train
    slices: tuple[int, ...]  # which do, by the numbers they were booked with
    terms: Terms
    door: "Door | None"  # of process 0 of several slices, where those that come later wait

    @property
    def bind(self) -> str | None:
        """Returns where jax's service listens on process 0; None: where its address says."""
        if self.terms.booked == 1:
            return None
        # Door and run have a port each.
        host = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")[0] or "[::]"
        return f"{host}:{self.place.address.rpartition(':')[2]}"


def meet(place: Place, wait: float, limit: float, placed: Callable[[int, int, int], Any]) -> Met:
    """Waits until this process's slice is one of those that train, and tells libtpu.

    Args:
      place: this process's.
      wait: seconds for slices that are missing.
      limit: seconds, of several slices more, for those that nothing can be done without.
      placed: what a run is on some of its slices, of so many processes each; None: it cannot be.

    Raises:
      Unavailable: too many are missing, or the run that went on without this slice has ended.
    """
    addresses = [_parts(address) for address in place.address.split(",")]
    many = len(addresses)
    hosts, uneven = divmod(place.count, many)
    if uneven:
        raise InputError(
            f"JAX_NUM_PROCESSES={place.count}: not a multiple of the {many} slices whose first "
            "processes JAX_COORDINATOR_ADDRESS names"
        )
    fits = functools.cache(lambda taken: placed(taken, many, hosts) is not None)
    met = _met(place, addresses, Terms(many, hosts, wait if many > 1 else 0.0, limit, fits))
    if many > 1 and os.environ.pop("MEGASCALE_NUM_SLICES", "") and len(met.slices) > 1:
        os.environ["MEGASCALE_NUM_SLICES"] = str(len(met.slices))
        os.environ["MEGASCALE_SLICE_ID"] = str(met.place.number // hosts)
        os.environ["MEGASCALE_COORDINATOR_ADDRESS"] = met.place.address.rpartition(":")[0]
    return met


def _met(place: Place, addresses: list[tuple[str, int]], terms: Terms) -> Met:
    began, (mine, within) = time.monotonic(), divmod(place.number, terms.hosts)
    first = place.number - within  # the first process of this slice
    words: queue.SimpleQueue[tuple[Connection, dict[str, Any] | None]] = queue.SimpleQueue()
    over, roll, door = threading.Event(), RollCall(terms, mine), None
    refused = ""  # why that does not answer

    def report(line: Connection) -> None:
        """Says who this is, and since when; the second time it agrees to what was decided."""
        with contextlib.suppress(OSError):  # one that has left is missed soon
            me = [place.number, place.count, socket.gethostname(), time.monotonic() - began]
            line.send_bytes(json.dumps(me).encode())

    def call(number: int) -> None:
        """Reports to the first process of a slice, and brings what it says; None: it has left."""
        nonlocal refused
        heard = False
        while not (heard or over.wait(_RETRY)):
            try:
                with _dial(addresses[number]) as line:
                    report(line)
                    if number == mine:  # is missed from now on, even if it never says a word
                        heard, refused = True, ""
                        words.put((line, {"what": "hears"}))
                    while not over.is_set():
                        if line.poll(_RETRY):
                            words.put((line, json.loads(line.recv_bytes())))
                            heard = True
            except (OSError, EOFError) as error:
                refused = str(error) if number == mine else refused
        if heard:
            words.put((line, None))

    with contextlib.ExitStack() as stack:
        if within == 0:
            door = Door(place, addresses[mine], roll)
            stack.callback(door.close)
        stack.callback(over.set)
        for number in range(terms.booked):
            threading.Thread(target=call, args=(number,), name="slices", daemon=True).start()
        own, agreed, what, taken = None, None, "", ()
        limit: float | None = terms.wait + terms.limit
        while agreed is None or what != "go":
            try:
                line, word = words.get(timeout=limit)
            except queue.Empty:
                raise Unavailable(
                    f"JAX_COORDINATOR_ADDRESS={place.address}: process {first} did not answer "
                    f"there within {limit:g} seconds{f' ({refused})' * bool(refused)}; is it "
                    f"running, and can process {place.number} ({socket.gethostname()}) reach it?"
                ) from None
            if agreed not in (None, line):
                continue  # another has decided as well, and too late
            if word is None:
                if line is own and what:
                    continue  # of which nothing more is needed
                raise Unavailable(
                    f"the run that went on without slice {mine} has ended; run again to go on"
                    if what and agreed is None
                    else f"process {first} left {place.address} before all had arrived; see why in "
                    "its own output"
                )
            if word["what"] == "hears":
                own = line
                limit = limit and limit + _HEAR  # it has begun no later, and gives up by itself
            elif word["what"] == "error":
                raise (Unavailable if word["late"] else InputError)(word["error"])
            else:
                what, taken = word["what"], tuple(word["slices"])
                roll.goes_on = True  # this slice decides nothing any more
                if agreed is None:
                    limit = None  # however long that run takes
                    if mine in taken and what == "decided":
                        agreed, limit = line, _AGREE
                        report(line)
        number = taken.index(mine) * terms.hosts + within
        if stays := number == 0 and terms.booked > 1:
            over.set()
            stack.pop_all()  # its door stays open
    here = Place(word["address"], number, len(taken) * terms.hosts)
    return Met(here, taken, terms, door if stays else None)


class Door:
    """The place where a slice's first process hears all others; process 0, while a run goes on.

    It says to all of them which slices train once that is decided, and to those that come later.
    The run begins when all its processes have agreed: of two that decide at once one has them all.
    """

    def __init__(self, place: Place, at: tuple[str, int], roll: RollCall):
        self._place, self._roll, self._at = place, roll, at
        self._deadline = time.monotonic() + roll.terms.wait + roll.terms.limit
        self._server = _listen(place, at[1])
        self._lines: dict[Connection, int] = {}  # the numbers of processes; -1: a stranger yet
        self._verdict: dict[str, Any] = {}
        self._agreed: set[int] = set()
        self._open = True
        self._hearing = threading.Thread(target=self._hear, name="door", daemon=True)
        self._hearing.start()

    def waiting(self) -> list[int]:
        """Returns the slices that are whole, and do not train."""
        return [one for one in self._roll.whole() if one not in self._verdict["slices"]]

    def close(self) -> None:
        """Hears nobody any more."""
        self._open = False
        self._hearing.join()

    def _hear(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._server)
            while self._open:
                for ready in multiprocessing.connection.wait([self._server, *self._lines], _RETRY):
                    if ready is self._server:
                        line = stack.enter_context(_connection(self._server.accept()[0]))
                        self._lines[line] = -1
                        continue
                    try:
                        self._came(ready, *json.loads(ready.recv_bytes(_LONGEST)))
                    except (OSError, EOFError, LookupError, ValueError, TypeError):
                        # A stranger, or it has left.
                        self._roll.left(self._lines.pop(ready, -1))
                        ready.close()
                if not (self._verdict or self._roll.goes_on):
                    now = time.monotonic()
                    if taken := self._roll.verdict(now):
                        self._decide(taken)
                    elif now > self._deadline:
                        self._refuse(self._missing(), is_late=True)

    def _came(self, line: Connection, number: int, count: int, name: str, waited: float) -> None:
        if not 0 <= number < count:
            raise ValueError(number)
        if self._lines[line] == number:
            self._agreed.add(number)
            if len(self._agreed) == len(self._verdict["slices"]) * self._roll.terms.hosts:
                self._say("go")
            return
        doubles = [one for one, whose in self._lines.items() if whose == number]
        self._lines[line] = number
        if count != self._place.count or (doubles and self._roll.terms.booked == 1):
            self._refuse(
                f"process {number} of {count} ({name}) called while {sorted(self._roll.here)} of "
                f"{self._place.count} were here; give each its own JAX_PROCESS_ID, and all the "
                "same JAX_NUM_PROCESSES"
            )
            return
        for old in doubles:
            del self._lines[old]  # of a machine that went without a word
            old.close()
        self._roll.came(number, time.monotonic() - waited)
        if self._verdict:
            self._say("error" if "error" in self._verdict else "goes_on", line)

    def _missing(self) -> str:
        terms, first = self._roll.terms, self._place.number
        away = sorted({*range(first, first + terms.hosts)} - self._roll.here.keys())
        names = f"{', '.join(map(str, away[:8]))}{' and more' * (len(away) > 8)}"
        return (
            f"{f'process {names} of {self._place.count}' if away else 'enough other slices'} did "
            f"not arrive within {terms.wait + terms.limit:g} seconds at {self._place.address}; see "
            "why in its own output, and start all of them again"
        )

    def _decide(self, taken: tuple[int, ...]) -> None:
        self._verdict = {"slices": taken, "address": self._place.address}
        if self._roll.terms.booked > 1:
            # jax's own service is at another port: those who come later call here.
            with _listen(self._place, 0) as drawn:
                host, port = self._at[0], drawn.getsockname()[1]
                host = f"[{host}]" if ":" in host else host
                self._verdict["address"] = f"{host}:{port}"
        self._say("decided")

    def _refuse(self, error: str, is_late: bool = False) -> None:
        self._verdict = {"slices": (), "error": error, "late": is_late}
        self._say("error")

    def _say(self, what: str, *to: Connection) -> None:
        for line in to or [line for line, number in self._lines.items() if number >= 0]:
            with contextlib.suppress(OSError):  # one that has left is missed by jax
                line.send_bytes(json.dumps(self._verdict | {"what": what}).encode())


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or ".." in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"JAX_COORDINATOR_ADDRESS={address}: write it as host:port")
    return host.strip("[]"), int(port)


def _listen(place: Place, port: int) -> socket.socket:
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


def _dial(at: tuple[str, int]) -> Connection:
    return _connection(socket.create_connection(at, timeout=_HEAR))


def _connection(line: socket.socket) -> Connection:
    """Returns a socket as a line of messages; one that ends within a message ends the line."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 500_000))
    return Connection(line.detach())
