"""Measures, for bench_engine.py, how much the prefill of long prompts delays rows that decode."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import xinfer_jax as xj
from xinfer_jax.errors import InputError
from xinfer_jax.families.reading import from_hf

# A model of 4,096 tokens of context whose weights (4 MiB) and pages (1 KiB a token) fit the cache of a CPU.
SHAPE = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=512, hidden_size=256,
    intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=64,
    rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
DECODING_ROWS = 8
PROMPT_TOKENS = 3000
_SHORT_PROMPT = 16
_ANSWER_TOKENS = 4000  # more than a row decodes in a measurement: no row begins within it
_TURNS = 4  # spans alone, each followed by one with prompts: a token costs more the longer its row is
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
    _wait(lambda: all(row.deliveries for row in rows))
    prefills: list[float] = []

    def prefill() -> None:
        ids = rng.integers(0, SHAPE["vocab_size"], PROMPT_TOKENS).tolist()
        request = engine.submit(ids, _options(1))
        _wait(lambda: request.ended)
        prefills.append(request.times["ended"] - request.times["prefill"])

    spans: dict[str, list[tuple[float, float]]] = dict(alone=[], with_prompts=[])
    used = dict.fromkeys(spans, 0.0)
    for turn in range(2 * _TURNS):
        name = ("alone", "with_prompts")[turn % 2]
        began = time.monotonic()
        cpu = cpu_seconds()
        while time.monotonic() < began + seconds / _TURNS:
            prefill() if name == "with_prompts" else time.sleep(_POLL_SECONDS)
        spans[name].append((began, time.monotonic()))
        used[name] += cpu_seconds() - cpu
    if any(row.request.ended for row in rows):
        raise InputError(f"rows ended before {2 * seconds:.0f} seconds: measure for less time")
    for row in rows:
        row.request.cancel()
    result: dict[str, Any] = dict(prompts=len(prefills), prefill_seconds=float(np.median(prefills)))
    for name, of_name in spans.items():
        result[name] = _gaps([row.deliveries for row in rows], of_name)
        if decode_cpu_seconds:
            result[name]["cpu_seconds_per_token"] = used[name] / result[name]["tokens"]
    return result


def _gaps(rows: list[list[tuple[float, int]]], spans: list[tuple[float, float]]) -> dict[str, Any]:
    """99th percentiles of the gaps within these spans of time."""
    gaps = [
        (now - before, tokens - earlier)
        for row in rows
        for (before, earlier), (now, tokens) in zip(row, row[1:], strict=False)
        if any(began <= before and now <= ended for began, ended in spans)
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


def _wait(until: Callable[[], bool]) -> None:
    while not until():
        time.sleep(_POLL_SECONDS)
