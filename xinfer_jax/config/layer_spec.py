"""`LayerSpec`: what a decoder layer is made of. Layers with equal specs have parameters of equal shapes."""

import dataclasses
from typing import Any

from .rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention."""

    window: int | None = None  # a query at p sees keys p-window+1 … p; None: all of 0 … p
    ahead: int = 0  # a query at p sees the keys that one at p + ahead would see: also some after it
    uses_rope: bool = True  # queries and keys are rotated
    rope: RopeConfig | None = None  # the rotary embedding; None: the model's
    head_dim: int | None = None  # H; None: the model's
    num_key_value_heads: int | None = None  # K; None: the model's
    qkv_bias: bool = False  # queries, keys and values have biases
    o_bias: bool = False  # the output matrix has a bias
    # RMS norm of queries and keys: "head": of each head, "joint": over all heads of a token; None.
    qk_norm: str | None = None
    v_norm: bool = False  # RMS norm, without a weight, of each value head
    o_norm: bool = False  # RMS norm of the input of the output matrix
    query_pre_attn_scalar: float | None = None  # scores are multiplied by its power -1/2; None: H
    attention_multiplier: float | None = None  # scores are multiplied by it instead
    # (beta, length): a query at p is multiplied by 1 + beta log(1 + floor(p / length)); None: it is not.
    query_scaling: tuple[float, int] | None = None
    logit_softcapping: float | None = None  # c: scores become c tanh(score / c); None: no cap
    sinks: bool = False  # each query head has one more logit in the softmax, of no key
    output_gate: bool = False  # the output is multiplied by sigmoid of a gate, as wide as the queries
    values_are_keys: bool = False  # there is no value matrix: values are keys before their norm and RoPE
    # There are no keys and values: the layer uses those of the last layer before it that has some, and a
    # window, or none, as it does.
    shares_kv: bool = False


@dataclasses.dataclass(frozen=True)
class LinearAttentionSpec:
    """Gated DeltaNet, which has a state in place of keys and values."""

    num_key_heads: int  # heads of its queries and keys, which are repeated to those of values
    num_value_heads: int
    key_head_dim: int  # width of a query and key
    value_head_dim: int
    conv_kernel_dim: int  # tokens that its convolution reads, the token itself included


@dataclasses.dataclass(frozen=True)
class MlpSpec:
    """An MLP."""

    intermediate_size: int | None = None  # F; None: the model's
    bias: bool = False  # its matrices have biases
    down_norm: bool = False  # RMS norm of the input of the last one
    gated: bool = True  # down(activation(gate) * up); else down(activation(up))


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """down(g sigmoid(alpha g) (clip(up, -limit, limit) + 1)) of g = min(gate, limit)."""

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts, each a gated MLP."""

    num_experts: int  # X
    num_experts_per_tok: int  # experts of each token
    intermediate_size: int  # F of each
    norm_topk_prob: bool = True  # the weights of a token's experts are normalized to sum to 1
    shared_intermediate_size: int = 0  # F of a gated expert that all tokens use; 0: none
    bias: bool = False  # experts and router have biases
    swiglu: ClampedSwiglu | None = None  # what an expert computes; None: as the MLP


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """A decoder layer."""

    mixer: AttentionSpec | LinearAttentionSpec = AttentionSpec()  # what reads other tokens
    mlp: MlpSpec | None = MlpSpec()  # None: there are experts in its place
    experts: ExpertsSpec | None = None  # with an MLP too: their outputs, each after a norm, are added
    pre_norm: bool = True  # RMS norm of the inputs of mixer and MLP
    post_norm: bool = False  # RMS norm of their outputs
    scalar: bool = False  # the layer's output is multiplied by a number

    def with_mixer(self, **changes: Any) -> "LayerSpec":
        """The layer with these fields of its mixer changed."""
        return dataclasses.replace(self, mixer=dataclasses.replace(self.mixer, **changes))
