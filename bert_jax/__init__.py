"""Pre-train BERT from plain text with JAX: one CPU today, a TPU pod tomorrow, the same config."""

import importlib
import typing

__version__ = "0.1.0"
__all__ = ["batches", "load", "pretrain"]  # see bert_jax.api

if typing.TYPE_CHECKING:
    from bert_jax.api import batches, load, pretrain
else:  # a type checker would take any name for one that `__getattr__` knows

    def __getattr__(name: str) -> object:
        """Returns what `bert_jax.api` offers; it imports jax, and so only on first use."""
        if name in __all__:
            return getattr(importlib.import_module("bert_jax.api"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names of the package, those of the library among them."""
    return sorted({*globals(), *__all__})
