"""What the values of a call's arguments decide about its compiled program: branches, iterations, and bytes of
Pallas kernels, found again in the text by their place in the source.
"""

import re
from collections import defaultdict
from typing import Any

import jax
from tpu.kernel_dma import kernel_work

from gpu.hlo_text import Instruction, Module
from gpu.kernel_bytes import kernel_bytes
from gpu.kernel_refs import UncountableError
from gpu.known_values import Evaluator, Observer, SourcePlace, known_leaf
from gpu.program_counts import Choices

_PATH = re.compile(r"(?:^|/)(while|body|cond|branch_\d+_fun)(?=/|$)")

# By the platform, the kernel and what is known of its operands; or why it could not be counted.
_counted: dict[Any, tuple[float, ...] | str] = {}


class KnownChoices(Observer, Choices):
    """The choices of one call.

    Attributes:
        uncounted: why bytes of a kernel are those of its declared operands, by the kernel's path.
    """

    def __init__(self, jaxpr: Any, args: Any, module: Module, one_step: bool, platform: str = "cuda"):
        """
        Args:
            jaxpr: of the program, closed.
            args: of the call; shapes stand for unknown values.
            module: the compiled program.
            one_step: its outermost loop is that over decode steps.
            platform: "cuda" or "tpu".
        """
        self._platform = platform
        self._module = module
        self._branches: dict[Any, list[int | None]] = defaultdict(list)
        self._loops: dict[Any, list[int | None]] = defaultdict(list)
        self._kernels: dict[Any, list[tuple[float, ...] | None]] = defaultdict(list)
        self.uncounted: dict[str, str] = {}
        leaves = [known_leaf(x) for x in jax.tree.leaves(args) if hasattr(x, "dtype")]
        Evaluator(self, one_step, platform).closed(jaxpr, leaves, ())

    # Of `Observer`.

    def on_branch(self, place: SourcePlace, index: int | None) -> None:
        self._branches[place].append(index)

    def on_loop(self, place: SourcePlace, trips: int | None) -> None:
        self._loops[place].append(trips)

    def on_kernel(self, place: SourcePlace, equation: Any, values: list[Any]) -> None:
        known = tuple(None if value is None else (value.shape, value.tobytes()) for value in values)
        key = self._platform, str(equation), known
        if key not in _counted:
            try:
                count = kernel_work if self._platform == "tpu" else kernel_bytes
                _counted[key] = count(equation, values)
            except UncountableError as error:
                _counted[key] = str(error)
        counted = _counted[key]
        if isinstance(counted, str):  # this program's too, if an earlier one has the kernel
            self.uncounted["/".join(place.path)] = counted
            counted = None
        shapes = tuple(tuple(var.aval.shape) for var in equation.invars)
        self._kernels[place, shapes].append(counted)

    # Of `Choices`.

    def branch(self, conditional: Instruction) -> int | None:
        taken = set(self._found(self._branches, conditional, 1))
        return taken.pop() if len(taken) == 1 else None

    def trips(self, loop: Instruction) -> float | None:
        trips = [n for n in self._found(self._loops, loop, 1) if n is not None]
        return sum(trips) / len(trips) if trips else None

    def kernel_work(self, call: Instruction) -> tuple[float, ...] | None:
        """What was counted of the kernel of a call, or the mean of it; None: unknown."""
        # XLA may run one of two equal computations for both: the path is then that of the other.
        shapes = tuple(array.dims for array in call.operand_arrays)
        alike = {place: values for (place, dims), values in self._kernels.items() if dims == shapes}
        found = self._found(alike, call, 0) or [x for values in alike.values() for x in values]
        known = [of for of in found if of is not None]
        if not known or len(known) < len(found):
            return None
        return tuple(sum(part) / len(known) for part in zip(*known, strict=True))

    def _found(self, table: dict[SourcePlace, list[Any]], instruction: Instruction, own: int) -> list[Any]:
        """What was met at the place of an instruction; own: last parts of its path that name itself."""
        parts = _PATH.findall(instruction.op_name)
        path = tuple(parts[: len(parts) - own])
        at_path = {place: values for place, values in table.items() if place.path == path}
        source = self._module.lines.get(instruction.frame)
        exact = [x for place, values in at_path.items() if (place.file, place.line) == source for x in values]
        return exact or [x for values in at_path.values() for x in values]
