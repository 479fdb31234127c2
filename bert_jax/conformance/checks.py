"""All rules, compared one after another, and how they are told."""

from collections.abc import Iterator
from typing import Literal

import jax

from bert_jax.config import Parallelism
from bert_jax.conformance import (
    data_rules,
    loss_rules,
    model_rules,
    optimizer_rules,
    tokenizer_rules,
)
from bert_jax.conformance.rule import Rule
from bert_jax.training import mesh as mesh_lib

PARTS = (data_rules, tokenizer_rules, optimizer_rules, model_rules, loss_rules)


def check() -> Iterator[Rule]:
    """Yields every rule of the reference, compared; takes about a minute.

    Raises:
      InputError: JAX_PLATFORMS asks for a device that cannot be used.
    """
    mesh_lib.make_mesh(Parallelism())  # refuses by name a device that is not there
    # Rules are about formulas: no device may round float32 in products.
    with jax.default_matmul_precision("highest"):
        for part in PARTS:
            yield from part.check()


def line(rule: Rule, numbers: Literal["measured", "bounds"]) -> str:
    """One line about a rule; with `bounds` the same on every machine where it holds."""
    if rule.most and rule.holds and numbers == "bounds":
        found = f"off by < {rule.most:.0e}"
    elif rule.most:
        found = f"off by {rule.difference:.1e}, at most {rule.most:.0e}"
    else:
        found = f"{rule.difference:g} differ"
    verdict = "ok    " if rule.holds else "FAILED"
    return f"{verdict} {rule.part:9} {rule.says}: {rule.compared}: {found}"
