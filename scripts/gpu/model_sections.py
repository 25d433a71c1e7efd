"""Sections of check_gpu.py for models: generation end to end, with kernels and with XLA alone, with random
weights and with the bundled checkpoint.
"""

import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from os.path import commonprefix  # of any sequences
from pathlib import Path
from random import Random as random_of
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from engine_requests import check, draw, random_model
from jax import lax
from machine_limits import bytes_per_pass, decode_work, prefill_work
from model_shapes import SHAPES
from section_cases import Case, limit, limit_cases, max_error, random

import xinfer_jax as xj
from xinfer_jax.cache.layer_caches import uncached_kv
from xinfer_jax.config.model_config import from_hf
from xinfer_jax.model.attention import attention

# Two logits may swap if they differ by less than this fraction of the largest: models in bfloat16 differ by
# 0.016 from float32.
NEAR = 0.02
_SMALL = dict(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
_SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
_MIDDLE = dict(vocab_size=32001, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4)
_MIDDLE |= dict(num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=8192)
QUESTION = "What is the capital of France?"
ANSWER = "Paris"


# --- models and their outputs -------------------------------------------------------------------------------


def settings(name: str, **changes: Any) -> dict[str, Any]:
    return (SHAPES[f"qwen2.5-{name}"] if name != "tiny" else {"model_type": "qwen2", **_SMALL}) | changes


class ModelRun:
    """One model in one format, and the outputs that its cases share."""

    def __init__(self, plan: SimpleNamespace, hf: dict[str, Any], dtype: str, quantize: str | None = None):
        self.plan = plan
        self.config = from_hf(hf)
        self.quantize = quantize
        # On the CPU the KV cache is float32, and kernels need a single dtype.
        self.dtype, self.kernels = ("float32", "interpret") if plan.tiny else (dtype, None)
        self.prompt, self.new = (9, 4) if plan.tiny else (512, 128)
        self.capacity = None
        self.outputs: dict[tuple[int, str | None], xj.GenerateOutput] = {}
        self.params = cache(self._params)

    def _params(self) -> Any:
        key = jax.random.key(0, impl="rbg")
        return xj.init_params(self.config, key, self.dtype, self.quantize)

    def prompts(self, rows: int) -> list[list[int]]:
        draws = np.random.default_rng(self.plan.seed)
        return draws.integers(0, self.config.vocab_size, (rows, self.prompt)).tolist()

    def generate(self, rows: int, impl: str | None) -> xj.GenerateOutput:
        options = xj.GenerateOptions(self.new, impl=impl or self.kernels, capacity=self.capacity)
        out = xj.generate(self.params(), self.config, self.prompts(rows), options)
        self.outputs[rows, impl] = out
        return out

    def compile_in_parallel(self, kinds: list[tuple[int, str | None]]) -> dict[str, Any]:
        """Compiles all of them in parallel, one per thread: XLA compiles on one core."""
        self.params()
        with ThreadPoolExecutor(len(kinds)) as pool:
            outs = list(pool.map(lambda kind: self.generate(*kind), kinds))
        return {"each_compile_s": [round(out.stats.compile_seconds, 1) for out in outs]}

    def measure(self, rows: int, impl: str | None) -> dict[str, Any]:
        """Speeds as medians of three generations, and as fractions of the GPU's limits."""
        runs = [self.generate(rows, impl) for _ in range(2 if self.plan.tiny else 4)]
        stats = [out.stats for out in runs[1:]]
        prefill, step = (
            statistics.median(s)
            for s in zip(*((s.prefill_seconds, s.tpot_seconds) for s in stats), strict=True)
        )
        weights = bytes_per_pass(self.params())
        lengths = [self.prompt] * rows
        limits = {kind: limit(self.plan.tiny, kind) for kind in ("bytes", "flops")}
        read = decode_work(self.config, weights, 2, lengths, self.new).bytes
        flop = prefill_work(self.config, weights, lengths).flop
        finite = bool(np.isfinite(runs[-1].logprobs).all())
        return {
            "decode_tok/s": rows / step,
            "TPOT_ms": 1e3 * step,
            "of_copy": read / step / limits["bytes"],
            "prefill_tok/s": rows * self.prompt / prefill,
            "of_matmul": flop / prefill / limits["flops"],
            "peak_GB": stats[-1].peak_bytes / 1e9,
            "ok": finite,
        }

    def compare_with_xla(self, rows: int = 2) -> dict[str, Any]:
        """Compares the greedy ids of kernels and XLA; also reports which kernels ran."""
        got, want = (self.outputs.get((rows, impl)) or self.generate(rows, impl) for impl in (None, "xla"))
        near = near_ties(self.params(), self.config, self.prompts(rows)[:2], want.tokens[:2])
        used = xj.kernels_used(self.params(), self.config, self.kernels, rows)
        kernels = {kernel: selection.impl for kernel, selection in used.items()}
        return {"kernels": kernels} | compare_ids(got.tokens[:2], want.tokens[:2], near)


def near_ties(params, config: xj.ModelConfig, prompts: list[list[int]], answers: list[list[int]]) -> list:
    """For each token of an answer, whether the two best logits are so close that rounding may swap them."""
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tokens_BT = np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], np.int32)

    @jax.jit
    def near(params, tokens_BT):
        logits_BTV = xj.forward(params, config, tokens_BT, impl="xla")[0]
        return -jnp.diff(lax.top_k(logits_BTV, 2)[0])[..., 0] < NEAR * jnp.abs(logits_BTV).max(-1)

    near_BT = np.asarray(near(params, tokens_BT))
    return [
        near_BT[b, len(prompt) - 1 : len(row) - 1].tolist()
        for b, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]


