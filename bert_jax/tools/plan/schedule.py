"""What a compiled training step does, in order, read from its module.

The text of a module does not hold how often loops run, nor the time of custom kernels, random bits
and collectives. `read` walks through it as it runs and gives a schedule: work, kernels, and where
collectives begin and are waited for, in loops of so many rounds.
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
# What a device gives to the network between slices, which gives back the sum over slices.
SEND = "send"
# Kept because a change of their number is a change of the program.
_COUNTED = ("fusion", "copy", "convolution", "custom-call", "rng-bit-generator", "transpose")
# What calls a custom kernel (Pallas).
KERNEL = "tpu_custom_call"
# What copies, or a part of an array, while other work goes on, and what waits for it.
_FETCHES, _FETCHED = ("copy-start", "slice-start"), ("copy-done", "slice-done")

# How often the condition of a `lax.cond` holds, in a name scope around it that says so: of 22
# times 8, held_8_of_22.
_HELD = re.compile(r'op_name="[^"]*\bheld_(\d+)_of_(\d+)\b')

# What a device does next: a word, and what goes with it, as JSON keeps it.
#   "work", one of KINDS, cycles, bytes     ordinary instructions; bytes are of copies alone
#   "bits", bytes                           random ones are drawn
#   "kernel", place in `Program.kernels`
#   "start", place in `Program.collectives`, name of the instruction
#   "fetch", bytes, name                    go from or to the device's memory meanwhile
#   "done", name                            the collective or the bytes of that start are waited for
#   "loop", rounds, steps
#   "either", share, steps, other steps      the former in so large a share of its runs
Step = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of the program, with all that are like it."""

    kind: str  # one of COLLECTIVES, or SEND
    count: int  # runs in a step
    # Bytes of the whole array that each device holds before or after it: the operand of an
    # all-reduce, a reduce-scatter or a permutation, the result of an all-gather.
    payload: int
    # Devices, by their places in the mesh, of the first of the groups that it joins; of a
    # permutation none.
    group: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] = ()  # devices that a permutation goes from and to
    where: str  # in the entry of the program, or in the body of a loop
    asynchronous: bool = False  # whether one instruction begins it and another waits for it
    emitter: str = ""  # what the compiler calls the way in which it is done; "" if it does not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A custom kernel (Pallas), to the compiler of the module a box that takes no time."""

    name: str  # of its operation
    count: int  # runs in a step
    cycles: int | None  # of one run, as the compiler schedules it; None where that is not known
    # Bytes that one run reads from and writes to the device's memory (HBM); at most what its author
    # states, since it may read only a part of an array.
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A step on one device."""

    schedule: tuple[Step, ...]  # what is done, in order
    kernels: tuple[Kernel, ...]  # custom ones that differ
    collectives: tuple[Collective, ...]  # those that differ
    operations: dict[str, int]  # how often some kinds of operation run
    endless: int  # loops whose number of rounds is not in the text; they are counted once
    # Cycles of PRODUCTS by the compiler's estimate alone, since no schedule of theirs is known.
    unscheduled: int = 0

    @functools.cached_property
    def sums(self) -> dict[str, int]:
        """Cycles of each of KINDS; bytes `copied`, of random bits `drawn`, and `fetched`."""
        sums = dict.fromkeys((*KINDS, "copied", "drawn", "fetched"), 0)
        return sums | {name: round(value) for name, value in _sums(self.schedule).items()}


def _sums(steps: Sequence[Step]) -> collections.Counter[str]:
    """Returns what `Program.sums` has, of some steps; fractions of what is done sometimes."""
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
                for part, run in ((share, first), (1 - share, second)):
                    sums.update({name: part * value for name, value in _sums(run).items()})
    return sums


def read(module: Module, cycles: Callable[[str], int | None] = lambda name: None) -> Program:
    """Returns what one run of the module does.

    Args:
      module: of one device.
      cycles: gives those of one run of an operation, as the compiler schedules it, by the name of
        its instruction; None where it does not know them.
    """
    walk = _Walk(module, cycles)
    schedule = walk.run(module.entry, 1, "entry")
    return Program(
        schedule=tuple(schedule),
        kernels=_counted(walk.kernels),
        collectives=_counted(walk.collectives),
        operations={name: walk.operations[name] for name in _COUNTED if walk.operations[name]},
        endless=walk.endless,
        unscheduled=walk.unscheduled,
    )


def _counted(table: dict[Any, int]) -> tuple[Any, ...]:
    return tuple(dataclasses.replace(one, count=count) for one, count in table.items())


class _Walk:
    """Walks through the computations as they run, and counts what they hold."""

    def __init__(self, module: Module, cycles: Callable[[str], int | None]):
        self.module = module
        # Cycles of kernels and products, by identity: the compiler schedules equal ones only once.
        self.scheduled: dict[Any, int] = {}
        for computation in module.computations.values():
            for one in computation.instructions:
                is_kernel = one.target == KERNEL
                if is_kernel or (one.estimated_cycles and work.is_product(module, one)):
                    known = (one.estimated_cycles if is_kernel else 0) or cycles(one.name)
                    if known:
                        self.scheduled[work.identity(module, one, computation)] = known
        self.unscheduled = 0
        self.kernels: dict[Kernel, int] = {}
        self.collectives: dict[Collective, int] = {}
        self.operations: collections.Counter[str] = collections.Counter()
        self.endless = 0

    def run(self, name: str | None, times: int, where: str) -> list[Step]:
        """Walks through a computation that runs `times` times; returns the steps of one run."""
        computation = self.module.computations[name or ""]
        begun: dict[str, None] = {}
        steps: list[Step] = []
        for instruction in computation.instructions:
            self.operations[instruction.opcode] += times
            holds = {"fusion": "calls", "call-start": "to_apply"}.get(instruction.opcode)
            inside = self.module.computations[instruction.callee(holds) or ""] if holds else None
            begins, ends = _asynchronous(instruction, inside)
            if begins is not None:
                start = _collective(begins, inside or computation, where)
                start = dataclasses.replace(start, asynchronous=True)
                steps.append(("start", _count(self.collectives, start, times), instruction.name))
                begun[instruction.name] = None
            elif instruction.opcode in _FETCHES:
                steps.append(("fetch", work.fetch_bytes(instruction), instruction.name))
            elif instruction.opcode in _FETCHED:
                steps.append(("done", instruction.operands[0]))
            elif ends and begun and (began := _origin(instruction, computation, begun)) is not None:
                del begun[began]
                steps.append(("done", began))
            if inside is None:
                steps += self._steps(instruction, computation, times, where)
            else:
                steps += self._performed(instruction, inside, times, where)
        return [*steps, *(("done", name) for name in begun)]

    def _steps(
        self, instruction: Instruction, computation: Computation, times: int, where: str
    ) -> list[Step]:
        """Returns what an instruction does that is no fusion, besides beginning or ending."""
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
                    # Nothing says which; the longest is meant.
                    runs = (self.run(name, times, where) for name in names)
                    return max(runs, key=lambda run: sum(_sums(run)[kind] for kind in KINDS))
                share = int(held[1]) / int(held[2])
                often = round(times * share)
                second = tuple(self.run(names[0], times - often, where))
                first = tuple(self.run(names[1], often, where))
                return [("either", share, first, second)]
        return self._performed(instruction, computation, times, where)

    def _performed(
        self, instruction: Instruction, inside: Computation, times: int, where: str
    ) -> list[Step]:
        """Returns what a fusion does, or an instruction by itself, which is `inside` its own."""
        fused = instruction.opcode == "fusion"
        root = inside.root
        # A TPU writes some reduce-scatters as the sum of all, of which a slice alone is made.
        summed = None
        if fused and root is not None and root.opcode == "dynamic-slice":
            summed = root.operands[0]
        # It carries an asynchronous collective on inside the fusions that hide it. The text shows
        # it whole in each of them, marked as a link of one chain.
        carried_on = fused and any(
            one.opcode in COLLECTIVES and "chain_id=" in one.attributes
            for one in inside.instructions
        )
        steps: list[Step] = []
        cycles = instruction.estimated_cycles
        for one in inside.instructions if fused else [instruction]:
            if one.opcode == "rng-bit-generator":
                steps.append(("bits", one.bytes))
            elif one.target == KERNEL:
                kernel = self._kernel(one, inside)
                steps.append(("kernel", _count(self.kernels, kernel, times)))
                cycles = 0  # some compilers' options give a kernel an estimate: it is the kernel's
            elif one.opcode in COLLECTIVES and not carried_on:
                collective = _collective(one, inside, where)
                if one.name == summed and one.opcode == "all-reduce":
                    collective = dataclasses.replace(collective, kind="reduce-scatter")
                number = _count(self.collectives, collective, times)
                steps += [("start", number, one.name), ("done", one.name)]
        return [*steps, self._work(instruction, inside, cycles, times)] if cycles else steps

    def _work(self, instruction: Instruction, inside: Computation, cycles: int, times: int) -> Step:
        """Returns the work of an instruction that the compiler estimates at so many cycles."""
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
    """Returns the collective that begins here and ends elsewhere; whether one may end here.

    Either is an instruction of its own, or a fusion that calls what a TPU has for it, or a call of
    what a SparseCore does meanwhile.
    """
    if inside is None:
        opcode = instruction.opcode
        begins = opcode.endswith("-start") and opcode.removesuffix("-start") in COLLECTIVES
        # A synchronous one that is computed from what has begun waits for it, too.
        begins |= opcode == SEND
        ends = opcode.removesuffix("-done") in (*COLLECTIVES, SEND, "call")
        return instruction if begins else None, ends
    if instruction.opcode == "call-start":
        root = inside.root
        return root if root is not None and root.opcode in COLLECTIVES else None, False
    targets = {one.target for one in inside.instructions}
    held = (one for one in inside.instructions if one.opcode in COLLECTIVES)
    begins = next(held, None) if "AsyncCollectiveStart" in targets else None
    return begins, "AsyncCollectiveDone" in targets


def _count(table: dict[Any, int], one: Any, times: int) -> int:
    """Counts what runs so often; returns its place among all that differ."""
    table[one] = table.get(one, 0) + times
    return list(table).index(one)


def _origin(
    instruction: Instruction, computation: Computation, begun: Container[str]
) -> str | None:
    """Returns the name of the start of an end, through what hands its first part on."""
    name = instruction.operands[0] if instruction.operands else None
    while name is not None and name not in begun:
        before = computation.lookup.get(name)
        name = before.operands[0] if before is not None and before.operands else None
    return name


def _collective(instruction: Instruction, computation: Computation, where: str) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    held = sum(computation.lookup[name].bytes for name in instruction.operands)
    group: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    if kind == "collective-permute":
        listed = re.search(r"source_target_pairs=\{([\d,{}]*?)\}\}", instruction.attributes)
        numbers = [int(n) for n in re.findall(r"\d+", listed[1])] if listed else []
        pairs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    elif kind != SEND:
        group = _group(instruction)
    payload = held * len(group) if kind == "all-gather" else held
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
    """Returns the first of the groups, which are written in one of three ways."""
    text = instruction.attributes
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return tuple(int(n) for n in listed[1].split(",") if n)
    # [groups,size]<=[dimensions]T(permutation): counted through in the order of the permutation.
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if counted:
        return tuple(_counted_through(counted[2], counted[3])[: int(counted[1])])
    # mesh['a'=2,'b'=8] {'a','b':(2)4}: along axes of a mesh, or along 4 parts within each 2nd. Its
    # devices may be counted through in an order, too: mesh[...], device_ids=([8,2]T(1,0)) {...}.
    meshed = re.search(
        r"replica_groups=mesh\[([^\]]*)\]"
        r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}",
        text,
    )
    axes: dict[str, tuple[int, int]] = {}
    devices = 1
    for name, size in reversed(re.findall(r"([^,=]+)=(\d+)", meshed[1] if meshed else "")):
        axes[name] = int(size), devices
        devices *= int(size)
    ordered = _counted_through(meshed[2] or f"{devices}", meshed[3]) if meshed else []
    if meshed is None or len(ordered) != devices:
        raise ValueError(f"{instruction.opcode} {instruction.name}: no groups in {text[:120]!r}")
    members = [0]
    for name, before, within in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?", meshed[4]):
        size, stride = axes[name]
        if within:
            stride *= size // (int(before) * int(within))
            size = int(within)
        members = [member + stride * n for member in members for n in range(size)]
    return tuple(ordered[member] for member in members)


def _counted_through(dimensions: str, permutation: str | None) -> list[int]:
    """Returns the numbers of an array of these dimensions, read in the order of a permutation."""
    sizes = [int(n) for n in dimensions.split(",")]
    order = [int(n) for n in permutation.split(",")] if permutation else range(len(sizes))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).flatten().tolist()


def _rounds(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """Returns the rounds of a loop `while counter < limit`, from a constant on, by ones."""
    condition = module.computations[loop.callee("condition") or ""]
    compare = condition.root
    if compare is None or compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = (condition.lookup[name] for name in compare.operands)
    last = _constant(limit, condition)
    place = re.search(r"\bindex=(\d+)", counter.attributes)
    if last is None or counter.opcode != "get-tuple-element" or place is None:
        return None
    values = computation.lookup[loop.operands[0]]
    if values.opcode != "tuple":
        return None
    first = _constant(computation.lookup[values.operands[int(place[1])]], computation)
    return None if first is None else last - first


def _constant(instruction: Instruction, computation: Computation) -> int | None:
    """Returns the whole number that an instruction stands for, if it is a constant."""
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.lookup[instruction.operands[0]]
    if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.argument):
        return int(instruction.argument)
    return None
