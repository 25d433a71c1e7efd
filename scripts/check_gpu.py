"""Checks and times the kernels on this machine's NVIDIA GPU: against their oracles, inside the engine, and against the card's own limits.

    python scripts/check_gpu.py                                             # everything, within --budget_s
    python scripts/check_gpu.py --sections=timings --impls=mosaic --tune    # one part, with other tile sizes
    python scripts/check_gpu.py --smoke                                     # tiny shapes on any device, kernels emulated

Each line is printed as soon as it is known and everything comes once more as one JSON object in the last line. Exit code 1: a
check failed; 2: no NVIDIA GPU. Figures below a target fail nothing. JAX_COMPILATION_CACHE_DIR makes a second run compile less.
"""

import datetime
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax import lax

import kernels_pallas
import xinfer_jax as xj
from kernels_pallas import reference
from xinfer_jax.attention import attention
from xinfer_jax.config import from_hf
from xinfer_jax.layers import linear
from xinfer_jax.params import tree_bytes

SECTIONS = {"correctness": 32, "identities": 15, "timings": 30, "end_to_end": 23}  # and their shares of the time
TARGETS = {"prefill_attention": "0.6; 0.9 cudnn at 8k", "decode_attention": "0.85", "argmax": "0.85", "lm_head_argmax": "0.85"}
TUNE = {
    ("mosaic", "prefill_attention"): (dict(block=64, stages=4), dict(block=128, stages=2), dict(block=128, stages=3)),
    ("mosaic", "decode_attention"): (dict(splits=1), dict(splits=4), dict(splits=16), dict(stages=2), dict(block=128, stages=2)),
    ("triton", "decode_attention"): (dict(splits=4), dict(splits=16)),
    ("interpret", "decode_attention"): (dict(splits=2),),
}
MODELS = {  # what config.json says
    "0.5B": dict(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864, vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "7B": dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944, vocab_size=152064,
        tie_word_embeddings=False,
    ),
    "tiny": dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, vocab_size=500,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
ORACLES = {name: jax.jit(getattr(reference, name), static_argnames=("scale", "window", "soft_cap")) for name in kernels_pallas.KERNELS[:2]}
ORACLES |= {name: jax.jit(getattr(reference, name)) for name in kernels_pallas.KERNELS[2:]}
NEAR = 0.02  # logits this near, as a share of the largest, may change places in bfloat16: whole models differ by 0.016 from float32

SECTION = flags.DEFINE_list("sections", list(SECTIONS), "What to run, besides the card's limits.")
IMPL = flags.DEFINE_list("impls", ["mosaic", "triton"], "Kernels to check and time.")
BUDGET = flags.DEFINE_float("budget_s", 450, "Seconds after which nothing new is begun.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", None, "Of the random inputs; the clock by default.", lower_bound=0)
TRY = flags.DEFINE_bool("tune", False, "Time other tile sizes too.")
SMOKE = flags.DEFINE_bool("smoke", False, "Tiny shapes on any device, emulated kernels: checks this program, not the GPU.")
flags.register_validator("sections", lambda names: set(names) <= SECTIONS.keys(), f"sections are {', '.join(SECTIONS)}")
flags.register_validator("impls", lambda names: set(names) <= {"mosaic", "triton"}, "impls are mosaic and triton")


class Sizes(NamedTuple):
    """The shapes of one run of this program."""

    copy: int  # float32 numbers
    matmul: int  # rows and columns
    dtypes: tuple[str, ...]  # of the kernels' inputs
    widths: tuple[int, ...]  # H
    groups: tuple[int, ...]  # G
    most: tuple[int, int]  # T, S
    argmax: tuple[tuple[int, int], ...]  # B, V
    lm_head: tuple[tuple[int, int, int], ...]  # B, D, V
    dtype: str  # of the engine
    prompts: tuple[int, ...]  # tokens of each
    new: int
    timings: tuple[tuple, ...]  # kernel and the arguments of its function in JOBS
    most_calls: int  # in one loop
    repetitions: int
    tokens: tuple[int, int]  # prompt and new, end to end
    models: tuple[tuple[str, int, str], ...]  # model, rows, target


FULL = Sizes(
    copy=2**29,
    matmul=8192,
    dtypes=("bfloat16", "float16", "float32"),
    widths=(128, 64, 256, 96, 80),
    groups=(7, 1, 4),
    most=(200, 500),
    argmax=((1, 1), (3, 7), (5, 1001), (33, 4097), (7, 151936)),
    lm_head=((1, 896, 151), (5, 72, 1001), (33, 1024, 4099), (70, 128, 777), (2, 896, 20011)),
    dtype="bfloat16",
    prompts=(23, 7, 40),
    new=64,
    timings=(  # decode: model, rows, length, capacity; K and V below the length are 256 MiB but in the last six
        ("prefill_attention", "7B", 8192), ("decode_attention", "7B", 16, 8192, 8192), ("decode_attention", "0.5B", 64, 8192, 8192),
        ("lm_head_argmax", "0.5B", 1), ("lm_head_argmax", "7B", 1), ("argmax", 448, 151936),
        ("prefill_attention", "0.5B", 8192), ("prefill_attention", "7B", 2048), ("prefill_attention", "0.5B", 2048),
        ("decode_attention", "7B", 32, 4096, 4096), ("decode_attention", "0.5B", 128, 4096, 4096),
        ("decode_attention", "7B", 4, 32768, 32768), ("decode_attention", "0.5B", 16, 32768, 32768),
        ("lm_head_argmax", "0.5B", 8), ("lm_head_argmax", "0.5B", 32), ("lm_head_argmax", "7B", 8), ("lm_head_argmax", "7B", 32),
        ("decode_attention", "7B", 1, 4096, 4096), ("decode_attention", "7B", 1, 32768, 32768), ("decode_attention", "7B", 64, 1024, 32768),
        ("decode_attention", "0.5B", 1, 4096, 4096), ("decode_attention", "0.5B", 1, 32768, 32768),
        ("decode_attention", "0.5B", 256, 1024, 32768),
    ),
    most_calls=200,
    repetitions=5,
    tokens=(512, 128),
    models=(("0.5B", 1, "700 tok/s"), ("7B", 1, "0.8"), ("0.5B", 32, "none")),
)  # fmt: skip
TINY = Sizes(
    copy=2**12, matmul=64, dtypes=("float32", "bfloat16"), widths=(64,), groups=(1, 4), most=(20, 40), argmax=((1, 1), (5, 1001)),
    lm_head=((3, 72, 151),), dtype="float32", prompts=(9, 4), new=4, most_calls=2, repetitions=1, tokens=(20, 4), models=(("tiny", 2, "none"),),
    timings=(("prefill_attention", "tiny", 32), ("decode_attention", "tiny", 2, 20, 40), ("argmax", 2, 999), ("lm_head_argmax", "tiny", 2)),
)  # fmt: skip


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    logging.set_verbosity(logging.WARNING)  # not jax's search for back ends
    here = kernels_pallas.device_impl()
    if here.impl == "xla" and not SMOKE.value:
        print(f"check_gpu: {here.reason}; this program needs one (--smoke does not)", file=sys.stderr)
        return 2
    sizes = TINY if SMOKE.value else FULL
    seed = time.time_ns() % 2**32 if SEED.value is None else SEED.value
    report = Report([name for name in SECTIONS if name in SECTION.value], BUDGET.value, facts(here.reason, seed))
    impls = ["interpret"] if SMOKE.value else [impl for impl in IMPL.value if report.has(impl)]
    limits = measure_limits(report, sizes)
    if report.begin("correctness"):
        correctness(report, sizes, impls, np.random.default_rng(seed))
    if report.begin("identities"):
        identities(report, sizes, impls, np.random.default_rng(seed))
    if report.begin("timings"):
        timings(report, sizes, impls, limits, TRY.value)
    if report.begin("end_to_end"):
        end_to_end(report, sizes, limits)
    return report.close()


def facts(device: str, seed: int) -> dict[str, Any]:
    version = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.[\d.]+", version.read_text()) if version.exists() else None
    return dict(
        device=device if not SMOKE.value else jax.devices()[0].device_kind,
        driver=driver[0] if driver else "unknown",
        jax=jax.__version__,
        python=sys.version.split()[0],
        date=datetime.datetime.now().isoformat(" ", "seconds"),
        command=" ".join(sys.argv),
        seed=seed,
    )


class Report:
    """Prints every result as it comes, keeps it for the JSON, and knows how much time is left."""

    def __init__(self, sections: list[str], budget_s: float, facts: dict[str, Any]):
        self.results = facts | {name: [] for name in ("limits", *sections)} | dict(skipped=[], failed=[])
        ends = itertools.accumulate(SECTIONS[name] for name in sections)
        total = sum(SECTIONS[name] for name in sections)
        self._end = {name: budget_s * end / total for name, end in zip(sections, ends, strict=True)} | {"limits": budget_s}
        self._started = time.perf_counter()
        self._section = self._doing = "limits"
        print("\n".join(f"{name}: {value}" for name, value in facts.items()), "\n\nlimits", flush=True)
        self._watch = threading.Timer(budget_s + 25, self._abandon)
        self._watch.daemon = True
        self._watch.start()

    def has(self, impl: str) -> bool:
        if reason := kernels_pallas.unavailable(impl):
            print(f"  not here: {reason}", flush=True)
        return not reason

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def late(self) -> bool:
        return self.seconds > self._end[self._section]

    def begin(self, section: str) -> bool:
        """Whether the section is to run. One that ends early leaves its time to those after it."""
        if section not in self._end:
            return False
        self._section = section
        print(f"\n{section} ({self.seconds:.0f} s so far, until {self._end[section]:.0f} s)", flush=True)
        return True

    def case(self, name: str, run: Callable[[], dict[str, Any]], *, may_refuse: bool = False) -> dict[str, Any]:
        """Runs one case, unless it is too late, and returns what it found; `ok` False, or an exception, is a failure."""
        if self.late:
            self.results["skipped"].append(f"{self._section}: {name}")
            print(f"  {name:50} skipped: out of time", flush=True)
            return {}
        self._doing = f"{self._section}: {name}"
        print(f"  {name:50} ", end="", flush=True)  # seen even if the run then hangs
        try:
            found = run()
        except Exception as error:  # whatever one case dies of, the others still run
            found = {"not run": reason(error)} | ({} if may_refuse else {"ok": False})
        found = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in found.items()}
        self.results[self._section].append({"name": name, **found})
        words = [f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in found.items() if key != "ok"]
        verdict = {True: ["ok"], False: ["FAIL"], None: []}[found.get("ok")]
        print("  ".join(f"{word:14}" for word in words + verdict).rstrip(), flush=True)
        if found.get("ok") is False:
            self.results["failed"].append(self._doing)
        return found

    def close(self) -> int:
        """Prints the JSON and returns the exit code."""
        self._watch.cancel()
        self.results["seconds"] = round(self.seconds, 1)
        failed, skipped = self.results["failed"], self.results["skipped"]
        print(f"\n{len(failed)} failed, {len(skipped)} skipped, {self.seconds:.0f} s", *failed, sep="\n  ")
        print(json.dumps(self.results, default=float), flush=True)
        return 1 if failed else 0

    def _abandon(self) -> None:
        """A kernel that never ends must not take the results with it."""
        self.results["failed"].append(f"{self._doing}: still running long after the budget")
        os._exit(self.close())


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# --- the card's limits, and how time is taken ---------------------------------------------------------------------------


