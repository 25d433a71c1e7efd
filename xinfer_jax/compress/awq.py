"""Activation-aware weight quantization (Lin et al. 2023): input channels that carry much are scaled up.

A matrix's columns times s, and whatever feeds it divided by s, is the same function; but the columns that
matter are then rounded more finely. s is a power of each channel's mean magnitude on a calibration text.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..model.decoder import LayerKind, Place, attend, layer_kinds
from ..model.layers import embed, gated, gated_mlp, linear, norm, rotary_angles
from ..weights.params import Params
from ..weights.quantized import (
    check_activations,
    check_method,
    dequantize,
    is_quantized,
    quantize_matrix,
    quantized_leaf,
    rounding_once,
)
from .rounding import compensated_matrix, rounded_matrix

GRID = 20  # exponents tried, in [0, 1)
_ALL = 1 << 30  # inputs that share a scale
SEARCH_TOKENS = 2048  # of the calibration text that the search looks at
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
# Matrices with a common input.
_SHARING = {"attn": ("q", "k", "v"), "o": ("o",), "mlp": ("gate", "up"), "down": ("down",)}
_Rows = Sequence[Sequence[int]]  # of token ids
_Place = tuple[ModelConfig, LayerKind]  # static


class _Text(NamedTuple):
    """What attention wants to know of a calibration text, padded."""

    angles: Any
    length_B: jax.Array

    def real(self, x_BTI: jax.Array) -> jax.Array:
        """Without the padding: [M, I]."""
        return x_BTI[np.nonzero(_real(x_BTI, self)[..., 0])]


def awq_params(  # noqa: PLR0913
    params: Params,
    config: ModelConfig,
    token_rows: _Rows,
    quantize: str = "int4",
    group: int | None = None,
    activations: str | None = None,
) -> Params:
    """Quantized parameters: scaled by what a calibration text makes flow, rounded by `compensated_matrix`.

    AWQ alone, without compensation: `rounded_params(scaled_params(...), ...)`. Rotated models take no scales.

    Args:
        params, config: the model, in floating point.
        token_rows: token ids of the calibration text, a list per document or piece; a few thousand in all.
        quantize: "int8" or "int4".
        group: inputs that share a scale; None: as `quantize_matrix` chooses.
        activations: "int8": they are rounded too, with quantize="int8", and all inputs share a scale.

    Raises:
        InputError: no token ids, an unknown method, activations with int4 or a group, or a model whose norms
            or experts take no scales.
    """
    check_activations(activations, quantize, group)
    group = _ALL if activations else group
    bits = _bits(quantize, group)
    scaled = params
    if not config.rotated:
        scaled = scaled_params(params, config, token_rows, quantize, group)
    rounded = rounded_params(scaled | {"layers": ()}, quantize, activations=activations)
    tokens_BT, text = _calibration(config, token_rows)
    exact_BTD, x_BTD = (
        embed(tokens_BT, tree["embed"], jnp.float32, config.embed_scale) for tree in (scaled, rounded)
    )
    layers = []
    for place, layer in _places(scaled, config):
        wide = _wide(layer)
        done = dict(layer)
        exact, exact_BTD = _inputs(wide, place, exact_BTD, text)
        for part, names in _SHARING.items():
            inputs, _ = _inputs(_wide(done), place, x_BTD, text)
            for name in names:
                matrix_OI = wide[name]["weight"]
                wanted_MO = linear(text.real(exact[part]), {"weight": matrix_OI})
                # What is added to the hidden state also makes up for what went wrong before.
                if name in ("o", "down"):
                    wanted_MO += text.real(exact["x" + part] - inputs["x" + part])
                better = compensated_matrix(matrix_OI, text.real(inputs[part]), wanted_MO, bits, group)
                done[name] = layer[name] | {"weight": better}
        x_BTD = _inputs(_wide(done), place, x_BTD, text)[1]
        layers.append(done)
    made = rounded | {"layers": tuple(layers)}
    return rounding_once(made) if activations else made


def rounded_params(
    params: Params, quantize: str, group: int | None = None, activations: str | None = None
) -> Params:
    """Every matrix rounded to nearest, the vocabulary's to int8 per output; arguments as in `awq_params`."""
    check_activations(activations, quantize, group)
    group, of_vocabulary = (_ALL, _ALL) if activations else (group, None)
    bits = _bits(quantize, group)
    if any("experts" in layer for layer in params["layers"]):
        raise InputError(
            "quantized weights are not supported for models with experts: they stay float numbers"
        )

    def rounded(leaf: Params) -> Params:
        matrix = quantize_matrix(np.asarray(leaf["weight"]), bits, group)
        return leaf | {"weight": jax.tree.map(jnp.asarray, matrix)}

    layers = tuple(layer | {name: rounded(layer[name]) for name in MATRICES} for layer in params["layers"])
    vocabulary = {}
    for name, hf_name in (("embed", "model.embed_tokens"), ("lm_head", "lm_head")):
        if name in params:
            matrix_VD = np.asarray(params[name]["weight"])
            leaf = quantized_leaf(matrix_VD, hf_name, quantize, of_vocabulary)
            vocabulary[name] = {"weight": jax.device_put(leaf)}
    made = params | {"layers": layers} | vocabulary
    return rounding_once(made) if activations else made


