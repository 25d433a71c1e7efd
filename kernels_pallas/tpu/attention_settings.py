"""What the programs of a TPU attention kernel have in common."""

from typing import NamedTuple


class Settings(NamedTuple):
    """What is the same for every program."""

    scale: float
    window: int | None
    soft_cap: float | None
    ring: bool
    is_prompt: bool  # many queries of a row: they see most keys, all of them
    width: int  # H
    block_rows: int  # of one query each that a block of queries has; 0: it has queries of one row
    tokens: int  # of a tile of queries
    tiles: int
    rows: int  # of queries that the softmax takes at a time
    positions: int  # that the cache of a row holds
    slots: int  # of a row or a page
    table_pages: int  # of a row, 0 without a block table
    chunk: int  # slots of one copy
    step: int  # keys that the softmax takes at a time: a multiple of the chunk
    block: int  # keys in one of the two buffers: a multiple of the step
    pairs: int  # of a head that a bias of keys rotates; 0: there is none
