"""Mixture of experts for TPUs: one kernel, which reads each expert that some token chose once for a block of
tokens.

A tile is an expert and some of the rows that chose it. The pipeline of `pallas_call` reads the expert of the
next tile while one is computed, unless it is the same.

- If there are few tokens, all are rows of each tile. Memory is the limit, so it costs nothing that an expert
  also multiplies tokens that did not choose it.
- If there are many tokens, a tile has up to 128 that chose the expert. They are taken from the tokens on the
  chip, and their results are added to the results of the tokens, by products with matrices of zeros and ones:
  nothing is gathered in HBM.

Large experts are read in parts: outputs of gate and up, and then, when all of these are known, outputs of
down. The last part may reach beyond a matrix. The memory there may hold anything: it makes numbers that are
set to zero, or that nobody reads.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from ..key_layouts import LANES
from ..mxfp4 import Mxfp4
from ..reference import inner_features
from ..reference_products import Matrix
from .expert_blocks import (
    ExpertSettings,
    blocks_bytes,
    expert_settings,
    matrix_blocks,
    of_rows,
    repeats,
    scales_by_inputs,
)
from .expert_tiles import TILE_ROWS, block_tokens, experts_of_few, tiles_of_blocks
from .parts import dot, emulator, has_large_vmem, keep_in_hbm

_FEW_TOKENS = 64
_LIMIT = 60 * 2**20  # of VMEM
_LARGER_LIMIT = 100 * 2**20  # with `has_large_vmem`
_SLACK = 2 * 2**20  # that the compiler may need beyond
_OTHER_BYTES = 8 * 2**20  # beside the blocks of matrices, of tokens and of their results


class _Refs(NamedTuple):
    """Operands, results and memory of the kernel, in their order."""

    experts: Any  # of each tile
    counts: Any  # tiles with rows of each block; None: of few tokens all have some
    choices: Any  # of few tokens: their weights and experts; of many `weight`, `token` and the same in a row
    x: Any
    matrices: Any  # of gate, up and down: `Form.arrays`
    rows: Any  # of each: a scale per output and a bias, or None
    out: Any
    x_rows: Any  # of few tokens: float32 [R, D]
    prepared: Any  # `Form.prepared` for x, and for what gate and up give
    inner: Any  # float32 [R, all parts of F]: what gate and up give
    groups: Any  # `Form.group_memory` for gate or up, and for down


def gated_experts(  # noqa: PLR0913
    x_MD, weight_MU, expert_MU, gate_XFD, up_XFD, down_XDF, *biases, activation, num_experts=None, limit=None,
    interpret=False,
) -> jax.Array:  # fmt: skip
    """Returns the sum of `reference.gated_experts`.

    x is float32 or bfloat16, in the dtype of the matrices. With quantized matrices it is bfloat16. MXFP4 has
    `values_for_tpu`. A token that is not finite gives NaN, and so does a token whose weights are not. The
    activation is an elementwise function of float32 arrays that Pallas can lower. gate_XFD may be None.
    interpret: True: emulate a TPU on a CPU, slowly, and raise if accesses to memory race.
    """
    matrices = [_matrix(x) for x in (gate_XFD, up_XFD, down_XDF) if x is not None]
    biases = biases or (None,) * len(matrices)
    X = len(matrices[0].values)
    call = partial(
        _call, matrices=matrices, biases=biases, activation=activation, limit=limit, interpret=interpret
    )
    M, U = expert_MU.shape
    if M <= _FEW_TOKENS:
        expert_T = experts_of_few(expert_MU, X, num_experts not in (None, X))
        choices = [(x, pl.BlockSpec()) for x in (weight_MU.astype(jnp.float32), expert_MU)]
        return call(expert_T, None, choices, x_MD, M)
    settings = expert_settings(x_MD.dtype, TILE_ROWS, matrices, activation, limit)
    most = _LARGER_LIMIT if has_large_vmem() else _LIMIT
    free = most - blocks_bytes(settings, matrices) - _OTHER_BYTES
    block = block_tokens(M, x_MD.shape[1], free // (4 + x_MD.dtype.itemsize))
    padding = ((0, -M % block), (0, 0))
    x_MD, weight_MU = (jnp.pad(x, padding) for x in (x_MD, weight_MU))
    # Products with zeros would spread a NaN to other tokens.
    is_finite_M1 = jnp.isfinite(x_MD).all(1, keepdims=True) & jnp.isfinite(weight_MU).all(1, keepdims=True)
    x_MD, weight_MU = (jnp.where(is_finite_M1, x, 0) for x in (x_MD, weight_MU))
    tiles = tiles_of_blocks(weight_MU, jnp.pad(expert_MU, padding, constant_values=-1), block, X)
    (_, count, rows) = tiles.token_ATR.shape
    arrays = [x.reshape(-1, rows, 1) for x in (tiles.weight_ATR, tiles.token_ATR)]
    arrays.append(tiles.token_ATR.reshape(-1, 1, rows))
    choices = [(x, pl.BlockSpec((1, *x.shape[1:]), lambda b, t, *_: (b * count + t, 0, 0))) for x in arrays]
    out_MD = call(tiles.expert_AT.reshape(-1), tiles.count_A, choices, x_MD, block, rows=rows)
    return jnp.where(is_finite_M1, out_MD, jnp.nan)[:M]


def _matrix(experts: Any) -> Matrix:
    if isinstance(experts, Mxfp4):
        return Matrix(experts.values, experts.scale)
    return experts if isinstance(experts, Matrix) else Matrix(experts)


def _call(  # noqa: PLR0913
    expert_T, count_A, choices, x_MD, block: int, rows: int | None = None, *, matrices, biases, activation,
    limit, interpret,
) -> jax.Array:  # fmt: skip
    """Runs the kernel for blocks of tokens, tiles, and parts of experts. Returns float32 [M, D]. choices:
    arrays and their blocks. rows: the rows of a tile. None: the rows of a block.
    """
    D = x_MD.shape[1]
    settings = expert_settings(x_MD.dtype, rows or block, matrices, activation, limit)
    size = blocks_bytes(settings, matrices) + _OTHER_BYTES + block * D * (4 + x_MD.dtype.itemsize)
    scalars = [expert_T] if count_A is None else [expert_T, count_A]
    tiles = len(expert_T) // (len(x_MD) // block)
    indices = [partial(index, settings, tiles) for index in settings.indices]
    arrays, specs = matrix_blocks(settings, matrices, indices)
    row_arrays = []
    row_specs = []
    for n, (matrix, bias, index) in enumerate(zip(matrices, biases, indices, strict=True)):
        phase = settings.phase(n)
        row_arrays.append((settings.forms[phase].output_scale(matrix), bias))
        of_one = partial(of_rows, width=settings.widths[phase], index=index)
        row_specs.append(jax.tree.map(of_one, row_arrays[-1]))
    of_block = pl.BlockSpec((block, D), lambda b, *_: (b, 0), pipeline_mode=pl.Buffered(1))
    columns = [width * parts for width, parts in zip(settings.widths, settings.parts, strict=True)]
    out_spec = pl.BlockSpec((block, columns[1]), lambda b, *_: (b, 0), pipeline_mode=pl.Buffered(1))
    of_x, of_inner = settings.forms
    # XLA would copy all experts' scales to on-chip memory, where few are read.
    operands = [x for x, _ in choices], x_MD, keep_in_hbm(arrays, interpret), row_arrays
    out_type = result_type((len(x_MD), columns[1]), jnp.float32, *jax.tree.leaves((scalars, operands)))
    memory = (
        pltpu.VMEM((of_x.rows, D), jnp.float32) if count_A is None else None,
        [of_x.prepared(), of_inner.prepared()],
        pltpu.VMEM((of_x.rows, columns[0]), jnp.float32),
        [form.group_memory(width) for form, width in zip(settings.forms, settings.widths, strict=True)],
    )
    refs = _Refs(expert_T, count_A, *operands, out_type, *memory)
    structure = jax.tree.structure(refs)
    out_MD = pl.pallas_call(
        lambda *refs: _kernel(settings, jax.tree.unflatten(structure, refs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(len(x_MD) // block, tiles, 1 if settings.is_whole else sum(settings.parts)),
            in_specs=jax.tree.leaves(([spec for _, spec in choices], of_block, specs, row_specs)),
            out_specs=out_spec,
            scratch_shapes=jax.tree.leaves(memory),
        ),
        out_shape=out_type,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            disable_bounds_checks=True,
            vmem_limit_bytes=max(_LIMIT, size) + _SLACK,
        ),
        interpret=emulator(interpret),
        name="experts",
    )(*scalars, *jax.tree.leaves(operands))
    return out_MD[:, :D]


def _kernel(settings: ExpertSettings, refs: _Refs) -> None:
    block = pl.program_id(0)
    tile = pl.program_id(1)
    part = pl.program_id(2)
    at = block * pl.num_programs(1) + tile
    is_few = refs.counts is None

    @pl.when((tile == 0) & (part == 0))
    def _begin() -> None:
        refs.out[...] = jnp.zeros(refs.out.shape, jnp.float32)
        if is_few:
            refs.x_rows[: len(refs.x)] = refs.x[...].astype(jnp.float32)
            settings.forms[0].prepare(refs.x_rows[...], refs.prepared[0])

    @pl.when(jnp.logical_not(repeats(refs.experts, tile)) if is_few else tile < refs.counts[block])
    def _compute() -> None:
        if not is_few:
            pl.when(part == 0)(partial(_take_rows, settings, refs))
        expert = refs.experts[at]
        phases = partial(_gate_and_up, settings, refs, expert), partial(_down, settings, refs, expert)
        if settings.is_whole:
            for phase in phases:
                phase(0)
        else:
            first = settings.parts[0]
            pl.when(part < first)(partial(phases[0], part))
            pl.when(part >= first)(partial(phases[1], part - first))


def _take_rows(settings: ExpertSettings, refs: _Refs) -> None:
    """Takes the tokens of a tile from many tokens."""
    _, token_ref, _ = refs.choices
    is_token_RM = lax.broadcasted_iota(jnp.int32, (token_ref.shape[1], len(refs.x)), 1) == token_ref[0]
    settings.forms[0].prepare(dot(is_token_RM.astype(refs.x.dtype), refs.x[...], 0), refs.prepared[0])


def _gate_and_up(settings: ExpertSettings, refs: _Refs, expert: Any, part: Any) -> None:
    form = settings.forms[0]
    inputs = [_product(settings, refs, n, expert) for n in range(settings.inputs)]
    inner_RF = inner_features(inputs, settings.activation, settings.limit)
    width = settings.widths[0]
    count = settings.parts[0]
    if width * count > form.outputs:
        feature_RF = part * width + lax.broadcasted_iota(jnp.int32, inner_RF.shape, 1)
        inner_RF = jnp.where(feature_RF < form.outputs, inner_RF, 0)
    refs.inner[:, _columns(part, width, count)] = inner_RF


def _down(settings: ExpertSettings, refs: _Refs, expert: Any, part: Any) -> None:
    form = settings.forms[1]

    @pl.when(part == 0)
    def _prepare() -> None:
        form.prepare(refs.inner[:, : form.inputs], refs.prepared[1])

    out_RD = _product(settings, refs, settings.inputs, expert)
    columns = _columns(part, settings.widths[1], settings.parts[1])
    if refs.counts is None:
        weight_ref, chosen_ref = refs.choices
        weight_M1 = jnp.where(chosen_ref[...] == expert, weight_ref[...], 0).sum(1, keepdims=True)
        out_MD = out_RD[: len(refs.out)]
        refs.out[:, columns] += jnp.where(weight_M1 != 0, weight_M1 * out_MD, 0)  # 0 * inf would be NaN
        return
    weight_ref, _, across_ref = refs.choices
    is_token_MR = lax.broadcasted_iota(jnp.int32, (len(refs.out), len(out_RD)), 0) == across_ref[0]
    weighted_RD = (weight_ref[0] * out_RD).astype(refs.x.dtype)
    refs.out[:, columns] += dot(is_token_MR.astype(refs.x.dtype), weighted_RD, 0)


def _columns(part: Any, width: int, count: int) -> Any:
    return slice(None) if count == 1 else pl.ds(pl.multiple_of(part * width, LANES), width)


def _product(settings: ExpertSettings, refs: _Refs, n: int, expert: Any) -> jax.Array:
    """Returns x · matrixᵀ with its bias, float32 [R, O]. n: the place of the matrix among gate, up, down."""
    phase = settings.phase(n)
    form = settings.forms[phase]
    read = None
    if form.has_blocks:
        by_inputs = scales_by_inputs(form, settings.widths[phase])
        read = partial(_read_block_scale, expert=expert, by_inputs=by_inputs)
    y_RO = form.multiply(refs.prepared[phase], refs.matrices[n], refs.groups[phase], read)
    scale_ref, bias_ref = refs.rows[n]
    if scale_ref is not None:
        y_RO *= _row(scale_ref, expert)
    return y_RO if bias_ref is None else y_RO + _row(bias_ref, expert)


def _read_block_scale(ref: Any, i: int, expert: Any, by_inputs: bool) -> jax.Array:
    """Returns float32 [Q, 1], of block i of outputs of an expert."""
    scale_QX = ref[:, i] if by_inputs else ref[i]
    lane = lax.broadcasted_iota(jnp.int32, scale_QX.shape, 1)
    return jnp.where(lane == lax.rem(expert, scale_QX.shape[1]), scale_QX, 0).sum(1, keepdims=True)


def _row(ref: Any, expert: Any) -> jax.Array:
    """Returns float32 [1, O], of an expert."""
    rows = ref[...].astype(jnp.float32)
    is_here = lax.broadcasted_iota(jnp.int32, rows.shape, 0) == lax.rem(expert, len(rows))
    return jnp.where(is_here, rows, 0).sum(0, keepdims=True)