def timed(call: Callable, args: tuple, calls: int, repetitions: int) -> tuple[list[float], Any]:
    """Seconds per call, one number per repetition, sorted; and the result.

    A repetition is one program that makes the call many times, so that starting it costs nothing to speak of. The barrier ties
    the arguments to the loop counter: nothing can be computed once for all calls.
    """

    @jax.jit
    def loop(args):
        def body(i, _):
            return call(*lax.optimization_barrier((args, i))[0])

        return lax.fori_loop(0, calls, body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(call, *args)))

    out = jax.block_until_ready(loop(args))
    times: list[float] = []
    while len(times) < repetitions and (len(times) < 2 or calls * sum(times) < 1):
        start = time.perf_counter()
        out = jax.block_until_ready(loop(args))
        times.append((time.perf_counter() - start) / calls)
    return sorted(times), out


def random(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed, impl="rbg"), shape, dtype)


def measure_limits(report: Report, sizes: Sizes) -> dict[str, float]:
    """Bytes per second of a copy (read and written) and flops per second of a bfloat16 product."""

    def rate(work: float, call: Callable, *args: jax.Array) -> dict[str, float]:
        times, _ = timed(call, args, min(20, sizes.most_calls), sizes.repetitions)
        median = statistics.median(times)
        return dict(ms=1e3 * median, min=1e3 * times[0], max=1e3 * times[-1], per_second=work / median)

    side = sizes.matmul
    copy = report.case("copy, bytes", lambda: rate(8 * sizes.copy, lambda x: x + 1, random(0, (sizes.copy,), jnp.float32)))
    product = report.case(
        "bfloat16 matmul, flops", lambda: rate(2 * side**3, jnp.matmul, *(random(i, (side, side), jnp.bfloat16) for i in range(2)))
    )
    return {"bytes": copy.get("per_second", math.nan), "flops": product.get("per_second", math.nan)}


