"""Reads the schedule of a compiled training step from its module.

The text of a module contains neither the number of iterations of loops nor the time of custom
kernels, random bits and collectives. `read_program` follows the module in execution order and
returns a schedule: work, kernels, and the starts and ends of collectives, in loops.
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
# The opcode that starts a sum over slices, through the network between them.
SEND = "send"
# Opcodes whose counts are stored, since a changed count shows a changed program.
_COUNTED = ("fusion", "copy", "convolution", "custom-call", "rng-bit-generator", "transpose")
# Target of the custom call of a custom kernel (Pallas).
KERNEL_TARGET = "tpu_custom_call"
# Opcodes that start and end a copy of an array, or of a part of it, during other work.
_FETCH_STARTS, _FETCH_ENDS = ("copy-start", "slice-start"), ("copy-done", "slice-done")

# A name scope around a `lax.cond` that tells how often its condition holds: held_8_of_22 for 8 of
# 22 times.
_HELD = re.compile(r'op_name="[^"]*\bheld_(\d+)_of_(\d+)\b')

# An action of a device, as stored in JSON: a kind with arguments.
#   "work", one of KINDS, cycles, bytes     ordinary instructions; the bytes are those of copies
#   "bits", bytes                           draws random bits
#   "kernel", index in `Program.kernels`
#   "start", index in `Program.collectives`, name of the instruction
#   "fetch", bytes, name                    starts a transfer from or to the device's memory
#   "done", name                            waits for the collective or the fetch of that name
#   "loop", iterations, actions
#   "either", share, actions, other actions     branches; the first runs in this share of cases
Action = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of the program, counted together with all equal ones."""

    kind: str  # one of COLLECTIVES, or SEND
    count: int  # runs in a step
    # Bytes of the whole array on a device: the operand of an all-reduce, a reduce-scatter or a
    # permutation, the result of an all-gather.
    payload: int
    # Devices of the first of its groups, by their indices in the mesh; empty for a permutation.
    group: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] = ()  # (source, target) devices of a permutation
    where: str  # "entry" of the program, or body of a "loop"
    asynchronous: bool = False  # whether one instruction starts it and another waits for it
    emitter: str = ""  # the compiler's name of its algorithm; "" if there is none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A custom kernel (Pallas). By default the compiler does not estimate its cycles."""

    name: str  # name of its operation
    count: int  # runs in a step
    cycles: int | None  # estimated or scheduled cycles of one run; None if not known
    # Bytes that one run reads from and writes to the device's memory (HBM); at most its
    # `bytes_accessed`, if stated, since a kernel may read only a part of an array.
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The compiled training step of one device."""

    schedule: tuple[Action, ...]  # in the order of execution
    kernels: tuple[Kernel, ...]  # distinct custom kernels
    collectives: tuple[Collective, ...]  # distinct collectives
    operations: dict[str, int]  # {opcode: runs}, for some opcodes
    endless: int  # number of loops of unknown length, counted as one iteration each
    # Estimated cycles of PRODUCTS whose bundles, the compiler's schedule, are not known.
    unscheduled: int = 0

    @functools.cached_property
    def sums(self) -> dict[str, int]:
        """Cycles of each of KINDS, and the bytes `copied`, `drawn` (random bits) and `fetched`."""
        sums = dict.fromkeys((*KINDS, "copied", "drawn", "fetched"), 0)
        return sums | {name: round(value) for name, value in _sums(self.schedule).items()}


def _sums(actions: Sequence[Action]) -> collections.Counter[str]:
    """Returns the sums of `Program.sums` over some actions; branches count by their share."""
    sums: collections.Counter[str] = collections.Counter()
    for action in actions:
        match action:
            case "work", kind, cycles, size:
                sums.update({kind: cycles, "copied": size})
            case "bits", size:
                sums["drawn"] += size
            case "fetch", size, _:
                sums["fetched"] += size
            case "loop", iterations, body:
                sums.update({name: iterations * value for name, value in _sums(body).items()})
            case "either", share, first, second:
                for weight, branch in ((share, first), (1 - share, second)):
                    sums.update({name: weight * value for name, value in _sums(branch).items()})
    return sums


def read_program(
    module: Module, cycles_of: Callable[[str], int | None] = lambda name: None
) -> Program:
    """Returns the program of one device's module.

    `cycles_of` looks up the scheduled cycles of an instruction by its name; None if not known.
    """
    reader = _ModuleReader(module, cycles_of)
    return Program(
        schedule=tuple(reader.follow(module.entry, 1, "entry")),
        kernels=_with_counts(reader.kernels),
        collectives=_with_counts(reader.collectives),
        operations={name: reader.operations[name] for name in _COUNTED if reader.operations[name]},
        endless=reader.unknown_loops,
        unscheduled=reader.unscheduled,
    )


def _with_counts(table: dict[Any, int]) -> tuple[Any, ...]:
    """Returns the keys, made with a count of 0, with their counts."""
    return tuple(dataclasses.replace(item, count=count) for item, count in table.items())


class _ModuleReader:
    """Follows the computations in execution order, and counts their instructions."""

    def __init__(self, module: Module, cycles_of: Callable[[str], int | None]):
        self.module = module
        # Cycles of kernels and products by identity, since the compiler writes only one schedule
        # for equal ones. If the compiler estimates those of a kernel, the estimate is taken.
        self.known_cycles: dict[Any, int] = {}
        for computation in module.computations.values():
            for instr in computation.instructions:
                is_kernel = instr.target == KERNEL_TARGET
                if is_kernel or (instr.estimated_cycles and work.is_product(module, instr)):
                    known = (is_kernel and instr.estimated_cycles) or cycles_of(instr.name)
                    if known:
                        self.known_cycles[work.identity(module, instr, computation)] = known
        self.unscheduled = 0
        self.kernels: dict[Kernel, int] = {}
        self.collectives: dict[Collective, int] = {}
        self.operations: collections.Counter[str] = collections.Counter()
        self.unknown_loops = 0

    def follow(self, name: str, count: int, where: str) -> list[Action]:
        """Counts `count` runs of a computation; returns the actions of one run."""
        computation = self.module.computations[name]
        pending: dict[str, None] = {}  # names of starts without an end so far
        actions: list[Action] = []
        for instruction in computation.instructions:
            self.operations[instruction.opcode] += count
            attribute = {"fusion": "calls", "call-start": "to_apply"}.get(instruction.opcode)
            called = self.module.computations[instruction.callee(attribute)] if attribute else None
            started, may_end = _classify_asynchronous(instruction, called)
            if started is not None:
                collective = _make_collective(started, called or computation, where)
                collective = dataclasses.replace(collective, asynchronous=True)
                number = _add_runs(self.collectives, collective, count)
                actions.append(("start", number, instruction.name))
                pending[instruction.name] = None
            elif instruction.opcode in _FETCH_STARTS:
                actions.append(("fetch", work.fetch_bytes(instruction), instruction.name))
            elif instruction.opcode in _FETCH_ENDS:
                actions.append(("done", instruction.operands[0]))
            elif may_end and (start := _find_start(instruction, computation, pending)) is not None:
                del pending[start]
                actions.append(("done", start))
            if called is None:
                actions += self._instruction_actions(instruction, computation, count, where)
            else:
                actions += self._operation_actions(instruction, called, count, where)
        return [*actions, *(("done", name) for name in pending)]

    def _instruction_actions(
        self, instruction: Instruction, computation: Computation, count: int, where: str
    ) -> list[Action]:
        """Returns the actions of an instruction other than a fusion, except "start" and "done"."""
        match instruction.opcode:
            case "while":
                iterations = _count_iterations(self.module, instruction, computation)
                self.unknown_loops += iterations is None
                iterations = 1 if iterations is None else iterations
                body = self.follow(instruction.callee("body"), count * iterations, "loop")
                return [("loop", iterations, tuple(body))]
            case "call":
                return self.follow(instruction.callee("to_apply"), count, where)
            case "async-start":
                return self.follow(instruction.callee("calls"), count, where)
            case "conditional":
                listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
                names = [instruction.callee(f"{word}_computation") for word in ("false", "true")]
                names = re.findall(r"[\w.\-]+", listed[1]) if listed else names
                held = _HELD.search(instruction.attributes)
                if not held or len(names) != 2:
                    # The text does not tell which branch runs: the longest is timed, all counted.
                    branches = (self.follow(name, count, where) for name in names)
                    return max(branches, key=lambda actions: sum(_sums(actions)[k] for k in KINDS))
                share = int(held[1]) / int(held[2])
                held_count = round(count * share)
                second = tuple(self.follow(names[0], count - held_count, where))
                first = tuple(self.follow(names[1], held_count, where))
                return [("either", share, first, second)]
        return self._operation_actions(instruction, computation, count, where)

    def _operation_actions(
        self, instruction: Instruction, scope: Computation, count: int, where: str
    ) -> list[Action]:
        """Returns the actions of an operation; `scope` is what a fusion calls, or where it is."""
        is_fusion = instruction.opcode == "fusion"
        root = scope.root
        # For a TPU, some reduce-scatters are all-reduces in a fusion that computes only a slice.
        sliced = None
        if is_fusion and root is not None and root.opcode == "dynamic-slice":
            sliced = root.operands[0]
        # A TPU continues an asynchronous collective inside the fusions that hide it. The text shows
        # the whole collective in each of these fusions, with the same chain_id.
        is_continued = is_fusion and any(
            instr.opcode in COLLECTIVES and "chain_id=" in instr.attributes
            for instr in scope.instructions
        )
        actions: list[Action] = []
        cycles = instruction.estimated_cycles
        for instr in scope.instructions if is_fusion else [instruction]:
            if instr.opcode == "rng-bit-generator":
                actions.append(("bits", instr.bytes))
            elif instr.target == KERNEL_TARGET:
                kernel = self._make_kernel(instr, scope)
                actions.append(("kernel", _add_runs(self.kernels, kernel, count)))
                cycles = 0  # they are counted with the kernel
            elif instr.opcode in COLLECTIVES and not is_continued:
                collective = _make_collective(instr, scope, where)
                if instr.name == sliced and instr.opcode == "all-reduce":
                    collective = dataclasses.replace(collective, kind="reduce-scatter")
                number = _add_runs(self.collectives, collective, count)
                actions += [("start", number, instr.name), ("done", instr.name)]
        if cycles:
            actions.append(self._work_action(instruction, scope, count))
        return actions

    def _work_action(self, instruction: Instruction, scope: Computation, count: int) -> Action:
        cycles = instruction.estimated_cycles
        if work.is_product(self.module, instruction):
            scheduled = self.known_cycles.get(work.identity(self.module, instruction, scope))
            self.unscheduled += count * cycles * (scheduled is None)
            return "work", PRODUCTS, max(cycles, scheduled or 0), 0
        size = work.copy_bytes(instruction, scope) if work.is_copy(self.module, instruction) else 0
        return "work", COPIES if size else OTHER, cycles, size

    def _make_kernel(self, instruction: Instruction, computation: Computation) -> Kernel:
        identity = work.identity(self.module, instruction, computation)
        types = (computation.lookup[name].type for name in instruction.operands)
        size = sum(map(work.memory_bytes, (instruction.type, *types)))
        stated = re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes)
        return Kernel(
            name=instruction.name.rstrip(".0123456789"),
            count=0,
            cycles=self.known_cycles.get(identity),
            bytes=min(size, int(stated[1])) if stated else size,
        )


def _classify_asynchronous(
    instruction: Instruction, called: Computation | None
) -> tuple[Instruction | None, bool]:
    """Returns the collective that an instruction starts, if any, and whether it may end one.

    A start or an end is an instruction of its own, a fusion that contains the custom call
    AsyncCollectiveStart or AsyncCollectiveDone, or a call of a computation on a SparseCore.
    `called` is the computation of a fusion or a call.
    """
    if called is None:
        opcode = instruction.opcode
        starts = opcode.endswith("-start") and opcode.removesuffix("-start") in COLLECTIVES
        starts |= opcode == SEND
        # A synchronous collective is also an end: it waits for a start whose result it reads.
        may_end = opcode.removesuffix("-done") in (*COLLECTIVES, SEND, "call")
        return instruction if starts else None, may_end
    if instruction.opcode == "call-start":
        root = called.root
        return root if root is not None and root.opcode in COLLECTIVES else None, False
    targets = {instr.target for instr in called.instructions}
    collectives = (instr for instr in called.instructions if instr.opcode in COLLECTIVES)
    started = next(collectives, None) if "AsyncCollectiveStart" in targets else None
    return started, "AsyncCollectiveDone" in targets


def _add_runs(table: dict[Any, int], item: Any, count: int) -> int:
    """Adds runs of an item to a table; returns the item's index in it."""
    table[item] = table.get(item, 0) + count
    return list(table).index(item)


