"""The processes of one run: how they agree on decisions and end together.

Processes exchange messages through the key-value store of JAX's coordinator. An error in one
process ends all of them with its message and its exit code. If a process dies without a message,
JAX notices it and aborts the others (exit code 134).
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
from bert_jax import process as process_lib
from bert_jax.distributed import rendezvous, slices
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import retry

Kind = type[InputError | Unavailable]

# Seconds to wait for the other processes at a start; BERT_JAX_ARRIVE_WITHIN overrides it.
_ARRIVE = 300.0
# Seconds for a process to clean up, and for the other processes to read why process 0 ends.
_CLEAN_UP, _READ = 10.0, 3.0
# Milliseconds between two checks for a failure, while waiting and in the background; of a day.
_WAIT_POLL, _WATCH_POLL, _DAY = 1_000, 5_000, 86_400_000
_ASKED_TO_STOP = "RECEIVED_PREEMPTION_NOTICE"  # JAX's key after a process received SIGTERM
# Errors of computations if another process, or its coordinator, is gone.
_LOST = re.compile(r"Gloo|NCCL|Connection (closed|reset)|Socket closed|UNAVAILABLE|heartbeat")
# Errors of computations if a device or its driver has failed, rather than the program.
_BROKEN = re.compile(
    r"^(INTERNAL|DATA_LOSS|ABORTED|CANCELLED|UNKNOWN|UNAVAILABLE|DEADLINE_EXCEEDED)\b"
)
# Errors of a TPU whose arithmetic differs from one execution to the next.
_CORRUPT = re.compile(r"\bsdc\b|silent data corruption", re.IGNORECASE)
_COMPILER = re.compile(r"[Cc]ompil|Mosaic|lower")  # refuses the same program every time
_MOST_NAMED = 4  # differences in an error message
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds between two comparisons of `await_same`


class Peers:
    """Connects this process with the other processes of its run."""

    def __init__(
        self,
        number: int,
        count: int,
        store: Any,
        limit: float,
        membership: rendezvous.Membership | None = None,
    ):
        self.number, self.count = number, count  # of this process, of all processes
        self.membership = membership  # the slices that train; None: a run of one slice
        self._store, self._limit = store, limit
        self._name = f"process {number} ({socket.gethostname()})"
        self._failure: dict[str, Any] | None = None
        self._shared_error: BaseException | None = None  # an error that all processes raise
        self._clean_up_seconds = _CLEAN_UP
        self._ending = threading.Lock()
        self._uses: collections.Counter[str] = collections.Counter()  # of names of barriers
        self._clean_up: Callable[[], None] = lambda: None
        self._watching = threading.Thread(target=self._watch, name="peers", daemon=True)
        if count > 1:
            self._watching.start()

    @property
    def is_primary(self) -> bool:
        """Returns whether this is process 0, which writes the run's files."""
        return self.number == 0

    def report(self, line: str) -> None:
        """Logs a line that names this process."""
        process_lib.logger.warning("bert-jax: %s: %s", self._name, line)

    def owner(self, device: jax.Device) -> str:
        """Returns the process and the host of a device; all processes must call it together."""
        is_mine = device.process_index == self.number
        return self.first_error(f"owner of device {device.id}", self._name * is_mine)

    def first_error(self, name: str, error: str, patience: float = 0.0) -> str:
        """Waits for all processes; returns, on each, the error of the first process that has one.

        `name` names the barrier; all processes reach barriers in the same order, `patience` seconds
        later than usual at most. `error` is that of this process, "" if none.

        Raises:
          Unavailable: a process did not arrive in time.
        """
        limit = self._limit + patience
        return self._gather(name, error, limit, lambda errors: next(filter(None, errors), ""))

    def agree(self, name: str, error: str, kind: Kind = InputError) -> None:
        """Raises, on all processes, the error of the first one that has one; see `first_error`."""
        if first_error := self.first_error(name, error):
            self._shared_error = kind(first_error)
            raise self._shared_error

    def connect_devices(self, mesh: jax.sharding.Mesh) -> None:
        """Connects the CPU devices of all processes by a small computation of each group.

        Gloo fails if a process starts the first computation of a group 30 seconds after another;
        later computations wait. Compiling a step may take longer than that.
        """
        if self.count == 1 or mesh.devices.flat[0].platform != "cpu":
            return
        names = mesh.axis_names
        groups = [names[i:j] for i in range(len(names)) for j in range(i + 1, len(names) + 1)]

        def add() -> list[jax.Array]:
            return [jax.lax.psum(1.0 + jax.lax.axis_index(group), group) for group in groups]

        replicated = jax.sharding.PartitionSpec()
        program = jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=replicated, check_vma=False)
        compiled = jax.jit(program).lower().compile()
        self.agree("devices", "")
        jax.block_until_ready(compiled())

    def report_slices(
        self, lines: Iterable[Mapping[str, Any]], report: Callable[[str], None]
    ) -> dict[str, Any]:
        """Reports and returns missing slices, by timings.jsonl; {} for a run of one slice."""
        if self.membership is None:
            return {}
        booked = self.membership.policy.booked
        since = slices.missing_since(lines, self.membership.slices, booked, time.time())
        report(slices.describe_missing(since, booked))
        return {"slices": {"taken": self.membership.slices, "missing_since": since}}

    def slices_to_admit(self, read: Callable[[], Sequence[Mapping[str, Any]]], left: int) -> str:
        """Returns the slices that the run should stop for, on all processes; see `slices.is_due`.

        `read` returns the lines of timings.jsonl; `left` steps are left.
        """
        if self.membership is None or len(self.membership.slices) == self.membership.policy.booked:
            return ""
        _, training, policy, listener = self.membership
        waiting = listener.waiting() if listener else []
        counts = len(training), len(waiting)
        if waiting and not slices.is_due(policy, *counts, read(), time.time(), left):
            waiting = []
        return self.first_error("slices", ", ".join(map(str, waiting)))

    def require_same(self, name: str, facts: Mapping[str, str], remedy: str) -> None:
        """Raises InputError on all processes if the facts of one differ from those of process 0."""
        self.agree(f"{name}, compared", self.difference(name, facts, remedy))

    def difference(self, name: str, facts: Mapping[str, str], remedy: str) -> str:
        """Returns, on all processes, how the facts of one differ from process 0's; "" if none."""

        def compare(messages: list[str]) -> str:
            (primary, expected), *others = map(json.loads, messages)
            for process, actual in others:
                names = sorted(actual | expected)
                pairs = [(f, actual.get(f, "nothing"), expected.get(f, "nothing")) for f in names]
                changed = [f"{f}={a} here and {b} there" for f, a, b in pairs if a != b]
                if changed:
                    more = f" and {len(changed) - _MOST_NAMED} more" * (len(changed) > _MOST_NAMED)
                    named = "; ".join(changed[:_MOST_NAMED])
                    return f"{process} differs from {primary}: {named}{more}; {remedy}"
            return ""

        return self._gather(name, json.dumps([self._name, dict(facts)]), self._limit, compare)

    def await_same(self, name: str, read: Callable[[], str], remedy: str, kind: Kind) -> None:
        """Waits until all processes read the same value: a shared disk may be stale for a while.

        Raises an error of this kind on all processes if the values still differ after a minute.
        """
        for pause in (0.0, *_PAUSES):
            time.sleep(pause)
            if not (difference := self.difference(name, {name: read()}, remedy)):
                return
        self.agree(f"{name}, at last", difference, kind)

    def run_on_primary(self, name: str, work: Callable[[], None]) -> None:
        """Runs the work on process 0 while the others wait without a time limit."""
        if self.is_primary:
            work()
        self.wait_at_barrier(f"{name}/done")

    def wait_at_barrier(self, name: str) -> None:
        """Waits without a time limit until all processes have reached this barrier."""
        self._gather(name, "", None, lambda messages: "")

    @contextlib.contextmanager
    def abort_together(self, clean_up: Callable[[], None]) -> Iterator[None]:
        """Ends all processes without unwinding if one fails inside.

        The others may be in a computation that waits for the failed process forever. `clean_up` is
        called before the end.
        """
        self._clean_up, self._clean_up_seconds = clean_up, 0.0
        try:
            yield
        except BaseException as error:
            if self.count > 1:
                self.fail(error)
            raise
        self._clean_up_seconds = _CLEAN_UP

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all processes with one message and one exit code."""
        is_shared = error is self._shared_error
        line, code = errors.message_and_code(error if is_shared else classify_fault(error))
        if lost := describe_lost_process(error):
            remedy = "start all of them again, the run resumes from its newest checkpoint"
            line, code = f"bert-jax: {lost}; {remedy}", errors.PEER_LOST
        elif code == errors.FAILED and self._failure is None:
            traceback.print_exception(error)
        if not is_shared:
            line = line.replace("bert-jax: ", f"bert-jax: {self._name}: ", 1)
        failure = {"line": line, "code": code}
        try:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process failed first
                self._set("failure", json.dumps(failure))
            failure = json.loads(self._get_once("failure", _DAY))
        except jax.errors.JaxRuntimeError:
            pass  # the coordinator is gone as well
        self._end(failure)

    def close(self) -> None:
        """Waits until all processes have finished."""
        if self.count > 1:
            self.agree("end", "")
            if self.is_primary:
                self._set("failure", "null")
            # A thread that returns from the store while Python exits would abort the process.
            self._watching.join(_READ)

    # --- the store ------------------------------------------------------------------------------

    def _gather(
        self, name: str, message: str, limit: float | None, reduce: Callable[[list[str]], str]
    ) -> str:
        """Gathers a message of each process on process 0; returns `reduce` of them on all."""
        if self.count == 1:
            return reduce([message])
        self._uses[name] += 1  # a key of the store can be set only once
        key = name if self._uses[name] == 1 else f"{name}, {self._uses[name]}"
        self._set(f"{key}/{self.number}", message)
        if self.is_primary:
            # The other processes may have waited for this one for `limit` seconds.
            deadline = None if limit is None else time.monotonic() + 2 * limit
            numbers = range(self.count)
            messages = [self._get(f"{key}/{number}", deadline, number) for number in numbers]
            self._set(f"{key}/verdict", reduce(messages))
        deadline = None if limit is None else time.monotonic() + 3 * limit
        return self._get(f"{key}/verdict", deadline, 0)

    def _set(self, key: str, value: str) -> None:
        self._store.key_value_set(f"bert_jax/{key}", value)

    def _get_once(self, key: str, milliseconds: int) -> str:
        return self._store.blocking_key_value_get(f"bert_jax/{key}", milliseconds)

    def _get(self, key: str, deadline: float | None, process: int) -> str:
        """Returns the value that `process` sets; raises Unavailable after the deadline."""
        start = time.monotonic()
        while True:
            try:
                return self._get_once(key, _WAIT_POLL)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if self._failure is not None:
                self._shared_error = Unavailable(self._failure["line"])
                raise self._shared_error
            if deadline is not None and time.monotonic() > deadline:
                raise Unavailable(
                    f"process {process} has not come to {key.split('/')[0]!r} within "
                    f"{time.monotonic() - start:.0f} seconds; see its own output for the reason, "
                    "and start all of them again"
                )

    def _watch(self) -> None:
        """Ends this process after a failure of another; notices requests to stop."""
        failure = None
        while failure is None:
            try:
                failure = self._get_once("failure", _WATCH_POLL)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    return  # the coordinator is gone; JAX ends this process
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # no such request
                    self._store.key_value_try_get(_ASKED_TO_STOP)
                    retry.waits.shorten()
        self._failure = json.loads(failure)
        if self._failure is not None:
            time.sleep(self._clean_up_seconds)
            self._end(self._failure)

    def _end(self, failure: dict[str, Any]) -> NoReturn:
        """Logs the failure and exits; process 0 exits last, as the others read from it."""
        self._ending.acquire()  # only one of two threads may exit; never released
        retry.waits.shorten()
        process_lib.logger.error("%s", failure["line"])
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self.is_primary:
                deadline = time.monotonic() + _READ
                for number in range(1, self.count):
                    seconds_left = max(deadline - time.monotonic(), 0.0)
                    self._get_once(f"left/{number}", round(seconds_left * 1000) + 1)
                time.sleep(0.2)  # until the last of them has exited
            else:
                self._set(f"left/{self.number}", "")
        with contextlib.suppress(Exception):
            self._clean_up()  # last: the other thread may write files until the end
        sys.stdout.flush()
        os._exit(failure["code"])


def describe_lost_process(error: BaseException) -> str:
    """Returns that another process has ended, with the library's reason; "" for other errors."""
    lost = _LOST.search(str(error))
    if not isinstance(error, jax.errors.JaxRuntimeError) or lost is None:
        return ""
    return f"lost another process ({str(error)[lost.start() :].splitlines()[0][:200]})"