# --- kernels against their oracles --------------------------------------------------------------------------------------


def correctness(report: Report, sizes: Sizes, impls: list[str], draws: np.random.Generator) -> None:
    cases = {
        "argmax": [argmax_case(draws, *shape) for shape in sizes.argmax],
        "lm_head_argmax": [lm_head_case(draws, *shape, nan=i % 3 == 2) for i, shape in enumerate(sizes.lm_head)],
        "decode_attention": attention_cases(draws, sizes, decode=True),
        "prefill_attention": attention_cases(draws, sizes, decode=False),
    }
    for i, dtype in enumerate(sizes.dtypes):
        for (kernel, all_cases), impl in itertools.product(cases.items(), impls):
            some = all_cases[:: 2 if i and kernel.endswith("attention") else 1]  # every case once, every second one in other dtypes
            report.case(f"{kernel} {impl} {dtype}", partial(compare, report, kernel, impl, dtype, some))


def compare(report: Report, kernel: str, impl: str, dtype: str, cases: list[tuple[tuple, dict]]) -> dict[str, Any]:
    """The worst error of a kernel over its cases."""
    limit = 1e-5 if dtype == "float32" else 2e-2 if kernel.endswith("attention") else 1e-3  # the head's kernels sum in float32
    errors = []
    for host_args, options in cases:
        if report.late and errors:
            break
        args = [jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype) for x in host_args]
        arrays = [x for x in args if x.dtype == dtype]
        try:
            kernels_pallas.select(kernel, impl, *arrays)
        except ValueError as refusal:
            return {"not served": str(refusal)}
        got = jax.jit(partial(kernels_pallas.run, impl, kernel, **options))(*args)
        want = ORACLES[kernel](*(x.astype(jnp.float32) if x.dtype == dtype else x for x in args), **options)
        errors.append(ERRORS.get(kernel, row_error)(got, want, *arrays))
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
    return dict(cases=f"{len(errors)}/{len(cases)}", worst=worst, limit=limit, ok=worst <= limit)


