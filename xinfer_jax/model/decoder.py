"""`forward`, `hidden_states` and `unembed`: one decoder for all families, driven by the config."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from ..cache.kinds import Contiguous, fresh
from ..cache.kv_cache import KVCache, advance, check_call
from ..cache.quantized import QuantizedKV, cache_specs
from ..checks import within
from ..config.model_config import ModelConfig
from ..errors import InputError, shown
from ..sharding import MODEL, RULES, SAME, check_context, each, mesh_of
from ..weights.layout import divides, layer_specs, specs_of
from ..weights.params import AnyArray, Params, activation_dtype, check_params, param_specs
from ..weights.rotation import restored, rotated
from .attention import attention, check_impl
from .experts import mixture_of_experts
from .layers import (
    Angles,
    embed,
    gated_mlp,
    joint_norms,
    linear,
    norm,
    rotary_angles,
    rotate,
    soft_cap,
    turned,
    turns_by_position,
)

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # from Python 3.13 on typing's own has defaults

    MaybeCache = TypeVar("MaybeCache", bound=KVCache | None, default=None)


def forward(
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    cache: "MaybeCache" = None,  # type: ignore[assignment]
    num_tokens_B: AnyArray | None = None,
    *,
    impl: str | None = None,
) -> "tuple[jax.Array, MaybeCache]":
    """Logits of every token. The caller jits it. Without a cache every leaf has a reverse-mode gradient.

    Args:
        params, config: the parameter tree, and its static config.
        tokens_BT: int32 token ids.
        cache: None, or one that holds what precedes these tokens; they are appended at its `length_B`.
        num_tokens_B: how many of the T tokens of each row are real, the others padding behind; None: all.
        impl: of attention: None (what suits the device), "mosaic", "triton" or "xla".

    Returns:
        float32 logits [B, T, V] (undefined at padding) and the cache with the tokens appended.

    Raises:
        InputError: more tokens than the cache's capacity; an impl that is not here or cannot serve this.
    """
    hidden_BTD, cache = hidden_states(params, config, tokens_BT, cache, num_tokens_B, impl=impl)
    return unembed(params, config, hidden_BTD), cache


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    cache: KVCache | None = None,
    num_tokens_B: AnyArray | None = None,
    *,
    inputs_BTD: AnyArray | None = None,
    impl: str | None = None,
) -> tuple[jax.Array, Any]:
    """`forward` without its last step, which is `unembed`. Not jitted; differentiable like it.

    Args:
        params, config, tokens_BT, cache, num_tokens_B, impl: as in `forward`.
        inputs_BTD: enters in place of `embed_tokens`; tokens_BT then says only how many there are.

    Returns:
        What the last norm gives for every token, [B, T, D] in the type of the activations (undefined at
        padding), and the cache with the tokens appended.

    Raises:
        InputError: as `forward`; inputs_BTD of another shape.
    """
    check_impl(impl)
    check_params(params, config)
    check_tokens(config, tokens_BT, num_tokens_B, inputs_BTD, cache)
    _check_mesh(params, tokens_BT, cache)
    B, T = tokens_BT.shape
    if cache is not None:
        check_call(cache, T)
    num_tokens_B = jnp.full(B, T, jnp.int32) if num_tokens_B is None else jnp.asarray(num_tokens_B)
    start_B = None if cache is None else cache.length_B
    x_BTD, place = enter(params, config, tokens_BT, start_B, num_tokens_B, inputs_BTD)
    held = (None,) * config.num_hidden_layers if cache is None else cache.layers
    x_BTD, layers = through_layers(params["layers"], config, layer_kinds(config), x_BTD, place, held, impl)
    cache = None if cache is None else advance(cache, layers, num_tokens_B)
    return leave(params, config, x_BTD), cache


class LayerKind(NamedTuple):
    """What layers differ in beyond their parameters. Those of a kind are traced once, or are one program."""

    window: int | None
    rope: int | None  # which of `ModelConfig.ropes`; None: none


@functools.lru_cache(maxsize=64)
def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Of each layer."""
    ropes = map(config.layer_rope_config, range(config.num_hidden_layers))
    numbers = (None if rope is None else config.ropes.index(rope) for rope in ropes)
    return tuple(map(LayerKind, config.layer_windows, numbers))


class Place(NamedTuple):
    """Where the tokens of a call stand; the same for every layer."""

    angles: Angles
    start_B: jax.Array | None  # int32: tokens before them; None: there is no cache
    num_tokens_B: jax.Array  # int32: how many they are


