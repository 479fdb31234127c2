"""The text of a module that XLA has compiled and scheduled, parsed and read.

What is in the text: computations, one of them the entry; instructions in the order in which they
run; for each operation of a TPU program that the compiler has an opinion about, `estimated_cycles`.
What is not: how often loops run, the work of custom kernels, random bits and collectives. `parse`
gives the text its structure; `plan.program` reads it.
"""

import dataclasses
import functools
import math
import re

_BITS = {
    "pred": 8,
    **{f"{kind}{bits}": bits for kind in "su" for bits in (2, 4, 8, 16, 32, 64)},
    **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
    **dict.fromkeys(("f8e4m3fn", "f8e5m2", "f8e4m3b11fnuz", "f8e4m3", "f8e8m0fnu"), 8),
}
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in its computation.
      opcode: what it does: fusion, while, all-reduce-start.
      type: of the result, a tuple in parentheses; layouts included.
      operands: names of instructions.
      argument: what stands in the parentheses of a constant or parameter.
      attributes: all that follows.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    argument: str
    attributes: str

    @property
    def bytes(self) -> int:
        """Of the result, without the padding of its layout."""
        return type_bytes(self.type)

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute names: `body` of a loop, `calls` of a fusion."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def target(self) -> str:
        """Of a custom call; "" for others."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def estimated_cycles(self) -> int:
        """The compiler's estimate; 0 where it has none."""
        found = re.search(r'"estimated_cycles":"?(\d+)', self.attributes)
        return int(found[1]) if found else 0


class Computation:
    """Instructions in their order; the last that is marked so is the root."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.root: Instruction | None = None

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by their names."""
        return {instruction.name: instruction for instruction in self.instructions}


@dataclasses.dataclass
class Module:
    """A parsed module: computations by name, and the name of the entry."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
      ValueError: no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for line in text.splitlines():
        if line[:1] not in (" ", "}", ""):
            head = _COMPUTATION.match(line)
            if head:
                current = computations.setdefault(head[2], Computation())
                entry = head[2] if head[1] else entry
        elif current is not None and (head := _INSTRUCTION.match(line)):
            instruction = _instruction(head[2], line[head.end() :])
            current.instructions.append(instruction)
            if head[1]:
                current.root = instruction
    if not entry:
        raise ValueError("no ENTRY computation: not the text of an HLO module")
    return Module(computations, entry)


def _instruction(name: str, rest: str) -> Instruction:
    # A tuple's type holds parentheses of its own, and so do layouts; neither holds " word(".
    opcode = _OPCODE.search(rest)
    if opcode is None:
        raise ValueError(f"instruction {name}: no operation in {rest[:80]!r}")
    end = rest.index(")", opcode.end())
    inside = rest[opcode.end() : end]
    return Instruction(
        name=name,
        opcode=opcode[1],
        type=rest[: opcode.start()],
        operands=tuple(_NAME.findall(inside)),
        argument=inside,
        attributes=rest[end + 1 :],
    )


def arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """(element type, dimensions) of each array in a type."""
    return [
        (kind, tuple(int(n) for n in sizes.split(",") if n))
        for kind, sizes in _ARRAY.findall(type_)
        if kind in _BITS
    ]


def type_bytes(type_: str) -> int:
    """Bytes of all arrays in a type."""
    return sum(math.prod(sizes) * _BITS[kind] // 8 for kind, sizes in arrays(type_))
