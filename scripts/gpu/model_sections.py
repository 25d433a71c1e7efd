"""Sections of check_gpu.py for whole models: logits of kernels and XLA along forced tokens, generation end to
end, packed weights, sampling, draft tokens, the engine, and the bundled checkpoint.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from random import Random as random_of
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from soak.engine_requests import check, draw, random_model

import xinfer_jax as xj
from gpu.agreement import Forced, float32_params, greedy_agreement
from gpu.model_run import ModelRun, settings
from gpu.section_cases import Case, emulated, judged, limit_cases, max_error, random
from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.cache.paged import PAGE_SIZE
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention

SAMPLING = xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.8)
QUESTION = "What is the capital of France?"
ANSWER = "Paris"


def end_to_end(name: str) -> Callable[[SimpleNamespace], Iterator[Case]]:
    """Cases of one row and of 32, with kernels and with XLA."""

    def cases(plan: SimpleNamespace) -> Iterator[Case]:
        yield from limit_cases(plan)
        run = ModelRun(plan, settings("tiny" if plan.tiny else name))
        counts = (1,) if plan.tiny else (1, 32)
        kinds = [(rows, impl) for impl in (None, "xla") for rows in counts]
        yield Case(f"{name}, logits against XLA", run.agreement)
        yield Case("parallel compilation", partial(run.compile_in_parallel, kinds))
        for rows, impl in kinds:
            yield Case(f"{name}, {rows} rows, {impl or 'kernels'}", partial(run.measure, rows, impl))

    return cases


def half_b(plan: SimpleNamespace, *args: Any, checked: bool = False, **kwargs: Any) -> ModelRun:
    """The 0.5B shape; checked: of 4 layers, which compile in a sixth of the time."""
    layers = dict(num_hidden_layers=4) if checked and not plan.tiny else {}
    return ModelRun(plan, settings("tiny" if plan.tiny else "0.5b", **layers), *args, **kwargs)


def quantized(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of 4- and 8-bit weights against the dequantized matrices in float32, and of float16."""
    yield from limit_cases(plan)
    for dtype, quantize in (("bfloat16", "int8"), ("bfloat16", "int4"), ("float16", None)):
        label = f"0.5b {quantize or dtype}"
        checked = half_b(plan, dtype, quantize, checked=True)
        yield Case(f"{label}, logits against float32", partial(against_float32, checked))
        run = half_b(plan, dtype, quantize)
        for impl in (None,) if plan.tiny else (None, "xla"):
            yield Case(f"{label}, 1 row, {impl or 'kernels'}", partial(run.measure, 1, impl))


def against_float32(run: ModelRun) -> dict[str, Any]:
    def want(tokens: list, prompt: int) -> Forced:
        return run.forced(tokens, prompt, "xla", float32_params(run.params()), "float32")

    return run.agreement(want=want)


