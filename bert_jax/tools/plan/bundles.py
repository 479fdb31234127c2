"""What the compiler schedules for an operation: its bundles, read and counted.

A bundle is what a core does in a cycle. The compiler writes those of each operation into a file of
its own, of equal operations once.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable

_FILE = re.compile(r"\d+-(.*)-\d+-final_bundles\.txt")


def reader(folder: str) -> Callable[[str], int | None]:
    """Returns what gives the cycles of one run of an operation, by the name of its instruction.

    It gives None where they are unknown. The compiler was asked to write to `folder`.
    """
    paths = {m[1]: path for path in pathlib.Path(folder).iterdir() if (m := _FILE.match(path.name))}

    def cycles(name: str) -> int | None:
        return scheduled_cycles(paths[name].read_text()) if name in paths else None

    return cycles


_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+ +([A-Z]{2})? *: *(>*) *\{")
# A test that is made on one condition names it first.
_EXIT = re.compile(r"scmp\.ge\.s32\S* (?:\(\S+\), )?%\S+ (\d+) /\* loop exit test")
# A kernel's grid is a loop of two rounds more than it has programs: one fetches what the next
# computes on, and another writes what the last one computed.
_GRID, _MORE = "iteration index", 2


@dataclasses.dataclass
class _Loop:
    bundles: float = 0
    rounds: float = math.nan
    is_grid: bool = False


def scheduled_cycles(text: str) -> int | None:
    """Returns the cycles of one run of an operation, from its final bundles.

    A bundle is what a core does in a cycle; those in a loop count as often as it runs, from 0 on.
    Waits for memory are not among them.

    Args:
      text: as the compiler dumps it; the depth of loops is written as so many `>`.

    Returns:
      None where a loop's rounds are not in the text.
    """
    loops = [_Loop(rounds=1)]  # the kernel, and those that are open in it

    def close() -> None:
        ended = loops.pop()
        loops[-1].bundles += ended.rounds * ended.bundles

    lines = [(match, line) for line in text.splitlines() if (match := _BUNDLE.match(line))]
    # What was moved into a loop, or does nothing, bears fewer marks than what follows there.
    following, deepest = [], 0
    for match, _ in reversed(lines):
        following.append(deepest)
        begins, depth = match[1] == "LB", len(match[2])
        deepest = depth - 1 if begins else max(depth, deepest)
    for (match, line), deepest in zip(lines, reversed(following), strict=True):
        begins, depth = match[1] == "LB", len(match[2])
        if not begins:
            depth = max(depth, min(deepest, len(loops) - 1))
        while len(loops) > depth + (not begins):
            close()
        if begins or len(loops) <= depth:
            loops.append(_Loop(is_grid=_GRID in line))
        loops[-1].bundles += 1
        last = _EXIT.search(line)
        if last:
            # That of an outer loop may stand within an inner one, behind its own.
            place = min(max(len(match[2]), 1), len(loops) - 1)
            while place > 1 and not math.isnan(loops[place].rounds):
                place -= 1
            of = loops[place]
            of.rounds = int(last[1]) - (_MORE if of.is_grid else 0)
    while len(loops) > 1:
        close()
    return None if math.isnan(loops[0].bundles) else round(loops[0].bundles)
