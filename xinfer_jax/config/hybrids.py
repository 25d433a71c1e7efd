"""Families whose layers are linear attention (Gated DeltaNet) or full attention with an output gate."""

from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value
from .rope import read_rope
from .sparse_layers import read_experts, read_sparse_layers
from .values import get_boolean, get_integer

_KINDS = ("linear_attention", "full_attention")
_ROPE_TYPES = ("default", "linear", "yarn")  # each also with a part of a head
_NESTED = ("qwen3_5", "qwen3_5_moe", "gemma4")  # model types of a text model beside a vision one
_IMAGE_MODELS = tuple(f"{name}ForConditionalGeneration" for name in ("Qwen3_5", "Qwen3_5Moe", "Gemma4"))


def text_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the text model: config.json itself, or its `text_config` with what only the
    outer object has. Images are not served: the settings of a vision model are not read.

    Raises:
        InputError: `text_config` is not an object, or both say something else about the tied matrix.
    """
    if hf.get("model_type") not in _NESTED:
        return dict(hf)
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise InputError(
            f"config.json: text_config of model_type {hf['model_type']!r} must be an object, got"
            f" {format_value(text)}"
        )
    ties = {s["tie_word_embeddings"] for s in (hf, text) if type(s.get("tie_word_embeddings")) is bool}
    if len(ties) > 1:
        raise InputError("config.json: tie_word_embeddings differs between text_config and the outer object")
    of_text = {k: v for k, v in text.items() if v is not None}
    named = hf.get("architectures")
    kept = [a for a in named if a not in _IMAGE_MODELS] if isinstance(named, list | tuple) else named
    unread = ("text_config", "vision_config", "audio_config")
    outer = {k: v for k, v in hf.items() if k not in unread} | dict(architectures=kept)
    return outer | of_text | dict(model_type=text.get("model_type", f"{hf['model_type']}_text"))


def qwen3_5(hf: Mapping, layers: int) -> dict[str, Any]:
    """Dense Qwen3.5: the projections of linear attention apart."""
    return _hybrid(hf, layers)


def qwen3_5_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    """Qwen3.5 with experts in every layer; their weights always sum to 1."""
    return _hybrid(hf, layers) | _experts(hf, (True,) * layers) | dict(norm_topk_prob=True)


def qwen3_next(hf: Mapping, layers: int) -> dict[str, Any]:
    """Qwen3-Next: the projections of linear attention interleaved by key head."""
    fields = _hybrid(hf, layers) | dict(interleaved_projections=True)
    sparse = read_sparse_layers(hf, layers)
    if _is_zero(hf["num_experts"]) or not any(sparse):
        return fields
    return fields | _experts(hf, sparse) | dict(norm_topk_prob=get_boolean(hf, "norm_topk_prob"))


def _hybrid(hf: Mapping, layers: int) -> dict[str, Any]:
    bias = get_boolean(hf, "attention_bias")
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
    return dict(
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        attn_output_gate=True,
        rope=rope,
        layer_linear=_linear_layers(hf, layers),
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=get_integer(hf, "linear_key_head_dim"),
        linear_value_head_dim=get_integer(hf, "linear_value_head_dim"),
        linear_conv_kernel_dim=_convolution(hf),
    )


def _convolution(hf: Mapping) -> int:
    width = get_integer(hf, "linear_conv_kernel_dim")
    if width < 2:
        raise InputError(f"config.json: linear_conv_kernel_dim must be at least 2, got {width}")
    return width


def _experts(hf: Mapping, sparse: tuple[bool, ...]) -> dict[str, Any]:
    name = "shared_expert_intermediate_size"
    shared = 0 if _is_zero(hf[name]) else get_integer(hf, name)
    return read_experts(hf) | dict(layer_experts=sparse, shared_expert_intermediate_size=shared)


def _is_zero(value: Any) -> bool:
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


_SHARED = dict(
    head_dim=256, max_position_embeddings=32768, full_attention_interval=4, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
)  # fmt: skip
_SPARSE = _SHARED | dict(
    num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512
)
DEFAULTS: dict[str, dict[str, Any]] = {  # of config.json, as in transformers
    "qwen3_next": _SPARSE | dict(
        num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    "qwen3_5_text": _SHARED | dict(num_key_value_heads=4),
    # No layer has an MLP: the width is not read.
    "qwen3_5_moe_text": _SPARSE | dict(num_experts=256, num_experts_per_tok=8, intermediate_size=1),
}  # fmt: skip
