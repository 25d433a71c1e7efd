"""OLMo 2: norms after attention and MLP only, and of all query or key heads of a token together."""

from collections.abc import Mapping

from ..config.layer_spec import AttentionSpec, LayerSpec
from .family import Family
from .layer_fields import attention_bias


def olmo2_layer(hf: Mapping) -> LayerSpec:
    """A layer of OLMo 2 and 3."""
    attention = AttentionSpec(**attention_bias(hf), qk_norm="joint")
    return LayerSpec(attention, pre_norm=False, post_norm=True)


def read_olmo2(hf: Mapping, layers: int) -> dict:
    return dict(norm_offset=0.0, layers=(olmo2_layer(hf),) * layers)


FAMILY = Family(dict(max_position_embeddings=2048, rms_norm_eps=1e-5), read_olmo2)
