"""MiniCPM3: latent attention with RoPE that is not interleaved. Embeddings, residuals and logits are scaled.

The norms of latents have an epsilon of 1e-6, as in transformers, and `rms_norm_eps` is 1e-5
(`latent_fields.py`).
"""

import math
from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..mixers.latent_attention import LatentAttentionSpec
from .family import Family
from .latent_fields import KV_B, check_setting, read_latent_attention, write_latent_attention
from .rope_settings import ROPE_TYPES
from .values import get_integer, get_number


def read_minicpm3(hf: Mapping, layers: int) -> dict[str, Any]:
    check_setting(hf, "mlp_bias", False)
    hidden = get_integer(hf, "hidden_size")
    heads = get_integer(hf, "num_attention_heads")
    if hf.get("v_head_dim") is None:
        if hidden % heads:
            raise InputError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and config.json"
                " gives no v_head_dim"
            )
        hf = {**hf, "v_head_dim": hidden // heads}
    mixer, fields = read_latent_attention({**hf, "rope_interleave": False}, (*ROPE_TYPES, "longrope"))
    root = math.sqrt(layers)
    return fields | dict(
        layers=(LayerSpec((mixer,)),) * layers,
        embed_scale=get_number(hf, "scale_emb"),
        residual_multiplier=1.0 if hf["scale_depth"] is None else get_number(hf, "scale_depth") / root,
        logits_scaling=1.0 if hf["dim_model_base"] is None else hidden / get_integer(hf, "dim_model_base"),
    )


def write_minicpm3(config: ModelConfig) -> dict[str, Any]:
    root = math.sqrt(config.num_hidden_layers)
    depth = config.residual_multiplier * root
    # The product may be rounded: the written number gives the same multiplier again.
    near = (depth, math.nextafter(depth, 0), math.nextafter(depth, math.inf))
    return write_latent_attention(config) | dict(
        scale_emb=config.embed_scale,
        scale_depth=next((x for x in near if x / root == config.residual_multiplier), depth),
        dim_model_base=round(config.hidden_size / config.logits_scaling),
    )


FAMILY = Family(
    dict(
        head_dim=32,
        num_key_value_heads=40,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        q_lora_rank=768,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=None,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
    ),
    read_minicpm3,
    "MiniCPM3ForCausalLM",
    write_minicpm3,
    mixer_names={LatentAttentionSpec.kind: KV_B},
)
