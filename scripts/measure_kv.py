"""What keys and values in fewer bytes lose where keys have large biases, as those of Qwen2.5 do.

    python scripts/measure_kv.py                                     # the bundled model, its biases enlarged
    python scripts/measure_kv.py --config=qwen2.5-0.5b --layers=2    # random weights of that shape

Adds each of --biases to a few numbers of every key (`k_proj.bias`; queries stay), in the pairs that turn most
slowly with the position, where real checkpoints have theirs. Texts are sampled from the model without them; a
random model reads random ids. For each cache: the error of keys, relative to their size and to their size
without what was added, which is what tells keys apart; of what attention gives, with exact queries, relative
to its size; and how often the likeliest next token is that of a float32 cache. The last line is one JSON
object. Exit code 2: bad input, one line on standard error.
"""

from one_line import start

# isort: split
import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from bench_shapes import hf_config

import xinfer_jax as xj
from xinfer_jax.cache.kinds import fresh
from xinfer_jax.cache.quantized import KV_BITS, empty, quantize, widen
from xinfer_jax.config.model_config import ModelConfig, from_hf
from xinfer_jax.model.attention import attention
from xinfer_jax.model.decoder import hidden_states
from xinfer_jax.model.layers import linear, norm, rotary_angles, rotate
from xinfer_jax.weights.params import Params

MODEL = flags.DEFINE_string(
    "model", None, "Checkpoint: a directory, or a hub name. Default: the bundled one."
)
CONFIG = flags.DEFINE_string("config", None, "Instead of a checkpoint: random weights of this shape.")
LAYERS = flags.DEFINE_integer("layers", 2, "Layers of a random model.", lower_bound=1)
BIASES = flags.DEFINE_list("biases", ["0", "50", "100", "300"], "Numbers that are added.")
NUMBERS = flags.DEFINE_integer("numbers", 4, "How many numbers of each key they are added to.", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 8, "Texts.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 128, "Tokens of each, at least 32.", lower_bound=32)
_PROMPT = 16  # tokens of the first call, from which GEAR takes its directions
_VOCABULARY = 4096  # of a random model


def main(argv: list[str]) -> None:
    print(json.dumps(run()))


def run() -> dict:
    biases = _biases()
    params, config, tokens_BT = _model()
    if "bias" not in params["layers"][0]["k"]:
        raise xj.InputError(f"keys of a {config.model_type} model have no biases: give another --model")
    print("bias   cache  error of keys  without the bias  of attention  top-1 as with float32")
    rows = []
    for bias in biases:
        biased = _biased(params, config, bias)
        exact_BT = _choices(biased, config, tokens_BT, "float32")
        for name in KV_BITS:
            errors = _errors(biased, config, tokens_BT, name, bias).mean(0)
            agreed = float(np.mean(_choices(biased, config, tokens_BT, name) == exact_BT))
            keys, without_bias, attended = (round(float(error), 5) for error in errors)
            rows.append(dict(bias=bias, cache=name, keys=keys, without_bias=without_bias, attention=attended))
            rows[-1]["top1"] = round(agreed, 5)
            figures = "".join(f"{error:13.2%}  " for error in errors)
            print(f"{bias:4.0f}   {name:5}{figures}{agreed:12.1%}", flush=True)
    return dict(model=MODEL.value, config=CONFIG.value, tokens=tokens_BT.size, rows=rows)


def _biases() -> list[float]:
    try:
        biases = [float(bias) for bias in BIASES.value]
    except ValueError as error:
        raise xj.InputError(f"--biases takes numbers: {error}") from error
    if not biases or not np.isfinite(biases).all():
        raise xj.InputError(f"--biases takes one finite number or more, got {','.join(BIASES.value)!r}")
    return biases


def _model() -> tuple[Params, ModelConfig, jax.Array]:
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


def _added(config: ModelConfig, bias: float) -> jax.Array:
    """What is added to every key, [K * H]: plus and minus the bias in both halves of the last pairs."""
    added_H = np.zeros(config.head_dim, np.float32)
    pairs = config.head_dim // 2
    for i in range(min(NUMBERS.value, config.head_dim)):
        added_H[pairs - 1 - i // 2 + i % 2 * pairs] = bias * (-1) ** i
    return jnp.tile(added_H, config.num_key_value_heads)


def _biased(params: Params, config: ModelConfig, bias: float) -> Params:
    def moved(leaf: Params) -> Params:
        return leaf | {"bias": leaf["bias"] + _added(config, bias)}

    return params | {"layers": tuple(layer | {"k": moved(layer["k"])} for layer in params["layers"])}


def _choices(params: Params, config: ModelConfig, tokens_BT: jax.Array, name: str) -> np.ndarray:
    """The likeliest token behind each but the first `_PROMPT`."""
    step = jax.jit(xj.forward, static_argnums=1)
    cache = step(params, config, tokens_BT[:, :_PROMPT], xj.init_cache(config, *tokens_BT.shape, name))[1]
    return np.asarray(step(params, config, tokens_BT[:, _PROMPT:], cache)[0].argmax(-1))


def _errors(params: Params, config: ModelConfig, tokens_BT: jax.Array, name: str, bias: float) -> np.ndarray:
    """The three errors, [L, 3]: each layer given what an exact cache gives it."""
    # Normed once more in the layer, which undoes this one: what enters a layer.
    below = params | {"final_norm": jnp.ones_like(params["final_norm"])}
    enters = jax.jit(hidden_states, static_argnums=1)
    added = _added(config, bias)

    def errors(i: int) -> jax.Array:
        first = below | {"layers": params["layers"][:i]}
        x_BTD, _ = enters(first, dataclasses.replace(config, num_hidden_layers=i), tokens_BT)
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

    def held(x_BKTH: jax.Array) -> jax.Array:
        return widen(quantize(x_BKTH, empty(x_BKTH.shape, name), jnp.full(B, _PROMPT)))

    def error(got: jax.Array, want: jax.Array, size: jax.Array) -> jax.Array:
        return jnp.linalg.norm(got - want) / jnp.linalg.norm(size)

    plain = layer["k"] | {"bias": layer["k"]["bias"] - added}
    q_BTNH, k, plain = (rotate(heads(leaf), *angles) for leaf in (layer["q"], layer["k"], plain))
    k, plain, v = (jnp.swapaxes(x, 1, 2) for x in (k, plain, heads(layer["v"])))
    read = held(plain) + (k - plain)  # keys are kept without their bias
    exact, got = (
        attention(q_BTNH, fresh(*kv), length_B=length_B, scale=scale) for kv in ((k, v), (read, held(v)))
    )
    return jnp.array([error(read, k, k), error(read, k, plain), error(got, exact, exact)])


if __name__ == "__main__":
    start(main)
