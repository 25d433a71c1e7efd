"""Copies, gathers and conversions of whole arrays in a TPU program, as those of weights and caches."""

from gpu.fusion_bytes import results
from gpu.hlo_text import Array, Computation, Instruction, Module
from gpu.program_counts import COPIES

from tpu.hbm_bytes import updates_an_operand
from tpu.tile_bytes import is_in_hbm

PALLAS = "tpu_custom_call"


def copied_arrays(module: Module, computation: Computation, operation: Instruction) -> tuple[Array, ...]:
    """The results that are copies, gathers or conversions of whole arrays that exist before the step. A
    copy from HBM to VMEM as it is, or back, is none: whoever computes with the array has to load it.
    """
    arrays = operation.arrays if operation.opcode in COPIES else ()
    if operation.opcode.endswith("-start"):
        arrays = operation.arrays[:2] if operation.opcode == "copy-start" else ()  # result and operand
        arrays = arrays[:1] if all(is_in_hbm(array) for array in arrays) else ()
    if operation.opcode == "fusion":
        body = module.computations[operation.called("calls")]
        if not any(i.opcode in ("dot", "reduce", "convolution", "sort") for i in body.instructions):
            whole = [result for result in results(body) if not updates_an_operand(body, result)]
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
    if operation.opcode in ("dynamic-update-slice", "scatter") or operation.target == PALLAS:
        return True
    if operation.opcode != "fusion":
        return False
    body = module.computations[operation.called("calls")]
    return any(updates_an_operand(body, result) for result in results(body))
