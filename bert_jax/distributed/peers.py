"""The processes of one run: how they exchange values and errors, and end together.

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax

from bert_jax import errors, private_apis
from bert_jax import process as process_lib
from bert_jax.distributed import rendezvous, slices
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import retry

ErrorType = type[InputError | Unavailable]

_BARRIER_SECONDS = 300.0  # at the start and timed barriers, unless BERT_JAX_ARRIVE_WITHIN is set
_UNWIND_SECONDS = 10.0  # for a process to clean up after another one has failed
_FAILURE_READ_SECONDS = 3.0  # for the other processes to read why process 0 ends
_WAIT_POLL_MS = 1_000  # milliseconds between two checks for a failure while a process waits
_WATCH_POLL_MS = 5_000  # milliseconds between two checks for a failure in the background
_STOP_KEY = "RECEIVED_PREEMPTION_NOTICE"  # JAX sets it when a process receives SIGTERM
# Matches errors of computations after another process, or the coordinator of the run, has ended.
_LOST = re.compile(r"Gloo|NCCL|Connection (closed|reset)|Socket closed|UNAVAILABLE|heartbeat")
# Matches errors of computations if a device or its driver has failed, rather than the program.
_BROKEN = re.compile(
    r"^(INTERNAL|DATA_LOSS|ABORTED|CANCELLED|UNKNOWN|UNAVAILABLE|DEADLINE_EXCEEDED)\b"
)
_CORRUPT = re.compile(r"\bsdc\b|silent data corruption", re.IGNORECASE)  # errors of faulty TPUs
_COMPILER = re.compile(r"[Cc]ompil|Mosaic|lower")  # its errors are the same every time
_MAX_DIFFERENCES = 4  # that an error message shows
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
        self._store = store  # the client of JAX's key-value store; None for one process
        self._limit = limit  # seconds; waits at timed barriers are multiples, see `_gather`
        self._name = f"process {number} ({socket.gethostname()})"
        self._failure: dict[str, Any] | None = None  # of another process
        self._shared_error: BaseException | None = None  # an error that all processes raise
        self._unwind_seconds = _UNWIND_SECONDS  # from another's failure to the end of this process
        self._exit_lock = threading.Lock()
        self._barrier_uses: collections.Counter[str] = collections.Counter()  # by name
        self._clean_up: Callable[[], None] = lambda: None  # called before a forced end
        self._watch_thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        if count > 1:
            self._watch_thread.start()

    @property
    def is_primary(self) -> bool:
        """Returns whether this is process 0, which writes the run's files."""
        return self.number == 0

    def report(self, line: str) -> None:
        """Logs a line that names this process."""
        process_lib.logger.warning("bert-jax: %s: %s", self._name, line)

    def owner(self, device: jax.Device) -> str:
        """Returns the process and the host of a device; all processes must call it together."""
        name = self._name if device.process_index == self.number else ""
        return self._gather(f"owner of device {device.id}", name, self._limit, _first_nonempty)

    def exchange_errors(self, name: str, error: str, extra_seconds: float = 0.0) -> str:
        """Waits for all processes; returns the error of the lowest-numbered one that has an error.

        `error` is that of this process, "" if none. All must reach barriers in the same order.
        `extra_seconds` is added to the limit of barrier `name`, after which it raises Unavailable.
        """
        return self._gather(name, error, self._limit + extra_seconds, _first_nonempty)

    def raise_first_error(self, name: str, error: str, kind: ErrorType = InputError) -> None:
        """Raises the result of `exchange_errors` on all processes unless it is ""."""
        if first_error := self.exchange_errors(name, error):
            self._raise_shared(kind(first_error))

    def _raise_shared(self, error: InputError | Unavailable) -> NoReturn:
        """Raises an error that all processes raise, so that its message names none as the cause."""
        self._shared_error = error
        raise error

    def connect_devices(self, mesh: jax.sharding.Mesh) -> None:
        """Connects the CPU devices of all processes: sums a number over each group of mesh axes.

        Gloo connects a group in its first computation, and fails if processes begin it 30 seconds
        apart, as they might after compiling a step. Later computations wait without a limit.
        """
        if self.count == 1 or mesh.devices.flat[0].platform != "cpu":
            return
        # Steps use groups of adjacent axes only, such as all axes, those of the batch, or one.
        axes, count = mesh.axis_names, len(mesh.axis_names)
        groups = [axes[i:j] for i in range(count) for j in range(i + 1, count + 1)]

        def add() -> list[jax.Array]:  # no constants: JAX sums them without communication
            return [jax.lax.psum(1.0 + jax.lax.axis_index(group), group) for group in groups]

        replicated = jax.sharding.PartitionSpec()
        program = jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=replicated, check_vma=False)
        compiled = jax.jit(program).lower().compile()
        self.wait_at_barrier("devices", is_timed=True)
        jax.block_until_ready(compiled())

    def report_slices(self, timings: slices.Timings, log: Callable[[str], None]) -> dict[str, Any]:
        """Logs missing slices; returns them for timings.jsonl, or {} if the run has no slices."""
        if self.membership is None:
            return {}
        slice_count, active_slices = self.membership.policy.slice_count, self.membership.slices
        since = slices.missing_since(timings, active_slices, slice_count, time.time())
        log(slices.describe_missing(since, slice_count))
        return {"slices": {"taken": active_slices, "missing_since": since}}  # "taken": active

    def slices_to_admit(self, read_timings: Callable[[], slices.Timings], steps_left: int) -> str:
        """Returns the waiting slices to add by a restart, such as "0, 3"; "" for no restart."""
        membership = self.membership
        if membership is None or len(membership.slices) == membership.policy.slice_count:
            return ""
        _, active_slices, policy, server = membership
        waiting = server.waiting_slices() if server else []  # only process 0 has the server
        counts, now = (len(active_slices), len(waiting)), time.time()
        if waiting and not slices.should_restart(policy, *counts, read_timings(), now, steps_left):
            waiting = []
        return self._gather("slices", ", ".join(map(str, waiting)), self._limit, _first_nonempty)

    def require_same(self, name: str, values: Mapping[str, str], remedy: str) -> None:
        """Raises InputError on all processes if the values of one differ from process 0's."""
        if difference := self._describe_difference(name, values, remedy):
            self._raise_shared(InputError(difference))

    def await_same(self, name: str, read: Callable[[], str], remedy: str, kind: ErrorType) -> None:
        """Waits until all processes read the same value: a shared disk may be stale for a while.

        Raises an error of this kind on all processes if the values still differ after a minute.
        """
        for pause in (0.0, *_PAUSES):
            time.sleep(pause)
            if not (difference := self._describe_difference(name, {name: read()}, remedy)):
                return
        self._raise_shared(kind(difference))

    def _describe_difference(self, name: str, values: Mapping[str, str], remedy: str) -> str:
        """Returns, on all processes, how the values of one differ from process 0's; "" if none."""

        def compare(messages: list[str]) -> str:
            (primary, expected), *others = map(json.loads, messages)
            for process, actual in others:
                keys = sorted(actual | expected)
                pairs = [(k, actual.get(k, "nothing"), expected.get(k, "nothing")) for k in keys]
                changed = [f"{key}={a} instead of {b}" for key, a, b in pairs if a != b]
                if changed:
                    hidden = len(changed) - _MAX_DIFFERENCES
                    more = f" and {hidden} more" if hidden > 0 else ""
                    shown = "; ".join(changed[:_MAX_DIFFERENCES])
                    return f"{process} differs from {primary}: {shown}{more}; {remedy}"
            return ""

        return self._gather(name, json.dumps([self._name, dict(values)]), self._limit, compare)

    def run_on_primary(self, name: str, work: Callable[[], None]) -> None:
        """Runs the work on process 0 while the others wait without a time limit."""
        if self.is_primary:
            work()
        self.wait_at_barrier(f"{name}/done")

    def wait_at_barrier(self, name: str, is_timed: bool = False) -> None:
        """Waits for all processes, without a limit or, if `is_timed`, as `exchange_errors` does."""
        self._gather(name, "", self._limit if is_timed else None, _first_nonempty)

    @contextlib.contextmanager
    def abort_together(self, clean_up: Callable[[], None]) -> Iterator[None]:
        """Ends all processes without unwinding if one fails inside; each calls `clean_up` last.

        The others may be in a computation that waits for the failed process forever.
        """
        self._clean_up, self._unwind_seconds = clean_up, 0.0
        try:
            yield
        except BaseException as error:
            if self.count > 1:
                self.fail(error)
            raise
        self._unwind_seconds = _UNWIND_SECONDS

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all processes with the message and the exit code of the earliest failure."""
        failure = self._describe_failure(error)
        try:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process failed first
                self._set("failure", json.dumps(failure))
            failure = json.loads(self._get_once("failure", _WATCH_POLL_MS))  # set by now
        except jax.errors.JaxRuntimeError:
            pass  # the coordinator is gone as well
        self._end(failure)

    def _describe_failure(self, error: BaseException) -> dict[str, Any]:
        """Returns the line to log and the exit code; prints the traceback of an unknown error."""
        is_shared = error is self._shared_error
        line, code = errors.message_and_code(error if is_shared else translate_device_error(error))
        if lost := describe_lost_process(error):
            remedy = "start all of them again, the run resumes from its newest checkpoint"
            line, code = f"bert-jax: {lost}; {remedy}", errors.PEER_LOST
        elif code == errors.FAILED and self._failure is None:
            traceback.print_exception(error)
        if not is_shared:
            line = line.replace("bert-jax: ", f"bert-jax: {self._name}: ", 1)
        return {"line": line, "code": code}

    def close(self) -> None:
        """Waits until all processes have finished."""
        if self.count > 1:
            self.wait_at_barrier("end", is_timed=True)
            if self.is_primary:
                self._set("failure", "null")  # no failure: ends `_watch` on all processes
            # If `_watch` reads the store while Python exits, the process aborts.
            self._watch_thread.join(_FAILURE_READ_SECONDS)

    # --- the store ------------------------------------------------------------------------------

    def _gather(
        self, name: str, message: str, limit: float | None, reduce: Callable[[list[str]], str]
    ) -> str:
        """Gathers the messages of all processes on process 0; returns `reduce` of them on all."""
        if self.count == 1:
            return reduce([message])
        self._barrier_uses[name] += 1  # a key of the store can be set only once
        key = f"{name}, {self._barrier_uses[name]}" if self._barrier_uses[name] > 1 else name
        self._set(f"{key}/{self.number}", message)
        # Process 0 waits two limits, a margin of one; the others three: it may come one limit late.
        start = time.monotonic()
        if self.is_primary:
            deadline = None if limit is None else start + 2 * limit
            messages = [self._get(f"{key}/{n}", deadline, n) for n in range(self.count)]
            self._set(f"{key}/verdict", reduce(messages))
        return self._get(f"{key}/verdict", None if limit is None else start + 3 * limit, 0)

    def _set(self, key: str, value: str) -> None:
        self._store.key_value_set(f"bert_jax/{key}", value)

    def _get_once(self, key: str, milliseconds: int) -> str:
        """Returns the value of a key; raises JaxRuntimeError if it is not set within this time."""
        return self._store.blocking_key_value_get(f"bert_jax/{key}", milliseconds)

    def _get(self, key: str, deadline: float | None, process: int) -> str:
        """Returns the value that `process` sets; raises Unavailable after the deadline."""
        start = time.monotonic()
        while True:
            try:
                return self._get_once(key, _WAIT_POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if self._failure is not None:
                self._raise_shared(Unavailable(self._failure["line"]))
            if deadline is not None and time.monotonic() > deadline:
                raise Unavailable(
                    f"process {process} did not reach the barrier {key.split('/')[0]!r} within "
                    f"{time.monotonic() - start:.0f} seconds; see its own output for the reason, "
                    "and start all of them again"
                )

    def _watch(self) -> None:
        """Ends this process after a failure of another; notices requests to stop."""
        failure = None
        while failure is None:
            try:
                failure = self._get_once("failure", _WATCH_POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    return  # the coordinator is gone; JAX ends this process
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # the key is not set
                    self._store.key_value_try_get(_STOP_KEY)
                    retry.control.shorten()  # after SIGTERM, retries of storage give up early
        self._failure = json.loads(failure)
        if self._failure is not None:
            time.sleep(self._unwind_seconds)
            self._end(self._failure)

    def _end(self, failure: dict[str, Any]) -> NoReturn:
        """Logs the failure and exits; process 0 exits last, because the others read its store."""
        self._exit_lock.acquire()  # only one of two threads may exit; never released
        retry.control.shorten()
        process_lib.logger.error("%s", failure["line"])
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self.is_primary:
                deadline = time.monotonic() + _FAILURE_READ_SECONDS
                for number in range(1, self.count):
                    seconds_left = max(deadline - time.monotonic(), 0.0)
                    self._get_once(f"failure_read/{number}", round(seconds_left * 1000) + 1)
                time.sleep(0.2)  # until the last of them has exited
            else:
                self._set(f"failure_read/{self.number}", "")
        with contextlib.suppress(Exception):
            self._clean_up()  # last: the main thread may write files, which this deletes
        sys.stdout.flush()
        os._exit(failure["code"])


def _first_nonempty(messages: list[str]) -> str:
    return next(filter(None, messages), "")


def describe_lost_process(error: BaseException) -> str:
    """Returns a message if the error means that another process has ended; otherwise ""."""
    lost = _LOST.search(str(error))
    if not isinstance(error, jax.errors.JaxRuntimeError) or lost is None:
        return ""
    return f"lost another process ({str(error)[lost.start() :].splitlines()[0][:200]})"


def translate_device_error(error: BaseException) -> BaseException:
    """Returns Unavailable for an error of a broken device or driver; else the error itself.

    Errors of the compiler and a lack of memory are not faults: a new run would have them, too.
    """
    text = str(error)
    reason = text.split("\n")[0][:200]
    if not isinstance(error, RuntimeError):
        return error
    if _CORRUPT.search(text):
        return Unavailable(
            f"a chip computed wrong results ({reason}); run again on another machine"
        )
    if _BROKEN.search(text) and not (text.startswith("INTERNAL") and _COMPILER.search(text)):
        return Unavailable(f"a device or its driver failed ({reason}); run again to resume")
    return error


@contextlib.contextmanager
def connect_processes(
    wait_seconds: float = 0.0, fit_to_slices: rendezvous.FitToSlices = lambda *counts: True
) -> Iterator[Peers]:
    """Connects the processes of this run inside the context; enter it before JAX has devices.

    `wait_seconds`: see `slices.SlicePolicy`. `fit_to_slices` returns None if the run cannot train.

    Raises:
      Unavailable: a process does not arrive, or a device fails.
    """
    peers = None
    try:
        peers = _connect(wait_seconds, fit_to_slices)
        process_lib.index = peers.number
        yield peers
        peers.close()
    except BaseException as error:
        if peers is not None and peers.count > 1:
            peers.fail(error)
        fault = translate_device_error(error)
        if fault is error:
            raise
        raise fault from error


def _connect(wait_seconds: float, fit_to_slices: rendezvous.FitToSlices) -> Peers:
    limit = read_seconds("BERT_JAX_ARRIVE_WITHIN") or _BARRIER_SECONDS
    info, membership, bind_address = rendezvous.read_process_info(), None, None
    if info is None and not _is_tpu_host():
        return Peers(0, 1, None, limit)
    # JAX's handler of SIGTERM stays off until there is a state to save: `StopRequest` enables it.
    jax.config.update("jax_enable_preemption_service", False)
    if info is not None:
        if "," in info.address:  # a run on several slices
            membership = rendezvous.join_rendezvous(info, wait_seconds, limit, fit_to_slices)
            info, bind_address = membership.info, membership.bind_address
        else:
            rendezvous.wait_for_all(info, limit)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator_address=info.address,
            num_processes=info.process_count,
            process_id=info.number,
            # If JAX detected SLURM, it would use one GPU per process, however many there are.
            cluster_detection_method="deactivate",
            initialization_timeout=round(limit),
            coordinator_bind_address=bind_address,
        )
    elif not _initialize_on_pod(limit):
        return Peers(0, 1, None, limit)
    state = private_apis.distributed_state()
    return Peers(state.process_id, state.num_processes, state.client, limit, membership)


def read_seconds(name: str) -> float | None:
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