def _find_start(
    instruction: Instruction, computation: Computation, pending: Container[str]
) -> str | None:
    """Returns the name of the start that an end waits for, by the chain of first operands."""
    name = instruction.operands[0] if instruction.operands else None
    while name is not None and name not in pending:
        operand = computation.lookup.get(name)
        name = operand.operands[0] if operand is not None and operand.operands else None
    return name


def _make_collective(instruction: Instruction, computation: Computation, where: str) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    size = sum(computation.lookup[name].bytes for name in instruction.operands)
    group: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    if kind == "collective-permute":
        listed = re.search(r"source_target_pairs=\{([\d,{}]*?)\}\}", instruction.attributes)
        numbers = [int(n) for n in re.findall(r"\d+", listed[1])] if listed else []
        pairs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    elif kind != SEND:
        group = _first_group(instruction)
    emitter = re.search(r'"emitter":"(\w+)"', instruction.attributes)
    return Collective(
        kind=kind,
        count=0,
        payload=size * len(group) if kind == "all-gather" else size,
        group=group,
        pairs=pairs,
        where=where,
        emitter=emitter[1] if emitter else "",
    )


def _first_group(instruction: Instruction) -> tuple[int, ...]:
    """Returns the first of the groups, which the text writes in one of three forms."""
    text = instruction.attributes
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return tuple(int(n) for n in listed[1].split(",") if n)
    # [groups,size]<=[dimensions]T(permutation): numbers in the order of a transposed array.
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        return tuple(_transposed_iota(iota[2], iota[3])[: int(iota[1])])
    # mesh['a'=2,'b'=8] {'a','b':(1)4}: along axes of a mesh, or along a part of an axis: b is taken
    # as an array of dimensions (1, 4, 2), and :(1)4 is its middle dimension, of size 4. The devices
    # may have the order of a transposed array: mesh[...], device_ids=([8,2]T(1,0)) {...}.
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
    for name, outer, middle in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?", mesh[4]):
        size, stride = axes[name]
        if middle:
            stride *= size // (int(outer) * int(middle))
            size = int(middle)
        members = [member + stride * n for member in members for n in range(size)]
    return tuple(ordered[member] for member in members)


def _transposed_iota(dimensions: str, permutation: str | None) -> list[int]:
    """Returns 0, 1, ... as an array of these dimensions, transposed and flattened."""
    sizes = [int(n) for n in dimensions.split(",")]
    order = [int(n) for n in permutation.split(",")] if permutation else range(len(sizes))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).flatten().tolist()


def _count_iterations(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """Returns the iterations of `while counter < limit` from a constant; assumes steps of 1."""
    condition = module.computations[loop.callee("condition")]
    compare = condition.root
    if compare is None or compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = (condition.lookup[name] for name in compare.operands)
    end = _constant_value(limit, condition)
    index = re.search(r"\bindex=(\d+)", counter.attributes)
    if end is None or counter.opcode != "get-tuple-element" or index is None:
        return None
    values = computation.lookup[loop.operands[0]]
    if values.opcode != "tuple":
        return None
    start = _constant_value(computation.lookup[values.operands[int(index[1])]], computation)
    return None if start is None else end - start


def _constant_value(instruction: Instruction, computation: Computation) -> int | None:
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.lookup[instruction.operands[0]]
    if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.argument):
        return int(instruction.argument)
    return None
