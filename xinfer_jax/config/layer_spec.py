"""`LayerSpec`: what a decoder layer is made of. Layers with equal specs have parameters of equal shapes."""

import dataclasses

from .rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention.

    Attributes:
        window: a query at p sees keys p-window+1 … p; None: all of 0 … p.
        uses_rope: queries and keys are rotated.
        rope: the rotary embedding; None: the model's.
        head_dim: H; None: the model's.
        num_key_value_heads: K; None: the model's.
        qkv_bias: queries, keys and values have biases.
        o_bias: the output matrix has a bias.
        qk_norm: RMS norm of queries and keys: "head": of each head, "joint": over all heads of a token; None.
        v_norm: RMS norm, without a weight, of each value head.
        o_norm: RMS norm of the input of the output matrix.
        query_pre_attn_scalar: scores are multiplied by its power -1/2; None: H.
        logit_softcapping: c: scores become c tanh(score / c); None: no cap.
        sinks: each query head has one more logit in the softmax, of no key.
        output_gate: the output is multiplied by sigmoid of a gate, as wide as the queries.
        values_are_keys: there is no value matrix: values are keys before their norm and RoPE.
        shares_kv: there are no keys and values: the layer uses those of the last layer before it that has
            some, and a window, or none, as it does.
    """

    window: int | None = None
    uses_rope: bool = True
    rope: RopeConfig | None = None
    head_dim: int | None = None
    num_key_value_heads: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str | None = None
    v_norm: bool = False
    o_norm: bool = False
    query_pre_attn_scalar: float | None = None
    logit_softcapping: float | None = None
    sinks: bool = False
    output_gate: bool = False
    values_are_keys: bool = False
    shares_kv: bool = False


@dataclasses.dataclass(frozen=True)
class LinearAttentionSpec:
    """Gated DeltaNet, which has a state in place of keys and values.

    Attributes:
        num_key_heads: heads of its queries and keys, which are repeated to those of values.
        num_value_heads: heads of its values.
        key_head_dim: width of a query and key.
        value_head_dim: width of a value.
        conv_kernel_dim: tokens that its convolution reads, the token itself included.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int


@dataclasses.dataclass(frozen=True)
class MlpSpec:
    """A gated MLP.

    Attributes:
        intermediate_size: F; None: the model's.
        bias: its matrices have biases.
        down_norm: RMS norm of the input of the last one.
    """

    intermediate_size: int | None = None
    bias: bool = False
    down_norm: bool = False


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """down(g sigmoid(alpha g) (clip(up, -limit, limit) + 1)) of g = min(gate, limit)."""

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts, each a gated MLP.

    Attributes:
        num_experts: X.
        num_experts_per_tok: experts of each token.
        intermediate_size: F of each.
        norm_topk_prob: the weights of a token's experts are normalized to sum to 1.
        shared_intermediate_size: F of a gated expert that all tokens use; 0: none.
        bias: experts and router have biases.
        swiglu: what an expert computes; None: as the MLP.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = True
    shared_intermediate_size: int = 0
    bias: bool = False
    swiglu: ClampedSwiglu | None = None


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """A decoder layer.

    Attributes:
        mixer: what reads other tokens.
        mlp: None: there are experts in its place.
        experts: with an MLP too: their outputs, each after a norm, are added.
        pre_norm: RMS norm of the inputs of mixer and MLP.
        post_norm: RMS norm of their outputs.
        scalar: the layer's output is multiplied by a number.
    """

    mixer: AttentionSpec | LinearAttentionSpec = AttentionSpec()
    mlp: MlpSpec | None = MlpSpec()
    experts: ExpertsSpec | None = None
    pre_norm: bool = True
    post_norm: bool = False
    scalar: bool = False