def compare_ids(got: list[list[int]], want: list[list[int]], near: list[list[bool]]) -> dict[str, Any]:
    """Compares ids. Rows may diverge only where the two best logits are close; later ids are not compared."""
    parts = [len(commonprefix(pair)) for pair in zip(got, want, strict=True)]
    same = [part == len(want_T) for part, want_T in zip(parts, want, strict=True)]
    ok = all(equal or near_T[part] for equal, part, near_T in zip(same, parts, near, strict=True))
    excluded = sum(map(len, want)) - sum(parts)
    tolerance = f"ties below {NEAR} of the largest logit"
    return {"ids_compared": sum(parts), "excluded": excluded, "tolerance": tolerance, "ok": ok}


# --- sections -----------------------------------------------------------------------------------------------


def end_to_end(name: str) -> Callable[[SimpleNamespace], Iterator[Case]]:
    """Cases of one row and of 32, with kernels and with XLA."""

    def cases(plan: SimpleNamespace) -> Iterator[Case]:
        yield from limit_cases(plan)
        run = ModelRun(plan, settings("tiny" if plan.tiny else name), "bfloat16")
        counts = (1,) if plan.tiny else (1, 32)
        kinds = [(rows, impl) for impl in (None, "xla") for rows in counts]
        yield Case("parallel compilation", partial(run.compile_in_parallel, kinds), {"optional": True})
        for rows, impl in kinds:
            yield Case(f"{name}, {rows} rows, {impl or 'kernels'}", partial(run.measure, rows, impl))
        yield Case(f"{name}, same greedy ids as XLA", partial(run.compare_with_xla, counts[-1]))

    return cases


