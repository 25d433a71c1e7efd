"""Compiles the gradient of `score` for a model's shape, and prints its temporaries beside the least.

    python scripts/train_memory.py --model=qwen2.5-7b --rows=4 --tokens=4096
    pip install 'jax[cuda13]'                        # the CUDA plug-in, ptxas, cuDNN; no driver is needed
    python scripts/train_memory.py --model=qwen2.5-7b --rows=4 --tokens=4096 --target=h200

Layers are stacked and computed again in the backward pass. `least` is the sum of the inputs of all layers,
the temporaries of the largest layer's forward and backward pass compiled alone, and a chunk of float32 logits
with its gradient. The gradient of the parameters is a result, no temporary. `custom_calls` are those of
attention's kernels. Prints one JSON object as the last line.
"""

from launcher import start

# isort: split
import contextlib
import json
import os
import re
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported

import jax
import jax.numpy as jnp
from absl import flags
from bench.model_shapes import SHAPES, hf_config
from gpu.card_specs import CARDS
from gpu.programs import target_card, to_shapes

import xinfer_jax as xj
from xinfer_jax.config.model_config import ModelConfig
from xinfer_jax.config.run_config import DEFAULT
from xinfer_jax.families.reading import from_hf
from xinfer_jax.generation.scoring import MAX_LOGITS
from xinfer_jax.model.decoder import Inputs, embed_inputs
from xinfer_jax.model.decoder_layer import layer_kinds, run_layer
from xinfer_jax.model.extras import NO_EXTRAS
from xinfer_jax.weights.params import param_specs

MODEL = flags.DEFINE_string("model", "qwen2.5-0.5b", f"A directory with config.json, or {', '.join(SHAPES)}.")
TARGET = flags.DEFINE_enum("target", "cpu", ["cpu", *CARDS], "Device to compile for.")
DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Default: float32 on a CPU, else bfloat16.")
ROWS = flags.DEFINE_integer("rows", 4, "Rows.", 1)
TOKENS = flags.DEFINE_integer("tokens", 2048, "Tokens of each row.", 2)
STACKED = flags.DEFINE_bool("stacked", True, "Layers are stacked.")
REMAT = flags.DEFINE_bool("remat", True, "Layers are computed again in the backward pass.")


def main(argv: list[str]) -> None:
    config = from_hf(hf_config(MODEL.value))
    dtype = DTYPE.value or ("float32" if TARGET.value == "cpu" else "bfloat16")
    result = figures(config, dtype, TARGET.value, ROWS.value, TOKENS.value, STACKED.value, REMAT.value)
    for name, value in result.items():
        print(f"{name:14} {value / 2**30:8.3f} GiB" if isinstance(value, int) else f"{name:14} {value}")
    settings = {flag.name: flag.value for flag in (MODEL, TARGET, ROWS, TOKENS, STACKED, REMAT)}
    print(json.dumps({"jax": jax.__version__, "dtype": dtype, **settings, **result}))


def figures(
    config: ModelConfig, dtype: str, target: str, rows: int, tokens: int, stacked: bool = True,
    remat: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Bytes of temporaries, the parts of what is least, their ratio, and the attention kernels' calls."""
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), param_specs(config))
    tokens_BT = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    mesh = None if target == "cpu" else CARDS[target].mesh()
    with contextlib.nullcontext() if mesh is None else target_card(CARDS[target], mesh):
        given = params, tokens_BT
        params, tokens_BT = given if mesh is None else to_shapes(given, mesh)
        shown = jax.eval_shape(lambda p: xj.stack_layers(p, config), params) if stacked else params
        shown = shown if mesh is None else to_shapes(shown, mesh)
        how = "layer" if remat else None
        program = jax.jit(jax.grad(lambda p, t: xj.score(p, config, t, remat=how).sum()))
        compiled = program.lower(shown, tokens_BT).compile()
        layer = max(_layer_bytes(params, config, tokens_BT, kind) for kind in {*layer_kinds(config)})
    size = rows * tokens * config.hidden_size * jnp.dtype(dtype).itemsize
    parts = dict(
        inputs=config.num_hidden_layers * size,
        layer=layer,
        logits=2 * 4 * min(MAX_LOGITS, rows * tokens * config.vocab_size),
    )
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    calls = re.findall(r'custom_call_target="(__cudnn\$[^"]*)"', compiled.as_text())
    least = sum(parts.values())
    return dict(
        temporaries=temporaries, **parts, least=least, ratio=round(temporaries / least, 3), custom_calls=calls
    )


def _layer_bytes(params: Any, config: ModelConfig, tokens_BT: Any, kind: int) -> int:
    """Temporaries of the forward and backward pass of a layer of this kind."""

    def inputs(params: Any, tokens_BT: Any) -> Any:
        return embed_inputs(params, config, Inputs(tokens_BT), NO_EXTRAS, None, DEFAULT)

    x_BTD, positions, of_layers = jax.eval_shape(inputs, params, tokens_BT)
    caches = (None,) * len(config.layers[kind].mixers)

    def passes(layer: Any, x_BTD: Any, dy_BTD: Any, positions: Any, of_layer: Any) -> Any:
        def run(layer: Any, x_BTD: Any) -> Any:
            out = run_layer(layer, config, kind, x_BTD, positions, of_layer, caches, DEFAULT)
            return out.hidden_BTD

        return jax.vjp(run, layer, x_BTD)[1](dy_BTD)

    sharding = tokens_BT.sharding
    args = params["layers"][kind], x_BTD, x_BTD, positions, of_layers[kind]
    args = args if sharding is None else to_shapes(args, sharding.mesh)
    return jax.jit(passes).lower(*args).compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    start(main)
