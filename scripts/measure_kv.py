"""Measures the error of quantized KV caches if keys have large biases, as in Qwen2.5.

    python scripts/measure_kv.py                                     # the bundled model with larger biases
    python scripts/measure_kv.py --config=qwen2.5-0.5b --layers=2    # random weights of that shape

Adds each of --biases to a few components of every key (`k_proj.bias`; queries stay), in the RoPE pairs with
the lowest frequencies, where real checkpoints have large biases. Texts are sampled from the model without
these biases; a random model gets random ids. For each cache format it prints: the error of keys, relative to
their norm and to their norm without the added bias (the part that distinguishes keys); the error of the
attention output with exact queries, relative to its norm; and how often the most likely next token is that of
a float32 cache. The last line is one JSON object. Exit code 2: bad input, reported in one line on standard
error.
"""

from launcher import start

# isort: split
import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from model_shapes import hf_config

import xinfer_jax as xj
from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.cache.stored_kv import dequantize_kv, empty_kv, quantize_kv
from xinfer_jax.config.model_config import ModelConfig, from_hf
from xinfer_jax.model.attention import attention
from xinfer_jax.model.decoder import hidden_states
from xinfer_jax.model.layers import apply_rope, linear, norm, rotary_angles
from xinfer_jax.plugins import names
from xinfer_jax.weights.params import Params

