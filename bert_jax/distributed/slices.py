"""Which slices of a run train, and when the run stops to take more of them.

A run is booked on slices: groups of hosts, as many in each, of which one or the other may be away
for hours. A start takes those that have come, as many as its batches divide by; slices that come
later wait, and the run stops for them when more steps are won than lost.

This module does not wait, read a clock or use sockets: `distributed.rendezvous` passes in who
comes, and when. Times are seconds of one clock, of any origin.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bert_jax.config import Experiment

# Seconds from the end of a run to when its processes have met again: what a launcher takes.
LAUNCH = 90.0


@dataclasses.dataclass(frozen=True)
class SlicePolicy:
    """The slices that a run is booked on, and for how long a start waits for them."""

    booked: int  # slices
    hosts: int  # processes of each slice
    wait: float  # seconds that a whole slice waits for the others
    limit: float  # seconds more until a process that hears nothing gives up
    fits: Callable[[int], bool]  # whether the run can be laid over so many slices

    def most(self, present: int) -> int:
        """Returns how many of so many slices can train; 0: no number of them can."""
        return next((n for n in range(present, 0, -1) if self.fits(n)), 0)


class RollCall:
    """The processes that are here, as the first one of a slice knows them, and what it decides.

    All processes report to all first ones; of those whose slice is whole the lowest decides.
    """

    def __init__(self, policy: SlicePolicy, me: int):
        self.policy, self.me = policy, me  # the number of its slice
        self.here: dict[int, float] = {}  # processes that are here, and since when
        self.goes_on = False  # a run is decided on already, perhaps without this slice

    def came(self, process: int, since: float) -> None:
        """Notes that a process is here."""
        self.here = self.here | {process: since}  # one at a time writes, others read meanwhile

    def left(self, process: int) -> None:
        """Notes that a process has gone, if it was here."""
        self.here = {one: since for one, since in self.here.items() if one != process}

    def whole(self) -> dict[int, float]:
        """Returns the slices all of whose processes are here, in order, and since when."""
        times: dict[int, list[float]] = {}
        for process, since in self.here.items():
            times.setdefault(process // self.policy.hosts, []).append(since)
        whole = (one for one in sorted(times) if len(times[one]) == self.policy.hosts)
        return {one: max(times[one]) for one in whole}

    def verdict(self, now: float) -> tuple[int, ...]:
        """Returns the slices that train; () while this is open, or for another to decide."""
        whole = self.whole()
        if self.goes_on or self.me != min(whole, default=None):
            return ()
        count = self.policy.most(len(whole))
        if len(whole) == self.policy.booked:
            return tuple(whole)[: count or None]  # why none fits is explained later
        if now - min(whole.values()) < self.policy.wait:
            return ()
        return tuple(whole)[:count]


def restart_pays_off(
    policy: SlicePolicy, taken: int, waiting: int, until: float, cost: float
) -> bool:
    """Tells whether a run does more steps if it stops now, and starts with slices that wait.

    It would take them anyway in `until` seconds; to stop and start costs seconds without a step.
    """
    return (until - cost) * policy.most(taken + waiting) > until * taken


def fit_to_slices(
    experiment: Experiment, taken: int, booked: int, shards: int
) -> Experiment | None:
    """Returns the experiment laid over so many of its booked slices; None if it cannot be.

    A micro-batch has as many rows on a device as on all slices, or fewer where that divides no
    batch. `shards` is into how many parts a slice takes its rows.
    """
    given, update = experiment.parallelism, experiment.optimizer
    parts, uneven = divmod(given.slices * taken, booked) if given.slices > 1 else (1, 0)
    replicas = update.reference_replicas if update.clip == "per_replica" else 0
    uneven = uneven or replicas % (taken * shards)
    accumulation = []
    for number, phase in enumerate(experiment.phases):
        before = given.accumulation_of(number)
        rows = phase.batch_size // (taken * shards)
        most = phase.batch_size // (booked * shards * before)
        uneven = uneven or phase.batch_size % (taken * shards) or not most
        fewest = (n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most)
        accumulation.append(before if replicas or uneven else next(fewest))
    if taken == booked or uneven:
        return experiment if taken == booked else None
    over = dataclasses.replace(given, slices=parts, accumulation=tuple(accumulation))
    return dataclasses.replace(experiment, parallelism=over)


def missing_since(
    lines: Iterable[Mapping[str, Any]], taken: Iterable[int], booked: int, now: float
) -> dict[str, float]:
    """Returns the slices that do not train from now on, and since which start, in s since 1970.

    `lines` are those of timings.jsonl; starts have `slices`.
    """
    since: dict[int, float] = {}
    starts = [(line["time"], line["slices"]["taken"]) for line in lines if "slices" in line]
    for begun, there in [*starts, (now, [*taken])]:
        away = {*range(booked)} - {*there}
        since = {one: since.get(one, begun) for one in sorted(away)}
    return {str(one): begun for one, begun in since.items()}


def in_words(since: Mapping[str, float], booked: int) -> str:
    """Returns who is missing for people."""
    away = (
        f"{one} is missing since {time.strftime('%Y-%m-%d %H:%M', time.localtime(begun))}"
        for one, begun in since.items()
    )
    return ", ".join([f"slices: {booked - len(since)} of {booked} train", *away])


def is_due(
    policy: SlicePolicy,
    taken: int,
    waiting: int,
    lines: Sequence[Mapping[str, Any]],
    now: float,
    left: int,
) -> bool:
    """Tells whether a run stops now for slices that wait, by what timings.jsonl says of it.

    That it stops anyway is expected after as long as it has gone on between two such stops so far;
    an end that was asked for here has `for_slices`. A start costs what the last one did. `now` is
    in seconds since 1970, `left` in steps.
    """
    starts = [number for number, line in enumerate(lines) if line["kind"] == "start"]
    since = lines[starts[-1] :]  # of this start
    compiled = sum(line.get("compilation_seconds", 0.0) for line in since)
    trained = [line for line in since if line["kind"] == "train"]
    steps = sum(line["steps"] for line in trained)
    pace = (sum(line["seconds"] for line in trained) - compiled) / max(steps, 1)
    asked = sum("for_slices" in line for line in lines)
    between = max(now - lines[starts[0]]["time"], 0.0) / max(len(starts) - asked, 1)
    cost = LAUNCH + since[0]["seconds"] + compiled
    return restart_pays_off(policy, taken, waiting, min(between, pace * left), cost)
