"""What a compiled training step does, read from its module: cycles, bytes, collectives.

Everything counts as often as it runs: a loop's body times its number of rounds.
"""

import collections
import dataclasses
import re

from bert_jax.plan import hlo

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of the program, with all that are like it.

    Attributes:
      kind: one of COLLECTIVES.
      count: how often it runs in a step.
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
      count: how often it runs in a step.
      flops: of one run, as its author states them; None where unsaid.
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


def read(text: str) -> Program:
    """Reads the text of a compiled module."""
    return read_module(hlo.parse(text))


def read_module(module: hlo.Module) -> Program:
    """Reads a parsed module."""
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
    """Goes through the computations as they run, and adds up."""

    def __init__(self, module: hlo.Module):
        self.module = module
        self.random_bytes = 0
        self.kernels: collections.Counter[Kernel] = collections.Counter()
        self.collectives: collections.Counter[Collective] = collections.Counter()
        self.operations: collections.Counter[str] = collections.Counter()
        self.endless = 0

    def run(self, name: str, times: int, where: str) -> int:
        """Goes through a computation that runs `times` times; returns the cycles of one run."""
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
        for _, collective in begun.values():  # its end was not recognised: nothing is claimed
            self._count(collective, times, None)
        return cycles

    def _cost(
        self, instruction: hlo.Instruction, computation: hlo.Computation, times: int, where: str
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
                found = re.findall(r"[\w.\-]+", branches[1]) if branches else names
                return max(self.run(name or "", times, where) for name in found)
            case "fusion":
                self._look_inside(instruction, times, where)
            case opcode:
                self._count_uncosted(instruction, computation, times)
                if opcode in COLLECTIVES:
                    self._count(_collective(instruction, computation, where), times, None)
        return instruction.estimated_cycles

    def _look_inside(self, fusion: hlo.Instruction, times: int, where: str) -> None:
        """What a fusion holds besides what its cycles tell."""
        inside = self.module.computations[fusion.called("calls") or ""]
        for instruction in inside.instructions:
            self._count_uncosted(instruction, inside, times)
            if instruction.opcode in COLLECTIVES and not _is_part_of_asynchronous(inside):
                collective = _collective(instruction, inside, where)
                if _is_scatter(instruction, inside):
                    collective = dataclasses.replace(collective, kind="reduce-scatter")
                self._count(collective, times, None)

    def _count_uncosted(
        self, instruction: hlo.Instruction, computation: hlo.Computation, times: int
    ) -> None:
        if instruction.opcode == "rng-bit-generator":
            self.random_bytes += times * instruction.bytes
        elif instruction.target == _KERNEL:
            self.kernels[_kernel(instruction, computation)] += times

    def _count(self, collective: Collective, times: int, cover: int | None) -> None:
        self.collectives[dataclasses.replace(collective, cover=cover)] += times

    def _begins(
        self, instruction: hlo.Instruction, computation: hlo.Computation, where: str
    ) -> Collective | None:
        """The collective that begins here and ends at another instruction."""
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

    def _ends(self, instruction: hlo.Instruction) -> bool:
        if instruction.opcode == "fusion":
            inside = self.module.computations[instruction.called("calls") or ""]
            return _calls(inside, "AsyncCollectiveDone")
        return instruction.opcode.removesuffix("-done") in COLLECTIVES


def _calls(computation: hlo.Computation, target: str) -> bool:
    return any(instruction.target == target for instruction in computation.instructions)


def _is_part_of_asynchronous(computation: hlo.Computation) -> bool:
    """Whether a fused collective is one stretch of one that was begun by another fusion.

    A TPU carries an asynchronous collective on inside the fusions that hide it. The text shows it
    whole in each of them, from its start to its end, marked as links of one chain.
    """
    return any(
        instruction.opcode in COLLECTIVES and "chain_id=" in instruction.attributes
        for instruction in computation.instructions
    )


def _is_scatter(instruction: hlo.Instruction, fused: hlo.Computation) -> bool:
    """Whether it is an all-reduce of which only a slice is made: so a TPU writes some scatters."""
    return (
        instruction.opcode == "all-reduce"
        and fused.root is not None
        and fused.root.opcode == "dynamic-slice"
        and fused.root.operands[0] == instruction.name
    )


def _origin(
    instruction: hlo.Instruction,
    computation: hlo.Computation,
    begun: dict[str, tuple[int, Collective]],
) -> str | None:
    """The name of the start that an end goes back to, through whatever hands its first part on."""
    name = instruction.operands[0] if instruction.operands else None
    while name is not None and name not in begun:
        before = computation.by_name.get(name)
        name = before.operands[0] if before is not None and before.operands else None
    return name


def _collective(
    instruction: hlo.Instruction, computation: hlo.Computation, where: str
) -> Collective:
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


def _group(instruction: hlo.Instruction) -> tuple[int, ...]:
    """The first of the groups, in either way of writing them."""
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


def _kernel(instruction: hlo.Instruction, computation: hlo.Computation) -> Kernel:
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


def _rounds(module: hlo.Module, loop: hlo.Instruction, computation: hlo.Computation) -> int | None:
    """How often a counted loop goes round: while counter < limit, from a constant on, by ones."""
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


def _constant(instruction: hlo.Instruction, computation: hlo.Computation) -> int | None:
    """The whole number that an instruction stands for."""
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.by_name[instruction.operands[0]]
    if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.argument):
        return int(instruction.argument)
    return None
