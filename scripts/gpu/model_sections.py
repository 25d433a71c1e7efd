"""Sections of check_gpu.py for whole models: logits of kernels and XLA along forced tokens, generation end to
end, windows, and the bundled checkpoint.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj
from gpu.agreement import forced, greedy_agreement
from gpu.model_run import SMALL, ModelRun, settings
from gpu.section_cases import Case, emulated, judged, limit_cases, max_error, random
from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention

_MIDDLE = dict(vocab_size=32001, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4)
_MIDDLE |= dict(num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=8192)
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


def windows(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of sliding windows in contiguous and ring caches, soft caps, and capacities that are no multiple
    of 8.
    """
    sizes = SMALL if plan.tiny else _MIDDLE
    mistral = dict(model_type="mistral")
    gemma2 = dict(model_type="gemma2", head_dim=64, query_pre_attn_scalar=64)
    kinds = {  # capacity, config
        "window shorter than the prompt": (None, mistral | dict(sliding_window=30 if plan.tiny else 300)),
        "rings": (1101 if plan.tiny else 2000, mistral | dict(sliding_window=100)),
        "soft caps and windows": (None, gemma2 | dict(sliding_window=30 if plan.tiny else 100)),
        "odd capacity": (77 if plan.tiny else 1003, dict(model_type="qwen2")),
    }
    for dtype in ("bfloat16",) if plan.tiny else ("bfloat16", "float16"):
        for name, (capacity, more) in kinds.items():
            # Emulated kernels take seconds to compile.
            kernels = "xla" if plan.tiny and not name.startswith("window") else None
            run = ModelRun(plan, sizes | more, dtype, capacity=capacity, kernels=kernels)
            yield Case(f"{name}, {dtype}, logits against XLA", run.agreement)


def bundled(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of the bundled checkpoint: its text, a row alone, a stream, a repeated sample, gradients."""
    model = cache(partial(xj.load_model, dtype="float32" if plan.tiny else "bfloat16"))
    kernels = "xla" if plan.tiny else None  # emulated, this model would take minutes
    prompts = [list(range(first, first + 9)) for first in (40, 90)]

    def text(impl: str | None) -> dict[str, Any]:
        answer = xj.generate_text(model(), QUESTION, xj.GenerateOptions(16, impl=impl))
        return {"text": answer, "ok": ANSWER in str(answer)}

    def generate(rows: int, function: Callable = xj.generate, **sampling: float) -> Any:
        sampling = xj.SamplingConfig(**sampling)
        options = xj.GenerateOptions(48, sampling, impl=kernels, eos_token_ids=())
        return function(model().params, model().config, prompts[:rows], options, key=jax.random.key(0))

    def alone() -> dict[str, Any]:
        (answer,) = generate(1).tokens
        tokens_BT = np.array([prompts[0] + answer[:-1]], np.int32)
        kv_cache = xj.init_cache(model().config, 1, tokens_BT.shape[1])
        want = forced(model().params, model().config, tokens_BT, kv_cache, len(prompts[0]), "xla")
        return greedy_agreement(want, [answer], jnp.bfloat16)

    def stream() -> dict[str, Any]:
        return {"ok": [*map(list, zip(*generate(2, xj.stream), strict=True))] == generate(2).tokens}

    def repeat() -> dict[str, Any]:
        return {"ok": len({str(generate(2, temperature=1.0).tokens) for _ in range(2)}) == 1}

    for label, impl in (("kernels", kernels), ("xla", "xla")):
        yield Case(f"generate_text with {label}", partial(text, impl))
    yield Case("a row has the tokens that XLA takes", alone)
    yield Case("a stream equals generate", stream)
    yield Case("a sample repeats with its key", repeat)
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
    "windows": windows,
    "bundled": bundled,
}
