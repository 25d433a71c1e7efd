"""Phi-3: q, k and v are one tensor, and gate and up are another. It has longrope, also for a part of each
head.
"""

from collections.abc import Mapping

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from .family import Family, Joined, Names
from .layer_fields import same_windows, with_windows, write_window
from .rope_settings import flat_rope_settings, read_rope


def read_phi3(hf: Mapping, layers: int) -> dict:
    scaling = dict(flat_rope_settings(hf))
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):  # its earlier names
        scaling["rope_type"] = "longrope"
    flat = {**hf, "rope_scaling": None, "rope_parameters": scaling}
    rope = read_rope(flat, ("default", "longrope"), partial=True)
    return dict(rope=rope, layers=with_windows(LayerSpec(), same_windows(hf, layers)))


def write_phi3(config: ModelConfig) -> dict:
    trained = config.rope.original_max_position_embeddings
    return write_window(config) | (dict(original_max_position_embeddings=trained) if trained else {})


_JOINED = Joined("self_attn.qkv_proj", ("q", "k", "v")), Joined("mlp.gate_up_proj", ("gate", "up"))
FAMILY = Family(
    dict(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5),
    read_phi3,
    "Phi3ForCausalLM",
    write_phi3,
    Names({}, _JOINED),
)
