"""Comparing trees of arrays, in the one norm of the project."""

import jax
import numpy as np

from bert_jax.tools.conformance.rule import relative_differences


def assert_close(a, b, tolerance: float) -> None:
    found = relative_differences(a, b)
    worst = max(found, key=found.get)
    assert found[worst] <= tolerance, f"{worst}: {found[worst]:.2e} > {tolerance:.0e}"


def assert_identical(a, b) -> None:
    ours, theirs = jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b)
    assert [k for k, _ in ours] == [k for k, _ in theirs]
    for (path, x), (_, y) in zip(ours, theirs, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert x.tobytes() == y.tobytes(), f"{jax.tree_util.keystr(path)} differs"
