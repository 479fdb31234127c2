"""A rule that was looked at, and the norm in which numbers are compared."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class ReferenceRule:
    """One rule of the reference, compared."""

    part: str  # data, tokenizer, optimizer, model or loss
    says: str  # the rule in a few words
    compared: str  # what with what
    difference: float  # the largest; of exact rules, how many things differ
    most: float = 0.0  # what it may be; 0 for exact rules

    @property
    def holds(self) -> bool:
        """Returns whether the difference is small enough; one that is not a number is not."""
        return bool(self.difference <= self.most)

    def line(self, numbers: Literal["measured", "bounds"]) -> str:
        """Returns a line about it; with `bounds` the same on every machine where it holds."""
        if self.most and self.holds and numbers == "bounds":
            shown = f"off by < {self.most:.0e}"
        elif self.most:
            shown = f"off by {self.difference:.1e}, at most {self.most:.0e}"
        else:
            shown = f"{self.difference:g} differ"
        verdict = "ok    " if self.holds else "FAILED"
        return f"{verdict} {self.part:9} {self.says}: {self.compared}: {shown}"


def count_of_different(ours: Any, theirs: Any) -> int:
    """Counts entries of two lists that differ; those that only one of them has, do."""
    differing = sum(a != b for a, b in zip(ours, theirs, strict=False))
    return differing + abs(len(ours) - len(theirs))


def relative(ours: Any, theirs: Any) -> float:
    """Returns max|a - b| / max|b| of two arrays, in float64."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def difference(a: Any, b: Any) -> dict[str, float]:
    """Returns max|a - b| / max(max|b|, 1e-3 * the largest entry of the tree), by path.

    Raises:
      ValueError: the trees have other paths.
    """
    ours = {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree.leaves_with_path(a)}
    theirs = {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree.leaves_with_path(b)}
    if ours.keys() != theirs.keys():
        raise ValueError(f"trees differ in {sorted(ours.keys() ^ theirs.keys())}")
    largest = max(float(np.abs(v).max()) for v in theirs.values())
    return {
        k: float(np.abs(ours[k] - theirs[k]).max())
        / max(float(np.abs(theirs[k]).max()), 1e-3 * largest)
        for k in ours
    }


def largest_difference(a: Any, b: Any) -> float:
    """Returns the largest `difference` of all paths."""
    return max(difference(a, b).values())
