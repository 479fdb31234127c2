"""What a compiled training step does, read from the text of its module (HLO).

`parse` gives the text its structure: computations, one of them the entry; instructions in the
order in which they run; for each operation of a TPU program that the compiler has an opinion
about, `estimated_cycles`. The text does not hold how often loops run, nor the time of custom
kernels, random bits and collectives. `read` walks through the module as it runs and adds up
cycles, bytes and collectives, each as often as it runs: a loop's body times its number of rounds.
`whole_batch_arrays` looks for what a step sharded over a pod must not do.
"""

import collections
import dataclasses
import functools
import math
import re

from bert_jax.config import Experiment
from bert_jax.model.encoder import padded_vocab_size

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Kept because a change of their number is a change of the program.
_COUNTED = ("fusion", "copy", "convolution", "custom-call", "rng-bit-generator", "transpose")
_KERNEL = "tpu_custom_call"
# Arrays that `whole_batch_arrays` names; a mistake makes hundreds.
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
    """A line of a computation.

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
        """Bytes of the result, without the padding of its layout."""
        return type_bytes(self.type)

    def called(self, attribute: str) -> str | None:
        """Returns the computation that an attribute names, such as `body` of a loop."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    @property
    def target(self) -> str:
        """What a custom call calls; "" for other instructions."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def estimated_cycles(self) -> int:
        """The compiler's estimate; 0 where it has none."""
        match = re.search(r'"estimated_cycles":"?(\d+)', self.attributes)
        return int(match[1]) if match else 0


class Computation:
    """Instructions in their order; the last that is marked so is the root."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.root: Instruction | None = None

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
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
    """Returns (element type, dimensions) of each array in a type."""
    return [
        (kind, tuple(int(n) for n in sizes.split(",") if n))
        for kind, sizes in _ARRAY.findall(type_)
        if kind in _BITS
    ]


def type_bytes(type_: str) -> int:
    """Returns the bytes of all arrays in a type."""
    return sum(math.prod(sizes) * _BITS[kind] // 8 for kind, sizes in arrays(type_))


# --- what the program does ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of the program, with all that are like it.

    Attributes:
      kind: one of COLLECTIVES.
      count: runs in a step.
      payload: bytes of the whole array that each device holds before or after it: the operand of
        an all-reduce, a reduce-scatter or a permutation, the result of an all-gather.
      group: devices, by their places in the mesh, of the first of the groups that it joins.
      where: in the entry of the program, or in the body of a loop.
      cover: cycles of other work while it is under way; None if nothing else is done meanwhile.
    """

    kind: str
    count: int
    payload: int
    group: tuple[int, ...]
    where: str
    cover: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A custom kernel (Pallas), to the compiler a box that takes no time.

    Attributes:
      name: of its operation.
      count: runs in a step.
      flops: of one run, as its author states them; None where he does not.
      bytes: that one run reads and writes: as stated, else its operands and results.
    """

    name: str
    count: int
    flops: int | None
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A step on one device.

    Attributes:
      cycles: the compiler's estimates, summed.
      random_bytes: of random bits drawn.
      kernels: custom ones.
      collectives: equal ones together.
      operations: how often some kinds of operation run.
      endless: loops whose number of rounds is not in the text; they are counted once.
    """

    cycles: int
    random_bytes: int
    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    operations: dict[str, int]
    endless: int


def read(module: Module) -> Program:
    """Returns what one run of the module does."""
    walk = _Walk(module)
    cycles = walk.run(module.entry, 1, "entry")
    collectives = tuple(
        dataclasses.replace(one, count=count) for one, count in walk.collectives.items()
    )
    kernels = tuple(dataclasses.replace(one, count=count) for one, count in walk.kernels.items())
    return Program(
        cycles=cycles,
        random_bytes=walk.random_bytes,
        kernels=kernels,
        collectives=collectives,
        operations={name: walk.operations[name] for name in _COUNTED if walk.operations[name]},
        endless=walk.endless,
    )