MODEL = flags.DEFINE_string(
    "model", None, "Checkpoint: a directory, or a name on the hub. Default: the bundled model."
)
CONFIG = flags.DEFINE_string("config", None, "Random weights of this shape, instead of a checkpoint.")
LAYERS = flags.DEFINE_integer("layers", 2, "Layers of a random model.", lower_bound=1)
BIASES = flags.DEFINE_list("biases", ["0", "50", "100", "300"], "Biases to add.")
NUMBERS = flags.DEFINE_integer(
    "numbers", 4, "Number of components of each key that get the bias.", lower_bound=1
)
ROWS = flags.DEFINE_integer("rows", 8, "Number of texts.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 128, "Tokens of each text, at least 32.", lower_bound=32)
_PROMPT = 16  # tokens of the first call, from which GEAR computes its low-rank basis
_VOCABULARY = 4096  # ids of a random model


def main(argv: list[str]) -> None:
    print(json.dumps(run()))


def run() -> dict:
    biases = _parse_biases()
    params, config, tokens_BT = _model_and_tokens()
    if "bias" not in params["layers"][0]["k"]:
        raise xj.InputError(f"keys of a {config.model_type} model have no biases: choose another --model")
    print("bias   cache  error of keys  without the bias  of attention  top-1 equal to float32")
    rows = []
    for bias in biases:
        biased = _with_bias(params, config, bias)
        exact_BT = _best_tokens(biased, config, tokens_BT, "float32")
        for name in names("cache dtype"):
            errors = _errors(biased, config, tokens_BT, name, bias).mean(0)
            agreed = float(np.mean(_best_tokens(biased, config, tokens_BT, name) == exact_BT))
            keys, without_bias, output = (round(float(error), 5) for error in errors)
            rows.append(dict(bias=bias, cache=name, keys=keys, without_bias=without_bias, attention=output))
            rows[-1]["top1"] = round(agreed, 5)
            figures = "".join(f"{error:13.2%}  " for error in errors)
            print(f"{bias:4.0f}   {name:5}{figures}{agreed:12.1%}", flush=True)
    return dict(model=MODEL.value, config=CONFIG.value, tokens=tokens_BT.size, rows=rows)


def _parse_biases() -> list[float]:
    try:
        biases = [float(bias) for bias in BIASES.value]
    except ValueError as error:
        raise xj.InputError(f"--biases takes numbers: {error}") from error
    if not biases or not np.isfinite(biases).all():
        raise xj.InputError(f"--biases takes one finite number or more, got {','.join(BIASES.value)!r}")
    return biases


def _model_and_tokens() -> tuple[Params, ModelConfig, jax.Array]:
    """Weights, config and tokens [B, T]."""
    starts = [[1 + i] for i in range(ROWS.value)]
    if CONFIG.value is None:
        model = xj.load_model(MODEL.value, dtype="float32")
        sampling = xj.SamplingConfig(temperature=1.0)
        options = xj.GenerateOptions(TOKENS.value - 1, sampling, eos_token_ids=())
        texts = xj.generate(model.params, model.config, starts, options, key=jax.random.key(0)).tokens
        tokens = [start + text for start, text in zip(starts, texts, strict=True)]
        return model.params, model.config, jnp.array(tokens)
    if MODEL.value is not None:
        raise xj.InputError("--config and --model exclude each other: a checkpoint brings its config")
    cut = dict(num_hidden_layers=LAYERS.value, vocab_size=_VOCABULARY)
    config = from_hf(hf_config(CONFIG.value) | cut)
    init = jax.jit(lambda key: xj.init_params(config, key, "float32"))
    draws = np.random.default_rng(0).integers(0, _VOCABULARY, (ROWS.value, TOKENS.value))
    return init(jax.random.key(0)), config, jnp.array(draws, jnp.int32)


def _bias_vector(config: ModelConfig, bias: float) -> jax.Array:
    """The vector [K * H] that is added to every key: plus and minus the bias, in both halves of the last
    pairs.
    """
    added_H = np.zeros(config.head_dim, np.float32)
    pairs = config.head_dim // 2
    for i in range(min(NUMBERS.value, config.head_dim)):
        added_H[pairs - 1 - i // 2 + i % 2 * pairs] = bias * (-1) ** i
    return jnp.tile(added_H, config.num_key_value_heads)


def _with_bias(params: Params, config: ModelConfig, bias: float) -> Params:
    def add_bias(leaf: Params) -> Params:
        return leaf | {"bias": leaf["bias"] + _bias_vector(config, bias)}

    return params | {"layers": tuple(layer | {"k": add_bias(layer["k"])} for layer in params["layers"])}


def _best_tokens(params: Params, config: ModelConfig, tokens_BT: jax.Array, name: str) -> np.ndarray:
    """The most likely next token after each token, except after the first `_PROMPT`."""
    step = jax.jit(xj.forward, static_argnums=1)
    cache = step(params, config, tokens_BT[:, :_PROMPT], xj.init_cache(config, *tokens_BT.shape, name))[1]
    return np.asarray(step(params, config, tokens_BT[:, _PROMPT:], cache)[0].argmax(-1))


def _errors(params: Params, config: ModelConfig, tokens_BT: jax.Array, name: str, bias: float) -> np.ndarray:
    """The three errors of each layer, [L, 3]. The input of each layer is that of an exact cache."""
    # A final norm with unit weight does not change the input of a layer, which normalizes it again.
    without_norm = params | {"final_norm": jnp.ones_like(params["final_norm"])}
    layer_input = jax.jit(hidden_states, static_argnums=1)
    added = _bias_vector(config, bias)

    def errors(i: int) -> jax.Array:
        first = without_norm | {"layers": params["layers"][:i]}
        x_BTD, _ = layer_input(first, dataclasses.replace(config, num_hidden_layers=i), tokens_BT)
        return _errors_of(params["layers"][i], config, x_BTD, name, added)

    return np.array([errors(i) for i in range(config.num_hidden_layers)])


@partial(jax.jit, static_argnums=(1, 3))
def _errors_of(layer: Params, config: ModelConfig, x_BTD, name: str, added) -> jax.Array:
    (B, T, _) = x_BTD.shape
    x_BTD = norm(x_BTD, layer, "attn_norm", config)
    length_B = jnp.full(B, T)
    scale = config.head_dim**-0.5
    angles = rotary_angles(config, jnp.broadcast_to(jnp.arange(T), (B, T)), length_B)[0]

    def heads(leaf: Params) -> jax.Array:
        return linear(x_BTD, leaf).reshape(B, T, -1, config.head_dim)

    def round_trip(x_BKTH: jax.Array) -> jax.Array:
        """The values after they were quantized for the cache and dequantized."""
        return dequantize_kv(quantize_kv(x_BKTH, empty_kv(x_BKTH.shape, name), jnp.full(B, _PROMPT)))

    def error(got: jax.Array, want: jax.Array, size: jax.Array) -> jax.Array:
        return jnp.linalg.norm(got - want) / jnp.linalg.norm(size)

    plain = layer["k"] | {"bias": layer["k"]["bias"] - added}
    q_BTNH, k, plain = (apply_rope(heads(leaf), *angles) for leaf in (layer["q"], layer["k"], plain))
    k, plain, v = (jnp.swapaxes(x, 1, 2) for x in (k, plain, heads(layer["v"])))
    keys = round_trip(plain) + (k - plain)  # keys are stored without their bias
    exact, got = (
        attention(q_BTNH, uncached_kv(*kv), length_B=length_B, scale=scale)
        for kv in ((k, v), (keys, round_trip(v)))
    )
    return jnp.array([error(keys, k, k), error(keys, k, plain), error(got, exact, exact)])


if __name__ == "__main__":
    start(main)
