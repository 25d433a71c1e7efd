"""Measures one model over meshes of several sizes: operations, memory traffic and communication of a device
per token, and speed.

    python scripts/bench_meshes.py --config=qwen2.5-7b --devices=1,2,4

Prints one JSON line per size. For the compiled decode step, per device: operations, bytes of memory, bytes
that collectives return. Then tokens per second of prefill and of decoding (medians of interleaved rounds),
also relative to the first size. On a CPU the devices are virtual and share its cores, so no speed is
reported.
"""

from launcher import InputError, start

# isort: split
import json
import os
import re
import statistics

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from absl import flags  # noqa: E402
from model_shapes import SHAPES, hf_config  # noqa: E402

import xinfer_jax as xj  # noqa: E402
from xinfer_jax.families.reading import from_hf  # noqa: E402
from xinfer_jax.sharding import concrete_mesh_of  # noqa: E402
from xinfer_jax.weights.params import activation_dtype  # noqa: E402

CONFIG = flags.DEFINE_string(
    "config", "qwen2.5-0.5b", f"A directory with config.json, or one of {', '.join(SHAPES)}."
)
DEVICES = flags.DEFINE_list("devices", ["1", "2"], "Sizes of the mesh.")
QUANTIZE = flags.DEFINE_enum("quantize", None, ["int8", "int4"], "Format of the weights.")
ROWS = flags.DEFINE_integer("rows", 1, "Rows of the batch.", lower_bound=1)
PROMPT = flags.DEFINE_integer("prompt", 512, "Tokens of a prompt.", lower_bound=1)
NEW = flags.DEFINE_integer("new_tokens", 64, "Tokens of an answer.", lower_bound=2)
ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds; medians are reported.", lower_bound=1)
_BITS = dict(pred=8, s32=32, u32=32, f32=32, bf16=16, f16=16, s8=8, u8=8)


def main(argv: list[str]) -> None:
    config = from_hf(hf_config(CONFIG.value))
    local = jax.devices()
    sizes = [int(size) for size in DEVICES.value if size.isdigit() and 0 < int(size) <= len(local)]
    if len(sizes) < len(DEVICES.value):
        raise InputError(f"--devices={','.join(DEVICES.value)}: give numbers from 1 to {len(local)}")
    full = xj.init_params(config, jax.random.key(0), quantize=QUANTIZE.value)
    trees = {1: full} if 1 in sizes else {}
    for size in set(sizes) - {1}:
        mesh = jax.make_mesh((size,), ("model",), devices=local[:size])
        trees[size] = jax.device_put(full, xj.shardings(config, mesh, like=full))
    options = xj.GenerateOptions(NEW.value, eos_token_ids=())
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS.value, PROMPT.value)).tolist()
    rates: dict[int, list] = {size: [] for size in sizes}
    rounds = 0 if local[0].platform == "cpu" else ROUNDS.value + 1  # the first round compiles
    for _ in range(rounds):
        for size, params in trees.items():
            stats = xj.generate(params, config, prompts, options).stats
            tokens = ROWS.value * PROMPT.value, ROWS.value * stats.decode_steps
            rates[size].append((tokens[0] / stats.prefill_seconds, tokens[1] / stats.decode_seconds))
    for size, params in sorted(trees.items()):
        line = dict(devices=size, device=local[0].device_kind, **decode_step_costs(params, config))
        if rates[size]:
            first, this = (
                [statistics.median(x) for x in zip(*rates[n][1:], strict=True)] for n in (sizes[0], size)
            )
            line |= dict(prompt_tok_s=this[0], decode_tok_s=this[1])
            line |= dict(prompt_times=this[0] / first[0], decode_times=this[1] / first[1])
        print(
            json.dumps({name: round(x, 3) if isinstance(x, float) else x for name, x in line.items()}),
            flush=True,
        )


def decode_step_costs(params, config) -> dict[str, float]:
    """The costs of one decode step on each device, from the compiled program."""
    mesh = concrete_mesh_of(params)
    cache = xj.init_cache(config, ROWS.value, PROMPT.value + NEW.value, activation_dtype(params), mesh)
    token_B = np.zeros(ROWS.value, np.int32)
    compiled = jax.jit(xj.decode_step, static_argnums=1).lower(params, config, token_B, cache).compile()
    cost = compiled.cost_analysis()
    text = compiled.as_text()
    results = re.findall(
        r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)\(", text
    )
    parts = [part for shapes in results for part in re.findall(r"(\w+)\[([\d,]*)\]", shapes)]
    sizes = [
        _BITS[kind] // 8 * int(np.prod([int(n) for n in shape.split(",") if n])) for kind, shape in parts
    ]
    return dict(
        gflop=cost["flops"] / 1e9,
        gb=cost["bytes accessed"] / 1e9,
        collectives=len(results),
        said_kb=sum(sizes) / 1e3,
    )


if __name__ == "__main__":
    start(main)
