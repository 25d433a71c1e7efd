"""Attention by a kernel."""

import dataclasses
from typing import Any

from ... import kernels_pallas
from ...cache.contiguous import Contiguous
from ...cache.stored_kv import StoredKV, cache_dtype_of
from ...mixers.attention import Scoring, VisibleKeys
from ...ops.forms import Kernel, named
from ...ops.operation import Call


def kernel_arrays(kv: Contiguous) -> tuple[Any, Any]:
    """Returns the keys and values of a layer cache as kernels read them, or None for each that no kernel
    reads.
    """
    if kernel_obstacle(kv):
        return None, None
    k, v = (x.kernel_array() if isinstance(x, StoredKV) else x for x in (kv.k, kv.v))
    return k, v


def kernel_obstacle(kv: Contiguous) -> str | None:
    """Returns the reason why no kernel reads them."""
    if kv.v is not None and kv.value_width != kv.k.shape[3]:
        return f"values of another width than keys ({kv.value_width} and {kv.k.shape[3]})"
    return cache_dtype_of(kv.dtype_name).kernel_obstacle


def with_kernel_arrays(kv: Contiguous, k: Any, v: Any) -> Contiguous:
    """Returns the layer cache with other arrays in place of its `kernel_arrays`."""

    def stored(old: Any, array: Any) -> Any:
        return old.with_kernel_array(array) if isinstance(old, StoredKV) else array

    return dataclasses.replace(kv, k=stored(kv.k, k), v=stored(kv.v, v))


def select_attention(kernel: str, impl: str | None, q_BTNH: Any, kv: Contiguous) -> kernels_pallas.Selection:
    """Returns the implementation for these queries and keys, which may be shapes, of "decode_attention" or
    "prefill_attention". Raises InputError if the named one does not support them.
    """
    k, v = kernel_arrays(kv)
    return named(kernel, impl, q_BTNH, k, v, _key_bias(kv), obstacle=kernel_obstacle(kv))


def _key_bias(kv: Contiguous) -> kernels_pallas.KeyBias | None:
    bias = kv.key_bias_fn
    return None if bias is None else kernels_pallas.KeyBias(bias.near_KTH, bias.cos_RP, bias.sin_RP)


def _kernel(few: bool) -> str:
    return "decode_attention" if few else "prefill_attention"


def _select(call: Call) -> kernels_pallas.Selection:
    operands = call.operands
    kernel = _kernel(call.static["few"])
    return select_attention(kernel, call.run_config.impl, operands["q_BTNH"], operands["kv"])


def _run(kernel: str, q_BTNH, kv: Any, visible: VisibleKeys, sink_N, scoring: Scoring, few: bool):
    options = kv.kernel_options() | dict(window=kv.window, scale=scoring.scale, soft_cap=scoring.soft_cap)
    if (bias := _key_bias(kv)) is not None:
        options["key_bias"] = bias
    if scoring.first_key:
        options["first_key"] = scoring.first_key
    if sink_N is not None:
        options["sink_N"] = sink_N
    args = q_BTNH, *kernel_arrays(kv), visible.start_B, visible.length_B
    return kernels_pallas.run_kernel(kernel, _kernel(few), *args, **options)


ATTENTION = Kernel(_select, _run)
