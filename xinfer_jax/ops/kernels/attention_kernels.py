"""Attention by a kernel."""

from functools import partial
from typing import Any

import jax

import kernels_pallas

from ...cache.contiguous import Contiguous
from ...model.attention import Scoring
from ..forms import Kernel, named


def select_attention(kernel: str, impl: str | None, q_BTNH: Any, kv: Contiguous) -> kernels_pallas.Selection:
    """The implementation for these queries and keys.

    Args:
        kernel: "decode_attention" or "prefill_attention".
        impl, q_BTNH, kv: as in `model.attention.attention`; arrays may be shapes.

    Raises:
        InputError: the named implementation does not support them.
    """
    k, v = kv.kernel_arrays()
    return named(kernel, impl, q_BTNH, k, v, _key_bias(kv), obstacle=kv.kernel_obstacle)


def _key_bias(kv: Contiguous) -> kernels_pallas.KeyBias | None:
    bias = kv.key_bias_fn
    return None if bias is None else kernels_pallas.KeyBias(bias.near_KTH, bias.cos_RP, bias.sin_RP)


def _kernel(few: bool) -> str:
    return "decode_attention" if few else "prefill_attention"


def _select(impl: str | None, operands: Any, static: dict[str, Any]) -> kernels_pallas.Selection:
    return select_attention(_kernel(static["few"]), impl, *operands[:2])


def _run(  # noqa: PLR0913
    impl: str,
    q_BTNH: jax.Array,
    kv: Any,
    start_B: Any,
    length_B: Any,
    sink_N: Any,
    scoring: Scoring,
    few: bool,
) -> jax.Array:
    options = kv.kernel_options()
    if (bias := _key_bias(kv)) is not None:
        options["key_bias"] = bias
    if sink_N is not None:
        options["sink_N"] = sink_N
    run = partial(kernels_pallas.run_kernel, impl, _kernel(few))
    run = partial(run, scale=scoring.scale, window=kv.window, soft_cap=scoring.soft_cap)
    return run(q_BTNH, *kv.kernel_arrays(), start_B, length_B, **options)


ATTENTION = Kernel(_select, _run)
