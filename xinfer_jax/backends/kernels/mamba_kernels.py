"""Mamba-2 by kernels on GPUs and TPUs, of a decode step or of prompts: all that is between its products,
except the gate and its norm.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ... import kernels_pallas
from ...config.model_config import ModelConfig
from ...kernels_pallas.reference_mamba import MambaState, MambaToken, MambaWeights
from ...mixers.recurrent import Recurrent
from ...ops.forms import with_plain_derivative
from ...ops.operation import Call
from ...weights.params import Params
from .delta_kernels import select_of_states

_OTHERS = ("A_log", "dt_bias", "D")


def mamba_form(call: Call) -> Callable | None:
    """Returns a form of `mamba_step`. None: there is no kernel for it, as for calls with draft tokens."""
    x_BTI = call.operands["products"][0]
    cache = call.operands["cache"]
    if cache is None or cache.draft_slots or call.operands["first_BT"] is not None:
        return None
    name = "mamba_step" if x_BTI.shape[1] == 1 else "mamba_prefill"
    operands = x_BTI, call.operands["layer"], call.static["config"], cache
    chosen = select_mamba(name, call.run_config.impl, *operands).impl
    if chosen == "xla":
        return None
    run = partial(kernels_pallas.run_kernel, chosen, name)
    return with_plain_derivative(call, chosen, partial(_by_kernel, run=run))


def select_mamba(
    name: str, impl: str | None, x: Any, layer: Params, config: ModelConfig, cache: Recurrent
) -> kernels_pallas.Selection:
    """Returns the implementation of the kernel of that name of a layer of Mamba-2. Arrays may be shapes. A
    named implementation is a name for attention: layers that it does not serve stay with XLA under every
    name.
    """
    return select_of_states(name, impl, x, layer["conv_x"], _kernel_state(cache))


def _kernel_state(cache: Recurrent) -> MambaState:
    c, b, x = cache.inputs
    return MambaState(x, b, c, cache.state)


def _weights(layer: Params) -> MambaWeights:
    taps = [layer[f"conv_{name}"] for name in "xbc"]
    biases = [layer.get(f"conv_{name}_bias") for name in "xbc"]
    zeros = [jnp.zeros(len(x), x.dtype) for x in taps]
    biases = [zero if bias is None else bias for zero, bias in zip(zeros, biases, strict=True)]
    return MambaWeights(*taps, *biases, *(layer[name] for name in _OTHERS))


def _by_kernel(
    products, layer: Params, cache: Recurrent, start_B, num_tokens_B, first_BT, run: Callable
) -> tuple[jax.Array, Recurrent]:
    new = MambaToken(*products)
    is_step = new.x.shape[1] == 1
    tokens = jax.tree.map(lambda x: x[:, 0], new) if is_step else new
    out, after = run(tokens, _weights(layer), _kernel_state(cache), start_B, num_tokens_B)
    inputs = after.c, after.b, after.x
    return out[:, None] if is_step else out, dataclasses.replace(cache, inputs=inputs, state=after.state)