class _Walk:
    """Walks through the computations as they run, and adds up."""

    def __init__(self, module: Module):
        self.module = module
        self.random_bytes = 0
        self.kernels: collections.Counter[Kernel] = collections.Counter()
        self.collectives: collections.Counter[Collective] = collections.Counter()
        self.operations: collections.Counter[str] = collections.Counter()
        self.endless = 0

    def run(self, name: str, times: int, where: str) -> int:
        """Walks through a computation that runs `times` times; returns the cycles of one run."""
        computation = self.module.computations[name]
        begun: dict[str, tuple[int, Collective]] = {}
        cycles = 0
        for instruction in computation.instructions:
            self.operations[instruction.opcode] += times
            start = self._begins(instruction, computation, where)
            if start is not None:
                begun[instruction.name] = (cycles, start)
            elif begun and self._ends(instruction):
                began = _origin(instruction, computation, begun)
                if began is not None:
                    at, collective = begun.pop(began)
                    self._count(collective, times, cycles - at)
            cycles += self._cost(instruction, computation, times, where)
        for (
            _,
            collective,
        ) in begun.values():  # of an end that was not recognised
            self._count(collective, times, None)
        return cycles

    def _cost(
        self, instruction: Instruction, computation: Computation, times: int, where: str
    ) -> int:
        """Counts what an instruction does; returns its cycles."""
        match instruction.opcode:
            case "while":
                rounds = _rounds(self.module, instruction, computation)
                if rounds is None:
                    self.endless += 1
                    rounds = 1
                return rounds * self.run(instruction.called("body") or "", times * rounds, "loop")
            case "call":
                return self.run(instruction.called("to_apply") or "", times, where)
            case "async-start":
                return self.run(instruction.called("calls") or "", times, where)
            case "conditional":  # the compiler does not know which; the longest is meant
                branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
                names = [instruction.called(f"{word}_computation") for word in ("true", "false")]
                names = re.findall(r"[\w.\-]+", branches[1]) if branches else names
                return max(self.run(name or "", times, where) for name in names)
            case "fusion":
                self._look_inside(instruction, times, where)
            case opcode:
                self._count_uncosted(instruction, computation, times)
                if opcode in COLLECTIVES:
                    self._count(_collective(instruction, computation, where), times, None)
        return instruction.estimated_cycles

    def _look_inside(self, fusion: Instruction, times: int, where: str) -> None:
        """Counts what a fusion holds besides its cycles."""
        inside = self.module.computations[fusion.called("calls") or ""]
        for instruction in inside.instructions:
            self._count_uncosted(instruction, inside, times)
            if instruction.opcode in COLLECTIVES and not _is_part_of_asynchronous(inside):
                collective = _collective(instruction, inside, where)
                if _is_scatter(instruction, inside):
                    collective = dataclasses.replace(collective, kind="reduce-scatter")
                self._count(collective, times, None)

    def _count_uncosted(
        self, instruction: Instruction, computation: Computation, times: int
    ) -> None:
        if instruction.opcode == "rng-bit-generator":
            self.random_bytes += times * instruction.bytes
        elif instruction.target == _KERNEL:
            self.kernels[_kernel(instruction, computation)] += times

    def _count(self, collective: Collective, times: int, cover: int | None) -> None:
        self.collectives[dataclasses.replace(collective, cover=cover)] += times

    def _begins(
        self, instruction: Instruction, computation: Computation, where: str
    ) -> Collective | None:
        """Returns the collective that begins here and ends at another instruction."""
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            if instruction.opcode.endswith("-start"):
                return _collective(instruction, computation, where)
        elif instruction.opcode == "fusion":
            inside = self.module.computations[instruction.called("calls") or ""]
            if _calls(inside, "AsyncCollectiveStart"):
                for held in inside.instructions:
                    if held.opcode in COLLECTIVES:
                        return _collective(held, inside, where)
        return None

    def _ends(self, instruction: Instruction) -> bool:
        if instruction.opcode == "fusion":
            inside = self.module.computations[instruction.called("calls") or ""]
            return _calls(inside, "AsyncCollectiveDone")
        return instruction.opcode.removesuffix("-done") in COLLECTIVES


def _calls(computation: Computation, target: str) -> bool:
    return any(instruction.target == target for instruction in computation.instructions)


def _is_part_of_asynchronous(computation: Computation) -> bool:
    """Returns whether a fused collective is a part of one that another fusion began.

    A TPU carries an asynchronous collective on inside the fusions that hide it. The text shows it
    whole in each of them, from its start to its end, marked as links of one chain.
    """
    return any(
        instruction.opcode in COLLECTIVES and "chain_id=" in instruction.attributes
        for instruction in computation.instructions
    )


def _is_scatter(instruction: Instruction, fused: Computation) -> bool:
    """Returns whether an all-reduce makes a slice alone: so a TPU writes some reduce-scatters."""
    return (
        instruction.opcode == "all-reduce"
        and fused.root is not None
        and fused.root.opcode == "dynamic-slice"
        and fused.root.operands[0] == instruction.name
    )


def _origin(
    instruction: Instruction,
    computation: Computation,
    begun: dict[str, tuple[int, Collective]],
) -> str | None:
    """Returns the name of the start of an end, through what hands its first part on."""
    name = instruction.operands[0] if instruction.operands else None
    while name is not None and name not in begun:
        before = computation.by_name.get(name)
        name = before.operands[0] if before is not None and before.operands else None
    return name


