"""Counts what a compiled program does, from its text: launched operations and their bytes, loops, predicates,
collectives, copies of large arrays.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection
from typing import Protocol

from gpu.fusion_bytes import operation_bytes, results, through_bitcasts, updates_in_place
from gpu.hlo_text import Array, Computation, Instruction, Module

FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id replica-id".split()
)
COPIES = ("copy", "copy-start", "gather", "transpose", "slice", "dynamic-slice", "convert", "reshape")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
PALLAS = {"mosaic_gpu_v2": "mosaic", "mosaic_gpu": "mosaic", "__gpu$xla.gpu.triton": "triton"}


class Choices(Protocol):
    """What the text does not say about one run of the program."""

    def branch(self, conditional: Instruction) -> int | None:
        """The branch that runs; None: unknown."""

    def trips(self, loop: Instruction) -> float | None:
        """Iterations of a loop whose number the text does not have; None: unknown."""

    def kernel_bytes(self, call: Instruction) -> float | None:
        """Distinct bytes that a Pallas kernel moves; None: unknown."""

    def kernel_work(self, call: Instruction) -> tuple[float, ...] | None:
        """What a Pallas kernel does on a TPU, as `kernel_dma.kernel_work` returns it; None: unknown."""


class Unknown:
    """No choices: the smaller branch, one iteration, declared operands."""

    def branch(self, conditional: Instruction) -> int | None:
        return None

    def trips(self, loop: Instruction) -> float | None:
        return None

    def kernel_bytes(self, call: Instruction) -> float | None:
        return None

    def kernel_work(self, call: Instruction) -> tuple[float, ...] | None:
        return None


@dataclasses.dataclass(frozen=True)
class Launch:
    """An operation that the program launches."""

    name: str
    kind: str  # opcode, or the target of a custom call
    op_name: str
    times: float
    read: float  # bytes, of one launch
    written: float
    declared: bool  # a Pallas kernel of which only operands and results are known
    copied: tuple[Array, ...]  # results that are copied, gathered or converted whole

    @property
    def bytes(self) -> float:
        return self.times * (self.read + self.written)


@dataclasses.dataclass
class Counts:
    """What one run of a program, or of its loop's body, does."""

    launches: list[Launch] = dataclasses.field(default_factory=list)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)
    predicates: float = 0  # conditionals, and tests of loops of unknown trip count
    # Branches that depend on data: the smaller one is counted; the larger one's further bytes and launches.
    unknown_branches: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    collectives: Counter = dataclasses.field(default_factory=Counter)

    @property
    def bytes(self) -> float:
        return sum(launch.bytes for launch in self.launches)

    @property
    def kernels(self) -> float:
        return sum(launch.times for launch in self.launches)

    @property
    def kinds(self) -> Counter:
        counter: Counter = Counter()
        for launch in self.launches:
            counter[launch.kind] += launch.times
        return counter

    def add(self, other: "Counts") -> None:
        self.launches += other.launches
        self.unknown_loops += other.unknown_loops
        self.predicates += other.predicates
        self.unknown_branches |= other.unknown_branches
        self.collectives += other.collectives


def count_program(module: Module, choices: Choices | None = None, loop_body: bool = False) -> Counts:
    """Counts of a run of a module.

    Args:
        module: from `hlo_text.parse_module`.
        choices: what is known beside the text.
        loop_body: count one iteration of the outermost loop instead, of the one with the longest body.

    Raises:
        ValueError: loop_body, and the program has no loop of unknown trip count.
    """
    counter = _Counter(module, choices or Unknown())
    entry = module.computations[module.entry]
    if not loop_body:
        return counter.of_computation(entry, 1)
    loops = [i for i in entry.instructions if i.opcode == "while" and i.trip_count is None]
    if not loops:
        raise ValueError("the program has no loop of unknown trip count")
    main = max(loops, key=lambda i: len(module.computations[i.called("body")].instructions))
    counts = Counts(predicates=1)
    for key in ("condition", "body"):
        counts.add(counter.of_computation(module.computations[main.called(key)], 1))
    return counts


def whole_copies(counts: Counts, leaves: Collection[tuple[int, ...]], least: int = 2**16) -> list[Launch]:
    """Launches that copy, gather or convert an array of the size of a leaf.

    Args:
        counts: of a program.
        leaves: shapes of cache and weight leaves.
        least: elements of the smallest leaf that counts; others may have the size of activations.
    """
    sizes = {math.prod(shape) for shape in leaves if math.prod(shape) >= least}
    return [launch for launch in counts.launches if any(array.size in sizes for array in launch.copied)]


