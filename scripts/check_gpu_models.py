"""The models' sections of check_gpu.py: generation end to end, by kernels and by XLA alone, with random
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
from bench_limits import bytes_per_pass, decode_work, prefill_work
from bench_shapes import SHAPES
from check_engine_requests import check, draw, random_model
from check_gpu_measure import Case, error_of, limit, limit_cases, random
from jax import lax

import xinfer_jax as xj
from xinfer_jax.cache.kinds import fresh
from xinfer_jax.config.model_config import from_hf
from xinfer_jax.model.attention import attention

# Logits this near, as a share of the largest, may change places: whole models in bfloat16 differ by 0.016
# from float32.
NEAR = 0.02
_SMALL = dict(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
_SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
_MIDDLE = dict(vocab_size=32001, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4)
_MIDDLE |= dict(num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=8192)
QUESTION = "What is the capital of France?"
ANSWER = "Paris"


# --- models and what they give ------------------------------------------------------------------------------


def settings(name: str, **changes: Any) -> dict[str, Any]:
    return (SHAPES[f"qwen2.5-{name}"] if name != "tiny" else {"model_type": "qwen2", **_SMALL}) | changes


class Run:
    """One model in one format, and the generations that its cases share."""

    def __init__(self, plan: SimpleNamespace, hf: dict[str, Any], dtype: str, quantize: str | None = None):
        self.plan = plan
        self.config = from_hf(hf)
        self.quantize = quantize
        # On the CPU the cache is float32, and kernels want one dtype.
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

    def compiled(self, kinds: list[tuple[int, str | None]]) -> dict[str, Any]:
        """Compiles all of them side by side, one per thread: XLA compiles on one core."""
        self.params()
        with ThreadPoolExecutor(len(kinds)) as pool:
            outs = list(pool.map(lambda kind: self.generate(*kind), kinds))
        return {"each_compile_s": [round(out.stats.compile_seconds, 1) for out in outs]}

    def figures(self, rows: int, impl: str | None) -> dict[str, Any]:
        """Rates of the median of three generations, and which part they are of what the card can do."""
        runs = [self.generate(rows, impl) for _ in range(1 + (1 if self.plan.tiny else 3))]
        stats = [out.stats for out in runs[1:]]
        prefill, step = (
            statistics.median(s)
            for s in zip(*((s.prefill_seconds, s.tpot_seconds) for s in stats), strict=True)
        )
        weights = bytes_per_pass(self.params())
        lengths = [self.prompt] * rows
        most = {kind: limit(self.plan.tiny, kind) for kind in ("bytes", "flops")}
        read = decode_work(self.config, weights, 2, lengths, self.new).bytes
        flop = prefill_work(self.config, weights, lengths).flop
        finite = bool(np.isfinite(runs[-1].logprobs).all())
        return {
            "decode_tok/s": rows / step,
            "TPOT_ms": 1e3 * step,
            "of_copy": read / step / most["bytes"],
            "prefill_tok/s": rows * self.prompt / prefill,
            "of_matmul": flop / prefill / most["flops"],
            "peak_GB": stats[-1].peak_bytes / 1e9,
            "ok": finite,
        }

    def agree(self, rows: int = 2) -> dict[str, Any]:
        """Greedy ids by kernels and by XLA; which kernels they were."""
        got, want = (self.outputs.get((rows, impl)) or self.generate(rows, impl) for impl in (None, "xla"))
        near = near_ties(self.params(), self.config, self.prompts(rows)[:2], want.tokens[:2])
        used = xj.kernels_used(self.params(), self.config, self.kernels, rows)
        kernels = {kernel: selection.impl for kernel, selection in used.items()}
        return {"kernels": kernels} | agreement(got.tokens[:2], want.tokens[:2], near)


def near_ties(params, config: xj.ModelConfig, prompts: list[list[int]], answers: list[list[int]]) -> list:
    """For each token of an answer, whether the two best logits lie so near that rounding may exchange
    them.
    """
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


def agreement(got: list[list[int]], want: list[list[int]], near: list[list[bool]]) -> dict[str, Any]:
    """Rows may part only where the two best logits are near; what follows is not compared."""
    parts = [len(commonprefix(pair)) for pair in zip(got, want, strict=True)]
    same = [part == len(want_T) for part, want_T in zip(parts, want, strict=True)]
    ok = all(whole or near_T[part] for whole, part, near_T in zip(same, parts, near, strict=True))
    excluded = sum(map(len, want)) - sum(parts)
    tolerance = f"ties below {NEAR} of the largest logit"
    return {"ids_compared": sum(parts), "excluded": excluded, "tolerance": tolerance, "ok": ok}


# --- sections -----------------------------------------------------------------------------------------------


def end_to_end(name: str) -> Callable[[SimpleNamespace], Iterator[Case]]:
    """One row and 32, by kernels and by XLA."""

    def cases(plan: SimpleNamespace) -> Iterator[Case]:
        yield from limit_cases(plan)
        run = Run(plan, settings("tiny" if plan.tiny else name), "bfloat16")
        counts = (1,) if plan.tiny else (1, 32)
        kinds = [(rows, impl) for impl in (None, "xla") for rows in counts]
        yield Case("compiled side by side", partial(run.compiled, kinds), {"optional": True})
        for rows, impl in kinds:
            yield Case(f"{name}, {rows} rows, {impl or 'kernels'}", partial(run.figures, rows, impl))
        yield Case(f"{name}, greedy ids as by xla", partial(run.agree, counts[-1]))

    return cases


def quantized(plan: SimpleNamespace) -> Iterator[Case]:
    """4- and 8-bit weights, and float16."""
    yield from limit_cases(plan)
    for dtype, quantize in (("bfloat16", "int8"), ("bfloat16", "int4"), ("float16", None)):
        run = Run(plan, settings("tiny" if plan.tiny else "0.5b"), dtype, quantize)
        label = quantize or dtype
        for impl in (None, "xla"):
            yield Case(f"0.5b {label}, 1 row, {impl or 'kernels'}", partial(run.figures, 1, impl))
        yield Case(f"0.5b {label}, greedy ids as by xla", partial(run.agree, 1))


def windows(plan: SimpleNamespace) -> Iterator[Case]:
    """Sliding windows in the cache and as rings, soft caps, capacities that are no multiple of 8."""
    sizes = _SMALL if plan.tiny else _MIDDLE
    mistral = dict(model_type="mistral")
    gemma2 = dict(model_type="gemma2", head_dim=64, query_pre_attn_scalar=64)
    kinds = {  # capacity, config
        "window below the prompt": (None, mistral | dict(sliding_window=5 if plan.tiny else 300)),
        "rings": (1101 if plan.tiny else 2000, mistral | dict(sliding_window=100)),
        "soft caps and windows": (None, gemma2 | dict(sliding_window=100)),
        "odd capacity": (77 if plan.tiny else 1003, dict(model_type="qwen2")),
    }
    for dtype in ("bfloat16",) if plan.tiny else ("bfloat16", "float16"):
        for name, (capacity, more) in kinds.items():
            run = Run(plan, sizes | more, dtype)
            run.capacity = capacity
            run.kernels = None
            yield Case(f"{name}, {dtype}, greedy ids as by xla", run.agree)


def bundled(plan: SimpleNamespace) -> Iterator[Case]:
    """The bundled checkpoint: its text, and that rows, streams and samples are what they are alone."""
    model = cache(partial(xj.load_model, dtype="float32" if plan.tiny else "bfloat16"))
    kernels = "xla" if plan.tiny else None  # emulated, this model would take minutes
    prompts = [list(range(first, first + n)) for first, n in ((40, 9), (90, 4))]

    def text(impl: str | None) -> dict[str, Any]:
        answer = xj.generate_text(model(), QUESTION, xj.GenerateOptions(16, impl=impl))
        return {"text": answer, "ok": ANSWER in str(answer)}

    def ask(rows: int, generate: Callable = xj.generate, **sampling: float) -> Any:
        sampling = xj.SamplingConfig(**sampling)
        options = xj.GenerateOptions(4 if plan.tiny else 48, sampling, impl=kernels, eos_token_ids=())
        return generate(model().params, model().config, prompts[:rows], options, key=jax.random.key(0))

    def alone() -> dict[str, Any]:
        want = ask(2).tokens[:1]
        near = near_ties(model().params, model().config, prompts[:1], want)
        return agreement(ask(1).tokens, want, near)

    def streamed() -> dict[str, Any]:
        return {"ok": [*map(list, zip(*ask(2, xj.stream), strict=True))] == ask(2).tokens}

    def again() -> dict[str, Any]:
        return {"ok": len({str(ask(2, temperature=1.0).tokens) for _ in range(2)}) == 1}

    for label, impl in (("kernels", kernels), ("xla", "xla")):
        yield Case(f"generate_text by {label}", partial(text, impl))
    yield Case("a row alone as in the batch", alone)
    yield Case("a stream as generate", streamed)
    yield Case("a sample again with its key", again)
    yield Case("gradient of attention as by xla", partial(gradient, "interpret" if plan.tiny else None))


def engine(plan: SimpleNamespace) -> Iterator[Case]:
    """Requests in an engine, together and alone: the same bits."""

    def same(model: Callable[[], xj.Model]) -> dict[str, Any]:
        rng = random_of(plan.seed)
        loaded = model()
        shape = dict(rows=2 if plan.tiny else 8, capacity=256, pages=7 if plan.tiny else 20, chunk=64)
        longest, count = (70, 6) if plan.tiny else (200, 100)
        asked = draw(rng, loaded.config.vocab_size, count, longest, shape)
        found = check(loaded, asked, shape, rng, 0, 0, 0.0)
        return found | {"ok": found["differ"] == 0}

    yield Case("bundled: the bits it gets alone", partial(same, xj.load_model))
    for family in () if plan.tiny else ("gemma3", "qwen3_moe"):
        yield Case(f"{family}: the bits it gets alone", partial(same, partial(random_model, family, None)))


def gradient(impl: str | None) -> dict[str, Any]:
    shapes = (2, 40, 4, 64), (2, 2, 40, 64), (2, 2, 40, 64)
    args = [random(i, shape, jnp.bfloat16) for i, shape in enumerate(shapes)]

    def loss(impl, q, k, v):
        out = attention(q, fresh(k, v), length_B=jnp.array([40, 17]), scale=0.125, impl=impl)
        return jnp.square(out.astype(jnp.float32)).sum()

    got, want = (jax.jit(jax.grad(partial(loss, impl), (0, 1, 2)))(*args) for impl in (impl, "xla"))
    worst = max(map(error_of, got, want))
    return {"compared": "dq, dk, dv, relative", "worst": worst, "tolerance": 2e-2, "ok": worst <= 2e-2}


# --- what a decode step launches ----------------------------------------------------------------------------


def layers(plan: SimpleNamespace) -> Iterator[Case]:
    """Kernels of a compiled decode step by layer, and which of them take the time."""
    name = "tiny" if plan.tiny else "0.5b"
    for impl in (None, "xla"):
        yield Case(f"{name}, {impl or 'kernels'}: compiled", partial(per_layer, plan, name, impl))
    yield Case(f"{name}: profile", partial(profile, plan, name), {"optional": True})


def per_layer(plan: SimpleNamespace, name: str, impl: str | None) -> dict[str, Any]:
    """Of the operations in a compiled decode step, those that two layers more bring, by kind."""
    few, more = (
        _operations(Run(plan, settings(name, num_hidden_layers=n), "bfloat16"), impl) for n in (1, 3)
    )
    layer = {kind: n / 2 for kind, n in (more - few).items()}
    return {
        "per_layer": sum(layer.values()),
        "kinds": layer,
        "beside_layers": sum((few - Counter(layer)).values()),
    }


def _operations(run: Run, impl: str | None) -> Counter:
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
        if line and not line[0].isspace():  # a computation begins; those of fusions launch nothing themselves
            launched = line.startswith("ENTRY ") or "command_buffer" in line
        elif launched and (found := operation.match(line)):
            kinds[found[1]] += 1
    free = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "call")
    return Counter({kind: n for kind, n in kinds.items() if kind not in free})


def profile(plan: SimpleNamespace, name: str) -> dict[str, Any]:
    """Kernels that ran in one generation of one row, by the time they took together."""
    run = Run(plan, settings(name), "bfloat16")
    run.generate(1, None)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run.generate(1, None)
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        counts = Counter()
        times = Counter()
        for plane in data.planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                for event in line.events if line.name.startswith("Stream") else ():
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
