"""Linear attention by the gated delta rule (Gated DeltaNet, Yang et al. 2024), as in Qwen3-Next and Qwen3.5.

Each head has a state S [H, Y] that maps keys to values. A step is S ← exp(g) S, then S ← S + k (β (v −
Sᵀk))ᵀ, and the output is Sᵀq. One token is one such step. More tokens are processed in blocks of 64 by the WY
form (Yang et al. 2024, "Parallelizing linear transformers with the delta rule"): the values that a block
writes solve a triangular system, so a block is a few matrix products.

Formulas are as in transformers 5.23, `modeling_qwen3_next.py` and `modeling_qwen3_5.py`. All are in float32.

Here N are value heads, K key heads (repeated to N), H is the width of a key, Y of a value, C tokens of a
block, W tokens before the current one that the convolution reads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..config.model_config import ModelConfig
from ..ops.operation import match_varying_axes, run
from ..weights.layers import activation, rms_norm
from ..weights.params import Params
from .blocks import BlockDecays, matmul, scan_blocks
from .convolution import by_group, convolve
from .recurrent import Inputs, Recurrent, state_shapes

_INVERSE_BLOCK = 8
_NORM_EPS = 1e-6  # of queries and keys
BETWEEN_PRODUCTS = ("conv_q", "conv_k", "conv_v", "A_log", "dt_bias", "gated_norm")


class _Tokens(NamedTuple):
    """The inputs of the delta rule for T tokens, float32."""

    q_BNTH: jax.Array
    k_BNTH: jax.Array
    v_BNTY: jax.Array
    decay_BNT: jax.Array  # its logarithm; 0 of padding
    beta_BNT: jax.Array  # 0 of padding
    first_B1T: Any = None  # int32: where each token's segment begins; None: a row is one segment


def mix(
    products: list[jax.Array],
    layer: Params,
    cache: Recurrent | None,
    start_B: Any,
    num_tokens_B: jax.Array,
    first_BT: Any,
    config: ModelConfig,
    spec: Any,
) -> tuple[jax.Array, Recurrent | None]:
    """Returns the input of the output product, [B, T, I], and the state after the new tokens.

    Args:
        products: queries, keys, values, and the gates z, b and a.
        layer: the parameters in `BETWEEN_PRODUCTS`.
        cache: the state before these tokens. None: they are the first tokens.
        start_B, num_tokens_B, first_BT: the fields of `Positions`.
        config, spec: the model, and the mixer's `GatedDeltaSpec`.
    """
    *qkv, z_BTI, b_BTN, a_BTN = products
    widths = (spec.key_head_dim, spec.key_head_dim, spec.value_head_dim)
    new = tuple(by_group(x.astype(jnp.float32), width) for x, width in zip(qkv, widths, strict=True))
    steps = _steps(layer, a_BTN, b_BTN, num_tokens_B)
    if cache is None:
        inputs, state = _empty(new, spec)
    else:
        inputs, state = cache.before(
            start_B, lambda old, steps, state: delta_rule(_tokens(layer, config, old, steps), state)[1]
        )
    inputs = tuple(jnp.concatenate(pair, 2) for pair in zip(inputs, new, strict=True))
    out_BNTY, after = delta_rule(_tokens(layer, config, inputs, steps, first_BT), state)
    if cache is not None:
        state = state if cache.holds_drafts(z_BTI.shape[1]) else after
        cache = cache.after(inputs, state, steps, start_B, num_tokens_B)
    return _gated_norm(out_BNTY, z_BTI, layer, config), cache


def delta_rule(tokens: _Tokens, state_BNHY: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns outputs [B, N, T, Y], and the state after T tokens."""
    if tokens.k_BNTH.shape[2] == 1:
        return run("recurrent_step", recurrent_step, tokens=tokens, state_BNHY=state_BNHY)
    return scan_blocks(_block, tokens, state_BNHY)


