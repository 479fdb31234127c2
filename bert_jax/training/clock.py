"""Where the time between two lines of timings.jsonl went."""

import contextlib
import time
from collections.abc import Iterator

# What the loop waits for by name; the rest of a lap is steps. Waiting for data counts as steps:
# it is part of how fast a run trains.
NOT_STEPS = ("compilation", "evaluation", "checkpoint")


class Clock:
    """Counts steps, and the seconds spent waiting, since the last lap.

    Args:
      peak_flops: operations a second that the devices can do at most; None if unknown: then
        there is no utilisation.
    """

    def __init__(self, peak_flops: float | None):
        self.peak_flops = peak_flops
        self._reset()

    def _reset(self) -> None:
        self._start = time.monotonic()
        self._steps = self._tokens = self._flops = 0
        self._waits: dict[str, float] = {}

    def count(self, tokens: int, flops: int) -> None:
        """Counts a step of so many tokens, padding included, and useful operations."""
        self._steps += 1
        self._tokens += tokens
        self._flops += flops

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Counts the time spent inside."""
        start = time.monotonic()
        yield
        self._waits[what] = self._waits.get(what, 0.0) + time.monotonic() - start

    def lap(self) -> dict[str, float]:
        """Seconds, where they were waited, and rates over the rest; begins the next lap."""
        seconds = time.monotonic() - self._start
        busy = max(seconds - sum(self._waits.get(what, 0.0) for what in NOT_STEPS), 1e-9)
        found = {"seconds": seconds, "steps": self._steps}
        if self._steps:
            found["steps_per_second"] = self._steps / busy
            found["tokens_per_second"] = self._tokens / busy
            if self.peak_flops is not None:
                found["utilisation"] = self._flops / busy / self.peak_flops
        found |= {f"{what}_seconds": value for what, value in sorted(self._waits.items())}
        self._reset()
        return found
