"""Apertus: norms of each head of queries and keys, and MLPs without a gate, whose activation is xIELU."""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from ..feed_forward.xielu_mlp import XieluMlpSpec
from .family import Family, Joined, Names
from .layer_fields import attention_bias
from .rope_settings import read_rope

_XIELU = "xielu"
_ROPE = dict(  # if config.json has none
    rope_type="llama3", rope_theta=1.2e7, factor=8.0, original_max_position_embeddings=8192,
    low_freq_factor=1.0, high_freq_factor=4.0,
)  # fmt: skip


def read_apertus(hf: Mapping, layers: int) -> dict[str, Any]:
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        hf = {**hf, "rope_parameters": _ROPE}
    mlp = XieluMlpSpec() if hf["hidden_act"] == _XIELU else MlpSpec(gated=False)
    layer = LayerSpec((AttentionSpec(**attention_bias(hf), qk_norm="head"),), mlp)
    return dict(rope=read_rope(hf), layers=(layer,) * layers)


# Constants that files have as numbers.
_CONSTANTS = tuple(
    Joined(f"mlp.act_fn.{name}", (f"xielu.{name}",), axes_of_leaves=()) for name in ("beta", "eps")
)
_NORMS = dict(attn_norm="attention_layernorm.weight", mlp_norm="feedforward_layernorm.weight")
FAMILY = Family(
    dict(max_position_embeddings=65536, rms_norm_eps=1e-5, rope_theta=1.2e7, hidden_act=_XIELU),
    read_apertus,
    "ApertusForCausalLM",
    names=Names(_NORMS, _CONSTANTS),
)
