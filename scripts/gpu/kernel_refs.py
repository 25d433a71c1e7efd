"""References within a kernel: which elements of device memory its loads, stores and copies touch."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

Box = tuple[tuple[int, int], ...]  # (start, size) along each axis


@dataclasses.dataclass
class Touched:
    """What a kernel touches of one array."""

    shape: tuple[int, ...]
    itemsize: float
    boxes: set[Box] = dataclasses.field(default_factory=set)
    points: list[np.ndarray] = dataclasses.field(default_factory=list)  # flat indices
    unplaced: int = 0  # elements at unknown indices, taken to be different ones

    def add_box(self, starts: list[int | None], sizes: list[int]) -> None:
        """A box; what lies outside of the array is not touched. Start None: unknown."""
        if any(start is None for start in starts):
            self.unplaced += int(np.prod(sizes))
            return
        box = []
        for start, size, end in zip(starts, sizes, self.shape, strict=True):
            first = max(start, 0)  # type: ignore[type-var]
            last = min(start + size, end)  # type: ignore[operator]
            if last <= first:
                return
            box.append((int(first), int(last - first)))
        self.boxes.add(tuple(box))

    def add_points(self, index: np.ndarray) -> None:
        """Elements by their flat indices."""
        self.points.append(np.unique(index))

    @property
    def distinct_bytes(self) -> float:
        """Bytes that memory delivers or takes at least once."""
        count = self.unplaced + sum(map(_volume, _merged(self.boxes)))
        if self.points:
            count += len(np.unique(np.concatenate(self.points)))
        return min(count, int(np.prod(self.shape))) * self.itemsize


def box_of_mask(mask: np.ndarray) -> list[tuple[int, int]] | None:
    """(first, count) along each axis if the true elements are a box; None: they are not."""
    spans = []
    for axis in range(mask.ndim):
        others = tuple(i for i in range(mask.ndim) if i != axis)
        (at,) = np.nonzero(mask.any(axis=others))
        if not len(at) or at[-1] - at[0] + 1 != len(at):
            return None
        spans.append((int(at[0]), len(at)))
    return spans if mask.sum() == np.prod([count for _, count in spans]) else None


def _volume(box: Box) -> int:
    return int(np.prod([size for _, size in box], dtype=np.int64))


def _merged(boxes: set[Box]) -> set[Box]:
    """Boxes of these elements, fewer of them: those that differ along one axis only are united."""
    for axis in range(len(next(iter(boxes), ()))):
        groups: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for box in boxes:
            groups[box[:axis] + box[axis + 1 :]].append(box[axis])
        boxes = {
            (*others[:axis], span, *others[axis:])
            for others, spans in groups.items()
            for span in _union(spans)
        }
    return boxes


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint (start, size) that cover the same numbers."""
    united: list[list[int]] = []  # start and end
    for start, size in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1][1] = max(united[-1][1], start + size)
        else:
            united.append([start, start + size])
    return [(start, end - start) for start, end in united]


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

    def access(self, transforms: Sequence[Any], mask: Any) -> Any:
        """Touches the elements that indexers select, where mask is true (None: everywhere). Returns their
        values; None: unknown.
        """
        *views, last = transforms or [None]
        ref = self.view(views)
        touched = ref.touched
        if touched is None:
            value = ref.value
            if value is None or last is None or any(_number(i) is None for i in last.indices):
                return None
            return np.asarray(value)[tuple(_number(i) for i in last.indices)]
        arrays = (
            []
            if last is None
            else [i for i in last.indices if np.ndim(_number(i) if not _is_slice(i) else 0)]
        )
        if arrays or any(i is UNKNOWN for i in getattr(last, "indices", ())) and mask is not None:
            ref._access_points(last, mask)
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
        return np.asarray(ref.value)[at]

    def _access_points(self, last: Any, mask: Any) -> None:
        """Elements by arrays of indices."""
        touched: Any = self.touched
        index = iter(last.indices)
        flat: Any = np.int64(0)
        shape: tuple[int, ...] = ()
        known = True
        for (start, _, dropped), length in zip(self.window, touched.shape, strict=True):
            at = np.int64(0) if dropped else next(index)
            if not dropped and _is_slice(at):
                raise UncountableError("slices beside arrays of indices")
            at = _number(at)
            known = known and at is not None and start is not None
            if known:
                flat = flat * length + start + at
        shape = tuple(last.int_indexer_shape)
        if not known:
            touched.unplaced += math.prod(shape) if mask is None else int(np.sum(mask))
            return
        flat = np.broadcast_to(flat, shape)
        touched.add_points(flat[np.broadcast_to(mask, shape)] if mask is not None else flat.ravel())


class _Unknown:
    """Stands for an unknown value in a tree, where None would be no leaf."""

    shape = ()


UNKNOWN = _Unknown()


def with_unknown(values: Sequence[Any]) -> list[Any]:
    return [UNKNOWN if value is None else value for value in values]


def known_or_none(value: Any) -> Any:
    return None if value is UNKNOWN else value


def _is_slice(index: Any) -> bool:
    return hasattr(index, "start") and hasattr(index, "stride")


def _number(index: Any) -> Any:
    """An index as NumPy has it; None: unknown."""
    return None if index is UNKNOWN or _is_slice(index) else np.asarray(index)


def _sum(start: int | None, more: Any) -> int | None:
    if start is None or more is UNKNOWN or more is None:
        return None
    return start + int(more)
