"""Bytes of device memory that a Pallas kernel moves: from the loads, stores and copies that its programs
issue at the given lengths, by evaluating its jaxpr with scalars and indices only.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gpu.kernel_refs import Ref, Touched, UncountableError, known_or_none, with_unknown
from gpu.known_values import Evaluator, Observer

_MOST_PROGRAMS = 64  # of a grid that is evaluated whole
_MOST_STEPS = 20_000_000  # equations


def kernel_bytes(equation: Any, values: list[Any]) -> tuple[float]:
    """Bytes that a kernel's call, a `pallas_call` of Triton's or the call of a Mosaic kernel, moves, each
    element once: what memory has to deliver or take. values: its operands; None: unknown. Raises
    UncountableError where it reaches memory in a way that is not known here.
    """
    kernel = GridKernel(equation, values, KernelEvaluator(), _MOST_STEPS)
    sizes = [range(size) for size in kernel.grid]
    scale = [1.0] * len(kernel.blocks)
    if math.prod(kernel.grid) > _MOST_PROGRAMS:
        sizes, scale = _without_alike(kernel)
    touched = kernel.run(sizes)
    pairs = zip(touched, scale, strict=True)
    return (sum(min(t.distinct_bytes * s, math.prod(t.shape) * t.itemsize) for t, s in pairs),)


def _without_alike(kernel: "GridKernel") -> tuple[list[Sequence[int]], list[float]]:
    """The grid with one index of each axis along which all programs do alike, as those of rows and heads; and
    factors on the elements that each operand then lacks.
    """
    sizes: list[Sequence[int]] = [range(size) for size in kernel.grid]
    scale = [1.0] * len(kernel.blocks)
    for axis, size in enumerate(kernel.grid):
        if size < 3:
            continue
        probe: list[Sequence[int]] = [range(n) if n < 5 else (0, n // 2) for n in kernel.grid]

        def figures(index: Sequence[int], axis: int = axis, probe: Any = probe) -> np.ndarray:
            touched = kernel.run([index if i == axis else of for i, of in enumerate(probe)])
            return np.array([t.distinct_bytes for t in touched])

        first = figures([0])
        if first.all() and all(np.array_equal(first, figures([i])) for i in reversed(range(1, size))):
            sizes[axis] = (0,)
            ratio = figures(range(size)) / first
            scale = [of * more for of, more in zip(scale, ratio, strict=True)]
    return sizes, scale


class GridKernel:
    """A kernel's grid, blocks and body. values: its operands; None: unknown."""

    def __init__(self, equation: Any, values: list[Any], evaluator: "KernelEvaluator", most_steps: int):
        params = equation.params
        self.evaluator = evaluator
        self._most_steps = most_steps  # equations
        if equation.primitive.name == "pallas_call":
            mapping = params["grid_mapping"]
            if getattr(mapping, "num_dynamic_grid_bounds", 0):
                raise UncountableError("a grid of unknown size")
            self.grid = tuple(int(size) for size in mapping.grid)
            self._names: Sequence[Any] = range(len(self.grid))
            self._body = params["jaxpr"]
            scalars = mapping.num_index_operands
            self.blocks = mapping.block_mappings
        else:
            if len(params["jaxprs"]) != 1:
                raise UncountableError("several bodies")
            (mesh,) = params["meshes"]
            (self._body,) = params["jaxprs"]
            sizes = dict(mesh.shape)
            self.grid = tuple(sizes.values())
            self._names = tuple(sizes)
            scalars = 0
            self.blocks = [None] * len(getattr(self._body, "jaxpr", self._body).invars)
        self.scalars = [Ref(None, value) for value in values[:scalars]]
        self._arrays = values[scalars:]

    def touched(self) -> list[Touched]:
        """What has been touched of each operand: nothing yet."""
        body = getattr(self._body, "jaxpr", self._body)
        avals = [var.aval for var in body.invars[len(self.scalars) :]]
        found = []
        for aval, block in zip(avals, self.blocks, strict=False):
            aval = aval if block is None else block.array_aval
            dtype = jax.numpy.dtype(aval.dtype) if "barrier" not in str(aval.dtype) else np.dtype("int8")
            itemsize = 0.5 if dtype.name in ("int4", "uint4") else dtype.itemsize
            found.append(Touched(tuple(aval.shape), itemsize))
        return found

    def window(self, operand: int, index: tuple[int, ...]) -> tuple[tuple[int | None, int, bool], ...]:
        """Start, size and whether the axis is dropped, of each axis of a block; start None: unknown."""
        block = self.blocks[operand]
        starts = KernelEvaluator().closed(block.index_map_jaxpr, [*index, *self.scalars], ())
        window = []
        for start, size in zip(starts, block.block_shape, strict=True):
            dropped = type(size).__name__ == "Squeezed"
            length = 1 if dropped else getattr(size, "block_size", size)
            by_element = type(size).__name__ == "Element"
            first = None if start is None else int(start) * (1 if by_element else length)
            window.append((first, length, dropped))
        return tuple(window)

    def run_body(self, index: tuple[int, ...], refs: list[Ref]) -> None:
        """One program, with references to the operands and results."""
        body = getattr(self._body, "jaxpr", self._body)
        scratch = [Ref(None)] * (len(body.invars) - len(refs) - len(self.scalars))
        self.evaluator.axes = dict(zip(self._names, zip(index, self.grid, strict=True), strict=True))
        self.evaluator.closed(self._body, [*self.scalars, *refs, *scratch], ())
        if self.evaluator.steps > self._most_steps:
            raise UncountableError("too many steps")

    def run(self, indices: Sequence[Sequence[int]]) -> list[Touched]:
        """What the programs at these indices of each axis touch of each operand."""
        touched = self.touched()
        for index in itertools.product(*indices):
            refs = []
            for i, (one, block) in enumerate(zip(touched, self.blocks, strict=True)):
                whole = tuple((0, size, False) for size in one.shape)
                value = self._arrays[i] if i < len(self._arrays) else None
                refs.append(Ref(one, value, whole if block is None else self.window(i, index)))
            self.run_body(index, refs)
        return touched


