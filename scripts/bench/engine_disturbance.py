"""Measures, for bench_engine.py, how much the prefill of long prompts delays rows that decode."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import xinfer_jax as xj
from xinfer_jax.config.model_config import from_hf

# A model of 4,096 tokens of context whose weights (4 MiB) and pages (1 KiB a token) fit the cache of a CPU.
SHAPE = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=512, hidden_size=256,
    intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=64,
    rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
DECODING_ROWS = 8
PROMPT_TOKENS = 3000
_SHORT_PROMPT = 16
_ANSWER_TOKENS = 2000
_POLL_SECONDS = 0.002


def create_engine(**options: Any) -> Any:
    """An engine of the model, with random weights. options: of `xj.Engine`."""
    config = from_hf(SHAPE)
    params = jax.device_put(xj.init_params(config, jax.random.key(0)), jax.devices()[0])
    model = xj.Model(params, config, None, {}, xj.LoadStats(0.0, 0, "none"))
    return xj.Engine(model, rows=DECODING_ROWS + 1, prefix_cache=False, warm_up=True, **options)


class _TimedRow:
    """A row that decodes, and when its tokens came."""

    def __init__(self, engine: Any, rng: np.random.Generator):
        self.deliveries: list[tuple[float, int]] = []  # time, tokens so far
        ids = rng.integers(0, SHAPE["vocab_size"], _SHORT_PROMPT).tolist()
        self.request = engine.submit(ids, _options(_ANSWER_TOKENS))
        self.request.listeners.append(self._note)

    def _note(self) -> None:
        tokens = len(self.request.answers[0].logprobs)
        if tokens and (not self.deliveries or tokens > self.deliveries[-1][1]):
            self.deliveries.append((time.monotonic(), tokens))


def measure_disturbance(
    engine: Any, seconds: float, seed: int, decode_cpu_seconds: Callable[[], float] | None = None
) -> dict[str, Any]:
    """Seconds between tokens of the decoding rows: while they are alone, and while prompts of 3,000 tokens
    are prefilled one after another. "deliveries": as tokens come, several at once; "tokens": each delivery's
    time divided by its tokens.

    Args:
        decode_cpu_seconds: CPU time so far of a process that only decodes; None: no process does.
    """
    cpu_seconds = decode_cpu_seconds or (lambda: math.nan)
    rng = np.random.default_rng(seed)
    rows = [_TimedRow(engine, rng) for _ in range(DECODING_ROWS)]
    finished: list[_TimedRow] = []

    def keep_decoding() -> None:
        for at, row in enumerate(rows):
            if row.request.ended:
                finished.append(row)
                rows[at] = _TimedRow(engine, rng)

    _wait(lambda: all(row.deliveries for row in rows), keep_decoding)
    began = time.monotonic()
    cpu = [cpu_seconds()]
    _wait(lambda: time.monotonic() > began + seconds, keep_decoding)
    first_prompt = time.monotonic()
    cpu.append(cpu_seconds())
    prefills = []
    while time.monotonic() < first_prompt + seconds:
        ids = rng.integers(0, SHAPE["vocab_size"], PROMPT_TOKENS).tolist()
        request = engine.submit(ids, _options(1))
        _wait(lambda request=request: request.ended, keep_decoding)
        prefills.append(request.times["ended"] - request.times["prefill"])
    ended = time.monotonic()
    cpu.append(cpu_seconds())
    for row in rows:
        row.request.cancel()
    every = [row.deliveries for row in finished + rows]
    result: dict[str, Any] = dict(prompts=len(prefills), prefill_seconds=float(np.median(prefills)))
    for name, span in (("alone", (began, first_prompt)), ("with_prompts", (first_prompt, ended))):
        result[name] = _gaps(every, *span)
    if decode_cpu_seconds:
        for name, used in zip(("alone", "with_prompts"), np.diff(cpu), strict=True):
            result[name]["cpu_seconds_per_token"] = float(used) / result[name]["tokens"]
    return result


def _gaps(rows: list[list[tuple[float, int]]], began: float, ended: float) -> dict[str, Any]:
    """99th percentiles of the gaps that end in this span of time."""
    gaps = [
        (now - before, tokens - earlier)
        for row in rows
        for (before, earlier), (now, tokens) in zip(row, row[1:], strict=False)
        if began <= before and now <= ended
    ]
    seconds, counts = (np.array(column) for column in zip(*gaps, strict=True))
    each = np.repeat(seconds / counts, counts)
    return dict(
        tokens=int(counts.sum()),
        deliveries=len(gaps),
        token_p99_seconds=float(np.quantile(each, 0.99)),
        delivery_p99_seconds=float(np.quantile(seconds, 0.99)),
    )


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """99th percentiles with prompts, divided by those alone."""
    return {
        name: result["with_prompts"][name] / result["alone"][name]
        for name in ("token_p99_seconds", "delivery_p99_seconds", "cpu_seconds_per_token")
        if name in result["alone"]
    }


def _options(tokens: int) -> xj.GenerateOptions:
    return xj.GenerateOptions(tokens, eos_token_ids=())


def _wait(until: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    while not until():
        meanwhile()
        time.sleep(_POLL_SECONDS)
