"""Measures the speed and memory of generation, as fractions of this machine's limits: time to first token,
time per token, tok/s, peak memory.

    python scripts/bench.py  # Qwen2.5-0.5B's shape, random weights
    python scripts/bench.py --dtype=bfloat16 --quantize=int8
    python scripts/bench.py --model=DIR --batch_sizes=1,8,32

Weights are random unless --model names a checkpoint; prompts are always random. Decoding never stops early.
The machine's limits are probed before and after every repetition; a repetition is reported as a fraction of
the mean of the two. The limit of decoding is max(bytes / bandwidth, FLOP / matmul rate), where bytes are the
stored weights and the keys and values. The limit of prefill is the same with (2 x non-embedding weights x
tokens + attention + one vocabulary row) FLOP. The last line is one JSON object.
"""

from launcher import start

# isort: split
import contextlib
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from bench.model_shapes import hf_config
from bench.model_work import Work, bytes_per_pass, decode_work, prefill_work
from jax import lax

import xinfer_jax as xj
from xinfer_jax.device import cpu_count
from xinfer_jax.weights.params import cache_dtype, tree_bytes

CONFIG = flags.DEFINE_string(
    "config", "qwen2.5-0.5b", "A built-in shape, or a directory with config.json. The weights are random."
)
MODEL = flags.DEFINE_string(
    "model", None, "A checkpoint to load instead: a directory, or a name owner/name on the hub."
)
PROMPTS = flags.DEFINE_list("prompt_lengths", ["26", "300", "512"], "Lengths of the prompts, in tokens.")
NEW = flags.DEFINE_integer("new_tokens", 64, "Tokens to generate.", lower_bound=2)
BATCHES = flags.DEFINE_list("batch_sizes", ["1", "8"], "Prompts in a batch.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Dtype of activations.")
QUANTIZE = flags.DEFINE_enum("quantize", None, ["int8", "int4", "ternary"], "Format of the weights.")
IMPL = flags.DEFINE_string("impl", None, "Implementation of kernels, as xla. Default: what suits the device.")
SAMPLED = flags.DEFINE_bool("sampled", False, "Sample by temperature, top-k and top-p instead of greedily.")
DRAFT = flags.DEFINE_string("draft", None, "lookup: speculative decoding by prompt look-up.")
PROBE = flags.DEFINE_integer("probe_mib", 1024, "MiB that are read to measure the bandwidth.", lower_bound=1)
REPEATS = flags.DEFINE_integer(
    "repeats", 3, "Timed runs of each case, after one that compiles.", lower_bound=1
)


def whole_numbers(flag: flags.FlagHolder) -> list[int]:
    """The numbers of a list flag."""
    if not flag.value or not all(x.isascii() and x.isdigit() and int(x) for x in flag.value):
        raise xj.InputError(f"--{flag.name}={','.join(flag.value)}: give whole numbers, with commas between")
    return [int(x) for x in flag.value]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# --- limits of the machine ----------------------------------------------------------------------------------

_COLUMNS = 2048
_SPLITS = 64  # rows of a sum: many enough for all threads
_MATMULS = {"cpu": ((512, 2048, 2048), (512, 896, 4864), (1024, 2048, 4096))}  # tokens, in, out
# Ways to read all of an array [out, in]. The fastest one depends on the machine and on XLA.
_READS = [
    jax.jit(lambda w, x: lax.dot_general(w, x, (((1,), (0,)), ((), ())))),
    jax.jit(lambda w, x: w.reshape(_SPLITS, -1).sum(1)),
    jax.jit(lambda w, x: w.reshape(_SPLITS, -1).sum()),
    jax.jit(lambda w, x: w.reshape(_SPLITS, -1).max(1)),
]


@jax.jit
def _multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, w, axes, precision=precision, preferred_element_type=jnp.float32)


