"""The processes of one run: how they agree on what they do, and end together.

What processes tell each other goes through the key-value store of jax's coordinator. An error in
one ends all of them with its line and its exit code. A process that dies without a word is noticed
by jax, which then aborts the others (exit code 134).
"""

import collections
import contextlib
import glob
import importlib.util
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from bert_jax import errors, foreign
from bert_jax.distributed import rendezvous, slices
from bert_jax.errors import InputError, Unavailable
from bert_jax.process import logger
from bert_jax.storage import retry

Kind = type[InputError | Unavailable]

# Seconds to wait for the others at the start, unless BERT_JAX_ARRIVE_WITHIN says otherwise.
_ARRIVE = 300.0
# Seconds in which a process may clean up, and in which the others may read why process 0 ends.
_UNWIND, _READ = 10.0, 3.0
_SLICE = 1_000  # milliseconds between looks at whether another has failed
_LOOK, _DAY = 5_000, 86_400_000
_ASKED_TO_STOP = "RECEIVED_PREEMPTION_NOTICE"  # jax's own key, once a process had SIGTERM
# How computations say that another process, or its coordinator, has gone.
_LOST = re.compile(r"Gloo|NCCL|Connection (closed|reset)|Socket closed|UNAVAILABLE|heartbeat")
# How computations say that a device, or what drives it, has failed: not the program.
_BROKEN = re.compile(
    r"^(INTERNAL|DATA_LOSS|ABORTED|CANCELLED|UNKNOWN|UNAVAILABLE|DEADLINE_EXCEEDED)\b"
)
# How a TPU says that its arithmetic differs from one time to the next.
_CORRUPT = re.compile(r"\bsdc\b|silent data corruption", re.IGNORECASE)
_COMPILER = re.compile(r"[Cc]ompil|Mosaic|lower")  # which refuses the same program every time
_FEW = 4  # differences that are named
_LOOKS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds between looks at what all are to see


