"""The result of checking a rule, and the measures of difference."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class ReferenceRule:
    """A rule of the reference, with the result of a comparison."""

    part: str  # data, tokenizer, optimizer, model or loss
    rule: str  # the rule in a few words
    compared: str  # the two things that are compared: A with B
    difference: float  # the largest; for exact rules, entries that differ, or what must be 0
    tolerance: float = 0.0  # largest difference allowed; 0 for exact rules

    @property
    def holds(self) -> bool:
        """Returns whether the difference is small enough; NaN is not."""
        return bool(self.difference <= self.tolerance)

    def line(self, numbers: Literal["measured", "bounds"]) -> str:
        """Describes the result; with `bounds`, the same on every machine where the rule holds."""
        if self.tolerance and self.holds and numbers == "bounds":
            difference = f"off by < {self.tolerance:.0e}"
        elif self.tolerance:
            difference = f"off by {self.difference:.1e}, at most {self.tolerance:.0e}"
        else:
            difference = f"{self.difference:g} differ"
        verdict = "ok    " if self.holds else "FAILED"
        return f"{verdict} {self.part:9} {self.rule}: {self.compared}: {difference}"


def count_differences(actual: Any, expected: Any) -> int:
    """Counts entries of two lists that differ, including those that only one of them has."""
    differing = sum(a != b for a, b in zip(actual, expected, strict=False))
    return differing + abs(len(actual) - len(expected))


def relative(actual: Any, expected: Any) -> float:
    """Returns max|a - b| / max|b| of two arrays, in float64."""
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def relative_differences(a: Any, b: Any) -> dict[str, float]:
    """Returns {path: max|a - b| / max(max|b|, 1e-3 * the largest entry of the tree b)}.

    Raises:
      ValueError: the trees have different paths.
    """
    a, b = (
        {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree.leaves_with_path(tree)}
        for tree in (a, b)
    )
    if a.keys() != b.keys():
        raise ValueError(f"trees differ in {sorted(a.keys() ^ b.keys())}")
    largest = max(float(np.abs(v).max()) for v in b.values())
    return {
        k: float(np.abs(a[k] - b[k]).max()) / max(float(np.abs(b[k]).max()), 1e-3 * largest)
        for k in a
    }


def largest_difference(a: Any, b: Any) -> float:
    """Returns the largest of the `relative_differences`."""
    return max(relative_differences(a, b).values())
