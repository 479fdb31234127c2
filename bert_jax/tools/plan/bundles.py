"""Counts the cycles that the compiler schedules for an operation, from its bundles.

A bundle is the instructions that a core issues in one cycle (VLIW). The compiler writes one file of
bundles for each distinct operation; equal operations share a file.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable

_FILE = re.compile(r"\d+-(.*)-\d+-final_bundles\.txt")


def make_cycle_lookup(folder: str) -> Callable[[str], int | None]:
    """Returns a function that looks up an HLO instruction's cycles, by its name, in a folder."""
    paths = {m[1]: path for path in pathlib.Path(folder).iterdir() if (m := _FILE.match(path.name))}

    def cycles(name: str) -> int | None:
        return scheduled_cycles(paths[name].read_text()) if name in paths else None

    return cycles


_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+ +([A-Z]{2})? *: *(>*) *\{")  # LB: a loop begins
# The test may be predicated; its predicate then stands first.
_EXIT_TEST = re.compile(r"scmp\.ge\.s32\S* (?:\(\S+\), )?%\S+ (\d+) /\* loop exit test")
# The loop over a kernel's grid has two iterations more than the grid has programs: one to fetch the
# first inputs, one to write the last outputs. A comment in its first bundle marks this loop.
_GRID_MARK, _EXTRA_ITERATIONS = "iteration index", 2


@dataclasses.dataclass
class _Loop:
    bundles: float = 0
    iterations: float = math.nan
    is_grid: bool = False


def scheduled_cycles(text: str) -> int | None:
    """Returns the cycles of one execution of an operation, without waits for memory.

    In the text, the compiler's dump of final bundles, the number of `>` is the depth of loops. The
    bundles of a loop count once for each iteration; every loop is taken to count from 0.

    Returns:
      None if the iterations of a loop are not in the text.
    """
    loops = [_Loop(iterations=1)]  # the kernel, and the open loops in it

    def close() -> None:
        ended = loops.pop()
        loops[-1].bundles += ended.iterations * ended.bundles

    lines = [(match, line) for line in text.splitlines() if (match := _BUNDLE.match(line))]
    # Bundles that were moved into a loop, or do nothing, may have fewer `>` than later bundles of
    # the same loop. So a first pass, from the end, finds the depth that these later ones reach.
    later_depths, later_depth = [], 0
    for match, _ in reversed(lines):
        later_depths.append(later_depth)
        begins, depth = match[1] == "LB", len(match[2])
        later_depth = depth - 1 if begins else max(depth, later_depth)
    for (match, line), reached in zip(lines, reversed(later_depths), strict=True):
        begins, depth = match[1] == "LB", len(match[2])
        if not begins:
            depth = max(depth, min(reached, len(loops) - 1))
        while len(loops) > depth + (not begins):
            close()
        if begins or len(loops) <= depth:
            loops.append(_Loop(is_grid=_GRID_MARK in line))
        loops[-1].bundles += 1
        exit_test = _EXIT_TEST.search(line)
        if exit_test:
            # An outer loop's test may stand in an inner loop, after its test, at the printed depth.
            index = min(max(len(match[2]), 1), len(loops) - 1)
            while index > 1 and not math.isnan(loops[index].iterations):
                index -= 1
            loop = loops[index]
            loop.iterations = int(exit_test[1]) - (_EXTRA_ITERATIONS if loop.is_grid else 0)
    while len(loops) > 1:
        close()
    return None if math.isnan(loops[0].bundles) else round(loops[0].bundles)
