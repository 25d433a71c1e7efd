"""Counts what a compiled program does, from its text: operations and their bytes, loops, predicates,
collectives, copies of large arrays; of a TPU program also an estimate of its time (`tpu_time` says how).
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from tpu.kernel_dma import KernelWork
from tpu.tile_bytes import is_in_hbm
from tpu.tpu_time import Timeline, kernel_seconds

from gpu.card_specs import Tpu
from gpu.hlo_text import Array, Computation, Instruction, Module
from gpu.operation_bytes import PALLAS, copied_arrays, operation_bytes

_LEAST_LEAF = 2**16  # elements: smaller arrays may have the size of activations
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id replica-id".split()
)
_FREE_TARGETS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_KINDS = (  # of a TPU's fusion: the first operation that it contains
    ("convolution", "product"), ("dot", "product"), ("scatter", "scatter"), ("gather", "gather"),
    ("sort", "sort"), ("reduce", "reduce"), ("reduce-window", "reduce"), ("dynamic-update-slice", "update"),
)  # fmt: skip


class Choices:
    """What the text does not say about one run of the program: nothing is known."""

    def branch(self, conditional: Instruction) -> int | None:
        """The branch that runs; None: unknown, the smaller one is counted."""

    def trips(self, loop: Instruction) -> float | None:
        """Iterations of a loop whose number the text does not have; None: unknown, one is counted."""

    def kernel_work(self, call: Instruction) -> tuple[float, ...] | None:
        """What a Pallas kernel does: on a GPU its bytes, on a TPU as `kernel_dma.kernel_work` returns it.
        None: unknown, operands and results are counted.
        """


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that the program launches."""

    name: str
    kind: str
    op_name: str
    read: float  # bytes, of one run
    written: float
    alone: float = 0.0  # seconds of one run on a TPU, if nothing runs beside it
    seconds: float = 0.0  # by which one run makes the program longer
    times: float = 1
    copied: tuple[Array, ...] = ()  # results that are copied, gathered or converted whole
    declared: bool = False  # a Pallas kernel of which only operands and results are known
    is_launched: bool = True  # no wait, and on a TPU on more than single numbers

    @property
    def bytes(self) -> float:
        return self.times * (self.read + self.written)


@dataclasses.dataclass
class Counts:
    """What one run of a program, or of a part of it, does."""

    operations: list[Operation] = dataclasses.field(default_factory=list)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)
    predicates: float = 0  # that the host of a GPU waits for: conditionals, tests of loops
    # Branches that depend on data: further bytes and launches of the larger one.
    unknown_branches: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    collectives: Counter = dataclasses.field(default_factory=Counter)

    @property
    def bytes(self) -> float:
        return sum(operation.bytes for operation in self.operations)

    @property
    def launches(self) -> float:
        return sum(operation.times for operation in self.operations if operation.is_launched)

    @property
    def seconds(self) -> float:
        return sum(operation.times * operation.seconds for operation in self.operations)

    @property
    def by_kind(self) -> dict[str, tuple[float, float, float]]:
        """How often, bytes and seconds of each kind of operation."""
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for o in self.operations:
            for i, more in enumerate((o.times, o.bytes, o.times * o.seconds)):
                found[o.kind][i] += more
        return {kind: (times, size, seconds) for kind, (times, size, seconds) in found.items()}

    def add(self, other: "Counts", times: float = 1) -> None:
        self.operations += [dataclasses.replace(o, times=o.times * times) for o in other.operations]
        self.unknown_loops += other.unknown_loops
        self.predicates += other.predicates * times
        self.unknown_branches |= other.unknown_branches
        for kind, count in other.collectives.items():
            self.collectives[kind] += count * times


def whole_copies(
    counts: Counts, leaves: Collection[tuple[int, ...]], least: int = _LEAST_LEAF
) -> list[Operation]:
    """Operations that copy, gather or convert an array of the size of a leaf of the cache or the weights.

    least: elements of the smallest leaf that counts.
    """
    sizes = {math.prod(shape) for shape in leaves if math.prod(shape) >= least}
    return [o for o in counts.operations if any(array.size in sizes for array in o.copied)]


