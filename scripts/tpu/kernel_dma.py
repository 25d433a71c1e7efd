"""What a Pallas TPU kernel does in one call: the bytes that it moves between HBM and VMEM, its products and
its vector operations.

Blocks are moved by the pipeline of `pallas_call`: an input's when its index differs from that of the grid
step before, an output's when the next step has another one. Copies of the kernel's own (`make_async_copy`)
are found by evaluating its body with what is known of its scalars. Rows of 128 lanes are moved whole.

A product counts as one of 128 rows at least: so long it takes to load the other operand into the matrix
units. A vector operation is one instruction on a register of 8 x 128 numbers of 32 bits; functions such as
exp count as one too; shuffles, loads and stores count as none.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from hlo_text import Array
from kernel_bytes import KernelEvaluator, block_window
from kernel_refs import UNKNOWN, Ref, UncountableError, with_unknown
from known_values import Observer, SourcePlace
from tile_bytes import box_bytes

_MOST_STEPS = 4_000_000  # equations
_NO_COPY = ("any", "hbm", "semaphore")  # memory spaces of operands that no pipeline moves
_LEAST_ROWS = 128
_VECTOR = frozenset(
    "add sub mul div rem max min and or xor not neg abs sign round floor clamp integer_pow square sqrt rsqrt"
    " exp exp2 log log1p tanh logistic cos sin select_n eq ne lt le gt ge shift_left shift_right_logical"
    " shift_right_arithmetic convert_element_type".split()
)
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or argmax argmin cumsum".split())
_QUIET = frozenset("dma_wait semaphore_signal semaphore_wait semaphore_read delay".split())


class Arithmetic(NamedTuple):
    """What a kernel computes in one call."""

    flop: float  # of products, six times for those of float32 in full precision
    int8_ops: float  # of int8 products
    vector_ops: float
    steps: float  # of the grid


def kernel_work(equation: Any, values: list[Any]) -> tuple[float, ...]:
    """The numbers of `Arithmetic`, and the bytes of each operand and result, of one call.

    Args:
        equation: a `pallas_call` for TPUs.
        values: its operands; None: unknown.

    Raises:
        UncountableError: a loop's end, or the size of a copy, depends on what is unknown.
    """
    if equation.primitive.name != "pallas_call":
        raise UncountableError(f"the primitive {equation.primitive.name}")
    return _Kernel(equation, values).run()


@dataclasses.dataclass
class _HbmArray:
    """An operand or result; stands for `memory_accesses.Touched`."""

    array: Array
    moved: float = 0  # bytes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.dims

    def add_box(self, starts: Sequence[int | None], sizes: Sequence[int]) -> None:
        """A copy of a box; what lies outside of the array is not moved."""
        box = []
        for start, size, end in zip(starts, sizes, self.shape, strict=True):
            inside = size if start is None else min(start + size, end) - max(start, 0)
            if inside <= 0:
                return
            box.append(int(inside))
        self.moved += box_bytes(self.array, box)


class _Loops(Observer):
    def on_loop(self, place: SourcePlace, trips: int | None) -> None:
        if trips is None:
            raise UncountableError("a loop of unknown length")


class _Kernel:
    """A kernel's grid, blocks and body."""

    def __init__(self, equation: Any, values: list[Any]):
        params = equation.params
        mapping = params["grid_mapping"]
        if getattr(mapping, "num_dynamic_grid_bounds", 0):
            raise UncountableError("a grid of unknown size")
        self._grid = tuple(int(size) for size in mapping.grid)
        self._body = params["jaxpr"]
        self._blocks = mapping.block_mappings
        self._inputs = mapping.num_inputs
        self._scalars = [Ref(None, value) for value in values[: mapping.num_index_operands]]
        self._scalar_bytes = [
            float(math.prod(var.aval.shape) * var.aval.dtype.itemsize)
            for var in equation.invars[: mapping.num_index_operands]
        ]
        self._arrays = [_HbmArray(_tiled(block.array_aval)) for block in self._blocks]
        self._evaluator = _TpuEvaluator()

    def run(self) -> tuple[float, ...]:
        """Runs all steps of the grid."""
        before: list[Any] = [None] * len(self._blocks)
        for index in itertools.product(*map(range, self._grid)):
            refs = []
            for i, (block, array) in enumerate(zip(self._blocks, self._arrays, strict=True)):
                if _is_left_in_hbm(block):
                    refs.append(Ref(array, None, tuple((0, size, False) for size in array.shape)))  # type: ignore
                    continue
                window = block_window(block, [*index, *self._scalars])
                if window != before[i] or any(start is None for start, _, _ in window):
                    array.add_box([start for start, _, _ in window], [size for _, size, _ in window])
                before[i] = window
                refs.append(Ref(None))
            self._run_body(index, refs)
        work = self._evaluator
        # Bytes of blocks of SMEM, VMEM and HBM alike.
        arithmetic = Arithmetic(work.flop, work.int8_ops, work.vector_ops, math.prod(self._grid))
        return (*arithmetic, *self._scalar_bytes, *(array.moved for array in self._arrays))

    def _run_body(self, index: tuple[int, ...], refs: list[Ref]) -> None:
        body = getattr(self._body, "jaxpr", self._body)
        scratch = [Ref(None)] * (len(body.invars) - len(refs) - len(self._scalars))
        self._evaluator.axes = dict(enumerate(zip(index, self._grid, strict=True)))
        self._evaluator.closed(self._body, [*self._scalars, *refs, *scratch], ())
        if self._evaluator.steps > _MOST_STEPS:
            raise UncountableError("too many steps")


