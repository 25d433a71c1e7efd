"""Kernels for the terms that low-rank adapters of rows (LoRA) add to products of few rows on TPUs. Each
adapter that a row has is copied from HBM once, while the adapter before it is multiplied.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from .parts import dot, emulator, keep_in_hbm, rows_after_norm

_VMEM_BYTES = 48 * 2**20


class _Refs(NamedTuple):
    """The operands, results and memory of the kernel, in their order."""

    adapter: Any  # of each row; in scalar memory
    x: Any
    norm: Any
    pairs: Any  # a [N, R, I] and b [N, R, O] of each matrix, in HBM
    results: Any
    rows: Any  # x after the norm
    buffers: Any  # two for each a and b
    copied: Any


def added_by_adapters(x_MI, adapters, norm_I, eps: float, offset: float, interpret: bool) -> list[jax.Array]:
    """Returns, float32 [M, O], the values that each of some `RowAdapters` of the same rows adds to its
    matrix's product of x, after the norm. A row takes nothing from the adapters of other rows, which may be
    NaN.
    """
    norm = None if norm_I is None else norm_I.reshape(1, -1)
    # XLA stores b with its outputs in lanes, since R is small: nothing is transposed.
    pairs = [x_NR for each in adapters for x_NR in (each.a_NRI, jnp.swapaxes(each.b_NOR, 1, 2))]
    pairs = keep_in_hbm(pairs, interpret)
    arrays = jax.tree.leaves((adapters[0].adapter_M, x_MI, norm, pairs))
    results = [result_type((len(x_MI), b_NRO.shape[2]), jnp.float32, *arrays) for b_NRO in pairs[1::2]]
    rows = pltpu.VMEM(x_MI.shape, x_MI.dtype)
    buffers = [pltpu.VMEM((2, *x_NR.shape[1:]), x_NR.dtype) for x_NR in pairs]
    copied = pltpu.SemaphoreType.DMA((2, len(pairs)))
    structure = jax.tree.structure(_Refs(0, 0, norm, pairs, results, rows, buffers, copied))
    scales = [each.scale for each in adapters]
    (in_vmem, in_hbm) = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.HBM))
    return pl.pallas_call(
        lambda *refs: _kernel(jax.tree.unflatten(structure, refs), scales, eps, offset),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[in_vmem] * (len(arrays) - 1 - len(pairs)) + [in_hbm] * len(pairs),
            out_specs=[in_vmem] * len(results),
            scratch_shapes=[rows, *buffers, copied],
        ),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES),
        interpret=emulator(interpret),
        name="adapters",
    )(*arrays)


def _kernel(refs: _Refs, scales: list[float], eps: float, offset: float) -> None:
    x_MI = rows_after_norm(refs.x, refs.norm, eps, offset)
    refs.rows[...] = x_MI.astype(refs.rows.dtype)
    for result in refs.results:
        result[...] = jnp.zeros(result.shape, jnp.float32)
    M = len(x_MI)

    def visit(m, state):
        """Copies the adapter of row m, if no row before has it, and adds the one that was copied before."""
        adapter, slot = state
        own = refs.adapter[jnp.minimum(m, M - 1)]
        known = lax.fori_loop(0, m, lambda j, known: known | (refs.adapter[j] == own).astype(jnp.int32), 0)
        is_new = (known == 0) & (own >= 0) & (m < M)

        @pl.when(is_new)
        def _start() -> None:
            for copy in _copies(refs, own, 1 - slot):
                copy.start()

        pl.when((is_new | (m == M)) & (adapter >= 0))(partial(_add, refs, scales, adapter, slot))
        return jnp.where(is_new, own, adapter), jnp.where(is_new, 1 - slot, slot)

    lax.fori_loop(0, M + 1, visit, (jnp.int32(-1), jnp.int32(0)))


def _copies(refs: _Refs, adapter: Any, slot: Any) -> list[Any]:
    return [
        pltpu.make_async_copy(pair.at[adapter], buffer.at[slot], refs.copied.at[slot, n])
        for n, (pair, buffer) in enumerate(zip(refs.pairs, refs.buffers, strict=True))
    ]


def _add(refs: _Refs, scales: list[float], adapter: Any, slot: Any) -> None:
    """Adds the results of the rows that have an adapter, when it is copied."""
    M = len(refs.x)
    row_M1 = lax.broadcasted_iota(jnp.int32, (M, 1), 0)
    is_own_M1 = row_M1 < 0
    for m in range(M):
        is_own_M1 |= (row_M1 == m) & (refs.adapter[m] == adapter)
    for copy in _copies(refs, adapter, slot):
        copy.wait()
    for n, (scale, result) in enumerate(zip(scales, refs.results, strict=True)):
        inner_MR = dot(refs.rows[...], refs.buffers[2 * n][slot], 1) * scale
        added_MO = dot(inner_MR.astype(refs.rows.dtype), refs.buffers[2 * n + 1][slot], 0)
        result[...] = jnp.where(is_own_M1, added_MO, result[...])