class ProgramCounter:
    """Counts the parts of a module."""

    def __init__(
        self, module: Module, choices: Choices | None = None, tpu: Tpu | None = None, devices: int = 1
    ):
        """
        Args:
            module: from `hlo_text.parse_module`; of one device.
            choices: what is known beside the text.
            tpu: that it is compiled for; None: a GPU.
            devices: over which collectives run.
        """
        self._module = module
        self._choices = choices or Choices()
        self._tpu = tpu
        self._devices = devices
        self._found: dict[str, Counts] = {}
        self._sparse_core_parts: set[str] = set()  # computations

    def step_and_around(self) -> tuple[Counts, Counts]:
        """Counts of one iteration of the outermost loop, the one with the longest body, and of what runs
        before and after it.

        Raises:
            ValueError: the program has no loop of unknown trip count.
        """
        entry = self._module.computations[self._module.entry]
        loops = [i for i in entry.instructions if i.opcode == "while" and i.trip_count is None]
        if not loops:
            raise ValueError("the program has no loop of unknown trip count")
        main = max(loops, key=lambda i: len(self._module.computations[i.called("body")].instructions))
        step = Counts(predicates=1)
        for key in ("condition", "body"):
            step.add(self.of(main.called(key)))
        return step, self._of_computation(entry, without=main.name)

    def of_call(self) -> Counts:
        """Counts of a run of the module."""
        return self.of(self._module.entry)

    def of(self, name: str) -> Counts:
        """Counts of one run of a computation."""
        if name not in self._found:
            self._found[name] = self._of_computation(self._module.computations[name])
        return self._found[name]

    def _of_computation(self, computation: Computation, without: str = "") -> Counts:
        counts = Counts()
        timeline = Timeline()
        for instruction in computation.instructions:
            if instruction.name != without:
                self._add(counts, timeline, computation, instruction)
        return counts

    def _add(
        self, counts: Counts, timeline: Timeline, computation: Computation, instruction: Instruction
    ) -> None:
        opcode = instruction.opcode
        if opcode in _FREE or instruction.target in _FREE_TARGETS:
            return
        if opcode == "while":
            self._add_part(counts, timeline, self._of_loop(counts, instruction))
        elif opcode == "conditional":
            self._add_part(counts, timeline, self._of_branch(counts, instruction))
        elif opcode == "call" or opcode == "async-start" and self._tpu is None:
            called = instruction.called("to_apply") or instruction.called("calls")
            self._add_part(counts, timeline, self.of(called))
        elif opcode == "call-start":  # on a SparseCore
            self._add_beside(counts, timeline, instruction)
        elif opcode.endswith("-update"):
            timeline.started[instruction.name] = instruction.operands[0]
        elif opcode.endswith("-done"):
            if seconds := timeline.wait(instruction.operands[0]):
                wait = Operation(instruction.name, "wait", instruction.op_name, 0, 0, 0, seconds)
                counts.operations.append(dataclasses.replace(wait, is_launched=False))
        else:
            self._add_operation(counts, timeline, computation, instruction)

    def _add_part(self, counts: Counts, timeline: Timeline, part: Counts) -> None:
        counts.add(part)
        timeline.run(part.seconds, self._memory_seconds(part.bytes))

    def _add_beside(self, counts: Counts, timeline: Timeline, start: Instruction) -> None:
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

    def _of_loop(self, counts: Counts, loop: Instruction) -> Counts:
        trips: float | None = loop.trip_count
        tests = 0.0 if trips is not None and self._tpu is None else 1.0  # the host of a GPU counts itself
        if trips is None:
            trips = self._choices.trips(loop)
            if trips is None or self._tpu is None:  # a GPU's host waits for the test of each iteration
                counts.unknown_loops.append(loop.name)
            trips = 1 if trips is None else trips
            counts.predicates += trips + 1
        part = Counts()
        part.add(self.of(loop.called("condition")), tests * (trips + 1))
        part.add(self.of(loop.called("body")), trips)
        return part

    def _of_branch(self, counts: Counts, conditional: Instruction) -> Counts:
        counts.predicates += 1
        branches = conditional.branches
        chosen = self._choices.branch(conditional)
        if chosen is not None:
            return self.of(branches[min(chosen, len(branches) - 1)])
        parts = sorted(map(self.of, branches), key=lambda part: (part.seconds, part.bytes))
        *_, smaller, larger = parts
        more = larger.bytes - smaller.bytes, larger.launches - smaller.launches
        counts.unknown_branches[conditional.name] = more
        return parts[0] if self._tpu else smaller

    def _memory_seconds(self, size: float) -> float:
        return size / self._tpu.memory_gbs / 1e9 if self._tpu else 0.0

    def _add_operation(
        self, counts: Counts, timeline: Timeline, computation: Computation, instruction: Instruction
    ) -> None:
        read, written = operation_bytes(self._module, computation, instruction)
        is_pallas = instruction.target in PALLAS
        work = self._choices.kernel_work(instruction) if is_pallas else None
        busy = links = 0.0
        if self._tpu is None:
            read, written = (read, written) if work is None else (work[0], 0)
        else:
            busy = self._scheduled_seconds(computation, instruction)
            links = _sent_bytes(instruction, self._devices) / self._tpu.link_gbs / 1e9
            if work is not None:
                fields = len(KernelWork._fields)
                read, written = _of_kernel(computation, instruction, work[fields:])
                busy = kernel_seconds(
                    KernelWork(*work[:fields]), self._tpu, self._memory_seconds(read + written)
                )
        memory = self._memory_seconds(read + written)
        alone = seconds = max(busy, memory, links)
        if instruction.opcode.endswith("-start"):
            seconds = 0.0
            if links:
                timeline.start_collective(instruction.name, alone)
            else:
                timeline.left[instruction.name] = alone
        else:
            timeline.run(alone, memory)
        counts.operations.append(
            Operation(
                instruction.name,
                self._kind(instruction),
                instruction.op_name,
                read,
                written,
                alone,
                seconds,
                copied=copied_arrays(self._module, computation, instruction),
                declared=is_pallas and work is None,
                is_launched=self._tpu is None or alone > 0,
            )
        )
        kind = instruction.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            counts.collectives[kind] += 1
            counts.collectives[f"{kind} bytes"] += int(instruction.bytes)

    def _scheduled_seconds(self, computation: Computation, instruction: Instruction) -> float:
        """By the cycles of XLA's schedule; 0 where that has none, as of SparseCores."""
        on_sparse_core = computation.name in self._sparse_core_parts
        cycles = 0 if on_sparse_core else instruction.estimated_cycles or 0
        return cycles / self._tpu.ghz / 1e9

    def _kind(self, operation: Instruction) -> str:
        """A word for what an operation does."""
        if operation.target:
            return PALLAS.get(operation.target, operation.target)
        opcodes = {operation.opcode}
        if operation.opcode == "fusion":
            opcodes = {i.opcode for i in self._module.computations[operation.called("calls")].instructions}
        if self._tpu is None:
            return "sort" if "sort" in opcodes else operation.opcode
        if operation.opcode.endswith("-start"):
            base = operation.opcode.removesuffix("-start")
            return base if base in _COLLECTIVES else "copy beside"
        if operation.opcode in ("copy", *_COLLECTIVES):
            return operation.opcode
        kind = next((kind for opcode, kind in _KINDS if opcode in opcodes), "elementwise")
        is_vector_product = kind == "reduce" and operation.op_name.endswith("dot_general")
        return "vector product" if is_vector_product else kind


def _sent_bytes(instruction: Instruction, devices: int) -> float:
    """Bytes that a device sends in a collective, if the devices are a ring."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in _COLLECTIVES or devices == 1:
        return 0
    size = instruction.bytes
    if kind != instruction.opcode:  # its operand is beside its result
        size = max(array.bytes for array in instruction.arrays)
    if kind == "reduce-scatter":
        size *= devices  # of the operand
    if kind == "collective-permute":
        return size
    return size * (devices - 1) / devices * (2 if kind == "all-reduce" else 1)


def _of_kernel(computation: Computation, call: Instruction, dma: Sequence[float]) -> tuple[float, float]:
    """Bytes of HBM that a TPU kernel reads and writes: of what lies in VMEM none.

    dma: bytes moved of each operand, then of each result.
    """
    operands: list[Any] = [computation.by_name[name] for name in call.operands]
    arrays = [operand.arrays[0] for operand in operands]
    here = [is_in_hbm(array) for array in (*arrays, *call.arrays)]
    moved = [size if there else 0 for size, there in zip(dma, here, strict=False)]
    return sum(moved[: len(arrays)]), sum(moved[len(arrays) :])
