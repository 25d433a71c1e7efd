"""`ModelConfig`, frozen and hashable: all numbers of a model."""

import dataclasses
from functools import cached_property

from ..errors import InputError
from .layer_spec import AttentionSpec, ExpertsSpec, LayerSpec, LinearAttentionSpec
from .rope import RopeConfig as RopeConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """All numbers of a model; static under `jit`. Fields have the names of config.json.

    Attributes:
        model_type: the family.
        vocab_size: V.
        hidden_size: D.
        intermediate_size: F.
        num_hidden_layers: L. `dataclasses.replace` with a smaller number leaves out the last layers.
        num_attention_heads: N.
        num_key_value_heads: K.
        head_dim: H.
        max_position_embeddings: tokens of the longest sequence, before rope scaling.
        rms_norm_eps: added to the mean square under a norm's root.
        tie_word_embeddings: lm_head is the embedding matrix.
        rope: the rotary embedding.
        layers: what each layer is made of, also where that differs from these numbers. Not hashed.
        norm_offset: norms multiply by norm_offset + weight in float32, and round last; None: they round, and
            then multiply by the weight. In float32 None and 0 are the same.
        hidden_act: "silu", "gelu_pytorch_tanh" or "relu2" (relu, squared).
        embed_scale: factor on embeddings, in their dtype.
        residual_multiplier: factor on what attention and MLP add to the hidden states.
        logits_scaling: logits are divided by it.
        final_logit_softcapping: c: logits become c tanh(logit / c); None: no cap.
        hidden_size_per_layer_input: width of what each layer gets of a token's own embedding; 0: nothing.
        vocab_size_per_layer_input: rows of the matrix of these embeddings.
        eos_token_ids: ids that end an answer; from `load_model`, else (). Not compared.
        placeholder_ids: ids of images and sound, which no prompt may have, with their names. Not compared.
        quantization_config: of config.json, if matrices are quantized as its files have them. Not compared.
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
    layers: tuple[LayerSpec, ...] = dataclasses.field(hash=False)
    norm_offset: float | None = None
    hidden_act: str = "silu"
    embed_scale: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    final_logit_softcapping: float | None = None
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)
    placeholder_ids: dict[int, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    quantization_config: dict | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.layers) < self.num_hidden_layers:
            raise InputError(
                f"num_hidden_layers is {self.num_hidden_layers}, and layers has only {len(self.layers)}"
            )
        object.__setattr__(self, "layers", self.layers[: self.num_hidden_layers])
        parts = [part for layer in self.layers for part in (layer.experts, layer.mixer)]
        for kind in (ExpertsSpec, LinearAttentionSpec):
            if len({part for part in parts if isinstance(part, kind)}) > 1:
                raise InputError(f"layers with different {kind.__name__}s are not supported")

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
        return isinstance(self.layers[layer].mixer, LinearAttentionSpec)

    def attention(self, layer: int) -> AttentionSpec | None:
        """The attention of a layer; None: it is linear attention."""
        mixer = self.layers[layer].mixer
        return mixer if isinstance(mixer, AttentionSpec) else None

    @property
    def linear_attention(self) -> LinearAttentionSpec | None:
        """The linear attention, which is the same in all layers that have it; None: none has."""
        return next((x.mixer for x in self.layers if isinstance(x.mixer, LinearAttentionSpec)), None)

    @property
    def num_linear_layers(self) -> int:
        """How many layers are linear attention."""
        return self.num_hidden_layers - len(self.attention_layers)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts, which are the same in all layers that have some; None: none has."""
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def num_experts(self) -> int:
        """X; 0: there are no experts."""
        return self.experts.num_experts if self.experts else 0

    @property
    def num_experts_per_tok(self) -> int:
        """Experts of each token."""
        return self.experts.num_experts_per_tok if self.experts else 0

    @property
    def shares_kv(self) -> bool:
        """Whether layers use the keys and values of others."""
        return self.num_cached_layers < self.num_hidden_layers

    @cached_property
    def num_cached_layers(self) -> int:
        """Layers with a cache of their own: all but the last ones that use another layer's."""
        return sum(not getattr(layer.mixer, "shares_kv", False) for layer in self.layers)

    @cached_property
    def cache_of_layer(self) -> tuple[int, ...]:
        """Of each layer the layer whose cache it uses: itself, or an earlier one."""
        own = range(self.num_cached_layers)
        is_full = [window is None for window in self.layer_windows]
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

    @cached_property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: it has none."""
        return tuple(getattr(layer.mixer, "window", None) for layer in self.layers)

    def kv_heads(self, layer: int) -> int:
        """K of a layer."""
        return getattr(self.attention(layer), "num_key_value_heads", None) or self.num_key_value_heads

    def head_width(self, layer: int) -> int:
        """H of a layer."""
        return getattr(self.attention(layer), "head_dim", None) or self.head_dim

    @property
    def head_widths(self) -> tuple[int, ...]:
        """The distinct widths of heads."""
        return tuple(dict.fromkeys(map(self.head_width, range(self.num_hidden_layers))))

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of a layer; None: it has none."""
        attention = self.attention(layer)
        return (attention.rope or self.rope) if attention and attention.uses_rope else None

    @cached_property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings of all layers."""
        return tuple(dict.fromkeys(filter(None, map(self.layer_rope, range(self.num_hidden_layers)))))


def with_fixed_rope(config: ModelConfig, shortest: int, longest: int) -> ModelConfig:
    """Returns the config with fixed longrope factors, for a batch whose rows have between `shortest` and
    `longest` tokens. Raises InputError where the factors would change during generation: cached keys would be
    wrong.
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
