"""`forward`, `run_model` and `unembed`: one decoder for all families, driven by the config."""

import functools
import math
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..annotations import Remat
from ..cache.kv_cache import KVCache, check_append, update_layers
from ..checks import check_range
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..config.unsupported import check_supported
from ..errors import InputError
from ..old_names import add_old_names, renamed_arguments
from ..ops.operation import check_impl, over_any_mesh, run
from ..weights.layers import embed, linear, norm, products, rotary_angles, soft_cap
from ..weights.params import AnyArray, Params, activation_dtype, check_params
from .decoder_layer import LayerInputs, Positions, all_layers, run_layers
from .extras import Extras

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # from Python 3.13 on typing's own has defaults

    from .taps import Taps

    MaybeCache = TypeVar("MaybeCache", bound=KVCache | None, default=None)
    CacheOrNone = TypeVar("CacheOrNone", bound=KVCache | None, default=KVCache | None)
else:
    from typing import TypeVar

    CacheOrNone = TypeVar("CacheOrNone")


class Inputs(NamedTuple):
    """The tokens of a forward pass. A part that is None leaves no trace in the program."""

    tokens_BT: Any  # int32 ids, padded on the right
    num_tokens_B: Any = None  # int32: how many of each row are real; None: all
    embeddings_BTD: Any = None  # the input of the first layer; then only the shape of tokens_BT matters
    segment_ids_BT: Any = None  # a segment is a run of one id, which sees nothing before it
    positions_BT: Any = None  # of RoPE; None: from 0 in each segment, or after the tokens in the cache


class ModelOutput(NamedTuple, Generic[CacheOrNone]):
    """The result of `run_model` for the tokens of a call.

    Attributes:
        hidden: [B, T, D] in the dtype of the activations: the hidden state of each token after the final
            norm. Entries at padding are undefined.
        cache: the KV cache with the tokens appended. None: the call had no cache.
        routed_experts: int32 [B, T, L, U]: the experts that each token used in the L layers with a mixture,
            -1 at padding. None: you did not ask for them.
        reads: the hidden states [B, T, D] that taps read, by the keys of the taps. None: the call had no
            taps.
    """

    hidden: jax.Array
    cache: CacheOrNone = None  # type: ignore[assignment]
    routed_experts: jax.Array | None = None
    reads: dict[int | tuple[int, str], jax.Array] | None = None


add_old_names(ModelOutput, routes="routed_experts")


@renamed_arguments(routes="routed_experts")
def forward(  # noqa: PLR0913  a public function
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    cache: "MaybeCache" = None,  # type: ignore[assignment]
    num_tokens_B: AnyArray | None = None,
    *,
    segment_ids_BT: AnyArray | None = None,
    positions_BT: AnyArray | None = None,
    routed_experts: AnyArray | None = None,
    taps: "Taps | None" = None,
    remat: Remat = None,
    impl: str | None = None,
) -> "tuple[jax.Array, MaybeCache]":
    """Returns the logits of every token.

    It is not jitted, so call it in your own `jit`. Every float leaf of the parameters has a reverse-mode
    gradient, in its dtype.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> tokens_BT = jnp.array([model.tokenizer.encode("The capital of France is")])
        >>> logits_BTV, _ = jax.jit(xj.forward)(model.params, model.config, tokens_BT)
        >>> logits_BTV.shape == (1, tokens_BT.shape[1], model.config.vocab_size)
        True

    Args:
        params: the parameter tree of the model. Activations have the dtype of its `final_norm`.
        config: the config of the model. It is static.
        tokens_BT: int32 token ids. If you trace them, an id outside the vocabulary gets the embedding of
            another id.
        cache: the KV cache with the tokens before these, which are appended at its `length_B`. None: there
            are no tokens before, and no cache is returned.
        num_tokens_B: int32 [B]: the number of real tokens in each row. Padding follows them. None: all T
            tokens.
        segment_ids_BT: ids of segments, for several texts in a row (see `run_model`). None: a row is one
            text.
        positions_BT: the positions of the tokens for RoPE (see `run_model`). None counts from 0 in each
            segment.
        routed_experts: the experts that each token uses (see `run_model`). None: the router chooses them.
        taps: edits of the residual stream (see `run_model`). No tap may read.
        remat: the values of a layer that the backward pass stores (see `run_model`).
        impl: the implementation of the operations: "xla", or the name of a kernel, for example "triton". None
            chooses the best one for the device.

    Returns:
        float32 logits [B, T, V], which are undefined at padding, and the cache with the tokens appended.
        `run_model` also returns the experts, and the hidden states that taps read.

    Raises:
        InputError: there are more tokens than the cache's capacity, the `impl` is missing or does not support
            the call, or taps read.
    """
    if taps is not None:
        from .taps import check_none_reads  # optional: taps

        check_none_reads(taps, config, "forward")
    out = run_model(
        params, config, tokens_BT, cache, num_tokens_B, segment_ids_BT=segment_ids_BT,
        positions_BT=positions_BT, routed_experts=routed_experts, taps=taps, remat=remat, impl=impl,
    )  # fmt: skip
    return unembed(params, config, out.hidden), out.cache


