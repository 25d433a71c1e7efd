"""Measures the machine's limits and peak memory, and counts the work of a model; for bench.py.

`Limits` keeps a process of its own with a large array, so that a probe (about half a second) fits between two
timings without counting as their memory. `python scripts/bench/machine_limits.py` prints one probe for every
line on standard input.
"""

import dataclasses
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xinfer_jax as xj
from xinfer_jax.weights.params import Params, param_specs, tree_bytes

_COLUMNS = 2048
_SPLITS = 64  # rows of a sum: many enough for all threads
_MATMULS = {"cpu": ((512, 2048, 2048), (512, 896, 4864), (1024, 2048, 4096))}  # tokens, in, out
_LARGE = ((8192, 8192, 8192),)


class Limits:
    """Probes the machine's limits on demand: `with Limits(mib) as limits: limits.probe()`."""

    def __init__(self, mib: int):
        self._mib = mib
        self.probes: list[dict] = []

    def __enter__(self) -> "Limits":
        command = [sys.executable, str(Path(__file__).resolve()), str(self._mib)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.probe()
        self.probes.clear()  # the first probe includes compilation
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.stdin.close()  # ends the loop in `_serve`
        self._process.wait()

    def probe(self) -> dict:
        """Measures the read bandwidth in bytes/s, the matmul rates in FLOP/s by dtype, and each way to reach
        them.
        """
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(
                f"the process that measures the limits ended with exit code {self._process.wait()}"
            )
        self.probes.append(json.loads(line))
        return self.probes[-1]

    def summary(self) -> dict[str, Any]:
        """Spread of the probes, and the best rate of each way to measure."""
        by = {
            kind: {way: max(p["by"][kind][way] for p in self.probes) for way in ways}
            for kind, ways in self.probes[0]["by"].items()
        }
        return {kind: spread([probe[kind] for probe in self.probes]) for kind in by} | {
            "probes": len(self.probes),
            "best_by": by,
        }


def _serve(mib: int) -> None:
    array = jax.jit(lambda: jnp.ones((mib * 2**20 // 4 // _COLUMNS, _COLUMNS), jnp.float32))()
    # Kind → name → (bytes or FLOP of one call, function, arguments).
    calls = {"read": {}, "float32": {}, "bfloat16": {}}
    for name, read in _reads().items():
        calls["read"][name] = (array.nbytes, jax.jit(read), (array, jnp.ones(_COLUMNS, jnp.float32)))
    for dtype, precision in (("float32", lax.Precision.HIGHEST), ("bfloat16", None)):
        shapes = _MATMULS.get(jax.default_backend(), _LARGE)
        # On CPU, computation is in float32 and the bfloat16 rate is only informative.
        for T, D, F in shapes if dtype == "float32" else shapes[:1]:
            product = jax.jit(
                lambda x, w, precision=precision: lax.dot_general(
                    x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
                )
            )
            calls[dtype][f"{T}x{D}x{F}"] = (
                2 * T * D * F,
                product,
                (jnp.ones((T, D), dtype), jnp.ones((F, D), dtype)),
            )
    for _ in sys.stdin:
        rates = {
            kind: {name: amount / _best_seconds(f, args) for name, (amount, f, args) in of.items()}
            for kind, of in calls.items()
        }
        best = {kind: max(of.values()) for kind, of in rates.items()}
        print(json.dumps(best | {"by": rates}), flush=True)


def _reads() -> dict[str, Callable]:
    """Ways to read all of an array [out, in]. The fastest one depends on the machine and on XLA."""
    return {
        "matvec": lambda w, x: lax.dot_general(w, x, (((1,), (0,)), ((), ()))),
        "sum": lambda w, x: w.reshape(_SPLITS, -1).sum(1),
        "sum of all": lambda w, x: w.reshape(_SPLITS, -1).sum(),
        "max": lambda w, x: w.reshape(_SPLITS, -1).max(1),
    }


def _best_seconds(f: Callable, args: tuple, repeats: int = 2) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# --- the work of a model ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
    """The least bytes and FLOP of a prefill or of one decode step."""

    bytes: float  # bytes read: weights and, in a decode step, keys and values
    flop: float

    def fractions_of_limits(
        self, seconds: Sequence[float], probes: Sequence[dict], rate: str
    ) -> dict[str, Any]:
        """The measured speed as fractions of the machine's limits.

        Args:
            seconds: time of each repetition.
            probes: the machine's limits at each repetition.
            rate: dtype of the matmul rate.
        """
        memory = [self.bytes / probe["read"] / s for s, probe in zip(seconds, probes, strict=True)]
        compute = [self.flop / probe[rate] / s for s, probe in zip(seconds, probes, strict=True)]
        bound = "memory" if statistics.median(memory) >= statistics.median(compute) else "compute"
        of = {"of_limit": list(map(max, memory, compute)), "of_bandwidth": memory, "of_matmul_rate": compute}
        fractions = {name: spread(values) for name, values in of.items()}
        return {
            "seconds": spread(seconds),
            "bytes": self.bytes,
            "flop": self.flop,
            "bound": bound,
        } | fractions


def bytes_per_pass(params: Params) -> int:
    """Weight bytes that every forward pass reads. A tied embedding matrix counts, because it is also the
    head; of an untied one, and of one for the inputs of layers, a pass reads only a few rows.
    """
    rows_only = [params.get("layer_embed"), params["embed"] if "lm_head" in params else None]
    return tree_bytes(params) - tree_bytes(rows_only)


def prefill_work(config: xj.ModelConfig, weight_bytes: int, lengths: Sequence[int]) -> Work:
    """Work of a prefill: (2 x non-embedding weights x tokens + attention + one vocabulary row for the last
    position) FLOP; reads the weights once.
    """
    pairs = [
        sum(int(np.minimum(np.arange(1, n + 1), config.layer_windows[layer] or n).sum()) for n in lengths)
        for layer in config.attention_layers
    ]
    flop = (
        2 * _layer_weights(config, sum(lengths)) * sum(lengths)
        + _attention_flop(config, pairs)
        + _head_flop(config) * len(lengths)
    )
    return Work(weight_bytes, flop)


def decode_work(
    config: xj.ModelConfig, weight_bytes: int, cache_itemsize: int, lengths: Sequence[int], new_tokens: int
) -> Work:
    """Work of one decode step of all rows, as the mean of the steps after the first token. It reads the
    weights once, and each row's keys and values up to its length.
    """
    keys = np.array(lengths)[:, None] + np.arange(1, max(new_tokens, 2))  # includes the token of the step
    layers = config.attention_layers
    pairs = [float(np.minimum(keys, config.layer_windows[i] or keys).mean(1).sum()) for i in layers]
    numbers = sum(config.kv_heads(i) * config.head_width(i) * n for i, n in zip(layers, pairs, strict=True))
    cache_bytes = 2 * cache_itemsize * numbers
    weights = _layer_weights(config, len(lengths))
    flop = (2 * weights + _head_flop(config)) * len(lengths) + _attention_flop(config, pairs)
    return Work(weight_bytes + cache_bytes, flop)


def expert_fraction(config: xj.ModelConfig, tokens: int) -> float:
    """The fraction of the experts that a pass over this many tokens reads. At 1 every expert computes every
    token.
    """
    return min(1, tokens * config.num_experts_per_tok / max(config.num_experts, 1))


def _layer_weights(config: xj.ModelConfig, tokens: int) -> float:
    """Number of weights that each token of a pass is multiplied by."""
    all_experts = expert_fraction(config, tokens) == 1
    share = {2: 1, 3: 1 if all_experts else config.num_experts_per_tok / max(config.num_experts, 1)}
    shapes = (spec.shape for spec in jax.tree.leaves(param_specs(config)["layers"]))
    return sum(math.prod(shape) * share[len(shape)] for shape in shapes if len(shape) > 1)


def _head_flop(config: xj.ModelConfig) -> int:
    return 2 * config.vocab_size * config.hidden_size


def _attention_flop(config: xj.ModelConfig, pairs: Sequence[float]) -> float:
    """FLOP of the scores and weighted values of this many (query, key) pairs of each attention layer, all
    heads.
    """
    widths = map(config.head_width, config.attention_layers)
    return 4 * config.num_attention_heads * sum(w * n for w, n in zip(widths, pairs, strict=True))


# --- spread and peak memory ---------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of the repetitions."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class AnonymousPeak:
    """Peak anonymous memory of this process (RssAnon: without mapped files), sampled every 10 ms in a thread;
    0 on systems that do not report it.
    """

    def __init__(self):
        self.bytes = 0
        threading.Thread(target=self._sample, daemon=True).start()

    def reset(self) -> None:
        self.bytes = 0

    def peak(self) -> int:
        """Peak bytes since the last reset."""
        self.bytes = max(self.bytes, self._now())
        return self.bytes

    def _sample(self) -> None:
        while self._now():
            self.peak()
            time.sleep(0.01)

    @staticmethod
    def _now() -> int:
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return 0
        return next(
            (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0
        )


if __name__ == "__main__":
    _serve(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
