"""Linear attention by kernels on GPUs and TPUs, of a decode step, of draft tokens or of prompts: all that is
between its products.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ... import kernels_pallas
from ...config.model_config import ModelConfig
from ...kernels_pallas.reference_delta import DeltaState, DeltaWeights, NewToken
from ...mixers.recurrent import Recurrent
from ...ops.forms import with_plain_derivative
from ...ops.operation import Call
from ...sharding import abstract_mesh_of
from ...weights.params import Params

_OTHERS = ("A_log", "dt_bias", "gated_norm")


def delta_form(call: Call) -> Callable | None:
    """Returns a form of `delta_step`. None: there is no kernel for it."""
    q_BTX = call.operands["products"][0]
    cache = call.operands["cache"]
    config = call.static["config"]
    if cache is None or call.operands["first_BT"] is not None:
        return None
    if q_BTX.shape[1] > max(1, cache.draft_slots):
        name = "delta_prefill"
    else:
        name = "delta_drafts" if cache.draft_slots else "delta_step"
    chosen = select_delta(name, call.run_config.impl, q_BTX, call.operands["layer"], config, cache).impl
    if chosen == "xla":
        return None
    run = partial(kernels_pallas.run_kernel, chosen, eps=config.rms_norm_eps)
    return with_plain_derivative(call, chosen, partial(_by_kernel, name=name, run=run))


def select_delta(
    name: str, impl: str | None, q: Any, layer: Params, config: ModelConfig, cache: Recurrent
) -> kernels_pallas.Selection:
    """Returns the implementation of the kernel of that name of a linear-attention layer. Arrays may be
    shapes. A named implementation is a name for attention: layers that it does not serve stay with XLA under
    every name.
    """
    if config.hidden_act != "silu":
        return kernels_pallas.Selection("xla", f"the activation {config.hidden_act}")
    return select_of_states(name, impl, q, layer["conv_q"], _kernel_state(cache))


def select_of_states(name: str, impl: str | None, *args: Any) -> kernels_pallas.Selection:
    """Returns the implementation of a kernel that updates states. args: its first product, the taps of that
    product and the state.
    """
    if abstract_mesh_of(args[1]):
        return kernels_pallas.Selection("xla", "arrays that the compiler divides over devices")
    support = kernels_pallas.support
    backend = support.backend_of(name, impl or kernels_pallas.dispatch.device_impl().impl)
    if reason := support.unsupported_reason(name, backend, args):
        return kernels_pallas.Selection("xla", reason)
    return kernels_pallas.select(name, impl, *args)


def _kernel_state(cache: Recurrent) -> DeltaState:
    q, k, v = cache.inputs
    return DeltaState(q, k, v, cache.state)


def _by_kernel(
    products, layer: Params, cache: Recurrent, start_B, num_tokens_B, first_BT, name: str, run: Callable
) -> tuple[jax.Array, Recurrent]:
    weights = DeltaWeights(*(layer[f"conv_{name}"] for name in "qkv"), *(layer[name] for name in _OTHERS))
    call = _with_drafts if cache.draft_slots else _without_drafts
    return call(run, name, NewToken(*products), weights, cache, start_B, num_tokens_B)


def _without_drafts(
    run: Callable, name: str, new: NewToken, weights: DeltaWeights, cache: Recurrent, start_B, num_tokens_B
) -> tuple[jax.Array, Recurrent]:
    is_step = name == "delta_step"
    tokens = jax.tree.map(lambda x: x[:, 0], new) if is_step else new
    out, (*inputs, state) = run(name, tokens, weights, _kernel_state(cache), start_B, num_tokens_B)
    return out[:, None] if is_step else out, dataclasses.replace(cache, inputs=tuple(inputs), state=state)


def _with_drafts(
    run: Callable, name: str, new: NewToken, weights: DeltaWeights, cache: Recurrent, start_B, num_tokens_B
) -> tuple[jax.Array, Recurrent]:
    """Applies the draft tokens that were accepted, then the tokens of the call. A prompt's tokens have a
    separate kernel.
    """
    is_prompt = name == "delta_prefill"
    tokens = jax.tree.map(lambda x: x[:, :0], new) if is_prompt else new
    accepted_B = jnp.clip(start_B - cache.base_B, 0, cache.draft_slots)
    accepted_B = jnp.where(num_tokens_B > 0, accepted_B, 0)
    counts = accepted_B, start_B, jnp.zeros_like(num_tokens_B) if is_prompt else num_tokens_B
    operands = tokens, weights, _kernel_state(cache), cache.steps, *counts
    out, call, state = run("delta_drafts", *operands, holds=cache.holds_drafts(new.q.shape[1]))
    after = dataclasses.replace(cache, inputs=call.inputs, state=state)
    if is_prompt:
        out, after = _without_drafts(run, name, new, weights, after, start_B, num_tokens_B)
    kept = cache.after(after.inputs, cache.state, call.steps, start_B, num_tokens_B)
    return out, dataclasses.replace(kept, state=after.state)
