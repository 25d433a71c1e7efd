"""Activation-aware weight quantization (Lin et al. 2023): input channels with large activations are scaled
up.

Multiplying a matrix's columns by s and dividing its input by s leaves the function unchanged, but important
columns are quantized more precisely. s is a power of each channel's mean magnitude on a calibration text.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config.model_config import ModelConfig
from ..config.run_config import DEFAULT
from ..config.unsupported import check_supported
from ..errors import InputError
from ..feed_forward.mlp import gated_mlp, mlp_intermediate
from ..mixers.mixer import Positions
from ..model.decoder_layer import layer_kinds
from ..weights.hadamard import hadamard_rotate, input_block_width
from ..weights.layers import embed, linear, norm, rotary_angles
from ..weights.params import Params
from ..weights.quantization import (
    check_activations,
    check_quantize_method,
    in_blocks,
    quantize_matrix,
    quantized_leaf,
    with_int8_activations,
)
from ..weights.quantized_weight import is_quantized
from .gptq import fake_quantize, gptq_matrix

GRID = 20  # exponents tried, in [0, 1)
_ALL_INPUTS = 1 << 30  # a group size: one scale per output
SEARCH_TOKENS = 2048  # tokens of the calibration text that the search uses
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
# Matrices with a common input.
_SHARED_INPUTS = {"attn": ("q", "k", "v"), "o": ("o",), "mlp": ("gate", "up"), "down": ("down",)}
_TokenRows = Sequence[Sequence[int]]
_LayerKey = tuple[ModelConfig, int]  # static, with the kind: layers of one kind share a program


class _Calibration(NamedTuple):
    """RoPE angles and lengths of a padded calibration text."""

    angles: Any
    length_B: jax.Array

    def without_padding(self, x_BTI: jax.Array) -> jax.Array:
        """Returns the activations of real tokens, [M, I]."""
        return x_BTI[np.nonzero(_is_token(x_BTI, self)[..., 0])]


def awq_params(
    params: Params,
    config: ModelConfig,
    token_rows: _TokenRows,
    quantize: str = "int4",
    group: int | None = None,
    activations: str | None = None,
) -> Params:
    """Returns parameters scaled by AWQ on a calibration text, then quantized by `gptq_matrix`. Raises
    InputError.

    AWQ alone, without GPTQ, is `quantized_params(scaled_params(...), ...)`. With int8 activations inputs are
    rotated in blocks (`hadamard`) and not scaled.

    Args:
        params, config: the model, in floating point.
        token_rows: token ids of the calibration text, a list per document, a few thousand tokens in total.
        quantize: "int8" or "int4".
        group: the number of inputs that share a scale. None: `group_size`.
        activations: "int8": activations are quantized too. int8 then has a scale per output.
    """
    check_activations(activations, quantize, group)
    group = _ALL_INPUTS if activations and quantize == "int8" else group
    bits = _bits(quantize, group)
    check_supported(config, "scales", "activation-aware rounding is", "round to nearest instead")
    scaled = params if activations else scaled_params(params, config, token_rows, quantize, group)
    quantized = quantized_params(scaled | {"layers": ()}, quantize, activations=activations)
    tokens_BT, calibration = _calibration_batch(config, token_rows)
    exact_BTD, x_BTD = (
        embed(tokens_BT, tree["embed"], jnp.float32, config.embed_scale) for tree in (scaled, quantized)
    )
    layers = []
    for layer_key, layer in _keyed_layers(scaled, config):
        layer_float32 = _to_float32(layer)
        quantized_layer = dict(layer)
        exact, exact_BTD = _matrix_inputs(layer_float32, layer_key, exact_BTD, calibration)
        for part, names in _SHARED_INPUTS.items():
            inputs, _ = _matrix_inputs(_to_float32(quantized_layer), layer_key, x_BTD, calibration)
            for name in names:
                matrix_OI = layer_float32[name]["weight"]
                wanted_MO = linear(calibration.without_padding(exact[part]), {"weight": matrix_OI})
                # Matrices that add to the residual stream also compensate errors of previous layers.
                if name in ("o", "down"):
                    wanted_MO += calibration.without_padding(exact["x" + part] - inputs["x" + part])
                x_MI = calibration.without_padding(inputs[part])
                if activations:
                    (matrix_OI, x_MI) = map(_rotated_inputs, (matrix_OI, x_MI))
                matrix = gptq_matrix(matrix_OI, x_MI, wanted_MO, bits, group)
                matrix = with_int8_activations(matrix) if activations else matrix
                quantized_layer[name] = layer[name] | {"weight": matrix}
        x_BTD = _matrix_inputs(_to_float32(quantized_layer), layer_key, x_BTD, calibration)[1]
        layers.append(quantized_layer)
    return quantized | {"layers": tuple(layers)}


def _rotated_inputs(x_MI: jax.Array) -> jax.Array:
    """Returns the rows, rotated as `in_blocks` rotates the rows of a matrix."""
    width = input_block_width(x_MI.shape[1])
    return hadamard_rotate(x_MI, width) if width else x_MI


def quantized_params(
    params: Params, quantize: str, group: int | None = None, activations: str | None = None
) -> Params:
    """Returns parameters rounded to nearest, with the vocabulary in int8. It takes the arguments of
    `awq_params`.
    """
    check_activations(activations, quantize, group)
    vocab_group = _ALL_INPUTS if activations else None
    group = vocab_group if quantize == "int8" and activations else group
    bits = _bits(quantize, group)
    if any({"experts", "A_log", "layer_scalar"} & layer.keys() for layer in params["layers"]):
        raise InputError(
            "quantized weights of experts, linear attention and Gemma 4 cannot be written: load the float"
            " checkpoint with quantize"
        )

    read: Callable = in_blocks if activations else lambda matrix: matrix

    def quantize_leaf(leaf: Params) -> Params:
        matrix = quantize_matrix(read(np.asarray(leaf["weight"])), bits, group)
        return leaf | {"weight": jax.tree.map(jnp.asarray, matrix)}

    layers = tuple(
        layer | {name: quantize_leaf(layer[name]) for name in MATRICES if name in layer}
        for layer in params["layers"]
    )
    vocabulary = {}
    for name, hf_name in (("embed", "model.embed_tokens"), ("lm_head", "lm_head")):
        if name in params:
            matrix_VD = read(np.asarray(params[name]["weight"]))
            leaf = quantized_leaf(matrix_VD, hf_name, quantize, vocab_group)
            vocabulary[name] = {"weight": jax.device_put(leaf)}
    quantized = params | {"layers": layers} | vocabulary
    return with_int8_activations(quantized) if activations else quantized


def scaled_params(
    params: Params, config: ModelConfig, token_rows: _TokenRows, quantize: str, group: int | None = None
) -> Params:
    """Returns scaled floating-point parameters of the same function. It takes the arguments of
    `awq_params`.
    """
    check_supported(config, "scales", "activation-aware scales are", "round to nearest instead")
    quantize_args = _bits(quantize, group), group
    tokens_BT, calibration = _calibration_batch(config, token_rows)
    x_BTD = embed(tokens_BT, params["embed"], jnp.float32, config.embed_scale)
    layers = []
    for layer_key, layer in _keyed_layers(params, config):
        layer_float32 = _to_float32(layer)
        inputs, x_BTD = _matrix_inputs(layer_float32, layer_key, x_BTD, calibration)
        scales = {}
        for part in _SHARED_INPUTS:
            mean_I = _mean_magnitudes(inputs[part], calibration)
            if part == "o":  # query heads that share a value head share its scales
                mean_KGH = mean_I.reshape(config.num_key_value_heads, -1, config.head_dim)
                mean_I = jnp.broadcast_to(mean_KGH.mean(1, keepdims=True), mean_KGH.shape).reshape(-1)
            errors = _output_errors(
                layer_float32, layer_key, part, inputs[part], mean_I, calibration, quantize_args=quantize_args
            )
            scales[part] = _scale(mean_I, jnp.argmin(errors) / GRID)
        layers.append(_fold_scales(layer, config, scales))
    return params | {"layers": tuple(layers)}


def _calibration_batch(config: ModelConfig, token_rows: _TokenRows) -> tuple[jax.Array, _Calibration]:
    """Returns padded token ids [B, T], and their angles and lengths."""
    lengths = [len(row) for row in token_rows]
    if not lengths or min(lengths) == 0:
        raise InputError(f"calibration needs rows of token ids, none empty; got rows of {lengths}")
    tokens_BT = np.zeros((len(lengths), max(lengths)), np.int32)
    for row, ids in zip(tokens_BT, token_rows, strict=True):
        row[: len(ids)] = ids
    length_B = jnp.array(lengths)
    position_BT = jnp.broadcast_to(np.arange(max(lengths)), tokens_BT.shape)
    return jnp.array(tokens_BT), _Calibration(rotary_angles(config, position_BT, length_B), length_B)


def _keyed_layers(params: Params, config: ModelConfig) -> list[tuple[_LayerKey, Params]]:
    """Returns each layer with its key."""
    keys = [(config, kind) for kind in layer_kinds(config)]
    return list(zip(keys, params["layers"], strict=True))


def _to_float32(layer: Params) -> Params:
    """Returns the layer in float32. Quantized matrices are dequantized."""
    to_float32 = lambda x: x.dequantize() if is_quantized(x) else x.astype(jnp.float32)  # noqa: E731
    return jax.tree.map(to_float32, layer, is_leaf=is_quantized)


def _bits(quantize: str, group: int | None) -> int:
    if quantize is None:
        raise InputError("quantize=None: give int8 or int4")
    check_quantize_method(quantize)
    if group is not None and (group < 2 or group % 2):
        raise InputError(f"group={group}: give an even number of inputs")
    return 8 if quantize == "int8" else 4


@partial(jax.jit, static_argnames="layer_key")
def _matrix_inputs(
    layer: Params, layer_key: _LayerKey, x_BTD, calibration: _Calibration
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the inputs of a layer's matrices, by part, and the layer's output. The residual additions
    ("xo", "xdown") are included, as outputs of a matrix would be.
    """
    config, _ = layer_key
    factor = config.residual_multiplier
    attn_BTD = norm(x_BTD, layer, "attn_norm", config)
    one = jnp.eye(layer["o"]["weight"].shape[1], dtype=jnp.float32)
    identity = {"o": {"weight": one}}  # so the output is the input of "o"
    heads_BTI = _attention_output(layer | identity, layer_key, attn_BTD, calibration)
    mid_BTD = x_BTD + factor * linear(heads_BTI, layer["o"])
    mlp_BTD = norm(mid_BTD, layer, "mlp_norm", config)
    gated_BTF = mlp_intermediate(mlp_BTD, layer, config)
    inputs = dict(attn=attn_BTD, o=heads_BTI, xo=x_BTD / factor, mlp=mlp_BTD)
    inputs |= dict(down=gated_BTF, xdown=mid_BTD / factor)
    return inputs, mid_BTD + factor * linear(gated_BTF, layer["down"])


