"""A month of 64 hosts in 16 slices of 4, which fail as often as a report says, and more often.

`distributed.slices` decides here as in a run: who trains at each start, and when the run stops for
slices that are back. The clock alone is ours, and fast. How many rows are done of
those that all booked chips would do undisturbed? A slice that is away counts as lost.

Failures: "The Llama 3 Herd of Models" (2024), table 5: 419 unexpected interruptions in 54 days of
16,384 devices; as many here a device and day, times a factor. For how long what failed is away, how
often buckets are, and what a start takes the report does not say: that is assumed, and stands here.

    python -m benchmarks.month
"""

import collections
import functools
import pathlib
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from bert_jax import config
from bert_jax.config import Experiment
from bert_jax.distributed import slices
from bert_jax.distributed.slices import Arrivals, SlicePolicy

BOOKED, HOSTS = 16, 4
DAY, MONTH = 86_400.0, 30 * 86_400.0
A_CHIP = 419 / (54 * DAY * 16_384)  # failures a second
EXPERIMENT = pathlib.Path(__file__).parents[1] / "experiments" / "bert_large_pod.py"

# Seconds, assumed: until the processes of a slice are there once its machines are; to restore the
# state and to compile; for which a save holds up the steps, and in which the last one ends; until
# a lost host is noticed, or a hang.
LAUNCH, START, COMPILE = (45.0, 90.0), 45.0, 90.0
SAVE, END, AT_ONCE, MISSED, HANG = 1.0, 15.0, 5.0, 100.0, 1_800.0
STEP, EVERY = 0.5, 600  # seconds of a step on all slices; steps from save to save
AGAIN = 600.0  # seconds for which a bucket is tried again


class Cause(NamedTuple):
    """A kind of failure."""

    name: str
    of_419: int  # how many the report has
    away: tuple[float, float] = (0.0, 0.0)  # minutes without that slice, evenly drawn
    noticed: float = MISSED  # seconds until all processes have ended
    saves: bool = False  # it comes with notice, and the state is saved
    behind: int = 0  # checkpoints that are not to be used, either


# 283 of table 5's are devices, memory, boards, disks and power: for a quarter of them, it is
# assumed, there is no other machine for hours.
CAUSES = (
    Cause("a host breaks, another takes its place", 212, (10, 30)),
    Cause("a host breaks, and there is none for hours", 71, (120, 720)),
    Cause("software", 56, noticed=AT_ONCE),
    Cause("a hang", 7, noticed=HANG),
    Cause("the network, for a moment", 17),
    Cause("the network, a slice is cut off", 18, (10, 60)),
    Cause("maintenance, with notice", 32, (15, 45), END, saves=True),
    Cause("a chip that computes wrongly", 6, (120, 720), AT_ONCE, behind=2),
)
BUCKET, A_MONTH, LONG = "the bucket is away", 1.0, 1_200.0  # how often; mean seconds
OWN = ("stops for slices that are back", "checkpoints", "slices wait", "slices divide no batch")
JOIN, SAVES, WAIT, UNEVEN = OWN
KINDS = ("steps again", "stop and start", "slices missing")


@functools.cache
def of(rows: int) -> Experiment:
    """The experiment with so many rows a batch."""
    shape = [f"phases.{i}.batch_size={rows}" for i in (0, 1)]
    shape += ["phases.0.steps=450000", f"parallelism.slices={BOOKED}"]
    return config.override(config.load(str(EXPERIMENT)), shape)


