"""Where a device keeps an array, and how many bytes it takes there: by its layout, such as
{1,0:T(8,128)(2,1)S(1)}: minor axis first, tiles of 8 x 128, and on-chip memory.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from gpu.hlo_text import Array


class Layout(NamedTuple):
    """A parsed layout."""

    order: tuple[int, ...]  # axes, the minor one first
    tile: tuple[int, ...]  # sizes along the last axes in memory; () without tiles
    space: int  # 0: HBM; others: VMEM, semaphores, scalar memory


@functools.cache
def parse_layout(text: str) -> Layout:
    """A layout as the text of a module has it, with its braces; "": that of the host, without tiles."""
    order, _, rest = text.strip("{}").partition(":")
    tile = re.match(r"T\(([\d,*]+)\)", rest)
    sizes = tile[1].replace("*", "1").split(",") if tile else ()
    space = re.search(r"S\((\d+)\)", rest)
    axes = tuple(int(axis) for axis in order.split(",") if axis)
    return Layout(axes, tuple(map(int, sizes)), int(space[1]) if space else 0)


def is_in_hbm(array: Array) -> bool:
    """Whether an array is in HBM; single numbers are not counted."""
    return parse_layout(array.layout).space == 0 and array.size > 1


def stored_bytes(array: Array, dims: Sequence[int] | None = None) -> float:
    """Bytes of an array in HBM, or of a part of it with these sizes, with the padding of its tiles. 0: it is
    not in HBM.
    """
    if not is_in_hbm(array):
        return 0
    layout = parse_layout(array.layout)
    dims = array.dims if dims is None else dims
    order = layout.order if len(layout.order) == len(dims) else range(len(dims))[::-1]
    sizes = [dims[axis] for axis in order]  # minor axis first
    sizes += [1] * (len(layout.tile) - len(sizes))
    for i, unit in enumerate(layout.tile[::-1]):
        sizes[i] = -(-sizes[i] // unit) * unit
    return math.prod(sizes) * array.itemsize