def _attention_output(
    layer: Params, layer_key: _LayerKey, x_BTD: jax.Array, calibration: _Calibration
) -> jax.Array:
    position_BT = jnp.arange(x_BTD.shape[1])[None]
    positions = Positions(calibration.angles, None, calibration.length_B, position_BT)
    config, kind = layer_key
    (mixer,) = config.mixers(kind)
    return mixer.forward(layer, x_BTD, positions, None, DEFAULT)[0]


def _is_token(x_BTI: jax.Array, calibration: _Calibration) -> jax.Array:
    """Returns True at positions of tokens and False at padding, bool [B, T, 1]."""
    return (jnp.arange(x_BTI.shape[1]) < calibration.length_B[:, None])[..., None]


@jax.jit
def _mean_magnitudes(x_BTI: jax.Array, calibration: _Calibration) -> jax.Array:
    mean_I = jnp.sum(jnp.abs(x_BTI), (0, 1), where=_is_token(x_BTI, calibration)) / calibration.length_B.sum()
    # Channels without activations get a small value, to avoid a division by 0.
    return jnp.maximum(mean_I, 1e-3 * mean_I.mean() + jnp.finfo(jnp.float32).tiny)


def _scale(mean_I: jax.Array, exponent: jax.Array) -> jax.Array:
    log_I = jnp.log(mean_I) * exponent
    return jnp.exp(log_I - log_I.mean())


