"""What one operation of a TPU's program is: a matrix product, a copy, or something else.

What it is decides how its time is estimated (see `estimate`).
"""

import re
from collections.abc import Hashable, Iterator

from bert_jax.tools.plan.hlo import Computation, Instruction, Module, type_bytes

# Matrix products, with all that is fused into them; what moves bytes of the device's memory (HBM)
# and computes nothing; all else.
KINDS = PRODUCTS, COPIES, OTHER = "products", "copies", "other"

_MULTIPLY = {"convolution", "dot"}
# They move nothing, or move and compute nothing.
_MOVE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "fusion", "copy"}
_MOVE |= {"convert", "reduce-precision", "reshape", "transpose", "broadcast", "concatenate", "pad"}
_PARTS, _INTO = ("slice", "dynamic-slice", "gather"), "dynamic-update-slice"
_MOVE |= {"slice", "dynamic-slice", _INTO}
# An array, with its layout; one in the memory of the chip itself (VMEM), which the layout says.
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\([1-9]\)[^}]*\}")
_CALLS = ("calls", "to_apply")
# What differs between operations that are scheduled alike.
_INCIDENTAL = re.compile(
    r"(?:metadata|frontend_attributes)=\{[^}]*\}|backend_config=.*|%[\w.\-]+"
    r"|channel_id=\d+|replica_groups=\S+"  # of a collective that is carried on in it
)


def is_product(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction multiplies matrices, alone or in a fusion."""
    return any(one.opcode in _MULTIPLY for one in _performed(module, instruction))


def is_copy(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction moves bytes, and computes no more than places of parts."""
    done = _performed(module, instruction)
    return all(one.opcode in _MOVE or re.match(r"\w+\[\]", one.type) for one in done)


def _performed(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yields an instruction, and what it holds if it is a fusion."""
    yield instruction
    if instruction.opcode == "fusion":
        for one in module.computations[instruction.callee("calls") or ""].instructions:
            yield from _performed(module, one)


def memory_bytes(type_: str) -> int:
    """Returns the bytes of those arrays of a type that lie in the device's memory."""
    return type_bytes(_ON_CHIP.sub("", type_))


def copy_bytes(copy: Instruction, inside: Computation) -> int:
    """Returns the bytes of the device's memory that a copy reads and writes.

    If it reads or writes only a part of an array, only that part counts. `inside` is the fusion's
    computation, or the computation in which a plain copy stands.
    """
    if copy.opcode != "fusion" or inside.root is None:
        read = (memory_bytes(inside.lookup[name].type) for name in copy.operands[:1])
        return memory_bytes(copy.type) + min(*read, copy.bytes if copy.opcode in _PARTS else 2**63)
    root = inside.root
    made = [inside.lookup[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = 0
    for one, type_ in zip(made, _ARRAY.findall(copy.type), strict=True):
        while one.opcode == "bitcast":
            one = inside.lookup[one.operands[0]]
        if one.opcode == _INTO and memory_bytes(type_):
            written += inside.lookup[one.operands[1]].bytes
        else:
            written += memory_bytes(type_)
    given = (one for one in inside.instructions if one.opcode == "parameter")
    return written + sum(min(memory_bytes(one.type), _bytes_read(one, inside)) for one in given)


def _bytes_read(array: Instruction, inside: Computation) -> int:
    """Returns how many bytes of an array are read, those of whole arrays or of their parts."""
    size = 0
    for user in inside.instructions:
        if array.name not in user.operands:
            continue
        if user.opcode == "bitcast":
            size += _bytes_read(user, inside)
        elif user.operands[0] != array.name or user.opcode not in (*_PARTS, _INTO):
            size += array.bytes
        elif user.opcode != _INTO:
            size += user.bytes
    return size


def fetch_bytes(start: Instruction) -> int:
    """Returns the bytes that go from or to the device's memory while other work goes on.

    `start` is a copy-start or a slice-start, whose result holds both arrays; the smaller one is
    what moves.
    """
    sizes = [type_bytes(type_) for type_ in _ARRAY.findall(start.type)[:2]]
    return min(sizes)


def identity(module: Module, instruction: Instruction, computation: Computation) -> Hashable:
    """Returns what the compiler knows an operation by: it schedules equal ones but once.

    What it does, then the types of its result and its operands.
    """
    if instruction.opcode == "fusion":
        return _contents(module, instruction.callee("calls") or ""), instruction.type
    body = re.search(r'"body":"([^"]*)"', instruction.attributes)
    types = (computation.lookup[name].type for name in instruction.operands)
    return body[1] if body else instruction.name, instruction.type, *types


def _contents(module: Module, name: str) -> Hashable:
    """Returns what a computation does, whatever its instructions are called."""
    instructions = module.computations[name].instructions
    places = {one.name: place for place, one in enumerate(instructions)}
    return tuple(
        (
            one.opcode,
            one.type,
            tuple(places[operand] for operand in one.operands) or one.argument,
            _INCIDENTAL.sub("", one.attributes),
            *(_contents(module, callee) for callee in map(one.callee, _CALLS) if callee),
        )
        for one in instructions
    )