def probe() -> dict[str, float]:
    """The read bandwidth in bytes/s, and the matmul rates in FLOP/s by dtype; takes about half a second. The
    arrays are freed before anything else is measured.
    """
    array = jnp.ones((PROBE.value * 2**20 // 4 // _COLUMNS, _COLUMNS), jnp.float32)
    vector = jnp.ones(_COLUMNS, jnp.float32)
    rates = {"read": max(array.nbytes / _best_seconds(read, array, vector) for read in _READS)}
    shapes = _MATMULS.get(jax.default_backend(), ((8192, 8192, 8192),))
    for dtype in ("float32", "bfloat16"):
        rates[dtype] = max(
            2 * T * D * F / _best_seconds(_multiply, jnp.ones((T, D), dtype), jnp.ones((F, D), dtype))
            for T, D, F in shapes
        )
    return rates


def _best_seconds(function: Callable, *args: jax.Array) -> float:
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def reset_peak() -> None:
    with contextlib.suppress(OSError):  # of Linux
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Peak bytes of this process since `reset_peak`; 0 on systems that do not report it."""
    try:
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    except OSError:
        return 0


def measure(model: xj.Model, lengths: list[int], probes: list[dict[str, float]]) -> dict[str, Any]:
    """Prefill and decoding of one batch. probes: so far; others are added."""
    random = np.random.RandomState(0)
    prompts = [random.randint(0, model.config.vocab_size, n).tolist() for n in lengths]
    sampling = xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.8) if SAMPLED.value else None
    given = dict(impl=IMPL.value, draft=DRAFT.value, eos_token_ids=())
    options = xj.GenerateOptions(max_tokens=NEW.value, sampling=sampling or xj.SamplingConfig(), **given)

    def generate() -> Any:
        reset_peak()
        stats = xj.generate(model.params, model.config, prompts, options, key=jax.random.key(0)).stats
        peaks.append(peak_memory() or stats.peak_bytes)
        return stats

    peaks: list[int] = []
    compile_s = generate().compile_seconds
    runs = []
    around = []
    for _ in range(REPEATS.value):
        runs.append(generate())
        probes.append(probe())
        around.append({kind: (probes[-2][kind] + probes[-1][kind]) / 2 for kind in probes[-1]})
    rate = "float32" if jax.default_backend() == "cpu" or DTYPE.value == "float32" else "bfloat16"
    weights = bytes_per_pass(model.params)
    itemsize = jnp.dtype(cache_dtype(model.params)).itemsize
    prefill = prefill_work(model.config, weights, lengths)
    decode = decode_work(model.config, weights, itemsize, lengths, NEW.value)
    return dict(
        compile_s=compile_s,
        ttft_s=spread([s.ttft_seconds for s in runs]),
        tpot_s=spread([s.tpot_seconds for s in runs]),
        prefill_tok_s=spread([s.prefill_tokens_per_second for s in runs]),
        decode_tok_s=spread([s.decode_tokens_per_second for s in runs]),
        prefill=fractions(prefill, [s.prefill_seconds for s in runs], around, rate),
        decode=fractions(decode, [s.tpot_seconds for s in runs], around, rate),
        floor_bytes=runs[0].weight_bytes + runs[0].cache_bytes,
        peak_bytes=max(peaks),
    )


def fractions(work: Work, seconds: list[float], limits: list[dict[str, float]], rate: str) -> dict[str, Any]:
    """The measured speed as fractions of the machine's limits at each repetition. rate: of matmuls."""
    memory = [work.bytes / limit["read"] / s for s, limit in zip(seconds, limits, strict=True)]
    compute = [work.flop / limit[rate] / s for s, limit in zip(seconds, limits, strict=True)]
    is_memory = statistics.median(memory) >= statistics.median(compute)
    bound = "memory" if is_memory else "compute"
    return dict(seconds=spread(seconds), bound=bound, of_limit=spread([*map(max, memory, compute)]))


_WIDTHS = {
    "rows": 4, "prompt": 6, "new": 4, "compile s": 9, "TTFT ms": 18, "TPOT ms": 18, "prefill tok/s": 18,
    "of limit": 13, "decode tok/s": 18, "of limit ": 13, "peak MiB": 8, "floor": 6,
}  # fmt: skip


def main(argv: list[str]) -> None:
    if MODEL.value and flags.FLAGS["config"].present:
        raise xj.InputError("--config and --model exclude each other: a checkpoint brings its config")
    batches = [*itertools.product(whole_numbers(PROMPTS), whole_numbers(BATCHES))]
    jax.config.update("jax_enable_compilation_cache", False)
    if MODEL.value:
        model = xj.load_model(MODEL.value, dtype=DTYPE.value, quantize=QUANTIZE.value)
    else:
        config = xj.ModelConfig.from_hf(hf_config(CONFIG.value))
        model = xj.Model(xj.init_params(config, jax.random.key(0), DTYPE.value, QUANTIZE.value), config)
    results = dict(
        command=" ".join(["python", *sys.argv]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        jax=jax.__version__,
        device=f"{jax.devices()[0].device_kind}, {cpu_count()} cores",
        model=MODEL.value or f"{CONFIG.value}, random weights",
    )
    print(", ".join(results.values()))
    sizes = dict(weight_bytes=tree_bytes(model.params), weight_bytes_per_pass=bytes_per_pass(model.params))
    print(
        f"MiB of weights: {_mib(sizes['weight_bytes'])}, read per pass {_mib(sizes['weight_bytes_per_pass'])}"
    )
    print(" ".join(f"{name.strip():>{width}}" for name, width in _WIDTHS.items()), flush=True)
    probe()  # compiles
    probes = [probe()]
    rows = []
    for prompt, count in batches:
        row = dict(rows=count, prompt_tokens=prompt, new_tokens=NEW.value)
        try:
            row |= measure(model, [prompt] * count, probes)
        except xj.InputError as error:
            row |= dict(skipped=str(error))
        rows.append(row)
        print(row_line(row), flush=True)
    limits = {kind: spread([x[kind] for x in probes]) for kind in probes[0]}
    rates = [f"{dtype} matmul {_spread(limits[dtype], 1e-9)} GFLOP/s" for dtype in ("float32", "bfloat16")]
    print(f"limits: read {_spread(limits['read'], 1e-9)} GB/s, {', '.join(rates)}")
    print(json.dumps(results | sizes | dict(limits=limits, rows=rows)))


def row_line(row: dict[str, Any]) -> str:
    """The table line of a batch: medians (minimum-maximum). After `of limit`, m: bound by memory, c: by
    compute.
    """
    cells = [str(row[name]) for name in ("rows", "prompt_tokens", "new_tokens")]
    if "skipped" not in row:
        cells += [f"{row['compile_s']:.1f}", _spread(row["ttft_s"], 1e3), _spread(row["tpot_s"], 1e3)]
        for phase in ("prefill", "decode"):
            of_limit = _spread(row[phase]["of_limit"], 100)
            cells += [_spread(row[f"{phase}_tok_s"]), f"{of_limit}%{row[phase]['bound'][0]}"]
        cells += [_mib(row["peak_bytes"]), _mib(row["floor_bytes"])]
    line = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS.values(), strict=False))
    return line + (f" skipped: {row['skipped']}" if "skipped" in row else "")


def _spread(value: dict[str, float], scale: float = 1.0) -> str:
    numbers = (scale * value[name] for name in ("median", "min", "max"))
    median, least, most = (f"{x:.0f}" if abs(x) >= 10 else f"{x:.3g}" for x in numbers)
    return f"{median} ({least}-{most})"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


if __name__ == "__main__":
    start(main)