@partial(jax.jit, static_argnames=("layer_key", "part", "quantize_args"))
def _output_errors(
    layer: Params, layer_key: _LayerKey, part: str, x_BTI, mean_I, calibration: _Calibration, *, quantize_args
) -> jax.Array:
    """Returns the squared error of the part's output for each exponent. quantize_args: bits and group."""
    rows = max(1, SEARCH_TOKENS // x_BTI.shape[1])
    x_BTI, calibration = jax.tree.map(lambda x: x[:rows], (x_BTI, calibration))

    def output(layer: Params) -> jax.Array:  # [B, T, outputs]
        if part == "attn":
            return _attention_output(layer, layer_key, x_BTI, calibration)
        return gated_mlp(x_BTI, layer, layer_key[0]) if part == "mlp" else linear(x_BTI, layer[part])

    def error(exponent: jax.Array) -> jax.Array:  # []
        scale_I = _scale(mean_I, exponent)
        quantized = {}
        for name in _SHARED_INPUTS[part]:
            matrix_OI = fake_quantize(layer[name]["weight"] * scale_I, *quantize_args) / scale_I
            quantized[name] = layer[name] | {"weight": matrix_OI}
        return jnp.sum(jnp.square(output(layer | quantized) - wanted), where=_is_token(x_BTI, calibration))

    wanted = output(layer)
    return lax.map(error, jnp.arange(GRID) / GRID)


def _fold_scales(layer: Params, config: ModelConfig, scales: dict[str, jax.Array]) -> Params:
    """Multiplies columns by their scales and divides their inputs by them."""
    layer = dict(layer)
    for part, name in (("attn", "attn_norm"), ("mlp", "mlp_norm")):
        gain = layer[name]
        layer[name] = (layer[name] / scales[part]).astype(layer[name].dtype)
        # The scale that results from rounding the gain to its dtype: so 16-bit gains lose nothing.
        exact_scale = gain.astype(jnp.float32) / layer[name].astype(jnp.float32)
        scales[part] = jnp.where(layer[name] == 0, scales[part], exact_scale)
    by_key_head = scales["o"].reshape(config.num_key_value_heads, -1, config.head_dim)[:, 0].reshape(-1)
    for name, scale_O in (("v", by_key_head), ("up", scales["down"])):
        bias = {"bias": layer[name]["bias"] / scale_O} if "bias" in layer[name] else {}
        layer[name] = {"weight": layer[name]["weight"] / scale_O[:, None]} | bias
    for part, names in _SHARED_INPUTS.items():
        layer |= {name: layer[name] | {"weight": layer[name]["weight"] * scales[part]} for name in names}
    return layer


def with_outliers(params: Params, config: ModelConfig, factor: float) -> Params:
    """Returns float parameters of the same function, in which one in 64 input channels of every matrix has
    activations larger by a factor, to measure the loss of quantization to them. Raises InputError if the
    model has a part that does not support this.
    """
    check_supported(config, "scales", "artificial outliers are", "leave them out")

    def scales_of(size: int) -> jax.Array:
        return 1 / jnp.where(jnp.arange(size) % 64 == 5, factor, 1.0)

    by_key_head = scales_of(config.num_key_value_heads * config.head_dim).reshape(-1, config.head_dim)
    by_head = jnp.repeat(by_key_head, config.num_attention_heads // config.num_key_value_heads, 0).reshape(-1)
    by_D = scales_of(config.hidden_size)
    scales = dict(attn=by_D, o=by_head, mlp=by_D, down=scales_of(config.intermediate_size))
    layers = tuple(_fold_scales(layer, config, dict(scales)) for layer in params["layers"])
    return jax.tree.map(lambda new, old: new.astype(old.dtype), params | {"layers": layers}, params)
