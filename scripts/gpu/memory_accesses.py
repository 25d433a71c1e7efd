"""Sets of array elements that a kernel touches: boxes and single elements, and how many they are together."""

import dataclasses
from collections import defaultdict
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
