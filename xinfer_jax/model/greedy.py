"""The likeliest token: of logits, or straight from hidden states by a GPU kernel that writes no logits."""

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas

from ..config.model_config import ModelConfig
from ..sharding import mesh_of
from ..weights.params import Params
from ..weights.quantized import is_quantized
from .attention import selected
from .decoder import head, to_head
from .layers import linear, soft_cap


def argmax(logits_BV: jax.Array, impl: str | None = None) -> jax.Array:
    """The index of each row's largest logit, int32 [B]: the lowest of equal ones; the first NaN if any."""
    chosen = selected("argmax", impl, logits_BV).impl
    if chosen == "xla" or mesh_of(logits_BV):  # no kernel sees all of what devices have parts of
        return _argmax(logits_BV)
    if impl is not None:
        return kernels_pallas.run(chosen, "argmax", logits_BV)
    return lax.platform_dependent(
        logits_BV, cuda=lambda x: kernels_pallas.run(chosen, "argmax", x), default=_argmax
    )


def fuses_head(params: Params, hidden_BD: jax.Array, impl: str | None) -> bool:
    """Whether `greedy` may run a kernel."""
    leaf = head(params)
    if "bias" in leaf or is_quantized(leaf["weight"]) or mesh_of(leaf):
        return False
    return selected("lm_head_argmax", impl, hidden_BD, leaf["weight"]).impl != "xla"


def greedy(
    params: Params, config: ModelConfig, hidden_BD: jax.Array, impl: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Where `fuses_head`: the likeliest tokens, int32 [B], and their log-probabilities, float32 [B]."""
    weight = head(params)["weight"]
    cap = config.final_logit_softcapping
    hidden_BD = to_head(hidden_BD, config)
    chosen = selected("lm_head_argmax", impl, hidden_BD, weight).impl

    def by_kernel(hidden_BD: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:  # [B], [B]
        return kernels_pallas.run(chosen, "lm_head_argmax", hidden_BD, weight, soft_cap=cap)

    def by_logits(hidden_BD: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:  # [B], [B]
        logits_BV = soft_cap(linear(hidden_BD, {"weight": weight}, jnp.float32), cap)
        id_B = _argmax(logits_BV)
        return id_B, jnp.take_along_axis(jax.nn.log_softmax(logits_BV, -1), id_B[:, None], -1)[:, 0]

    if impl is not None:
        return by_kernel(hidden_BD, weight)
    return lax.platform_dependent(hidden_BD, weight, cuda=by_kernel, default=by_logits)


def _argmax(logits_BV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, -1).astype(jnp.int32)
