"""Families whose layers are linear attention (Gated DeltaNet) or full attention with an output gate."""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, ExpertsSpec, LayerSpec, LinearAttentionSpec
from ..errors import InputError, format_value
from .family import Joined, Names
from .layer_fields import attention_bias
from .rope_settings import read_rope
from .sparse_layers import EXPERTS, STACKED, read_experts
from .values import get_integer

_KINDS = ("linear_attention", "full_attention")
_ROPE_TYPES = ("default", "linear", "yarn")  # each also with a part of a head


def read_hybrid(hf: Mapping, layers: int) -> dict[str, Any]:
    """The layers of linear and of full attention."""
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
    linear = LayerSpec(
        LinearAttentionSpec(
            keys,
            values,
            get_integer(hf, "linear_key_head_dim"),
            get_integer(hf, "linear_value_head_dim"),
            _convolution(hf),
        )
    )
    full = LayerSpec(AttentionSpec(**attention_bias(hf), qk_norm="head", output_gate=True))
    specs = tuple(linear if is_linear else full for is_linear in _linear_layers(hf, layers))
    return dict(norm_offset=1.0, rope=rope, layers=specs)


def _convolution(hf: Mapping) -> int:
    width = get_integer(hf, "linear_conv_kernel_dim")
    if width < 2:
        raise InputError(f"config.json: linear_conv_kernel_dim must be at least 2, got {width}")
    return width


def read_shared_experts(hf: Mapping, norm_topk_prob: bool = True) -> ExpertsSpec:
    """Experts, one of which all tokens use."""
    name = "shared_expert_intermediate_size"
    shared = 0 if is_zero(hf[name]) else get_integer(hf, name)
    return read_experts(hf, norm_topk_prob=norm_topk_prob, shared_intermediate_size=shared)


def is_zero(value: Any) -> bool:
    """Whether it is the integer 0, by which config.json leaves something out."""
    return type(value) is int and value == 0


def _linear_layers(hf: Mapping, layers: int) -> tuple[bool, ...]:
    """Which layers are linear attention, by `layer_types` or `full_attention_interval`."""
    types = hf.get("layer_types")
    if types is None:
        interval = get_integer(hf, "full_attention_interval")
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise InputError(
            f"layer_types must list one type for each of the {layers} layers, got {format_value(types)}"
        )
    for kind in types:
        if kind not in _KINDS:
            raise InputError(
                f"layer type {format_value(kind)} is not supported: only {' and '.join(_KINDS)} are"
            )
    return tuple(kind == "linear_attention" for kind in types)


SHARED = dict(
    head_dim=256, max_position_embeddings=32768, full_attention_interval=4, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
)  # fmt: skip
SPARSE = SHARED | dict(num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512)
# Of each head first the query, then the gate.
_GATED = Joined("self_attn.q_proj", ("q", "attn_gate"), groups="num_attention_heads")
_SHARED_EXPERT = {f"shared.{leaf}": f"mlp.shared_expert.{leaf}_proj" for leaf in ("gate", "up", "down")}
NAMES = Names(
    EXPERTS
    | _SHARED_EXPERT
    | dict(q="self_attn.query_proj", attn_gate="self_attn.gate_proj", shared_gate="mlp.shared_expert_gate"),
    (_GATED, *STACKED),
)
_PARTS = dict(q="query", k="key", v="value")


def linear_names(own: Mapping[str, str], *joined: Joined) -> Names:
    """Names of a layer of linear attention. own: of z, b and a; joined: tensors with its projections."""
    names = {leaf: f"{part}_proj" for leaf, part in _PARTS.items()}
    names |= {f"conv_{leaf}": f"{part}_conv.weight" for leaf, part in _PARTS.items()}
    names |= dict(A_log="A_log", dt_bias="dt_bias", gated_norm="norm.weight", o="out_proj") | own
    convolution = Joined("linear_attn.conv1d.weight", ("conv_q", "conv_k", "conv_v"), depthwise=True)
    return Names(
        {leaf: f"linear_attn.{name}" for leaf, name in names.items()}, (*joined, convolution, *STACKED)
    )
