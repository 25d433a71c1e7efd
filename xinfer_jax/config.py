"""Model configuration: a frozen, hashable `ModelConfig`, and `from_hf`, which reads a Hugging Face config.json.

One small function per model family states what that family adds to the shared table; a model type or a setting that
would change the result and is not supported is refused by name.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from .errors import InputError

_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with the field names of Hugging Face's `rope_parameters`."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3 and yarn: the context the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: derived from factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass needs to know that is not an array; static under `jit`."""

    model_type: str
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_hidden_layers: int  # L
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # H
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]  # per layer: a query at p sees keys p-window+1 … p; None: all of 0 … p
    layer_rope: tuple[bool, ...]  # per layer: rotary embedding, or none (NoPE)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each query and key head

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer may reach; linear and yarn scaling stretch the context that was trained."""
        stretched = {"linear": self.max_position_embeddings, "yarn": self.rope.original_max_position_embeddings}.get(self.rope.rope_type, 0)
        return max(self.max_position_embeddings, int(stretched * self.rope.factor))


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the contents of a Hugging Face config.json, with the older or the newer field names.

    Args:
        hf: the parsed JSON object.

    Returns:
        The configuration, checked for consistency.

    Raises:
        InputError: an unknown model_type, a missing or impossible value, or a setting that is not supported.
    """
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise InputError(f"model_type {model_type!r} is not supported: use one of {', '.join(sorted(_FAMILIES))}")
    defaults, family = _FAMILIES[model_type]
    hf = {**_SHARED_DEFAULTS, **defaults, **hf}
    _refuse_unsupported(hf)
    heads = _integer(hf, "num_attention_heads")
    layers = _integer(hf, "num_hidden_layers")
    hidden = _integer(hf, "hidden_size")
    fields: dict[str, Any] = dict(
        model_type=model_type,
        vocab_size=_integer(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(hf, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if hf.get("num_key_value_heads") is None else _integer(hf, "num_key_value_heads"),
        head_dim=_shared_out(hidden, heads) if hf.get("head_dim") is None else _integer(hf, "head_dim"),
        max_position_embeddings=_integer(hf, "max_position_embeddings"),
        rms_norm_eps=_number(hf, "rms_norm_eps"),
        tie_word_embeddings=_boolean(hf, "tie_word_embeddings"),
        rope=_rope(hf),
        layer_windows=(None,) * layers,
        layer_rope=(True,) * layers,
    )
    config = ModelConfig(**{**fields, **family(hf, layers)})
    _check(config)
    return config


# --- families: what each adds to the shared table ---------------------------------------------------------------------


def _qwen2(hf: Mapping, layers: int) -> dict:
    return dict(qkv_bias=True, layer_windows=_late_windows(hf, layers))


def _qwen3(hf: Mapping, layers: int) -> dict:
    bias = _boolean(hf, "attention_bias")
    return dict(qk_norm=True, qkv_bias=bias, o_bias=bias, layer_windows=_late_windows(hf, layers))


def _llama(hf: Mapping, layers: int) -> dict:
    bias = _boolean(hf, "attention_bias")
    return dict(qkv_bias=bias, o_bias=bias, mlp_bias=_boolean(hf, "mlp_bias"))


def _mistral(hf: Mapping, layers: int) -> dict:
    if hf.get("layer_types") is not None:  # transformers refuses it too
        raise InputError("layer_types is not supported for model_type 'mistral': only one sliding_window for all layers is")
    window = None if hf.get("sliding_window") is None else _integer(hf, "sliding_window")
    return dict(layer_windows=(window,) * layers)


def _smollm3(hf: Mapping, layers: int) -> dict:
    uses_rope = hf.get("no_rope_layers")  # despite its name: 1 where a layer has rotary embedding
    if uses_rope is None:
        interval = _integer(hf, "no_rope_layer_interval")
        uses_rope = [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(uses_rope, list | tuple) or len(uses_rope) < layers:
        raise InputError(f"no_rope_layers must be a list of at least {layers} entries, one per layer, got {uses_rope!r}")
    uses_rope = tuple(bool(u) for u in uses_rope[:layers])
    return _llama(hf, layers) | dict(layer_rope=uses_rope, layer_windows=_windows(hf, [not u for u in uses_rope]))


# What config.json may leave out, as in transformers.
_SHARED_DEFAULTS = dict(
    rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False, mlp_bias=False, use_sliding_window=False, hidden_act="silu"
)
_QWEN_DEFAULTS = dict(num_key_value_heads=32, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28)
_SMOLLM3_DEFAULTS = dict(
    num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6, no_rope_layer_interval=4, tie_word_embeddings=True
)
_FAMILIES = {  # model_type: (its defaults, its function)
    "qwen2": (_QWEN_DEFAULTS, _qwen2),
    "qwen3": (_QWEN_DEFAULTS | dict(head_dim=128), _qwen3),
    "llama": (dict(max_position_embeddings=2048), _llama),
    "mistral": (dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096), _mistral),
    "smollm3": (_SMOLLM3_DEFAULTS, _smollm3),
}


def _late_windows(hf: Mapping, layers: int) -> tuple[int | None, ...]:
    """Qwen: the layers from `max_window_layers` on slide."""
    first = hf["max_window_layers"]
    if isinstance(first, bool) or not isinstance(first, int):
        raise InputError(f"config.json: max_window_layers must be an integer, got {first!r}")
    return _windows(hf, [i >= first for i in range(layers)])


def _windows(hf: Mapping, slides: list[bool]) -> tuple[int | None, ...]:
    """Window per layer from `use_sliding_window`, `sliding_window` and `layer_types`, which overrules `slides`."""
    window = _integer(hf, "sliding_window") if _boolean(hf, "use_sliding_window") and hf.get("sliding_window") is not None else None
    types = hf.get("layer_types")
    if types is None:
        return tuple(window if s else None for s in slides)
    if not isinstance(types, list | tuple) or len(types) != len(slides):
        raise InputError(f"layer_types must list one type for each of the {len(slides)} layers, got {types!r}")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise InputError(f"layer type {kind!r} is not supported: only full_attention and sliding_attention are")
        if kind == "sliding_attention" and window is None:
            raise InputError("layer_types names sliding_attention, but use_sliding_window is false or sliding_window is null: set both")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


# --- rotary embedding ---------------------------------------------------------------------------------------------------


def _rope(hf: Mapping) -> RopeConfig:
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        raise InputError(f"rope parameters must be one flat object (none per layer type), got {scaling!r}")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise InputError(f"rope type {rope_type!r} is not supported: use one of {', '.join(_ROPE_TYPES)}")
    theta = 10000.0 if hf.get("rope_theta") is None else hf["rope_theta"]
    given = {"rope_theta": theta, **{k: v for k, v in scaling.items() if v is not None}}
    if given.get("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise InputError("partial_rotary_factor other than 1 is not supported")
    if rope_type in ("llama3", "yarn"):
        given.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
        if hf.get("original_max_position_embeddings") is not None:
            given["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    if rope_type == "yarn" and "factor" not in given:
        given["factor"] = hf["max_position_embeddings"] / _number(given, "original_max_position_embeddings")
    needed = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "linear": ("factor",), "dynamic": ("factor",)}
    for name in needed.get(rope_type, ()):
        if name not in given:
            raise InputError(f"rope type {rope_type!r} needs {name!r}, which config.json does not give")
    names = {f.name for f in dataclasses.fields(RopeConfig)} - {"rope_type", "truncate"}
    numbers = {name: _number(given, name) for name in names & given.keys()}
    return RopeConfig(rope_type=rope_type, truncate=bool(given.get("truncate", True)), **numbers)


# --- checks ---------------------------------------------------------------------------------------------------------------


def _refuse_unsupported(hf: Mapping) -> None:
    if hf["hidden_act"] not in ("silu", "swish"):
        raise InputError(f"hidden_act {hf['hidden_act']!r} is not supported: only silu is")
    architectures = hf.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else [architectures]:
        if not str(name).endswith("ForCausalLM"):
            raise InputError(f"architecture {name!r} is not supported: only causal language models (…ForCausalLM) are")


def _check(config: ModelConfig) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads {config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise InputError(f"head_dim {config.head_dim} is odd: rotary embedding needs an even one")


def _shared_out(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise InputError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and config.json gives no head_dim")
    return hidden // heads


def _number(hf: Mapping, name: str) -> float:
    value = hf.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"config.json: {name} must be a number above 0, got {value!r}")
    return value


def _integer(hf: Mapping, name: str) -> int:
    value = _number(hf, name)
    if not isinstance(value, int):
        raise InputError(f"config.json: {name} must be an integer, got {value!r}")
    return value


def _boolean(hf: Mapping, name: str) -> bool:
    value = hf.get(name)
    if not isinstance(value, bool):
        raise InputError(f"config.json: {name} must be true or false, got {value!r}")
    return value
