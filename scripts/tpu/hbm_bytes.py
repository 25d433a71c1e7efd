"""Bytes of HBM that one operation of a TPU program reads and writes.

Only arrays in HBM count. Of an operand that a fusion only slices or gathers from, what is taken counts; of a
result that it updates in place, the update. Padding of tiles counts.
"""

import math
import re
from collections.abc import Sequence

from gpu.fusion_bytes import needed_elements, results
from gpu.hlo_text import Array, Computation, Instruction, Module

from tpu.tile_bytes import box_bytes, is_in_hbm, is_whole_rows, stored_bytes

_TAKING = ("slice", "dynamic-slice", "gather")
_UPDATING = ("dynamic-update-slice", "scatter")
_RENAMING = ("bitcast", "reshape", "transpose")


def hbm_bytes(module: Module, computation: Computation, operation: Instruction) -> tuple[float, float]:
    """Bytes that an operation reads from HBM and writes to it; of one that runs beside others ("-start"),
    the bytes until its end.

    Args:
        module: of the program.
        computation: that the operation is in.
        operation: any that does work: not a loop, a conditional or a call.
    """
    opcode = operation.opcode.removesuffix("-start")
    operands = [computation.by_name[name] for name in operation.operands if name in computation.by_name]
    if operation.opcode == "async-start":
        body = module.computations[operation.called("calls")]  # with one operation
        return hbm_bytes(module, body, body.root)
    written = _result_arrays(operation)
    if opcode == "fusion":
        return _of_fusion(module, operation, operands)
    if opcode in _TAKING:
        source = operands[0].arrays[0]
        taken = _box_taken(operation, source, written[0])
        return _of_box(source, *taken), _of_whole(written)
    if opcode in _UPDATING:
        return _of_update(operation, [operand.arrays[0] for operand in operands])
    unique = {operand.name: operand for operand in operands}
    return sum(_of_whole(operand.arrays) for operand in unique.values()), _of_whole(written)


def _result_arrays(operation: Instruction) -> Sequence[Array]:
    """The results; of an operation that ends later, those without its operands and its context."""
    if operation.opcode == "copy-start":
        return operation.arrays[:1]
    if operation.opcode.endswith("-start") and operation.opcode.startswith(_TAKING):
        return operation.arrays[-2:-1]
    return operation.arrays


def _of_whole(arrays: Sequence[Array]) -> float:
    return sum(stored_bytes(array) for array in arrays if is_in_hbm(array))


def _of_box(array: Array, box: Sequence[int], times: float) -> float:
    return min(times * box_bytes(array, box), stored_bytes(array)) if is_in_hbm(array) else 0


# --- fusions ------------------------------------------------------------------------------------------------


def _of_fusion(module: Module, fusion: Instruction, operands: list[Instruction]) -> tuple[float, float]:
    body = module.computations[fusion.called("calls")]
    needed = needed_elements(body, module)
    updated = set()  # parameters that are changed in place
    written = 0.0
    read = 0.0
    for result, array in zip(results(body), fusion.arrays, strict=False):
        if not updates_an_operand(body, result):
            written += _of_whole([array])
            continue
        update = _through(body, result)
        updated.add(_through(body, body.by_name[update.operands[0]]).name)
        if is_in_hbm(array):
            inside = [body.by_name[name].arrays[0] for name in update.operands]
            more, of_update = _of_update(update, [array, *inside[1:]], in_hbm=(True, False))
            read += more
            written += of_update
    seen: dict[str, float] = {}  # an operand may be given twice
    for parameter in body.instructions:
        if parameter.opcode != "parameter" or not parameter.arrays:
            continue
        source = operands[int(parameter.inner)]
        array = source.arrays[0]
        of_one = _read_of(body, parameter, array, needed[parameter.name], parameter.name in updated)
        seen[source.name] = min(seen.get(source.name, 0) + of_one, stored_bytes(array))
    return read + sum(seen.values()), written


def _read_of(body: Computation, parameter: Instruction, array: Array, needed: float, updated: bool) -> float:
    if not is_in_hbm(array):
        return 0
    users = [user for user in _users(body, parameter) if not (updated and user.opcode in _UPDATING)]
    if users and all(user.opcode in _TAKING for user in users):
        boxes = (_of_box(array, *_box_taken(user, array, user.arrays[0])) for user in users)
        return min(sum(boxes), stored_bytes(array))
    return stored_bytes(array) * min(1.0, needed / max(1, parameter.size)) if users else 0


def updates_an_operand(body: Computation, result: Instruction) -> bool:
    """Whether a result of a fusion is an operand of it, changed in place."""
    update = _through(body, result)
    if update.opcode not in _UPDATING:
        return False
    return _through(body, body.by_name[update.operands[0]]).opcode == "parameter"


def _users(body: Computation, instruction: Instruction) -> list[Instruction]:
    """The instructions that use a value as it is, those that only rename it left out."""
    found = []
    for user in body.users(instruction.name):
        same = user.opcode == "bitcast" and user.arrays[0].dims == instruction.arrays[0].dims
        found += _users(body, user) if same else [user]
    return found


def _through(body: Computation, instruction: Instruction) -> Instruction:
    """The instruction that computes what others only rename."""
    while instruction.opcode in _RENAMING and instruction.operands[0] in body.by_name:
        instruction = body.by_name[instruction.operands[0]]
    return instruction


# --- slices and updates -------------------------------------------------------------------------------------


def _box_taken(operation: Instruction, source: Array, result: Array) -> tuple[Sequence[int], float]:
    """The box that is taken from the source at once, and how often."""
    if operation.opcode.startswith("gather"):
        box = _numbers(operation, "slice_sizes")
        return box, result.size / max(1, math.prod(box))
    if len(result.dims) == len(source.dims):
        return result.dims, 1
    return (*(1 for _ in source.dims[:-1]), result.size), 1


def _of_update(
    operation: Instruction, operands: list[Array], in_hbm: tuple[bool, bool] | None = None
) -> tuple[float, float]:
    """Of a change in place: of the rows that it fills in part, what they had is read.

    in_hbm: whether the array, and the update, are there; None: as their layouts say.
    """
    array = operands[0]
    if operation.opcode.startswith("scatter"):
        update = operands[-1]
        outer = _numbers(operation, "inserted_window_dims") + _numbers(operation, "input_batching_dims")
        window = iter([update.dims[axis] for axis in _numbers(operation, "update_window_dims")])
        box = [1 if axis in outer else next(window) for axis in range(len(array.dims))]
        times = update.size / max(1, math.prod(box))
    else:
        update = operands[1]
        box = list(update.dims)
        times = 1.0
    array_there, update_there = in_hbm or (is_in_hbm(array), is_in_hbm(update))
    moved = min(times * box_bytes(array, box), stored_bytes(array)) if array_there else 0
    before = 0 if is_whole_rows(array, box) else moved
    return before + (stored_bytes(update) if update_there else 0), moved


def _numbers(operation: Instruction, attribute: str) -> list[int]:
    match = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", operation.attributes)
    return [int(number) for number in match[1].split(",") if number] if match else []
