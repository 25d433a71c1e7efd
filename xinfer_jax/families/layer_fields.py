"""Fields and names that several families share: biases of attention, sliding windows, experts."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..config.layer_spec import ExpertsSpec, LayerSpec, RouterSpec, SoftmaxRouterSpec
from ..config.model_config import ModelConfig
from ..config.rope import RopeConfig
from ..errors import InputError, format_value
from .family import Joined
from .values import MAX_CONTEXT, get_boolean, get_count, get_integer, get_integer_at_most

FULL = "full_attention"
SLIDING = "sliding_attention"
BOTH_SIDES = "use_bidirectional_attention"  # Gemma 3's own form of `is_causal`, whose window is twice as wide
# Names of tensors: one for each expert, or all of them in one.
EXPERTS = dict(router="mlp.gate") | {
    f"experts.{leaf}": f"mlp.experts.{{}}.{leaf}_proj" for leaf in ("gate", "up", "down")
}
SHARED_EXPERT = dict(shared_gate="mlp.shared_expert_gate") | {
    f"shared.{leaf}": f"mlp.shared_expert.{leaf}_proj" for leaf in ("gate", "up", "down")
}
STACKED = (
    Joined("mlp.experts.gate_up_proj", ("experts.gate", "experts.up"), stacked=True, is_published=False),
    Joined("mlp.experts.down_proj", ("experts.down",), stacked=True, is_published=False),
)


def shared_kv_layers(config: ModelConfig) -> list[int]:
    """Returns the layers whose attention uses the keys and values of another layer."""
    return [i for i, layer in enumerate(config.layers) if layer.attention and layer.attention.shares_kv]


def attention_bias(hf: Mapping) -> dict[str, Any]:
    """Returns biases of the queries, keys and values, and of the output matrix."""
    bias = get_boolean(hf, "attention_bias")
    return dict(qkv_bias=bias, o_bias=bias)


def check_default_head_dim(hf: Mapping) -> None:
    """Raises InputError for heads of another width than `hidden_size` by `num_attention_heads`."""
    width = get_integer(hf, "hidden_size") // get_integer(hf, "num_attention_heads")
    if hf["head_dim"] != width:
        raise InputError(
            f"head_dim {format_value(hf['head_dim'])} is not supported for model_type {hf['model_type']!r}:"
            f" leave it out, heads are hidden_size / num_attention_heads wide, {width}"
        )


def with_windows(
    layer: LayerSpec, windows: Iterable[int | None], sliding_rope: RopeConfig | None = None
) -> tuple[LayerSpec, ...]:
    """Returns layers like this one, with these windows. sliding_rope: the RoPE of layers that have a window.
    None: the model's.
    """
    return tuple(layer.with_mixer(window=window, rope=sliding_rope if window else None) for window in windows)


def with_later_tokens(layer: LayerSpec, reach: int | None) -> LayerSpec:
    """Returns the layer with attention to as many tokens after a token as before it. reach: the number of
    tokens. None: all.
    """
    if reach is None:
        return layer.with_mixer(window=None, ahead=MAX_CONTEXT)
    reach = min(reach, MAX_CONTEXT // 2)  # positions plus a window stay within int32
    return layer.with_mixer(window=2 * reach + 1, ahead=reach)


def same_windows(hf: Mapping, layers: int) -> tuple[int | None, ...]:
    """Returns one `sliding_window` for all layers, or None."""
    if hf.get("layer_types") is not None:  # transformers rejects or ignores it
        raise InputError(
            f"layer_types is not supported for model_type {hf['model_type']!r}: only one sliding_window for"
            " all layers is"
        )
    return (None if hf.get("sliding_window") is None else get_integer(hf, "sliding_window"),) * layers


def period_windows(hf: Mapping, layers: int, period: int) -> tuple[int | None, ...]:
    """Returns the windows of layers of which all except every period-th have a sliding window."""
    get_integer(hf, "sliding_window")
    return layer_windows({**hf, "use_sliding_window": True}, [(i + 1) % period != 0 for i in range(layers)])


def layer_windows(hf: Mapping, slides: list[bool]) -> tuple[int | None, ...]:
    """Returns each layer's window from `use_sliding_window`, `sliding_window` and `layer_types`. slides: the
    layers that have a window if config.json has no `layer_types`.
    """
    slides_at_all = get_boolean(hf, "use_sliding_window") and hf.get("sliding_window") is not None
    window = get_integer(hf, "sliding_window") if slides_at_all else None
    types = read_layer_types(hf, len(slides), (FULL, SLIDING))
    if types and SLIDING in types and window is None:
        raise InputError(
            "layer_types names sliding_attention, but use_sliding_window is false or sliding_window is null:"
            " set both"
        )
    return tuple(window if s else None for s in ([kind == SLIDING for kind in types] if types else slides))


def read_layer_types(hf: Mapping, layers: int, kinds: tuple[str, ...]) -> list[str] | None:
    """Returns `layer_types`, each one of the kinds. None: config.json has none."""
    types = hf.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise InputError(
            f"layer_types must list one type for each of the {layers} layers, got {format_value(types)}"
        )
    if other := [kind for kind in types if kind not in kinds]:
        raise InputError(
            f"layer type {format_value(other[0])} is not supported: only {', '.join(kinds[:-1])} and"
            f" {kinds[-1]} are"
        )
    return list(types)


def write_layer_types(config: ModelConfig) -> dict[str, Any]:
    """Returns the inverse of `layer_windows`."""
    window = next(filter(None, config.layer_windows), None)
    types = [SLIDING if w else FULL for w in config.layer_windows]
    return dict(layer_types=types, use_sliding_window=window is not None) | (
        {} if window is None else dict(sliding_window=window)
    )


def write_window(config: ModelConfig) -> dict[str, Any]:
    """Returns the inverse of `same_windows`."""
    return dict(sliding_window=config.layer_windows[0])


def read_experts(
    hf: Mapping, norm_topk_prob: bool = True, router: RouterSpec | None = None, **options: Any
) -> ExpertsSpec:
    """Returns the experts of a layer. router: None: a softmax. options: fields that not all families have."""
    experts = get_integer(hf, "num_experts" if hf.get("num_local_experts") is None else "num_local_experts")
    chosen = get_integer_at_most(hf, "num_experts_per_tok", experts)
    width = get_integer(hf, "moe_intermediate_size")
    router = SoftmaxRouterSpec(norm_topk_prob) if router is None else router
    return ExpertsSpec(experts, chosen, width, router, **options)


def read_shared_experts(hf: Mapping, norm_topk_prob: bool = True) -> ExpertsSpec:
    """Returns experts, one of which all tokens use."""
    shared = get_count(hf, "shared_expert_intermediate_size")
    return read_experts(hf, norm_topk_prob, shared_intermediate_size=shared)


def unused_shared_experts(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Returns the names of shared experts of width 0: of tensors without numbers, and of their gates. names:
    names of tensors, or a dict with the tensors.
    """
    if config.experts and config.experts.shared_intermediate_size:
        return set()
    tensors = names if isinstance(names, Mapping) else dict.fromkeys(names)
    is_empty = lambda name: 0 in getattr(tensors[name], "shape", (0,))  # noqa: E731
    found = {name for name in names if ".mlp.shared_expert" in name}
    return {name for name in found if ".shared_expert_gate." in name or is_empty(name)}


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """Returns the inverse of `read_experts`, `read_shared_experts` and `read_sparse_layers`."""
    dense = [i for i, layer in enumerate(config.layers) if layer.experts is None]
    settings: dict[str, Any] = dict(mlp_only_layers=dense, decoder_sparse_step=1)
    if experts := config.experts:
        router: Any = experts.router
        names = ("num_experts", "num_experts_per_tok")
        settings |= {name: getattr(experts, name) for name in names}
        settings["norm_topk_prob"] = router.norm_topk_prob
        settings["moe_intermediate_size"] = experts.intermediate_size
        settings["shared_expert_intermediate_size"] = experts.shared_intermediate_size
    return settings


def with_experts(
    layers: Iterable[LayerSpec], sparse: Iterable[bool], experts: ExpertsSpec
) -> tuple[LayerSpec, ...]:
    """Returns the layers, with experts in place of the MLP in sparse layers."""
    return tuple(
        dataclasses.replace(layer, feed_forward=experts) if is_sparse else layer
        for layer, is_sparse in zip(layers, sparse, strict=True)
    )


def read_sparse_layers(hf: Mapping, layers: int) -> tuple[bool, ...]:
    """Returns which layers have experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    dense = () if hf["mlp_only_layers"] is None else hf["mlp_only_layers"]
    step = get_integer(hf, "decoder_sparse_step")
    if not isinstance(dense, list | tuple) or not all(type(i) is int and i >= 0 for i in dense):
        raise InputError(f"mlp_only_layers must be a list of layers, got {format_value(dense)}")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
