"""The most likely token: from logits, or straight from hidden states by a GPU kernel without logits."""

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas

from ..config.model_config import ModelConfig
from ..sharding import abstract_mesh_of
from ..weights.params import Params
from ..weights.quantized_weights import is_quantized
from .attention import select_kernel
from .decoder import lm_head, rotate_for_head
from .layers import linear, soft_cap


def argmax(logits_BV: jax.Array, impl: str | None = None) -> jax.Array:
    """The index of each row's largest logit, int32 [B]: the lowest of equal ones; of the first NaN if any."""
    chosen = select_kernel("argmax", impl, logits_BV).impl
    if chosen == "xla" or abstract_mesh_of(logits_BV):  # a kernel sees only one device's part
        return _argmax(logits_BV)
    if impl is not None:
        return kernels_pallas.run_kernel(chosen, "argmax", logits_BV)
    forms = {kernels_pallas.platform_of(chosen): lambda x: kernels_pallas.run_kernel(chosen, "argmax", x)}
    return lax.platform_dependent(logits_BV, **forms, default=_argmax)


def can_fuse_head(params: Params, hidden_BD: jax.Array, impl: str | None) -> bool:
    """Whether `greedy_tokens` may run a kernel."""
    leaf = lm_head(params)
    if "bias" in leaf or is_quantized(leaf["weight"]) or abstract_mesh_of(leaf):
        return False
    return select_kernel("lm_head_argmax", impl, hidden_BD, leaf["weight"]).impl != "xla"


def greedy_tokens(
    params: Params, config: ModelConfig, hidden_BD: jax.Array, impl: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The most likely tokens, int32 [B], and their log-probabilities, float32 [B]; if `can_fuse_head`."""
    weight = lm_head(params)["weight"]
    cap = config.final_logit_softcapping
    hidden_BD = rotate_for_head(hidden_BD, config)
    chosen = select_kernel("lm_head_argmax", impl, hidden_BD, weight).impl

    def by_kernel(hidden_BD: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:  # [B], [B]
        return kernels_pallas.run_kernel(chosen, "lm_head_argmax", hidden_BD, weight, soft_cap=cap)

    def by_logits(hidden_BD: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:  # [B], [B]
        logits_BV = soft_cap(linear(hidden_BD, {"weight": weight}, jnp.float32), cap)
        id_B = _argmax(logits_BV)
        return id_B, jnp.take_along_axis(jax.nn.log_softmax(logits_BV, -1), id_B[:, None], -1)[:, 0]

    if impl is not None:
        return by_kernel(hidden_BD, weight)
    forms = {kernels_pallas.platform_of(chosen): by_kernel}
    return lax.platform_dependent(hidden_BD, weight, **forms, default=by_logits)


def _argmax(logits_BV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, -1).astype(jnp.int32)
