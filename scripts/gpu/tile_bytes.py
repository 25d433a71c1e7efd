"""Where a TPU keeps an array, and how many bytes it takes there: by its layout, such as
{1,0:T(8,128)(2,1)S(1)}: minor axis first, tiles of 8 x 128 with pairs of rows packed, VMEM.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from gpu.hlo_text import Array

_LANES = 128
VMEM = 1


class Layout(NamedTuple):
    """A parsed layout."""

    order: tuple[int, ...]  # axes, the minor one first
    tile: tuple[int, ...]  # sizes along the last axes in memory; () without tiles
    packed: int  # elements that one 32-bit word has of as many rows
    space: int  # 0: HBM; others: VMEM, semaphores, scalar memory


@functools.cache
def parse_layout(text: str) -> Layout:
    """A layout as the text of a module has it, with its braces; "": that of the host, without tiles."""
    order, _, rest = text.strip("{}").partition(":")
    tiles = re.match(r"T((?:\([\d,*]+\))+)", rest)
    levels = [
        tuple(int(size) for size in level.replace("*", "1").split(","))
        for level in re.findall(r"\(([\d,*]+)\)", tiles[1] if tiles else "")
    ]
    packed = next((level[0] for level in levels[1:] if len(level) == 2 and level[1] == 1), 1)
    space = re.search(r"S\((\d+)\)", rest)
    axes = tuple(int(axis) for axis in order.split(",") if axis)
    return Layout(axes, levels[0] if levels else (), packed, int(space[1]) if space else 0)


def is_in_hbm(array: Array) -> bool:
    """Whether an array is in HBM; single numbers are not counted."""
    return parse_layout(array.layout).space == 0 and array.size > 1


def stored_bytes(array: Array) -> float:
    """Bytes of an array with the padding of its tiles."""
    return box_bytes(array, array.dims, whole=True)


def box_bytes(array: Array, box: Sequence[int], whole: bool = False) -> float:
    """Bytes that a transfer of a box out of an array moves: whole rows of 128 lanes, of packed rows all.
    whole: round up to whole tiles instead, as a whole array is stored.
    """
    layout = parse_layout(array.layout)
    order = layout.order if len(layout.order) == len(array.dims) else range(len(array.dims))[::-1]
    sizes = [box[axis] for axis in order]  # minor axis first
    if layout.tile:
        tile = layout.tile[::-1]
        sizes += [1] * (len(tile) - len(sizes))
        if not whole:
            tile = _rows_of(tile, layout.packed)
        for i, unit in enumerate(tile):
            sizes[i] = -(-sizes[i] // unit) * unit
    return math.prod(sizes) * array.itemsize


def _rows_of(tile: tuple[int, ...], packed: int) -> tuple[int, ...]:
    """The part of a tile that is moved at once; tile: minor axis first."""
    if len(tile) == 1:
        return (min(tile[0], _LANES * packed),)
    return (min(tile[0], _LANES), min(tile[1], packed), *(1 for _ in tile[2:]))


def is_whole_rows(array: Array, box: Sequence[int]) -> bool:
    """Whether a box fills the rows that a transfer of it moves, so that none has to be read before."""
    layout = parse_layout(array.layout)
    minor = layout.order[: len(layout.tile)]
    units = _rows_of(layout.tile[::-1], layout.packed) if layout.tile else ()
    return all(
        box[axis] == array.dims[axis] or box[axis] % unit == 0
        for axis, unit in zip(minor, units, strict=False)
    )
