"""Writes the costs of the compiled programs of small checkpoints, as JSON: a process that
scripts/compare_behaviour.py starts for each of two checkouts, in its folder. It uses public names alone.

Arguments: the file to write, and the folder with the checkpoints: `programs/NAME`.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import compiler

import xinfer_jax as xj
from behaviour.saved_files import FORMATS

ROWS = 2
PROMPT = [*range(1, 21)]
SMALLEST = 20  # instructions: smaller programs are single operations around the others
OPTIONS = xj.GenerateOptions(max_tokens=8, eos_token_ids=())


def calls(model: xj.Model) -> dict[str, Callable[[], Any]]:
    """Returns the calls whose programs are compared."""
    params = model.params
    config = model.config
    tokens_BT = np.array([PROMPT] * ROWS, np.int32)
    num_tokens_B = np.full(ROWS, len(PROMPT), np.int32)
    logits_BV = np.zeros((ROWS, config.vocab_size), np.float32)
    new_cache = functools.partial(xj.init_cache, config, ROWS, 64)
    forward = jax.jit(lambda params: xj.forward(params, config, tokens_BT)[0])
    sampled = xj.SamplingConfig(temperature=1.0)

    def decode_loop() -> None:
        keys_B = jax.random.split(jax.random.key(0), ROWS)
        xj.decode_loop(params, config, logits_BV, new_cache(), keys_B, sampled, [2], 8)

    def engine() -> None:
        with xj.Engine(model, rows=ROWS, capacity=128, pages=8, warm_up=True) as engine:
            engine.submit(PROMPT, OPTIONS).result()

    return dict(
        forward=lambda: forward(params),
        prefill=lambda: xj.prefill(params, config, tokens_BT, num_tokens_B, new_cache()),
        decode_step=lambda: xj.decode_step(params, config, num_tokens_B, new_cache()),
        decode_loop=decode_loop,
        generate=lambda: xj.generate(params, config, [PROMPT] * ROWS, OPTIONS),
        engine=engine,
    )


def cost(executable: Any) -> dict[str, Any]:
    """Returns the numbers that `cost_analysis` and `memory_analysis` give of a program, and its size. The
    name of a program may change.
    """
    analysis = executable.cost_analysis()
    memory = executable.get_compiled_memory_stats()
    return dict(
        flops=int(analysis.get("flops", 0)),
        bytes_accessed=int(analysis.get("bytes accessed", 0)),
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        instructions=executable.hlo_modules()[0].to_string().count(" = "),
    )


def programs_of(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Returns the costs of the programs that a call compiles, in any thread."""
    found = []
    compile_module = compiler.compile_or_get_cached

    def record(*args: Any, **kwargs: Any) -> Any:
        executable = compile_module(*args, **kwargs)
        found.append(cost(executable))
        return executable

    jax.clear_caches()
    compiler.compile_or_get_cached = record
    try:
        call()
    finally:
        compiler.compile_or_get_cached = compile_module
    large = [program for program in found if program["instructions"] >= SMALLEST]
    return sorted(large, key=lambda program: [*program.values()])


def main(out: str, work: str) -> None:
    assert Path.cwd() in Path(xj.__file__).parents, "another checkout is imported"
    costs = {}
    for folder in sorted(Path(work, "programs").iterdir()):
        for format_name in ("float32", "bfloat16", "int8", "int4"):
            for name, call in calls(xj.load_model(folder, **FORMATS[format_name])).items():
                found = {str(i): program for i, program in enumerate(programs_of(call))}
                costs[f"programs: {folder.name} {format_name} {name}"] = found
    Path(out).write_text(json.dumps(costs, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
