"""Rounds and comparisons as lines for a terminal."""

import dataclasses
from collections.abc import Iterator, Sequence

from bert_jax.errors import printable
from bert_jax.verify.children import Ended
from bert_jax.verify.compare import Comparison
from bert_jax.verify.lineage import Killed
from bert_jax.verify.rounds import Kind

HEADER = f"{'round':>5}  {'kind':<23} {'from step':>9} {'killed at':>9} {'exit':>5} {'seconds':>8}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A round and what came of it."""

    number: int
    kind: Kind
    killed: Killed

    @property
    def differences(self) -> list[str]:
        """What is not as it should be."""
        return self.killed.differences


def ended_only(ended: Ended) -> Killed:
    """Of a process that does no steps."""
    return Killed(ended, None, None, [])


def row(one: Row) -> str:
    """A round in a line."""
    killed, ended = one.killed, one.killed.ended
    steps = ("-" if step is None else str(step) for step in (killed.began, killed.done))
    where = " ".join(f"{step:>9}" for step in steps)
    return f"{one.number:>5}  {one.kind:<23} {where} {ended.code:>5} {ended.seconds:>8.1f}"


def table(rows: Sequence[Row], ends: Sequence[Comparison]) -> Iterator[str]:
    """Kinds with their kills and differences, then what was compared at the end."""
    yield ""
    yield f"{'kind':<23} {'kills':>5} {'differences':>12}"
    for kind in dict.fromkeys(one.kind for one in rows):
        of_kind = [one for one in rows if one.kind == kind]
        differing = sum(len(one.differences) for one in of_kind)
        yield f"{kind:<23} {len(of_kind):>5} {differing:>12}"
    yield ""
    yield "differences"
    for end in ends:
        yield f"{len(end.differences):>11}  {end.whose}: {end.what}"
        for difference in end.differences:
            yield f"{'':>13}{printable(difference)}"
    yield ""