def quantized(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of 4- and 8-bit weights, and of float16."""
    yield from limit_cases(plan)
    for dtype, quantize in (("bfloat16", "int8"), ("bfloat16", "int4"), ("float16", None)):
        run = ModelRun(plan, settings("tiny" if plan.tiny else "0.5b"), dtype, quantize)
        label = quantize or dtype
        for impl in (None, "xla"):
            yield Case(f"0.5b {label}, 1 row, {impl or 'kernels'}", partial(run.measure, 1, impl))
        yield Case(f"0.5b {label}, same greedy ids as XLA", partial(run.compare_with_xla, 1))


def windows(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of sliding windows in contiguous and ring caches, soft caps, and capacities that are no multiple
    of 8.
    """
    sizes = _SMALL if plan.tiny else _MIDDLE
    mistral = dict(model_type="mistral")
    gemma2 = dict(model_type="gemma2", head_dim=64, query_pre_attn_scalar=64)
    kinds = {  # capacity, config
        "window shorter than the prompt": (None, mistral | dict(sliding_window=5 if plan.tiny else 300)),
        "rings": (1101 if plan.tiny else 2000, mistral | dict(sliding_window=100)),
        "soft caps and windows": (None, gemma2 | dict(sliding_window=100)),
        "odd capacity": (77 if plan.tiny else 1003, dict(model_type="qwen2")),
    }
    for dtype in ("bfloat16",) if plan.tiny else ("bfloat16", "float16"):
        for name, (capacity, more) in kinds.items():
            run = ModelRun(plan, sizes | more, dtype)
            run.capacity = capacity
            run.kernels = None
            yield Case(f"{name}, {dtype}, same greedy ids as XLA", run.compare_with_xla)


def bundled(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of the bundled checkpoint: its text, a row alone, a stream, a repeated sample, gradients."""
    model = cache(partial(xj.load_model, dtype="float32" if plan.tiny else "bfloat16"))
    kernels = "xla" if plan.tiny else None  # emulated, this model would take minutes
    prompts = [list(range(first, first + n)) for first, n in ((40, 9), (90, 4))]

    def text(impl: str | None) -> dict[str, Any]:
        answer = xj.generate_text(model(), QUESTION, xj.GenerateOptions(16, impl=impl))
        return {"text": answer, "ok": ANSWER in str(answer)}

    def generate(rows: int, function: Callable = xj.generate, **sampling: float) -> Any:
        sampling = xj.SamplingConfig(**sampling)
        options = xj.GenerateOptions(4 if plan.tiny else 48, sampling, impl=kernels, eos_token_ids=())
        return function(model().params, model().config, prompts[:rows], options, key=jax.random.key(0))

    def alone() -> dict[str, Any]:
        want = generate(2).tokens[:1]
        near = near_ties(model().params, model().config, prompts[:1], want)
        return compare_ids(generate(1).tokens, want, near)

    def stream() -> dict[str, Any]:
        return {"ok": [*map(list, zip(*generate(2, xj.stream), strict=True))] == generate(2).tokens}

    def repeat() -> dict[str, Any]:
        return {"ok": len({str(generate(2, temperature=1.0).tokens) for _ in range(2)}) == 1}

    for label, impl in (("kernels", kernels), ("xla", "xla")):
        yield Case(f"generate_text with {label}", partial(text, impl))
    yield Case("a row alone equals the row in a batch", alone)
    yield Case("a stream equals generate", stream)
    yield Case("a sample repeats with its key", repeat)
    yield Case("gradient of attention against XLA", partial(gradient, "interpret" if plan.tiny else None))


def engine(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of an engine: a request has the same bits alone and beside other requests."""

    def same(model: Callable[[], xj.Model]) -> dict[str, Any]:
        rng = random_of(plan.seed)
        loaded = model()
        shape = dict(rows=2 if plan.tiny else 8, capacity=256, pages=7 if plan.tiny else 20, chunk=64)
        longest, count = (70, 6) if plan.tiny else (200, 100)
        requests = draw(rng, loaded.config.vocab_size, count, longest, shape)
        result = check(loaded, requests, shape, rng, 0, 0, 0.0)
        return result | {"ok": result["differ"] == 0}

    yield Case("bundled: same bits alone", partial(same, xj.load_model))
    if plan.tiny:
        return
    for family in ("gemma3", "qwen3_moe"):
        yield Case(f"{family}: same bits alone", partial(same, partial(random_model, family, None)))


def gradient(impl: str | None) -> dict[str, Any]:
    shapes = (2, 40, 4, 64), (2, 2, 40, 64), (2, 2, 40, 64)
    args = [random(i, shape, jnp.bfloat16) for i, shape in enumerate(shapes)]

    def loss(impl, q, k, v):
        out = attention(q, uncached_kv(k, v), length_B=jnp.array([40, 17]), scale=0.125, impl=impl)
        return jnp.square(out.astype(jnp.float32)).sum()

    got, want = (jax.jit(jax.grad(partial(loss, impl), (0, 1, 2)))(*args) for impl in (impl, "xla"))
    worst = max(map(max_error, got, want))
    return {
        "compared": "dq, dk, dv, relative",
        "worst": worst,
        "tolerance": 2e-2,
        "ok": worst <= 2e-2,
    }


# --- launches of a decode step ------------------------------------------------------------------------------


def layers(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases that count the GPU kernels of a compiled decode step per layer, and time them."""
    name = "tiny" if plan.tiny else "0.5b"
    for impl in (None, "xla"):
        yield Case(f"{name}, {impl or 'kernels'}: compiled", partial(per_layer, plan, name, impl))
    yield Case(f"{name}: profile", partial(profile, plan, name), {"optional": True})


def per_layer(plan: SimpleNamespace, name: str, impl: str | None) -> dict[str, Any]:
    """The operations per layer of a compiled decode step by kind, from programs that differ by two layers."""
    few, more = (
        _operations(ModelRun(plan, settings(name, num_hidden_layers=n), "bfloat16"), impl) for n in (1, 3)
    )
    layer = {kind: n / 2 for kind, n in (more - few).items()}
    return {
        "per_layer": sum(layer.values()),
        "kinds": layer,
        "beside_layers": sum((few - Counter(layer)).values()),
    }


def _operations(run: ModelRun, impl: str | None) -> Counter:
    params = jax.eval_shape(run._params)
    kv_cache = jax.eval_shape(lambda: xj.init_cache(run.config, 1, 1024, run.dtype))

    def step(params, token_B, kv_cache):
        return xj.decode_step(params, run.config, token_B, kv_cache, impl=impl or run.kernels)

    token_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    text = jax.jit(step, donate_argnums=2).lower(params, token_B, kv_cache).compile().as_text()
    operation = re.compile(r"  (?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(")
    kinds = Counter()
    launched = False
    for line in text.splitlines():
        if line and not line[0].isspace():  # start of a computation; those of fusions launch nothing
            launched = line.startswith("ENTRY ") or "command_buffer" in line
        elif launched and (match := operation.match(line)):
            kinds[match[1]] += 1
    free = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "call")
    return Counter({kind: n for kind, n in kinds.items() if kind not in free})


def profile(plan: SimpleNamespace, name: str) -> dict[str, Any]:
    """The GPU kernels of one generation of one row, sorted by their total time."""
    run = ModelRun(plan, settings(name), "bfloat16")
    run.generate(1, None)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run.generate(1, None)
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        counts = Counter()
        times = Counter()
        gpus = (plane for plane in data.planes if plane.name.startswith("/device:GPU"))
        streams = (line for plane in gpus for line in plane.lines if line.name.startswith("Stream"))
        for event in (event for stream in streams for event in stream.events):
            counts[event.name] += 1
            times[event.name] += event.duration_ns / 1e6
    top = {name[:60]: f"{counts[name]} in {ms:.3f} ms" for name, ms in times.most_common(15)}
    return {"launches_per_step": sum(counts.values()) / run.new, "busy_ms": sum(times.values()), "top": top}


SECTIONS = {
    "half_b": end_to_end("0.5b"),
    "seven_b": end_to_end("7b"),
    "quantized": quantized,
    "windows": windows,
    "bundled": bundled,
    "engine": engine,
    "layers": layers,
}
