"""Compares the time per token with and without the KV cache, as the sequence grows.

With a cache, a new token costs one pass over the weights and attention over the T keys before it: O(T·d² +
T²·d) for a sequence. Without one, every token recomputes all tokens before it: O(T²·d² + T³·d). The model has
random weights, because only the time matters.

    python scripts/compare_kv_cache.py --plot=kv_cache.png
"""

from launcher import start

# isort: split
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf

HIDDEN = flags.DEFINE_integer("hidden_size", 512, "Model width; heads are 64 wide.", lower_bound=64)
LAYERS = flags.DEFINE_integer("layers", 8, "Decoder layers.", lower_bound=1)
PROMPT = flags.DEFINE_integer("prompt_tokens", 29, "Tokens of the prompt.", lower_bound=1)
NEW = flags.DEFINE_integer("new_tokens", 100, "Tokens to generate.", lower_bound=2)
REPEATS = flags.DEFINE_integer("repeats", 3, "Number of runs; medians are reported.", lower_bound=1)
PLOT = flags.DEFINE_string("plot", None, "Write the two curves to this PNG (needs the plot extra).")


def main(argv: list[str]) -> None:
    params, config = random_model(HIDDEN.value, LAYERS.value)
    prompt = np.random.RandomState(0).randint(0, config.vocab_size, PROMPT.value).tolist()
    with_cache, without = (curve(params, config, prompt, NEW.value, use_cache) for use_cache in (True, False))
    if with_cache["tokens"] != without["tokens"]:
        raise SystemExit("the tokens with and without the cache differ: this is a bug")
    device = jax.devices()[0].device_kind
    print(
        f"{LAYERS.value} layers of width {HIDDEN.value}, float32, jax {jax.__version__} on {device}; ms per"
        " token, medians"
    )
    print(f"{'length':>8} {'with cache':>12} {'without':>12} {'ratio':>7}")
    for i in sorted({*range(0, NEW.value - 1, max(1, NEW.value // 10)), NEW.value - 2}):
        a = with_cache["ms"][i]
        b = without["ms"][i]
        print(f"{PROMPT.value + i + 2:8d} {a:12.2f} {b:12.2f} {b / a:7.1f}")
    a = with_cache["total_s"]
    b = without["total_s"]
    print(
        f"total for {PROMPT.value} + {NEW.value} tokens: {a:.3f} s with the cache, {b:.3f} s without:"
        f" {b / a:.1f} times the time"
    )
    if PLOT.value:
        plot(PLOT.value, with_cache["ms"], without["ms"])
    runs = {
        name: {key: run[key] for key in ("total_s", "ms")}
        for name, run in (("with_cache", with_cache), ("without_cache", without))
    }
    print(
        json.dumps(
            {
                "prompt_tokens": PROMPT.value,
                "new_tokens": NEW.value,
                "jax": jax.__version__,
                "device": device,
                **runs,
            }
        )
    )


def random_model(hidden: int, layers: int) -> tuple[dict, xj.ModelConfig]:
    shape = dict(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
    )
    config = from_hf(
        shape
        | dict(model_type="llama", vocab_size=8192, max_position_embeddings=1 << 20, tie_word_embeddings=True)
    )
    return jax.jit(xj.init_params, static_argnums=(0, 2))(config, jax.random.key(0), "float32"), config


def curve(params: dict, config: xj.ModelConfig, prompt: list[int], new: int, use_cache: bool) -> dict:
    """Median milliseconds of each token after the first, and the median total. A run before excludes
    compilation.

    Without the cache each sequence is padded to a multiple of 8: few programs are compiled, and padding costs
    little.
    """
    recompute = jax.jit(lambda params, tokens, last: xj.forward(params, config, tokens)[0][0, last].argmax())
    step = jax.jit(lambda params, token, cache: next_token(params, config, token, cache), donate_argnums=2)

    def run() -> tuple[list[int], list[float]]:
        tokens = list(prompt)
        times = []
        cache = xj.init_cache(config, 1, -(-(len(prompt) + new) // 8) * 8, "float32")
        for i in range(new):
            start = time.perf_counter()
            if not use_cache:
                padded = np.zeros((1, -(-len(tokens) // 8) * 8), np.int32)
                padded[0, : len(tokens)] = tokens
                token = recompute(params, padded, len(tokens) - 1)
            elif i == 0:
                logits, cache = xj.prefill(
                    params,
                    config,
                    np.array([prompt], np.int32),
                    np.array([len(prompt)], np.int32),
                    cache,
                    donate=True,
                )
                token = jnp.argmax(logits[0])
            else:
                token, cache = step(params, np.array([tokens[-1]], np.int32), cache)
            tokens.append(int(token))
            times.append(time.perf_counter() - start)
        return tokens[len(prompt) :], times

    run()
    runs = [run() for _ in range(REPEATS.value)]
    ms = [
        1e3 * statistics.median(column)
        for column in list(zip(*(times for _, times in runs), strict=True))[1:]
    ]
    return {"tokens": runs[0][0], "ms": ms, "total_s": statistics.median(sum(times) for _, times in runs)}


def next_token(
    params: dict, config: xj.ModelConfig, token_B: jax.Array, cache: xj.KVCache
) -> tuple[jax.Array, xj.KVCache]:
    logits, cache = xj.decode_step(params, config, token_B, cache)
    return logits[0].argmax(), cache


def plot(file: str, with_cache: list[float], without: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    length = range(PROMPT.value + 2, PROMPT.value + 2 + len(with_cache))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(length, without, label="without cache: recompute everything")
    axes.plot(length, with_cache, label="with KV cache")
    axes.set(
        xlabel="sequence length (tokens)",
        ylabel="ms per token",
        ylim=(0, None),
        title=f"{LAYERS.value} layers of width {HIDDEN.value}",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    print(f"wrote {file}")


if __name__ == "__main__":
    start(main)