def _tiled(aval: Any) -> Array:
    """An array in the layout that XLA gives a kernel's operands."""
    bits = jax.dtypes.itemsize_bits(aval.dtype)
    dtype = f"s{bits}" if np.dtype(aval.dtype).kind in "iub" or bits < 8 else f"f{bits}"
    order = ",".join(str(axis) for axis in reversed(range(len(aval.shape))))
    packed = 32 // bits
    rows = f"T(8,128)({packed},1)" if len(aval.shape) > 1 else f"T({128 * packed})(128)({packed},1)"
    return Array(dtype, tuple(aval.shape), f"{{{order}:{rows}}}")


def _is_left_in_hbm(block: Any) -> bool:
    space = str(getattr(block.block_aval, "memory_space", "")).lower()
    return any(name in space for name in _NO_COPY)


class _TpuEvaluator(KernelEvaluator):
    """Evaluates a kernel's body: counts its products, and notes its copies."""

    def __init__(self) -> None:
        super().__init__()
        self._observer = _Loops()
        self.flop = 0.0
        self.int8_ops = 0.0
        self.vector_ops = 0.0

    def equation(self, equation: Any, values: list[Any], path: tuple[str, ...]) -> Sequence[Any] | None:
        name = equation.primitive.name
        if name in _QUIET:
            return [None] * len(equation.outvars)
        if name == "dot_general":
            self._add_product(equation)
            return None
        if name in _VECTOR or name in _REDUCTIONS:
            shape = (equation.invars if name in _REDUCTIONS else equation.outvars)[0].aval.shape
            self.vector_ops += _registers(shape)
        return super().equation(equation, values, path)

    def _add_product(self, equation: Any) -> None:
        left, right = (var.aval for var in equation.invars[:2])
        (contracted, _), _ = equation.params["dimension_numbers"]
        depth = math.prod(left.shape[axis] for axis in contracted)
        batch = math.prod(left.shape[axis] for axis in equation.params["dimension_numbers"][1][0])
        of_each = [math.prod(operand.shape) / depth / batch for operand in (left, right)]
        work = 2.0 * depth * batch * max(of_each) * max(min(of_each), _LEAST_ROWS)
        is_int8 = all(np.dtype(x.dtype).kind in "iu" for x in (left, right))
        passes = 1
        if left.dtype == right.dtype == np.float32 and "HIGHEST" in str(equation.params["precision"]).upper():
            passes = 6
        if is_int8:
            self.int8_ops += work
        else:
            self.flop += passes * work

    def on_dma_start(self, params: Any, values: list[Any]) -> list[Any]:
        source, target = params["tree"].unflatten(with_unknown(values))[:2]
        for end in (source, target):
            ref, transforms = (end.ref, end.transforms) if hasattr(end, "transforms") else (end, ())
            if isinstance(ref, Ref) and ref.touched is not None:
                _check_sizes(transforms)
                ref.access(transforms, None)
        return []


def _registers(shape: Sequence[int]) -> int:
    """Vector registers of an array of 32-bit numbers; 0 of a single number."""
    if not shape:
        return 0
    *outer, rows, lanes = (1, *shape)
    return math.prod(outer) * -(-rows // 8) * -(-lanes // 128)


def _check_sizes(transforms: Sequence[Any]) -> None:
    for transform in transforms:
        for index in getattr(transform, "indices", ()):
            if getattr(index, "size", None) is UNKNOWN:
                raise UncountableError("a copy of unknown size")
