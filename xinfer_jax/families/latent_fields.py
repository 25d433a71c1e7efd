"""Fields and names of latent attention, which several families share.

The norms of latents have an epsilon of 1e-6 whatever `rms_norm_eps` is, as in transformers. vLLM, SGLang and
mlx-lm use `rms_norm_eps`, which is 1e-5 in GLM-4.7-Flash and MiniCPM3.
"""

from collections.abc import Mapping
from typing import Any

from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..mixers.latent_attention import LatentAttentionSpec
from .family import Joined, Names
from .rope_settings import ROPE_TYPES, read_rope, write_rope
from .values import get_boolean, get_integer, no_indexer

_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_INDEXER = ("index_topk", "index_n_heads", "index_head_dim")
# One tensor has the matrices of keys and of values, by head.
KV_B = Names(joined=(Joined("self_attn.kv_b_proj", ("k_up", "v_up"), groups="num_attention_heads"),))


def read_latent_attention(
    hf: Mapping, rope_types: tuple[str, ...] = ROPE_TYPES
) -> tuple[LatentAttentionSpec, dict[str, Any]]:
    """Returns the mixer, and the fields of `ModelConfig` that it sets. Raises InputError."""
    check_setting(hf, "is_causal", True)
    if name := next((name for name in _INDEXER if hf.get(name) is not None), None):
        raise no_indexer(hf, name)
    widths: dict[str, Any] = {name: get_integer(hf, name) for name in _WIDTHS}
    rotated = widths["qk_rope_head_dim"]
    if rotated % 2:
        raise InputError(
            f"config.json: qk_rope_head_dim {rotated} is odd: rotary embedding needs an even number"
        )
    rank = None if hf["q_lora_rank"] is None else get_integer(hf, "q_lora_rank")
    spec = LatentAttentionSpec(**widths, q_lora_rank=rank, bias=get_boolean(hf, "attention_bias"))
    rope = read_rope(hf, rope_types, interleaved=get_boolean(hf, "rope_interleave"))
    return spec, dict(rope=rope, head_dim=rotated)


def write_latent_attention(config: ModelConfig) -> dict[str, Any]:
    """Returns the inverse of `read_latent_attention`."""
    spec = config.layers[0].mixer_of(LatentAttentionSpec.kind)
    settings: dict[str, Any] = {name: getattr(spec, name) for name in (*_WIDTHS, "q_lora_rank")}
    return settings | dict(
        attention_bias=spec.bias,
        qk_head_dim=spec.qk_nope_head_dim + spec.qk_rope_head_dim,
        rope_interleave=config.rope.interleaved,
        rope_parameters=write_rope(config.rope),
    )


def check_setting(hf: Mapping, name: str, only: Any) -> None:
    """Raises InputError if a setting is not the only one that this family supports."""
    if hf.get(name, only) not in (only, None):
        raise InputError(
            f"config.json: {name} {format_value(hf[name])} is not supported for model_type"
            f" {hf['model_type']!r}: only {only!r} is"
        )
