"""Bytes of device memory that a Pallas kernel moves: from the loads, stores and copies that its programs issue
at the given lengths, by evaluating its jaxpr with scalars and indices only.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from known_values import Evaluator, Observer
from memory_accesses import Touched, box_of_mask

_MOST_PROGRAMS = 64  # of a grid that is evaluated whole
_MOST_STEPS = 20_000_000  # equations


class KernelBytes(NamedTuple):
    """Bytes of all programs of a kernel."""

    distinct: float  # each element once: what memory has to deliver or take
    issued: float  # all loads and stores; those beyond `distinct` may be served by L2


class UncountableError(Exception):
    """The kernel reaches memory in a way that is not known here."""


@dataclasses.dataclass(frozen=True)
class Ref:
    """A reference within a kernel: a window of an array in device memory, or scratch."""

    touched: Touched | None  # None: scratch
    value: Any = None  # contents of the whole array, if they are known
    window: tuple[tuple[int | None, int, bool], ...] = ()  # start, size and whether the axis is dropped

    def view(self, transforms: Sequence[Any]) -> "Ref":
        """The part that indexers select."""
        ref = self
        for transform in transforms:
            ref = ref._indexed(getattr(transform, "indices", None))
        return ref

    def _indexed(self, indices: Any) -> "Ref":
        if self.touched is None:
            return self
        if indices is None:
            raise UncountableError("a transform that is no index")
        index = iter(indices)
        window = []
        for start, size, dropped in self.window:
            if dropped:
                window.append((start, size, dropped))
                continue
            at = next(index)
            if hasattr(at, "size") and hasattr(at, "start"):
                if at.stride != 1:
                    raise UncountableError("a stride")
                window.append((_sum(start, at.start), int(at.size), False))
            elif np.ndim(_number(at)) == 0:
                window.append((_sum(start, at), 1, True))
            else:
                raise UncountableError("an array of indices in a view")
        return dataclasses.replace(self, window=tuple(window))


def kernel_bytes(equation: Any, values: list[Any]) -> KernelBytes:
    """Bytes that a kernel's call moves.

    Args:
        equation: a `pallas_call` of Triton's, or the call of a Mosaic kernel.
        values: its operands; None: unknown.

    Raises:
        UncountableError: it reaches memory in a way that is not known here.
    """
    kernel = _Kernel(equation, values)
    sizes = [range(size) for size in kernel.grid]
    scale = [np.ones(2)] * kernel.operands  # of distinct and issued bytes
    if math.prod(kernel.grid) > _MOST_PROGRAMS:
        sizes, scale = _without_alike(kernel)
    touched = kernel.run(sizes)
    pairs = list(zip(touched, scale, strict=True))
    return KernelBytes(
        sum(min(t.distinct_bytes * s[0], math.prod(t.shape) * t.itemsize) for t, s in pairs),
        sum(t.issued_bytes * s[1] for t, s in pairs),
    )


def _without_alike(kernel: "_Kernel") -> tuple[list[Sequence[int]], list[np.ndarray]]:
    """The grid with one index of each axis along which all programs do alike, as those of rows and heads; and
    factors on the elements that each operand then lacks.
    """
    sizes: list[Sequence[int]] = [range(size) for size in kernel.grid]
    scale = [np.ones(2) for _ in range(kernel.operands)]
    for axis, size in enumerate(kernel.grid):
        if size < 3:
            continue
        probe: list[Sequence[int]] = [range(n) if n < 5 else (0, n // 2) for n in kernel.grid]

        def figures(index: Sequence[int], axis: int = axis, probe: Any = probe) -> np.ndarray:
            touched = kernel.run([index if i == axis else of for i, of in enumerate(probe)])
            return np.array([(t.distinct_bytes, t.issued_bytes) for t in touched])

        first, *others = (figures([i]) for i in (0, size // 2, size - 1))
        if all(np.array_equal(first, other) for other in others):
            sizes[axis] = (0,)
            ratio = figures(range(size)) / np.maximum(first, 1)
            scale = [of * more for of, more in zip(scale, ratio, strict=True)]
    return sizes, scale


class _Kernel:
    """A kernel's grid and body."""

    def __init__(self, equation: Any, values: list[Any]):
        self._values = values
        params = equation.params
        self._evaluator = _KernelEvaluator()
        if equation.primitive.name == "pallas_call":
            mapping = params["grid_mapping"]
            self.grid = tuple(int(size) for size in mapping.grid)
            self._names: tuple[Any, ...] = tuple(range(len(self.grid)))
            self._body = params["jaxpr"]
            self._blocks = mapping.block_mappings
            self._index_operands = mapping.num_index_operands
            self.operands = len(self._blocks)
        else:
            if len(params["jaxprs"]) != 1:
                raise UncountableError("several bodies")
            (mesh,), (self._body,) = params["meshes"], params["jaxprs"]
            sizes = dict(mesh.shape)
            self.grid = tuple(sizes.values())
            self._names = tuple(sizes)
            self._blocks = None
            self._index_operands = 0
            self.operands = len(getattr(self._body, "jaxpr", self._body).invars)

    def run(self, indices: Sequence[Sequence[int]]) -> list[Touched]:
        """What the programs at these indices of each axis touch of each operand."""
        body = getattr(self._body, "jaxpr", self._body)
        variables = body.invars[self._index_operands :][: self.operands]
        touched = [
            _touched_of(var, block) for var, block in zip(variables, self._blocks_or_none(), strict=True)
        ]
        for index in itertools.product(*indices):
            refs = [self._ref(i, one, index) for i, one in enumerate(touched)]
            scalars = [Ref(None, value) for value in self._values[: self._index_operands]]
            scratch = [Ref(None)] * (len(body.invars) - len(refs) - len(scalars))
            self._evaluator.axes = dict(zip(self._names, zip(index, self.grid, strict=True), strict=True))
            self._evaluator.closed(self._body, [*scalars, *refs, *scratch], ())
            if self._evaluator.steps > _MOST_STEPS:
                raise UncountableError("too many steps")
        return touched

    def _blocks_or_none(self) -> Sequence[Any]:
        return self._blocks if self._blocks is not None else [None] * self.operands

    def _ref(self, operand: int, touched: Touched, index: tuple[int, ...]) -> Ref:
        at = operand + self._index_operands
        value = self._values[at] if at < len(self._values) else None
        if self._blocks is None:
            return Ref(touched, value, tuple((0, size, False) for size in touched.shape))
        block = self._blocks[operand]
        args = [*index, *[Ref(None, value) for value in self._values[: self._index_operands]]]
        starts = Evaluator(Observer()).closed(block.index_map_jaxpr, args, ())
        window = []
        for start, size in zip(starts, block.block_shape, strict=True):
            dropped = type(size).__name__ == "Squeezed"
            length = 1 if dropped else getattr(size, "block_size", size)
            by_element = type(size).__name__ == "Element"
            first = None if start is None else int(start) * (1 if by_element else length)
            window.append((first, length, dropped))
        return Ref(touched, value, tuple(window))