class Peers:
    """This process among those of its run."""

    def __init__(
        self,
        number: int,
        count: int,
        store: Any,
        limit: float,
        membership: rendezvous.Membership | None = None,
    ):
        self.number, self.count = number, count  # of processes
        self.membership = membership  # of a run that is booked on several slices: those that train
        self._store, self._limit = store, limit
        self._me = f"process {number} ({socket.gethostname()})"
        self._failure: dict[str, Any] | None = None
        self._agreed: BaseException | None = None  # what all processes raise alike
        self._unwind = _UNWIND
        self._ending = threading.Lock()
        self._times: collections.Counter[str] = collections.Counter()
        self._clean: Callable[[], None] = lambda: None
        self._watching = threading.Thread(target=self._watch, name="peers", daemon=True)
        if count > 1:
            self._watching.start()

    @property
    def is_primary(self) -> bool:
        """Returns whether this is process 0: the one that writes."""
        return self.number == 0

    def say(self, line: str) -> None:
        """Shows a line about this process, of whichever number."""
        logger.warning("bert-jax: %s: %s", self._me, line)

    def owner(self, device: jax.Device) -> str:
        """Returns the process of a device, and its host; all processes ask together."""
        is_mine = device.process_index == self.number
        return self.first_error(f"owner of device {device.id}", self._me * is_mine)

    def first_error(self, what: str, error: str, patience: float = 0.0) -> str:
        """Returns the error of the first process that has one, on all, once all have come here.

        `what` names the place, to which one may come `patience` seconds later than another, beyond
        the usual; all come to places in the same order. `error` is this process's, "" for none.

        Raises:
          Unavailable: one has not come in time.
        """
        limit = self._limit + patience
        return self._gather(
            what, error, limit, lambda all_errors: next(filter(None, all_errors), "")
        )

    def agree(self, what: str, error: str, kind: Kind = InputError) -> None:
        """Raises the error of the first process that has one, on all; see `first_error`."""
        verdict = self.first_error(what, error)
        if verdict:
            self._agreed = kind(verdict)
            raise self._agreed

    def connect(self, mesh: jax.sharding.Mesh) -> None:
        """Connects the devices of all processes, so that no later computation has to wait for it.

        gloo, between CPUs, gives up when a process comes to the first computation of a group of
        devices 30 seconds after another; from then on it waits. A busy machine compiles a step
        longer than that. So each group meets here in a computation that all have compiled before.
        """
        if self.count == 1 or mesh.devices.flat[0].platform != "cpu":
            return
        names = mesh.axis_names
        groups = [names[i:j] for i in range(len(names)) for j in range(i + 1, len(names) + 1)]

        def meet() -> list[jax.Array]:
            return [jax.lax.psum(1.0 + jax.lax.axis_index(group), group) for group in groups]

        everywhere = jax.sharding.PartitionSpec()
        program = jax.shard_map(meet, mesh=mesh, in_specs=(), out_specs=everywhere, check_vma=False)
        compiled = jax.jit(program).lower().compile()
        self.agree("devices", "")
        jax.block_until_ready(compiled())

    def slices_here(
        self, lines: Iterable[Mapping[str, Any]], say: Callable[[str], None]
    ) -> dict[str, Any]:
        """Says who is missing, by timings.jsonl, and returns it; {} where there is one slice."""
        if self.membership is None:
            return {}
        booked = self.membership.policy.booked
        since = slices.missing_since(lines, self.membership.slices, booked, time.time())
        say(slices.in_words(since, booked))
        return {"slices": {"taken": self.membership.slices, "missing_since": since}}

    def slices_due(self, lines: Callable[[], Sequence[Mapping[str, Any]]], left: int) -> str:
        """Returns which slices the run is to stop for, on all processes; see `slices.is_due`."""
        if self.membership is None or len(self.membership.slices) == self.membership.policy.booked:
            return ""
        _, training, policy, listener = self.membership
        waiting, count = listener.waiting() if listener else [], len(training)
        if waiting and not slices.is_due(policy, count, len(waiting), lines(), time.time(), left):
            waiting = []
        return self.first_error("slices", ", ".join(map(str, waiting)))

    def require_same(self, what: str, facts: Mapping[str, str], remedy: str) -> None:
        """Raises InputError on all processes if one has other facts than process 0."""
        self.agree(f"{what}, compared", self.difference(what, facts, remedy))

    def difference(self, what: str, facts: Mapping[str, str], remedy: str) -> str:
        """Returns how facts, by name, differ from process 0's, on all processes; "" if none do."""

        def compared(brought: list[str]) -> str:
            (leader, there), *others = map(json.loads, brought)
            for name, here in others:
                pairs = {f: (here.get(f, "nothing"), there.get(f, "nothing")) for f in here | there}
                changed = [
                    f"{fact}={ours} here and {theirs} there"
                    for fact, (ours, theirs) in sorted(pairs.items())
                    if ours != theirs
                ]
                if changed:
                    few = "; ".join(changed[:_FEW])
                    more = f" and {len(changed) - _FEW} more" if len(changed) > _FEW else ""
                    return f"{name} differs from {leader}: {few}{more}; {remedy}"
            return ""

        return self._gather(what, json.dumps([self._me, dict(facts)]), self._limit, compared)

    def await_same(self, what: str, look: Callable[[], str], remedy: str, kind: Kind) -> None:
        """Waits until all see the same, as on a disk that may show what is old for a while.

        Raises an error of this kind on all of them if they do not within a minute.
        """
        for pause in (0.0, *_LOOKS):
            time.sleep(pause)
            difference = self.difference(what, {what: look()}, remedy)
            if not difference:
                return
        self.agree(f"{what}, at last", difference, kind)

    def on_primary(self, what: str, work: Callable[[], None]) -> None:
        """Runs the work on process 0 while the others wait, as long as it takes."""
        if self.is_primary:
            work()
        self.meet(f"{what}/done")

    def meet(self, what: str) -> None:
        """Waits until all processes have come here, as long as that takes."""
        self._gather(what, "", None, lambda brought: "")

    @contextlib.contextmanager
    def abort_together(self, clean: Callable[[], None]) -> Iterator[None]:
        """Ends all processes without unwinding if any fails from here on.

        Several are in the middle of a computation that each waits in for the others, and would
        wait for ever. `clean` is called before the end.
        """
        self._clean, self._unwind = clean, 0.0
        try:
            yield
        except BaseException as error:
            if self.count > 1:
                self.fail(error)
            raise
        self._unwind = _UNWIND

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all processes with one line and one exit code."""
        named = error if self._agreed is error else named_fault(error)
        line, code = errors.message_and_code(named)
        if isinstance(error, jax.errors.JaxRuntimeError) and (lost := _LOST.search(str(error))):
            reason = str(error)[lost.start() :].split("\n")[0][:200]
            line = (
                f"bert-jax: lost another process ({reason}); start all of them again, the run goes "
                "on from its newest checkpoint"
            )
            code = errors.LOST
        elif code == errors.FAILED and self._failure is None:
            traceback.print_exception(error)
        if error is not self._agreed:
            line = line.replace("bert-jax: ", f"bert-jax: {self._me}: ", 1)
        failure = {"line": line, "code": code}
        try:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was first
                self._set("failure", json.dumps(failure))
            failure = json.loads(self._get_once("failure", _DAY))
        except jax.errors.JaxRuntimeError:
            pass  # the coordinator is lost, too
        self._end(failure)

    def close(self) -> None:
        """Waits until all are here."""
        if self.count > 1:
            self.agree("end", "")
            if self.is_primary:
                self._set("failure", "null")
            # One that comes back from the store while Python ends aborts the process.
            self._watching.join(_READ)

    # --- the store ------------------------------------------------------------------------------

    def _gather(
        self, what: str, mine: str, limit: float | None, verdict: Callable[[list[str]], str]
    ) -> str:
        """Returns, on all processes, process 0's verdict on what each has brought to this place."""
        if self.count == 1:
            return verdict([mine])
        self._times[what] += 1  # a key of the store is set once
        key = what if self._times[what] == 1 else f"{what}, {self._times[what]}"
        self._set(f"{key}/{self.number}", mine)
        if self.is_primary:
            # The others may have waited for this process as long.
            deadline = None if limit is None else time.monotonic() + 2 * limit
            numbers = range(self.count)
            brought = [self._get(f"{key}/{number}", deadline, number) for number in numbers]
            self._set(f"{key}/verdict", verdict(brought))
        deadline = None if limit is None else time.monotonic() + 3 * limit
        return self._get(f"{key}/verdict", deadline, 0)

    def _set(self, key: str, value: str) -> None:
        self._store.key_value_set(f"bert_jax/{key}", value)

    def _get_once(self, key: str, milliseconds: int) -> str:
        return self._store.blocking_key_value_get(f"bert_jax/{key}", milliseconds)

    def _get(self, key: str, deadline: float | None, whose: int) -> str:
        """Returns what process `whose` sets; raises Unavailable after the deadline."""
        began = time.monotonic()
        while True:
            try:
                return self._get_once(key, _SLICE)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if self._failure is not None:
                self._agreed = Unavailable(self._failure["line"])  # which of them all end by
                raise self._agreed
            if deadline is not None and time.monotonic() > deadline:
                raise Unavailable(
                    f"process {whose} has not come to {key.split('/')[0]!r} within "
                    f"{time.monotonic() - began:.0f} seconds; see why in its own output, and start "
                    "all of them again"
                )

    def _watch(self) -> None:
        """Waits for a failure of any process, by which this one ends, or a request to stop."""
        failure = None
        while failure is None:
            try:
                failure = self._get_once("failure", _LOOK)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    return  # the coordinator is lost; jax ends this process
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody was
                    self._store.key_value_try_get(_ASKED_TO_STOP)
                    retry.hurry()
        self._failure = json.loads(failure)
        if self._failure is not None:
            time.sleep(self._unwind)
            self._end(self._failure)

    def _end(self, failure: dict[str, Any]) -> NoReturn:
        """Says why and leaves, process 0 last: the others read from it."""
        self._ending.acquire()  # one of the two threads that may come here; never given back
        retry.hurry()
        logger.error("%s", failure["line"])
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self.is_primary:
                deadline = time.monotonic() + _READ
                for number in range(1, self.count):
                    left = max(deadline - time.monotonic(), 0.0)
                    self._get_once(f"left/{number}", round(left * 1000) + 1)
                time.sleep(0.2)  # for the last of them to be gone
            else:
                self._set(f"left/{self.number}", "")
        with contextlib.suppress(Exception):
            self._clean()  # last: the other thread may write until the end
        sys.stdout.flush()
        os._exit(failure["code"])


