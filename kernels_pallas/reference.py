"""References of all kernels in plain jnp and float32, for tests and `scripts/check_gpu.py`.

They store every score and every logit at once, so they are for checking, not for running a model.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .key_layouts import Latents, SideBySide, dequantize, separate
from .mxfp4 import Mxfp4, dequantize_mxfp4
from .reference_products import Matrix, matrix_floats

LOGITS_GROUP = 64  # tokens of a group of `summarize_logits`


def prefill_attention(  # noqa: PLR0913
    q_BTNH, k_PKSH, v_PKSH, start_B, length_B, *, scale, window=None, soft_cap=None, table_BP=None,
    ring=False, sink_N=None, key_bias=None, first_key=0,
) -> jax.Array:  # fmt: skip
    """Computes causal attention, float32 [B, T, N, H]. Query t of row b, at position start_B[b] + t, sees the
    keys at positions up to its own (the last `window` of them) below length_B[b]. Heads share keys in groups
    of G = N/K.

    - Position p of row b is in slot p of k_PKSH[b]. With `ring` it is in slot p % S. With a block table it is
      in slot p % S of page table_BP[b, p // S].
    - k and v are float numbers or `Levels`, or k is `SideBySide` and v None. Numbers past the length may be
      anything, NaN included. `KeyBias` is added to keys.
    - k may be `Latents` and v None. The result is then [B, T, N, C].
    - Scores are multiplied by `scale`, and with a soft_cap c they are c · tanh(score / c). A sink is one more
      score of a head, whose weight counts in the softmax but has no value.
    - No query sees a key before `first_key`, a number, except its own.
    - A query that sees no key gives zeros.
    """
    B, T, N, H = q_BTNH.shape
    if isinstance(k_PKSH, Latents):
        k = k_PKSH.values[..., :H]
        options = dict(scale=scale, window=window, soft_cap=soft_cap, table_BP=table_BP, ring=ring)
        options["first_key"] = first_key
        out = prefill_attention(q_BTNH, k, k, start_B, length_B, **options, sink_N=sink_N)
        return out[..., : k_PKSH.rank]
    pair = separate(k_PKSH) if isinstance(k_PKSH, SideBySide) else (k_PKSH, v_PKSH)
    k, v = (dequantize(x, H) for x in pair)
    K, S = k.shape[1:3]
    if table_BP is not None:
        k, v = (jnp.moveaxis(x[table_BP], 1, 2).reshape(B, K, -1, H) for x in (k, v))
        S = k.shape[2]
    # The latest position in a slot of a ring; elsewhere the slot itself.
    slot_S = jnp.arange(S)
    last_B1 = length_B[:, None] - 1
    key_BS = last_B1 - (last_B1 - slot_S) % S if ring else jnp.broadcast_to(slot_S, (B, S))
    if key_bias is not None:
        k = k + jax.vmap(key_bias.at)(jnp.maximum(key_BS, 0))
    q = q_BTNH.astype(jnp.float32).reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bksh->bkgts", q, k, precision=lax.Precision.HIGHEST) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    query_BT1 = (start_B[:, None] + jnp.arange(T))[..., None]
    valid_BS = (key_BS >= 0) & (key_BS < length_B[:, None])
    visible_BTS = (key_BS[:, None] <= query_BT1) & valid_BS[:, None]
    if window is not None:
        visible_BTS &= key_BS[:, None] > query_BT1 - window
    visible_BTS &= key_BS[:, None] >= jnp.minimum(query_BT1, first_key)
    visible = visible_BTS[:, None, None]
    scores = jnp.where(visible, scores, -1e30)
    if sink_N is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = jnp.broadcast_to(sink_N.reshape(K, -1, 1, 1), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink.astype(jnp.float32)], -1), axis=-1)[..., :-1]
    v = jnp.where(valid_BS[:, None, :, None], v, 0)  # 0 * NaN is NaN
    out = jnp.einsum("bkgts,bksh->btkgh", jnp.where(visible, weights, 0), v, precision=lax.Precision.HIGHEST)
    return out.reshape(B, T, N, H)


decode_attention = prefill_attention  # of the last token of each row, or of a few


def argmax(x_BV) -> jax.Array:
    """Returns the index of each row's largest number, int32 [B]: the lowest of equal ones, or the first NaN
    if there is any.
    """
    return jnp.argmax(x_BV, -1).astype(jnp.int32)


def lm_head_argmax(x_BD, weight_VD, *, soft_cap=None) -> tuple[jax.Array, jax.Array]:
    """Returns the id of the largest of the logits x · weightᵀ, capped (int32 [B]), and its log-probability
    (float32 [B]). Ties and NaN are as in `argmax`.
    """
    logits_BV = jnp.einsum(
        "bd,vd->bv", x_BD.astype(jnp.float32), weight_VD.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    if soft_cap is not None:
        logits_BV = soft_cap * jnp.tanh(logits_BV / soft_cap)
    id_B = argmax(logits_BV)
    return id_B, jnp.take_along_axis(jax.nn.log_softmax(logits_BV, -1), id_B[:, None], -1)[:, 0]


def int8_head_argmax(x_BD, weight_VD, scale_V, *, soft_cap=None) -> tuple[jax.Array, jax.Array]:
    """Runs `lm_head_argmax` of an int8 matrix with a scale of each token."""
    return lm_head_argmax(x_BD, weight_VD.astype(jnp.float32) * scale_V[:, None], soft_cap=soft_cap)


def summarize_logits(
    logits_BV, penalty_B, seen_BV, bias_BV=None, biased_B=None
) -> tuple[jax.Array, jax.Array]:
    """Returns a summary of all logits for a sampler.

    Args:
        logits_BV: float32.
        penalty_B: repetition penalty. Positive logits of seen tokens are divided by it, others are
            multiplied.
        seen_BV: bool.
        bias_BV: None, or numbers that are added to the logits before the penalty.
        biased_B: bool: the rows whose bias is not all zeros. A kernel does not read the bias of other rows.

    Returns:
        The largest logit, with bias and penalty, of each group of `LOGITS_GROUP` tokens, float32 [B, groups],
        and the logsumexp of the logits as they are, float32 [B].
    """
    V = logits_BV.shape[1]
    x_BV = logits_BV if bias_BV is None else logits_BV + jnp.where(biased_B[:, None], bias_BV, 0)
    penalty_B1 = penalty_B[:, None]
    x_BV = jnp.where(seen_BV, jnp.where(x_BV < 0, x_BV * penalty_B1, x_BV / penalty_B1), x_BV)
    x_BV = jnp.pad(x_BV, ((0, 0), (0, -V % LOGITS_GROUP)), constant_values=-jnp.inf)
    largest_BQ = x_BV.reshape(len(x_BV), -1, LOGITS_GROUP).max(-1)
    return largest_BQ, jax.nn.logsumexp(logits_BV, -1)


def gated_experts(  # noqa: PLR0913
    x_MD, weight_MU, expert_MU, gate_XFD, up_XFD, down_XDF, *biases, activation, num_experts=None, limit=None
) -> jax.Array:
    """Returns each token's weighted sum of the gated MLPs that it chose, float32 [M, D]: Σ weight ·
    down(activation(gate(x)) · up(x)). Experts outside 0 … X - 1 count as zeros. gate_XFD: None: experts have
    no gate and no biases, and compute down(activation(up(x))).

    The matrices are arrays, `Mxfp4`, or quantized `Matrix` whose arrays have a first axis X and whose groups
    have all inputs. biases: none, or [X, F], [X, F] and [X, D]. limit: see `gated`.
    """
    up, down = map(_floats, (up_XFD, down_XDF))
    x = x_MD.astype(jnp.float32)
    product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    of_gate, of_up, of_down = biases or (0, 0, 0)
    inner = [product("md,xfd->mxf", x, up) + of_up]
    if gate_XFD is not None:
        inner.insert(0, product("md,xfd->mxf", x, _floats(gate_XFD)) + of_gate)
    inner_MXF = inner_features(inner, activation, limit)
    used_MUX = expert_MU[..., None] == jnp.arange(len(up))
    out_MXD = product("mxf,xdf->mxd", inner_MXF, down) + of_down
    out_MUXD = jnp.where(used_MUX[..., None], out_MXD[:, None], 0)
    return (weight_MU[..., None] * out_MUXD.sum(2)).sum(1)


def _floats(experts: Any) -> jax.Array:
    """Returns matrices of experts, float32 [X, O, I]."""
    if isinstance(experts, Mxfp4):
        return dequantize_mxfp4(experts)
    if isinstance(experts, Matrix):
        return jnp.swapaxes(jax.vmap(matrix_floats)(experts), 1, 2)
    return experts.astype(jnp.float32)


def inner_features(inputs: Any, activation: Any, limit: float | None = None) -> jax.Array:
    """Returns the input of down. inputs: the products with gate and up, or with up if there is no gate."""
    return gated(*inputs, activation, limit) if len(inputs) == 2 else activation(inputs[0])


def gated(gate, up, activation, limit: float | None = None) -> jax.Array:
    """Returns activation(gate) * up. With a limit c (gpt-oss) it is activation(min(gate, c)) * (clip(up, -c,
    c) + 1).
    """
    if limit is None:
        return activation(gate) * up
    return activation(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)