def _touched_of(var: Any, block: Any) -> Touched:
    aval = var.aval if block is None else block.array_aval
    dtype = jax.numpy.dtype(aval.dtype) if "barrier" not in str(aval.dtype) else np.dtype("int8")
    itemsize = 0.5 if dtype.name in ("int4", "uint4") else dtype.itemsize
    return Touched(tuple(aval.shape), itemsize)


class _KernelEvaluator(Evaluator):
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
        return self._access(ref, params["tree"].unflatten(_unknown_kept(flat)), None)

    on_load = on_get

    def on_swap(self, params: Any, values: list[Any]) -> None:
        ref, _, *flat = values
        self._access(ref, params["tree"].unflatten(_unknown_kept(flat)), None)

    on_store = on_addupdate = on_swap

    def on_masked_load(self, params: Any, values: list[Any]) -> list[Any] | None:
        ref, transforms, mask, _ = params["args_tree"].unflatten(_unknown_kept(values))
        return self._access(ref, transforms, _known(mask))

    def on_masked_swap(self, params: Any, values: list[Any]) -> None:
        ref, transforms, _, mask = params["args_tree"].unflatten(_unknown_kept(values))
        self._access(ref, transforms, _known(mask))

    def on_copy_gmem_to_smem(self, params: Any, values: list[Any]) -> None:
        flat = values[3 if params["has_barrier"] else 2 :]
        tree = params["src_transforms_treedef"]
        if params["has_user_predicate"] and values[-1] is not None and not values[-1]:
            return
        self._access(values[0], tree.unflatten(_unknown_kept(flat[: tree.num_leaves])), None)

    def on_copy_smem_to_gmem(self, params: Any, values: list[Any]) -> None:
        if params["has_user_predicate"] and values[-1] is not None and not values[-1]:
            return
        first = 2 + params["src_transforms_treedef"].num_leaves
        tree = params["dst_transforms_treedef"]
        self._access(values[1], tree.unflatten(_unknown_kept(values[first : first + tree.num_leaves])), None)

    def on_async_prefetch(self, params: Any, values: list[Any]) -> None:
        """It fills L2 only; the load that follows counts."""

    def _access(self, ref: Ref, transforms: Sequence[Any], mask: Any) -> list[Any] | None:
        *views, last = transforms or [None]
        ref = ref.view(views)
        touched = ref.touched
        if touched is None:
            value = ref.value
            if value is None or last is None or any(_number(i) is None for i in last.indices):
                return None
            return [np.asarray(value)[tuple(_number(i) for i in last.indices)]]
        arrays = (
            []
            if last is None
            else [i for i in last.indices if np.ndim(_number(i) if not _is_slice(i) else 0)]
        )
        if arrays or any(i is _UNKNOWN for i in getattr(last, "indices", ())) and mask is not None:
            self._access_points(ref, last, mask)
            return None
        view = ref if last is None else ref.view([last])
        starts = [start for start, _, _ in view.window]
        sizes = [size for _, size, _ in view.window]
        if mask is not None:
            mask = np.asarray(mask)
            spans = box_of_mask(
                np.broadcast_to(mask, tuple(s for _, s, dropped in view.window if not dropped))
            )
            if spans is None and mask.any():
                raise UncountableError("a mask that is no box")
            if spans is None:
                return None
            kept = [i for i, (_, _, dropped) in enumerate(view.window) if not dropped]
            for i, (first, count) in zip(kept, spans, strict=True):
                starts[i] = _sum(starts[i], first)
                sizes[i] = count
        touched.add_box(starts, sizes)
        if ref.value is None or mask is not None or any(start is None for start in starts):
            return None
        at = tuple(
            start if dropped else slice(start, start + size)  # type: ignore[operator]
            for start, (_, size, dropped) in zip(starts, view.window, strict=True)
        )
        return [np.asarray(ref.value)[at]]

    def _access_points(self, ref: Ref, last: Any, mask: Any) -> None:
        """Elements by arrays of indices."""
        touched: Any = ref.touched
        index = iter(last.indices)
        flat: Any = np.int64(0)
        shape: tuple[int, ...] = ()
        known = True
        for (start, _, dropped), length in zip(ref.window, touched.shape, strict=True):
            at = np.int64(0) if dropped else next(index)
            if not dropped and _is_slice(at):
                raise UncountableError("slices beside arrays of indices")
            at = _number(at)
            known = known and at is not None and start is not None
            if known:
                flat = flat * length + start + at
        shape = tuple(last.int_indexer_shape)
        if not known:
            count = math.prod(shape) if mask is None else int(np.sum(mask))
            touched.unplaced += count
            touched.issued += count
            return
        flat = np.broadcast_to(flat, shape)
        touched.add_points(flat[np.broadcast_to(mask, shape)] if mask is not None else flat.ravel())


class _Unknown:
    """Stands for an unknown value in a tree, where None would be no leaf."""

    shape = ()


_UNKNOWN = _Unknown()


def _unknown_kept(values: Sequence[Any]) -> list[Any]:
    return [_UNKNOWN if value is None else value for value in values]


def _known(value: Any) -> Any:
    return None if value is _UNKNOWN else value


def _is_slice(index: Any) -> bool:
    return hasattr(index, "start") and hasattr(index, "stride")


def _number(index: Any) -> Any:
    """An index as NumPy has it; None: unknown."""
    return None if index is _UNKNOWN or _is_slice(index) else np.asarray(index)


def _sum(start: int | None, more: Any) -> int | None:
    if start is None or more is _UNKNOWN or more is None:
        return None
    return start + int(more)
