"""Formats the results of bench.py: the lines of its table, and the plot of roofline and time per token
(matplotlib, the plot extra).
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj
from bench.machine_limits import bytes_per_pass, decode_work, spread
from xinfer_jax.generation.executor import bucket
from xinfer_jax.weights.params import Params, cache_dtype

_STRIDE = 16  # tokens over which a point of the cost curve averages
_COLUMNS = (
    ("rows", 4), ("prompt", 6), ("new", 4), ("compile s", 9), ("TTFT ms", 18), ("TPOT ms", 18),
    ("prefill tok/s", 18), ("of limit", 13),
    ("decode tok/s", 18), ("of limit", 13), ("peak MiB", 8), ("floor", 6),
)  # fmt: skip
HEADER = " ".join(f"{name:>{width}}" for name, width in _COLUMNS)
_MIB = 2**20


def row_line(row: dict[str, Any]) -> str:
    """The table line of a batch: medians (minimum-maximum). After `of limit`, m: bound by memory, c: by
    compute.
    """
    head = [str(row["rows"]), str(row["prompt_tokens"]), str(row["new_tokens"])]
    if "skipped" in row:
        return _line(head) + f" skipped: {row['skipped']}"
    cells = [f"{row['compile_s']:.1f}", _spread(row["ttft_s"], 1e3), _spread(row["tpot_s"], 1e3)]
    for phase in ("prefill", "decode"):
        cells += [_spread(row[f"{phase}_tok_s"]), _percent(row[phase]["of_limit"]) + row[phase]["bound"][0]]
    return _line([*head, *cells, _mib(row["peak_bytes"]), _mib(row["floor_bytes"])])


def case_lines(kind: str, value: Any) -> list[str]:
    """The printed lines of every result except batches."""
    if kind == "skipped":
        return [f"skipped: {value}"]
    if "skipped" in value:
        return [f"{kind} skipped: {value['skipped']}"]
    return {"load": _load, "limits": _limits, "capacities": _capacities, "stream": _stream, "curve": _curve}[
        kind
    ](value)


def _load(value: dict[str, Any]) -> list[str]:
    sizes = (
        f"{_mib(value['weight_bytes'])} MiB weights ({_mib(value['weight_bytes_per_pass'])} read per pass)"
    )
    return [
        f"on {value['device']}: load or init {value['load_s']:.1f} s, peak {_mib(value['load_peak_bytes'])}"
        f" MiB; {sizes}"
    ]


def _limits(value: dict[str, Any]) -> list[str]:
    best = max(value["best_by"]["read"], key=value["best_by"]["read"].get)
    rates = [f"{dtype} matmul {_spread(value[dtype], 1e-9)} GFLOP/s" for dtype in ("float32", "bfloat16")]
    return [
        f"limits by {value['probes']} probes: read {_spread(value['read'], 1e-9)} GB/s (fastest: {best}),"
        f" {', '.join(rates)}"
    ]


def _capacities(value: dict[str, Any]) -> list[str]:
    columns = zip(value["capacity"], value["tpot_s"], value["ratio"], strict=True)
    return [
        f"capacity {size}: {_spread(tpot, 1e3)} ms per token at length 100, ratio {_spread(ratio)}"
        for size, tpot, ratio in columns
    ]


def _stream(value: dict[str, Any]) -> list[str]:
    size = f"{value['prompt_tokens']} + {value['new_tokens']} tokens"
    times = (
        f"{_spread(value['stream_s'])} s against {_spread(value['generate_s'])} s, first token"
        f" {_spread(value['first_token_s'], 1e3)} ms"
    )
    return [f"streaming {size}: {times}, overhead {_spread(value['overhead_percent'])} %"]


def _curve(value: dict[str, Any]) -> list[str]:
    points = [
        f"{at}: {1e3 * tpot['median']:.3g}"
        for at, tpot in zip(value["position"], value["tpot_s"], strict=True)
    ]
    return [f"ms per token by position: {', '.join(points)}"]


def _line(cells: list[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=False))


def _spread(value: dict[str, float], scale: float = 1.0) -> str:
    median, least, most = (_number(scale * value[name]) for name in ("median", "min", "max"))
    return f"{median} ({least}-{most})"


def _percent(value: dict[str, float]) -> str:
    median, least, most = (f"{100 * value[name]:.0f}" for name in ("median", "min", "max"))
    return f"{median}% ({least}-{most})"


def _number(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _mib(size: int) -> str:
    return f"{size / _MIB:.0f}"


# --- the plot -----------------------------------------------------------------------------------------------


def cost_by_position(
    params: Params, config: xj.ModelConfig, positions: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Measures the seconds per token of one row: strides of the decode loop that start from caches with this
    many (zero) keys, interleaved.
    """
    positions = sorted({p for p in positions if p + _STRIDE < config.context_length})
    if not positions:
        raise xj.InputError(
            f"--curve_lengths: all values exceed the model's context limit {config.context_length}"
        )
    capacity = bucket(positions[-1] + _STRIDE)
    dtype = cache_dtype(params)
    logits_BV = jnp.zeros((1, config.vocab_size), jnp.float32)
    greedy = xj.SamplingConfig(temperature=0.0)
    key = jax.random.key(0)

    def per_token(position: int) -> float:
        cache = dataclasses.replace(
            xj.init_cache(config, 1, capacity, dtype), length_B=jnp.full(1, position, jnp.int32)
        )
        call = (
            params,
            config,
            logits_BV,
            jax.block_until_ready(cache),
            key,
            greedy,
            np.zeros(0, np.int32),
            _STRIDE + 1,
        )
        start = time.perf_counter()
        jax.block_until_ready(xj.decode_loop(*call, donate=True))
        return (time.perf_counter() - start) / _STRIDE

    runs = {position: [] for position in positions}
    for repeat in range(repeats + 1):  # the first compiles
        for position in positions:
            seconds = per_token(position)
            if repeat:
                runs[position].append(seconds)
    weights = bytes_per_pass(params)
    itemsize = jnp.dtype(dtype).itemsize
    needed = [decode_work(config, weights, itemsize, [position], _STRIDE + 1).bytes for position in positions]
    return {
        "position": positions,
        "tpot_s": [spread(runs[position]) for position in positions],
        "bytes": needed,
    }