def classify_fault(error: BaseException) -> BaseException:
    """Returns Unavailable for an error of a broken device or driver; else the error itself.

    Errors of the compiler and a lack of memory are not faults: they would come again.
    """
    text = str(error)
    reason = text.split("\n")[0][:200]
    if not isinstance(error, RuntimeError):
        return error
    if _CORRUPT.search(text):
        return Unavailable(f"a chip failed its check ({reason}); run again on another machine")
    if _BROKEN.search(text) and not (text.startswith("INTERNAL") and _COMPILER.search(text)):
        return Unavailable(f"a device or its driver failed ({reason}); run again to resume")
    return error


@contextlib.contextmanager
def connect_processes(
    wait: float = 0.0,
    fit_to_slices: Callable[[int, int, int], Any] = lambda taken, booked, hosts: taken,
) -> Iterator[Peers]:
    """Connects the processes of this run while entered; must be called before JAX has devices.

    For the arguments see `rendezvous.join_rendezvous`.

    Raises:
      Unavailable: a process does not arrive, or a device fails.
    """
    peers = None
    try:
        peers = _connect(wait, fit_to_slices)
        process_lib.index = peers.number
        yield peers
        peers.close()
    except BaseException as error:
        if peers is not None and peers.count > 1:
            peers.fail(error)
        fault = classify_fault(error)
        if fault is error:
            raise
        raise fault from error