class KernelEvaluator(Evaluator):
    """Evaluates a kernel's body, and notes which elements it touches."""

    def __init__(self) -> None:
        super().__init__(Observer())
        self.axes: dict[Any, tuple[int, int]] = {}  # index and size

    def equation(self, equation: Any, values: list[Any], path: tuple[str, ...]) -> Sequence[Any] | None:
        name = equation.primitive.name
        params = equation.params
        if name in ("program_id", "num_programs"):
            return [np.int32(self.axes[params["axis"]][name == "num_programs"])]
        if name == "axis_index":
            names = params["axis_name"]
            (axis,) = names if isinstance(names, tuple) else (names,)
            return [np.int32(self.axes[axis][0])]
        if handler := getattr(self, f"on_{name}", None):
            return handler(params, values)
        if name in ("run_scoped", "run_state", "core_map"):
            return self._run_inside(name, params, values, path)
        if any(isinstance(value, Ref) and value.touched for value in values) and name not in (
            "cond", "while", "scan", "jit", "pjit", "closed_call", "custom_vmap_call",
        ):  # fmt: skip
            raise UncountableError(f"the primitive {name}")
        if any(isinstance(value, Ref) for value in values) and name not in (
            "cond",
            "while",
            "scan",
            "jit",
            "pjit",
        ):
            return None
        return super().equation(equation, values, path)

    def _run_inside(self, name: str, params: Any, values: list[Any], path: tuple[str, ...]) -> None:
        jaxpr = params["jaxpr"]
        if name == "run_state":  # values become scratch
            self.closed(jaxpr, [x if isinstance(x, Ref) else Ref(None) for x in values], path)
            return None
        scratch = [Ref(None)] * len(jaxpr.invars)
        if name == "run_scoped":
            self.run(jaxpr, values, scratch, path)
            return None
        axes = dict(params["mesh"].shape)
        outer = self.axes
        for index in itertools.product(*map(range, axes.values())):
            self.axes = outer | dict(zip(axes, zip(index, axes.values(), strict=True), strict=True))
            self.run(jaxpr, values, scratch, path)
        self.axes = outer
        return None

    # Loads and stores, by the names of their primitives.

    def on_get(self, params: Any, values: list[Any]) -> list[Any] | None:
        ref, *flat = values
        return _one(ref.access(params["tree"].unflatten(with_unknown(flat)), None))

    on_load = on_get

    def on_swap(self, params: Any, values: list[Any]) -> None:
        ref, _, *flat = values
        ref.access(params["tree"].unflatten(with_unknown(flat)), None)

    on_store = on_addupdate = on_swap

    def on_masked_load(self, params: Any, values: list[Any]) -> list[Any] | None:
        ref, transforms, mask, _ = params["args_tree"].unflatten(with_unknown(values))
        return _one(ref.access(transforms, known_or_none(mask)))

    def on_masked_swap(self, params: Any, values: list[Any]) -> None:
        ref, transforms, _, mask = params["args_tree"].unflatten(with_unknown(values))
        ref.access(transforms, known_or_none(mask))

    def on_copy_gmem_to_smem(self, params: Any, values: list[Any]) -> None:
        flat = values[3 if params["has_barrier"] else 2 :]
        tree = params["src_transforms_treedef"]
        if params["has_user_predicate"] and values[-1] is not None and not values[-1]:
            return
        values[0].access(tree.unflatten(with_unknown(flat[: tree.num_leaves])), None)

    def on_copy_smem_to_gmem(self, params: Any, values: list[Any]) -> None:
        if params["has_user_predicate"] and values[-1] is not None and not values[-1]:
            return
        first = 2 + params["src_transforms_treedef"].num_leaves
        tree = params["dst_transforms_treedef"]
        values[1].access(tree.unflatten(with_unknown(values[first : first + tree.num_leaves])), None)

    def on_async_prefetch(self, params: Any, values: list[Any]) -> None:
        """It fills L2 only; the load that follows counts."""


def _one(value: Any) -> list[Any] | None:
    return None if value is None else [value]