def named_fault(error: BaseException) -> BaseException:
    """Returns Unavailable for what a broken device or its driver says; else the error itself.

    What the compiler refuses it refuses every time, and memory that does not suffice never will.
    """
    text = str(error)
    reason = text.split("\n")[0][:200]
    if not isinstance(error, RuntimeError):
        return error
    if _CORRUPT.search(text):
        return Unavailable(f"a chip failed its check ({reason}); run again on another machine")
    if _BROKEN.search(text) and not (text.startswith("INTERNAL") and _COMPILER.search(text)):
        return Unavailable(f"a device or its driver failed ({reason}); run again to go on")
    return error


@contextlib.contextmanager
def connected(
    wait: float = 0.0, placed: Callable[[int, int, int], Any] = lambda taken, booked, hosts: taken
) -> Iterator[Peers]:
    """Connects the processes of this run while entered, which must be before jax has devices.

    For what it takes see `rendezvous.join_rendezvous`.

    Raises:
      Unavailable: a process that does not arrive, or a device that fails.
    """
    peers = None
    try:
        peers = _connect(wait, placed)
        yield peers
        peers.close()
    except BaseException as error:
        if peers is not None and peers.count > 1:
            peers.fail(error)
        named = named_fault(error)
        if named is error:
            raise
        raise named from error


