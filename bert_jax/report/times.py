"""Where a run's time went since its first start, over all restarts."""

from collections.abc import Iterator
from typing import Any

# In the order in which they are shown; the first is what one pays for.
PARTS = {
    "training": "steps that counted",
    "data": "waiting for data",
    "compilation": "compiling steps",
    "evaluation": "evaluation",
    "probes": "probes",
    "checkpoint": "saving",
    "start": "preparing, opening, restoring",
    "repeated": "steps done again, after a kill or a roll-back",
    "away": "between a stop and the next start",
}


def account(timings: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each of PARTS; together the time from the first start to the last line.

    Steps after the checkpoint from which a later start went on, or to which the run went back,
    were in vain: their time is `repeated`. What a killed process did after its last line counts as
    `away`; the time after a run was finished, if it is extended later, does not count at all.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    again = _done_again_from(timings)
    for index, line in enumerate(timings):
        if line.get("kind") == "start":
            parts["start"] += line["seconds"]
            before = timings[index - 1] if index else {"outcome": "finished"}
            if before.get("outcome") != "finished":
                parts["away"] += max(line["time"] - line["seconds"] - before["time"], 0.0)
        elif line.get("kind") == "roll_back":
            parts["repeated"] += line["seconds"]
        elif line.get("kind") in ("train", "end"):
            kept = _share_kept(line, again[index])
            for what, seconds in _lap(line):
                parts[what] += kept * seconds
            parts["repeated"] += (1 - kept) * line["seconds"]
    return parts


def _lap(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    named = {
        what: line.get(f"{what}_seconds", 0.0)
        for what in ("data", "compilation", "evaluation", "probes", "checkpoint")
    }
    yield from named.items()
    yield "training", max(line["seconds"] - sum(named.values()), 0.0)


def _done_again_from(timings: list[dict[str, Any]]) -> list[float]:
    """For each line the lowest step from which a later start or roll-back went on."""
    lowest = float("inf")
    found = []
    for line in reversed(timings):
        found.append(lowest)
        if line.get("kind") in ("start", "roll_back"):
            lowest = min(lowest, line["step"])
    return found[::-1]


def _share_kept(lap: dict[str, Any], again: float) -> float:
    """Of a lap's steps, the share that no later start does again."""
    done_again = min(max(lap["step"] - again, 0), lap["steps"])
    return 1 - done_again / max(lap["steps"], 1)
