"""Pre-train BERT from plain text with JAX: one CPU today, a TPU pod tomorrow, the same config."""

import importlib
from typing import Any

__version__ = "0.1.0"

# What `import bert_jax` offers; see bert_jax.api.
_LIBRARY = ("batches", "load", "pretrain")


def __getattr__(name: str) -> Any:
    """Returns what `bert_jax.api` offers; it imports jax, and so only where it is asked for."""
    if name in _LIBRARY:
        return getattr(importlib.import_module("bert_jax.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names of the package, those of the library among them."""
    return sorted({*globals(), *_LIBRARY})