@renamed_arguments(routes="routed_experts", return_routes="return_routed_experts")
@over_any_mesh
def run_model(  # noqa: PLR0913  a public function
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    cache: "MaybeCache" = None,  # type: ignore[assignment]
    num_tokens_B: AnyArray | None = None,
    *,
    inputs_BTD: AnyArray | None = None,
    segment_ids_BT: AnyArray | None = None,
    positions_BT: AnyArray | None = None,
    routed_experts: AnyArray | None = None,
    return_routed_experts: bool = False,
    taps: "Taps | None" = None,
    remat: Remat = None,
    impl: str | None = None,
) -> "ModelOutput[MaybeCache]":
    """Returns the hidden states, the cache, the experts and the tapped values of a model, for some tokens.

    It is not jitted, and it is differentiable as `forward` is. `unembed` computes the logits of the hidden
    states. For logits alone, use `forward`.

    Args:
        params: the parameter tree of the model. Without a cache, the layers may be stacked by
            `xj.params.stack_layers`. Equal layers are then compiled once.
        config: the config of the model. It is static.
        tokens_BT: int32 token ids (see `forward`).
        cache: the KV cache with the tokens before these (see `forward`). None: there are no tokens before.
        num_tokens_B: int32 [B]: the number of real tokens in each row. None: all T tokens.
        inputs_BTD: inputs of the first layer, in place of `embed_tokens(params, config, tokens_BT)`. Then
            only the shape of `tokens_BT` matters. None embeds the tokens.
        segment_ids_BT: int32, without a cache: ids of segments, for several texts in a row (packing). Each
            text is a run of one id. A token sees only its segment, so each text has the results that it has
            alone in a row. None: a row is one text.
        positions_BT: int32, without a cache: the positions of the tokens for RoPE. None counts from 0 in each
            segment.
        routed_experts: int32 [B, T, L, U]: the U experts that token t uses in each of the L layers with a
            mixture. The router still computes their weights, from its input at that token. If a token has -1
            in a layer, the router chooses its experts. None: the router chooses all experts.
        return_routed_experts: True adds `routed_experts` to the result.
        taps: a dict from layers to a `Tap`, which edits or reads the residual stream after that layer. The
            key -1 is the output of the embeddings. (Inputs of each layer, which Gemma 4 has, are computed
            before it.) The tap of the last layer comes before the final norm. To tap inside a layer, use
            pairs for all keys: (3, "attention") comes before the MLP of layer 3, and (3, "layer") after it.
            None: no taps.
        remat: the values of a layer that the backward pass stores. None stores all values that it needs.
            "layer" stores the layer's input, and computes the layer again. You can also pass a policy of
            `jax.checkpoint_policies`.
        impl: the implementation of the operations (see `forward`). None chooses the best one for the device.

    Returns:
        A `ModelOutput`.

    Raises:
        InputError: `forward` would raise it.
        InputError: `inputs_BTD` or `routed_experts` have a wrong shape.
        InputError: segments, positions or stacked layers are given with a cache.
        InputError: experts are given for a model without mixtures, or are not valid for the model.
        InputError: a tap has a wrong type or layer, taps are given for stacked layers, or the `edit` of a tap
            returns another shape or dtype.
    """
    inputs = Inputs(tokens_BT, num_tokens_B, inputs_BTD, segment_ids_BT, positions_BT)
    extras = Extras(routed_experts=routed_experts, taps=taps)
    run_config = RunConfig(impl, remat, return_routed_experts=return_routed_experts)
    out = apply_model(params, config, inputs, cache, extras, run_config)
    return out if return_routed_experts else out._replace(routed_experts=None)


