"""Part `tiers` of bench_engine.py: prompts from the device, host memory and files, against computing them."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import xinfer_jax as xj

_NEW = 4  # tokens of an answer
_GAPS = 32  # tokens of the row that decodes beside the prompts


def measure(model: xj.Model, prompts: Sequence[list[int]], rows: int, rounds: int) -> dict:
    """Medians of the seconds to the first token, and of their ratios; whether all answers are equal."""
    length = len(prompts[0])
    need = len(prompts) * (length // 64)
    shape = dict(rows=rows, capacity=length + 2 * _GAPS, pages=1 + need // 2, warm_up=True)
    with tempfile.TemporaryDirectory() as folder:
        beyond = dict(host_pages=need + 16)
        files = dict(host_pages=length // 64 + 8, page_directory=Path(folder) / "pages")
        with xj.Engine(model, **shape, **beyond | dict(page_directory=files["page_directory"])) as first:
            expected = [ask(first, ids)[1] for ids in prompts]
        engines = dict(
            computed=xj.Engine(model, **shape, prefix_cache=False),
            host=xj.Engine(model, **shape, **beyond), files=xj.Engine(model, **shape, **files),
        )  # fmt: skip
        for engine in engines.values():
            engine.__enter__()
        try:
            return results(engines, prompts, expected, rounds)
        finally:
            for engine in engines.values():
                engine.close()


def results(engines: dict[str, xj.Engine], prompts: Sequence[list[int]], expected: list, rounds: int) -> dict:
    """The result of `measure` by engines that compute, load from host memory, and read files."""
    for ids in prompts:  # to host memory
        ask(engines["host"], ids)
    seconds = []
    same = True
    for _ in range(rounds):
        for ids, answer in zip(prompts, expected, strict=True):
            asked = {name: ask(engine, ids) for name, engine in engines.items()}
            seconds.append([asked[name][0] for name in engines])
            same &= all(answer == other for _, other in asked.values())
    medians = np.median(seconds, 0)
    ratios = np.median(np.array(seconds)[:, :1] / np.array(seconds)[:, 1:], 0)
    result: dict = dict(equal=same, prompts=len(prompts), prompt_tokens=len(prompts[0]), rounds=rounds)
    result |= {f"{name}_seconds": float(x) for name, x in zip(engines, medians, strict=True)}
    result |= dict(computed_over_host=float(ratios[0]), computed_over_files=float(ratios[1]))
    for name, engine in engines.items():
        stats = engine.stats
        result[f"{name}_hits"] = [stats.hits, stats.host_hits, stats.file_hits]
        result[f"{name}_gaps"] = dict(alone=gaps(engine, ()), beside=gaps(engine, prompts))
    return result | dict(engine=engines["host"].about)


def ask(engine: xj.Engine, ids: list[int]) -> tuple[float, tuple]:
    """Seconds to the first token, and the bits of the answer."""
    request = engine.submit(ids, xj.GenerateOptions(_NEW, eos_token_ids=()), key=jax.random.key(0))
    out = request.result()
    return request.times["first"] - request.submitted, (out.tokens, out.logprobs)


def gaps(engine: xj.Engine, prompts: Sequence[list[int]]) -> dict[str, float]:
    """Quantiles of the seconds between tokens of a row, while prompts come one after another."""
    request = engine.submit([1, 2, 3], xj.GenerateOptions(_GAPS, eos_token_ids=()))
    left = list(prompts)
    running: xj.Request | None = None
    times = []
    for _ in request:
        times.append(time.perf_counter())
        if left and (running is None or running.ended):
            running = engine.submit(left.pop(), xj.GenerateOptions(_NEW, eos_token_ids=()))
    if running:
        running.result()
    return {name: float(np.quantile(np.diff(times), q)) for name, q in (("median", 0.5), ("p99", 0.99))}
