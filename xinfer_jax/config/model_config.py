"""`ModelConfig`, frozen and hashable: all numbers of a model."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax

from ..errors import InputError
from ..registry import plugin
from .layer_spec import DraftHeadSpec, ExpertsSpec, LayerSpec, MixerSpec
from .rope import RopeConfig as RopeConfig

if TYPE_CHECKING:
    from ..feed_forward.feed_forward import FeedForward
    from ..mixers.mixer import Mixer


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The config of a model: its shape and settings. Fields have the names of config.json.

    A config is a pytree without leaves, so it is static under `jit`. For example,
    `jax.jit(f)(params, config, tokens_BT)` needs no `static_argnums`, and another config compiles another
    program.

    Attributes:
        model_type: the family, for example "qwen2".
        vocab_size: V, the number of token ids.
        hidden_size: D, the width of hidden states.
        intermediate_size: F, the width of feed-forward layers.
        num_hidden_layers: L. If you pass a smaller number to `dataclasses.replace`, the last layers are left
            out.
        num_attention_heads: N, the number of query heads.
        num_key_value_heads: K, the number of key/value heads.
        head_dim: H, the width of a head.
        max_position_embeddings: the most tokens of a sequence, before rope scaling.
        rms_norm_eps: the number that norms add to the mean square under the root.
        tie_word_embeddings: True if lm_head is the embedding matrix.
        rope: the rotary position embedding.
        layers: the parts of each layer, also if they differ from the numbers above. It is not hashed.
        norm_offset: norms multiply by norm_offset + weight in float32, and round last. None: they round
            first, and then multiply by the weight. In float32 None and 0 are equal.
        hidden_act: the activation function: "silu", "gelu_pytorch_tanh" or "relu2" (the square of relu).
        embed_scale: the factor of embeddings, in their dtype.
        residual_multiplier: the factor of the outputs that attention and MLP add to the hidden states.
        logits_scaling: the number by which logits are divided.
        final_logit_softcapping: a cap c of logits, which become c tanh(logit / c). None: no cap.
        hidden_size_per_layer_input: the width of the part of a token's own embedding that each layer gets. 0:
            none.
        vocab_size_per_layer_input: the number of rows in the matrix of these embeddings.
        draft_head: the draft head among the parameters, if the model was loaded with one.
        eos_token_ids: ids that end an answer. `load_model` sets them, and without it they are (). `==` does
            not compare them, so functions of this library share their programs. If your own function reads
            them under `jit`, it is compiled for each value, unless you pass the config by `static_argnums`,
            which compares with `==`.
        placeholder_ids: the ids of images and sound, with their names. No prompt may have them. `==` does not
            compare them.
        quantization_config: the quantization_config of config.json, if matrices keep the quantization of its
            files. `==` does not compare it.
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
    draft_head: DraftHeadSpec | None = None
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)
    placeholder_ids: dict[int, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    quantization_config: dict | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.layers) < self.num_hidden_layers:
            raise InputError(
                f"num_hidden_layers is {self.num_hidden_layers}, and layers has only {len(self.layers)}"
            )
        object.__setattr__(self, "layers", self.layers[: self.num_hidden_layers])
        for field in ("experts", "centered_norms"):
            if len({getattr(layer, field) for layer in self.layers} - {None}) > 1:
                raise InputError(f"layers with different {field} are not supported")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Returns the config of a Hugging Face config.json.

        Older and newer names of fields are accepted. The config is checked for consistency. It has no EOS
        ids, and `load_model` adds them. If the config of a model with images does not say whether its
        embeddings are tied, the default of transformers 5 is taken. `load_model` then checks whether the
        files have a head.

        Args:
            hf: the parsed JSON object.

        Raises:
            InputError: the model_type is unknown, a value is missing or impossible, or a setting is not
                supported.
        """
        from ..families.reading import from_hf  # optional: settings of a checkpoint

        return from_hf(hf)

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer. Linear and yarn scaling extend the trained length."""
        longest = self.max_position_embeddings
        rope = self.rope
        trained = dict(linear=longest, yarn=rope.original_max_position_embeddings).get(rope.rope_type, 0)
        return max(longest, int(trained * rope.factor))

    def mixers(self, layer: int) -> "tuple[Mixer, ...]":
        """Returns the mixers of a layer."""
        return tuple(map(self._mixer, self.layers[layer].mixers))

    def _mixer(self, spec: MixerSpec) -> "Mixer":
        return plugin("mixer", spec.kind)(self, spec)

    def feed_forward(self, layer: int) -> "FeedForward | None":
        """Returns the feed-forward of a layer. None: it has none."""
        spec = self.layers[layer].feed_forward
        return None if spec is None else plugin("feed_forward", spec.kind)(self, spec)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts, which are equal in all layers that have experts, or None if no layer has experts."""
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def num_experts(self) -> int:
        """X, the number of experts, or 0 if there are none."""
        return self.experts.num_experts if self.experts else 0

    @property
    def num_experts_per_tok(self) -> int:
        """The number of experts that each token uses."""
        return self.experts.num_experts_per_tok if self.experts else 0

    @property
    def mixer_specs(self) -> list[MixerSpec]:
        """The specs of the mixers of all layers, in order."""
        return [spec for layer in self.layers for spec in layer.mixers]

    @cached_property
    def cached_mixers(self) -> "tuple[Mixer, ...]":
        """The mixers that have their own cache, in the order of `KVCache.layers`."""
        return tuple(self._mixer(spec) for spec in self.mixer_specs if _has_cache(spec))

    @property
    def shares_kv(self) -> bool:
        """True if some mixers use the keys and values of other mixers."""
        return not all(map(_has_cache, self.mixer_specs))

    @cached_property
    def caches_of_layers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the index in `KVCache.layers` of the cache that each of its mixers uses.

        A mixer uses its own cache. If it has none, it uses the cache of the last mixer before it that has a
        cache, is of its kind, and has a window if and only if this mixer has one.
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
        """The sliding window of each layer, or None if the layer has no window."""
        return tuple(getattr(layer.attention, "window", None) for layer in self.layers)

    @property
    def head_widths(self) -> tuple[int, ...]:
        """The distinct widths of heads."""
        widths = (getattr(layer.attention, "head_dim", None) or self.head_dim for layer in self.layers)
        return tuple(dict.fromkeys(widths))

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Returns the rotary embedding of a layer's attention. None: it has none."""
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
