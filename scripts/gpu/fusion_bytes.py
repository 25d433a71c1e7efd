"""Bytes of device memory that one launched operation reads and writes.

A fusion computes only what its results need: of an operand that it slices or gathers from it reads the slice,
and of a result that it updates in place it writes the update.
"""

from collections import defaultdict

from gpu.hlo_text import Array, Computation, Instruction, Module

_SLICES = ("slice", "dynamic-slice", "gather")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": None}  # operand with the update; of scatter the last third


def operation_bytes(module: Module, computation: Computation, operation: Instruction) -> tuple[float, float]:
    """Bytes that an operation reads and writes, by the shapes of its operands and results.

    Args:
        module: of the program.
        computation: that the operation is in.
        operation: any that is launched.
    """
    operands = [computation.by_name[name] for name in operation.operands if name in computation.by_name]
    if operation.opcode == "fusion":
        body = module.computations[operation.called("calls")]
        needed = needed_elements(body)
        seen: dict[str, float] = defaultdict(float)  # an operand may be given twice
        for parameter in body.instructions:
            if parameter.opcode != "parameter":
                continue
            source = operation.operands[int(parameter.inner)]
            of_one = min(needed[parameter.name], parameter.size) * _itemsize(parameter)
            seen[source] = min(seen[source] + of_one, parameter.bytes)
        return sum(seen.values()), sum(_written(body, root) for root in results(body))
    if operation.opcode in _SLICES:
        return operation.bytes, operation.bytes
    if operation.opcode in _IN_PLACE:
        update = _update_of(computation, operation)
        return update, update
    written = operation.bytes
    if operation.target.startswith("__cublas"):  # the last result is a workspace
        written = sum(array.bytes for array in operation.arrays[: max(1, len(operation.arrays) - 1)])
    unique = {source.name: source.bytes for source in operands}
    return sum(unique.values()), written


def results(body: Computation) -> list[Instruction]:
    """The results of a fusion."""
    root = body.root
    return [body.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]


def through_bitcasts(body: Computation, instruction: Instruction) -> Instruction:
    """The instruction that computes a result which bitcasts only rename."""
    while instruction.opcode == "bitcast" and instruction.operands[0] in body.by_name:
        instruction = body.by_name[instruction.operands[0]]
    return instruction


def updates_in_place(body: Computation, result: Instruction) -> bool:
    """Whether a result of a fusion is an operand of it, changed in place."""
    source = through_bitcasts(body, result)
    if source.opcode not in _IN_PLACE:
        return False
    return through_bitcasts(body, body.by_name[source.operands[0]]).opcode == "parameter"


def needed_elements(body: Computation, module: Module | None = None) -> dict[str, float]:
    """How many elements of each instruction of a fusion its results need.

    module: with fusions inside of it, as TPUs have them; None: there are none.
    """
    needed: dict[str, float] = defaultdict(float)
    in_place = set()
    for result in results(body):
        needed[result.name] = result.size
        if updates_in_place(body, result):
            needed[result.name] = 0
            in_place.add(through_bitcasts(body, result).name)
    for user in reversed(body.instructions):
        if user.opcode == "tuple":
            continue
        amount = min(needed[user.name], user.size)
        for at, name in enumerate(user.operands):
            operand = body.by_name.get(name)
            if operand is None:
                continue
            if user.opcode == "fusion" and module is not None:
                amount_of = _needed_inside(module, user, at)
            elif user.name in in_place:
                amount_of = 0 if at == 0 else operand.size
            else:
                amount_of = _demand(user, at, operand, amount)
            needed[name] = min(needed[name] + amount_of, operand.size)
    return needed


def _needed_inside(module: Module, fusion: Instruction, at: int) -> float:
    """Elements of an operand that a fusion inside a fusion needs."""
    body = module.computations[fusion.called("calls")]
    needed = needed_elements(body, module)
    parameters = (i for i in body.instructions if i.opcode == "parameter" and int(i.inner) == at)
    return sum(needed[parameter.name] for parameter in parameters)


def _demand(user: Instruction, at: int, operand: Instruction, amount: float) -> float:
    """Elements of an operand that `amount` elements of the result need."""
    if amount == 0:
        return 0
    if user.opcode in (*_SLICES, "pad", "concatenate") or operand.size == user.size:
        return (
            amount
            if at == 0 or user.opcode in ("concatenate",) or operand.size == user.size
            else operand.size
        )
    return operand.size


def _written(body: Computation, result: Instruction) -> float:
    if updates_in_place(body, result):
        return _update_of(body, through_bitcasts(body, result))
    return result.bytes


def _update_of(body: Computation, operation: Instruction) -> float:
    """Bytes of the update of a dynamic-update-slice or scatter."""
    at = _IN_PLACE[operation.opcode]
    operands = [body.by_name[name] for name in operation.operands]
    if at is not None:
        return operands[at].bytes
    count = len(operands) // 2  # operands, indices, updates
    return sum(operand.bytes for operand in operands[count + 1 :])


def _itemsize(instruction: Instruction) -> float:
    arrays: tuple[Array, ...] = instruction.arrays
    return arrays[0].itemsize if arrays else 0
