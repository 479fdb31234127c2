"""Counts the cycles that the compiler schedules for an operation, from its bundles.

A bundle is the work of a core in one cycle. The compiler writes the bundles of each operation to a
file, only once for equal operations.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable

_FILE = re.compile(r"\d+-(.*)-\d+-final_bundles\.txt")


def reader(folder: str) -> Callable[[str], int | None]:
    """Returns a function from the name of an instruction to the cycles of one run, None if unknown.

    `folder` is the folder to which the compiler wrote the bundles.
    """
    paths = {m[1]: path for path in pathlib.Path(folder).iterdir() if (m := _FILE.match(path.name))}

    def cycles(name: str) -> int | None:
        return scheduled_cycles(paths[name].read_text()) if name in paths else None

    return cycles


_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+ +([A-Z]{2})? *: *(>*) *\{")
# A conditional test names its condition first.
_EXIT = re.compile(r"scmp\.ge\.s32\S* (?:\(\S+\), )?%\S+ (\d+) /\* loop exit test")
# The loop over a kernel's grid has two rounds more than the grid has programs: one to fetch the
# first inputs, one to write the last outputs.
_GRID, _EXTRA_ROUNDS = "iteration index", 2


@dataclasses.dataclass
class _Loop:
    bundles: float = 0
    rounds: float = math.nan
    is_grid: bool = False


def scheduled_cycles(text: str) -> int | None:
    """Returns the cycles of one run of an operation, from its final bundles.

    Bundles in a loop count once for each round, from 0 on. Waits for memory are not included.

    Args:
      text: the compiler's dump, which shows the depth of loops by the number of `>`.

    Returns:
      None if the rounds of a loop are not in the text.
    """
    loops = [_Loop(rounds=1)]  # the kernel, and the open loops in it

    def close() -> None:
        ended = loops.pop()
        loops[-1].bundles += ended.rounds * ended.bundles

    lines = [(match, line) for line in text.splitlines() if (match := _BUNDLE.match(line))]
    # Bundles that were moved into a loop, or do nothing, have fewer marks than the following ones.
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
            # The exit test of an outer loop may stand in an inner loop, after the inner test.
            index = min(max(len(match[2]), 1), len(loops) - 1)
            while index > 1 and not math.isnan(loops[index].rounds):
                index -= 1
            loop = loops[index]
            loop.rounds = int(last[1]) - (_EXTRA_ROUNDS if loop.is_grid else 0)
    while len(loops) > 1:
        close()
    return None if math.isnan(loops[0].bundles) else round(loops[0].bundles)