def enter(
    params: Params,
    config: ModelConfig,
    tokens_BT: Any,
    start_B: Any,
    num_tokens_B: Any,
    inputs_BTD: Any = None,
) -> tuple[jax.Array, Place]:
    """What the first layer gets, [B, T, D], and where it stands; arguments as in `hidden_states`, `Place`."""
    B, T = tokens_BT.shape
    from_B = jnp.zeros(B, jnp.int32) if start_B is None else start_B
    # With a cache no row grows so long that its frequencies change: `init_cache` rejects it. Draft tokens
    # past its end are dropped, and must not change the frequencies of the tokens before them.
    length_B = num_tokens_B if start_B is None else jnp.zeros_like(from_B)
    angles = rotary_angles(config, from_B[:, None] + jnp.arange(T), length_B)
    dtype = activation_dtype(params)
    if inputs_BTD is None:
        inputs_BTD = _embed(params, config, jnp.asarray(tokens_BT))
    return jnp.asarray(inputs_BTD).astype(dtype), Place(angles, start_B, num_tokens_B)


def through_layer(  # noqa: PLR0913  a layer's parameters, its input, and what says how they meet
    layer: Params, config: ModelConfig, kind: LayerKind, x_BTD: Any, place: Place, keys: Any, impl: str | None
) -> tuple[jax.Array, Contiguous | None]:
    """x [B, T, D] behind one layer, and its keys and values with the new ones; without a cache None."""
    if (mesh := _mesh(layer, config)) is None:
        return _through_layer(layer, x_BTD, place, keys, config, kind, impl)
    of_keys = cache_specs(keys, mesh)
    part = functools.partial(_through_layer, config=config, kind=kind, impl=impl, over=MODEL)
    specs = (layer_specs(layer, config, mesh), SAME, SAME, of_keys)
    return each(part, mesh, specs, (SAME, of_keys))(layer, x_BTD, place, keys)


def _mesh(tree: Any, config: ModelConfig) -> Any:
    """The mesh over which the model is divided; None: there is none, or its devices do not divide the sizes,
    and a caller has laid arrays out in another way, which the compiler completes.
    """
    mesh = mesh_of(tree)
    return mesh if mesh is not None and divides(config, mesh.shape[MODEL]) else None


def _through_layer(layer, x_BTD, place, keys, config, kind, impl, over=None):  # noqa: PLR0913
    """over: an axis of a mesh along which heads, experts, the MLP's inside and the cache are divided."""
    normed_BTD = norm(x_BTD, layer, "attn_norm", config)
    attended_BTD, keys = attend(layer, config, kind, normed_BTD, place, keys, impl, over)
    x_BTD = x_BTD + norm(attended_BTD, layer, "attn_post_norm", config)
    fed_BTD = _feed_forward(norm(x_BTD, layer, "mlp_norm", config), layer, config, over)
    return x_BTD + norm(fed_BTD, layer, "mlp_post_norm", config), keys


# Within a trace too: lowering 24 layers takes a tenth of the time where they share their trace.
_LAYER = jax.jit(through_layer, static_argnames=("config", "kind", "impl"))


def through_layers(layers, config: ModelConfig, kinds, x_BTD, place: Place, keys, impl) -> tuple[Any, tuple]:
    """`through_layer` for some in turn; layers, kinds and keys: one of each."""
    behind = []
    for layer, kind, held in zip(layers, kinds, keys, strict=True):
        x_BTD, held = _LAYER(layer, config, kind, x_BTD, place, held, impl)
        behind.append(held)
    return x_BTD, tuple(behind)


