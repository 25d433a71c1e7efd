"""Makes settings of config.json from the metadata of a GGUF file: the settings of architectures with Mamba-2
or short convolutions.

Files have no types of layers. A layer has attention if it has key heads, and Mamba-2 or a short convolution
otherwise. `ssm.time_step_rank` is the number of heads of Mamba-2.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, format_value
from ..families.layer_fields import FULL
from .gguf_architectures import Settings, divided, grouped, head_width, integer

_KEY_HEADS = "attention.head_count_kv"
_CONV = "conv"
_MAMBA = "mamba"
_ATTENTION = "attention"
# The fields of config.json with the numbers of Mamba-2, by the family that has these names.
_FIELDS = {
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "mamba": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
}
_WITHOUT_ATTENTION = dict(num_attention_heads=1, num_key_value_heads=1, intermediate_size=1)
_WITHOUT_ROPE = dict(rope_theta=1e4, rope_scaling=None)


def _has(tensors: Mapping[str, Any], *ends: str) -> bool:
    """Returns True if the name of a tensor ends like this."""
    return any(name.endswith(ends) for name in tensors)


def _of_layers(own: Mapping[str, Any], key: str, layers: int) -> list[int]:
    """Returns a number from 0 on for each layer. The file has a list, or one number for all layers."""
    value = own.get(key, 0)
    numbers = value if isinstance(value, list) else [value] * layers
    if len(numbers) < layers or not all(type(x) is int and 0 <= x < 2**31 for x in numbers):
        raise InputError(f"{key} is {format_value(value)}, for {layers} layers")
    return numbers[:layers]


def _key_heads(own: Mapping[str, Any], settings: Settings) -> tuple[list[int], Settings]:
    """Returns the number of key heads of each layer, and the setting for the layers that have some."""
    heads = _of_layers(own, _KEY_HEADS, settings["num_hidden_layers"])
    if len({*heads} - {0}) > 1:
        raise InputError(f"{_KEY_HEADS} {format_value(heads)} is not supported: only one number and 0 are")
    return heads, dict(num_key_value_heads=max(heads) or None)


def _mamba(own: Mapping[str, Any], family: str) -> Settings:
    """Returns the numbers of Mamba-2 in the names of a family."""
    heads = integer(own, "ssm.time_step_rank")
    width = divided(own, "ssm.inner_size", "ssm.time_step_rank")
    rest = (own.get(f"ssm.{key}") for key in ("group_count", "state_size", "conv_kernel"))
    return dict(zip(_FIELDS[family], (heads, width, *rest), strict=True))


def mamba2(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    inner = integer(own, "ssm.inner_size")
    return (
        _mamba(own, "mamba2")
        | _WITHOUT_ATTENTION
        | _WITHOUT_ROPE
        | dict(
            expand=inner / integer(own, "embedding_length"),
            layer_norm_epsilon=settings["rms_norm_eps"],
            use_bias=_has(tensors, ".ssm_in.bias"),
            use_conv_bias=_has(tensors, ".ssm_conv1d.bias"),
        )
    )


def granite_hybrid(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    """Returns the settings of Granite 4. A file of Bamba has the same architecture, and RoPE."""
    (heads, found) = _key_heads(own, settings)
    if own.get("rope.scaling.finetuned", True) is not False:
        raise InputError(
            "rope.scaling.finetuned must be false: files of Bamba, whose attention has RoPE, are not read"
        )
    width = own.get("expert_shared_feed_forward_length") or settings.get("intermediate_size")
    return (
        found
        | _mamba(own, "mamba")
        | _WITHOUT_ROPE
        | dict(
            layer_types=[_ATTENTION if count else _MAMBA for count in heads],
            position_embedding_type="nope",
            mamba_expand=divided(own, "ssm.inner_size", "embedding_length"),
            mamba_proj_bias=_has(tensors, ".ssm_in.bias"),
            mamba_conv_bias=_has(tensors, ".ssm_conv1d.bias"),
            attention_bias=_has(tensors, ".attn_q.bias"),
            num_local_experts=own.get("expert_count", 0),
            shared_intermediate_size=width,
            attention_multiplier=own.get("attention.scale") or head_width(own) ** -0.5,
            embedding_multiplier=own.get("embedding_scale") or 1.0,
            residual_multiplier=own.get("residual_scale") or 1.0,
            logits_scaling=own.get("logit_scale") or 1.0,
        )
    )


def falcon_h1(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    """Returns the settings of Falcon-H1. Matrices in the file have all its factors, so they are 1 here."""
    return _mamba(own, "mamba") | dict(
        mamba_d_ssm=integer(own, "ssm.inner_size"),
        mamba_rms_norm=_has(tensors, ".ssm_norm.weight"),
        mamba_norm_before_gate=False,
        mamba_proj_bias=_has(tensors, ".ssm_in.bias"),
        projectors_bias=_has(tensors, ".ssm_out.bias"),
        mamba_conv_bias=_has(tensors, ".ssm_conv1d.bias"),
    )


def nemotron_h(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    """Returns the settings of Nemotron-H. A layer without key heads and without a feed-forward is Mamba-2."""
    (heads, found) = _key_heads(own, settings)
    widths = _of_layers(own, "feed_forward_length", len(heads))
    layers = zip(heads, widths, strict=True)
    fed = [("E" if f"blk.{i}.ffn_gate_inp.weight" in tensors else "-") for i in range(len(heads))]
    letters = [fed[i] if width else "*" if count else "M" for i, (count, width) in enumerate(layers)]
    dense = [width for width, letter in zip(widths, letters, strict=True) if letter == "-"]
    return (
        found
        | _mamba(own, "nemotron_h")
        | _WITHOUT_ROPE
        | dict(
            hybrid_override_pattern="".join(letters),
            intermediate_size=max(dense or widths) or 1,
            layer_norm_epsilon=settings["rms_norm_eps"],
            use_bias=_has(tensors, ".ssm_in.bias"),
            use_conv_bias=_has(tensors, ".ssm_conv1d.bias"),
            attention_bias=_has(tensors, ".attn_q.bias"),
            mlp_bias=_has(tensors, ".ffn_up.bias", ".ffn_up_shexp.bias"),
        )
    )


def nemotron_h_moe(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    return (
        nemotron_h(own, settings, tensors)
        | grouped(own, is_sigmoid=True)
        | dict(
            moe_shared_expert_intermediate_size=own.get("expert_shared_feed_forward_length"),
            moe_latent_size=own.get("moe_latent_size") or None,
        )
    )


def lfm2(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    (heads, found) = _key_heads(own, settings)
    return found | dict(
        layer_types=[FULL if count else _CONV for count in heads],
        conv_L_cache=own.get("shortconv.l_cache"),
        conv_bias=_has(tensors, ".shortconv.conv.bias"),
        block_auto_adjust_ff_dim=False,
        norm_eps=settings["rms_norm_eps"],
    )


def lfm2_moe(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    return lfm2(own, settings, tensors) | dict(
        num_dense_layers=own.get("leading_dense_block_count", 0),
        use_expert_bias=_has(tensors, ".exp_probs_b.bias"),
        routed_scaling_factor=own.get("expert_weights_scale") or 1.0,
    )


OF_STATES: dict[str, Callable[[Mapping[str, Any], Settings, Mapping[str, Any]], Settings]] = {
    "mamba2": mamba2,
    "falcon-h1": falcon_h1,
    "granitehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h_moe,
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
}
