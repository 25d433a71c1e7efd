"""OLMo 2: norms after attention and MLP only, and of all query or key heads of a token together."""

from collections.abc import Mapping

from .family import Family
from .layer_fields import attention_bias


def read_olmo2(hf: Mapping, layers: int) -> dict:
    return attention_bias(hf) | dict(
        pre_norm=False, post_norm=True, norm_offset=0.0, qk_norm=True, qk_norm_joint=True
    )  # fmt: skip


FAMILY = Family(dict(max_position_embeddings=2048, rms_norm_eps=1e-5), read_olmo2)