def leave(params: Params, config: ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """Hidden states: what the last layer gives through the last norm."""
    x_BTD = restored(x_BTD, config.hidden_size) if config.rotated else x_BTD
    return norm(x_BTD, params, "final_norm", config)


def _check_mesh(*trees: Any) -> None:
    """Raises InputError where an array is divided along an Explicit axis: the room's `__init__` says why."""
    if mesh_of(trees[0]) is not None:
        check_context()
    for leaf in jax.tree.leaves(trees):
        spec = jax.typeof(leaf).sharding.spec
        mesh = jax.typeof(leaf).sharding.mesh
        if any(axis is not None for axis in spec) and AxisType.Explicit in mesh.axis_types:
            raise InputError(
                f"an array is divided as {spec} over a mesh with Explicit axes: make the mesh with"
                f" axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_types)}, or use jax.shard_map"
            )


def embed_tokens(params: Params, config: ModelConfig, tokens: AnyArray) -> jax.Array:
    """What the first layer gets of tokens: int32 [...] -> [..., D] in the type of the activations.

    Raises:
        InputError: no array of whole numbers; outside a trace, an id beyond the vocabulary.
    """
    check_params(params, config)
    if not isinstance(tokens, jax.Array | np.ndarray) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InputError(f"tokens must be an array of ids, got {shown(tokens)}")
    within("token id", tokens, 0, config.vocab_size - 1)
    return _embed(params, config, jnp.asarray(tokens))


def _embed(params: Params, config: ModelConfig, token: jax.Array) -> jax.Array:
    """[..., D] of ids [...]. Over a mesh each device has some rows, and all add up what they have; or has
    all rows.
    """
    leaf = params["embed"]
    dtype = activation_dtype(params)
    scale = config.embed_scale
    if (mesh := _mesh(leaf, config)) is None:
        return embed(token, leaf, dtype, scale)
    specs, divided = _of_vocabulary(leaf, config, mesh)

    def part(leaf, token):
        if not divided:
            return embed(token, leaf, dtype, scale)
        rows = leaf["weight"].shape[0]
        token = token - lax.axis_index(MODEL) * rows
        mine = (token >= 0) & (token < rows)
        return lax.psum(
            jnp.where(mine[..., None], embed(token.clip(0, rows - 1), leaf, dtype, scale), 0), MODEL
        )

    return each(part, mesh, (specs, SAME), SAME)(leaf, token)


def _of_vocabulary(leaf: Params, config: ModelConfig, mesh: Any) -> tuple[Any, bool]:
    """`specs_of` a matrix of the vocabulary, and whether its rows are divided."""
    specs = specs_of(param_specs(config)["embed"], leaf, mesh, RULES)
    return specs, leaf["weight"].shape[0] % mesh.shape[MODEL] == 0


def unembed(params: Params, config: ModelConfig, hidden: AnyArray) -> jax.Array:
    """Logits, float32 [..., V], of what `hidden_states` gives, [..., D]; capped where the model says so.

    Raises:
        InputError: no array, or one of another width.
    """
    check_params(params, config)
    if not isinstance(hidden, jax.Array | np.ndarray) or hidden.shape[-1:] != (config.hidden_size,):
        raise InputError(
            f"hidden states must be an array [..., {config.hidden_size}], got {np.shape(hidden)}"
        )
    leaf = head(params)
    hidden = jnp.asarray(hidden)
    if (mesh := _mesh(leaf, config)) is None:
        return _unembed(leaf, hidden, config)
    specs, divided = _of_vocabulary(leaf, config, mesh)
    place = PartitionSpec(*(None,) * (hidden.ndim - 1), MODEL) if divided else SAME
    logits = each(functools.partial(_unembed, config=config), mesh, (specs, SAME), place)(leaf, hidden)
    if logits.shape[-1] == config.vocab_size:
        return logits
    # Without those of padding. The compiler keeps the others divided, and leaves padding out of all that is
    # made of them.
    return logits[..., : config.vocab_size]


def _unembed(leaf: Params, hidden: jax.Array, config: ModelConfig) -> jax.Array:
    return soft_cap(linear(to_head(hidden, config), leaf, jnp.float32), config.final_logit_softcapping)


def to_head(hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """Hidden states [..., D] as the vocabulary matrix takes them."""
    return rotated(hidden, config.hidden_size) if config.rotated else hidden


def head(params: Params) -> Params:
    """The vocabulary matrix; a tied model reuses the embedding matrix."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def check_tokens(
    config: ModelConfig, tokens_BT: Any, num_tokens_B=None, inputs_BTD=None, cache=None, least: int = 1
) -> None:
    """Raises InputError unless these go together, `least` tokens a row; outside a trace values too."""
    if not isinstance(tokens_BT, jax.Array | np.ndarray):
        raise InputError(f"tokens must be an array of ids, as np.array makes of lists, got {tokens_BT!r}")
    shape = tokens_BT.shape
    if len(shape) != 2 or shape[1] < least or not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
        raise InputError(
            f"tokens must be integers of the shape [rows, {least} or more], got {tokens_BT.dtype} of {shape}"
        )
    if num_tokens_B is not None and np.shape(num_tokens_B) != shape[:1]:
        raise InputError(
            f"num_tokens must have the shape [{shape[0]}], one number per row, got {np.shape(num_tokens_B)}"
        )
    if inputs_BTD is not None and np.shape(inputs_BTD) != (*shape, config.hidden_size):
        raise InputError(
            f"inputs must have the shape {(*shape, config.hidden_size)}, got {np.shape(inputs_BTD)}"
        )
    if cache is not None and (not isinstance(cache, KVCache) or cache.length_B.shape != shape[:1]):
        raise InputError(
            f"the cache for {shape[0]} rows must be one that init_cache gives for them, got {cache!r}"
        )
    within("token id", tokens_BT, 0, config.vocab_size - 1)
    if num_tokens_B is not None:
        within("num_tokens", num_tokens_B, 0, shape[1])


def attend(  # noqa: PLR0913  as `through_layer`
    layer: Params,
    config: ModelConfig,
    kind: LayerKind,
    x_BTD: Any,
    place: Place,
    keys: Any,
    impl: str | None,
    over: str | None = None,
) -> tuple[jax.Array, Contiguous | None]:
    """What attention adds to a layer's input, [B, T, D], and its keys and values with the new ones."""
    (B, T, _) = x_BTD.shape
    angles = place.angles
    num_tokens_B = place.num_tokens_B
    start_B: Any = place.start_B  # there where keys are
    layer, added = _without_bias(layer, config, kind, keys)
    q_BTNH, k_BTKH, v_BTKH = _heads(layer, config, x_BTD, over)
    if kind.rope is not None:
        q_BTNH, k_BTKH = (rotate(x_BTNH, *angles[kind.rope]) for x_BTNH in (q_BTNH, k_BTKH))
    if keys is None:
        seen = fresh(jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2))
        length_B = num_tokens_B
    else:
        seen = keys = keys.append(k_BTKH, v_BTKH, start_B, num_tokens_B)
        length_B = jnp.where(num_tokens_B > 0, start_B + num_tokens_B, 0)  # no query: nothing to read
    scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
    cap = config.attn_logit_softcapping
    # The model's own window: a cache that keeps every token may have been made without one.
    windowed = dataclasses.replace(seen, window=kind.window, added=added)
    out_BTNH = attention(
        q_BTNH, windowed, length_B=length_B, start_B=start_B, scale=scale, soft_cap=cap, impl=impl
    )
    (out_BTI,) = joint_norms([out_BTNH.reshape(B, T, -1)], layer, ["o_norm"], config, over)
    return linear(out_BTI, layer["o"], over=over), keys


def _without_bias(layer: Params, config: ModelConfig, kind: LayerKind, keys: Any) -> tuple[Params, Any]:
    """The layer as keys are made that are kept rounded, and what is added when they are read: a large bias
    would cost them their bits. Both as they were where that cannot be told apart.
    """
    leaf = layer["k"]
    rope = kind.rope
    if keys is None or rope is None or not isinstance(keys.k, QuantizedKV):
        return layer, None
    if "bias" not in leaf or "k_norm" in layer or not turns_by_position(config, rope):
        return layer, None
    bias_KH = leaf["bias"].reshape(-1, config.head_dim)
    return layer | {"k": {"weight": leaf["weight"]}}, turned(config, rope, bias_KH, keys.capacity)


def _heads(layer: Params, config: ModelConfig, x_BTD: jax.Array, over: str | None) -> list[jax.Array]:
    """Queries, keys and values by head, [B, T, N or K, H]; normed where the layer has norms for them."""
    ys = [linear(x_BTD, layer[name]) for name in "qkv"]
    if config.qk_norm_joint:
        ys[:2] = joint_norms(ys[:2], layer, ["q_norm", "k_norm"], config, over)
    ys = [y.reshape(*y.shape[:2], -1, config.head_dim) for y in ys]
    if not config.qk_norm_joint:
        ys[:2] = (norm(y, layer, f"{name}_norm", config) for y, name in zip(ys, "qk", strict=False))
    return ys


def _feed_forward(x_BTD: jax.Array, layer: Params, config: ModelConfig, over: str | None) -> jax.Array:
    if "experts" in layer:
        return mixture_of_experts(x_BTD, layer, config, over)
    return gated_mlp(x_BTD, layer, config, over)
