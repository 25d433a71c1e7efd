"""Qwen3-Next and Qwen3.5: layers of linear attention (Gated DeltaNet), or of full attention with an output
gate. For linear attention Qwen3-Next has two tensors of projections, by key head. Qwen3.5 has more, separate
tensors.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..mixers.gated_delta import GatedDeltaSpec
from .family import Family, Joined, Names
from .layer_fields import (
    EXPERTS,
    FULL,
    SHARED_EXPERT,
    STACKED,
    attention_bias,
    read_layer_types,
    read_shared_experts,
    read_sparse_layers,
    unused_shared_experts,
    with_experts,
    write_experts,
)
from .rope_settings import read_rope, write_rope
from .values import get_boolean, get_count, get_integer

_LINEAR = "linear_attention"
_ROPE_TYPES = ("default", "linear", "yarn")  # each also with a part of a head


def read_hybrid(hf: Mapping, layers: int) -> dict[str, Any]:
    for name, only in (("attn_output_gate", True), ("mamba_ssm_dtype", "float32")):
        if hf.get(name) not in (None, only):
            raise InputError(
                f"{name} {format_value(hf[name])} is not supported: only {format_value(only)} is"
            )
    factor = hf.get("partial_rotary_factor")
    rope = read_rope({**hf, "partial_rotary_factor": 0.25 if factor is None else factor}, _ROPE_TYPES, True)
    keys = get_integer(hf, "linear_num_key_heads")
    values = get_integer(hf, "linear_num_value_heads")
    if values % keys:
        raise InputError(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    convolution = get_integer(hf, "linear_conv_kernel_dim")
    if convolution < 2:
        raise InputError(f"config.json: linear_conv_kernel_dim must be at least 2, got {convolution}")
    (key_width, value_width) = (get_integer(hf, f"linear_{part}_head_dim") for part in ("key", "value"))
    types = read_layer_types(hf, layers, (_LINEAR, FULL))
    if types is None:
        interval = get_integer(hf, "full_attention_interval")
        types = [_LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    of_type = {
        _LINEAR: LayerSpec((GatedDeltaSpec(keys, values, key_width, value_width, convolution),)),
        FULL: LayerSpec((AttentionSpec(**attention_bias(hf), qk_norm="head", output_gate=True),)),
    }
    return dict(norm_offset=1.0, rope=rope, layers=tuple(of_type[kind] for kind in types))


def read_qwen3_next(hf: Mapping, layers: int) -> dict[str, Any]:
    fields = read_hybrid(hf, layers)
    sparse = read_sparse_layers(hf, layers)
    if not get_count(hf, "num_experts") or not any(sparse):
        return fields
    experts = read_shared_experts(hf, get_boolean(hf, "norm_topk_prob"))
    return fields | dict(layers=with_experts(fields["layers"], sparse, experts))


def read_qwen3_5_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    """Reads a model with experts in every layer. Their weights always sum to 1."""
    fields = read_hybrid(hf, layers)
    return fields | dict(layers=with_experts(fields["layers"], (True,) * layers, read_shared_experts(hf)))


def write_hybrid(config: ModelConfig) -> dict[str, Any]:
    partial = dict(partial_rotary_factor=config.rope.partial_rotary_factor)
    deltas = [layer.mixer_of(GatedDeltaSpec.kind) for layer in config.layers]
    types = [_LINEAR if delta else FULL for delta in deltas]
    settings: dict[str, Any] = dict(layer_types=types, rope_parameters=write_rope(config.rope) | partial)
    if delta := next(filter(None, deltas), None):
        settings |= {f"linear_{name}": value for name, value in vars(delta).items()}
    return settings | write_experts(config)


_PARTS = dict(q="query", k="key", v="value")


def _linear_names(own: dict[str, str], *joined: Joined) -> Names:
    """Returns the names of a layer of linear attention. own: the names of z, b and a. joined: tensors with
    its projections.
    """
    names = {leaf: f"{part}_proj" for leaf, part in _PARTS.items()}
    names |= {f"conv_{leaf}": f"{part}_conv.weight" for leaf, part in _PARTS.items()}
    names |= dict(A_log="A_log", dt_bias="dt_bias", gated_norm="norm.weight", o="out_proj") | own
    taps = ("conv_q", "conv_k", "conv_v")
    convolution = Joined("linear_attn.conv1d.weight", taps, axes_of_leaves=(0, None, 1))
    return Names({leaf: f"linear_attn.{name}" for leaf, name in names.items()}, (*joined, convolution))


_NAMES = Names(EXPERTS | SHARED_EXPERT, STACKED)
_ATTENTION = Names(
    dict(q="self_attn.query_proj", attn_gate="self_attn.gate_proj"),
    # Of each head first the query, then the gate.
    (Joined("self_attn.q_proj", ("q", "attn_gate"), groups="num_attention_heads"),),
)
_QKVZ = Joined("linear_attn.in_proj_qkvz", ("q", "k", "v", "z"), groups="num_key_heads")
_BA = Joined("linear_attn.in_proj_ba", ("b", "a"), groups="num_key_heads")
_NEXT_MIXERS = {
    AttentionSpec.kind: _ATTENTION,
    GatedDeltaSpec.kind: _linear_names({leaf: f"{leaf}_proj" for leaf in "zba"}, _QKVZ, _BA),
}
_QKV = Joined("linear_attn.in_proj_qkv", ("q", "k", "v"))
_QWEN3_5_MIXERS = {
    AttentionSpec.kind: _ATTENTION,
    GatedDeltaSpec.kind: _linear_names({leaf: f"in_proj_{leaf}" for leaf in "zba"}, _QKV),
}

_DEFAULTS = dict(
    head_dim=256, max_position_embeddings=32768, full_attention_interval=4, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
)  # fmt: skip
_SPARSE = dict(num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512)
_NEXT = dict(
    num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=None
)
_MOE = dict(num_experts=256, num_experts_per_tok=8, intermediate_size=1)  # no layer has an MLP of that width
QWEN3_NEXT = Family(
    _DEFAULTS | _SPARSE | _NEXT,
    read_qwen3_next,
    "Qwen3NextForCausalLM",
    write_hybrid,
    _NAMES,
    _NEXT_MIXERS,
    unused_shared_experts,
)
QWEN3_5 = Family(
    _DEFAULTS | dict(num_key_value_heads=4),
    read_hybrid,
    "Qwen3_5ForCausalLM",
    write_hybrid,
    _NAMES,
    _QWEN3_5_MIXERS,
    unused_shared_experts,
)
QWEN3_5_MOE = Family(
    _DEFAULTS | _SPARSE | _MOE,
    read_qwen3_5_moe,
    "Qwen3_5MoeForCausalLM",
    write_hybrid,
    _NAMES,
    _QWEN3_5_MIXERS,
    unused_shared_experts,
)
