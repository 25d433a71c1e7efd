"""Counts what a compiled TPU program does, from its text, and estimates its time; `tpu_time` says how."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from gpu.hlo_text import Computation, Instruction, Module
from gpu.program_counts import COLLECTIVES, FREE, Choices, Unknown

from tpu.copied_arrays import PALLAS, copied_arrays
from tpu.hbm_bytes import hbm_bytes
from tpu.kernel_dma import KernelWork
from tpu.tile_bytes import is_in_hbm
from tpu.tpu_specs import Tpu
from tpu.tpu_time import Operation, Timeline, TpuCounts, kernel_seconds

_FREE_TARGETS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound")
_KINDS = (  # of a fusion: the first operation that it contains
    ("convolution", "product"), ("dot", "product"), ("scatter", "scatter"), ("gather", "gather"),
    ("sort", "sort"), ("reduce", "reduce"), ("reduce-window", "reduce"), ("dynamic-update-slice", "update"),
)  # fmt: skip


class TpuCounter:
    """Counts the parts of a module."""

    def __init__(self, module: Module, tpu: Tpu, choices: Choices | None = None, devices: int = 1):
        """
        Args:
            module: from `hlo_text.parse_module`; of one device.
            tpu: that it is compiled for.
            choices: what is known beside the text.
            devices: over which collectives run.
        """
        self._module = module
        self._devices = devices
        self._tpu = tpu
        self._choices = choices or Unknown()
        self._found: dict[str, TpuCounts] = {}
        self._sparse_core_parts: set[str] = set()  # computations

    def step_and_around(self) -> tuple[TpuCounts, TpuCounts]:
        """Counts of one iteration of the outermost loop, and of what runs before and after it.

        Raises:
            ValueError: the program has no loop of unknown trip count.
        """
        entry = self._module.computations[self._module.entry]
        loops = [i for i in entry.instructions if i.opcode == "while" and i.trip_count is None]
        if not loops:
            raise ValueError("the program has no loop of unknown trip count")
        main = max(loops, key=lambda i: len(self._module.computations[i.called("body")].instructions))
        step = TpuCounts()
        for key in ("condition", "body"):
            step.add(self.of(main.called(key)))
        return step, self._of_computation(entry, without=main.name)

    def of_call(self) -> TpuCounts:
        """Counts of a run of the module."""
        return self.of(self._module.entry)

    def of(self, name: str) -> TpuCounts:
        """Counts of one run of a computation."""
        if name not in self._found:
            self._found[name] = self._of_computation(self._module.computations[name])
        return self._found[name]

    def _of_computation(self, computation: Computation, without: str = "") -> TpuCounts:
        counts = TpuCounts()
        timeline = Timeline()
        for instruction in computation.instructions:
            if instruction.name != without:
                self._add(counts, timeline, computation, instruction)
        return counts

    def _add(
        self, counts: TpuCounts, timeline: Timeline, computation: Computation, instruction: Instruction
    ) -> None:
        opcode = instruction.opcode
        if opcode in FREE or instruction.target in _FREE_TARGETS:
            return
        if opcode == "while":
            self._add_part(counts, timeline, self._of_loop(counts, instruction))
        elif opcode == "conditional":
            self._add_part(counts, timeline, self._of_branch(counts, instruction))
        elif opcode == "call":
            self._add_part(counts, timeline, self.of(instruction.called("to_apply")))
        elif opcode == "call-start":  # on a SparseCore
            self._add_beside(counts, timeline, instruction)
        elif opcode.endswith("-update"):
            timeline.started[instruction.name] = instruction.operands[0]
        elif opcode.endswith("-done"):
            seconds = timeline.wait(instruction.operands[0])
            if seconds:
                wait = Operation(instruction.name, "wait", instruction.op_name, 0, 0, 0, seconds)
                counts.operations.append(wait)
        else:
            self._add_operation(counts, timeline, computation, instruction)

    def _add_part(self, counts: TpuCounts, timeline: Timeline, part: TpuCounts) -> None:
        counts.add(part)
        timeline.run(part.seconds, part.bytes / self._tpu.memory_gbs / 1e9)

    def _add_beside(self, counts: TpuCounts, timeline: Timeline, start: Instruction) -> None:
        """Adds a computation that runs beside what follows: a collective or a copy."""
        name = start.called("to_apply")
        self._sparse_core_parts.add(name)
        part = self.of(name)
        if part.collectives:
            timeline.start_collective(start.name, part.seconds)
        else:
            timeline.left[start.name] = part.seconds
        operations = [dataclasses.replace(operation, seconds=0.0) for operation in part.operations]
        counts.add(dataclasses.replace(part, operations=operations))

    def _of_loop(self, counts: TpuCounts, loop: Instruction) -> TpuCounts:
        trips = loop.trip_count
        if trips is None:
            trips = self._choices.trips(loop)
            if trips is None:
                counts.unknown_loops.append(loop.name)
                trips = 1
        part = TpuCounts()
        part.add(self.of(loop.called("condition")), trips + 1)
        part.add(self.of(loop.called("body")), trips)
        return part

    def _of_branch(self, counts: TpuCounts, conditional: Instruction) -> TpuCounts:
        branches = conditional.branches
        chosen = self._choices.branch(conditional)
        if chosen is not None:
            return self.of(branches[min(chosen, len(branches) - 1)])
        counts.unknown_branches.append(conditional.name)
        return min((self.of(name) for name in branches), key=lambda part: part.seconds)

    def _add_operation(
        self, counts: TpuCounts, timeline: Timeline, computation: Computation, instruction: Instruction
    ) -> None:
        read, written = hbm_bytes(self._module, computation, instruction)
        busy = self._scheduled_seconds(computation, instruction)
        is_pallas = instruction.target == PALLAS
        work = self._choices.kernel_work(instruction) if is_pallas else None
        if work is not None:
            fields = len(KernelWork._fields)
            read, written = _of_kernel(computation, instruction, work[fields:])
        memory = (read + written) / self._tpu.memory_gbs / 1e9
        if work is not None:
            busy = kernel_seconds(KernelWork(*work[:fields]), self._tpu, memory)
        links = _sent_bytes(instruction, self._devices) / self._tpu.link_gbs / 1e9
        alone = max(busy, memory, links)
        seconds = alone
        if links and instruction.opcode.endswith("-start"):
            timeline.start_collective(instruction.name, alone)
            seconds = 0.0
        elif instruction.opcode.endswith("-start"):
            timeline.left[instruction.name] = alone
            seconds = 0.0
        else:
            timeline.run(alone, memory)
        operation = Operation(
            instruction.name, self._kind(instruction), instruction.op_name, read, written, alone, seconds
        )
        copied = copied_arrays(self._module, computation, instruction)
        is_declared = is_pallas and work is None
        counts.operations.append(dataclasses.replace(operation, copied=copied, is_declared=is_declared))
        _count_collective(counts, instruction)

    def _scheduled_seconds(self, computation: Computation, instruction: Instruction) -> float:
        """By the cycles of XLA's schedule; 0 where that has none, as of SparseCores."""
        on_sparse_core = computation.name in self._sparse_core_parts
        cycles = 0 if on_sparse_core else instruction.estimated_cycles or 0
        return cycles / self._tpu.ghz / 1e9

    def _kind(self, operation: Instruction) -> str:
        """A word for what an operation does."""
        if operation.target == PALLAS:
            return "Pallas"
        if operation.opcode == "custom-call":
            return operation.target
        if operation.opcode.endswith("-start"):
            base = operation.opcode.removesuffix("-start")
            return base if base in COLLECTIVES else "copy beside"
        opcodes = {operation.opcode}
        if operation.opcode == "fusion":
            opcodes = {i.opcode for i in self._module.computations[operation.called("calls")].instructions}
        if operation.opcode in ("copy", *COLLECTIVES):
            return operation.opcode
        kind = next((kind for opcode, kind in _KINDS if opcode in opcodes), "elementwise")
        is_vector_product = kind == "reduce" and operation.op_name.endswith("dot_general")
        return "vector product" if is_vector_product else kind


