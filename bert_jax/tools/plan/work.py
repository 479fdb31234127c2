"""Classifies operations of a TPU's program: matrix products, copies, and others.

The time of an operation is estimated according to its kind (see `estimate`).
"""

import re
from collections.abc import Hashable, Iterator

from bert_jax.tools.plan.hlo import Computation, Instruction, Module, type_bytes

# Matrix products, with everything fused into them; operations that only move bytes of the device's
# memory (HBM); all other operations.
KINDS = PRODUCTS, COPIES, OTHER = "products", "copies", "other"

_MULTIPLY = {"convolution", "dot"}
# Opcodes that compute nothing.
_MOVE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "fusion", "copy"}
_MOVE |= {"convert", "reduce-precision", "reshape", "transpose", "broadcast", "concatenate", "pad"}
_PARTS, _INTO = ("slice", "dynamic-slice", "gather"), "dynamic-update-slice"
_MOVE |= {"slice", "dynamic-slice", _INTO}
# An array with its layout; an array whose layout shows that it is in the chip's own memory (VMEM).
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\([1-9]\)[^}]*\}")
_CALLS = ("calls", "to_apply")
# Attributes that may differ between operations with the same schedule.
_INCIDENTAL = re.compile(
    r"(?:metadata|frontend_attributes)=\{[^}]*\}|backend_config=.*|%[\w.\-]+"
    r"|channel_id=\d+|replica_groups=\S+"  # of a collective that the operation continues
)


def is_product(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction multiplies matrices, alone or in a fusion."""
    return any(instr.opcode in _MULTIPLY for instr in _walk(module, instruction))


def is_copy(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction moves bytes, and computes at most offsets of parts."""
    instructions = _walk(module, instruction)
    return all(i.opcode in _MOVE or re.match(r"\w+\[\]", i.type) for i in instructions)


def _walk(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yields an instruction, and recursively the instructions of a fusion."""
    yield instruction
    if instruction.opcode == "fusion":
        for inner in module.computations[instruction.callee("calls") or ""].instructions:
            yield from _walk(module, inner)


def memory_bytes(type_: str) -> int:
    """Returns the bytes of those arrays of a type that are in the device's memory."""
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
    results = [inside.lookup[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = 0
    for result, type_ in zip(results, _ARRAY.findall(copy.type), strict=True):
        while result.opcode == "bitcast":
            result = inside.lookup[result.operands[0]]
        if result.opcode == _INTO and memory_bytes(type_):
            written += inside.lookup[result.operands[1]].bytes
        else:
            written += memory_bytes(type_)
    params = (instr for instr in inside.instructions if instr.opcode == "parameter")
    return written + sum(min(memory_bytes(p.type), _bytes_read(p, inside)) for p in params)


def _bytes_read(array: Instruction, inside: Computation) -> int:
    """Returns the bytes that are read of an array; less than its size if only parts are read."""
    size = 0
    for user in inside.instructions:
        if array.name not in user.operands:
            continue
        # On TPU7x a nested fusion gives an array other tiles in place, before a part is written.
        if user.opcode == "bitcast" or "output_to_operand_aliasing=" in user.attributes:
            size += _bytes_read(user, inside)
        elif user.operands[0] != array.name or user.opcode not in (*_PARTS, _INTO):
            size += array.bytes
        elif user.opcode != _INTO:
            size += user.bytes
    return size


def fetch_bytes(start: Instruction) -> int:
    """Returns the bytes of an asynchronous transfer from or to the device's memory.

    `start` is a copy-start or a slice-start, whose result has both arrays; the smaller one is
    moved.
    """
    sizes = [type_bytes(type_) for type_ in _ARRAY.findall(start.type)[:2]]
    return min(sizes)


def identity(module: Module, instruction: Instruction, computation: Computation) -> Hashable:
    """Returns the identity of an operation: the compiler schedules equal operations only once.

    The identity consists of the contents and the types of the result and the operands.
    """
    if instruction.opcode == "fusion":
        return _contents(module, instruction.callee("calls") or ""), instruction.type
    body = re.search(r'"body":"([^"]*)"', instruction.attributes)
    types = (computation.lookup[name].type for name in instruction.operands)
    return body[1] if body else instruction.name, instruction.type, *types


def _contents(module: Module, name: str) -> Hashable:
    """Returns a description of a computation that does not depend on instructions' names."""
    instructions = module.computations[name].instructions
    indices = {instr.name: index for index, instr in enumerate(instructions)}
    return tuple(
        (
            instr.opcode,
            instr.type,
            tuple(indices[operand] for operand in instr.operands) or instr.argument,
            _INCIDENTAL.sub("", instr.attributes),
            *(_contents(module, callee) for callee in map(instr.callee, _CALLS) if callee),
        )
        for instr in instructions
    )
