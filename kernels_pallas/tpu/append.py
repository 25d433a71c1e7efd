"""The append of keys and values to a cache on TPUs, in place.

Memory is divided into tiles of 8 to 32 slots, which a copy takes whole. A tile that new tokens fill in part
is read, changed and written back; all tiles of a program are in flight at once.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from ..key_layouts import SideBySide, join, quantize
from ..reference_append import rotate
from .attention_kernel import LANES

_FEW_TOKENS = 17  # then tiles are as small as memory has them
_PROMPT_TILE = 64  # slots
_PROGRAM_BYTES = 2**21  # of the tiles of a program


class _Settings(NamedTuple):
    """What is the same for every program."""

    tile: int  # slots
    tiles: int  # that the tokens of a row may touch
    items: int  # tiles of all rows
    axis: int  # of slots, in a tile [K, ...]
    slots: int  # of a row or a page
    pages: int  # of a row, 0 without a block table
    ring: bool


class _Place(NamedTuple):
    """A tile of slots of one row."""

    position: Any  # of its first slot
    low: Any  # the first position that the row writes
    high: Any  # the end of these
    is_used: Any  # bool: some of these are in the tile
    is_full: Any  # bool: the tile is written whole, and need not be read
    memory: Any  # a reference to its slots in the cache


def rope_append(  # noqa: PLR0913
    q_BTNH, k_BTKH, v_BTKH, cos_BTP, sin_BTP, kv_PKSX, v_PKSH, start_B, num_tokens_B, *, capacity,
    table_BP=None, ring=False, interpret=False,
) -> tuple[jax.Array, SideBySide, None]:  # fmt: skip
    """Rotates queries and keys by their angles, and writes the keys and values of new tokens to a cache.

    Args:
        q_BTNH, k_BTKH, v_BTKH: of the new tokens. N is a multiple of K.
        cos_BTP, sin_BTP: float32, of the pairs (i, i + P) of a head; the rest of a head stays. None for both:
            no RoPE. XLA rotates, before the kernel.
        kv_PKSX: the cache, `SideBySide`; XLA copies it where it is used again. Levels are quantized to
            nearest, between the smallest and the largest number of a vector.
        v_PKSH: None.
        start_B: int32, the position of each row's first token.
        num_tokens_B: int32, how many of the T tokens are written.
        capacity: positions from it on are not written.
        table_BP: int32, the block table: position p is in slot p % S of page table_BP[b, p // S].
        ring: position p is in slot p % S.
        interpret: emulate a TPU on a CPU, slowly, and raise where accesses to memory race.

    Returns:
        The rotated queries of all tokens, in their dtype, the cache, and None.
    """
    assert v_PKSH is None
    q_BTNH, k_BTKH = (rotate(x, cos_BTP, sin_BTP) for x in (q_BTNH, k_BTKH))
    S = kv_PKSX.values.shape[2]
    if not ring:
        capacity = min(capacity, S if table_BP is None else S * table_BP.shape[1])
    count_B = jnp.clip(capacity - start_B, 0, num_tokens_B)
    k, v = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
    pair: Any = (k, v) if kv_PKSX.scale is None else (quantize(k, 8), quantize(v, 8))
    new = join(*pair)
    run = partial(_write, start_B=start_B, count_B=count_B, table_BP=table_BP, ring=ring, interpret=interpret)
    values = run(kv_PKSX.values, new.values, axis=1)
    scale = None if kv_PKSX.scale is None else run(kv_PKSX.scale, new.scale, axis=2)
    return q_BTNH, SideBySide(values, scale), None


def tile_slots(slots: int, dtype: Any, tokens: int = 1) -> int:
    """The slots of a tile of keys and values, in a row or a page of `slots` slots."""
    if tokens > _FEW_TOKENS and slots % _PROMPT_TILE == 0:
        return _PROMPT_TILE
    return 32 // jnp.dtype(dtype).itemsize


def _write(old, new, *, start_B, count_B, table_BP, ring, axis, interpret) -> jax.Array:  # noqa: PLR0913
    """`old` with the first count_B[b] tokens of `new` from position start_B[b] on. Their slots are on axis
    1 + `axis`: [P, K, S, X] and [B, K, T, X], or [P, K, 4, S] and [B, K, 4, T].
    """
    B = len(start_B)
    S = old.shape[1 + axis]
    T = new.shape[1 + axis]
    tile = tile_slots(S, old.dtype, T) if axis == 1 else S if S % LANES else LANES
    tiles = pl.cdiv(T - 1, tile) + 1
    pages = 0 if table_BP is None else table_BP.shape[1]
    settings = _Settings(tile, tiles, B * tiles, axis, S, pages, ring)
    new = _tiles_of(new.astype(old.dtype), start_B, settings)
    shape = list(old.shape[1:])
    shape[axis] = tile
    group = min(max(_PROGRAM_BYTES // (old.dtype.itemsize * math.prod(shape)), 1), B * tiles)
    scalars = [start_B, count_B] + ([] if table_BP is None else [table_BP.reshape(-1)])
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    if not interpret:
        old = pltpu.with_memory_space_constraint(old, memory_space=pltpu.HBM)
    return pl.pallas_call(
        partial(_kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(B * tiles, group),),
            in_specs=[pl.BlockSpec((group, *new.shape[1:]), lambda i, *_: (i, 0, 0, 0)), in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.VMEM((group, *shape), old.dtype), pltpu.SemaphoreType.DMA((2, group))],
        ),
        out_shape=result_type(old.shape, old.dtype, *scalars, new, old),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        name="append",
    )(*scalars, new, old)


def _tiles_of(new, start_B, settings: _Settings) -> jax.Array:
    """New tokens as the tiles that they touch, [B · tiles, K, ...]: each in its slot; other slots may hold
    anything. A single token of a row stays one, in 32 bits, which the kernel can repeat.
    """
    axis = 1 + settings.axis
    T = new.shape[axis]
    if T == 1:
        return new.astype(jnp.float32 if jnp.issubdtype(new.dtype, jnp.floating) else jnp.int32)
    size = settings.tiles * settings.tile
    first_B = start_B % settings.tile
    if T <= _FEW_TOKENS:  # no gather
        shape = [1] * new.ndim
        shape[axis] = size
        token = jnp.arange(size).reshape(shape) - first_B.reshape(-1, 1, 1, 1)
        parts = jnp.split(new, T, axis)
        new = sum(jnp.where(token == t, part, 0) for t, part in enumerate(parts))
    else:
        widths = [(settings.tile, size - T) if i == axis else (0, 0) for i in range(new.ndim)]
        cut = partial(lax.dynamic_slice_in_dim, slice_size=size, axis=axis - 1)
        new = jax.vmap(cut)(jnp.pad(new, widths), settings.tile - first_B)
    new = new.reshape(*new.shape[:axis], settings.tiles, settings.tile, *new.shape[axis + 1 :])
    new = jnp.moveaxis(new, axis, 1)
    return new.reshape(-1, *new.shape[2:])


def _kernel(*refs, settings: _Settings) -> None:
    """Refs: start_B, count_B and perhaps table_BP in scalar memory; new tiles; the cache twice, as input and
    as output, which are the same memory; tiles on the chip; semaphores of reads and of writes.
    """
    new_ref, _, cache_ref, tile_ref, copied = refs[-5:]
    count = tile_ref.shape[0]
    place_of = partial(_place, refs[:-5], cache_ref, settings, pl.program_id(0) * count)

    def start_read(i: Any, place: _Place) -> None:
        @pl.when(place.is_used & jnp.logical_not(place.is_full))
        def _start():
            pltpu.make_async_copy(place.memory, tile_ref.at[i], copied.at[0, i]).start()

    def change(i: Any, place: _Place) -> None:
        @pl.when(place.is_used & jnp.logical_not(place.is_full))
        def _wait():
            pltpu.make_async_copy(place.memory, tile_ref.at[i], copied.at[0, i]).wait()

        @pl.when(place.is_used)
        def _change():
            _insert(tile_ref.at[i], new_ref.at[i], place, settings.axis)
            pltpu.make_async_copy(tile_ref.at[i], place.memory, copied.at[1, i]).start()

    def wait_write(i: Any, place: _Place) -> None:
        @pl.when(place.is_used)
        def _wait():
            pltpu.make_async_copy(tile_ref.at[i], place.memory, copied.at[1, i]).wait()

    for step in (start_read, change, wait_write):
        lax.fori_loop(0, count, lambda i, _, step=step: step(i, place_of(i)) or 0, 0)


def _insert(tile_ref, new_ref, place: _Place, axis: int) -> None:
    """Writes the new tokens of a tile over the old ones."""
    # No TPU selects between numbers of 8 bits, not all between those of 16.
    kind = jnp.float32 if jnp.issubdtype(tile_ref.dtype, jnp.floating) else jnp.int32
    old = tile_ref[...].astype(kind)
    position = place.position + lax.broadcasted_iota(jnp.int32, old.shape, axis)
    is_new = (position >= place.low) & (position < place.high)
    new = jnp.broadcast_to(new_ref[...].astype(kind), old.shape)
    tile_ref[...] = jnp.where(is_new, new, old).astype(tile_ref.dtype)


def _place(scalar_refs, cache_ref, settings: _Settings, base, i) -> _Place:
    """Of tile i of a program whose first one has number `base`."""
    start_ref, count_ref, *table_refs = scalar_refs
    number = base + i
    row = lax.div(jnp.minimum(number, settings.items - 1), settings.tiles)
    low = start_ref[row]
    high = low + count_ref[row]
    position = (lax.div(low, settings.tile) + lax.rem(number, settings.tiles)) * settings.tile
    owner = row
    slot = position
    if table_refs:
        (table_ref,) = table_refs
        page = jnp.minimum(lax.div(position, settings.slots), settings.pages - 1)
        owner = table_ref[row * settings.pages + page]
    if table_refs or settings.ring:
        slot = lax.rem(position, settings.slots)
    is_whole = settings.tile == settings.slots
    slots = pl.ds(0 if is_whole else pl.multiple_of(slot, settings.tile), settings.tile)
    memory = cache_ref.at[(owner, *[slice(None)] * settings.axis, slots)]
    is_used = (number < settings.items) & (low < high) & (position < high)
    is_full = (low <= position) & (position + settings.tile <= high)
    return _Place(position, low, high, is_used, is_full, memory)
