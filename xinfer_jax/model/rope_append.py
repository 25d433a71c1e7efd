"""Norms and RoPE of new queries and keys, and the append of keys and values to a layer's cache: plain, or by
one kernel on NVIDIA GPUs (without the norms) and TPUs.
"""

from functools import partial
from typing import Any

import jax

import kernels_pallas
from kernels_pallas import HeadNorms

from ..cache.contiguous import Contiguous
from ..sharding import abstract_mesh_of
from .attention import ROW_QUERIES
from .kernel_products import may_use_kernel, with_plain_derivative
from .layers import apply_rope, rms_norm

_QKV = tuple[jax.Array, jax.Array, jax.Array]  # [B, T, N or K, H]
_TPU_IMPLS = ("tpu", "interpret_tpu")


def rotate(qkv: _QKV, norms: HeadNorms | None, angles: Any) -> _QKV:
    """Queries and keys after their norms and RoPE, and the values. norms: of the heads; None: there are none.
    angles: cos and sin; None: no RoPE.
    """
    q_BTNH, k_BTKH, v_BTKH = _norm(qkv, norms)
    if angles is None:
        return q_BTNH, k_BTKH, v_BTKH
    return apply_rope(q_BTNH, *angles), apply_rope(k_BTKH, *angles), v_BTKH


def rotate_and_append(  # noqa: PLR0913
    qkv: _QKV,
    norms: HeadNorms | None,
    angles: Any,
    kv: Contiguous,
    start_B: jax.Array,
    num_tokens_B: jax.Array,
    impl: str | None,
) -> tuple[jax.Array, Contiguous]:
    """The queries after norm and RoPE, and the cache with the new keys and values. Arguments as in `rotate`
    and `Contiguous.append`.
    """
    chosen = _select(qkv[0], kv, impl)
    if norms is not None and chosen not in _TPU_IMPLS:
        qkv = _norm(qkv, norms)
        norms = None
    weights, eps, offset = (None, 0.0, None) if norms is None else (norms[:2], norms.eps, norms.offset)
    operands = (qkv, weights, angles, kv, start_B, num_tokens_B)
    if chosen == "xla":
        return _plain(*operands, eps, offset)
    platform = kernels_pallas.platform_of(chosen, impl)
    plain = partial(_plain, eps=eps, offset=offset)
    by_kernel = partial(_by_kernel, eps=eps, offset=offset, impl=chosen)
    return with_plain_derivative(by_kernel, plain, platform, *operands)


def _norm(qkv: _QKV, norms: HeadNorms | None) -> _QKV:
    if norms is None:
        return qkv
    q_BTNH, k_BTKH, v_BTKH = qkv
    q_H, k_H, eps, offset = norms
    return rms_norm(q_BTNH, q_H, eps, offset), rms_norm(k_BTKH, k_H, eps, offset), v_BTKH


def _select(q_BTNH: jax.Array, kv: Contiguous, impl: str | None) -> str:
    """The implementation. A named one is one of attention: other calls stay with XLA under every name."""
    k, v = kv.kernel_arrays()
    if not may_use_kernel(impl) or k is None or abstract_mesh_of(k):
        return "xla"
    support = kernels_pallas.support
    backend = support.backend_of("rope_append", impl or kernels_pallas.dispatch.device_impl().impl)
    if q_BTNH.shape[1] > ROW_QUERIES and backend not in _TPU_IMPLS:
        return "xla"
    if support.unsupported_reason("rope_append", backend, (q_BTNH, k, v)):
        return "xla"
    return kernels_pallas.select("rope_append", impl, q_BTNH, k, v).impl


def _head_norms(weights: Any, eps: float, offset: float | None) -> HeadNorms | None:
    return None if weights is None else HeadNorms(weights[0], weights[1], eps, offset)


def _plain(qkv, weights, angles, kv: Contiguous, start_B, num_tokens_B, eps, offset):  # noqa: PLR0913
    q_BTNH, k_BTKH, v_BTKH = rotate(qkv, _head_norms(weights, eps, offset), angles)
    return q_BTNH, kv.append(k_BTKH, v_BTKH, start_B, num_tokens_B)


def _by_kernel(qkv, weights, angles, kv: Contiguous, start_B, num_tokens_B, eps, offset, impl: str):  # noqa: PLR0913
    arrays = (*qkv, *(angles or (None, None)), *kv.kernel_arrays(), start_B, num_tokens_B)
    options = kv.kernel_options() | {"capacity": kv.capacity}
    if weights is not None:
        options["norms"] = _head_norms(weights, eps, offset)
    q_BTNH, k, v = kernels_pallas.run_kernel(impl, "rope_append", *arrays, **options)
    return q_BTNH, kv.with_kernel_arrays(k, v)
