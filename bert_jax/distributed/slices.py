"""Which slices of a run train, and when the run restarts with more of them.

A run is booked on slices: groups of equally many hosts. Some slices may be unavailable for hours. A
start takes the slices that have arrived, as many as divide its batches. Slices that arrive later
wait, and the run stops for them when the restart gains more steps than it costs.

This module does not wait, read a clock or use sockets: `distributed.rendezvous` passes in which
processes arrive, and when. Times are seconds of one clock, of any origin.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bert_jax.config import Experiment

# Seconds from the end of a run to the next rendezvous: the time that a launcher takes.
LAUNCH = 90.0


@dataclasses.dataclass(frozen=True)
class SlicePolicy:
    """The slices that a run is booked on, and for how long a start waits for them."""

    booked: int  # slices
    hosts: int  # processes of each slice
    wait: float  # seconds that a complete slice waits for the others
    limit: float  # further seconds until a process without an answer gives up
    fits: Callable[[int], bool]  # whether the run can use this number of slices

    def largest_usable(self, present: int) -> int:
        """Returns the largest number of slices, up to `present`, that can train; 0 if none can."""
        return next((n for n in range(present, 0, -1) if self.fits(n)), 0)


class Arrivals:
    """The processes that have arrived at the first process of a slice.

    All processes report to the first process of each slice; the lowest complete slice decides.
    """

    def __init__(self, policy: SlicePolicy, own_slice: int):
        self.policy, self.own_slice = policy, own_slice
        self.arrived: dict[int, float] = {}  # {process: time of its arrival}
        self.is_decided = False  # the slices were chosen, perhaps without this one

    def add(self, process: int, since: float) -> None:
        """Adds a process that has arrived."""
        self.arrived = self.arrived | {process: since}  # a new dict: other threads read the old one

    def remove(self, process: int) -> None:
        """Removes a process that has left, if it was there."""
        self.arrived = {other: since for other, since in self.arrived.items() if other != process}

    def complete_slices(self) -> dict[int, float]:
        """Returns the slices with all processes, in order, and when their last one arrived."""
        times: dict[int, list[float]] = {}
        for process, since in self.arrived.items():
            times.setdefault(process // self.policy.hosts, []).append(since)
        complete = (slice_ for slice_ in sorted(times) if len(times[slice_]) == self.policy.hosts)
        return {slice_: max(times[slice_]) for slice_ in complete}

    def choose_slices(self, now: float) -> tuple[int, ...]:
        """Returns the slices that train; () if it is too early, none fit or another chooses."""
        complete = self.complete_slices()
        if self.is_decided or self.own_slice != min(complete, default=None):
            return ()
        count = self.policy.largest_usable(len(complete))
        if len(complete) == self.policy.booked:
            return tuple(complete)[: count or None]  # if none fits, a later check explains why
        if now - min(complete.values()) < self.policy.wait:
            return ()
        return tuple(complete)[:count]


def restart_pays_off(
    policy: SlicePolicy, taken: int, waiting: int, until: float, cost: float
) -> bool:
    """Tells whether restarting now, with the waiting slices, gives more steps than waiting.

    The run would stop in `until` seconds anyway. A restart takes `cost` seconds without steps.
    """
    return (until - cost) * policy.largest_usable(taken + waiting) > until * taken


def fit_to_slices(
    experiment: Experiment, taken: int, booked: int, shards: int
) -> Experiment | None:
    """Returns the experiment for `taken` of its `booked` slices; None if it cannot run on these.

    A device's micro-batch has as many rows as on all slices, or fewer if that divides no batch.
    Each slice splits its rows into `shards` parts.
    """
    placement, update = experiment.parallelism, experiment.optimizer
    slices, uneven = divmod(placement.slices * taken, booked) if placement.slices > 1 else (1, 0)
    replicas = update.reference_replicas if update.clip == "per_replica" else 0
    uneven = uneven or replicas % (taken * shards)
    accumulation = []
    for number, phase in enumerate(experiment.phases):
        booked_accumulation = placement.accumulation_of(number)
        rows = phase.batch_size // (taken * shards)
        most_rows = phase.batch_size // (booked * shards * booked_accumulation)
        uneven = uneven or phase.batch_size % (taken * shards) or not most_rows
        counts = (n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most_rows)
        accumulation.append(booked_accumulation if replicas or uneven else next(counts))
    if taken == booked or uneven:
        return experiment if taken == booked else None
    changed = dataclasses.replace(placement, slices=slices, accumulation=tuple(accumulation))
    return dataclasses.replace(experiment, parallelism=changed)


def missing_since(
    lines: Iterable[Mapping[str, Any]], taken: Iterable[int], booked: int, now: float
) -> dict[str, float]:
    """Returns {slice: time of the first start without it}, in seconds since 1970.

    `lines` are those of timings.jsonl; the lines of starts have `slices`.
    """
    since: dict[int, float] = {}
    starts = [(line["time"], line["slices"]["taken"]) for line in lines if "slices" in line]
    for start, present in [*starts, (now, [*taken])]:
        missing = {*range(booked)} - {*present}
        since = {slice_: since.get(slice_, start) for slice_ in sorted(missing)}
    return {str(slice_): start for slice_, start in since.items()}


def describe_missing(since: Mapping[str, float], booked: int) -> str:
    """Returns a line for people about how many slices train and which are missing."""
    missing = (
        f"{slice_} is missing since {time.strftime('%Y-%m-%d %H:%M', time.localtime(start))}"
        for slice_, start in since.items()
    )
    return ", ".join([f"slices: {booked - len(since)} of {booked} train", *missing])


def is_due(
    policy: SlicePolicy,
    taken: int,
    waiting: int,
    lines: Sequence[Mapping[str, Any]],
    now: float,
    left: int,
) -> bool:
    """Tells whether a run should stop now for waiting slices, by the lines of timings.jsonl.

    The next stop for another reason is expected after the mean time between such stops; ends that
    were stops for slices have `for_slices`. A start costs as much as the last one did. `now` is in
    seconds since 1970; `left` steps are left.
    """
    starts = [number for number, line in enumerate(lines) if line["kind"] == "start"]
    current = lines[starts[-1] :]  # since the last start
    compilation = sum(line.get("compilation_seconds", 0.0) for line in current)
    train_lines = [line for line in current if line["kind"] == "train"]
    steps = sum(line["steps"] for line in train_lines)
    seconds_per_step = (sum(line["seconds"] for line in train_lines) - compilation) / max(steps, 1)
    stops_for_slices = sum("for_slices" in line for line in lines)
    between = max(now - lines[starts[0]]["time"], 0.0) / max(len(starts) - stops_for_slices, 1)
    cost = LAUNCH + current[0]["seconds"] + compilation
    return restart_pays_off(policy, taken, waiting, min(between, seconds_per_step * left), cost)
