"""Norms, RoPE and the append by one kernel on NVIDIA GPUs (without the norms) and TPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from ... import kernels_pallas
from ...cache.contiguous import Contiguous
from ...mixers.attention import ROW_QUERIES
from ...mixers.rope_append import norm_heads
from ...ops.forms import with_plain_derivative
from ...ops.operation import Call
from ...sharding import abstract_mesh_of
from .attention_kernels import kernel_arrays, with_kernel_arrays

_TPU_IMPLS = ("tpu", "interpret_tpu")


def append_form(call: Call) -> Callable | None:
    """Returns a form of `rope_append`. None: there is no kernel for it."""
    chosen = _select(call.operands["qkv"][0], call.operands["kv"], call.run_config.impl)
    if chosen == "xla":
        return None
    by_kernel = with_plain_derivative(call, chosen, partial(_by_kernel, chosen))
    norms = call.operands["norms"]
    if chosen in _TPU_IMPLS and not (norms and norms[0].centered):
        return by_kernel

    def after_norms(qkv: Any, norms: Any, **rest: Any) -> tuple[jax.Array, Contiguous]:
        return by_kernel(qkv=norm_heads(qkv, norms), norms=None, **rest)

    return after_norms


def _select(q_BTNH: jax.Array, kv: Contiguous, impl: str | None) -> str:
    """Returns the implementation. A named one is one of attention: other calls stay with XLA under every
    name.
    """
    k, v = kernel_arrays(kv)
    if k is None or abstract_mesh_of(k):
        return "xla"
    support = kernels_pallas.support
    backend = support.backend_of("rope_append", impl or kernels_pallas.dispatch.device_impl().impl)
    if q_BTNH.shape[1] > ROW_QUERIES and backend not in _TPU_IMPLS:
        return "xla"
    if support.unsupported_reason("rope_append", backend, (q_BTNH, k, v)):
        return "xla"
    return kernels_pallas.select("rope_append", impl, q_BTNH, k, v).impl


def _by_kernel(kernel: str, qkv, norms, angles, kv: Contiguous, start_B, num_tokens_B):
    arrays = (*qkv, *(angles or (None, None)), *kernel_arrays(kv), start_B, num_tokens_B)
    options = kv.kernel_options() | {"capacity": kv.capacity}
    if norms is not None:
        of_q, of_k = norms
        options["norms"] = kernels_pallas.HeadNorms(of_q.weight, of_k.weight, of_q.eps, of_q.offset)
    q_BTNH, k, v = kernels_pallas.run_kernel(kernel, "rope_append", *arrays, **options)
    return q_BTNH, with_kernel_arrays(kv, k, v)