def decoding(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of the speed of sampling, and of draft tokens by prompt look-up."""
    yield from limit_cases(plan)
    yield from speeds(half_b(plan), "sampled", sampling=SAMPLING)
    yield from speeds(half_b(plan), "draft tokens", draft="lookup")


def speeds(run: ModelRun, label: str, **options: Any) -> Iterator[Case]:
    """Cases of 1 row and of 32 that decode by kernels. With --tiny of 2, which are compiled already."""
    key = jax.random.key(0)
    counts = (2,) if run.plan.tiny else (1, 32)
    compiled = partial(run.compile_in_parallel, [(rows, None) for rows in counts], key=key, **options)
    yield Case(f"{label}, parallel compilation", compiled)
    for rows in counts:
        yield Case(f"0.5b, {rows} rows, {label}", partial(run.measure, rows, None, key=key, **options))


# --- the engine ---------------------------------------------------------------------------------------------


def engine(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of an engine: its answers against a reference, its speed, and that a request has the same bits
    alone and beside other requests.
    """
    yield from limit_cases(plan)
    emulates_tpu = plan.tiny and plan.platform == "tpu"  # whose kernels have no bias of keys, as int8 needs
    for cache_dtype in ("bfloat16",) if emulates_tpu else ("bfloat16", "int8"):
        checked = half_b(plan, checked=True, cache_dtype=cache_dtype)
        yield Case(f"0.5b, {cache_dtype} pages, greedy tokens", partial(engine_tokens, checked))
        if cache_dtype == "bfloat16" or not plan.tiny:
            run = half_b(plan, cache_dtype=cache_dtype)
            rows = 2 if plan.tiny else 32
            yield Case(f"0.5b, {cache_dtype} pages, {rows} rows", partial(engine_speed, run, rows))
    yield Case("bundled: same bits alone", partial(same_bits, plan, xj.load_model))
    if plan.tiny:
        return
    for family in ("gemma3", "qwen3_moe"):
        yield Case(
            f"{family}: same bits alone", partial(same_bits, plan, partial(random_model, family, None))
        )


def start_engine(run: ModelRun, rows: int, longest: int) -> xj.Engine:
    """An engine for so many rows of that many new tokens."""
    capacity = run.prompt + longest
    pages = rows * -(-capacity // PAGE_SIZE) + 1
    shape = dict(rows=rows, capacity=capacity, pages=pages, prefix_cache=False)
    return xj.Engine(run.as_model(), **shape, cache_dtype=run.cache_dtype, impl=run.kernels)


def ask(engine: xj.Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy answers of `new` tokens each."""
    options = xj.GenerateOptions(new, eos_token_ids=())
    requests = engine.submit_many(prompts, options, live=False)
    return [request.result().tokens[0] for request in requests]


def engine_tokens(run: ModelRun) -> dict[str, Any]:
    prompts = run.prompts(2)
    with start_engine(run, 2, run.new) as engine:
        answers = ask(engine, prompts, run.new)
    return greedy_agreement(run.along(prompts, answers), answers, run.dtype)


def engine_speed(run: ModelRun, rows: int) -> dict[str, Any]:
    """Decode steps by the difference between long and short answers, which cost the same prefill."""
    few, more = (2, 10) if run.plan.tiny else (32, 160)
    prompts = run.prompts(rows)
    seconds = {}
    with start_engine(run, rows, more) as engine:
        ask(engine, prompts, more)  # compiles
        for new in (few, more):
            start = time.perf_counter()
            ask(engine, prompts, new)
            seconds[new] = time.perf_counter() - start
        compiling = engine.stats.warming_up
    step = (seconds[more] - seconds[few]) / (more - few)
    return {
        "decode_tok/s": rows / step,
        "TPOT_ms": 1e3 * step,
        **run.step_figures(rows, step, run.prompt + few, more - few, True),
        "prefill_tok/s": rows * run.prompt / (seconds[few] - few * step),
        "compiles_meanwhile": bool(compiling),
    }


def same_bits(plan: SimpleNamespace, model: Callable[[], xj.Model]) -> dict[str, Any]:
    rng = random_of(plan.seed)
    loaded = model()
    shape = dict(rows=2 if plan.tiny else 8, capacity=256, pages=7 if plan.tiny else 20, chunk=64)
    longest, count = (70, 6) if plan.tiny else (200, 100)
    requests = draw(rng, loaded.config.vocab_size, count, longest, shape)
    result = check(loaded, requests, shape, rng, 0, 0, 0.0)
    return result | {"ok": result["differ"] == 0}


# --- the bundled checkpoint ---------------------------------------------------------------------------------


def bundled(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of the bundled checkpoint: its text, and gradients."""
    model = cache(partial(xj.load_model, dtype="float32" if plan.tiny else "bfloat16"))
    kernels = "xla" if plan.tiny else None  # emulated, this model would take minutes

    def text(impl: str | None) -> dict[str, Any]:
        answer = xj.generate_text(model(), QUESTION, xj.GenerateOptions(16, impl=impl))
        return {"text": answer, "ok": ANSWER in str(answer)}

    for label, impl in (("kernels", kernels), ("xla", "xla")):
        yield Case(f"generate_text with {label}", partial(text, impl))
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
    "half_b": end_to_end("0.5b"),
    "seven_b": end_to_end("7b"),
    "quantized": quantized,
    "decoding": decoding,
    "engine": engine,
    "bundled": bundled,
}
