"""Where the time between two lines of timings.jsonl went."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

# What the loop waits for by name; the rest of a lap is steps. Waiting for data counts as steps:
# it is part of how fast a run trains.
NOT_STEPS = ("compilation", "evaluation", "probes", "checkpoint", "profile")


@dataclasses.dataclass
class Counts:
    """Steps, their tokens (padding included) and their useful operations."""

    steps: int = 0
    tokens: int = 0
    flops: int = 0


class Clock:
    """Counts steps and the seconds spent waiting.

    A device runs behind the loop that hands it steps. So a lap's counts are taken when its last
    step is handed over, and its time when that step is known to be done.

    Args:
      peak_flops: operations a second that the devices can do at most; None if unknown: then
        there is no utilisation.
    """

    def __init__(self, peak_flops: float | None):
        self.peak_flops = peak_flops
        self._counts = Counts()
        self._start = time.monotonic()
        self._waits: dict[str, float] = {}

    def count(self, tokens: int, flops: int) -> None:
        """Counts a step."""
        self._counts.steps += 1
        self._counts.tokens += tokens
        self._counts.flops += flops

    def take_counts(self) -> Counts:
        """What was counted since this was last asked."""
        counts, self._counts = self._counts, Counts()
        return counts

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Counts the time spent inside."""
        start = time.monotonic()
        yield
        self._waits[what] = self._waits.get(what, 0.0) + time.monotonic() - start

    def lap(self, counts: Counts) -> dict[str, float]:
        """Seconds, where they were waited, and rates over the rest; begins the next lap."""
        now = time.monotonic()
        seconds, self._start = now - self._start, now
        waits, self._waits = self._waits, {}
        busy = max(seconds - sum(waits.get(what, 0.0) for what in NOT_STEPS), 1e-9)
        found = {"seconds": seconds, "steps": counts.steps}
        if counts.steps:
            found["steps_per_second"] = counts.steps / busy
            found["tokens_per_second"] = counts.tokens / busy
            if self.peak_flops is not None:
                found["utilisation"] = counts.flops / busy / self.peak_flops
        return found | {f"{what}_seconds": value for what, value in sorted(waits.items())}