def scaled_params(
    params: Params, config: ModelConfig, token_rows: _Rows, quantize: str, group: int | None = None
) -> Params:
    """The same function with other numbers, floating point, to be rounded. Arguments as in `awq_params`."""
    if config.rotated:
        raise InputError("rotations leave no channel for activation-aware scales: round to nearest")
    if not config.pre_norm or config.post_norm or config.sub_norm or config.num_experts:
        raise InputError(
            f"activation-aware scales are not supported for model_type {config.model_type!r}: round to"
            " nearest instead"
        )
    rounding = _bits(quantize, group), group
    tokens_BT, text = _calibration(config, token_rows)
    x_BTD = embed(tokens_BT, params["embed"], jnp.float32, config.embed_scale)
    layers = []
    for place, layer in _places(params, config):
        wide = _wide(layer)
        inputs, x_BTD = _inputs(wide, place, x_BTD, text)
        scales = {}
        for part in _SHARING:
            mean_I = _mean_magnitude(inputs[part], text)
            if part == "o":  # query heads that share a value head share its scales
                mean_KGH = mean_I.reshape(config.num_key_value_heads, -1, config.head_dim)
                mean_I = jnp.broadcast_to(mean_KGH.mean(1, keepdims=True), mean_KGH.shape).reshape(-1)
            errors = _errors(wide, place, part, inputs[part], mean_I, text, rounding=rounding)
            scales[part] = _scale(mean_I, jnp.argmin(errors) / GRID)
        layers.append(_folded(layer, config, scales))
    return params | {"layers": tuple(layers)}


def _calibration(config: ModelConfig, token_rows: _Rows) -> tuple[jax.Array, _Text]:
    """Padded token ids [B, T], and what is to be known of them."""
    lengths = [len(row) for row in token_rows]
    if not lengths or min(lengths) == 0:
        raise InputError(f"calibration needs rows of token ids, none empty; got rows of {lengths}")
    tokens_BT = np.zeros((len(lengths), max(lengths)), np.int32)
    for row, ids in zip(tokens_BT, token_rows, strict=True):
        row[: len(ids)] = ids
    length_B = jnp.array(lengths)
    position_BT = jnp.broadcast_to(np.arange(max(lengths)), tokens_BT.shape)
    return jnp.array(tokens_BT), _Text(rotary_angles(config, position_BT, length_B), length_B)


def _places(params: Params, config: ModelConfig) -> list[tuple[_Place, Params]]:
    """Each layer behind its kind: a program is compiled for each kind."""
    return [
        ((config, kind), layer) for kind, layer in zip(layer_kinds(config), params["layers"], strict=True)
    ]


def _wide(layer: Params) -> Params:
    """All in float32, quantized matrices too."""

    def wide(leaf: Any) -> jax.Array:
        return dequantize(leaf) if is_quantized(leaf) else leaf.astype(jnp.float32)

    return jax.tree.map(wide, layer, is_leaf=is_quantized)


def _bits(quantize: str, group: int | None) -> int:
    if quantize is None:
        raise InputError("quantize=None: say int8 or int4")
    check_method(quantize)
    if group is not None and (group < 2 or group % 2):
        raise InputError(f"group={group}: give an even number of inputs")
    return 8 if quantize == "int8" else 4


