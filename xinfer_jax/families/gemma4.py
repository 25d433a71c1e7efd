"""Gemma 4: full layers have heads of another width than sliding ones, and the last layers reuse the keys and
values of earlier ones. `gemma4_unified` is the same text model next to embedders of images and sound.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..config.layer_spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    SoftmaxRouterSpec,
)
from ..config.model_config import ModelConfig
from ..config.rope import RopeConfig
from ..errors import InputError, format_value
from ..feed_forward.mlp_and_mixture import MlpAndExpertsSpec
from .family import Family, Names
from .layer_fields import (
    EXPERTS,
    FULL,
    SLIDING,
    STACKED,
    attention_bias,
    read_layer_types,
    shared_kv_layers,
    write_layer_types,
)
from .rope_settings import read_rope, rope_per_layer_type, write_rope_per_layer_type
from .values import get_boolean, get_count, get_integer, get_integer_at_most, get_object, get_optional_number

_ROPE_TYPES = ("default", "linear", "proportional")
_ROPES: dict[str, dict[str, Any]] = {  # where config.json has none
    FULL: dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
    SLIDING: dict(rope_type="default", rope_theta=1e4),
}
_PERIOD = 6  # layers, the last of which is full

_DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=4, head_dim=256, global_head_dim=512, num_global_key_value_heads=None,
    max_position_embeddings=131072, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh",
    sliding_window=512, final_logit_softcapping=None, vocab_size_per_layer_input=262144,
    hidden_size_per_layer_input=256, attention_k_eq_v=False, num_kv_shared_layers=0, enable_moe_block=False,
    use_double_wide_mlp=False,
)  # fmt: skip


def read_gemma4(hf: Mapping, layers: int) -> dict[str, Any]:
    if hf.get("use_bidirectional_attention") not in (None, "vision"):
        raise InputError(
            f"use_bidirectional_attention {format_value(hf['use_bidirectional_attention'])} is not supported:"
            " text is generated with causal attention"
        )
    types = _layer_types(hf, layers)
    sizes: dict[str, dict[str, Any]] = _sizes_per_layer_type(hf, types)
    window = get_integer(hf, "sliding_window")
    shared = get_count(hf, "num_kv_shared_layers", layers - 1)
    own = types[: layers - shared]
    if missing := [kind for kind in types if kind not in own]:
        raise InputError(
            f"num_kv_shared_layers {shared} leaves no layer of {missing[0]} with keys of its own, which the"
            " last layers reuse"
        )
    experts = _experts(hf)
    values_are_keys = get_boolean(hf, "attention_k_eq_v")
    of_all = attention_bias(hf) | dict(qk_norm="head", v_norm=True, query_pre_attn_scalar=1.0)
    attention = {
        SLIDING: AttentionSpec(window, rope=_rope(hf, SLIDING, sizes), **of_all),
        FULL: AttentionSpec(values_are_keys=values_are_keys, **sizes[FULL], **of_all),
    }
    wide = get_integer(hf, "intermediate_size") * (2 if get_boolean(hf, "use_double_wide_mlp") else 1)

    def layer(kind: str, shares_kv: bool) -> LayerSpec:
        mixer = dataclasses.replace(attention[kind], shares_kv=shares_kv)
        mlp = MlpSpec(wide if shares_kv else None)
        feed_forward = MlpAndExpertsSpec(mlp, experts) if experts else mlp
        return LayerSpec((mixer,), feed_forward, post_norm=True, scalar=True)

    return dict(
        **sizes[SLIDING],
        rope=_rope(hf, FULL, sizes),
        norm_offset=0.0,
        embed_scale=math.sqrt(get_integer(hf, "hidden_size")),
        final_logit_softcapping=get_optional_number(hf, "final_logit_softcapping"),
        layers=tuple(layer(kind, i >= layers - shared) for i, kind in enumerate(types)),
        **_per_layer_input(hf),
    )


def _layer_types(hf: Mapping, layers: int) -> list[str]:
    """Returns the types of the layers. The last layer is always full, whatever the list says, as in
    transformers.
    """
    types = read_layer_types(hf, layers, (FULL, SLIDING))
    types = types or [SLIDING if (i + 1) % _PERIOD else FULL for i in range(layers)]
    return [*types[:-1], FULL]


def _sizes_per_layer_type(hf: Mapping, types: list[str]) -> dict[str, dict[str, int]]:
    """Returns head_dim and num_key_value_heads of each type of layers, by the published names or by
    `per_layer_config`, which transformers 5.23 writes.
    """
    names = ("head_dim", "num_key_value_heads")
    of_model = {name: get_integer(hf, name) for name in names}
    if hf.get("per_layer_config") is None:
        full = of_model | dict(head_dim=get_integer(hf, "global_head_dim"))
        if get_boolean(hf, "attention_k_eq_v") and hf["num_global_key_value_heads"] is not None:
            full["num_key_value_heads"] = get_integer(hf, "num_global_key_value_heads")
        return {SLIDING: of_model, FULL: full}
    overrides = _layer_overrides(hf, len(types))
    sizes: dict[str, dict[str, int]] = {}
    for i, kind in enumerate(types):
        given = overrides.get(i, {})
        if other := sorted(given.keys() - {*names}):
            raise InputError(f"per_layer_config of layer {i}: {format_value(other)} is not supported")
        own = {name: get_integer({**of_model, **given}, name) for name in names}
        if sizes.setdefault(kind, own) != own:
            raise InputError(
                f"per_layer_config: layers of {kind} must have the same sizes, and layer {i} differs"
            )
    return {SLIDING: of_model} | sizes


def _layer_overrides(hf: Mapping, layers: int) -> dict[int, Mapping]:
    """Returns `per_layer_config` by layer. transformers pads its keys with zeros to one width: "00" to
    "11".
    """
    given = get_object(hf, "per_layer_config")
    found = {int(key): get_object(given, key) for key in given if re.fullmatch("[0-9]{1,9}", str(key))}
    if len(found) < len(given) or max(found, default=0) >= layers:
        raise InputError(
            f"per_layer_config must have layers below {layers} as its keys, each once, got"
            f" {format_value([*given])}"
        )
    return found


def _rope(hf: Mapping, kind: str, sizes: dict[str, dict[str, int]]) -> RopeConfig:
    own = dict(rope_per_layer_type(hf)[kind] or _ROPES[kind])
    settings = dict(rope_parameters=own, max_position_embeddings=hf["max_position_embeddings"])
    rope = read_rope(settings, _ROPE_TYPES, partial=own.get("rope_type") == "proportional")
    return RopeConfig(**{**vars(rope), "head_dim": sizes[kind]["head_dim"]})


def _experts(hf: Mapping) -> ExpertsSpec | None:
    """Returns the mixture of experts next to the MLP of every layer."""
    if not get_boolean(hf, "enable_moe_block"):
        return None
    experts = get_integer(hf, "num_experts")
    chosen = get_integer_at_most(hf, "top_k_experts", experts)
    router = SoftmaxRouterSpec(input_scale=True, per_expert_scale=True)
    return ExpertsSpec(experts, chosen, get_integer(hf, "moe_intermediate_size"), router)


def _per_layer_input(hf: Mapping) -> dict[str, int]:
    name = "hidden_size_per_layer_input"
    width = 0 if hf[name] is None else get_count(hf, name, 2**16)
    if not width:
        return {}
    vocab = get_integer(hf, "vocab_size_per_layer_input")
    if vocab < get_integer(hf, "vocab_size"):
        raise InputError(
            f"vocab_size_per_layer_input {vocab} is below vocab_size {hf['vocab_size']}: every token needs an"
            " input of each layer"
        )
    return dict(hidden_size_per_layer_input=width, vocab_size_per_layer_input=vocab)


def write_gemma4(config: ModelConfig) -> dict[str, Any]:
    full: Any = config.layers[-1].attention
    mlp: Any = config.layers[-1].mlp
    sizes = dict(head_dim=full.head_dim, num_key_value_heads=full.num_key_value_heads)
    settings = write_layer_types(config) | write_rope_per_layer_type(config)
    settings |= dict(
        global_head_dim=full.head_dim,
        attention_k_eq_v=full.values_are_keys,
        num_global_key_value_heads=full.num_key_value_heads if full.values_are_keys else None,
        num_kv_shared_layers=len(shared_kv_layers(config)),
        use_double_wide_mlp=mlp.intermediate_size not in (None, config.intermediate_size),
        final_logit_softcapping=config.final_logit_softcapping,
        hidden_size_per_layer_input=config.hidden_size_per_layer_input,
        vocab_size_per_layer_input=config.vocab_size_per_layer_input or config.vocab_size,
        enable_moe_block=config.experts is not None,
    )
    if not full.values_are_keys and full.num_key_value_heads != config.num_key_value_heads:
        of_full = [i for i, window in enumerate(config.layer_windows) if window is None]
        settings["per_layer_config"] = {str(i): sizes for i in of_full}
    if experts := config.experts:
        settings |= dict(
            num_experts=experts.num_experts, top_k_experts=experts.num_experts_per_tok,
            moe_intermediate_size=experts.intermediate_size,
        )  # fmt: skip
    return settings


def unused_keys(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Returns the names of keys and values that files have for layers that use the keys and values of another
    layer.
    """
    parts = [f"{x}_{kind}" for x in "kv" for kind in ("proj.weight", "proj.bias", "norm.weight")]
    return {f"model.layers.{layer}.self_attn.{part}" for layer in shared_kv_layers(config) for part in parts}


