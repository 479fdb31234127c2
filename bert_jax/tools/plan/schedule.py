"""Reads the schedule of a compiled training step from its module.

The text of a module does not contain the rounds of loops, nor the time of custom kernels, random
bits and collectives. `read` follows the module in execution order and returns a schedule: work,
kernels, and the starts and ends of collectives, in loops with their rounds.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from bert_jax.tools.plan import work
from bert_jax.tools.plan.hlo import Computation, Instruction, Module
from bert_jax.tools.plan.work import COPIES, KINDS, OTHER, PRODUCTS

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# The opcode that sends to the network between slices, which returns the sum over slices.
SEND = "send"
# Opcodes whose counts are stored, since a changed count shows a changed program.
_COUNTED = ("fusion", "copy", "convolution", "custom-call", "rng-bit-generator", "transpose")
# Target of the custom call of a custom kernel (Pallas).
KERNEL = "tpu_custom_call"
# Opcodes that start and end a copy of an array, or of a part of it, during other work.
_FETCH_STARTS, _FETCH_ENDS = ("copy-start", "slice-start"), ("copy-done", "slice-done")

# A name scope around a `lax.cond` that tells how often its condition holds: held_8_of_22 for 8 of
# 22 times.
_HELD = re.compile(r'op_name="[^"]*\bheld_(\d+)_of_(\d+)\b')

# The next action of a device, as stored in JSON: a kind with arguments.
#   "work", one of KINDS, cycles, bytes     ordinary instructions; the bytes are those of copies
#   "bits", bytes                           draws random bits
#   "kernel", index in `Program.kernels`
#   "start", index in `Program.collectives`, name of the instruction
#   "fetch", bytes, name                    starts a transfer from or to the device's memory
#   "done", name                            waits for the collective or the fetch of that name
#   "loop", rounds, steps
#   "either", share, steps, other steps     the former steps in this share of its runs
Step = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of the program, counted together with all equal ones."""

    kind: str  # one of COLLECTIVES, or SEND
    count: int  # runs in a step
    # Bytes of the whole array that each device holds before or after it: the operand of an
    # all-reduce, a reduce-scatter or a permutation, the result of an all-gather.
    payload: int
    # Devices, by their indices in the mesh, of the first of its groups; empty for a permutation.
    group: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] = ()  # (source, target) devices of a permutation
    where: str  # "entry" of the program, or body of a "loop"
    asynchronous: bool = False  # whether one instruction starts it and another waits for it
    emitter: str = ""  # the compiler's name of its algorithm; "" if there is none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A custom kernel (Pallas), for which the compiler of the module estimates no time."""

    name: str  # name of its operation
    count: int  # runs in a step
    cycles: int | None  # scheduled cycles of one run; None if not known
    # Bytes that one run reads from and writes to the device's memory (HBM); at most what its author
    # states, since it may read only a part of an array.
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A step on one device."""

    schedule: tuple[Step, ...]  # actions, in order
    kernels: tuple[Kernel, ...]  # different custom kernels
    collectives: tuple[Collective, ...]  # different collectives
    operations: dict[str, int]  # {opcode: runs}, for some opcodes
    endless: int  # loops whose number of rounds is not in the text; they are counted once
    # Estimated cycles of PRODUCTS whose schedule is not known.
    unscheduled: int = 0

    @functools.cached_property
    def sums(self) -> dict[str, int]:
        """Cycles of each of KINDS, and the bytes `copied`, `drawn` (random bits) and `fetched`."""
        sums = dict.fromkeys((*KINDS, "copied", "drawn", "fetched"), 0)
        return sums | {name: round(value) for name, value in _sums(self.schedule).items()}


def _sums(steps: Sequence[Step]) -> collections.Counter[str]:
    """Returns the sums of `Program.sums` over some steps; branches count by their share."""
    sums: collections.Counter[str] = collections.Counter()
    for step in steps:
        match step:
            case "work", kind, cycles, size:
                sums.update({kind: cycles, "copied": size})
            case "bits", size:
                sums["drawn"] += size
            case "fetch", size, _:
                sums["fetched"] += size
            case "loop", rounds, body:
                sums.update({name: rounds * value for name, value in _sums(body).items()})
            case "either", share, first, second:
                for weight, branch in ((share, first), (1 - share, second)):
                    sums.update({name: weight * value for name, value in _sums(branch).items()})
    return sums


def read(module: Module, cycles: Callable[[str], int | None] = lambda name: None) -> Program:
    """Returns the program that one run of the module executes.

    Args:
      module: the module of one device.
      cycles: returns the scheduled cycles of one run of an operation, given the name of its
        instruction; None if they are not known.
    """
    walk = _Walk(module, cycles)
    schedule = walk.run(module.entry, 1, "entry")
    return Program(
        schedule=tuple(schedule),
        kernels=_with_counts(walk.kernels),
        collectives=_with_counts(walk.collectives),
        operations={name: walk.operations[name] for name in _COUNTED if walk.operations[name]},
        endless=walk.endless,
        unscheduled=walk.unscheduled,
    )


def _with_counts(table: dict[Any, int]) -> tuple[Any, ...]:
    return tuple(dataclasses.replace(item, count=count) for item, count in table.items())


class _Walk:
    """Follows the computations in execution order, and counts their instructions."""

    def __init__(self, module: Module, cycles: Callable[[str], int | None]):
        self.module = module
        # Cycles of kernels and products, by identity: the compiler schedules equal ones only once.
        self.scheduled: dict[Any, int] = {}
        for computation in module.computations.values():
            for instr in computation.instructions:
                is_kernel = instr.target == KERNEL
                if is_kernel or (instr.estimated_cycles and work.is_product(module, instr)):
                    known = (instr.estimated_cycles if is_kernel else 0) or cycles(instr.name)
                    if known:
                        self.scheduled[work.identity(module, instr, computation)] = known
        self.unscheduled = 0
        self.kernels: dict[Kernel, int] = {}
        self.collectives: dict[Collective, int] = {}
        self.operations: collections.Counter[str] = collections.Counter()
        self.endless = 0

    def run(self, name: str | None, times: int, where: str) -> list[Step]:
        """Follows a computation that runs `times` times; returns the steps of one run."""
        computation = self.module.computations[name or ""]
        pending: dict[str, None] = {}  # names of starts without an end so far
        steps: list[Step] = []
        for instruction in computation.instructions:
            self.operations[instruction.opcode] += times
            key = {"fusion": "calls", "call-start": "to_apply"}.get(instruction.opcode)
            inside = self.module.computations[instruction.callee(key) or ""] if key else None
            started, may_end = _asynchronous(instruction, inside)
            if started is not None:
                collective = _collective(started, inside or computation, where)
                collective = dataclasses.replace(collective, asynchronous=True)
                number = _count(self.collectives, collective, times)
                steps.append(("start", number, instruction.name))
                pending[instruction.name] = None
            elif instruction.opcode in _FETCH_STARTS:
                steps.append(("fetch", work.fetch_bytes(instruction), instruction.name))
            elif instruction.opcode in _FETCH_ENDS:
                steps.append(("done", instruction.operands[0]))
            elif may_end and (start := _start_of(instruction, computation, pending)) is not None:
                del pending[start]
                steps.append(("done", start))
            if inside is None:
                steps += self._steps(instruction, computation, times, where)
            else:
                steps += self._fusion_steps(instruction, inside, times, where)
        return [*steps, *(("done", name) for name in pending)]

    def _steps(
        self, instruction: Instruction, computation: Computation, times: int, where: str
    ) -> list[Step]:
        """Returns the steps of an instruction that is no fusion, without its "start" or "done"."""
        match instruction.opcode:
            case "while":
                rounds = _rounds(self.module, instruction, computation)
                self.endless += rounds is None
                rounds = 1 if rounds is None else rounds
                body = self.run(instruction.callee("body"), times * rounds, "loop")
                return [("loop", rounds, tuple(body))]
            case "call":
                return self.run(instruction.callee("to_apply"), times, where)
            case "async-start":
                return self.run(instruction.callee("calls"), times, where)
            case "conditional":
                branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
                names = [instruction.callee(f"{word}_computation") for word in ("false", "true")]
                names = re.findall(r"[\w.\-]+", branches[1]) if branches else names
                held = _HELD.search(instruction.attributes)
                if not held or len(names) != 2:
                    # The text does not tell which branch runs; the longest is assumed.
                    branches = (self.run(name, times, where) for name in names)
                    return max(branches, key=lambda steps: sum(_sums(steps)[k] for k in KINDS))
                share = int(held[1]) / int(held[2])
                held_times = round(times * share)
                second = tuple(self.run(names[0], times - held_times, where))
                first = tuple(self.run(names[1], held_times, where))
                return [("either", share, first, second)]
        return self._fusion_steps(instruction, computation, times, where)

    def _fusion_steps(
        self, instruction: Instruction, inside: Computation, times: int, where: str
    ) -> list[Step]:
        """Returns the steps of a fusion, or of a plain instruction in the computation `inside`."""
        is_fusion = instruction.opcode == "fusion"
        root = inside.root
        # A TPU writes some reduce-scatters as an all-reduce, of which only a slice is computed.
        summed = None
        if is_fusion and root is not None and root.opcode == "dynamic-slice":
            summed = root.operands[0]
        # A TPU continues an asynchronous collective inside the fusions that hide it. The text shows
        # the whole collective in each of these fusions, with the same chain_id.
        is_continued = is_fusion and any(
            instr.opcode in COLLECTIVES and "chain_id=" in instr.attributes
            for instr in inside.instructions
        )
        steps: list[Step] = []
        cycles = instruction.estimated_cycles
        for instr in inside.instructions if is_fusion else [instruction]:
            if instr.opcode == "rng-bit-generator":
                steps.append(("bits", instr.bytes))
            elif instr.target == KERNEL:
                kernel = self._kernel(instr, inside)
                steps.append(("kernel", _count(self.kernels, kernel, times)))
                cycles = 0  # an estimate, which some compiler options give, is that of the kernel
            elif instr.opcode in COLLECTIVES and not is_continued:
                collective = _collective(instr, inside, where)
                if instr.name == summed and instr.opcode == "all-reduce":
                    collective = dataclasses.replace(collective, kind="reduce-scatter")
                number = _count(self.collectives, collective, times)
                steps += [("start", number, instr.name), ("done", instr.name)]
        return [*steps, self._work(instruction, inside, cycles, times)] if cycles else steps

    def _work(self, instruction: Instruction, inside: Computation, cycles: int, times: int) -> Step:
        """Returns the work of an instruction, which the compiler estimates at `cycles`."""
        if work.is_product(self.module, instruction):
            scheduled = self.scheduled.get(work.identity(self.module, instruction, inside))
            self.unscheduled += times * cycles * (scheduled is None)
            return "work", PRODUCTS, max(cycles, scheduled or 0), 0
        size = work.copy_bytes(instruction, inside) if work.is_copy(self.module, instruction) else 0
        return "work", COPIES if size else OTHER, cycles, size

    def _kernel(self, instruction: Instruction, computation: Computation) -> Kernel:
        identity = work.identity(self.module, instruction, computation)
        types = (computation.lookup[name].type for name in instruction.operands)
        size = sum(map(work.memory_bytes, (instruction.type, *types)))
        stated = re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes)
        return Kernel(
            name=instruction.name.rstrip(".0123456789"),
            count=0,
            cycles=self.scheduled.get(identity),
            bytes=min(size, int(stated[1])) if stated else size,
        )


def _asynchronous(
    instruction: Instruction, inside: Computation | None
) -> tuple[Instruction | None, bool]:
    """Returns the collective that an instruction starts, if any, and whether it may end one.

    A start or an end is an instruction of its own, a fusion that calls a TPU's own operation, or a
    call of work on a SparseCore.
    """
    if inside is None:
        opcode = instruction.opcode
        starts = opcode.endswith("-start") and opcode.removesuffix("-start") in COLLECTIVES
        starts |= opcode == SEND
        # A synchronous collective also waits for the start of which it uses the result.
        may_end = opcode.removesuffix("-done") in (*COLLECTIVES, SEND, "call")
        return instruction if starts else None, may_end
    if instruction.opcode == "call-start":
        root = inside.root
        return root if root is not None and root.opcode in COLLECTIVES else None, False
    targets = {instr.target for instr in inside.instructions}
    collectives = (instr for instr in inside.instructions if instr.opcode in COLLECTIVES)
    started = next(collectives, None) if "AsyncCollectiveStart" in targets else None
    return started, "AsyncCollectiveDone" in targets


def _count(table: dict[Any, int], item: Any, times: int) -> int:
    """Adds runs of an item to a table; returns the item's index in it."""
    table[item] = table.get(item, 0) + times
    return list(table).index(item)