class Month:
    """One run through a month: `lost` has seconds of all slices, by cause and kind."""

    def __init__(
        self, chips: int, rows: int, factor: float, wait: float = 300.0, days: float = 30.0,
        seed: int = 0,
    ):  # fmt: skip
        self.random, self.end = random.Random(seed), days * DAY
        shards = HOSTS * chips
        fits = functools.cache(
            lambda n: slices.adapt_experiment(of(rows), n, BOOKED, shards) is not None
        )
        self.terms = SlicePolicy(BOOKED, HOSTS, wait, 900.0, fits)
        self.every = 1 / (A_CHIP * BOOKED * shards * factor)  # seconds from failure to failure
        self.back = dict.fromkeys(range(BOOKED), 0.0)  # when each slice's machines are there
        self.why = dict.fromkeys(range(BOOKED), WAIT)  # what took it away last
        self.lines: list[dict[str, Any]] = []  # of timings.jsonl
        self.done = self.saved = 0  # steps
        self.lost: collections.Counter[tuple[str, str]] = collections.Counter()
        self.count: collections.Counter[str] = collections.Counter()
        self.failure = self.random.expovariate(1 / self.every)  # when the next one comes
        self.outages = [*self._outages(MONTH / factor / A_MONTH)]
        now, why = 0.0, JOIN
        while now < self.end:
            begun, taken = self.meet(self.bucket(now))
            begun += START + COMPILE
            self.lost[why, "stop and start"] += min(begun, self.end) - now
            self.lines.append({"kind": "start", "time": begun, "seconds": START})
            now, why = self.steps(begun, taken)
        self.share = min(self.done * STEP / self.end, 1.0)

    def _outages(self, every: float) -> Iterator[tuple[float, float]]:
        now = self.random.expovariate(1 / every)
        while now < self.end:
            yield now, now + self.random.expovariate(1 / LONG)
            now += self.random.expovariate(1 / every)

    def bucket(self, now: float) -> float:
        """When the bucket answers whom it is asked by now."""
        return max([now, *(end for begun, end in self.outages if begun <= now < end)])

    def fails(self) -> tuple[Cause, int] | None:
        """What fails at `failure`, and of which slice; None: that one is away already."""
        now, one = self.failure, self.random.randrange(BOOKED)
        self.failure += self.random.expovariate(1 / self.every)
        (cause,) = self.random.choices(CAUSES, [cause.of_419 for cause in CAUSES])
        if self.back[one] > now:
            return None
        self.count[cause.name] += 1
        self.back[one] = now + 60 * self.random.uniform(*cause.away)
        if self.back[one] > now:
            self.why[one] = cause.name
        return cause, one

    def meet(self, now: float) -> tuple[float, tuple[int, ...]]:
        """One start, from this time on: when it is decided who trains, and who does."""
        begun, here = now, {}  # slices that are here, and since when
        comes = {one: self._comes(one, begun) for one in range(BOOKED)}
        while True:
            # A moment later than that, for rounding.
            due = min(here.values(), default=float("inf")) + self.terms.wait_seconds + 1e-3
            later = [moment for one, moment in comes.items() if one not in here]
            now = min(max(now, due), self.failure, *later)
            if now == self.failure:
                if (failed := self.fails()) is not None:
                    comes[failed[1]] = self._comes(failed[1], now)
                    here.pop(failed[1], None)
                continue
            here |= {one: now for one in comes if comes[one] <= now and one not in here}
            roll = Arrivals(self.terms, min(here))
            for one, since in here.items():
                for process in range(one * HOSTS, (one + 1) * HOSTS):
                    roll.add(process, since)
            if taken := roll.choose_slices(now):
                return now, taken

    def _comes(self, one: int, now: float) -> float:
        return max(now, self.back[one]) + self.random.uniform(*LAUNCH)

    def steps(self, now: float, taken: tuple[int, ...]) -> tuple[float, str]:
        """The steps of one start: when all its processes have ended, and why."""
        pace, compiled, self.done = STEP * BOOKED / len(taken), COMPILE, self.saved
        left = EVERY  # steps until the next save
        while now < self.end:
            due = now + left * pace
            until = min(due, max(self.failure, now), self.end)
            steps = left if until == due else int((until - now) / pace)
            self.done += steps
            self._count_missing(until - now, until, taken)
            if until < due:
                if until == self.end:
                    return until, JOIN
                failed = self.fails()
                if failed is not None and failed[1] in taken:
                    return self._stop(until, failed[0])
                now, left = now + steps * pace, left - steps  # of a slice that does not train
                continue
            left = EVERY
            now = due + SAVE
            self.lost[SAVES, "stop and start"] += SAVE
            if (answers := self.bucket(now)) > now + AGAIN:
                self.count[BUCKET] += 1
                self._again(BUCKET)
                self.lost[BUCKET, "stop and start"] += AGAIN
                return now + AGAIN, BUCKET
            self.lost[BUCKET, "stop and start"] += answers - now
            now, self.saved = answers, self.done
            seconds = {"seconds": EVERY * pace + compiled, "compilation_seconds": compiled}
            self.lines.append({"kind": "train", "steps": EVERY, **seconds})
            compiled = 0.0
            waiting = [one for one in self._here(now) if one not in taken]
            counts, ever = (len(taken), len(waiting)), 10**9  # the run is longer than the month
            if waiting and slices.should_restart(self.terms, *counts, self.lines, now, ever):
                self.lines.append({"kind": "end", "for_slices": waiting})
                self.count[JOIN] += 1
                self.lost[JOIN, "stop and start"] += END
                return now + END, JOIN
        return now, JOIN

    def _stop(self, now: float, cause: Cause) -> tuple[float, str]:
        self.lost[cause.name, "stop and start"] += cause.noticed
        if cause.saves:
            self.saved = self.done
        else:
            self.saved = max(self.saved - cause.behind * EVERY, 0)
            self._again(cause.name)
        return now + cause.noticed, cause.name

    def _again(self, why: str) -> None:
        self.lost[why, "steps again"] += (self.done - self.saved) * STEP
        self.done = self.saved

    def _here(self, now: float) -> list[int]:
        return [one for one, back in self.back.items() if not back or back + LAUNCH[1] < now]

    def _count_missing(self, seconds: float, now: float, taken: tuple[int, ...]) -> None:
        here = self._here(now)
        more = self.terms.largest_usable(len(here)) > len(taken)
        for one in range(BOOKED):
            if one not in taken:
                why = (WAIT if more else UNEVEN) if one in here else self.why[one]
                self.lost[why, "slices missing"] += seconds / BOOKED


