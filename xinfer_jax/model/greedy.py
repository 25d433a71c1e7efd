"""The most likely token: from logits, or straight from hidden states by a kernel without logits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import kernels_pallas

from ..config.model_config import ModelConfig
from ..sharding import abstract_mesh_of
from ..weights.params import Params
from ..weights.quantized_weights import Int8Weight, is_quantized
from .attention import select_kernel
from .decoder import lm_head, rotate_for_head
from .layers import linear, soft_cap


def argmax(logits_BV: jax.Array, impl: str | None = None) -> jax.Array:
    """The index of each row's largest logit, int32 [B]: the lowest of equal ones; of the first NaN if any."""
    chosen = select_kernel("argmax", impl, logits_BV).impl
    if chosen == "xla" or abstract_mesh_of(logits_BV):  # a kernel sees only one device's part
        return _argmax(logits_BV)
    platform = kernels_pallas.platform_of(chosen, impl)
    kernel = partial(kernels_pallas.run_kernel, chosen, "argmax")
    return kernels_pallas.run_on_platform(platform, kernel, _argmax, logits_BV)


def can_fuse_head(params: Params, hidden_BD: jax.Array, impl: str | None) -> bool:
    """Whether `greedy_tokens` may run a kernel."""
    leaf = lm_head(params)
    if "bias" in leaf or abstract_mesh_of(leaf):
        return False
    selection = select_head_kernel(impl, hidden_BD, leaf["weight"])
    return selection is not None and selection.impl != "xla"


def select_head_kernel(impl: str | None, hidden_BD: Any, weight: Any) -> kernels_pallas.Selection | None:
    """The implementation of `greedy_tokens` without a bias; None: no kernel is for such a weight under any
    name.
    """
    if not is_quantized(weight):
        return select_kernel("lm_head_argmax", impl, hidden_BD, weight)
    if not isinstance(weight, Int8Weight) or weight.int8_activations or hidden_BD.dtype == jnp.float32:
        return None
    return select_kernel("int8_head_argmax", impl, hidden_BD, weight.values)


def greedy_tokens(
    params: Params, config: ModelConfig, hidden_BD: jax.Array, impl: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The most likely tokens, int32 [B], and their log-probabilities, float32 [B]; if `can_fuse_head`."""
    weight = lm_head(params)["weight"]
    cap = config.final_logit_softcapping
    hidden_BD = rotate_for_head(hidden_BD, config)
    selection = select_head_kernel(impl, hidden_BD, weight)
    assert selection is not None

    def by_kernel(hidden_BD: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:  # [B], [B]
        run = partial(kernels_pallas.run_kernel, selection.impl, soft_cap=cap)
        if isinstance(weight, Int8Weight):
            return run("int8_head_argmax", hidden_BD, weight.values, weight.scale)
        return run("lm_head_argmax", hidden_BD, weight)

    def by_logits(hidden_BD: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:  # [B], [B]
        logits_BV = soft_cap(linear(hidden_BD, {"weight": weight}, jnp.float32), cap)
        id_B = _argmax(logits_BV)
        return id_B, jnp.take_along_axis(jax.nn.log_softmax(logits_BV, -1), id_B[:, None], -1)[:, 0]

    platform = kernels_pallas.platform_of(selection.impl, impl)
    return kernels_pallas.run_on_platform(platform, by_kernel, by_logits, hidden_BD, weight)


def _argmax(logits_BV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, -1).astype(jnp.int32)
