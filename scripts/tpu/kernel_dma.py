"""What a Pallas TPU kernel does in one call: the bytes that it moves between HBM and VMEM, its products, and
the operations of its vector unit.

Blocks are moved by the pipeline of `pallas_call`: an input's when its index differs from that of the grid
step before, an output's when the next step has another one. Copies of the kernel's own (`make_async_copy`)
are found by evaluating its body with what is known of its scalars. Rows of 128 lanes are moved whole.

A matrix unit multiplies tiles of its own size, so the depth and the outputs of a product count in multiples
of it, and its rows as 128 at least: so long it takes to load the other operand. An operation of a vector unit
takes a register of 8 x 128 numbers of 32 bits (or 16 x 128 of 16). Of four instructions that a cycle has for
it, an exponential needs the only one for such functions, so it counts as four. Loads, stores, shapes,
constants and conversions of layout count as none.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from gpu.card_specs import Tpu
from gpu.hlo_text import Array
from gpu.kernel_bytes import GridKernel, KernelEvaluator
from gpu.kernel_refs import UNKNOWN, Ref, UncountableError, with_unknown
from gpu.known_values import Observer, SourcePlace

from tpu.tile_bytes import box_bytes

VECTOR_SLOTS = 4  # instructions of a cycle for the vector unit
_MOST_STEPS = 4_000_000  # equations
_NO_COPY = ("any", "hbm", "semaphore")  # memory spaces of operands that no pipeline moves
_LEAST_ROWS = 128
_EXPONENTIALS = frozenset("exp exp2 log log1p tanh logistic rsqrt sqrt div sin cos erf pow".split())
_NO_VECTOR_WORK = frozenset(
    "bitcast broadcast_in_dim reshape squeeze slice concatenate get swap iota bitcast_convert_type transpose"
    " program_id num_programs dma_start multiple_of expand_dims copy".split()
)
_CALLS = frozenset("cond while scan jit pjit closed_call run_scoped run_state core_map".split())
_QUIET = frozenset("dma_wait semaphore_signal semaphore_wait semaphore_read delay".split())


class KernelWork(NamedTuple):
    """What a kernel computes in one call."""

    flop: float  # of products, in units of 128 x 128; six times for those of float32 in full precision
    int8_ops: float
    flop_256: float  # the same in units of 256 x 256
    int8_ops_256: float
    vector_ops: float  # registers
    steps: float  # of the grid

    def seconds(self, tpu: Tpu) -> float:
        """The larger of the time of its products and that of its vector unit."""
        is_large = tpu.matrix_size == 256
        flop, int8_ops = (self.flop_256, self.int8_ops_256) if is_large else (self.flop, self.int8_ops)
        products = flop / tpu.tflops / 1e12 + int8_ops / tpu.int8_tops / 1e12
        return max(products, self.vector_ops / VECTOR_SLOTS / tpu.ghz / 1e9)


def kernel_work(equation: Any, values: list[Any]) -> tuple[float, ...]:
    """The fields of a `KernelWork`, then bytes of each operand and result, of one call of a `pallas_call`.
    values: its operands; None: unknown. Raises UncountableError where a loop's end, or the size of a copy,
    depends on what is unknown.
    """
    if equation.primitive.name != "pallas_call":
        raise UncountableError(f"the primitive {equation.primitive.name}")
    work = _TpuEvaluator()
    kernel = GridKernel(equation, _with_choices(equation, values), work, _MOST_STEPS)
    arrays = [_HbmArray(_tiled(block.array_aval)) for block in kernel.blocks]
    _run(kernel, arrays)
    # Bytes of blocks of SMEM, VMEM and HBM alike.
    done = KernelWork(*work.products[128], *work.products[256], work.vector_ops, math.prod(kernel.grid))
    scalars = (var.aval for var in equation.invars[: len(kernel.scalars)])
    scalar_bytes = [float(math.prod(aval.shape) * aval.dtype.itemsize) for aval in scalars]
    return (*done, *scalar_bytes, *(array.moved for array in arrays))


def _with_choices(equation: Any, values: list[Any]) -> list[Any]:
    """The operands of a kernel; the experts of few tokens, where they are unknown, are all different, as far
    as there are so many, and as far apart as they can be.
    """
    scalars = equation.params["grid_mapping"].num_index_operands
    if equation.params["name"] != "experts" or scalars != 1 or values[0] is not None:
        return values
    tiles = equation.invars[0].aval.size
    X = next(var.aval.shape[0] for var in equation.invars if len(var.aval.shape) > 2)
    return [np.arange(tiles, dtype=np.int32) * X // tiles, *values[1:]]


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


def _run(kernel: GridKernel, arrays: list[_HbmArray]) -> None:
    """Runs all steps of the grid."""
    before: list[Any] = [None] * len(arrays)
    for index in itertools.product(*map(range, kernel.grid)):
        refs = []
        for i, (block, array) in enumerate(zip(kernel.blocks, arrays, strict=True)):
            if _is_left_in_hbm(block):
                refs.append(Ref(array, None, tuple((0, size, False) for size in array.shape)))  # type: ignore
                continue
            window = kernel.window(i, index)
            if window != before[i] or any(start is None for start, _, _ in window):
                array.add_box([start for start, _, _ in window], [size for _, size, _ in window])
            before[i] = window
            refs.append(Ref(None))
        kernel.run_body(index, refs)


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
        self.products = {size: [0.0, 0.0] for size in (128, 256)}  # FLOP and int8 operations
        self.vector_ops = 0.0

    def equation(self, equation: Any, values: list[Any], path: tuple[str, ...]) -> Sequence[Any] | None:
        name = equation.primitive.name
        if name in _QUIET:
            return [None] * len(equation.outvars)
        if name == "dot_general":
            self._add_product(equation)
            return None
        if name not in _NO_VECTOR_WORK and name not in _CALLS:
            self.vector_ops += _registers(equation) * (VECTOR_SLOTS if name in _EXPONENTIALS else 1)
        return super().equation(equation, values, path)

    def _add_product(self, equation: Any) -> None:
        left, right = (var.aval for var in equation.invars[:2])
        (contracted, of_right), (batch, right_batch) = equation.params["dimension_numbers"]
        depth = math.prod(left.shape[axis] for axis in contracted)
        rows = math.prod(_others(left, (*contracted, *batch)))
        outputs = math.prod(_others(right, (*of_right, *right_batch)))
        rows, outputs = sorted((rows, outputs))
        times = 2.0 * math.prod(left.shape[axis] for axis in batch) * max(rows, _LEAST_ROWS)
        is_int8 = all(np.dtype(x.dtype).kind in "iu" for x in (left, right))
        if left.dtype == right.dtype == np.float32 and "HIGHEST" in str(equation.params["precision"]).upper():
            times *= 6
        for size, products in self.products.items():
            products[is_int8] += times * _round_up(depth, size) * _round_up(outputs, size)

    def on_dma_start(self, params: Any, values: list[Any]) -> list[Any]:
        source, target = params["tree"].unflatten(with_unknown(values))[:2]
        for end in (source, target):
            ref, transforms = (end.ref, end.transforms) if hasattr(end, "transforms") else (end, ())
            if isinstance(ref, Ref) and ref.touched is not None:
                _check_sizes(transforms)
                ref.access(transforms, None)
        return []


def _others(aval: Any, axes: Sequence[int]) -> list[int]:
    return [size for axis, size in enumerate(aval.shape) if axis not in axes]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _registers(equation: Any) -> float:
    """Vector registers of the largest operand or result, at least one that is no scalar."""
    is_gather = equation.primitive.name == "gather"  # of lanes: one instruction, whatever form indices have
    avals = [var.aval for var in (*equation.invars[: 0 if is_gather else None], *equation.outvars)]
    return max((_registers_of(aval) for aval in avals if getattr(aval, "shape", ())), default=0)


def _registers_of(aval: Any) -> float:
    if not hasattr(aval, "dtype") or hasattr(aval, "inner_aval"):  # a reference
        return 0
    *lead, rows, lanes = (1, *aval.shape)
    bits = 32 if aval.dtype == bool else jax.dtypes.itemsize_bits(aval.dtype)
    return math.prod(lead) * -(-rows // (8 * 32 // bits)) * -(-lanes // 128)


def _check_sizes(transforms: Sequence[Any]) -> None:
    for transform in transforms:
        for index in getattr(transform, "indices", ()):
            if getattr(index, "size", None) is UNKNOWN:
                raise UncountableError("a copy of unknown size")
