"""Parses the text of a compiled module (HLO).

A module has computations, one of which is the entry; a computation has instructions in execution
order. Operations of a TPU program may have the compiler's `estimated_cycles`. `whole_batch_arrays`
finds arrays as large as the global batch, which no device of a pod must have.
"""

import dataclasses
import functools
import math
import re

from bert_jax.config import Experiment
from bert_jax.model.encoder import padded_vocab_size

# Maximum number of arrays that `whole_batch_arrays` returns; a wrong sharding causes hundreds.
_SHOWN = 4

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
    """A line of a computation."""

    name: str  # unique in its computation
    opcode: str  # such as fusion, while, all-reduce-start
    type: str  # type of the result with layouts; a tuple in parentheses
    operands: tuple[str, ...]  # names of instructions
    argument: str  # the text in the parentheses, such as the value of a constant
    attributes: str  # the text after the parentheses

    @property
    def bytes(self) -> int:
        """Bytes of the result, without the padding of its layout."""
        return type_bytes(self.type)

    def callee(self, attribute: str) -> str:
        """Returns the computation that an attribute names, such as `body` of a loop; "" if none."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""

    @property
    def target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def estimated_cycles(self) -> int:
        """The compiler's estimate; 0 if there is none."""
        match = re.search(r'"estimated_cycles":"?(\d+)', self.attributes)
        return int(match[1]) if match else 0


class Computation:
    """Instructions in order; `root` is the one marked ROOT, whose result is the computation's."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.root: Instruction | None = None

    @functools.cached_property
    def lookup(self) -> dict[str, Instruction]:
        """The instructions by name."""
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
            match = _COMPUTATION.match(line)
            if match:
                current = computations.setdefault(match[2], Computation())
                entry = match[2] if match[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            instruction = _parse_instruction(match[2], line[match.end() :])
            current.instructions.append(instruction)
            if match[1]:
                current.root = instruction
    if not entry:
        raise ValueError("no ENTRY computation: not the text of an HLO module")
    return Module(computations, entry)


def _parse_instruction(name: str, rest: str) -> Instruction:
    # Types of tuples and layouts contain parentheses, but no " word(".
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
    """Returns (element type, dimensions) of each array in a type."""
    return [
        (kind, tuple(int(n) for n in sizes.split(",") if n))
        for kind, sizes in _ARRAY.findall(type_)
        if kind in _BITS
    ]


def type_bytes(type_: str) -> int:
    """Returns the bytes of all arrays in a type."""
    return sum(math.prod(sizes) * _BITS[kind] // 8 for kind, sizes in arrays(type_))


# --- arrays of the whole batch ---


def whole_batch_arrays(
    module: Module, experiment: Experiment, number: int, shards: int
) -> list[str] | None:
    """Returns arrays of one device's program that have entries for every row of the batch.

    For example, every device may draw random bits for all rows. Such arrays make a step slower on a
    larger pod.

    Args:
      number: number of the phase.
      shards: number of parts into which the batch is divided.

    Returns:
      The first few, as type and dimensions; None if they cannot be recognised, because another
      dimension has the size of the batch, or because the batch is not divided.
    """
    phase, model = experiment.phases[number], experiment.model
    rows, length = phase.batch_size, phase.sequence_length
    heads = model.num_attention_heads
    model_sizes = {
        model.hidden_size,
        model.intermediate_size,
        model.num_hidden_layers,
        heads,
        model.hidden_size // heads,
        length,
        phase.max_predictions_per_seq,
    }
    token_counts = set() if rows * length == padded_vocab_size(model) else {rows * length}
    widths = model.hidden_size, model.intermediate_size
    biases = [(model.num_hidden_layers * width,) for width in widths]  # of all layers
    if shards == 1 or rows in model_sizes:
        return None
    # The rows of the batch, and those of a micro-batch unless something else has this size.
    row_counts = {rows} | (
        {rows // experiment.parallelism.accumulation_of(number)} - model_sizes - {rows // shards}
    )
    arrays_seen = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for kind, sizes in arrays(instruction.type):
                is_flat = bool(token_counts & set(sizes)) and sizes not in biases
                if is_flat or _spans_rows(sizes, row_counts, heads, length):
                    arrays_seen[f"{kind}[{','.join(map(str, sizes))}]"] = None
    return list(arrays_seen)[:_SHOWN]


def _spans_rows(sizes: tuple[int, ...], row_counts: set[int], heads: int, length: int) -> bool:
    """Returns whether an array of rank 3 or more has dimensions (rows[, heads], length)."""
    return len(sizes) >= 3 and any(
        sizes[at] in row_counts
        and (sizes[at + 1] == length or sizes[at + 1 : at + 3] == (heads, length))
        for at in range(len(sizes) - 1)
    )
