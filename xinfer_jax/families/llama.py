"""Llama, Arcee (no gate), Mistral (one sliding window for all layers), Ministral 3 (queries scaled by
position), Seed-OSS (biases of queries, keys and values) and SmolLM3 (some layers have no rotary embedding).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from ..config.model_config import ModelConfig
from ..config.rope import RopeConfig
from ..errors import InputError, format_value
from .family import Family
from .layer_fields import (
    attention_bias,
    layer_windows,
    same_windows,
    with_windows,
    write_layer_types,
    write_window,
)
from .rope_settings import ROPE_TYPES, flat_rope_settings, read_rope, write_rope
from .values import get_boolean, get_integer, get_number


def _layer(hf: Mapping) -> LayerSpec:
    return LayerSpec((AttentionSpec(**attention_bias(hf)),), MlpSpec(bias=get_boolean(hf, "mlp_bias")))


def read_llama(hf: Mapping, layers: int) -> dict[str, Any]:
    """Reads a Llama model. `longrope` is the form of the frequencies of `llama3` in GGUF files: a divisor of
    each.
    """
    return dict(rope=read_rope(hf, (*ROPE_TYPES, "longrope")), layers=(_layer(hf),) * layers)


def read_arcee(hf: Mapping, layers: int) -> dict[str, Any]:
    mlp = MlpSpec(bias=get_boolean(hf, "mlp_bias"), gated=False)
    layer = dataclasses.replace(_layer(hf), feed_forward=mlp)
    return dict(layers=(layer,) * layers)


def read_mistral(hf: Mapping, layers: int) -> dict[str, Any]:
    return dict(layers=with_windows(LayerSpec(), same_windows(hf, layers)))


def read_ministral3(hf: Mapping, layers: int) -> dict[str, Any]:
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        hf = {**hf, "rope_parameters": _MINISTRAL3_ROPE}
    rope = read_rope(hf)
    layer = LayerSpec((AttentionSpec(query_scaling=read_query_scaling(hf, rope)),))
    return dict(rope=rope, layers=with_windows(layer, same_windows(hf, layers)))


def read_query_scaling(hf: Mapping, rope: RopeConfig) -> tuple[float, int] | None:
    """Returns `AttentionSpec.query_scaling`, which is among the settings of RoPE."""
    given = flat_rope_settings(hf)
    beta = given.get("llama_4_scaling_beta")
    if beta is None or type(beta) in (int, float) and beta == 0:  # 0: there is none
        return None
    length = rope.original_max_position_embeddings or get_integer(given, "original_max_position_embeddings")
    return get_number(given, "llama_4_scaling_beta"), length


def write_ministral3(config: ModelConfig) -> dict[str, Any]:
    return write_window(config) | dict(rope_parameters=write_rope(config.rope) | write_query_scaling(config))


def write_query_scaling(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_query_scaling`."""
    mixer: Any = config.layers[0].mixers[0]
    trained = config.rope.original_max_position_embeddings or config.max_position_embeddings
    (beta, length) = mixer.query_scaling or (0.0, trained)
    return dict(llama_4_scaling_beta=beta, original_max_position_embeddings=length)


def read_seed_oss(hf: Mapping, layers: int) -> dict[str, Any]:
    (qkv, out) = (get_boolean(hf, f"attention_{name}") for name in ("bias", "out_bias"))
    return dict(layers=(_layer(hf).with_mixer(qkv_bias=qkv, o_bias=out),) * layers)


def write_seed_oss(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].attention
    return dict(attention_bias=mixer.qkv_bias, attention_out_bias=mixer.o_bias)


def read_smollm3(hf: Mapping, layers: int) -> dict[str, Any]:
    uses_rope = hf.get("no_rope_layers")  # despite its name, 1 means rotary embedding
    if uses_rope is None:
        interval = get_integer(hf, "no_rope_layer_interval")
        uses_rope = [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(uses_rope, list | tuple) or len(uses_rope) < layers:
        raise InputError(
            f"no_rope_layers must be a list of at least {layers} entries, one per layer, got"
            f" {format_value(uses_rope)}"
        )
    if bad := [u for u in uses_rope if u not in (0, 1)]:
        raise InputError(
            f"no_rope_layers holds 1 for rotary embedding and 0 for none, got {format_value(bad[0])}"
        )
    rotated = [bool(u) for u in uses_rope[:layers]]
    windows = layer_windows(hf, [not u for u in rotated])
    pairs = zip(windows, rotated, strict=True)
    return dict(layers=tuple(_layer(hf).with_mixer(window=window, uses_rope=u) for window, u in pairs))


def write_smollm3(config: ModelConfig) -> dict[str, Any]:
    uses_rope = [int(config.layer_rope(layer) is not None) for layer in range(config.num_hidden_layers)]
    return write_layer_types(config) | dict(no_rope_layers=uses_rope)


LLAMA = Family(dict(max_position_embeddings=2048), read_llama, "LlamaForCausalLM")
ARCEE = Family(
    dict(max_position_embeddings=4096, rms_norm_eps=1e-5, hidden_act="relu2"), read_arcee, "ArceeForCausalLM"
)
MISTRAL = Family(
    dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
    read_mistral,
    "MistralForCausalLM",
    write_window,
)
_MINISTRAL3_ROPE = dict(  # where config.json has none
    rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, mscale=1.0,
    mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip
MINISTRAL3 = Family(
    dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5),
    read_ministral3,
    "Ministral3ForCausalLM",
    write_ministral3,
)
SEED_OSS = Family(
    dict(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_bias=True,
        attention_out_bias=False,
    ),
    read_seed_oss,
    "SeedOssForCausalLM",
    write_seed_oss,
)  # fmt: skip
SMOLLM3 = Family(
    dict(
        num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6, no_rope_layer_interval=4,
        tie_word_embeddings=True,
    ),
    read_smollm3,
    "SmolLM3ForCausalLM",
    write_smollm3,
)  # fmt: skip