@partial(jax.jit, static_argnames="place")
def _inputs(layer: Params, place: _Place, x_BTD, text: _Text) -> tuple[dict[str, jax.Array], jax.Array]:
    """What a layer's matrices are multiplied by, by part; what "o" and "down" are added to; its output."""
    config, _ = place
    attn_BTD = norm(x_BTD, layer, "attn_norm", config)
    through = {"o": {"weight": jnp.eye(layer["o"]["weight"].shape[1])}}  # gives what enters "o" as it is
    heads_BTI = _attended(layer | through, place, attn_BTD, text)
    mid_BTD = x_BTD + linear(heads_BTI, layer["o"])
    mlp_BTD = norm(mid_BTD, layer, "mlp_norm", config)
    gated_BTF = gated(mlp_BTD, layer, config)
    inputs = dict(attn=attn_BTD, o=heads_BTI, xo=x_BTD, mlp=mlp_BTD, down=gated_BTF, xdown=mid_BTD)
    return inputs, mid_BTD + linear(gated_BTF, layer["down"])


def _attended(layer: Params, place: _Place, x_BTD: jax.Array, text: _Text) -> jax.Array:
    return attend(layer, *place, x_BTD, Place(text.angles, None, text.length_B), None, None)[0]


def _real(x_BTI: jax.Array, text: _Text) -> jax.Array:
    """Which tokens are no padding, [B, T, 1]."""
    return (jnp.arange(x_BTI.shape[1]) < text.length_B[:, None])[..., None]


@jax.jit
def _mean_magnitude(x_BTI: jax.Array, text: _Text) -> jax.Array:
    mean_I = jnp.sum(jnp.abs(x_BTI), (0, 1), where=_real(x_BTI, text)) / text.length_B.sum()
    # A silent channel says little, and must not divide by 0.
    return jnp.maximum(mean_I, 1e-3 * mean_I.mean() + jnp.finfo(jnp.float32).tiny)


def _scale(mean_I: jax.Array, exponent: jax.Array) -> jax.Array:
    log_I = jnp.log(mean_I) * exponent
    return jnp.exp(log_I - log_I.mean())


@partial(jax.jit, static_argnames=("place", "part", "rounding"))
def _errors(layer: Params, place: _Place, part: str, x_BTI, mean_I, text: _Text, *, rounding) -> jax.Array:
    """By exponent: the squared error of what the part puts out for real tokens. rounding: bits and group."""
    x_BTI, text = jax.tree.map(lambda a: a[: max(1, SEARCH_TOKENS // x_BTI.shape[1])], (x_BTI, text))

    def output(layer: Params) -> jax.Array:  # [B, T, outputs]
        if part == "attn":
            return _attended(layer, place, x_BTI, text)
        return gated_mlp(x_BTI, layer, place[0]) if part == "mlp" else linear(x_BTI, layer[part])

    def error(exponent: jax.Array) -> jax.Array:  # []
        scale_I = _scale(mean_I, exponent)
        rounded = {}
        for name in _SHARING[part]:
            matrix_OI = rounded_matrix(layer[name]["weight"] * scale_I, *rounding) / scale_I
            rounded[name] = layer[name] | {"weight": matrix_OI}
        return jnp.sum(jnp.square(output(layer | rounded) - wanted), where=_real(x_BTI, text))

    wanted = output(layer)
    return lax.map(error, jnp.arange(GRID) / GRID)


def _folded(layer: Params, config: ModelConfig, scales: dict[str, jax.Array]) -> Params:
    """Columns times their scale, what feeds them divided by it."""
    layer = dict(layer)
    for part, name in (("attn", "attn_norm"), ("mlp", "mlp_norm")):
        before = layer[name]
        layer[name] = (layer[name] / scales[part]).astype(layer[name].dtype)
        # The quotient as it was rounded; so nothing is lost where norms have 16 bits.
        rounded = before.astype(jnp.float32) / layer[name].astype(jnp.float32)
        scales[part] = jnp.where(layer[name] == 0, scales[part], rounded)
    by_key_head = scales["o"].reshape(config.num_key_value_heads, -1, config.head_dim)[:, 0].reshape(-1)
    for name, scale_O in (("v", by_key_head), ("up", scales["down"])):
        bias = {"bias": layer[name]["bias"] / scale_O} if "bias" in layer[name] else {}
        layer[name] = {"weight": layer[name]["weight"] / scale_O[:, None]} | bias
    for part, names in _SHARING.items():
        layer |= {name: layer[name] | {"weight": layer[name]["weight"] * scales[part]} for name in names}
    return layer
