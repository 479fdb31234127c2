"""Decides which slices of a run train, and when the run restarts with more of them.

A run is configured for a number of slices, groups of equally many hosts. Some slices may be missing
for hours. When it is launched, the run trains on the largest number of arrived slices by which its
batch sizes are divisible; these are the active slices. Slices that arrive later wait, and the run
restarts with them when that gains more steps than it costs.

This module does not wait, read a clock or use sockets: `distributed.rendezvous` tells it which
processes have arrived, and when. Times are in seconds: monotonic in `Arrivals`, else since 1970.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bert_jax.config import Experiment

Timings = Sequence[Mapping[str, Any]]  # lines of timings.jsonl

# Seconds from the end of a run to the next rendezvous: the time that a launcher takes.
_LAUNCH_SECONDS = 90.0


@dataclasses.dataclass(frozen=True)
class SlicePolicy:
    """The number of slices of a run, and how long processes wait for them when it is launched."""

    slice_count: int  # slices that the run is configured for
    processes_per_slice: int
    wait_seconds: float  # for other slices, after any one slice is complete
    decision_seconds: float  # beyond `wait_seconds`, for the decision which slices train
    is_usable: Callable[[int], bool]  # whether the run can train on this number of slices

    def largest_usable(self, count: int) -> int:
        """Returns the largest number of slices, up to `count`, that can train; 0 if none can."""
        return next((n for n in range(count, 0, -1) if self.is_usable(n)), 0)


class Arrivals:
    """The processes that have arrived, as seen by the first process of one slice.

    All processes report to the first process of each slice. A slice is complete once all its
    processes have arrived. The lowest-numbered complete slice decides which slices train.
    """

    def __init__(self, policy: SlicePolicy, own_slice: int):
        self.policy, self.own_slice = policy, own_slice
        self.arrived: dict[int, float] = {}  # {process: time of its arrival}
        self.is_decided = False  # whether this or another slice has decided

    def add(self, process: int, arrival_time: float) -> None:
        """Adds a process that has arrived."""
        # A new dict, because another thread may be reading the old one.
        self.arrived = self.arrived | {process: arrival_time}

    def remove(self, process: int) -> None:
        """Removes a process that has ended; does nothing if it had not arrived."""
        self.arrived = {key: value for key, value in self.arrived.items() if key != process}

    def complete_slices(self) -> dict[int, float]:
        """Returns {complete slice: time at which its last process arrived}, by slice number."""
        times: dict[int, list[float]] = {}
        for process, arrival_time in self.arrived.items():
            times.setdefault(process // self.policy.processes_per_slice, []).append(arrival_time)
        complete = [n for n in sorted(times) if len(times[n]) == self.policy.processes_per_slice]
        return {slice_: max(times[slice_]) for slice_ in complete}

    def choose_slices(self, now: float) -> tuple[int, ...]:
        """Returns the slices that train; () if another slice decides, or to wait for more."""
        complete = self.complete_slices()
        if self.is_decided or self.own_slice != min(complete, default=None):
            return ()
        count = self.policy.largest_usable(len(complete))
        if len(complete) == self.policy.slice_count:
            # If no number is usable, the run starts anyway, and a later check reports the reason.
            return tuple(complete)[:count] if count else tuple(complete)
        if now - min(complete.values()) < self.policy.wait_seconds:
            return ()
        return tuple(complete)[:count]


def restart_pays_off(
    policy: SlicePolicy, active_count: int, waiting_count: int, until_stop: float, cost: float
) -> bool:
    """Returns whether restarting with the waiting slices gives more steps than continuing without.

    In `until_stop` seconds the run will stop anyway. A restart takes `cost` seconds without steps.
    """
    count = policy.largest_usable(active_count + waiting_count)
    return (until_stop - cost) * count > until_stop * active_count


def adapt_experiment(
    experiment: Experiment, active_count: int, slice_count: int, shards_per_slice: int
) -> Experiment | None:
    """Returns the experiment for `active_count` of its `slice_count` slices; None if impossible.

    Batches keep their rows. Each slice splits its rows into `shards_per_slice` shards. A shard's
    micro-batch has at most as many rows as on all slices: the largest divisor of the shard's rows.
    """
    if active_count == slice_count:
        return experiment
    parallelism, optimizer = experiment.parallelism, experiment.optimizer
    shards, groups = active_count * shards_per_slice, parallelism.slices
    if groups > 1:  # replica groups, not TPU slices: a TPU slice may hold several
        groups, remainder = divmod(groups * active_count, slice_count)
        if remainder:
            return None
    per_replica = optimizer.clip == "per_replica"
    if per_replica and optimizer.reference_replicas % shards:
        return None  # each of these groups of rows clips its gradient, so it must be in one shard
    accumulation = []
    for number, phase in enumerate(experiment.phases):
        micro_batches = parallelism.accumulation_of(number)
        # Rows of a shard in a micro-batch on all slices, and in a batch on the active slices.
        max_rows = phase.batch_size // (slice_count * shards_per_slice * micro_batches)
        rows, remainder = divmod(phase.batch_size, shards)
        if remainder or not max_rows:
            return None
        if not per_replica:  # else each replica is a micro-batch, and `accumulation` is unused
            counts = (n for n in range(1, rows + 1) if rows % n == 0)
            micro_batches = next(n for n in counts if rows // n <= max_rows)
        accumulation.append(micro_batches)
    changed = dataclasses.replace(parallelism, slices=groups, accumulation=tuple(accumulation))
    return dataclasses.replace(experiment, parallelism=changed)


def missing_since(
    timings: Timings, active_slices: Iterable[int], slice_count: int, now: float
) -> dict[str, float]:
    """Returns {missing slice: time of the start since which it is missing}, seconds since 1970.

    `timings` are the earlier lines of timings.jsonl; those of starts have the key "slices".
    """
    since: dict[int, float] = {}
    starts = [(line["time"], line["slices"]["taken"]) for line in timings if "slices" in line]
    for start_time, active in [*starts, (now, [*active_slices])]:
        missing = {*range(slice_count)} - {*active}
        since = {slice_: since.get(slice_, start_time) for slice_ in sorted(missing)}
    return {str(slice_): start_time for slice_, start_time in since.items()}


def describe_missing(since: Mapping[str, float], slice_count: int) -> str:
    """Returns a sentence for the log: how many slices train, and which are missing."""
    times = {key: time.strftime("%Y-%m-%d %H:%M", time.localtime(t)) for key, t in since.items()}
    missing = [f"slice {key} has been missing since {text}" for key, text in times.items()]
    return ", ".join([f"slices: {slice_count - len(since)} of {slice_count} train", *missing])


def should_restart(
    policy: SlicePolicy,
    active_count: int,
    waiting_count: int,
    timings: Timings,
    now: float,
    steps_left: int,
) -> bool:
    """Returns whether `restart_pays_off` by the times in `timings`, the lines of timings.jsonl.

    The next stop is expected after the mean time between earlier stops. Stops to admit slices do
    not count; their lines have the key "for_slices". A restart costs as much as the last start, and
    `now` is in seconds since 1970.
    """
    starts = [number for number, line in enumerate(timings) if line["kind"] == "start"]
    since_start = timings[starts[-1] :]
    compilation = sum(line.get("compilation_seconds", 0.0) for line in since_start)
    train_lines = [line for line in since_start if line["kind"] == "train"]
    steps = sum(line["steps"] for line in train_lines)
    seconds_per_step = (sum(line["seconds"] for line in train_lines) - compilation) / max(steps, 1)
    intervals = len(starts) - sum("for_slices" in line for line in timings)
    mean_interval = max(now - timings[starts[0]]["time"], 0.0) / max(intervals, 1)
    until_stop = min(mean_interval, seconds_per_step * steps_left)
    cost = _LAUNCH_SECONDS + since_start[0]["seconds"] + compilation
    return restart_pays_off(policy, active_count, waiting_count, until_stop, cost)