def _start_of(
    instruction: Instruction, computation: Computation, pending: Container[str]
) -> str | None:
    """Returns the name of the start that an end waits for, by the chain of first operands."""
    name = instruction.operands[0] if instruction.operands else None
    while name is not None and name not in pending:
        operand = computation.lookup.get(name)
        name = operand.operands[0] if operand is not None and operand.operands else None
    return name


def _collective(instruction: Instruction, computation: Computation, where: str) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    size = sum(computation.lookup[name].bytes for name in instruction.operands)
    group: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    if kind == "collective-permute":
        listed = re.search(r"source_target_pairs=\{([\d,{}]*?)\}\}", instruction.attributes)
        numbers = [int(n) for n in re.findall(r"\d+", listed[1])] if listed else []
        pairs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    elif kind != SEND:
        group = _group(instruction)
    payload = size * len(group) if kind == "all-gather" else size
    emitter = re.search(r'"emitter":"(\w+)"', instruction.attributes)
    return Collective(
        kind=kind,
        count=0,
        payload=payload,
        group=group,
        pairs=pairs,
        where=where,
        emitter=emitter[1] if emitter else "",
    )


def _group(instruction: Instruction) -> tuple[int, ...]:
    """Returns the first of the groups, which the text writes in one of three forms."""
    text = instruction.attributes
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return tuple(int(n) for n in listed[1].split(",") if n)
    # [groups,size]<=[dimensions]T(permutation): numbers in the order of a transposed array.
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        return tuple(_transposed_iota(iota[2], iota[3])[: int(iota[1])])
    # mesh['a'=2,'b'=8] {'a','b':(2)4}: along axes of a mesh, or along 4 parts within each 2nd. Its
    # devices may have the order of a transposed array: mesh[...], device_ids=([8,2]T(1,0)) {...}.
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\]"
        r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}",
        text,
    )
    axes: dict[str, tuple[int, int]] = {}
    devices = 1
    for name, size in reversed(re.findall(r"([^,=]+)=(\d+)", mesh[1] if mesh else "")):
        axes[name] = int(size), devices
        devices *= int(size)
    ordered = _transposed_iota(mesh[2] or f"{devices}", mesh[3]) if mesh else []
    if mesh is None or len(ordered) != devices:
        raise ValueError(f"{instruction.opcode} {instruction.name}: no groups in {text[:120]!r}")
    members = [0]
    for name, outer, parts in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?", mesh[4]):
        size, stride = axes[name]
        if parts:
            stride *= size // (int(outer) * int(parts))
            size = int(parts)
        members = [member + stride * n for member in members for n in range(size)]
    return tuple(ordered[member] for member in members)


def _transposed_iota(dimensions: str, permutation: str | None) -> list[int]:
    """Returns 0, 1, ... as an array of these dimensions, transposed and flattened."""
    sizes = [int(n) for n in dimensions.split(",")]
    order = [int(n) for n in permutation.split(",")] if permutation else range(len(sizes))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).flatten().tolist()


def _rounds(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """Returns the rounds of a loop `while counter < limit` with constant start and steps of 1."""
    condition = module.computations[loop.callee("condition") or ""]
    compare = condition.root
    if compare is None or compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = (condition.lookup[name] for name in compare.operands)
    last = _constant(limit, condition)
    index = re.search(r"\bindex=(\d+)", counter.attributes)
    if last is None or counter.opcode != "get-tuple-element" or index is None:
        return None
    values = computation.lookup[loop.operands[0]]
    if values.opcode != "tuple":
        return None
    first = _constant(computation.lookup[values.operands[int(index[1])]], computation)
    return None if first is None else last - first


def _constant(instruction: Instruction, computation: Computation) -> int | None:
    """Returns the integer value of an instruction, if it is a constant."""
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.lookup[instruction.operands[0]]
    if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.argument):
        return int(instruction.argument)
    return None
