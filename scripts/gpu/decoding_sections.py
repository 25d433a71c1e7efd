"""Sections of check_gpu.py for ways to decode: packed weights, sampling, draft tokens, the engine. Each is
compared with a reference along its own answer, then timed.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random as random_of
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from soak.engine_requests import check, draw, random_model

import xinfer_jax as xj
from gpu.agreement import Forced, float32_params, greedy_agreement, sampled_agreement
from gpu.model_run import ModelRun, settings
from gpu.section_cases import Case, limit_cases
from xinfer_jax.cache.paged import PAGE_SIZE

# Of draft tokens that are those of plain decoding: from the first near-tie on, all may be rejected.
LEAST_ACCEPTANCE = 0.1
SAMPLING = xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.8)


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


def sampled(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of temperature, top-k and top-p: the draws of kernels and XLA with the same keys, and speed."""
    yield from limit_cases(plan)
    checked = half_b(plan, checked=True)

    def draws() -> dict[str, Any]:
        key = jax.random.key(plan.seed)
        answers = checked.generate(2, None, key, sampling=SAMPLING).tokens
        want = checked.along(checked.prompts(2), answers)
        return sampled_agreement(want, answers, SAMPLING, key, checked.dtype)

    yield Case("0.5b, the same draws as XLA", draws)
    yield from speeds(half_b(plan), "sampled", sampling=SAMPLING)


def speeds(run: ModelRun, label: str, **options: Any) -> Iterator[Case]:
    """Cases of 1 row and of 32 that decode by kernels. With --tiny of 2, which are compiled already."""
    key = jax.random.key(0)
    counts = (2,) if run.plan.tiny else (1, 32)
    compiled = partial(run.compile_in_parallel, [(rows, None) for rows in counts], key=key, **options)
    yield Case(f"{label}, parallel compilation", compiled)
    for rows in counts:
        yield Case(f"0.5b, {rows} rows, {label}", partial(run.measure, rows, None, key=key, **options))


def verified(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of draft tokens: the tokens of greedy decoding, and speed with prompt look-up."""
    yield from limit_cases(plan)
    checked = half_b(plan, checked=True)

    def same() -> dict[str, Any]:
        plain = checked.generate(2, None).tokens
        out = checked.generate(2, None, draft=known_answers(plain, checked.prompt))
        want = checked.along(checked.prompts(2), out.tokens)
        result = greedy_agreement(want, out.tokens, checked.dtype)
        acceptance = statistics.fmean(out.stats.acceptance)
        return result | {"acceptance": acceptance, "ok": result["ok"] and acceptance > LEAST_ACCEPTANCE}

    yield Case("0.5b, the tokens of greedy decoding", same)
    yield from speeds(half_b(plan), "draft tokens", draft="lookup")


def known_answers(answers: list[list[int]], prompt: int) -> Callable:
    """A draft function that proposes the tokens of these answers to prompts of so many tokens: look-up finds
    hardly any in the answers of random weights, and tokens after a rejected one are not compared.
    """
    answer_BT = np.array(answers, np.int32)

    def draft(history_BS: jax.Array, length_B: jax.Array, count: int) -> jax.Array:
        at_BT = length_B[:, None] - prompt + jnp.arange(count)
        return jnp.take_along_axis(jnp.asarray(answer_BT), at_BT.clip(0, answer_BT.shape[1] - 1), 1)

    return draft


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


SECTIONS = {"quantized": quantized, "sampled": sampled, "verified": verified, "engine": engine}
