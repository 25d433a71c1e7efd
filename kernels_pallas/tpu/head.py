"""The greedy token of a vocabulary product on TPUs, whose logits stay on the chip."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..key_layouts import LANES
from ..reference_products import FEW_ROWS, Matrix
from . import streaming

_NONE = 2**30  # no token


def lm_head_argmax(
    x_BD, weight_VD, scale_V=None, *, soft_cap=None, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """Returns the greedy token and its log-probability, like the reference, without logits in memory. x and
    weight have one dtype, bfloat16 or float32. With a scale of each token they are bfloat16 and int8. 64 rows
    read the matrix once. interpret: True: emulate a TPU on a CPU, slowly, and raise if accesses to memory
    race.
    """
    B = len(x_BD)
    if B > FEW_ROWS:
        some = partial(lm_head_argmax, soft_cap=soft_cap, interpret=interpret)
        results = [some(x_BD[i : i + FEW_ROWS], weight_VD, scale_V) for i in range(0, B, FEW_ROWS)]
        return tuple(map(jnp.concatenate, zip(*results, strict=True)))  # type: ignore[return-value]
    matrix = Matrix(weight_VD, scale_V)
    settings = streaming.settings_of(x_BD, [matrix], soft_cap=soft_cap)
    shape = (settings.forms[0].rows, LANES)
    scratch = [pltpu.VMEM(shape, dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32, jnp.float32)]
    outs = [((B, 1), dtype, pl.BlockSpec()) for dtype in (jnp.int32, jnp.float32)]
    id_B1, logprob_B1 = streaming.call(
        _kernel, settings, x_BD, [matrix], outs, "head_argmax", interpret, scratch=scratch
    )
    return id_B1[:, 0], logprob_B1[:, 0]


int8_head_argmax = lm_head_argmax


def _kernel(step: streaming.Step) -> None:
    """Runs one grid step. The scratch has the largest logit so far, its token, the first token whose logit is
    NaN, and the sum of exponentials relative to the largest logit. They are the same in all lanes.
    """
    number, settings, operands, results, _, scratch = step
    max_ref, id_ref, nan_ref, sum_ref = scratch

    @pl.when(number == 0)
    def _start() -> None:
        streaming.prepare(step)
        for ref, value in zip(scratch, (-jnp.inf, 0, _NONE, 0), strict=True):
            ref[...] = jnp.full(ref.shape, value, ref.dtype)

    first = number * settings.tiles[0]
    logits_RO = streaming.multiply_tile(step, 0)
    if settings.soft_cap is not None:
        logits_RO = settings.soft_cap * jnp.tanh(logits_RO / settings.soft_cap)
    token_RO = first + lax.broadcasted_iota(jnp.int32, logits_RO.shape, 1)
    logits_RO = jnp.where(token_RO < settings.forms[0].outputs, logits_RO, -jnp.inf)
    is_nan_RO = logits_RO != logits_RO
    nan_ref[...] = jnp.minimum(nan_ref[...], _first(is_nan_RO, token_RO))
    max_R1 = jnp.where(is_nan_RO, -jnp.inf, logits_RO).max(-1, keepdims=True)
    before_RL = max_ref[...]
    id_ref[...] = jnp.where(max_R1 > before_RL, _first(logits_RO == max_R1, token_RO), id_ref[...])
    max_RL = jnp.maximum(before_RL, max_R1)
    sum_R1 = jnp.exp(logits_RO - max_RL[:, :1]).sum(-1, keepdims=True)
    sum_ref[...] = jnp.where(number == 0, 0, sum_ref[...] * jnp.exp(before_RL - max_RL)) + sum_R1
    max_ref[...] = max_RL

    @pl.when(number == settings.counts[0] - 1)
    def _store() -> None:
        rows = slice(0, len(operands.x))
        nan_B1 = nan_ref[rows, :1]
        results[0][...] = jnp.where(nan_B1 < _NONE, nan_B1, id_ref[rows, :1])
        results[1][...] = -jnp.log(sum_ref[rows, :1])


def _first(is_candidate_RO: jax.Array, token_RO: jax.Array) -> jax.Array:
    """Returns each row's first candidate, [R, 1], or `_NONE` without one."""
    return jnp.where(is_candidate_RO, token_RO, _NONE).min(-1, keepdims=True)