def table(months: list[Month]) -> Iterator[str]:
    """The means of some months as a table by cause: percents of the rows."""
    whole = sum(month.end for month in months) / 100
    lost = sum((month.lost for month in months), collections.Counter())
    count = sum((month.count for month in months), collections.Counter())
    yield "| cause | a month | " + " | ".join(KINDS) + " | all |"
    yield "|---|---|---|---|---|---|"
    for why in [*(cause.name for cause in CAUSES), BUCKET, *OWN]:
        parts = [lost[why, kind] / whole for kind in KINDS]
        often = f"{count[why] / len(months):.1f}" if count[why] else ""
        shown = " | ".join(f"{part:.2f}" if part else "" for part in parts)
        yield f"| {why} | {often} | {shown} | {sum(parts):.2f} |"


def main() -> int:
    """Prints the tables of docs/results/reliability.md."""
    seeds = range(20)
    print("| chips | rows a batch | 1 x | 10 x | 32 x |\n|---|---|---|---|---|")
    for chips, rows in ((4, 3_840), (4, 4_096), (8, 7_680), (8, 8_192)):
        shares = []
        for factor in (1, 10, 32):
            months = [Month(chips, rows, factor, seed=seed) for seed in seeds]
            shares.append(sum(month.share for month in months) / len(months))
        words = " | ".join(f"{share:.1%}" for share in shares)
        print(f"| {BOOKED * HOSTS * chips} | {rows:,} | {words} |", flush=True)
    print(*table([Month(4, 3_840, 10, seed=seed) for seed in seeds]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
