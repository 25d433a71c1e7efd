"""Makes settings of config.json from the metadata of a GGUF file: the settings of architectures with Mamba-2
or short convolutions.

Files have no types of layers. A layer has attention if it has key heads, and Mamba-2 or a short convolution
otherwise. `ssm.time_step_rank` is the number of heads of Mamba-2.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError
from ..families.layer_fields import FULL
from .gguf_architectures import Settings, divided, granite_factors, grouped, integer, key_heads, of_layers

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


def _mamba(own: Mapping[str, Any], family: str) -> Settings:
    """Returns the numbers of Mamba-2 in the names of a family."""
    heads = integer(own, "ssm.time_step_rank")
    width = divided(own, "ssm.inner_size", "ssm.time_step_rank")
    rest = (own.get(f"ssm.{key}") for key in ("group_count", "state_size", "conv_kernel"))
    return dict(zip(_FIELDS[family], (heads, width, *rest), strict=True))


def mamba2(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    return (
        _mamba(own, "mamba2")
        | _WITHOUT_ATTENTION
        | _WITHOUT_ROPE
        | dict(
            expand=divided(own, "ssm.inner_size", "embedding_length"),
            layer_norm_epsilon=settings["rms_norm_eps"],
            use_bias=_has(tensors, ".ssm_in.bias"),
            use_conv_bias=_has(tensors, ".ssm_conv1d.bias"),
        )
    )


def granite_hybrid(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    """Returns the settings of Granite 4. A file of Bamba has the same architecture, and RoPE."""
    (heads, found) = key_heads(own, settings)
    if own.get("rope.scaling.finetuned", True) is not False:
        raise InputError(
            "rope.scaling.finetuned must be false: files of Bamba, whose attention has RoPE, are not read"
        )
    width = own.get("expert_shared_feed_forward_length") or settings.get("intermediate_size")
    return (
        found
        | _mamba(own, "mamba")
        | granite_factors(own)
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
    (heads, found) = key_heads(own, settings)
    widths = of_layers(own, "feed_forward_length", len(heads))
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
    (heads, found) = key_heads(own, settings)
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
