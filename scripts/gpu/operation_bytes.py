"""Bytes of device memory that one operation of a compiled program reads and writes, and the arrays that it
copies whole.

The parts that slices, gathers and updates in place take or change count, in fusions too. Only arrays in
device memory count (HBM, and a TPU has others), without the padding of tiles. Single numbers do not count.
"""

from collections.abc import Collection, Iterator, Sequence

from gpu.hlo_text import Array, Computation, Instruction, Module

PALLAS = {  # targets of custom calls
    "mosaic_gpu_v2": "mosaic", "mosaic_gpu": "mosaic", "__gpu$xla.gpu.triton": "triton",
    "tpu_custom_call": "Pallas",
}  # fmt: skip
_TAKING = ("slice", "dynamic-slice", "gather")
_UPDATING = ("dynamic-update-slice", "scatter")
_RENAMING = ("bitcast", "reshape", "transpose", "convert", "copy")
_COPIES = ("copy", "copy-start", "gather", "transpose", "slice", "dynamic-slice", "convert", "reshape")
_COMPUTING = ("dot", "reduce", "convolution", "sort")


def operation_bytes(module: Module, computation: Computation, operation: Instruction) -> tuple[float, float]:
    """Returns the bytes that an operation reads and writes. For an operation that runs next to others
    ("-start"), it returns the bytes until its end.

    Args:
        module: the module of the program.
        computation: the computation that has the operation.
        operation: any operation that does work: not a loop, a conditional or a call.
    """
    if operation.opcode == "async-start":
        body = module.computations[operation.called("calls")]  # with one operation
        return operation_bytes(module, body, body.root)
    operands = [computation.by_name[name] for name in operation.operands if name in computation.by_name]
    opcode = operation.opcode.removesuffix("-start")
    if opcode == "fusion":
        return _fusion_bytes(module, operation, operands)
    if opcode in _UPDATING:
        changed = _changed_bytes(operation, [operand.arrays[0] for operand in operands])
        return changed, changed
    written = sum(map(_stored_bytes, _result_arrays(operation)))
    if opcode in _TAKING:
        return _taken_bytes(operands[0].arrays[0], _result_arrays(operation)[0]), written
    unique = {operand.name: operand for operand in operands}
    return sum(_stored_bytes(array) for operand in unique.values() for array in operand.arrays), written


def _result_arrays(operation: Instruction) -> Sequence[Array]:
    """Returns the results. If an operation ends later, they are without its operands and its context."""
    if operation.opcode == "copy-start":
        return operation.arrays[:1]
    if operation.opcode == "fusion-start":
        return operation.arrays[len(operation.operands) : -1]
    if operation.opcode.endswith("-start") and operation.opcode.startswith(_TAKING):
        return operation.arrays[-2:-1]
    if operation.target.startswith("__cublas") and len(operation.arrays) > 1:
        return operation.arrays[:-1]  # without its workspace
    return operation.arrays


def _stored_bytes(array: Array) -> float:
    return array.bytes if array.is_in_hbm else 0


def _taken_bytes(source: Array, result: Array) -> float:
    """Returns the bytes of a slice or gather of the source."""
    return min(result.bytes, _stored_bytes(source))


def _changed_bytes(update: Instruction, operands: list[Array]) -> float:
    """Returns the bytes that a change in place moves."""
    changed = operands[-1] if update.opcode.startswith("scatter") else operands[1]
    return min(changed.bytes, _stored_bytes(operands[0]))


def _fusion_bytes(module: Module, fusion: Instruction, operands: list[Instruction]) -> tuple[float, float]:
    body = module.computations[fusion.called("calls")]
    updates = set()  # names of changes in place
    written = 0.0
    for result, array in zip(_results(body), _result_arrays(fusion), strict=False):
        update = _update_in_place(body, result)
        if update is None:
            written += _stored_bytes(array)
            continue
        updates.add(update.name)
        inside = [body.by_name[name].arrays[0] for name in update.operands]
        written += _changed_bytes(update, [array, *inside[1:]])
    of_operands: dict[str, float] = {}  # an operand may be given twice
    for parameter in body.instructions:
        if parameter.opcode != "parameter" or not parameter.arrays:
            continue
        source = operands[int(parameter.inner)]
        size = _read_bytes(module, body, parameter.name, source.arrays[0], updates)
        of_operands[source.name] = max(of_operands.get(source.name, 0), size)
    return sum(of_operands.values()), written


def _read_bytes(
    module: Module, body: Computation, name: str, array: Array, updates: Collection[str] = ()
) -> float:
    """Returns the bytes of an array that a fusion reads under this name. updates: the arrays that the fusion
    changes in place.
    """
    if body.by_name[name] in _results(body):
        return _stored_bytes(array)
    size = 0.0
    for user in body.users(name):
        if user.name in updates and user.operands[0] == name:
            continue
        if user.opcode in _RENAMING or _is_view(user):
            size += _read_bytes(module, body, user.name, array, updates)
        elif user.opcode in _TAKING and user.operands[0] == name:
            size += _taken_bytes(array, user.arrays[0])
        elif user.opcode == "fusion":
            inner = module.computations[user.called("calls")]
            (parameter,) = _parameters(inner, user.operands.index(name))
            size += _read_bytes(module, inner, parameter, array)
        else:
            return _stored_bytes(array)
    return min(size, _stored_bytes(array))


def _parameters(body: Computation, at: int) -> Iterator[str]:
    return (i.name for i in body.instructions if i.opcode == "parameter" and int(i.inner) == at)


def _is_view(inner: Instruction) -> bool:
    """Returns True if a fusion inside a fusion only gives an operand other tiles."""
    return inner.opcode == "fusion" and "output_to_operand_aliasing" in inner.attributes


def _results(body: Computation) -> list[Instruction]:
    """Returns the results of a fusion."""
    root = body.root
    return [body.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]


def _update_in_place(body: Computation, result: Instruction) -> Instruction | None:
    """Returns the instruction that changes an operand of a fusion in place, if it gives this result."""
    update = _source(body, result)
    if update.opcode not in _UPDATING:
        return None
    return update if _source(body, body.by_name[update.operands[0]]).opcode == "parameter" else None


def _source(body: Computation, instruction: Instruction) -> Instruction:
    """Returns the instruction that computes the result that others only rename."""
    while instruction.opcode in _RENAMING[:3] and instruction.operands[0] in body.by_name:
        instruction = body.by_name[instruction.operands[0]]
    return instruction


def copied_arrays(module: Module, computation: Computation, operation: Instruction) -> tuple[Array, ...]:
    """Returns the results that only copy, gather or convert operands of at least half as many elements: a
    byte may hold two numbers. A copy from HBM to VMEM as it is, or back, is none: whoever computes with the
    array has to load it.
    """
    arrays = tuple(_result_arrays(operation)) if operation.opcode in _COPIES else ()
    if operation.opcode == "copy-start" and not all(array.is_in_hbm for array in operation.arrays[:2]):
        return ()
    if operation.opcode == "fusion":
        body = module.computations[operation.called("calls")]
        if not any(i.opcode in _COMPUTING for i in body.instructions):
            whole = [result for result in _results(body) if _update_in_place(body, result) is None]
            arrays = tuple(array for result in whole for array in result.arrays)
    operands = (computation.by_name[name] for name in operation.operands if name in computation.by_name)
    largest = 2 * max((operand.size for operand in operands), default=0)
    return tuple(array for array in arrays if array.size <= largest)
