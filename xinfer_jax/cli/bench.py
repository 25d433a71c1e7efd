"""The work of `xinfer-jax bench` after its flags: times batches and an engine, and prints tables."""

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint.loading import Model, load_model
from ..device import cpu_count
from ..engine.engines import Engine
from ..errors import InputError
from ..estimates.model_work import Work, bytes_per_pass, decode_work, prefill_work
from ..families.reading import from_hf
from ..generation.entrypoints import generate
from ..generation.options import GenerateOptions
from ..sampling.sampling_config import SamplingConfig
from ..stats import GenerateStats
from ..weights.initialization import init_params
from ..weights.params import cache_dtype, tree_bytes
from .machine_limits import peak_memory, probe_machine, reset_peak_memory
from .startup import engine_draft
from .terminal import status, write

_WIDTHS = {
    "rows": 4, "prompt": 6, "new": 4, "compile s": 9, "TTFT ms": 18, "TPOT ms": 18, "prefill tok/s": 18,
    "of limit": 13, "decode tok/s": 18, "of limit ": 13, "peak MiB": 8, "floor": 6,
}  # fmt: skip


def bench_model(command: str, flags: Any, settings: dict[str, Any] | None) -> int:
    """Prints the speeds of a model. Returns the exit code. settings: the content of a config.json, for random
    weights. None: load the checkpoint.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    with status("loading the model"):
        if settings is None:
            options: dict[str, Any] = dict(revision=flags.revision, draft_head=flags.draft == "mtp")
            model = load_model(flags.model, flags.dtype, flags.quantize, **options)
        else:
            config = from_hf(settings)
            model = Model(init_params(config, jax.random.key(0), flags.dtype, flags.quantize), config)
    draft = engine_draft(flags.draft, model)
    results: dict[str, Any] = dict(
        command=" ".join([command, *_given(flags)]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        jax=jax.__version__,
        device=f"{jax.devices()[0].device_kind}, {cpu_count()} cores",
        model=flags.model or f"{flags.config}, random weights",
    )
    write(f"{', '.join(results.values())}\n")
    sizes = dict(weight_bytes=tree_bytes(model.params), weight_bytes_per_pass=bytes_per_pass(model.params))
    per_pass = _mib(sizes["weight_bytes_per_pass"])
    write(f"MiB of weights: {_mib(sizes['weight_bytes'])}, read per pass {per_pass}\n")
    write(" ".join(f"{name.strip():>{width}}" for name, width in _WIDTHS.items()) + "\n")
    probe = partial(probe_machine, flags.probe_mib)
    probe()  # compiles
    probes = [probe()]
    rows = []
    for prompt, count in itertools.product(flags.prompt_lengths, flags.batch_sizes):
        row = dict(rows=count, prompt_tokens=prompt, new_tokens=flags.new_tokens)
        try:
            with status(f"timing {count} x {prompt} tokens"):
                row |= _measure(flags, model, draft, [prompt] * count, probes)
        except InputError as error:
            row |= dict(skipped=str(error))
        rows.append(row)
        write(f"{_row_line(row)}\n")
    limits = {kind: _spread([x[kind] for x in probes]) for kind in probes[0]}
    rates = [f"{dtype} matmul {_format(limits[dtype], 1e-9)} GFLOP/s" for dtype in ("float32", "bfloat16")]
    write(f"limits: read {_format(limits['read'], 1e-9)} GB/s, {', '.join(rates)}\n")
    engine = _measure_engine(flags, model, draft) if flags.requests else None
    write(f"{_engine_line(engine)}\n" if engine else "")
    write(f"{json.dumps(results | sizes | dict(limits=limits, rows=rows, engine=engine))}\n")
    return 0


def _given(flags: Any) -> list[str]:
    """Returns the flags that were given, as on a command line."""
    found = []
    for name in flags:
        value = flags[name].value
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if flags[name].present:
            found.append(f"--{name}={str(value).lower() if flags[name].boolean else value}")
    return found


def _options(flags: Any, **more: Any) -> GenerateOptions:
    sampling = SamplingConfig(temperature=0.8, top_k=20, top_p=0.8) if flags.sampled else SamplingConfig()
    return GenerateOptions(max_tokens=flags.new_tokens, sampling=sampling, eos_token_ids=(), **more)


def _random_prompts(model: Model, lengths: Sequence[int]) -> list[list[int]]:
    random = np.random.RandomState(0)
    return [random.randint(0, model.config.vocab_size, n).tolist() for n in lengths]


def _measure(
    flags: Any, model: Model, draft: Any, lengths: list[int], probes: list[dict[str, float]]
) -> dict[str, Any]:
    """Measures prefill and decode of one batch. draft: the source of draft tokens, or None. probes: the
    measurements so far, to which others are added.
    """
    prompts = _random_prompts(model, lengths)
    options = _options(flags, impl=flags.impl, draft=draft)
    peaks: list[int] = []

    def run() -> GenerateStats:
        reset_peak_memory()
        stats = generate(model.params, model.config, prompts, options, key=jax.random.key(0)).stats
        peaks.append(peak_memory() or stats.peak_bytes)
        return stats

    compile_s = run().compile_seconds
    runs = []
    around = []
    for _ in range(flags.repeats):
        runs.append(run())
        probes.append(probe_machine(flags.probe_mib))
        around.append({kind: (probes[-2][kind] + probes[-1][kind]) / 2 for kind in probes[-1]})
    rate = "float32" if jax.default_backend() == "cpu" or flags.dtype == "float32" else "bfloat16"
    weights = bytes_per_pass(model.params)
    itemsize = jnp.dtype(cache_dtype(model.params)).itemsize
    prefill = prefill_work(model.config, weights, lengths)
    decode = decode_work(model.config, weights, itemsize, lengths, flags.new_tokens)
    return dict(
        compile_s=compile_s,
        ttft_s=_spread([s.ttft_seconds for s in runs]),
        tpot_s=_spread([s.tpot_seconds for s in runs]),
        prefill_tok_s=_spread([s.prefill_tokens_per_second for s in runs]),
        decode_tok_s=_spread([s.decode_tokens_per_second for s in runs]),
        prefill=_fractions(prefill, [s.prefill_seconds for s in runs], around, rate),
        decode=_fractions(decode, [s.tpot_seconds for s in runs], around, rate),
        floor_bytes=runs[0].weight_bytes + runs[0].cache_bytes,
        peak_bytes=max(peaks),
    )


def _measure_engine(flags: Any, model: Model, draft: Any) -> dict[str, Any]:
    """Measures requests to an engine, all at once: seconds until all have ended, and quantiles of their
    times.
    """
    limit = model.config.context_length
    lengths = [n for n in flags.prompt_lengths if n + flags.new_tokens <= limit]
    if not lengths:
        return dict(skipped=f"no prompt with {flags.new_tokens} new tokens fits the model's context {limit}")
    capacity = max(lengths) + flags.new_tokens
    prompts = _random_prompts(model, [*itertools.islice(itertools.cycle(lengths), flags.requests)])
    with status("compiling the programs of the engine"):
        engine = Engine(
            model, rows=flags.rows, capacity=capacity, impl=flags.impl, draft=draft,
            prefix_cache=False, warm_up=True,
        )  # fmt: skip
    options = [_options(flags)] * len(prompts)
    with engine, status(f"timing {len(prompts)} requests to an engine"):
        start = time.perf_counter()
        answers = engine.generate(prompts, options, key=jax.random.key(0))
        seconds = time.perf_counter() - start
        stats = engine.stats
    prompt_tokens = sum(map(len, prompts))
    new_tokens = sum(len(answer.tokens[0]) for answer in answers)
    return dict(
        requests=len(prompts), rows=flags.rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
        seconds=seconds, requests_per_s=len(prompts) / seconds, new_tok_s=new_tokens / seconds,
        ttft_s=_quantiles(stats.ttft_seconds), tpot_s=_quantiles(stats.tpot_seconds),
    )  # fmt: skip


def _quantiles(seconds: list[float] | None) -> dict[str, float]:
    return dict(zip(("p50", "p90", "p99"), seconds or (), strict=False))


def _fractions(work: Work, seconds: list[float], limits: list[dict[str, float]], rate: str) -> dict[str, Any]:
    """Returns the measured speed as fractions of the machine's limits at each repetition. rate: the rate of
    matmuls.
    """
    memory = [work.bytes / limit["read"] / s for s, limit in zip(seconds, limits, strict=True)]
    compute = [work.flop / limit[rate] / s for s, limit in zip(seconds, limits, strict=True)]
    is_memory = statistics.median(memory) >= statistics.median(compute)
    bound = "memory" if is_memory else "compute"
    return dict(seconds=_spread(seconds), bound=bound, of_limit=_spread([*map(max, memory, compute)]))


def _row_line(row: dict[str, Any]) -> str:
    """Returns the table line of a batch: medians (minimum-maximum). After `of limit`, m: bound by memory, c:
    by compute.
    """
    cells = [str(row[name]) for name in ("rows", "prompt_tokens", "new_tokens")]
    if "skipped" not in row:
        cells += [f"{row['compile_s']:.1f}", _format(row["ttft_s"], 1e3), _format(row["tpot_s"], 1e3)]
        for phase in ("prefill", "decode"):
            of_limit = _format(row[phase]["of_limit"], 100)
            cells += [_format(row[f"{phase}_tok_s"]), f"{of_limit}%{row[phase]['bound'][0]}"]
        cells += [_mib(row["peak_bytes"]), _mib(row["floor_bytes"])]
    line = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS.values(), strict=False))
    return line + (f" skipped: {row['skipped']}" if "skipped" in row else "")


def _engine_line(engine: dict[str, Any]) -> str:
    """Returns the line of the engine: all requests, and the 50th (and 99th) percentile of one."""
    if "skipped" in engine:
        return f"engine: skipped: {engine['skipped']}"
    times = [
        f"{name.upper()} {1e3 * found['p50']:.0f} ms (99th percentile {1e3 * found['p99']:.0f})"
        for name in ("ttft", "tpot")
        if (found := engine[f"{name}_s"])
    ]
    return (
        f"engine of {engine['rows']} slots: {engine['requests']} requests in {engine['seconds']:.1f} s"
        f" ({engine['requests_per_s']:.2f} a second, {engine['new_tok_s']:.1f} new tok/s), {', '.join(times)}"
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _format(value: dict[str, float], scale: float = 1.0) -> str:
    numbers = (scale * value[name] for name in ("median", "min", "max"))
    median, least, most = (f"{x:.0f}" if abs(x) >= 10 else f"{x:.3g}" for x in numbers)
    return f"{median} ({least}-{most})"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"
