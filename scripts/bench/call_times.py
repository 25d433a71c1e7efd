"""Times calls of a random model: a process that scripts/bench_pairs.py starts in each of two checkouts. It
uses public names alone. Arguments: a file with a config.json, the format of the weights.

Each line that it reads is the name of a call. It answers with the call's seconds.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import xinfer_jax as xj


def calls(params: Any, config: xj.ModelConfig) -> dict[str, Callable[[], Any]]:
    """Returns the calls by name: `stream` and `generate` of 26 + 24 tokens, a prompt of 300, and 16 requests
    to an engine.
    """
    random = np.random.RandomState(0)
    prompts = [random.randint(0, config.vocab_size, 26).tolist() for _ in range(8)]
    long_prompt = random.randint(0, config.vocab_size, 300).tolist()
    options = xj.GenerateOptions(max_tokens=24, eos_token_ids=())

    @functools.cache
    def engine() -> xj.Engine:
        model = xj.Model(params, config)
        return xj.Engine(model, rows=8, prefix_cache=False, warm_up=True)

    return dict(
        stream=lambda: list(xj.stream(params, config, prompts[:1], options)),
        stream_8=lambda: list(xj.stream(params, config, prompts, options)),
        generate=lambda: xj.generate(params, config, prompts[:1], options),
        generate_8=lambda: xj.generate(params, config, prompts, options),
        prompt=lambda: xj.generate(
            params, config, [long_prompt], xj.GenerateOptions(max_tokens=1, eos_token_ids=())
        ),
        engine_8=lambda: engine().generate(prompts * 2, [options] * 16),
    )


def main(config_file: str, quantize: str) -> None:
    assert Path.cwd() in Path(xj.__file__).parents, "another checkout is imported"
    config = xj.ModelConfig.from_hf(json.loads(Path(config_file).read_text(encoding="utf-8")))
    weights = None if quantize == "none" else quantize
    params = jax.block_until_ready(xj.init_params(config, jax.random.key(0), "float32", weights))
    by_name = calls(params, config)
    for line in sys.stdin:
        start = time.perf_counter()
        by_name[line.strip()]()
        print(time.perf_counter() - start, flush=True)
    os._exit(0)  # without waiting for the engine's threads


if __name__ == "__main__":
    main(*sys.argv[1:])