def apply_model(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    cache: KVCache | None,
    extras: Extras,
    run_config: RunConfig,
) -> "ModelOutput[Any]":
    """Runs `run_model` of these inputs and extras."""
    check_params(params, config, stacked=cache is None)
    check_tokens(config, *inputs[:3], cache)
    check_impl(run_config.impl)
    if cache is not None:
        check_append(cache, inputs.tokens_BT.shape[1])
    params = params | extras.adapted({x: params[x] for x in params if x != "layers"})
    x_BTD, positions, of_layers = embed_inputs(params, config, inputs, extras, cache, run_config)
    caches = (None,) * len(config.cached_mixers) if cache is None else cache.layers
    run_all: Any = run_layers
    if isinstance(params["layers"], dict):
        from .stacked_layers import run_stacked_layers  # optional: stacked layers

        run_all = run_stacked_layers
    if extras.taps is not None:
        from .taps import TappedLayers  # optional: taps

        run_all = TappedLayers(extras.taps, config)
    args = x_BTD, positions, of_layers, extras, caches, run_config
    out = run_all(params["layers"], all_layers(config), *args)
    routed_experts = None
    if any(of_layer.route_BTU is not None for of_layer in of_layers):
        from .routes import routes_used  # optional: routes

        routed_experts = routes_used(out.experts, positions)
    if cache is not None:
        cache = update_layers(cache, out.caches, positions.num_tokens_B, routed_experts)
    hidden_BTD = last_norm(params, config, out.hidden_BTD)
    return ModelOutput(hidden_BTD, cache, routed_experts, getattr(run_all, "reads", None))


def embed_inputs(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    extras: Extras,
    cache: KVCache | None,
    run_config: RunConfig,
) -> tuple[jax.Array, Positions, tuple[LayerInputs, ...]]:
    """Returns the input of the first layer, [B, T, D], the positions, and the inputs of each layer. The cache
    is used only for the lengths, and to find out if it records routes.
    """
    tokens_BT, num_tokens_B, embeddings_BTD, segment_ids_BT, position_BT = inputs
    B, T = tokens_BT.shape
    num_tokens_B = jnp.full(B, T, jnp.int32) if num_tokens_B is None else jnp.asarray(num_tokens_B, jnp.int32)
    start_B = None if cache is None else cache.length_B
    longest_B = None if cache is None else cache.longest_B
    from_B = jnp.zeros(B, jnp.int32) if start_B is None else start_B
    # With a cache a row's frequencies never change: `init_cache` rejects that, or rows say how long they may
    # become. Draft tokens beyond a row's end are dropped and must not change those of the tokens before them.
    length_B = num_tokens_B if start_B is None else jnp.zeros_like(from_B) if longest_B is None else longest_B
    first_BT = None
    if segment_ids_BT is not None or position_BT is not None:
        from .packing import packed_positions  # optional: packed rows

        first_BT, position_BT = packed_positions(config, inputs, cache)
    position_BT = from_B[:, None] + jnp.arange(T) if position_BT is None else position_BT
    angles = rotary_angles(config, position_BT, length_B)
    if embeddings_BTD is None:
        embeddings_BTD = embed_ids(params, config, jnp.asarray(tokens_BT))
    x_BTD = jnp.asarray(embeddings_BTD).astype(activation_dtype(params))
    of_layers = [LayerInputs()] * config.num_hidden_layers
    if config.hidden_size_per_layer_input:
        of_layers = list(map(LayerInputs, _per_layer_inputs(params, config, jnp.asarray(tokens_BT), x_BTD)))
    records_routes = cache is not None and cache.routed_experts is not None
    if run_config.return_routed_experts or extras.routed_experts is not None or records_routes:
        from .routes import routes_of_layers  # optional: routes

        routed_experts = routes_of_layers(config, tokens_BT.shape, extras.routed_experts)
        pairs = zip(of_layers, routed_experts, strict=True)
        of_layers = [of_layer._replace(route_BTU=route_BTU) for of_layer, route_BTU in pairs]
    return x_BTD, Positions(angles, start_B, num_tokens_B, position_BT, first_BT), tuple(of_layers)


