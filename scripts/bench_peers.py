"""Compares the speed with transformers and llama.cpp: one random checkpoint, one engine after the other.

    pip install torch transformers llama-cpp-python
    python scripts/bench_peers.py --precisions=float32,bfloat16 --rounds=3
    python scripts/bench_peers.py --engines=xinfer_jax --engines=llama.cpp --gguf=model.gguf

Prints, as medians of the rounds: tokens per second of the prefill of a long prompt, of decoding one row, and
of decoding all rows. Decoding is greedy, and no engine stops early. transformers runs eagerly. llama.cpp
opens a GGUF file of the same shape, which has its own precision, and decodes one row (`llama-batched-bench`
of llama.cpp measures several). An engine that is not installed is skipped with a sentence.
"""

from launcher import InputError, start

# isort: split
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

import xinfer_jax as xj
from xinfer_jax.estimates.model_shapes import hf_config

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
SHORT = 26  # tokens of the prompts of rows that decode


def load_ours(precision: str, checkpoint: str) -> Generate:
    quantized = precision.startswith("int")
    how: dict[str, Any] = dict(quantize=precision) if quantized else dict(dtype=precision)
    model = xj.load_model(checkpoint, **how)

    def generate(prompts: Prompts, new: int) -> list[float]:
        options = xj.GenerateOptions(max_tokens=new, eos_token_ids=())
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


def reason_to_skip(engine: str, precision: str) -> str:
    """Returns why an engine cannot be measured. "": it can."""
    if importlib.util.find_spec(ENGINES[engine]) is None:
        return f"is not installed: pip install {INSTALL[engine]}"
    if engine == "llama.cpp" and not GGUF.value:
        return "needs a file: give --gguf"
    return f"has no {precision} here" if engine == "transformers" and precision.startswith("int") else ""


def rates(generate: Generate, rows: int, length: int) -> tuple[float, float]:
    """Returns tokens per second of prefill and decoding, as medians of the rounds after a first one."""
    draw = np.random.RandomState(0)
    vocab_size = hf_config(CONFIG.value)["vocab_size"]
    found = []
    for _ in range(1 + ROUNDS.value):
        prompts = draw.randint(0, vocab_size, (rows, length)).tolist()
        began = time.perf_counter()
        times = generate(prompts, NEW.value)
        prefill = rows * length / (times[0] - began)
        found.append((prefill, rows * (NEW.value - 1) / (times[-1] - times[0])))
    prefills, decodes = zip(*found[1:], strict=True)
    return statistics.median(prefills), statistics.median(decodes)


def measure(engine: str, precision: str, checkpoint: str) -> str:
    """Returns the cells of a line, or why there are none."""
    if why := reason_to_skip(engine, precision):
        return f"  {why}"
    load = {"xinfer_jax": load_ours, "transformers": load_transformers, "llama.cpp": load_llama_cpp}[engine]
    generate = load(precision, checkpoint)
    one = rates(generate, 1, PROMPT.value)[0], rates(generate, 1, SHORT)[1]
    several = f"{'-':>12}" if engine == "llama.cpp" else f"{rates(generate, ROWS.value, SHORT)[1]:12.1f}"
    return "".join(f"{x:12.1f}" for x in one) + several


def main(argv: list[str]) -> None:
    if unknown := {*PRECISIONS.value} - {"float32", "bfloat16", "int8", "int4"}:
        raise InputError(f"--precisions={unknown.pop()} is unknown: use float32, bfloat16, int8, int4")
    print(f"tokens per second{'prefill':>21}{'1 row':>12}{f'{ROWS.value} rows':>12}")
    with tempfile.TemporaryDirectory() as folder:
        config = xj.ModelConfig.from_hf(hf_config(CONFIG.value))
        xj.save_model(xj.init_params(config, jax.random.key(0), "bfloat16"), config, folder)
        for precision in PRECISIONS.value:
            for engine in WANTED.value:
                print(f"{f'{engine}, {precision}':26}{measure(engine, precision, folder)}", flush=True)


if __name__ == "__main__":
    start(main)
