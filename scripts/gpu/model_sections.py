"""Sections of check_gpu.py for whole models: logits of kernels and XLA along forced tokens, speeds by
bench.py, bits of an engine by check_engine.py, and the bundled checkpoint.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from script_paths import SCRIPTS

import xinfer_jax as xj
from gpu.agreement import Forced, ForcedModel, float32_params
from gpu.section_cases import Case, emulated, judged, max_error, random
from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.estimates.model_shapes import SHAPES
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention

QUESTION = "What is the capital of France?"
ANSWER = "Paris"


def logits(plan: SimpleNamespace) -> Iterator[Case]:
    """Yields cases of kernels against XLA, of 4- and 8-bit weights against the dequantized matrices in
    float32, and of float16. Models have 4 layers, which compile in a sixth of the time of all.
    """
    names = ("tiny",) if plan.tiny else ("qwen2.5-0.5b", "qwen2.5-7b")
    for name in names:
        hf = SHAPES[name] | dict(num_hidden_layers=1 if plan.tiny else 4)
        yield Case(f"{name}, logits against XLA", ForcedModel(plan, hf).agreement)
    hf = SHAPES[names[0]] | dict(num_hidden_layers=1 if plan.tiny else 4)
    formats = [("bfloat16", "int8"), ("bfloat16", "int4"), ("float16", None)]
    for dtype, quantize in formats[: 0 if plan.tiny else None]:
        model = ForcedModel(plan, hf, dtype, quantize)
        yield Case(f"{names[0]} {quantize or dtype}, logits against float32", partial(against_float32, model))


def against_float32(model: ForcedModel) -> dict[str, Any]:
    def want(tokens: Any, prompt: int) -> Forced:
        return model.forced(tokens, prompt, "xla", float32_params(model.params()), "float32")

    return model.agreement(want)


def run_program(name: str, *flags: str) -> dict[str, Any]:
    """Runs a program of scripts/ and returns the JSON object of its last line, and True if it succeeded."""
    done = subprocess.run([sys.executable, SCRIPTS / name, *flags], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{name} {' '.join(flags)}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"ok": done.returncode == 0}


def speeds(plan: SimpleNamespace, model: str, *flags: str) -> Iterator[Case]:
    """Yields a case of bench.py with 1 row and with 32."""
    sizes = ["--prompt_lengths=512", "--batch_sizes=1,32", "--new_tokens=128"]
    if plan.tiny:
        model = "tiny"
        sizes = ["--prompt_lengths=40", "--batch_sizes=1", "--new_tokens=8", "--repeats=1", "--probe_mib=8"]
    given = [f"--config={model}", "--dtype=bfloat16", "--requests=0", *sizes, *flags]
    yield Case(f"bench.py {' '.join([model, *flags])}", partial(bench_figures, given))


def bench_figures(given: list[str]) -> dict[str, Any]:
    """Returns medians of each batch, and their fractions of the limits that bench.py measures."""
    figures = {}
    for row in run_program("bench.py", *given)["rows"]:
        rows = row["rows"]
        for phase in ("prefill", "decode"):
            figures[f"{phase}_tok/s_{rows}"] = row[f"{phase}_tok_s"]["median"]
            figures[f"{phase}_of_limit_{rows}"] = row[phase]["of_limit"]["median"]
        figures[f"peak_GB_{rows}"] = row["peak_bytes"] / 1e9
    return figures


def kernels_and_xla(model: str, plan: SimpleNamespace) -> Iterator[Case]:
    yield from speeds(plan, model)
    if not plan.tiny:
        yield from speeds(plan, model, "--impl=xla")


def decoding(plan: SimpleNamespace) -> Iterator[Case]:
    """Yields cases of packed weights, sampling, and draft tokens by prompt look-up."""
    for flag in ("--quantize=int8", "--quantize=int4", "--sampled", "--draft=lookup"):
        yield from speeds(plan, "qwen2.5-0.5b", flag)


def engine(plan: SimpleNamespace) -> Iterator[Case]:
    """Yields cases of an engine: a request has the same bits alone and next to other requests."""
    sizes = ["--requests=6", "--longest=70"] if plan.tiny else ["--requests=100", "--longest=200", "--rows=8"]
    models = ("",) if plan.tiny else ("", "--cache_dtype=int8", "--families=gemma3,qwen3_moe")
    for model in models:
        given = [*sizes, "--compared=0", *filter(None, [model])]
        yield Case(f"check_engine.py {model}", partial(run_program, "check_engine.py", *given))


def bundled(plan: SimpleNamespace) -> Iterator[Case]:
    """Yields cases of the bundled checkpoint: its text, also by an engine, and gradients."""
    model = cache(partial(xj.load_model, dtype="float32" if plan.tiny else "bfloat16"))
    kernels = "xla" if plan.tiny else None  # emulated, this model would take minutes

    def text(impl: str | None) -> dict[str, Any]:
        answer = xj.generate_text(model(), QUESTION, xj.GenerateOptions(max_tokens=16, impl=impl))
        return {"text": answer, "ok": ANSWER in str(answer)}

    def text_of_engine(cache_dtype: str) -> dict[str, Any]:
        messages = [dict(role="user", content=QUESTION)]
        shape = dict(rows=2, capacity=128, cache_dtype=cache_dtype, impl=kernels)
        with xj.Engine(model(), **shape) as engine:
            (out,) = engine.generate([messages], [xj.GenerateOptions(max_tokens=16)])
        answer = model().tokenizer.decode(out.tokens[0])
        return {"text": answer, "ok": ANSWER in answer}

    for label, impl in (("kernels", kernels), ("xla", "xla")):
        yield Case(f"generate_text with {label}", partial(text, impl))
    for cache_dtype in ("bfloat16", "int8"):
        yield Case(f"an engine with {cache_dtype} pages", partial(text_of_engine, cache_dtype))
    yield Case("gradient of attention against XLA", partial(gradient, emulated(plan)))


def gradient(impl: str | None) -> dict[str, Any]:
    shapes = (2, 40, 4, 64), (2, 2, 40, 64), (2, 2, 40, 64)
    args = [random(i, shape, jnp.bfloat16) for i, shape in enumerate(shapes)]

    def loss(impl, q, k, v):
        visible = VisibleKeys(None, jnp.array([40, 17]))
        out = attention(q, uncached_kv(k, v), visible, Scoring(0.125), run_config=RunConfig(impl))
        return jnp.square(out.astype(jnp.float32)).sum()

    got, want = (jax.jit(jax.grad(partial(loss, impl), (0, 1, 2)))(*args) for impl in (impl, "xla"))
    return judged(max(map(max_error, got, want)), 2e-2, "dq, dk, dv, relative")


SECTIONS = {
    "logits": logits,
    "half_b": partial(kernels_and_xla, "qwen2.5-0.5b"),
    "seven_b": partial(kernels_and_xla, "qwen2.5-7b"),
    "decoding": decoding,
    "engine": engine,
    "bundled": bundled,
}
