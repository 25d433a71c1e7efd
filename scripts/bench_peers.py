"""Compares the speed with transformers and llama.cpp: one random checkpoint, each engine in its own process.

    pip install torch transformers llama-cpp-python
    python scripts/bench_peers.py --precisions=float32,bfloat16 --rounds=3
    python scripts/bench_peers.py --engines=xinfer_jax,llama.cpp --gguf=model.gguf

Prints, as medians of the rounds: tokens per second of the prefill of a long prompt, of decoding one row, and
of decoding all rows. Decoding is greedy, and no engine stops early. transformers runs eagerly. llama.cpp
opens a GGUF file of the same shape, which has its own precision, and decodes one row (`llama-batched-bench`
of llama.cpp measures several). An engine that is not installed is skipped with a sentence.
"""

from launcher import InputError, start

# isort: split
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from bench.model_shapes import hf_config

import xinfer_jax as xj

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[float]]  # prompts and new tokens -> the time of each token

ENGINES = {"xinfer_jax": "jax", "transformers": "transformers", "llama.cpp": "llama_cpp"}  # what each imports
INSTALL = {"transformers": "torch transformers", "llama.cpp": "llama-cpp-python"}
CONFIG = flags.DEFINE_string("config", "qwen2.5-0.5b", "A built-in shape, or a directory with config.json.")
WANTED = flags.DEFINE_multi_enum("engines", [*ENGINES], [*ENGINES], "Engines; repeat the flag for several.")
PRECISIONS = flags.DEFINE_list(
    "precisions", ["float32"], "float32, bfloat16; int8, int4 of xinfer_jax alone."
)
GGUF = flags.DEFINE_string("gguf", None, "The file that llama.cpp opens.")
PROMPT = flags.DEFINE_integer("prompt_tokens", 512, "Tokens of the long prompt.", 1)
ROWS = flags.DEFINE_integer("rows", 8, "Rows that are decoded together.", 2)
NEW = flags.DEFINE_integer("new_tokens", 32, "Tokens of each answer.", 2)
ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each engine is measured.", 1)
WORKER = flags.DEFINE_string("worker", None, "Internal: engine, precision and checkpoint, as JSON.")
SHORT = 26  # tokens of the prompts of rows that decode


def load_ours(precision: str, checkpoint: str) -> Generate:
    quantized = precision.startswith("int")
    how: dict[str, Any] = dict(quantize=precision) if quantized else dict(dtype=precision)
    model = xj.load_model(checkpoint, **how)

    def generate(prompts: Prompts, new: int) -> list[float]:
        options = xj.GenerateOptions(new, eos_token_ids=())
        times = []
        for _ in xj.stream(model.params, model.config, prompts, options):
            times.append(time.perf_counter())
        return times

    return generate


def load_transformers(precision: str, checkpoint: str) -> Generate:
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, precision))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None

    def generate(prompts: Prompts, new: int) -> list[float]:
        times: list[float] = []
        ids = torch.tensor(prompts)

        def note(ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        more: dict[str, Any] = dict(do_sample=False, stopping_criteria=[note], max_new_tokens=new)
        model.generate(ids, attention_mask=torch.ones_like(ids), **more)
        return times

    return generate


def load_llama_cpp(precision: str, checkpoint: str) -> Generate:
    import llama_cpp

    size = PROMPT.value + NEW.value + 1
    model = llama_cpp.Llama(GGUF.value, n_ctx=size, n_batch=size, n_threads=os.cpu_count(), verbose=False)

    def generate(prompts: Prompts, new: int) -> list[float]:
        times = []
        model.reset()
        model.eval(prompts[0])
        for _ in range(new):
            token = model.sample(temp=0.0)
            times.append(time.perf_counter())
            model.eval([token])
        return times

    return generate


def measure(engine: str, precision: str, checkpoint: str) -> dict[str, float | None]:
    """Returns the tokens per second of one engine: the second of two calls of each kind counts."""
    load = {"xinfer_jax": load_ours, "transformers": load_transformers, "llama.cpp": load_llama_cpp}[engine]
    generate = load(precision, checkpoint)
    draw = np.random.RandomState(0)
    vocab_size = hf_config(CONFIG.value)["vocab_size"]

    def rates(rows: int, length: int) -> tuple[float, float]:
        for _ in range(2):
            prompts = draw.randint(0, vocab_size, (rows, length)).tolist()
            began = time.perf_counter()
            times = generate(prompts, NEW.value)
        return rows * length / (times[0] - began), rows * (NEW.value - 1) / (times[-1] - times[0])

    several = None if engine == "llama.cpp" else rates(ROWS.value, SHORT)[1]
    return dict(prefill=rates(1, PROMPT.value)[0], decode=rates(1, SHORT)[1], rows=several)


def run(engine: str, precision: str, checkpoint: str) -> dict[str, float | None] | str:
    """Returns what `measure` gives in a process of its own, or why it gives nothing."""
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        f"--worker={json.dumps([engine, precision, checkpoint])}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else "no output"
    return json.loads(last) if done.returncode == 0 else f"failed: {last}"


def reason_to_skip(engine: str, precision: str) -> str:
    """Returns why an engine cannot be measured; "": it can."""
    if importlib.util.find_spec(ENGINES[engine]) is None:
        return f"is not installed: pip install {INSTALL[engine]}"
    if engine == "llama.cpp" and not GGUF.value:
        return "needs a file: give --gguf"
    return f"has no {precision} here" if engine == "transformers" and precision.startswith("int") else ""


def write_checkpoint(folder: Path) -> None:
    config = xj.from_hf(hf_config(CONFIG.value))
    xj.save_model(folder, xj.init_params(config, jax.random.key(0), "bfloat16"), config)


def report(name: str, results: Sequence[dict[str, float | None]]) -> None:
    medians = [statistics.median(r[key] for r in results) if results[0][key] else None for key in results[0]]
    cells = "".join(f"{'-' if x is None else f'{x:.1f}':>12}" for x in medians)
    print(f"{name:26}{cells}", flush=True)


def main(argv: list[str]) -> None:
    if WORKER.value:
        print(json.dumps(measure(*json.loads(WORKER.value))), flush=True)
        return
    if unknown := {*PRECISIONS.value} - {"float32", "bfloat16", "int8", "int4"}:
        raise InputError(f"--precisions={unknown.pop()} is unknown: use float32, bfloat16, int8, int4")
    print(f"tokens per second{'prefill':>21}{'1 row':>12}{f'{ROWS.value} rows':>12}")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "model")
        for precision in PRECISIONS.value:
            for engine in WANTED.value:
                if why := reason_to_skip(engine, precision):
                    print(f"{engine} {why}")
                    continue
                results = [run(engine, precision, f"{folder}/model") for _ in range(ROUNDS.value)]
                if failed := [result for result in results if isinstance(result, str)]:
                    print(f"{engine}, {precision}: {failed[0]}")
                    continue
                report(f"{engine}, {precision}", [r for r in results if isinstance(r, dict)])


if __name__ == "__main__":
    start(main)