def _connect(wait: float, fit_to_slices: Callable[[int, int, int], Any]) -> Peers:
    limit = seconds("BERT_JAX_ARRIVE_WITHIN") or _ARRIVE
    process, membership, bind = rendezvous.read_process_info(), None, None
    if process is None and not _is_tpu_host():
        return Peers(0, 1, None, limit)
    # JAX's service handles SIGTERM: `notice_sigterm` enables it once there is a state to save.
    jax.config.update("jax_enable_preemption_service", False)
    if process is not None:
        if "," in process.address:
            membership = rendezvous.join_rendezvous(process, wait, limit, fit_to_slices)
            process, bind = membership.process, membership.bind
        else:
            rendezvous.wait_for_all(process, limit)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            *(process.address, process.count, process.number),
            # If JAX detected SLURM, it would use one GPU per process, however many there are.
            cluster_detection_method="deactivate",
            initialization_timeout=round(limit),
            coordinator_bind_address=bind,
        )
    elif not _initialize_on_pod(limit):
        return Peers(0, 1, None, limit)
    state = foreign.distributed_state()
    return Peers(state.process_id, state.num_processes, state.client, limit, membership)


def seconds(name: str) -> float | None:
    """Reads a number of seconds from an environment variable; None if it is not set."""
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


def _is_tpu_host() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return (
        os.environ.get("JAX_NUM_PROCESSES") != "1"
        and (not platforms or "tpu" in platforms)
        and importlib.util.find_spec("libtpu") is not None
        and bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*"))
    )


def _initialize_on_pod(limit: float) -> bool:
    """Connects JAX if this is a host of a TPU pod; returns whether it is."""
    try:
        jax.distributed.initialize(initialization_timeout=round(limit))
    except ValueError as error:
        if "should be defined" in str(error) or "must be defined" in str(error):
            return False  # a TPU without any information about other hosts
        raise
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:
        reason = str(error).split("\n")[0][:200]
        raise InputError(
            f"JAX cannot find the other hosts of this TPU ({reason}); set JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or JAX_NUM_PROCESSES=1 for this host alone"
        ) from error
    return True


def notice_sigterm() -> None:
    """Lets JAX handle SIGTERM: it tells all processes after which step to stop."""
    jax.config.update("jax_enable_preemption_service", True)
    foreign.distributed_state().initialize_preemption_sync_manager()
