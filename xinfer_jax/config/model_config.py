"""`ModelConfig`, frozen and hashable: all numbers of a model."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax

from ..errors import InputError
from ..registry import plugin
from .layer_spec import ExpertsSpec, LayerSpec, MixerSpec
from .rope import RopeConfig as RopeConfig

if TYPE_CHECKING:
    from ..feed_forward.feed_forward import FeedForward
    from ..mixers.mixer import Mixer


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """All numbers of a model. Fields have the names of config.json.

    A config is a pytree without leaves, so it is static under `jit`: `jax.jit(f)(params, config, tokens_BT)`
    needs no `static_argnums`, and another config compiles another program.

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
        eos_token_ids: ids that end an answer; from `load_model`, else (). `==` does not compare them, so
            functions of this library share their programs. A function of yours that reads them under `jit` is
            compiled for each, unless you pass the config by `static_argnums`, which asks `==`.
        placeholder_ids: ids of images and sound, which no prompt may have, with their names.
            As eos_token_ids.
        quantization_config: of config.json, if matrices are quantized as its files have them. As
            eos_token_ids.
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
        if len({layer.experts for layer in self.layers} - {None}) > 1:
            raise InputError("layers with different ExpertsSpecs are not supported")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Returns the config of a Hugging Face config.json, a parsed object with older or newer field names.

        Returns:
            The config, checked for consistency, without EOS ids, which `load_model` adds. If a model that
            also sees does not say whether it is tied, this is the default of transformers 5, and `load_model`
            goes by whether its files have a head.

        Raises:
            InputError: an unknown model_type, a missing or impossible value, or a setting that is not
                supported.
        """
        from ..families.reading import from_hf  # optional: settings of a checkpoint

        return from_hf(hf)

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer; linear and yarn scaling extend the trained length."""
        longest = self.max_position_embeddings
        rope = self.rope
        trained = dict(linear=longest, yarn=rope.original_max_position_embeddings).get(rope.rope_type, 0)
        return max(longest, int(trained * rope.factor))

    def mixers(self, layer: int) -> "tuple[Mixer, ...]":
        """The mixers of a layer."""
        return tuple(map(self._mixer, self.layers[layer].mixers))

    def _mixer(self, spec: MixerSpec) -> "Mixer":
        return plugin("mixer", spec.kind)(self, spec)

    def feed_forward(self, layer: int) -> "FeedForward | None":
        """The feed-forward of a layer; None: it has none."""
        spec = self.layers[layer].feed_forward
        return None if spec is None else plugin("feed_forward", spec.kind)(self, spec)

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
    def mixer_specs(self) -> list[MixerSpec]:
        """The specs of the mixers of all layers, in order."""
        return [spec for layer in self.layers for spec in layer.mixers]

    @cached_property
    def cached_mixers(self) -> "tuple[Mixer, ...]":
        """The mixers with a cache of their own, in the order of `KVCache.layers`."""
        return tuple(self._mixer(spec) for spec in self.mixer_specs if _has_cache(spec))

    @property
    def shares_kv(self) -> bool:
        """Whether mixers use the keys and values of others."""
        return not all(map(_has_cache, self.mixer_specs))

    @cached_property
    def caches_of_layers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer the index in `KVCache.layers` of the cache that each of its mixers uses: its own, or
        that of the last mixer before it of its kind that has one, and a window, or none, as it does.
        """
        last: dict[tuple[str, bool], int] = {}
        count = 0

        def index_of(spec: Any) -> int:
            nonlocal count
            form = spec.kind, getattr(spec, "window", None) is None
            if _has_cache(spec):
                last[form] = count
                count += 1
            return last.get(form, 0)

        return tuple(tuple(map(index_of, layer.mixers)) for layer in self.layers)

    @cached_property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: it has none."""
        return tuple(getattr(layer.attention, "window", None) for layer in self.layers)

    @property
    def head_widths(self) -> tuple[int, ...]:
        """The distinct widths of heads."""
        widths = (getattr(layer.attention, "head_dim", None) or self.head_dim for layer in self.layers)
        return tuple(dict.fromkeys(widths))

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of a layer's attention; None: it has none."""
        return self._rope_of(self.layers[layer].attention)

    def _rope_of(self, spec: Any) -> RopeConfig | None:
        return (spec.rope or self.rope) if getattr(spec, "uses_rope", False) else None

    @cached_property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings of all mixers."""
        return tuple(dict.fromkeys(filter(None, map(self._rope_of, self.mixer_specs))))


def flatten_config(config: ModelConfig) -> tuple[tuple[()], tuple[Any, ...]]:
    """Returns no leaves, and the config with all that `==` does not compare."""
    kept = (
        tuple(config.eos_token_ids),
        tuple(config.placeholder_ids.items()),
        repr(config.quantization_config),
    )
    return (), (config, *kept)


jax.tree_util.register_pytree_with_keys(ModelConfig, flatten_config, lambda aux, _: aux[0])


def is_config(node: object) -> bool:
    """Returns True if a node of a pytree is a config. As a leaf, a config is compared by `==`, without the
    EOS ids.
    """
    return isinstance(node, ModelConfig)


def _has_cache(spec: Any) -> bool:
    """Returns True if a mixer has its own cache."""
    return not getattr(spec, "shares_kv", False)


def check_config(config: Any) -> None:
    """Raises InputError unless config is a `ModelConfig`."""
    if not isinstance(config, ModelConfig):
        from ..wrong_types import not_a_config  # optional: objects of transformers

        raise not_a_config(config)


def with_fixed_rope(config: ModelConfig, shortest: int, longest: int) -> ModelConfig:
    """Returns the config with fixed longrope factors, for a batch whose rows have between `shortest` and
    `longest` tokens. Raises InputError if the factors would change during generation: cached keys would be
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