def row_error(got: jax.Array, want: jax.Array, *_: jax.Array) -> float:
    """The largest distance of a row [H] from what it should be, over its length; a row of zeros must be zeros."""
    got, want = (np.asarray(x, np.float32).astype(np.float64) for x in (got, want))
    off, size = (np.linalg.norm(x, axis=-1) for x in (got.reshape(want.shape) - want, want))
    return float(np.max(np.where(size > 0, off / np.where(size > 0, size, 1), np.where(off == 0, 0, math.inf))))


def id_error(got: jax.Array, want: jax.Array, *_: jax.Array) -> float:
    """The share of ids that differ."""
    return float(np.mean(np.asarray(got) != np.asarray(want)))


def lm_head_error(got: tuple, want: tuple, x_BD: jax.Array, weight_VD: jax.Array) -> float:
    """Of the log-probabilities; infinite where an id is not that of the first of two equal rows (see `lm_head_case`)."""
    (ids, logprobs), (right, right_logprobs) = (map(np.asarray, pair) for pair in (got, want))
    half = -(-weight_VD.shape[0] // 2)
    if np.any(ids != right % half) or np.any(np.isnan(logprobs) != np.isnan(right_logprobs)):
        return math.inf
    return float(np.max(np.nan_to_num(np.abs(logprobs - right_logprobs) / np.maximum(1, np.abs(right_logprobs)))))


ERRORS = {"argmax": id_error, "lm_head_argmax": lm_head_error}


def attention_cases(draws: np.random.Generator, sizes: Sizes, decode: bool) -> list[tuple[tuple, dict]]:
    """Every head width with every group, in turn with window and soft cap; rows of length 0, 1, all and between, NaN behind them."""
    cases = []
    for i, (H, G) in enumerate(itertools.product(sizes.widths, sizes.groups)):
        T, S = (int(draws.integers(2, most)) for most in sizes.most)
        window, soft_cap = (int(draws.integers(1, S)) if i % 2 else None), (10.0 if i % 4 > 1 else None)
        length_B = np.array([0, 1, S, *draws.integers(1, S, 2)], np.int32)
        start_B = np.array([0, 0, max(0, S - T), *(draws.integers(0, length) for length in length_B[3:])], np.int32)
        q_BTNH, k_BKSH, v_BKSH = (draws.standard_normal((5, *s, H), np.float32) for s in ((T, 2 * G), (2, S), (2, S)))
        for b, length in enumerate(length_B):
            k_BKSH[b, :, length:] = v_BKSH[b, :, length:] = np.nan
        args = (q_BTNH[:, 0], k_BKSH, v_BKSH, length_B) if decode else (q_BTNH, k_BKSH, v_BKSH, start_B, length_B)
        cases.append((args, dict(scale=H**-0.5, window=window, soft_cap=soft_cap)))
    return cases


def argmax_case(draws: np.random.Generator, B: int, V: int) -> tuple[tuple, dict]:
    """Many equal numbers; a row with NaN, one of zeros of both signs, one of -inf."""
    x_BV = draws.standard_normal((B, V), np.float32).round(1)
    if B > 2:
        x_BV[0, draws.integers(0, V, 2)] = np.nan
        x_BV[1] = np.copysign(0, x_BV[1])
        x_BV[2] = -np.inf
    return (x_BV,), {}


def lm_head_case(draws: np.random.Generator, B: int, D: int, V: int, nan: bool) -> tuple[tuple, dict]:
    """Every row of the matrix comes twice, so every maximum does; perhaps one is NaN."""
    half = -(-V // 2)
    weight_VD = draws.standard_normal((half, D), np.float32) / np.float32(math.sqrt(D))
    if nan:
        weight_VD[half // 3] = np.nan
    return (draws.standard_normal((B, D), np.float32), weight_VD[np.arange(V) % half]), {}


# --- the engine's identities --------------------------------------------------------------------------------------------


def identities(report: Report, sizes: Sizes, impls: list[str], draws: np.random.Generator) -> None:
    model = xj.load_model(dtype=sizes.dtype)
    prompts = [draws.integers(0, model.config.vocab_size, n).tolist() for n in sizes.prompts]
    key = jax.random.key(0)

    def options(impl: str | None, **settings: float) -> xj.GenerateOptions:
        return xj.GenerateOptions(max_new_tokens=sizes.new, impl=impl, sampling=xj.SamplingConfig(**settings))

    def ask(impl: str | None, rows: slice = slice(None), **settings: float) -> list[list[int]]:
        return xj.generate(model.params, model.config, prompts[rows], options(impl, **settings), key=key).tokens

    def streamed(impl: str | None) -> list[list[int]]:
        return [list(row) for row in zip(*xj.stream(model.params, model.config, prompts, options(impl)), strict=True)]

    want = ask("xla")
    near = near_ties(model, prompts, want)
    for impl in (*impls, None):
        report.case(f"impl {impl}: greedy ids as by xla", lambda impl=impl: agreement(ask(impl), want, near))
        report.case(f"impl {impl}: a row alone", lambda impl=impl: agreement(ask(impl, slice(1)), want[:1], near))
        report.case(f"impl {impl}: stream as generate", lambda impl=impl: dict(ok=streamed(impl) == ask(impl)))
        report.case(
            f"impl {impl}: a sample again", lambda impl=impl: dict(ok=ask(impl, temperature=1.0, top_p=0.9) == ask(impl, temperature=1.0, top_p=0.9))
        )
        report.case(f"impl {impl}: gradient as by xla", partial(gradient, impl, sizes.dtype))


def near_ties(model: xj.Model, prompts: list[list[int]], answers: list[list[int]]) -> list[list[bool]]:
    """For each token of an answer, whether the two best logits lie so near that rounding may exchange them."""
    longest = max(map(len, prompts))
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tokens_BT = np.array([row + [0] * (longest + len(answers[0]) - len(row)) for row in rows], np.int32)
    logits_BTV = jax.jit(lambda params, tokens: xj.forward(params, model.config, tokens, impl="xla")[0])(model.params, tokens_BT)
    second_BT, best_BT = np.moveaxis(np.sort(np.asarray(logits_BTV), -1)[..., -2:], -1, 0)
    near_BT = best_BT - second_BT < NEAR * np.abs(logits_BTV).max(-1)
    return [near_BT[b, len(p) - 1 : len(p) - 1 + len(a)].tolist() for b, (p, a) in enumerate(zip(prompts, answers, strict=True))]


def agreement(got: list[list[int]], want: list[list[int]], near: list[list[bool]]) -> dict[str, Any]:
    """Rows may part only where the two best logits are near; what follows is not compared."""
    ok, excluded = True, 0
    for a, b, near_T in zip(got, want, near, strict=False):
        part = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
        if part is not None:
            ok, excluded = ok and near_T[part], excluded + len(b) - part
    return dict(compared=sum(map(len, want)) - excluded, excluded=excluded, near=f"< {NEAR} of the largest logit", ok=ok)


def gradient(impl: str | None, dtype: str) -> dict[str, Any]:
    q, k, v, weight = (random(i, shape, dtype) for i, shape in enumerate([(2, 40, 4, 64), *[(2, 2, 40, 64)] * 2, (2, 40, 4, 64)]))

    def loss(impl, q, k, v):
        out = attention(q, k, v, length_B=jnp.array([40, 17]), scale=0.125, impl=impl)
        return jnp.sum((out * weight).astype(jnp.float32))

    got, want = (jax.jit(jax.grad(partial(loss, impl), (0, 1, 2)))(q, k, v) for impl in (impl, "xla"))
    worst = max(map(row_error, got, want))
    return dict(worst=worst, ok=worst <= (1e-5 if dtype == "float32" else 2e-2))


# --- times --------------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """One call to time."""

    args: tuple[jax.Array, ...]  # of the kernel
    options: dict[str, Any]
    work: float  # bytes it must read, or flops
    others: dict[str, tuple[Callable, tuple]]  # what to compare with: function and arguments; first "xla"


def prefill_job(dtype: str, model: str, T: int) -> Job:
    N, K, H = heads(model)
    q, k, v = (random(i, shape, dtype) for i, shape in enumerate([(1, T, N, H), *[(1, K, T, H)] * 2]))
    args = (q, k, v, jnp.zeros(1, jnp.int32), jnp.full(1, T, jnp.int32))
    others = by_others(q, k, v, None, is_causal=True)

    def xla(q, k, v, start, length):
        return attention(q, k, v, start_B=start, length_B=length, scale=H**-0.5, impl="xla")

    return Job(args, dict(scale=H**-0.5), 2 * N * H * T * T, {"xla": (xla, args)} | others)


def decode_job(dtype: str, model: str, rows: int, length: int, capacity: int) -> Job:
    N, K, H = heads(model)
    q, length_B = random(0, (rows, N, H), dtype), jnp.full(rows, length, jnp.int32)
    k, v = (jnp.tile(random(i, (1, K, capacity, H), dtype), (rows, 1, 1, 1)) for i in (1, 2))

    def xla(q, k, v, length):
        return attention(q[:, None], k, v, start_B=length - 1, length_B=length, scale=H**-0.5, impl="xla")[:, 0]

    args = (q, k, v, length_B)
    others = by_others(q[:, None], k, v, length_B)
    return Job(args, dict(scale=H**-0.5), 2 * rows * length * K * H * k.dtype.itemsize, {"xla": (xla, args)} | others)


def by_others(q_BTNH, k_BKSH, v_BKSH, length_B, **options: Any) -> dict[str, tuple[Callable, tuple]]:
    """Attention by other libraries, in their layout [B, S, K, H]."""
    libraries = {}
    if jax.default_backend() == "gpu":
        libraries["cudnn"] = partial(jax.nn.dot_product_attention, implementation="cudnn", **options)
    if importlib.util.find_spec("tokamax"):
        libraries["tokamax"] = lambda *args, **kwargs: importlib.import_module("tokamax").dot_product_attention(*args, **options, **kwargs)
    args = (q_BTNH, jnp.swapaxes(k_BKSH, 1, 2), jnp.swapaxes(v_BKSH, 1, 2), length_B) if libraries else ()
    return {name: (lambda q, k, v, n, f=f: f(q, k, v, key_value_seq_lengths=n), args) for name, f in libraries.items()}


def argmax_job(dtype: str, rows: int, V: int) -> Job:
    x = random(0, (rows, V), jnp.float32)
    return Job((x,), {}, x.nbytes, {"xla": (lambda x: jnp.argmax(x, -1), (x,))})


def lm_head_job(dtype: str, model: str, rows: int) -> Job:
    V, D = (MODELS[model][name] for name in ("vocab_size", "hidden_size"))
    args = random(0, (rows, D), dtype), random(1, (V, D), dtype)
    return Job(args, {}, args[1].nbytes, {"xla": (lambda x, w: jnp.argmax(linear(x, {"weight": w}, jnp.float32), -1), args)})


JOBS = {"prefill_attention": prefill_job, "decode_attention": decode_job, "argmax": argmax_job, "lm_head_argmax": lm_head_job}


def heads(model: str) -> tuple[int, int, int]:
    N, K, D = (MODELS[model][name] for name in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    return N, K, D // N


def timings(report: Report, sizes: Sizes, impls: list[str], limits: dict[str, float], tune: bool) -> None:
    for kernel, *shape in sizes.timings:
        name = " ".join([kernel, *map(str, shape)])
        limit = limits["flops" if kernel == "prefill_attention" else "bytes"]
        if report.late:
            report.case(name, dict)  # says that it is skipped
            continue
        job = JOBS[kernel](sizes.dtype, *shape)
        ours = [(impl, {}) for impl in impls] + [(impl, more) for impl in impls for more in TUNE.get((impl, kernel), ()) if tune]
        known: dict[str, Any] = {}
        for label, (call, args) in job.others.items():
            report.case(f"{name} {label}", partial(time_one, sizes, job, call, args, limit, known, label), may_refuse=label != "xla")
        for impl, more in ours:
            call = partial(kernels_pallas.run, impl, kernel, **job.options, **more)
            label = " ".join([impl, *(f"{key}={value}" for key, value in more.items())])
            run = partial(time_one, sizes, job, call, job.args, limit, known, label, TARGETS[kernel])
            report.case(f"{name} {label}", run, may_refuse=bool(more))


def time_one(sizes, job: Job, call: Callable, args: tuple, limit: float, known: dict, label: str, target: str | None = None) -> dict[str, Any]:
    """Time, rate, share of the card's limit, speed as a multiple of the others' in `known`; the result must be that of XLA."""
    calls = int(np.clip(0.02 * limit / job.work, 2, sizes.most_calls))
    times, out = timed(call, args, calls, sizes.repetitions)
    out, median = out[0] if isinstance(out, tuple) else out, statistics.median(times)
    found = dict(ms=1e3 * median, min=1e3 * times[0], max=1e3 * times[-1], per_second=job.work / median, of_limit=job.work / median / limit)
    if target is None:
        known[label] = median
    else:
        found |= dict(target=target) | {f"x_{other}": seconds / median for other, seconds in known.items() if other != "out"}
    expected = known.setdefault("out", out)
    worst = (id_error if out.dtype == jnp.int32 else row_error)(out, expected)
    found |= dict(off_xla=worst, ok=worst <= 0.04)  # twice the bound of one kernel; an id or two may be near ties
    return found if sizes is TINY or found["of_limit"] < 1.25 else found | dict(note="faster than the card: not measured", ok=False)


# --- whole models -------------------------------------------------------------------------------------------------------


def end_to_end(report: Report, sizes: Sizes, limits: dict[str, float]) -> None:
    for impl, (model, rows, target) in itertools.product((None, "xla"), sizes.models):
        report.case(f"{model} {rows} rows impl {impl}", partial(generation, sizes, model, rows, impl, limits["bytes"], target))


@functools.cache
def random_model(name: str, dtype: str) -> tuple[dict, xj.ModelConfig]:
    config = from_hf(MODELS[name] | dict(model_type="qwen2", max_position_embeddings=32768, rope_theta=1e6))
    return xj.init_params(config, jax.random.key(0, impl="rbg"), dtype), config


def generation(sizes: Sizes, model: str, rows: int, impl: str | None, bandwidth: float, target: str) -> dict[str, Any]:
    """Statistics of the second of two generations, and the weights read per second as a share of the copy bandwidth."""
    params, config = random_model(model, sizes.dtype)
    prompt, new = sizes.tokens
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (rows, prompt)).tolist()
    options = xj.GenerateOptions(max_new_tokens=new, impl=impl)
    xj.generate(params, config, prompts, options)
    out = xj.generate(params, config, prompts, options)
    read = tree_bytes(params) - (0 if config.tie_word_embeddings else tree_bytes(params["embed"]))
    return {
        "prefill tok/s": out.stats.prefill_tokens_per_second,
        "decode tok/s": out.stats.decode_tokens_per_second,
        "TPOT ms": 1e3 * out.stats.tpot_seconds,
        "of_copy": read / out.stats.tpot_seconds / bandwidth,
        "target": target,
        "ok": bool(np.isfinite(out.logprobs).all()),
    }


if __name__ == "__main__":
    app.run(main)
