"""How a run has spent its time since its first start, over all restarts, and its cost."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from bert_jax import hardware
from bert_jax.errors import duration, printable

# {part: description}, in the order of the report; the first is the useful time.
PARTS = {
    "training": "steps that counted",
    "data": "waiting for data",
    "compilation": "compiling steps",
    "evaluation": "evaluation",
    "probes": "probes",
    "checkpoint": "saving",
    "profile": "writing profiles",
    "start": "preparing and opening the data, restoring the state",
    "repeated": "steps done again, after a kill or a roll-back",
    "away": "between a stop and the next start",
}
# Kinds of lines that record steps (those before an end, too); parts of their time without training.
_STEP_KINDS = ("train", "end")
_NOT_TRAINING = ("data", "compilation", "evaluation", "probes", "checkpoint", "profile")


def seconds_by_part(timings: list[dict[str, Any]]) -> dict[str, float]:
    """Returns seconds of each of PARTS; together the time from the first start to the last line.

    Steps after the checkpoint from which a later start resumed, or to which the run rolled back,
    are lost: their time is `repeated`. The time of a killed process after its last line counts as
    `away`; the time between a finished run and its extension is not counted.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    previous: dict[str, Any] = {"outcome": "finished"}  # before the first line
    for line, kept in zip(timings, _shares_kept(timings), strict=True):
        if line.get("kind") == "start":
            probe_seconds = line.get("probes_seconds", 0.0)  # before the first step
            parts["probes"] += probe_seconds
            parts["start"] += line["seconds"] - probe_seconds
            if previous.get("outcome") != "finished":
                parts["away"] += max(line["time"] - line["seconds"] - previous["time"], 0.0)
        elif line.get("kind") == "roll_back":
            parts["repeated"] += line["seconds"]
        elif line.get("kind") in _STEP_KINDS:
            spent = {name: line.get(f"{name}_seconds", 0.0) for name in _NOT_TRAINING}
            spent["training"] = max(line["seconds"] - sum(spent.values()), 0.0)
            for name, seconds in spent.items():
                parts[name] += kept * seconds
            parts["repeated"] += (1 - kept) * line["seconds"]
        previous = line
    return parts


def cpu_seconds(timings: list[dict[str, Any]]) -> float:
    """Returns CPU seconds, over all cores, of the steps that were not repeated later."""
    return sum(
        kept * line.get("cpu_seconds", 0.0)
        for line, kept in zip(timings, _shares_kept(timings), strict=True)
    )


def cumulate(
    windows: Sequence[dict[str, Any]], amount: Callable[[dict[str, Any]], float], start: int = 0
) -> tuple[list[int], list[float]]:
    """Returns steps of a run from step `start` on, and the cumulative amount at each of them.

    `windows` is `Record.windows`; `amount` returns the mean amount of a step of a window.
    """
    steps, spent = [start], [0.0]
    for window in windows:
        # After a resume, a window has fewer steps than these; its mean stands for all of them.
        spent.append(spent[-1] + amount(window) * (window["step"] - steps[-1]))
        steps.append(window["step"])
    return steps, spent


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The parts of a run's time so far, over all restarts.

    The chips of each start are charged from its beginning to its last line. Time away is not
    charged, since it is not recorded whether machines were held. Neither is the time of a killed
    process after its last line, although a bill includes it.
    """

    parts: dict[str, float]  # seconds of each of PARTS
    chip_hours: float  # charged hours of starts with known chips
    uncounted: tuple[str, ...]  # jax's kinds of devices with an unknown number of chips

    @property
    def seconds(self) -> float:
        """Returns seconds since the first start."""
        return sum(self.parts.values())

    @property
    def share(self) -> float | None:
        """Returns the share of time in steps that counted, in [0, 1]; None before any time."""
        return self.parts["training"] / self.seconds if self.seconds else None

    def cost(self, price_per_chip_hour: float) -> float | None:
        """Returns the cost so far, in the price's currency; None if no start had known chips."""
        return self.chip_hours * price_per_chip_hour if self.chip_hours else None

    def describe(self, price_per_chip_hour: float | None = None) -> str:
        """Describes goodput in words; with a price, in any currency, also the cost."""
        if self.share is None:
            return "goodput: nothing has been timed yet"
        text = (
            f"goodput {100 * self.share:.1f} %: of {duration(self.seconds)} since the first start, "
            f"{duration(self.parts['training'])} in {PARTS['training']}"
        )
        if self.chip_hours:
            text += f"; {self.chip_hours:,.2f} chip-hours"
        if price_per_chip_hour is not None:
            cost = self.cost(price_per_chip_hour)
            text += "; no cost" if cost is None else f", cost {cost:,.2f}"
            if self.uncounted:
                kinds = printable(", ".join(self.uncounted))
                text += f", since {kinds} has no price" if cost is None else f" without {kinds}"
        return text


def goodput(timings: list[dict[str, Any]]) -> Goodput:
    """Returns the parts of a run's time, and the chip hours to pay for."""
    chip_seconds = 0.0
    chips: int | None = None  # chips of the start to which a line belongs
    uncounted: dict[str, None] = {}
    for line in timings:
        if line.get("kind") == "start":
            unknown = ("an unknown device", 0)
            kind, device_count = line.get("environment", {}).get("devices", unknown)
            chips = hardware.chips(kind, device_count)
            if chips is None:
                uncounted[kind] = None
        if chips is not None and line.get("kind") in ("start", "train", "roll_back", "end"):
            chip_seconds += chips * line["seconds"]
    return Goodput(seconds_by_part(timings), chip_seconds / 3600, tuple(uncounted))


def _shares_kept(timings: list[dict[str, Any]]) -> list[float]:
    """Returns for each line the share of its steps that are not repeated; 0 for other lines."""
    lowest, shares = float("inf"), []  # lowest: step that a later start or roll-back went back to
    for line in reversed(timings):
        kept = 0.0
        if line.get("kind") in _STEP_KINDS:
            repeated = min(max(line["step"] - lowest, 0), line["steps"])
            kept = 1 - repeated / max(line["steps"], 1)
        elif line.get("kind") in ("start", "roll_back"):
            lowest = min(lowest, line["step"])
        shares.append(kept)
    return shares[::-1]