_EXPERTS = {leaf: name.removeprefix("mlp.") for leaf, name in EXPERTS.items()}
_STACKED = tuple(dataclasses.replace(x, name=x.name.removeprefix("mlp."), is_published=True) for x in STACKED)
_NAMES = dict(
    layer_embed="model.embed_tokens_per_layer", layer_proj="model.per_layer_model_projection",
    layer_input_norm="model.per_layer_projection_norm.weight",
    mlp_norm="pre_feedforward_layernorm.weight", input_gate="per_layer_input_gate",
    input_proj="per_layer_projection", input_norm="post_per_layer_input_norm.weight",
    layer_scalar="layer_scalar", router="router.proj", **{"router.scale": "router.scale"},
    **{"router.per_expert_scale": "router.per_expert_scale"},
    mlp_out_norm="post_feedforward_layernorm_1.weight", experts_norm="pre_feedforward_layernorm_2.weight",
    experts_out_norm="post_feedforward_layernorm_2.weight",
)  # fmt: skip
FAMILY = Family(
    _DEFAULTS,
    read_gemma4,
    "Gemma4ForCausalLM",
    write_gemma4,
    Names(_EXPERTS | _NAMES, _STACKED),
    unused=unused_keys,
)
UNIFIED = Family(
    _DEFAULTS | dict(max_position_embeddings=262144, sliding_window=1024, hidden_size_per_layer_input=0),
    read_gemma4,
    "Gemma4UnifiedForCausalLM",
    write_gemma4,
    FAMILY.names,
    unused=unused_keys,
)
