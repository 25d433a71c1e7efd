"""Which implementation serves each kernel of a call: for `--verbose` and whoever measures."""

from typing import Any

import jax
import numpy as np

import kernels_pallas

from ..cache.kv_cache import empty_layers
from ..cache.quantized import KV_BITS
from ..config.model_config import ModelConfig
from ..model.attention import attention_impl, check_impl, selected
from ..model.decoder import head
from ..weights.params import Params, activation_dtype, cache_dtype, resolve_dtype
from ..weights.quantized import is_quantized
from .options import GenerateOptions, chosen_capacity


def kernels_used(
    params: Params,
    config: ModelConfig,
    impl: str | None = None,
    rows: int = 1,
    kv_dtype: Any = None,
    capacity: int | None = None,
) -> dict[str, kernels_pallas.Selection]:
    """Which implementation serves each kernel in a `generate` call, and why.

    Rows that are sampled take logits, not `lm_head_argmax`; so does a quantized vocabulary matrix. Layers
    whose sliding window is so much shorter than the capacity that they keep a ring attend by plain jnp: the
    reason says how many.

    Args:
        params, config: the model.
        impl: as in `GenerateOptions`.
        rows: prompts in the call.
        kv_dtype: `GenerateOptions.cache_dtype`.
        capacity: `GenerateOptions.capacity`; None: what `generate` chooses for a short prompt and its default
            number of new tokens (`chosen_capacity` says it for others).

    Raises:
        InputError: the named impl does not serve this model, or this machine lacks it.
    """
    check_impl(impl)
    capacity = capacity or chosen_capacity(config, 1, GenerateOptions.max_new_tokens)
    dtype = activation_dtype(params)
    leaf = head(params)
    query = jax.ShapeDtypeStruct((rows, 1, config.num_attention_heads, config.head_dim), dtype)
    held = kv_dtype if kv_dtype in KV_BITS else resolve_dtype(kv_dtype or cache_dtype(params))
    layers = jax.eval_shape(lambda: empty_layers(config, rows, capacity, held))
    used = {
        kernel: _by_layer(kernel, impl, query, layers) for kernel in ("prefill_attention", "decode_attention")
    }
    used["argmax"] = selected("argmax", impl, jax.ShapeDtypeStruct((rows, config.vocab_size), np.float32))
    hidden = jax.ShapeDtypeStruct((rows, config.hidden_size), dtype)
    if not is_quantized(leaf["weight"]) and "bias" not in leaf:
        used["lm_head_argmax"] = selected("lm_head_argmax", impl, hidden, leaf["weight"])
    return used


def _by_layer(kernel: str, impl: str | None, query, layers) -> kernels_pallas.Selection:
    """One for all layers: that of those whose keys are in order, with a word about others that differ."""
    of_layer = [attention_impl(kernel, impl, query, keys) for keys in layers]
    common = next((s for s, keys in zip(of_layer, layers, strict=True) if keys.in_order), of_layer[0])
    others = [s for s in of_layer if s.impl != common.impl]
    if not others:
        return common
    some = f"{len(others)} of {len(layers)} layers by {others[0].impl}: {others[0].reason}"
    return common._replace(reason=f"{common.reason}; {some}")
