"""Linear attention by one kernel on GPUs and TPUs, of a decode step or of prompts: all that is between its
products.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import kernels_pallas
from kernels_pallas.reference_delta import DeltaState, DeltaWeights, NewToken

from ...cache.recurrent import Recurrent
from ...config.model_config import ModelConfig
from ...sharding import abstract_mesh_of
from ...weights.params import Params
from .product_kernels import with_plain_derivative

_OTHERS = ("A_log", "dt_bias", "gated_norm")


def delta_form(
    plain: Callable, impl: str | None, operands: tuple[Any, ...], static: dict[str, Any]
) -> Callable | None:
    """A form of `delta_step`; None: there is no kernel for it."""
    (q_BTX, *_), layer, cache, _, _, first_BT = operands
    config = static["config"]
    if cache is None or first_BT is not None or cache.draft_slots:
        return None
    name = "delta_step" if q_BTX.shape[1] == 1 else "delta_prefill"
    chosen = select_delta(impl, q_BTX, layer, config, cache, name).impl
    if chosen == "xla":
        return None
    kernel = partial(_by_kernel, name=name, impl=chosen, eps=config.rms_norm_eps)
    return partial(with_plain_derivative, kernel, plain, kernels_pallas.platform_of(chosen, impl))


def select_delta(  # noqa: PLR0913
    impl: str | None, q: Any, layer: Params, config: ModelConfig, cache: Recurrent, name: str = "delta_step"
) -> kernels_pallas.Selection:
    """The implementation of the kernel of that name of a linear-attention layer; arrays may be shapes. A
    named one is one of attention: layers that it does not serve stay with XLA under every name.
    """
    if abstract_mesh_of(layer["conv_q"]):
        return kernels_pallas.Selection("xla", "arrays that the compiler divides over devices")
    if config.hidden_act != "silu":
        return kernels_pallas.Selection("xla", f"the activation {config.hidden_act}")
    support = kernels_pallas.support
    args = q, layer["conv_q"], _kernel_state(cache)
    backend = support.backend_of(name, impl or kernels_pallas.dispatch.device_impl().impl)
    if reason := support.unsupported_reason(name, backend, args):
        return kernels_pallas.Selection("xla", reason)
    return kernels_pallas.select(name, impl, *args)


def _kernel_state(cache: Recurrent) -> DeltaState:
    q, k, v = cache.inputs
    return DeltaState(q, k, v, cache.state)


def _by_kernel(  # noqa: PLR0913
    new, layer: Params, cache: Recurrent, start_B, num_tokens_B, _, name: str, impl: str, eps: float
) -> tuple[jax.Array, Recurrent]:
    weights = DeltaWeights(*(layer[f"conv_{name}"] for name in "qkv"), *(layer[name] for name in _OTHERS))
    is_step = name == "delta_step"
    args = (
        NewToken(*(x_BTX[:, 0] if is_step else x_BTX for x_BTX in new)),
        weights,
        _kernel_state(cache),
        start_B,
        num_tokens_B,
    )
    out, (*inputs, state) = kernels_pallas.run_kernel(impl, name, *args, eps=eps)
    return out[:, None] if is_step else out, dataclasses.replace(cache, inputs=tuple(inputs), state=state)
