"""`HeadGatedAttention`: softmax attention whose output has one gate for each head, as in LFM3."""

import dataclasses

import jax
import jax.numpy as jnp

from ..config.layer_spec import AttentionSpec
from ..config.run_config import RunConfig
from ..weights.layers import Norm
from ..weights.param_specs import dense
from ..weights.params import Params
from .softmax_attention import SoftmaxAttention


@dataclasses.dataclass(frozen=True)
class HeadGatedAttentionSpec(AttentionSpec):
    """Softmax attention. The output of each head is multiplied by sigmoid of one number."""

    kind = "head_gated_attention"

    output_gate: bool = True


class HeadGatedAttention(SoftmaxAttention):
    """The mixer whose spec is a `HeadGatedAttentionSpec`."""

    def param_specs(self) -> Params:
        heads = (self.config.num_attention_heads, "heads")
        return super().param_specs() | {"attn_gate": dense(heads, (self.config.hidden_size, "embed"))}

    def project(
        self, params: Params, x_BTD: jax.Array, before: Norm | None, run_config: RunConfig
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array | None]:
        qkv, gate_BTN = super().project(params, x_BTD, before, run_config)
        assert gate_BTN is not None
        return qkv, jnp.repeat(gate_BTN, self.head_dim, -1)

    @property
    def unsupported(self) -> dict[str, str]:
        return super().unsupported | {"scales": "attention with gates"}
