"""A summary of all logits for a sampler, for Triton. The logits are read once."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..dispatch import result_type
from ..reference import LOGITS_GROUP

_GROUPS = 32  # of a program


def summarize_logits(
    logits_BV, penalty_B, seen_BV, bias_BV=None, biased_B=None, *, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """Returns the summary of `reference.summarize_logits`. The bias of rows without one, and the seen tokens
    of rows without a penalty, are not read. A NaN among the logits makes the second result NaN. The first
    result may miss it. interpret: True: run on any device, slowly, by Pallas's interpreter.
    """
    B, V = logits_BV.shape
    groups = pl.cdiv(V, LOGITS_GROUP)
    blocks = pl.cdiv(groups, _GROUPS)
    inputs = {"logits": logits_BV, "penalty": penalty_B, "seen": seen_BV}
    if bias_BV is not None:
        inputs |= {"bias": bias_BV, "biased": biased_B.astype(jnp.int32)}
    one = pl.BlockSpec((1,), lambda i, b: (b,))
    row = pl.BlockSpec((None, V), lambda i, b: (b, 0))
    part = pl.BlockSpec((1, 1), lambda i, b: (b, i))
    largest_BQ, max_Bi, sum_Bi = pl.pallas_call(
        partial(_kernel, names=tuple(inputs), V=V),
        grid=(blocks, B),
        in_specs=[one if x.ndim == 1 else row for x in inputs.values()],
        out_specs=[pl.BlockSpec((None, _GROUPS), lambda i, b: (b, i)), part, part],
        out_shape=[
            result_type(shape, jnp.float32, *inputs.values())
            for shape in ((B, groups), (B, blocks), (B, blocks))
        ],
        compiler_params=pltriton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="summarize_logits",
    )(*inputs.values())
    max_B = max_Bi.max(1)
    zero_B = _finite(max_B)
    return largest_BQ, zero_B + jnp.log((sum_Bi * jnp.exp(max_Bi - zero_B[:, None])).sum(1))


def _kernel(*refs, names: tuple[str, ...], V: int):
    ref = dict(zip(names, refs, strict=False))
    largest_ref, max_ref, sum_ref = refs[len(names) :]
    group_Q = pl.program_id(0) * _GROUPS + jnp.arange(_GROUPS)
    index_QJ = group_Q[:, None] * LOGITS_GROUP + jnp.arange(LOGITS_GROUP)
    inside_QJ = index_QJ < V
    x_QJ = pltriton.load(ref["logits"].at[index_QJ], mask=inside_QJ, other=-jnp.inf)
    largest = x_QJ.max()
    max_ref[0, 0] = largest
    sum_ref[0, 0] = jnp.exp(x_QJ - _finite(largest)).sum()
    if "bias" in ref:
        mask_QJ = inside_QJ & (ref["biased"][0] != 0)
        x_QJ += pltriton.load(ref["bias"].at[index_QJ], mask=mask_QJ, other=0)
    penalty = ref["penalty"][0]
    seen_QJ = pltriton.load(ref["seen"].at[index_QJ], mask=inside_QJ & (penalty != 1), other=False)
    x_QJ = jnp.where(seen_QJ, jnp.where(x_QJ < 0, x_QJ * penalty, x_QJ / penalty), x_QJ)
    groups = pl.cdiv(V, LOGITS_GROUP)
    pltriton.store(largest_ref, x_QJ.max(1), mask=group_Q < groups)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0)
