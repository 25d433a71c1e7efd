"""Which implementation serves each kernel of a call: for `--verbose` and whoever measures."""

from typing import Any

import jax
import numpy as np

import kernels_pallas

from ..cache.kv_cache import is_ring
from ..cache.quantized import KV_BITS
from ..config.model_config import ModelConfig
from ..model.attention import check_impl, selected
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
    dtype, leaf = activation_dtype(params), head(params)
    query = jax.ShapeDtypeStruct((rows, 1, config.num_attention_heads, config.head_dim), dtype)
    held = np.uint8 if kv_dtype in KV_BITS else resolve_dtype(kv_dtype or cache_dtype(params))
    keys = jax.ShapeDtypeStruct((rows, config.num_key_value_heads, 1, config.head_dim), held)
    rings = [is_ring(window, capacity) for window in config.layer_windows]
    used = {
        kernel: _by_layer([selected(kernel, impl, query, keys, keys, ring=ring) for ring in rings], rings)
        for kernel in ("prefill_attention", "decode_attention")
    }
    used["argmax"] = selected("argmax", impl, jax.ShapeDtypeStruct((rows, config.vocab_size), np.float32))
    hidden = jax.ShapeDtypeStruct((rows, config.hidden_size), dtype)
    if not is_quantized(leaf["weight"]) and "bias" not in leaf:
        used["lm_head_argmax"] = selected("lm_head_argmax", impl, hidden, leaf["weight"])
    return used


def _by_layer(of_layer: list[kernels_pallas.Selection], rings: list[bool]) -> kernels_pallas.Selection:
    """One for all layers: that of those without a ring, with a word about the others where they differ."""
    if all(rings):
        return of_layer[0]
    common = of_layer[rings.index(False)]
    other = next((s for s in of_layer if s.impl != common.impl), None)
    if other is None:
        return common
    some = f"{sum(rings)} of {len(rings)} layers by {other.impl}: {other.reason}"
    return common._replace(reason=f"{common.reason}; {some}")