def _per_layer_inputs(params: Params, config: ModelConfig, tokens_BT, x_BTD) -> tuple[jax.Array, ...]:
    """Returns [B, T, P] of each layer (Gemma 3n, Gemma 4): of the token, and of its embedding by a matrix."""
    P = config.hidden_size_per_layer_input
    shape = *tokens_BT.shape, config.num_hidden_layers, P
    of_token_BTLP = embed_ids(params, config, tokens_BT, "layer_embed", math.sqrt(P)).reshape(shape)
    projected = linear(x_BTD, params["layer_proj"]) * config.hidden_size**-0.5
    inputs_BTLP = norm(projected.reshape(shape), params, "layer_input_norm", config) + of_token_BTLP
    inputs_BTLP = (inputs_BTLP * 2**-0.5).astype(x_BTD.dtype)
    return tuple(inputs_BTLP[:, :, layer] for layer in range(config.num_hidden_layers))


def last_norm(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Returns the final norm of the output of the last layer, [..., D], as `head_logits` takes it."""
    return norm(x, params, "final_norm", config)


def embed_ids(
    params: Params, config: ModelConfig, token: jax.Array, name: str = "embed", scale: float | None = None
) -> jax.Array:
    """Returns embeddings [..., D] of ids [...], by the matrix of that name."""
    scale = config.embed_scale if scale is None else scale
    plain = functools.partial(embed, dtype=activation_dtype(params), scale=scale)
    return run("embed_tokens", plain, static=dict(config=config), token=token, leaf=params[name])


@over_any_mesh
def unembed(params: Params, config: ModelConfig, hidden: AnyArray) -> jax.Array:
    """Returns the logits of hidden states: float32 [..., V] for [..., D].

    If the config has `final_logit_softcapping`, the logits are soft-capped.

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        hidden: hidden states after the final norm, from `hidden_states` or `run_model`.

    Raises:
        InputError: `hidden` is not an array, or has another width.
    """
    check_params(params, config, stacked=True)
    return head_logits(params, config, checked_hidden(hidden, config))


def head_logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Runs `unembed`, of arguments that need no check."""
    plain = functools.partial(_unembed, config=config)
    return run("unembed", plain, static=dict(config=config), leaf=lm_head(params), hidden=hidden)


def checked_hidden(hidden: Any, config: ModelConfig) -> jax.Array:
    """Returns the hidden states [..., D]. Raises InputError if they are none."""
    if not isinstance(hidden, AnyArray) or hidden.shape[-1:] != (config.hidden_size,):
        raise InputError(
            f"hidden states must be an array [..., {config.hidden_size}], got {np.shape(hidden)}"
        )
    return jnp.asarray(hidden)


def _unembed(leaf: Params, hidden: jax.Array, config: ModelConfig) -> jax.Array:
    (logits,) = products(head_input(hidden, config), [leaf], dtype=jnp.float32)
    return soft_cap(logits, config.final_logit_softcapping)


def head_input(hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns hidden states [..., D] over `logits_scaling`, as the vocabulary matrix takes them."""
    return hidden if config.logits_scaling == 1 else hidden / config.logits_scaling


def lm_head(params: Params) -> Params:
    """Returns the parameters of the output projection. A tied model reuses its embedding matrix."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def check_tokens(
    config: ModelConfig, tokens_BT: Any, num_tokens_B=None, inputs_BTD=None, cache=None, least: int = 1
) -> None:
    """Raises InputError unless types and shapes agree, with at least `least` tokens a row. Outside a trace it
    also raises if a value is out of range.
    """
    if not isinstance(tokens_BT, jax.Array | np.ndarray):
        raise InputError(f"tokens must be an array of ids, as np.array makes of a list, got {tokens_BT!r}")
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
    if inputs_BTD is not None:
        check_supported(config, "inputs_BTD", "inputs_BTD is", "give tokens only")
    if cache is not None and (not isinstance(cache, KVCache) or cache.length_B.shape != shape[:1]):
        raise InputError(
            f"the cache for {shape[0]} rows must be one that init_cache returns for them, got {cache!r}"
        )
    check_range("token id", tokens_BT, 0, config.vocab_size - 1)
    if num_tokens_B is not None:
        check_range("num_tokens", num_tokens_B, 0, shape[1])
