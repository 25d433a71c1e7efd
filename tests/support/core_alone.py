"""Runs the core on a model that was pickled: `python core_alone.py FILE BLOCKED`, as a process of its own.

FILE has (config, params, tokens). BLOCKED "1": modules outside the core and the table of plugins cannot be
imported. It prints a line of JSON: the logits, the tokens of each function, and the library's loaded modules.
"""

import importlib.abc
import json
import pickle
import sys

import closure

CORE = {*closure.core(), "xinfer_jax.plugins"}


class Blocker(importlib.abc.MetaPathFinder):
    """Fails to import what is blocked."""

    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        is_package_of_core = any(module.startswith(f"{name}.") for module in CORE)
        if parts[0] == "xinfer_jax" and name not in CORE and not is_package_of_core:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


def main(path: str, blocked: str) -> None:
    if blocked == "1":
        sys.meta_path.insert(0, Blocker())
    import jax
    import numpy as np

    import xinfer_jax as xj

    with open(path, "rb") as file:
        config, params, tokens = pickle.load(file)
    prompts_BT = np.array(tokens, np.int32)
    rows, width = prompts_BT.shape
    lengths_B = np.array([width - i for i in range(rows)], np.int32)
    forward, decode_step = (
        jax.jit(f, static_argnums=1, static_argnames="impl") for f in (xj.forward, xj.decode_step)
    )
    logits_BTV, _ = forward(params, config, prompts_BT, impl="xla")
    cache = xj.init_cache(config, rows, 64)
    logits_BV, cache = xj.prefill(params, config, prompts_BT, lengths_B, cache, impl="xla")
    step_BV, _ = decode_step(params, config, np.argmax(logits_BV, -1).astype(np.int32), cache, impl="xla")
    sampling = xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.9)
    eos_ids = np.array([1], np.int32)
    key = jax.random.key(0)
    loop = xj.decode_loop(params, config, logits_BV, cache, key, sampling, eos_ids, 8, impl="xla")
    ids = [row[:length].tolist() for row, length in zip(prompts_BT, lengths_B, strict=True)]
    options = xj.GenerateOptions(max_tokens=8, sampling=sampling, eos_token_ids=(1,), impl="xla")
    generated = xj.generate(params, config, ids, options, key=key)
    found = dict(
        logits=[np.asarray(x, np.float64).round(6).tolist() for x in (logits_BTV[0], logits_BV, step_BV)],
        tokens=[loop.tokens_BT.tolist(), generated.tokens],
        modules=sorted(name for name in sys.modules if name.startswith("xinfer_jax")),
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
