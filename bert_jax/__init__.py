"""Pre-train BERT from plain text with JAX: one CPU today, a TPU pod tomorrow, the same config."""

import importlib
import typing

__version__ = "0.1.0"
__all__ = [  # see bert_jax.api
    "FinetunedModel",
    "LoadedModel",
    "batches",
    "embed",
    "evaluate",
    "export",
    "finetune",
    "import_weights",
    "load",
    "predict",
    "pretrain",
    "search",
    "whiten",
]

if typing.TYPE_CHECKING:
    from bert_jax.api import (
        FinetunedModel,
        LoadedModel,
        batches,
        embed,
        evaluate,
        export,
        finetune,
        import_weights,
        load,
        predict,
        pretrain,
        search,
        whiten,
    )
else:  # hidden from type checkers, which would accept any attribute of the module

    def __getattr__(name: str) -> object:
        """Imports `bert_jax.api`, and with it jax, on first use of a name in `__all__`."""
        if name in __all__:
            return getattr(importlib.import_module("bert_jax.api"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names of the module, including those that are imported on first use."""
    return sorted({*globals(), *__all__})
