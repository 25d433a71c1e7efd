"""Bytes of device memory that one operation of a compiled program reads and writes, and the arrays that it
copies whole.

A fusion computes only what its results need: of an operand that it slices or gathers from, what is taken
counts; of a result that it updates in place, the update. Only arrays in device memory count (HBM; a TPU has
others), with the padding of their tiles; single numbers do not.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from gpu.hlo_text import Array, Computation, Instruction, Module
from gpu.tile_bytes import box_bytes, is_in_hbm, is_whole_rows, parse_layout, stored_bytes

PALLAS = {  # targets of custom calls
    "mosaic_gpu_v2": "mosaic", "mosaic_gpu": "mosaic", "__gpu$xla.gpu.triton": "triton",
    "tpu_custom_call": "Pallas",
}  # fmt: skip
_TAKING = ("slice", "dynamic-slice", "gather")
_UPDATING = ("dynamic-update-slice", "scatter")
_RENAMING = ("bitcast", "reshape", "transpose")
_COPIES = ("copy", "gather", "transpose", "slice", "dynamic-slice", "convert", "reshape")


def operation_bytes(module: Module, computation: Computation, operation: Instruction) -> tuple[float, float]:
    """Bytes that an operation reads and writes; of one that runs beside others ("-start"), until its end.

    Args:
        module: of the program.
        computation: that the operation is in.
        operation: any that does work: not a loop, a conditional or a call.
    """
    opcode = operation.opcode.removesuffix("-start")
    operands = [computation.by_name[name] for name in operation.operands if name in computation.by_name]
    if operation.opcode == "async-start":
        body = module.computations[operation.called("calls")]  # with one operation
        return operation_bytes(module, body, body.root)
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
    if operation.target.startswith("__cublas") and len(operation.arrays) > 1:
        return operation.arrays[:-1]  # without its workspace
    return operation.arrays


def _of_whole(arrays: Sequence[Array]) -> float:
    return sum(stored_bytes(array) for array in arrays if is_in_hbm(array))


def _of_box(array: Array, box: Sequence[int], times: float) -> float:
    return min(times * box_bytes(array, box), stored_bytes(array)) if is_in_hbm(array) else 0


# --- fusions ------------------------------------------------------------------------------------------------


def _of_fusion(module: Module, fusion: Instruction, operands: list[Instruction]) -> tuple[float, float]:
    body = module.computations[fusion.called("calls")]
    needed = _needed_elements(module, body)
    updated = set()  # parameters that are changed in place
    written = 0.0
    read = 0.0
    for result, array in zip(_results(body), fusion.arrays, strict=False):
        if not _updates_an_operand(body, result):
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
    of_needed = stored_bytes(array) * min(1.0, needed / max(1, parameter.size)) if users else 0.0
    if users and all(user.opcode in _TAKING for user in users):
        boxes = sum(_of_box(array, *_box_taken(user, array, user.arrays[0])) for user in users)
        return min(boxes, stored_bytes(array) if parse_layout(array.layout).tile else of_needed)
    return of_needed


def _updates_an_operand(body: Computation, result: Instruction) -> bool:
    """Whether a result of a fusion is an operand of it, changed in place."""
    update = _through(body, result)
    if update.opcode not in _UPDATING:
        return False
    return _through(body, body.by_name[update.operands[0]]).opcode == "parameter"


def _users(body: Computation, instruction: Instruction) -> list[Instruction]:
    """The instructions that use a value as it is, those that only rename it left out."""
    found = []
    for user in body.users(instruction.name):
        is_view = user.opcode == "bitcast" or _is_view(user)
        same = is_view and user.arrays[0].dims == instruction.arrays[0].dims
        found += _users(body, user) if same else [user]
    return found


def _is_view(inner: Instruction) -> bool:
    """Whether a fusion inside a fusion only reads an operand in other tiles."""
    return inner.opcode == "fusion" and "output_to_operand_aliasing" in inner.attributes


def _through(body: Computation, instruction: Instruction) -> Instruction:
    """The instruction that computes what others only rename."""
    while instruction.opcode in _RENAMING and instruction.operands[0] in body.by_name:
        instruction = body.by_name[instruction.operands[0]]
    return instruction


def _results(body: Computation) -> list[Instruction]:
    """The results of a fusion."""
    root = body.root
    return [body.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]


def _needed_elements(module: Module, body: Computation) -> dict[str, float]:
    """How many elements of each instruction of a fusion its results need."""
    needed: dict[str, float] = defaultdict(float)
    in_place = set()
    for result in _results(body):
        needed[result.name] = result.size
        if _updates_an_operand(body, result):
            needed[result.name] = 0
            in_place.add(_through(body, result).name)
    for user in reversed(body.instructions):
        if user.opcode == "tuple":
            continue
        amount = min(needed[user.name], user.size)
        for at, name in enumerate(user.operands):
            operand = body.by_name.get(name)
            if operand is None:
                continue
            if user.opcode == "fusion" and not _is_view(user):
                demand = _needed_inside(module, user, at)
            elif user.name in in_place:
                demand = 0 if at == 0 else operand.size
            else:
                demand = _demand(user, at, operand, amount)
            needed[name] = min(needed[name] + demand, operand.size)
    return needed


def _needed_inside(module: Module, fusion: Instruction, at: int) -> float:
    """Elements of an operand that a fusion inside a fusion needs."""
    body = module.computations[fusion.called("calls")]
    needed = _needed_elements(module, body)
    parameters = (i for i in body.instructions if i.opcode == "parameter" and int(i.inner) == at)
    return sum(needed[parameter.name] for parameter in parameters)


def _demand(user: Instruction, at: int, operand: Instruction, amount: float) -> float:
    """Elements of an operand that `amount` elements of the result need."""
    if amount == 0:
        return 0
    is_elementwise = operand.size == user.size or user.opcode == "concatenate"
    takes = at == 0 and user.opcode in (*_TAKING, "pad")
    return amount if is_elementwise or takes else operand.size


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


# --- copies -------------------------------------------------------------------------------------------------


def copied_arrays(module: Module, computation: Computation, operation: Instruction) -> tuple[Array, ...]:
    """The results that are copies, gathers or conversions of whole arrays that exist before the step. A
    copy from HBM to VMEM as it is, or back, is none: whoever computes with the array has to load it.
    """
    arrays = operation.arrays if operation.opcode in _COPIES else ()
    if operation.opcode == "copy-start" and all(map(is_in_hbm, operation.arrays[:2])):  # result and operand
        arrays = operation.arrays[:1]
    if operation.opcode == "fusion":
        body = module.computations[operation.called("calls")]
        if not any(i.opcode in ("dot", "reduce", "convolution", "sort") for i in body.instructions):
            whole = [result for result in _results(body) if not _updates_an_operand(body, result)]
            arrays = tuple(array for result in whole for array in result.arrays)
    if not arrays:
        return ()
    stored = (_stored_size(module, computation, name) for name in operation.operands)
    largest = 2 * max(stored, default=0)  # a byte may hold two numbers
    return tuple(array for array in arrays if array.size <= largest)


def _stored_size(module: Module, computation: Computation, name: str) -> float:
    """Elements of an operand that is an argument of the computation, or a copy of one, or one updated in
    place; else 0.
    """
    source = computation.by_name.get(name)
    size = 0
    while source is not None and source.opcode not in ("parameter", "get-tuple-element"):
        size = max(size, max((array.size for array in source.arrays), default=0))
        if not source.opcode.startswith(("copy", "bitcast", "slice-")) and source.target != "ConcatBitcast":
            return size if _updates(module, source) else 0
        source = computation.by_name.get(source.operands[0])
    if source is None:
        return 0
    if source.opcode == "get-tuple-element":
        of = computation.by_name[source.operands[0]]
        if of.opcode not in ("parameter", "while") and not _updates(module, of):
            return 0
    return max(size, source.size)


def _updates(module: Module, operation: Instruction) -> bool:
    if operation.opcode in _UPDATING or operation.target in PALLAS:
        return True
    if operation.opcode != "fusion":
        return False
    body = module.computations[operation.called("calls")]
    return any(_updates_an_operand(body, result) for result in _results(body))