def _read(k_BNH: jax.Array, q_BNH: jax.Array, state_BNHY: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns Sᵀk and Sᵀq, [B, N, Y]."""
    return (state_BNHY * k_BNH[..., None]).sum(2), (state_BNHY * q_BNH[..., None]).sum(2)


def recurrent_step(
    tokens: _Tokens, state_BNHY: jax.Array, read: Callable = _read
) -> tuple[jax.Array, jax.Array]:
    """Runs `delta_rule` of one token: both reads are of the old state, which is then written once. read:
    computes Sᵀk and Sᵀq, [B, N, Y], of k, q and the state.
    """
    q_BNH, k_BNH, v_BNY, decay_BN, beta_BN = (x[:, :, 0] for x in tokens[:5])
    shrink_BN1 = jnp.exp(decay_BN)[..., None]
    (of_key_BNY, of_query_BNY) = read(k_BNH, q_BNH, state_BNHY)
    added_BNY = beta_BN[..., None] * (v_BNY - shrink_BN1 * of_key_BNY)
    agreement_BN1 = (q_BNH * k_BNH).sum(-1, keepdims=True)
    out_BNY = shrink_BN1 * of_query_BNY + agreement_BN1 * added_BNY
    state_BNHY = state_BNHY * shrink_BN1[..., None] + k_BNH[..., None] * added_BNY[:, :, None]
    return out_BNY[:, :, None], state_BNHY


def _block(state_BNHY: jax.Array, tokens: _Tokens, decays: BlockDecays) -> tuple[jax.Array, jax.Array]:
    """Returns the state after a block, and the outputs [B, N, C, Y]. D is the decay between two tokens, and Γ
    is the decay from the block's begin. The values U that the block writes solve (I + strictly lower (β K Kᵀ
    D)) U = β V − β Γ K S.
    """
    q, k, v, _, beta_BNC, _ = tokens
    between_BNCC, from_begin, to_end = decays
    beta = beta_BNC[..., None]
    k_T = jnp.swapaxes(k, -1, -2)
    system = beta * matmul(k, k_T) * between_BNCC
    right = beta * (v - from_begin * matmul(k, state_BNHY))
    written = matmul(_unit_lower_inverse(system), right)
    out = from_begin * matmul(q, state_BNHY) + matmul(matmul(q, k_T) * between_BNCC, written)
    return state_BNHY * from_begin[..., -1:, :] + matmul(jnp.swapaxes(k * to_end, -1, -2), written), out


def _unit_lower_inverse(x: jax.Array) -> jax.Array:
    """Returns the inverse of I + the strictly lower triangle of x [..., C, C], by products of ever larger
    blocks.

    In blocks of 8 it is (I - L)(I + L²)(I + L⁴): L⁸ is 0, and no power is large enough to lose digits. The
    solver that XLA calls on CPUs has additional threads, which wait for each other next to other work.
    """
    C = x.shape[-1]
    size = _INVERSE_BLOCK
    width = size
    while width < C:
        width *= 2
    x = jnp.pad(jnp.tril(x, -1), [(0, 0)] * (x.ndim - 2) + [(0, width - C)] * 2)
    L = jnp.stack([x[..., i : i + size, i : i + size] for i in range(0, width, size)], -3)
    L2 = matmul(L, L)
    one = jnp.eye(size, dtype=jnp.float32)
    inverse = matmul(matmul(one - L, one + L2), one + matmul(L2, L2))
    while size < width:  # [[A, 0], [L, B]] has the inverse [[A⁻¹, 0], [-B⁻¹ L A⁻¹, B⁻¹]]
        (a, b) = (inverse[..., i::2, :, :] for i in (0, 1))
        corners = range(0, width, 2 * size)
        L = jnp.stack([x[..., i + size : i + 2 * size, i : i + size] for i in corners], -3)
        below = -matmul(matmul(b, L), a)
        upper = jnp.concatenate([a, jnp.zeros_like(a)], -1)
        inverse = jnp.concatenate([upper, jnp.concatenate([below, b], -1)], -2)
        size *= 2
    return inverse[..., 0, :C, :C]


def _empty(new: tuple[jax.Array, ...], spec: Any) -> tuple[Inputs, jax.Array]:
    """Returns inputs and state before the first token: zeros."""
    B = new[0].shape[0]
    (_, W, _), _, _, (_, H, Y) = state_shapes(spec)
    inputs = tuple(jnp.zeros((B, x.shape[1], W, x.shape[3]), jnp.float32) for x in new)
    state = jnp.zeros((B, new[2].shape[1], H, Y), jnp.float32)
    return match_varying_axes((inputs, state), new)


def _steps(layer: Params, a_BTN: jax.Array, b_BTN: jax.Array, num_tokens_B: jax.Array) -> jax.Array:
    """Returns, float32 [B, N, T, 2], the logarithm of the decay, and beta. They are 0 at padding, which
    changes no state.
    """
    rate_N = jnp.exp(layer["A_log"].astype(jnp.float32))
    decay_BTN = -rate_N * jax.nn.softplus(a_BTN.astype(jnp.float32) + layer["dt_bias"].astype(jnp.float32))
    steps_BTN2 = jnp.stack([decay_BTN, jax.nn.sigmoid(b_BTN.astype(jnp.float32))], -1)
    is_real_BT = jnp.arange(a_BTN.shape[1]) < num_tokens_B[:, None]
    return jnp.swapaxes(jnp.where(is_real_BT[..., None, None], steps_BTN2, 0), 1, 2)


def _tokens(
    layer: Params, config: ModelConfig, inputs: tuple[jax.Array, ...], steps_BNT2: jax.Array, first_BT=None
) -> _Tokens:
    """Returns the inputs of the delta rule: the inputs after the convolution and the model's activation, with
    queries and keys of length 1.
    """
    convolved = (convolve(x, layer[f"conv_{name}"], first_BT) for x, name in zip(inputs, "qkv", strict=True))
    q, k, v = map(activation(config), convolved)
    groups = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(_unit(x), groups, 1) for x in (q, k))
    first_B1T = None if first_BT is None else first_BT[:, None]
    return _Tokens(q * q.shape[-1] ** -0.5, k, v, steps_BNT2[..., 0], steps_BNT2[..., 1], first_B1T)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + _NORM_EPS)


def _gated_norm(out_BNTY: jax.Array, z_BTI: jax.Array, layer: Params, config: ModelConfig) -> jax.Array:
    """Returns [B, T, I]: the RMS norm of each head, times silu(z)."""
    out_BTNY = jnp.swapaxes(out_BNTY, 1, 2).astype(z_BTI.dtype)
    normed = rms_norm(out_BTNY, layer["gated_norm"], config.rms_norm_eps).reshape(z_BTI.shape)
    gate = jax.nn.silu(z_BTI.astype(jnp.float32))
    return (normed.astype(jnp.float32) * gate).astype(z_BTI.dtype)