def _connect(wait: float, placed: Callable[[int, int, int], Any]) -> Peers:
    limit = seconds("BERT_JAX_ARRIVE_WITHIN") or _ARRIVE
    place, membership, bind = rendezvous.own_place(), None, None
    if place is None and not _on_tpu_host():
        return Peers(0, 1, None, limit)
    # jax's notice of SIGTERM takes the signal over: only once there is something to save.
    jax.config.update("jax_enable_preemption_service", False)
    if place is not None:
        if "," in place.address:
            membership = rendezvous.join_rendezvous(place, wait, limit, placed)
            place, bind = membership.place, membership.bind
        else:
            rendezvous.wait_for_all(place, limit)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            *(place.address, place.count, place.number),
            # Where jax finds SLURM by itself it takes one GPU a process, however many there are.
            cluster_detection_method="deactivate",
            initialization_timeout=round(limit),
            coordinator_bind_address=bind,
        )
    elif not _found_by_jax(limit):
        return Peers(0, 1, None, limit)
    state = foreign.distributed_state()
    return Peers(state.process_id, state.num_processes, state.client, limit, membership)


def seconds(name: str) -> float | None:
    """Reads seconds from the environment; None if the variable is not set."""
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise InputError(f"{name}={text}: must be a number of seconds")
    return value


def _on_tpu_host() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return (
        os.environ.get("JAX_NUM_PROCESSES") != "1"
        and (not platforms or "tpu" in platforms)
        and importlib.util.find_spec("libtpu") is not None
        and bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*"))
    )


def _found_by_jax(limit: float) -> bool:
    """Returns whether jax finds itself on a host of a TPU pod; then it is connected."""
    try:
        jax.distributed.initialize(initialization_timeout=round(limit))
    except ValueError as error:
        if "should be defined" in str(error) or "must be defined" in str(error):
            return False  # a TPU, and nothing that tells of others
        raise
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:
        reason = str(error).split("\n")[0][:200]
        raise InputError(
            f"jax cannot find the other hosts of this TPU ({reason}); set JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or JAX_NUM_PROCESSES=1 for this host alone"
        ) from error
    return True


def notice_sigterm() -> None:
    """Hands SIGTERM over to jax, which tells all processes at which step to stop."""
    jax.config.update("jax_enable_preemption_service", True)
    foreign.distributed_state().initialize_preemption_sync_manager()
