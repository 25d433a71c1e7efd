"""`ModelConfig`, frozen and hashable: all numbers of a model."""

import dataclasses

from ..errors import InputError
from .rope import RopeConfig as RopeConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """All numbers of a model; static under `jit`. Fields have the names of config.json.

    Attributes:
        model_type: the family.
        vocab_size: V.
        hidden_size: D.
        intermediate_size: F.
        num_hidden_layers: L.
        num_attention_heads: N.
        num_key_value_heads: K.
        head_dim: H.
        max_position_embeddings: tokens of the longest sequence, before rope scaling.
        rms_norm_eps: added to the mean square under a norm's root.
        tie_word_embeddings: lm_head is the embedding matrix.
        rope: the rotary embedding.
        layer_windows: per layer: a query at p sees keys p-window+1 … p; None: all of 0 … p.
        layer_rope: per layer: rotary embedding, or none (NoPE).
        sliding_rope: rotary embedding of layers with a window; None: `rope`.
        qkv_bias: queries, keys and values have biases.
        o_bias: attention's output matrix has a bias.
        mlp_bias: the MLP's matrices have biases.
        qk_norm: RMS norm over each query head and key head.
        qk_norm_joint: this norm is over all heads of a token together.
        pre_norm: RMS norm of the inputs of attention and MLP.
        post_norm: RMS norm of their outputs.
        sub_norm: RMS norm of the inputs of attention's output matrix and of down_proj.
        norm_offset: norms multiply by norm_offset + weight in float32, and round last; None: they round, and
            then multiply by the weight. In float32 None and 0 are the same.
        hidden_act: "silu", "gelu_pytorch_tanh" or "relu2" (relu, squared).
        embed_scale: factor on embeddings, in their dtype.
        query_pre_attn_scalar: attention scores are multiplied by its power -1/2; None: head_dim.
        attn_logit_softcapping: c: scores become c tanh(score / c); None: no cap.
        final_logit_softcapping: the same for logits.
        layer_experts: per layer: a mixture of experts instead of the MLP; empty: none.
        num_experts: X.
        num_experts_per_tok: experts of each token.
        moe_intermediate_size: F of each expert.
        norm_topk_prob: the weights of a token's experts are normalized to sum to 1.
        shared_expert_intermediate_size: F of a gated expert that all tokens use; 0: none.
        experts_beside_mlp: layers with experts have an MLP too; their outputs, each after a norm, are added.
        swiglu_limit: c: experts and their router have biases, and an expert computes down(g sigmoid(alpha g)
            (clip(up, -c, c) + 1)) of g = min(gate, c), as in gpt-oss; None: neither.
        swiglu_alpha: this alpha.
        attention_sinks: each query head has one more logit in the softmax, of no key.
        attn_output_gate: attention's output is multiplied by sigmoid of a gate, which q_proj has beside each
            query head.
        layer_linear: per layer: linear attention (Gated DeltaNet) in place of attention; empty: none.
        linear_num_key_heads: heads of its queries and keys, which are repeated to those of values.
        linear_num_value_heads: heads of its values.
        linear_key_head_dim: width of a query and key.
        linear_value_head_dim: width of a value.
        linear_conv_kernel_dim: tokens that its convolution reads, the token itself included.
        global_head_dim: H of layers without a window; None: head_dim.
        num_global_key_value_heads: K of layers without a window; None: num_key_value_heads.
        attention_k_eq_v: layers without a window have no v_proj: values are keys before their norm and RoPE.
        v_norm: RMS norm, without a weight, of each value head.
        num_kv_shared_layers: the last layers, which have no keys and values: they use those of the last layer
            before them that has a window, or none, as they do.
        use_double_wide_mlp: F of these layers is twice intermediate_size.
        hidden_size_per_layer_input: width of what each layer gets of a token's own embedding; 0: nothing.
        vocab_size_per_layer_input: rows of the matrix of these embeddings.
        layer_scalar: a layer's output is multiplied by a number.
        rotated: parameters are Hadamard-rotated (`weights/hadamard.py`); from `load_model`.
        eos_token_ids: ids that end an answer; from `load_model`, else (). Not compared.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    layer_rope: tuple[bool, ...]
    sliding_rope: RopeConfig | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_joint: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    sub_norm: bool = False
    norm_offset: float | None = None
    hidden_act: str = "silu"
    embed_scale: float = 1.0
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    layer_experts: tuple[bool, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    experts_beside_mlp: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    attention_sinks: bool = False
    attn_output_gate: bool = False
    layer_linear: tuple[bool, ...] = ()
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    global_head_dim: int | None = None
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    v_norm: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    layer_scalar: bool = False
    rotated: bool = False
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer; linear and yarn scaling extend the trained length."""
        longest = self.max_position_embeddings
        rope = self.rope
        trained = dict(linear=longest, yarn=rope.original_max_position_embeddings).get(rope.rope_type, 0)
        return max(longest, int(trained * rope.factor))

    def longest_with(self, prompt: int) -> int:
        """Most tokens of a prompt of so many and its answer: longrope's factors change within no sequence."""
        switch = self.rope.switches_at
        return self.context_length if switch is None or prompt > switch else switch

    def is_linear(self, layer: int) -> bool:
        """Whether a layer is linear attention, with a recurrent state in place of keys and values."""
        return bool(self.layer_linear) and self.layer_linear[layer]

    @property
    def num_cached_layers(self) -> int:
        """Layers with a cache of their own: all but the last ones that use another layer's."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def cache_of_layer(self) -> tuple[int, ...]:
        """Of each layer the layer whose cache it uses: itself, or an earlier one."""
        own = range(self.num_cached_layers)
        is_full = [window is None for window in self.layer_windows[: self.num_hidden_layers]]
        last = {kind: max((i for i in own if is_full[i] == kind), default=0) for kind in (True, False)}
        return (*own, *(last[kind] for kind in is_full[self.num_cached_layers :]))

    @property
    def attention_layers(self) -> list[int]:
        """The layers that are attention, not linear attention."""
        return [layer for layer in range(self.num_hidden_layers) if not self.is_linear(layer)]

    @property
    def layers_with_kv(self) -> list[int]:
        """The layers with keys and values of their own."""
        return [layer for layer in self.attention_layers if layer < self.num_cached_layers]

    @property
    def kv_windows(self) -> list[int | None]:
        """The sliding windows of the layers with keys and values of their own; None: no window."""
        return [self.layer_windows[layer] for layer in self.layers_with_kv]

    def kv_heads(self, layer: int) -> int:
        """K of a layer."""
        heads = self.num_global_key_value_heads if self.layer_windows[layer] is None else None
        return heads or self.num_key_value_heads

    def head_width(self, layer: int) -> int:
        """H of a layer."""
        width = self.global_head_dim if self.layer_windows[layer] is None else None
        return width or self.head_dim

    @property
    def head_widths(self) -> tuple[int, ...]:
        """The distinct widths of heads."""
        return tuple(dict.fromkeys(map(self.head_width, range(self.num_hidden_layers))))

    def layer_rope_config(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of a layer; None: it has none."""
        if not self.layer_rope[layer] or self.is_linear(layer):
            return None
        return self.sliding_rope if self.sliding_rope and self.layer_windows[layer] is not None else self.rope

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings of all layers."""
        return tuple(dict.fromkeys(filter(None, map(self.layer_rope_config, range(self.num_hidden_layers)))))


def with_fixed_rope(config: ModelConfig, shortest: int, longest: int) -> ModelConfig:
    """Returns the config with fixed longrope factors, for a batch whose rows have between `shortest` and
    `longest` tokens.

    Raises:
        InputError: the factors would change during generation, and cached keys would be wrong.
    """
    limit = config.rope.switches_at
    if limit is None:
        return config
    if shortest <= limit < longest:
        raise InputError(
            f"rope type 'longrope' changes its factors beyond {limit} tokens, and these sequences have"
            f" between {shortest} and {longest}: shorten the prompts or generate fewer tokens, or give only"
            " prompts that are longer"
        )
    factor = config.rope.short_factor if longest <= limit else config.rope.long_factor
    rope = dataclasses.replace(config.rope, short_factor=factor, long_factor=factor)
    return dataclasses.replace(config, rope=rope)
