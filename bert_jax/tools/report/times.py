"""Where a run's time went since its first start, over all restarts, and what it costs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from bert_jax import hardware
from bert_jax.errors import duration, printable

# In the order in which they are shown; the first is what one pays for.
PARTS = {
    "training": "steps that counted",
    "data": "waiting for data",
    "compilation": "compiling steps",
    "evaluation": "evaluation",
    "probes": "probes",
    "checkpoint": "saving",
    "profile": "writing profiles",
    "start": "preparing, opening, restoring",
    "repeated": "steps done again, after a kill or a roll-back",
    "away": "between a stop and the next start",
}
# Lines of steps that were done; and what of these is no training.
_LAPS = ("train", "end")
_WAITS = ("data", "compilation", "evaluation", "probes", "checkpoint", "profile")


def account(timings: list[dict[str, Any]]) -> dict[str, float]:
    """Returns seconds of each of PARTS; together the time from the first start to the last line.

    Steps after the checkpoint from which a later start went on, or to which the run went back,
    were in vain: their time is `repeated`. What a killed process did after its last line counts as
    `away`; the time after a run was finished, if it is extended later, does not count at all.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    before: dict[str, Any] = {"outcome": "finished"}
    for line, kept in zip(timings, _shares_kept(timings), strict=True):
        if line.get("kind") == "start":
            probed = line.get("probes_seconds", 0.0)  # before the first step
            parts["probes"] += probed
            parts["start"] += line["seconds"] - probed
            if before.get("outcome") != "finished":
                parts["away"] += max(line["time"] - line["seconds"] - before["time"], 0.0)
        elif line.get("kind") == "roll_back":
            parts["repeated"] += line["seconds"]
        elif line.get("kind") in _LAPS:
            waits = {name: line.get(f"{name}_seconds", 0.0) for name in _WAITS}
            waits["training"] = max(line["seconds"] - sum(waits.values()), 0.0)
            for name, seconds in waits.items():
                parts[name] += kept * seconds
            parts["repeated"] += (1 - kept) * line["seconds"]
        before = line
    return parts


def cpu_seconds(timings: list[dict[str, Any]]) -> float:
    """Returns seconds of CPU, of all cores, that steps took which no later start did again."""
    return sum(
        kept * line.get("cpu_seconds", 0.0)
        for line, kept in zip(timings, _shares_kept(timings), strict=True)
    )


def totals(
    laps: Sequence[dict[str, Any]], of_step: Callable[[dict[str, Any]], float], began: int = 0
) -> tuple[list[int], list[float]]:
    """Returns steps, from where a run began, and what all steps up to each have taken together.

    `laps` are timings of steps, one for each step at which a line was written, in their order.
    """
    at, spent = [began], [0.0]
    for lap in laps:
        # A lap after a resume has fewer steps than there are since the line before.
        spent.append(spent[-1] + of_step(lap) * (lap["step"] - at[-1]))
        at.append(lap["step"])
    return at, spent


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The parts of a run's time so far, over all restarts.

    A start is paid for from its beginning to its last line, on the chips that it had. Time away is
    not: whether machines were held meanwhile nobody has written down. Nor is what a killed process
    did after its last line, though a bill will have it.
    """

    parts: dict[str, float]  # seconds of each of PARTS (`account`)
    chip_hours: float  # that were paid for, of starts whose devices are known chips
    # Kinds of devices of the other starts, whose cost nobody knows, as jax names them.
    other: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Returns seconds since the first start."""
        return sum(self.parts.values())

    @property
    def share(self) -> float | None:
        """Returns the share of time spent in steps that counted, in [0, 1]; None before any."""
        return self.parts["training"] / self.seconds if self.seconds else None

    def cost(self, price_per_chip_hour: float) -> float | None:
        """Returns the cost so far, in the price's currency; None if no start had known chips."""
        return self.chip_hours * price_per_chip_hour if self.chip_hours else None

    def line(self, price_per_chip_hour: float | None = None) -> str:
        """Returns it in words, with the cost if there is a price, in any currency."""
        if self.share is None:
            return "goodput: nothing was timed yet"
        text = (
            f"goodput {100 * self.share:.1f} %: of {duration(self.seconds)} since the first start, "
            f"{duration(self.parts['training'])} in {PARTS['training']}"
        )
        if self.chip_hours:
            text += f"; {self.chip_hours:,.2f} chip-hours"
        if price_per_chip_hour is not None:
            cost = self.cost(price_per_chip_hour)
            text += "; no cost" if cost is None else f", cost {cost:,.2f}"
            if self.other:
                kinds = printable(", ".join(self.other))
                text += f", since {kinds} has no price" if cost is None else f" without {kinds}"
        return text


def goodput(timings: list[dict[str, Any]]) -> Goodput:
    """Returns how much of a run's time was worth something, and what was paid for."""
    chip_seconds = 0.0
    chips: int | None = None  # of the start to which a line belongs
    other: dict[str, None] = {}
    for line in timings:
        if line.get("kind") == "start":
            unknown = ("an unknown device", 0)
            kind, devices = line.get("environment", {}).get("devices", unknown)
            chips = hardware.chips(kind, devices)
            if chips is None:
                other[kind] = None
        if chips is not None and line.get("kind") in ("start", "train", "roll_back", "end"):
            chip_seconds += chips * line["seconds"]
    return Goodput(account(timings), chip_seconds / 3600, tuple(other))


def _shares_kept(timings: list[dict[str, Any]]) -> list[float]:
    """Returns of each line the share of its steps that are not done again; 0 of lines of none."""
    lowest, shares = float("inf"), []  # lowest: from which a later start or roll-back went on
    for line in reversed(timings):
        kept = 0.0
        if line.get("kind") in _LAPS:
            again = min(max(line["step"] - lowest, 0), line["steps"])
            kept = 1 - again / max(line["steps"], 1)
        elif line.get("kind") in ("start", "roll_back"):
            lowest = min(lowest, line["step"])
        shares.append(kept)
    return shares[::-1]
