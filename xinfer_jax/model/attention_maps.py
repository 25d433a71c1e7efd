"""`attention_weights`: the weights with which each token attends to each token before it, to look into a
model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.contiguous import uncached_kv
from ..checks import check_integer, is_sequence
from ..config.model_config import ModelConfig
from ..config.run_config import PLAIN
from ..config.unsupported import check_causal
from ..errors import InputError, format_value
from ..mixers.attention import VisibleKeys, attention
from ..mixers.rope_append import rotate
from ..ops.operation import over_any_mesh
from ..weights.layers import norm_before
from ..weights.params import AnyArray, Params
from .decoder import Inputs, embed_inputs, run_model
from .extras import NO_EXTRAS
from .taps import Tap


@over_any_mesh
def attention_weights(
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    *,
    num_tokens_B: AnyArray | None = None,
) -> dict[int, jax.Array]:
    """Returns the attention weights of some layers, for plots and analysis of short texts.

    They are computed in plain jnp, and have T² numbers per head. The function is not jitted, and it is
    differentiable as `forward` is.

    Args:
        params: the parameter tree of the model. The layers must not be stacked.
        config: the config of the model.
        tokens_BT: int32 token ids.
        layers: the layers whose weights are returned.
        heads: the query heads whose weights are returned. None: all.
        num_tokens_B: int32 [B]: the number of real tokens in each row. None: all T tokens.

    Returns:
        A dict from layers to float32 [B, heads, T, T]. Entry [b, n, t, s] is the weight of token s for token
        t. It is 0 if s is after t or outside a window, and undefined if t is padding. Rows sum to 1, or to
        less if a sink takes the rest.

    Raises:
        InputError: `forward` would raise it.
        InputError: the model does not have a layer or a head.
        InputError: a layer has no softmax attention, or uses another layer's keys.
    """
    check_causal(config, "attention_weights")
    if not is_sequence(layers) or heads is not None and not is_sequence(heads):
        raise InputError(f"layers and heads must be lists, got {format_value((layers, heads))}")
    most = config.num_hidden_layers - 1
    layers = sorted({check_integer("layers: layer", layer, 0, most) for layer in layers})
    if isinstance(params["layers"], dict):
        raise InputError("attention_weights needs layers that are not stacked: give unstack_layers' tree")
    for layer in layers:
        spec = config.layers[layer].attention
        if spec is None:
            raise InputError(f"layer {layer} has no softmax attention, whose weights these are: leave it out")
        if spec.shares_kv:
            raise InputError(f"layer {layer} attends to another layer's keys: leave it out")
    taps = {layer - 1: Tap(read=True) for layer in layers}
    reads: Any = run_model(params, config, tokens_BT, None, num_tokens_B, taps=taps).reads
    inputs = Inputs(tokens_BT, num_tokens_B)
    _, positions, _ = embed_inputs(params, config, inputs, NO_EXTRAS, None, PLAIN)

    def weights(i: int) -> jax.Array:
        layer = params["layers"][i]
        mixer: Any = next(mixer for mixer in config.mixers(i) if mixer.spec == config.layers[i].attention)
        x_BTD = reads[i - 1]
        before = norm_before(layer, "attn_norm", config) if config.layers[i].pre_norm else None
        qkv, _ = mixer.project(layer, x_BTD, before, PLAIN)
        q_BTNH, k_BTKH, _ = rotate(*mixer.rotation(layer, qkv, mixer.angles(positions)))
        q_BTNH = mixer.scale_queries(q_BTNH, positions.position_BT).astype(jnp.float32)
        k_BKTH = jnp.swapaxes(k_BTKH, 1, 2)
        # The output for values that are the rows of the identity.
        B, K, T, _ = k_BKTH.shape
        ones_BKTT = jnp.broadcast_to(jnp.eye(T, dtype=jnp.float32), (B, K, T, T))
        kv = dataclasses.replace(uncached_kv(k_BKTH, ones_BKTT), window=mixer.window)
        visible = VisibleKeys(None, positions.num_tokens_B)
        out_BTNT = attention(q_BTNH, kv, visible, **mixer.scoring(layer), run_config=PLAIN)
        N = out_BTNT.shape[2]
        chosen = range(N) if heads is None else [check_integer("heads: head", n, 0, N - 1) for n in heads]
        return jnp.swapaxes(out_BTNT, 1, 2)[:, np.array(chosen, int)]

    return {layer: weights(layer) for layer in layers}
