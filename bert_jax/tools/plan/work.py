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
# Opcodes that only move or convert values.
_MOVE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "fusion", "copy"}
_MOVE |= {"convert", "reduce-precision", "reshape", "transpose", "broadcast", "concatenate", "pad"}
# A `gather` is no move: in copies it reads only scalars, such as offsets.
_READS_PART, _WRITES_PART = ("slice", "dynamic-slice", "gather"), "dynamic-update-slice"
_MOVE |= {"slice", "dynamic-slice", _WRITES_PART}
# An array with its layout; an array whose layout shows that it is on chip (VMEM).
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\([1-9]\)[^}]*\}")
_CALLS = ("calls", "to_apply")
# Attributes that may differ between operations with the same schedule.
_INCIDENTAL = re.compile(
    r"(?:metadata|frontend_attributes)=\{[^}]*\}|backend_config=.*|%[\w.\-]+"
    r"|channel_id=\d+|replica_groups=\S+"  # of an asynchronous collective inside a fusion
)


def is_product(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction multiplies matrices, alone or in a fusion."""
    return any(instr.opcode in _MULTIPLY for instr in _walk(module, instruction))


def is_copy(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction moves bytes, and computes only scalars, such as offsets."""
    instructions = _walk(module, instruction)
    return all(i.opcode in _MOVE or re.match(r"\w+\[\]", i.type) for i in instructions)


def _walk(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yields an instruction, and recursively the instructions of a fusion."""
    yield instruction
    if instruction.opcode == "fusion":
        for inner in module.computations[instruction.callee("calls")].instructions:
            yield from _walk(module, inner)


def memory_bytes(type_: str) -> int:
    """Returns the bytes of those arrays of a type that are in the device's memory."""
    return type_bytes(_ON_CHIP.sub("", type_))


def copy_bytes(copy: Instruction, scope: Computation) -> int:
    """Returns the bytes of the device's memory that a copy reads and writes.

    If it reads or writes only a part of an array, only that part counts. `scope` is the computation
    that a fusion calls; for another instruction, the computation that contains it.
    """
    if copy.opcode != "fusion" or scope.root is None:
        read = memory_bytes(scope.lookup[copy.operands[0]].type)
        read = min(read, copy.bytes) if copy.opcode in _READS_PART else read
        return memory_bytes(copy.type) + read
    root = scope.root
    results = [scope.lookup[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = 0
    for result, type_ in zip(results, _ARRAY.findall(copy.type), strict=True):
        while result.opcode == "bitcast":
            result = scope.lookup[result.operands[0]]
        if result.opcode == _WRITES_PART and memory_bytes(type_):
            written += scope.lookup[result.operands[1]].bytes
        else:
            written += memory_bytes(type_)
    params = (instr for instr in scope.instructions if instr.opcode == "parameter")
    return written + sum(min(memory_bytes(p.type), _bytes_read(p, scope)) for p in params)


def _bytes_read(array: Instruction, scope: Computation) -> int:
    """Returns the bytes that are read of an array; less than its size if only parts are read."""
    size = 0
    for user in scope.instructions:
        if array.name not in user.operands:
            continue
        # A bitcast, or a nested fusion in place (TPU7x: a new tiling), is an alias of the array.
        if user.opcode == "bitcast" or "output_to_operand_aliasing=" in user.attributes:
            size += _bytes_read(user, scope)
        elif user.operands[0] != array.name or user.opcode not in (*_READS_PART, _WRITES_PART):
            size += array.bytes
        elif user.opcode != _WRITES_PART:
            size += user.bytes
    return size


def fetch_bytes(start: Instruction) -> int:
    """Returns the bytes of an asynchronous transfer from or to the device's memory.

    `start` is a copy-start or a slice-start, whose result has both arrays; the smaller is moved.
    """
    return min(type_bytes(type_) for type_ in _ARRAY.findall(start.type)[:2])


def identity(module: Module, instruction: Instruction, computation: Computation) -> Hashable:
    """Returns the identity of an operation: the compiler schedules equal operations only once.

    It consists of the contents and types of a fusion, of the body and types of a custom kernel, or
    else of the name and types of the instruction.
    """
    if instruction.opcode == "fusion":
        return _contents(module, instruction.callee("calls")), instruction.type
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
