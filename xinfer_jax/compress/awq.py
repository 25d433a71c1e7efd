"""Activation-aware weight quantization (Lin et al. 2023): input channels that carry much are scaled up before
the rounding.

A matrix's columns times s, and whatever feeds it divided by s, is the same function; but the columns that
matter are then rounded more finely. s is a power of the mean magnitude of each channel, seen on calibration
text.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..model.decoder import _attend
from ..model.layers import embed, gated, gated_mlp, linear, norm, rotary_angles
from ..weights.params import Params
from ..weights.quantized import check_method, dequantize, is_quantized, quantize_matrix, quantized_leaf
from .rounding import compensated_matrix, rounded_matrix

GRID = 20  # exponents tried, in [0, 1)
SEARCH_TOKENS = 2048  # of the calibration text that the search looks at
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
# Matrices with a common input.
_SHARING = {"attn": ("q", "k", "v"), "o": ("o",), "mlp": ("gate", "up"), "down": ("down",)}


def awq_params(
    params: Params,
    config: ModelConfig,
    token_rows: Sequence[Sequence[int]],
    quantize: str = "int4",
    group: int | None = None,
) -> Params:
    """Quantized parameters: scaled by what flows through the model on a calibration text, then rounded by
    `compensated_matrix`.

    AWQ alone, without compensation: `rounded_params(scaled_params(...), ...)`.

    Args:
        params: floating point.
        config: the model.
        token_rows: token ids of the calibration text, one list per document or piece of one; a few thousand
            in all.
        quantize: "int8" or "int4".
        group: inputs that share a scale; None: as `quantize_matrix` chooses.

    Raises:
        InputError: no token ids, an unknown method, or a model whose norms or experts the scales cannot be
            folded into.
    """
    bits, scaled = _bits(quantize, group), scaled_params(params, config, token_rows, quantize, group)
    rounded = rounded_params(scaled | {"layers": ()}, quantize)
    tokens_BT, seen, real = _calibration(config, token_rows)
    exact_BTD, x_BTD = (
        embed(tokens_BT, tree["embed"], jnp.float32, config.embed_scale) for tree in (scaled, rounded)
    )
    layers = []
    for index, layer in _by_kind(scaled, config):
        wide, done = _wide(layer), dict(layer)
        exact, exact_BTD = _inputs(wide, config, index, exact_BTD, *seen)
        for part, names in _SHARING.items():
            inputs, _ = _inputs(_wide(done), config, index, x_BTD, *seen)
            for name in names:
                matrix_NK = wide[name]["weight"]
                wanted_MN = linear(real(exact[part]), {"weight": matrix_NK})
                # What is added to the hidden state also makes up for what went wrong before.
                if name in ("o", "down"):
                    wanted_MN += real(exact["x" + part] - inputs["x" + part])
                done[name] = layer[name] | {
                    "weight": compensated_matrix(matrix_NK, real(inputs[part]), wanted_MN, bits, group)
                }
        x_BTD = _inputs(_wide(done), config, index, x_BTD, *seen)[1]
        layers.append(done)
    return rounded | {"layers": tuple(layers)}


def rounded_params(params: Params, quantize: str, group: int | None = None) -> Params:
    """Every matrix rounded to nearest; arguments as in `awq_params`. The vocabulary matrix stays int8 per
    output.
    """
    bits = _bits(quantize, group)
    if any("experts" in layer for layer in params["layers"]):
        raise InputError(
            "quantized weights are not supported for models with experts: they stay float numbers"
        )

    def rounded(name: str, leaf: Params) -> Params:
        if name not in MATRICES:
            return leaf
        return leaf | {
            "weight": jax.tree.map(jnp.asarray, quantize_matrix(np.asarray(leaf["weight"]), bits, group))
        }

    layers = tuple({name: rounded(name, leaf) for name, leaf in layer.items()} for layer in params["layers"])
    vocabulary = {name: params[name] for name in ("embed", "lm_head") if name in params}
    hf_names = {"embed": "model.embed_tokens", "lm_head": "lm_head"}
    for name, leaf in vocabulary.items():
        vocabulary[name] = {"weight": quantized_leaf(np.asarray(leaf["weight"]), hf_names[name], quantize)}
    return params | {"layers": layers} | vocabulary


def scaled_params(
    params: Params,
    config: ModelConfig,
    token_rows: Sequence[Sequence[int]],
    quantize: str,
    group: int | None = None,
) -> Params:
    """The same function with other numbers: floating point, ready to be rounded. Arguments as in
    `awq_params`.
    """
    if not config.pre_norm or config.post_norm or config.num_experts:
        raise InputError(
            f"activation-aware scales are not supported for model_type {config.model_type!r}: round to"
            " nearest instead"
        )
    bits = _bits(quantize, group)
    tokens_BT, seen, _ = _calibration(config, token_rows)
    x_BTD, layers = embed(tokens_BT, params["embed"], jnp.float32, config.embed_scale), []
    for index, layer in _by_kind(params, config):
        wide = _wide(layer)
        inputs, x_BTD = _inputs(wide, config, index, x_BTD, *seen)
        scales = {}
        for part in _SHARING:
            mean_C = _mean_magnitude(inputs[part], seen[1])
            if part == "o":  # query heads that share a value head share its scales
                mean_C = _per_query_head(
                    mean_C.reshape(config.num_key_value_heads, -1, config.head_dim).mean(1), config
                )
            errors = _errors(wide, config, index, part, inputs[part], seen, mean_C, (bits, group))
            scales[part] = _scale(mean_C, jnp.argmin(errors) / GRID)
        layers.append(_folded(layer, config, scales))
    return params | {"layers": tuple(layers)}


def _calibration(config: ModelConfig, token_rows: Sequence[Sequence[int]]):
    """Padded token ids [B, T], what attention wants to know of their positions, and a function that picks the
    real tokens: [M, ...].
    """
    lengths = [len(row) for row in token_rows]
    if not lengths or min(lengths) == 0:
        raise InputError(f"calibration needs rows of token ids, none empty; got rows of {lengths}")
    tokens_BT = np.zeros((len(lengths), max(lengths)), np.int32)
    for row, ids in zip(tokens_BT, token_rows, strict=True):
        row[: len(ids)] = ids
    length_B, position_T = jnp.array(lengths), np.arange(max(lengths))
    real = np.nonzero(position_T < np.array(lengths)[:, None])
    angles = rotary_angles(config, jnp.broadcast_to(position_T, tokens_BT.shape), length_B)
    return jnp.array(tokens_BT), (angles, length_B), lambda x_BTC: x_BTC[real]


def _by_kind(params: Params, config: ModelConfig) -> list[tuple[int, Params]]:
    """Each layer with the index of the first of its kind: as many programs are compiled as there are
    kinds.
    """
    kinds = list(zip(config.layer_rope, config.layer_windows, strict=True))
    return [(kinds.index(kind), layer) for kind, layer in zip(kinds, params["layers"], strict=True)]


def _wide(layer: Params) -> Params:
    """All in float32, quantized matrices too."""
    return jax.tree.map(
        lambda leaf: dequantize(leaf) if is_quantized(leaf) else leaf.astype(jnp.float32),
        layer,
        is_leaf=is_quantized,
    )


def _bits(quantize: str, group: int | None) -> int:
    if quantize is None:
        raise InputError("quantize=None: say int8 or int4")
    check_method(quantize)
    if group is not None and (group < 2 or group % 2):
        raise InputError(f"group={group}: give an even number of inputs")
    return {"int8": 8, "int4": 4}[quantize]


@partial(jax.jit, static_argnames=("config", "index"))
def _inputs(
    layer: Params, config: ModelConfig, index: int, x_BTD, angles, length_B
) -> tuple[dict[str, jax.Array], jax.Array]:
    """What the matrices of a layer are multiplied by, by part; what "o" and "down" are added to; and the
    layer's output.
    """
    attn_BTD = norm(x_BTD, layer, "attn_norm", config)
    # Lets what enters the output matrix through as it is.
    through = {"o": {"weight": jnp.eye(layer["o"]["weight"].shape[1])}}
    heads_BTC = _attend(layer | through, config, index, attn_BTD, angles, None, length_B, None)[0]
    mid_BTD = x_BTD + linear(heads_BTC, layer["o"])
    mlp_BTD = norm(mid_BTD, layer, "mlp_norm", config)
    gated_BTF = gated(mlp_BTD, layer, config.hidden_act)
    inputs = {
        "attn": attn_BTD,
        "o": heads_BTC,
        "xo": x_BTD,
        "mlp": mlp_BTD,
        "down": gated_BTF,
        "xdown": mid_BTD,
    }
    return inputs, mid_BTD + linear(gated_BTF, layer["down"])


@jax.jit
def _mean_magnitude(x_BTC: jax.Array, length_B: jax.Array) -> jax.Array:
    real_BT1 = (jnp.arange(x_BTC.shape[1]) < length_B[:, None])[..., None]
    mean_C = jnp.sum(jnp.abs(x_BTC), (0, 1), where=real_BT1) / length_B.sum()
    # A silent channel says little, and must not divide by 0.
    return jnp.maximum(mean_C, 1e-3 * mean_C.mean() + jnp.finfo(jnp.float32).tiny)


def _per_query_head(value_KH: jax.Array, config: ModelConfig) -> jax.Array:
    return jnp.repeat(value_KH, config.num_attention_heads // config.num_key_value_heads, 0).reshape(-1)


def _scale(mean_C: jax.Array, exponent: jax.Array) -> jax.Array:
    log_C = jnp.log(mean_C) * exponent
    return jnp.exp(log_C - log_C.mean())


@partial(jax.jit, static_argnames=("config", "index", "part", "rounding"))
def _errors(layer, config, index, part, x_BTC, seen, mean_C, rounding) -> jax.Array:
    """For every exponent of the grid: the squared error of what the part puts out, over its real tokens.
    rounding: bits and group.
    """
    rows = max(1, SEARCH_TOKENS // x_BTC.shape[1])
    x_BTC, (angles, length_B) = jax.tree.map(lambda a: a[:rows], (x_BTC, seen))
    real_BT1 = (jnp.arange(x_BTC.shape[1]) < length_B[:, None])[..., None]

    def output(layer: Params) -> jax.Array:
        if part == "attn":
            return _attend(layer, config, index, x_BTC, angles, None, length_B, None)[0]
        return gated_mlp(x_BTC, layer, config.hidden_act) if part == "mlp" else linear(x_BTC, layer[part])

    def error(exponent: jax.Array) -> jax.Array:
        scale_C = _scale(mean_C, exponent)
        rounded = {
            name: (
                layer[name] | {"weight": rounded_matrix(layer[name]["weight"] * scale_C, *rounding) / scale_C}
            )
            for name in _SHARING[part]
        }
        return jnp.sum(jnp.square(output(layer | rounded) - wanted), where=real_BT1)

    wanted = output(layer)
    return lax.map(error, jnp.arange(GRID) / GRID)


def _folded(layer: Params, config: ModelConfig, scales: dict[str, jax.Array]) -> Params:
    """Columns times their scale, what feeds them divided by it."""
    layer = dict(layer)
    for part, name in (("attn", "attn_norm"), ("mlp", "mlp_norm")):
        before, after = layer[name], (layer[name] / scales[part]).astype(layer[name].dtype)
        # The quotient as it was rounded; so nothing is lost where norms have 16 bits.
        scales[part] = jnp.where(
            after == 0, scales[part], before.astype(jnp.float32) / after.astype(jnp.float32)
        )
        layer[name] = after
    by_key_head = scales["o"].reshape(config.num_key_value_heads, -1, config.head_dim)[:, 0].reshape(-1)
    for name, scale_N in (("v", by_key_head), ("up", scales["down"])):
        layer[name] = {
            kind: leaf / (scale_N[:, None] if leaf.ndim == 2 else scale_N)
            for kind, leaf in layer[name].items()
        }
    for part, names in _SHARING.items():
        layer |= {name: layer[name] | {"weight": layer[name]["weight"] * scales[part]} for name in names}
    return layer
