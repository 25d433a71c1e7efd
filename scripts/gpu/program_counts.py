"""Counts the work of a compiled program, from its text: launched operations, the bytes that they move, and
copies of whole weights and caches.
"""

import dataclasses
import math
from collections.abc import Callable, Collection

from gpu.hlo_text import Array, Computation, Instruction, Module
from gpu.operation_bytes import PALLAS, copied_arrays, operation_bytes

_LEAST_LEAF = 2**16  # elements: smaller arrays may have the size of activations
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id replica-id".split()
)
_FREE_TARGETS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound")

KernelBytes = Callable[[Instruction, list[Array]], float]  # of a call and its operands


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that the program launches."""

    name: str
    kind: str
    op_name: str
    read: float  # bytes, of one run
    written: float
    copied: tuple[Array, ...]  # results that are copied, gathered or converted whole
    is_launched: bool  # on a TPU: it takes cycles, or moves bytes
    times: float = 1

    @property
    def bytes(self) -> float:
        return self.times * (self.read + self.written)


class Counts(list[Operation]):
    """The operations of one run of a program, or of a part of it."""

    @property
    def bytes(self) -> float:
        return sum(operation.bytes for operation in self)

    @property
    def launches(self) -> float:
        return sum(operation.times for operation in self if operation.is_launched)

    def add(self, other: "Counts", times: float = 1) -> None:
        self += [dataclasses.replace(o, times=o.times * times) for o in other]

    def whole_copies(self, leaves: Collection[tuple[int, ...]], least: int = _LEAST_LEAF) -> list[Operation]:
        """Returns the operations that copy, gather or convert an array of the size of a leaf of the cache or
        the weights. least: elements of the smallest leaf that counts.
        """
        sizes = {math.prod(shape) for shape in leaves if math.prod(shape) >= least}
        return [o for o in self if any(array.size in sizes for array in o.copied)]


class ProgramCounter:
    """Counts the parts of a module.

    Args:
        module: a module from `hlo_text.parse_module`, of one device.
        kernel_bytes: returns the bytes that a Pallas kernel moves. None: its operands and results.
        trips: iterations of a loop whose number the text does not have.
        branch: the branch that counts for the conditionals of a step itself, for example 0 or -1. For None,
            and for the conditionals within its parts, it is the branch that moves fewer bytes.
        is_tpu: True: the program is compiled for a TPU.
    """

    def __init__(
        self,
        module: Module,
        kernel_bytes: KernelBytes | None = None,
        trips: float = 1,
        branch: int | None = -1,
        is_tpu: bool = False,
    ):
        self._module = module
        self._kernel_bytes = kernel_bytes
        self._trips = trips
        self._branch = branch
        self._is_tpu = is_tpu
        self._found: dict[str, Counts] = {}
        self._step = ""  # the computation of a step

    def of_step(self) -> Counts:
        """Returns the counts of one iteration of the outermost loop, the one with the longest body.

        Raises:
            ValueError: the program has no loop of unknown trip count.
        """
        entry = self._module.computations[self._module.entry]
        loops = [i for i in entry.instructions if i.opcode == "while" and i.trip_count is None]
        if not loops:
            raise ValueError("the program has no loop of unknown trip count")
        main = max(loops, key=lambda i: len(self._module.computations[i.called("body")].instructions))
        self._step = main.called("body")
        step = Counts()
        for key in ("condition", "body"):
            step.add(self._of(main.called(key)))
        return step

    def of_call(self) -> Counts:
        """Returns the counts of a run of the module."""
        return self._of(self._module.entry)

    def _of(self, name: str) -> Counts:
        """Returns the counts of one run of a computation."""
        if name not in self._found:
            counts = self._found[name] = Counts()
            computation = self._module.computations[name]
            for instruction in computation.instructions:
                self._add(counts, computation, instruction)
        return self._found[name]

    def _add(self, counts: Counts, computation: Computation, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode in _FREE or instruction.target in _FREE_TARGETS or opcode.endswith(("-update", "-done")):
            return
        if opcode == "while":
            known = instruction.trip_count
            trips = self._trips if known is None else known
            tests = trips + 1 if known is None or self._is_tpu else 0  # the host of a GPU counts itself
            if tests:
                counts.add(self._of(instruction.called("condition")), tests)
            counts.add(self._of(instruction.called("body")), trips)
        elif opcode == "conditional":
            parts = [*map(self._of, instruction.branches)]
            is_chosen = computation.name == self._step and self._branch is not None
            counts.add(parts[self._branch] if is_chosen else min(parts, key=lambda part: part.bytes))
        elif opcode in ("call", "call-start") or opcode == "async-start" and not self._is_tpu:
            counts.add(self._of(instruction.called("to_apply") or instruction.called("calls")))
        else:
            counts.append(self._operation(computation, instruction))

    def _operation(self, computation: Computation, instruction: Instruction) -> Operation:
        read, written = operation_bytes(self._module, computation, instruction)
        if instruction.target in PALLAS and self._kernel_bytes:
            operands = [computation.by_name[name].arrays[0] for name in instruction.operands]
            read = self._kernel_bytes(instruction, operands)
            written = 0.0
        return Operation(
            instruction.name,
            PALLAS.get(instruction.target, instruction.target or instruction.opcode),
            instruction.op_name,
            read,
            written,
            copied_arrays(self._module, computation, instruction),
            is_launched=not self._is_tpu or bool(read + written) or instruction.takes_cycles,
        )
