"""Formats the results of bench.py: the lines of its table."""

from typing import Any

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
    return {"load": _load, "limits": _limits, "stream": _stream}[kind](value)


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


def _stream(value: dict[str, Any]) -> list[str]:
    size = f"{value['prompt_tokens']} + {value['new_tokens']} tokens"
    times = (
        f"{_spread(value['stream_s'])} s against {_spread(value['generate_s'])} s, first token"
        f" {_spread(value['first_token_s'], 1e3)} ms"
    )
    return [f"streaming {size}: {times}, overhead {_spread(value['overhead_percent'])} %"]


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
