"""Greedy tokens by kernels: from logits, or straight from hidden states without logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import kernels_pallas
from ...config.model_config import ModelConfig
from ...config.run_config import DEFAULT, RunConfig
from ...generation.state import DecodeState, append_token
from ...model.decoder import head_input, head_logits, lm_head
from ...ops.forms import Kernel, named
from ...ops.largest import plain_argmax
from ...ops.operation import Call
from ...sampling.sampler import is_plain_greedy, sample_tokens
from ...sharding import abstract_mesh_of
from ...weights.int8_weight import Int8Weight
from ...weights.layers import linear, soft_cap
from ...weights.params import Params
from ...weights.quantized_weight import is_quantized


def _select_argmax(call: Call) -> kernels_pallas.Selection:
    logits_BV = call.operands["logits_BV"]
    chosen = named("argmax", call.run_config.impl, logits_BV)
    if abstract_mesh_of(logits_BV):
        return kernels_pallas.Selection("xla", "arrays that the compiler divides over devices")
    return chosen


ARGMAX = Kernel(_select_argmax, lambda impl, logits_BV: kernels_pallas.run_kernel(impl, "argmax", logits_BV))


def can_fuse_head(params: Params, hidden_BD: jax.Array, run_config: RunConfig) -> bool:
    """Returns True if `greedy_tokens` may run a kernel."""
    leaf = lm_head(params)
    if "bias" in leaf or abstract_mesh_of(leaf):
        return False
    selection = select_head_kernel(run_config.impl, hidden_BD, leaf["weight"])
    return selection is not None and selection.impl != "xla"


def select_head_kernel(impl: str | None, hidden_BD: Any, weight: Any) -> kernels_pallas.Selection | None:
    """Returns the implementation of `greedy_tokens` without a bias. None: no kernel is for such a weight
    under any name.
    """
    if not is_quantized(weight):
        return named("lm_head_argmax", impl, hidden_BD, weight)
    if not isinstance(weight, Int8Weight) or weight.int8_activations or hidden_BD.dtype == jnp.float32:
        return None
    return named("int8_head_argmax", impl, hidden_BD, weight.values)


def greedy_tokens(
    params: Params, config: ModelConfig, hidden_BD: jax.Array, run_config: RunConfig = DEFAULT
) -> tuple[jax.Array, jax.Array]:
    """Returns the most likely tokens, int32 [B], and their log-probabilities, float32 [B]. Call it only if
    `can_fuse_head`.
    """
    weight = lm_head(params)["weight"]
    cap = config.final_logit_softcapping
    hidden_BD = head_input(hidden_BD, config)
    selection = select_head_kernel(run_config.impl, hidden_BD, weight)
    assert selection is not None

    def by_kernel(hidden_BD: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:  # [B], [B]
        run = partial(kernels_pallas.run_kernel, selection.impl, soft_cap=cap)
        if isinstance(weight, Int8Weight):
            return run("int8_head_argmax", hidden_BD, weight.values, weight.scale)
        return run("lm_head_argmax", hidden_BD, weight)

    def by_logits(hidden_BD: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:  # [B], [B]
        logits_BV = soft_cap(linear(hidden_BD, {"weight": weight}, jnp.float32), cap)
        id_B = plain_argmax(logits_BV)
        return id_B, jnp.take_along_axis(jax.nn.log_softmax(logits_BV, -1), id_B[:, None], -1)[:, 0]

    platform = kernels_pallas.platform_of(selection.impl, run_config.impl)
    return kernels_pallas.run_on_platform(platform, by_kernel, by_logits, hidden_BD, weight)


def sampling_form(call: Call) -> Callable | None:
    """Returns a form of `sample_from_hidden`: greedy rows need no logits. None: no kernel serves.

    The host of a GPU waits for these predicates in each step:

    - Greedy rows have this one.
    - Sampled rows have this one and the predicate of the sampler. If no kernel serves, they have only the
      predicate of the sampler (as with all settings, whose `is_plain_greedy` is a constant).

    The two cannot be one: it depends on the logits whether the candidates suffice, and greedy rows do not
    compute logits.
    """
    operands = call.operands
    if operands["state"].alternatives is not None:
        return None
    if not can_fuse_head(operands["params"], operands["hidden_BD"], call.run_config):
        return None
    return partial(_sample, config=call.static["config"], run_config=call.run_config)


def _sample(
    params: Params, hidden_BD: jax.Array, state: DecodeState, config: ModelConfig, run_config: RunConfig
) -> DecodeState:
    def from_logits() -> tuple[jax.Array, jax.Array]:
        logits_BV = head_logits(params, config, hidden_BD)
        return sample_tokens(logits_BV, state.key_B, state.sampling_B, state.context, run_config)[:2]

    def greedy() -> tuple[jax.Array, jax.Array]:
        return greedy_tokens(params, config, hidden_BD, run_config)

    is_greedy = is_plain_greedy(state.sampling_B, state.context)
    return append_token(state, *lax.cond(is_greedy, greedy, from_logits))
