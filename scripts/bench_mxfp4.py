"""Decodes a mixture of experts in MXFP4, int4 and bfloat16, in interleaved rounds of calls of one row, and
counts the bytes of a step.

    python scripts/bench_mxfp4.py --config=gpt-oss-20b --layers=4

Everything but the experts is in --dtype, with random numbers; the vocabulary is small, so that layers take
the time. Prints a JSON line for each format: milliseconds a token, the bytes that a step has to read (of the
chosen experts, and of all else), and those that the operations of the compiled step read: of arrays, and with
what they have written themselves.
"""

from launcher import start

# isort: split
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from hlo_text import parse_module
from machine_limits import spread
from model_shapes import hf_config
from program_counts import count_program

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.weights.mxfp4 import Mxfp4Weight, mxfp4_struct
from xinfer_jax.weights.params import Params, tree_bytes
from xinfer_jax.weights.quantization import quantized_leaf

CONFIG = flags.DEFINE_string("config", "gpt-oss-20b", "A built-in shape, or a directory with config.json.")
LAYERS = flags.DEFINE_integer("layers", 4, "Number of layers.", lower_bound=1)
VOCAB = flags.DEFINE_integer("vocab", 1024, "Size of the vocabulary.", lower_bound=1)
DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Dtype of all but the experts.")
FORMATS = flags.DEFINE_list("formats", ["mxfp4", "int4", "bfloat16"], "Formats of the experts.")
NEW = flags.DEFINE_integer("new_tokens", 32, "Tokens of a call.", lower_bound=2)
ROUNDS = flags.DEFINE_integer("rounds", 10, "Rounds of calls, after one that compiles.", lower_bound=1)


def main(argv: list[str]) -> None:
    hf = hf_config(CONFIG.value) | dict(num_hidden_layers=LAYERS.value, vocab_size=VOCAB.value)
    hf.pop("layer_types", None)
    config = from_hf(hf)
    models = {kind: params for kind, params in create(config)}
    times: dict[str, list[float]] = {kind: [] for kind in models}
    options = xj.GenerateOptions(NEW.value, eos_token_ids=())
    for _ in range(ROUNDS.value + 1):
        for kind, params in models.items():
            out = xj.generate(params, config, [[1, 2, 3]], options)
            times[kind].append(1e3 * out.stats.tpot_seconds)
    for kind, params in models.items():
        line = dict(experts=kind, milliseconds=spread(times[kind][1:])) | step_bytes(params, config)
        print(json.dumps(line), flush=True)


def create(config: xj.ModelConfig) -> Iterator[tuple[str, Params]]:
    """The parameters with experts in each format, which share all else. The experts of a layer are alike."""
    (layer, *_) = config.layers
    experts = dataclasses.replace(config.experts, num_experts=1, num_experts_per_tok=1)
    one = dataclasses.replace(layer, experts=experts)
    few = dataclasses.replace(config, layers=(one,) * len(config.layers))
    params = xj.init_params(few, jax.random.key(0), DTYPE.value)
    key = jax.random.key(1)
    for layer, router_key in zip(params["layers"], jax.random.split(key, LAYERS.value), strict=True):
        shape = (config.num_experts, config.hidden_size)
        layer["router"] = {"weight": jax.random.normal(router_key, shape, DTYPE.value)}
    for kind in FORMATS.value:
        layers = []
        for layer in params["layers"]:
            experts = {
                name: jax.tree.map(
                    lambda x: jnp.asarray(np.repeat(np.asarray(x), config.num_experts, 0)),
                    leaf | {"weight": in_format(leaf["weight"], kind)},
                )
                for name, leaf in layer["experts"].items()
            }
            layers.append(layer | {"experts": experts})
        yield kind, params | {"layers": tuple(layers)}


def in_format(matrix_1OI: jax.Array, kind: str) -> Any:
    """The matrix of one expert, with a first axis."""
    if kind == "mxfp4":
        struct = mxfp4_struct(matrix_1OI.shape)
        draw = np.random.default_rng(0).integers
        values = draw(0, 256, struct.values.shape, np.uint8)
        return Mxfp4Weight(values, draw(118, 122, struct.scale.shape, np.uint8))  # type: ignore[arg-type]
    if kind == "int4":
        return jax.tree.map(lambda x: x[None], quantized_leaf(np.asarray(matrix_1OI[0]), "experts", "int4"))
    return matrix_1OI.astype(kind)


def step_bytes(params: Params, config: xj.ModelConfig) -> dict[str, float]:
    """The bytes that a decode step has to read, those that its operations read, and the ratio."""
    experts = tree_bytes([layer["experts"] for layer in params["layers"]])
    chosen = experts * config.num_experts_per_tok // config.num_experts
    rest = tree_bytes(params) - experts - tree_bytes(params["embed"])
    cache = xj.init_cache(config, 1, 64)
    step = jax.jit(xj.decode_step, static_argnames="config", donate_argnames="cache")
    compiled = step.lower(params, config, jnp.zeros(1, jnp.int32), cache).compile()
    launches = count_program(parse_module(compiled.as_text())).launches
    read = sum(launch.times * launch.read for launch in launches)
    written = sum(launch.times * launch.written for launch in launches)  # and read once
    found = dict(chosen_bytes=chosen, other_bytes=rest, read_bytes=read - written, temporary_bytes=written)
    return {name: round(x) for name, x in found.items()} | dict(ratio=(read - written) / (chosen + rest))


if __name__ == "__main__":
    start(main)
