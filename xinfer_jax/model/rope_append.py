"""RoPE of new queries and keys, and the append of keys and values to a layer's cache: plain, or by one kernel
on NVIDIA GPUs and TPUs.
"""

from functools import partial
from typing import Any

import jax

import kernels_pallas

from ..cache.layer_caches import Contiguous
from ..sharding import abstract_mesh_of
from .attention import ROW_QUERIES
from .kernel_products import may_use_kernel, with_plain_derivative
from .layers import apply_rope

_QKV = tuple[jax.Array, jax.Array, jax.Array]  # [B, T, N or K, H]


def rotate(qkv: _QKV, angles: Any) -> _QKV:
    """Queries and keys after RoPE, and the values. angles: cos and sin; None: no RoPE."""
    q_BTNH, k_BTKH, v_BTKH = qkv
    return qkv if angles is None else (apply_rope(q_BTNH, *angles), apply_rope(k_BTKH, *angles), v_BTKH)


def rotate_and_append(  # noqa: PLR0913
    qkv: _QKV, angles: Any, kv: Contiguous, start_B: jax.Array, num_tokens_B: jax.Array, impl: str | None
) -> tuple[jax.Array, Contiguous]:
    """The queries after RoPE, and the cache with the new keys and values. Arguments as in `rotate` and
    `Contiguous.append`.
    """
    operands = (qkv, angles, kv, start_B, num_tokens_B)
    chosen = _select(qkv[0], kv, impl)
    if chosen == "xla":
        return _plain(*operands)
    platform = kernels_pallas.platform_of(chosen, impl)
    return with_plain_derivative(partial(_by_kernel, impl=chosen), _plain, platform, *operands)


def _select(q_BTNH: jax.Array, kv: Contiguous, impl: str | None) -> str:
    """The implementation. A named one is one of attention: other calls stay with XLA under every name."""
    k, v = kv.kernel_arrays()
    if not may_use_kernel(impl) or k is None or abstract_mesh_of(k):
        return "xla"
    support = kernels_pallas.support
    backend = support.backend_of("rope_append", impl or kernels_pallas.dispatch.device_impl().impl)
    if q_BTNH.shape[1] > ROW_QUERIES and backend not in ("tpu", "interpret_tpu"):
        return "xla"
    if support.unsupported_reason("rope_append", backend, (q_BTNH, k, v)):
        return "xla"
    return kernels_pallas.select("rope_append", impl, q_BTNH, k, v).impl


def _plain(qkv, angles, kv: Contiguous, start_B, num_tokens_B):
    q_BTNH, k_BTKH, v_BTKH = rotate(qkv, angles)
    return q_BTNH, kv.append(k_BTKH, v_BTKH, start_B, num_tokens_B)


def _by_kernel(qkv, angles, kv: Contiguous, start_B, num_tokens_B, impl: str):
    arrays = (*qkv, *(angles or (None, None)), *kv.kernel_arrays(), start_B, num_tokens_B)
    options = kv.kernel_options() | {"capacity": kv.capacity}
    q_BTNH, k, v = kernels_pallas.run_kernel(impl, "rope_append", *arrays, **options)
    return q_BTNH, kv.with_kernel_arrays(k, v)