def _collective(instruction: Instruction, computation: Computation, where: str) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    group = _group(instruction)
    held = sum(computation.by_name[name].bytes for name in instruction.operands)
    return Collective(
        kind=kind,
        count=0,
        payload=held * len(group) if kind == "all-gather" else held,
        group=group,
        where=where,
        cover=None,
    )


def _group(instruction: Instruction) -> tuple[int, ...]:
    """Returns the first of the groups, which are written in one of two ways."""
    text = instruction.attributes
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", text)
    if listed:
        return tuple(int(n) for n in listed[1].split(",") if n)
    # [groups,size]<=[dimensions]T(permutation): counted through in the order of the permutation.
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if counted is None:
        raise ValueError(f"{instruction.opcode} {instruction.name}: no groups in {text[:120]!r}")
    sizes = [int(n) for n in counted[3].split(",")]
    order = [int(n) for n in (counted[4] or ",".join(map(str, range(len(sizes))))).split(",")]
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    members = []
    for place in range(int(counted[2])):
        device = 0
        for axis in reversed(order):
            place, digit = divmod(place, sizes[axis])
            device += digit * strides[axis]
        members.append(device)
    return tuple(members)


def _kernel(instruction: Instruction, computation: Computation) -> Kernel:
    stated = {
        word: int(number)
        for word, number in re.findall(
            r'\\*"(flops|bytes_accessed)\\*":\s*\\*"?(\d+)', instruction.attributes
        )
    }
    operands = sum(computation.by_name[name].bytes for name in instruction.operands)
    return Kernel(
        name=instruction.name.rstrip(".0123456789"),
        count=0,
        flops=stated.get("flops") or None,
        bytes=stated.get("bytes_accessed") or operands + instruction.bytes,
    )


def _rounds(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """Returns the rounds of a loop `while counter < limit`, from a constant on, by ones."""
    condition = module.computations[loop.called("condition") or ""]
    compare = condition.root
    if compare is None or compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = (condition.by_name[name] for name in compare.operands)
    last = _constant(limit, condition)
    place = re.search(r"\bindex=(\d+)", counter.attributes)
    if last is None or counter.opcode != "get-tuple-element" or place is None:
        return None
    values = computation.by_name[loop.operands[0]]
    if values.opcode != "tuple":
        return None
    first = _constant(computation.by_name[values.operands[int(place[1])]], computation)
    return None if first is None else last - first


def _constant(instruction: Instruction, computation: Computation) -> int | None:
    """Returns the whole number that an instruction stands for, if it is a constant."""
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.by_name[instruction.operands[0]]
    if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.argument):
        return int(instruction.argument)
    return None


# --- what it must not do ---


def whole_batch_arrays(
    module: Module, experiment: Experiment, number: int, shards: int
) -> list[str] | None:
    """Returns arrays of one device's program that hold a position of every row of the batch.

    Random bits that every device draws for all rows are such: they make a step slower the larger
    the pod is.

    Args:
      module: of one device.
      experiment: what it was compiled from.
      number: of the phase.
      shards: into which the batch is cut.

    Returns:
      The first few, as type and dimensions; None if they cannot be recognised, because the batch
      is as large as something else, or is not cut.
    """
    phase, model = experiment.phases[number], experiment.model
    rows, length = phase.batch_size, phase.sequence_length
    heads = model.num_attention_heads
    others = {
        model.hidden_size,
        model.intermediate_size,
        model.num_hidden_layers,
        heads,
        model.hidden_size // heads,
        length,
        phase.max_predictions_per_seq,
    }
    flat = set() if rows * length == padded_vocab_size(model) else {rows * length}
    if shards == 1 or rows in others:
        return None
    wholes = {rows} | (
        {rows // experiment.parallelism.accumulation_of(number)} - others - {rows // shards}
    )
    arrays_seen = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for kind, sizes in arrays(instruction.type):
                if flat & set(sizes) or any(_spans(sizes, n, heads, length) for n in wholes):
                    arrays_seen[f"{kind}[{','.join(map(str, sizes))}]"] = None
    return list(arrays_seen)[:_SHOWN]


def _spans(sizes: tuple[int, ...], rows: int, heads: int, length: int) -> bool:
    """Returns whether three or more dimensions hold (rows, length) or (rows, heads, length)."""
    if len(sizes) < 3:
        return False
    return any(
        sizes[at] == rows and (sizes[at + 1] == length or sizes[at + 1 : at + 3] == (heads, length))
        for at in range(len(sizes) - 1)
    )