def draw(results: dict[str, Any], file: str) -> None:
    """Plots the roofline (prefill and decoding of each batch under the machine's limits) and the milliseconds
    per token by position.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in results["cases"] if "limits" in case]
    figure, (roofline, cost) = pyplot.subplots(1, 2, figsize=(13, 5))
    for index, case in enumerate(cases):
        name = case["dtype"] + (f", {case['quantize']}" if case["quantize"] != "none" else "")
        _points(roofline, case["rows"], name, f"C{index}")
        if "position" in case.get("curve", {}):
            _cost(cost, case, name, f"C{index}")
    if cases:
        _roof(roofline, cases)
    versions = results["versions"]
    title = (
        f"{results['model'] or results['config']}, {results['machine']['cores']} cores, jax {versions['jax']}"
    )
    roofline.set(xscale="log", yscale="log", xlabel="FLOP per byte read", ylabel="GFLOP/s", title=title)
    cost.set(
        xlabel="position (tokens in the cache)",
        ylabel="ms per token",
        ylim=(0, None),
        title="one row; dashed: bytes / bandwidth",
    )
    for axes in (roofline, cost):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _points(axes: Any, rows: list[dict[str, Any]], name: str, color: str) -> None:
    for phase, marker in (("decode", "o"), ("prefill", "^")):
        done = [row[phase] for row in rows if phase in row]
        x = [p["flop"] / p["bytes"] for p in done]
        y = [1e-9 * p["flop"] / p["seconds"]["median"] for p in done]
        axes.plot(x, y, marker, color=color, label=f"{name}: {phase}")


def _roof(axes: Any, cases: list[dict[str, Any]]) -> None:
    """Draws the median limits of all cases as lines, and the range of their probes as a band."""
    x = np.geomspace(
        0.1,
        max(
            1e3,
            *(p["flop"] / p["bytes"] for case in cases for row in case["rows"] if (p := row.get("prefill"))),
        ),
        200,
    )
    limits = {kind: [case["limits"][kind] for case in cases] for kind in ("read", "float32", "bfloat16")}
    median = {kind: float(np.median([limit["median"] for limit in of])) for kind, of in limits.items()}
    for dtype, style in (("float32", "-"), ("bfloat16", ":")):
        label = f"{1e-9 * median['read']:.0f} GB/s, {1e-9 * median[dtype]:.0f} GFLOP/s {dtype}"
        axes.plot(x, 1e-9 * np.minimum(x * median["read"], median[dtype]), style, color="black", label=label)
    low, high = (
        {kind: choose(limit[end] for limit in of) for kind, of in limits.items()}
        for choose, end in ((min, "min"), (max, "max"))
    )
    band = [1e-9 * np.minimum(x * edge["read"], edge["float32"]) for edge in (low, high)]
    axes.fill_between(x, *band, color="black", alpha=0.1)


def _cost(axes: Any, case: dict[str, Any], name: str, color: str) -> None:
    curve = case["curve"]
    low, median, high = ([1e3 * tpot[end] for tpot in curve["tpot_s"]] for end in ("min", "median", "max"))
    axes.plot(curve["position"], median, "o-", color=color, label=name)
    axes.fill_between(curve["position"], low, high, color=color, alpha=0.2)
    axes.plot(
        curve["position"],
        [1e3 * b / case["limits"]["read"]["median"] for b in curve["bytes"]],
        "--",
        color=color,
    )