def _sent_bytes(instruction: Instruction, devices: int) -> float:
    """Bytes that a device sends in a collective, if the devices are a ring."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES or devices == 1:
        return 0
    size = instruction.bytes
    if kind != instruction.opcode:  # its operand is beside its result
        size = max(array.bytes for array in instruction.arrays)
    if kind == "reduce-scatter":
        size *= devices  # of the operand
    if kind == "collective-permute":
        return size
    return size * (devices - 1) / devices * (2 if kind == "all-reduce" else 1)


def _count_collective(counts: TpuCounts, instruction: Instruction) -> None:
    kind = instruction.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        counts.collectives[kind] += 1
        counts.collectives[f"{kind} bytes"] += int(instruction.bytes)


def _of_kernel(computation: Computation, call: Instruction, dma: Sequence[float]) -> tuple[float, float]:
    """Bytes of HBM that a kernel reads and writes: of what lies in VMEM none.

    dma: bytes moved of each operand, then of each result.
    """
    operands: list[Any] = [computation.by_name[name] for name in call.operands]
    arrays = [operand.arrays[0] for operand in operands]
    here = [is_in_hbm(array) for array in (*arrays, *call.arrays)]
    moved = [size if there else 0 for size, there in zip(dma, here, strict=False)]
    return sum(moved[: len(arrays)]), sum(moved[len(arrays) :])
