"""Counts what a compiled TPU program does, from its text, and estimates its time.

The time of an operation is the larger of its cycles, as XLA schedules them, by the clock, and its bytes of
HBM by the bandwidth; of a Pallas kernel, which XLA gives no cycles, of its products by the matrix rate; of a
collective, of the bytes that a device of a ring sends by the rate of its links, without latency. Copies
between HBM and VMEM that run beside operations ("copy-start") have what operations leave of the bandwidth, one
after the other, and "copy-done" waits for its own. Nothing is assumed of the time to start an operation beyond
what XLA's cycles have (of small fusions about 2,100). Operations on single numbers, and gathers and scatters
of single rows, have none.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from copied_arrays import PALLAS, copied_arrays
from hbm_bytes import hbm_bytes
from hlo_text import Array, Computation, Instruction, Module
from program_counts import COLLECTIVES, FREE, Choices, Unknown
from tile_bytes import is_in_hbm
from tpu_specs import Tpu

_FREE_TARGETS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound")
_KINDS = (  # of a fusion: the first operation that it contains
    ("convolution", "product"), ("dot", "product"), ("scatter", "scatter"), ("gather", "gather"),
    ("sort", "sort"), ("reduce", "reduce"), ("reduce-window", "reduce"), ("dynamic-update-slice", "update"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that the program runs."""

    name: str
    kind: str
    op_name: str
    read: float  # bytes of HBM, of one run
    written: float
    alone: float  # seconds of one run, if nothing runs beside it
    seconds: float  # by which one run makes the program longer
    times: float = 1
    copied: tuple[Array, ...] = ()  # results that are copied, gathered or converted whole
    is_declared: bool = False  # a Pallas kernel of which only operands and results are known

    @property
    def bytes(self) -> float:
        return self.times * (self.read + self.written)


@dataclasses.dataclass
class TpuCounts:
    """What one run of a program, or of a part of it, does."""

    operations: list[Operation] = dataclasses.field(default_factory=list)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)
    unknown_branches: list[str] = dataclasses.field(default_factory=list)  # the shorter one is counted
    collectives: Counter = dataclasses.field(default_factory=Counter)

    @property
    def bytes(self) -> float:
        return sum(operation.bytes for operation in self.operations)

    @property
    def seconds(self) -> float:
        return sum(operation.times * operation.seconds for operation in self.operations)

    @property
    def seconds_apart(self) -> float:
        """The sum of the times of all operations, as if none ran beside another."""
        return sum(operation.times * operation.alone for operation in self.operations)

    @property
    def launches(self) -> float:
        """Operations on more than single numbers."""
        return sum(operation.times for operation in self.operations if operation.alone > 0)

    @property
    def by_kind(self) -> dict[str, tuple[float, float, float]]:
        """How often, bytes and seconds of each kind of operation."""
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for operation in self.operations:
            of_kind = found[operation.kind]
            of_kind[0] += operation.times
            of_kind[1] += operation.bytes
            of_kind[2] += operation.times * operation.seconds
        return {kind: (times, size, seconds) for kind, (times, size, seconds) in found.items()}

    def add(self, other: "TpuCounts", times: float = 1) -> None:
        self.operations += [dataclasses.replace(o, times=o.times * times) for o in other.operations]
        self.unknown_loops += other.unknown_loops
        self.unknown_branches += other.unknown_branches
        for kind, count in other.collectives.items():
            self.collectives[kind] += count * times


@dataclasses.dataclass
class _Timeline:
    """The operations of a computation one after the other, and the copies that run beside them, which HBM
    serves in their order when no operation needs it.
    """

    left: dict[str, float] = dataclasses.field(default_factory=dict)  # copy -> seconds that it still needs
    ends: dict[str, float] = dataclasses.field(default_factory=dict)  # of collectives, which need the links
    now: float = 0

    def run(self, seconds: float, memory: float) -> None:
        """An operation takes some seconds, in which it needs HBM for `memory` seconds."""
        self.now += seconds
        spare = seconds - memory
        for name, needed in list(self.left.items()):
            if spare < needed:
                self.left[name] = needed - max(0.0, spare)
                return
            spare -= needed
            del self.left[name]

    def wait(self, name: str) -> float:
        """Seconds until a copy or collective has ended."""
        if name in self.ends:
            seconds = max(0.0, self.ends[name] - self.now)
            self.run(seconds, 0)
            return seconds
        seconds = 0.0
        while name in self.left:
            first = next(iter(self.left))
            seconds += self.left.pop(first)
        self.now += seconds
        return seconds

    def start_collective(self, name: str, seconds: float) -> None:
        """A collective starts, after those before it."""
        self.ends[name] = max([self.now, *self.ends.values()]) + seconds


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

    def whole(self) -> TpuCounts:
        """Counts of a run of the module."""
        return self.of(self._module.entry)

    def of(self, name: str) -> TpuCounts:
        """Counts of one run of a computation."""
        if name not in self._found:
            self._found[name] = self._of_computation(self._module.computations[name])
        return self._found[name]

    def _of_computation(self, computation: Computation, without: str = "") -> TpuCounts:
        counts = TpuCounts()
        timeline = _Timeline()
        for instruction in computation.instructions:
            if instruction.name != without:
                self._add(counts, timeline, computation, instruction)
        return counts

    def _add(
        self, counts: TpuCounts, timeline: _Timeline, computation: Computation, instruction: Instruction
    ) -> None:
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith("-update") or instruction.target in _FREE_TARGETS:
            return
        if opcode == "while":
            self._add_part(counts, timeline, self._of_loop(counts, instruction))
        elif opcode == "conditional":
            self._add_part(counts, timeline, self._of_branch(counts, instruction))
        elif opcode == "call":
            self._add_part(counts, timeline, self.of(instruction.called("to_apply")))
        elif opcode.endswith("-done"):
            seconds = timeline.wait(instruction.operands[0])
            if seconds:
                wait = Operation(instruction.name, "wait", instruction.op_name, 0, 0, 0, seconds)
                counts.operations.append(wait)
        else:
            self._add_operation(counts, timeline, computation, instruction)

    def _add_part(self, counts: TpuCounts, timeline: _Timeline, part: TpuCounts) -> None:
        counts.add(part)
        timeline.run(part.seconds, part.bytes / self._tpu.memory_gbs / 1e9)

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
        self, counts: TpuCounts, timeline: _Timeline, computation: Computation, instruction: Instruction
    ) -> None:
        read, written = hbm_bytes(self._module, computation, instruction)
        busy = (instruction.estimated_cycles or 0) / self._tpu.ghz / 1e9
        is_pallas = instruction.target == PALLAS
        work = self._choices.kernel_work(instruction) if is_pallas else None
        if work is not None:
            flop, int8_ops, *dma = work
            read, written = _of_kernel(computation, instruction, dma)
            busy = flop / self._tpu.tflops / 1e12 + int8_ops / self._tpu.int8_tops / 1e12
        memory = (read + written) / self._tpu.memory_gbs / 1e9
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
    size = (
        max(array.bytes for array in instruction.arrays) if kind != instruction.opcode else instruction.bytes
    )
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