class _Counter:
    def __init__(self, module: Module, choices: Choices):
        self._module = module
        self._choices = choices

    def of_computation(self, computation: Computation, times: float) -> Counts:
        counts = Counts()
        for instruction in computation.instructions:
            self._add(counts, computation, instruction, times)
        return counts

    def _add(self, counts: Counts, computation: Computation, instruction: Instruction, times: float) -> None:
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(("-done", "-update")):
            return
        if opcode == "while":
            self._add_loop(counts, instruction, times)
        elif opcode == "conditional":
            self._add_branch(counts, instruction, times)
        elif opcode in ("call", "async-start"):
            name = instruction.called("to_apply") or instruction.called("calls")
            counts.add(self.of_computation(self._module.computations[name], times))
        else:
            launch = self._launch(computation, instruction, times)
            counts.launches.append(launch)
            kind = opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                counts.collectives[kind] += times
                counts.collectives[f"{kind} bytes"] += times * instruction.bytes

    def _add_loop(self, counts: Counts, loop: Instruction, times: float) -> None:
        trips = loop.trip_count
        if trips is None:
            counts.unknown_loops.append(loop.name)
            trips = self._choices.trips(loop)
            trips = 1 if trips is None else trips
            counts.predicates += times * (trips + 1)
        for key, extra in (("condition", 1), ("body", 0)):
            if key == "condition" and loop.trip_count is not None:
                continue  # XLA runs it on the host
            body = self._module.computations[loop.called(key)]
            counts.add(self.of_computation(body, times * (trips + extra)))

    def _add_branch(self, counts: Counts, conditional: Instruction, times: float) -> None:
        counts.predicates += times
        branches = conditional.branches
        chosen = self._choices.branch(conditional)
        if chosen is None:
            of_each = [self.of_computation(self._module.computations[name], times) for name in branches]
            *_, smaller, larger = sorted(of_each, key=lambda of_one: of_one.bytes)
            counts.add(smaller)
            more = larger.bytes - smaller.bytes, larger.kernels - smaller.kernels
            counts.unknown_branches[conditional.name] = more
        else:
            name = branches[min(chosen, len(branches) - 1)]
            counts.add(self.of_computation(self._module.computations[name], times))

    def _launch(self, computation: Computation, operation: Instruction, times: float) -> Launch:
        read, written = operation_bytes(self._module, computation, operation)
        kind = operation.target or operation.opcode
        declared = False
        if operation.target in PALLAS:
            kind = PALLAS[operation.target]
            known = self._choices.kernel_bytes(operation)
            declared = known is None
            if known is not None:
                read = known
                written = 0
        elif operation.opcode == "fusion":
            body = self._module.computations[operation.called("calls")]
            if through_bitcasts(body, body.root).opcode == "sort":
                kind = "sort"
        copied = self._copied(computation, operation)
        return Launch(operation.name, kind, operation.op_name, times, read, written, declared, copied)

    def _copied(self, computation: Computation, operation: Instruction) -> tuple[Array, ...]:
        """The results that are copies, gathers or conversions of whole arrays that exist before the step."""
        arrays = operation.arrays if operation.opcode in COPIES else ()
        if operation.opcode == "fusion":
            body = self._module.computations[operation.called("calls")]
            if not any(i.opcode in ("dot", "reduce", "convolution", "sort") for i in body.instructions):
                whole = (result for result in results(body) if not updates_in_place(body, result))
                arrays = tuple(array for result in whole for array in result.arrays)
        if not arrays:
            return ()
        stored = (self._stored_size(computation, name) for name in operation.operands)
        largest = 2 * max(stored, default=0)  # a byte may hold two numbers
        return tuple(array for array in arrays if array.size <= largest)

    def _stored_size(self, computation: Computation, name: str) -> int:
        """Elements of an operand that is an argument of the computation or one updated in place; else 0."""
        source = computation.by_name.get(name)
        while source is not None and source.opcode == "bitcast":
            source = computation.by_name.get(source.operands[0])
        if source is None:
            return 0
        if source.opcode == "get-tuple-element":
            of = computation.by_name[source.operands[0]]
            return source.size if of.opcode in ("parameter", "while") or self._updates(of) else 0
        return source.size if source.opcode == "parameter" or self._updates(source) else 0

    def _updates(self, operation: Instruction) -> bool:
        if operation.opcode in ("dynamic-update-slice", "scatter"):
            return True
        if operation.opcode != "fusion":
            return False
        body = self._module.computations[operation.called("calls")]
        return any(updates_in_place(body, result) for result in results(body))
