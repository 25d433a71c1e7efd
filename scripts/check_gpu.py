"""Checks and times the kernels on this machine's NVIDIA GPU: against their oracles, inside the engine, and
against the card's own limits.

    python scripts/check_gpu.py                                             # everything, within --budget_s
    python scripts/check_gpu.py --sections=timings --impls=mosaic --tune    # one part, with other tile sizes
    python scripts/check_gpu.py --smoke                                     # tiny shapes on any device,
    kernels emulated

Prints each line as soon as it is known, and everything once more as one JSON object in the last line. Exit
code 1: a check failed (a figure below its target is no failure), 2: no NVIDIA GPU. With
JAX_COMPILATION_CACHE_DIR set, a second run compiles less.
"""

import faulthandler
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from os.path import commonprefix  # of any sequences
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax import lax
from one_line import parse, refuse

import kernels_pallas
import xinfer_jax as xj
from kernels_pallas import reference
from xinfer_jax.attention import attention
from xinfer_jax.config import from_hf

# And their shares of the time.
SECTIONS = {"correctness": 32, "identities": 15, "timings": 30, "end_to_end": 23}
TUNE = {  # for mosaic
    "prefill_attention": (dict(block=64, stages=4), dict(block=128, stages=2), dict(block=128, stages=3)),
    "decode_attention": (
        dict(splits=1),
        dict(splits=4),
        dict(splits=16),
        dict(stages=2),
        dict(block=128, stages=2),
    ),
}
FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
MODELS = {
    "0.5B": (896, 24, 14, 2, 4864, 151936),
    "7B": (3584, 28, 28, 4, 18944, 152064),
    "tiny": (64, 2, 4, 2, 96, 500),
}
# Logits this near, as a share of the largest, may change places in bfloat16: whole models differ by 0.016
# from float32.
NEAR = 0.02
BOTH = ("7B", "0.5B")
FULL = SimpleNamespace(
    # Float32 numbers; rows and columns; of a call in a loop; of the loop.
    copy=2**29, matmul=8192, most_calls=200, repetitions=5,
    dtypes=("bfloat16", "float16", "float32"), widths=(128, 64, 256, 96, 80), groups=(7, 1, 4),
    most_queries=200, most_keys=500,
    argmax=((1, 1), (3, 7), (5, 1001), (33, 4097), (7, 151936)),  # B, V
    # B, D, V, NaN rows.
    lm_head=((1, 896, 151, 0), (5, 72, 1001, 0), (33, 1024, 4099, 1), (70, 128, 777, 0), (2, 896, 20011, 0)),
    model="bundled", dtype="bfloat16", prompts=(23, 7, 40), new=64,
    # The first of every kernel, the second of every kernel, …; model, rows, and of attention queries, length,
    # capacity.
    timings={
        "prefill_attention": [(model, 1, T, T, T) for T in (8192, 2048) for model in BOTH],
        "decode_attention": [  # K and V below the length are 256 MiB, but in the last six
            *((model, 2**size // T, 1, T, T) for T in (8192, 4096, 32768)
              for model, size in zip(BOTH, (17, 19), strict=True)),
            ("7B", 64, 1, 1024, 32768), ("0.5B", 256, 1, 1024, 32768),
            *((model, 1, 1, T, T) for T in (4096, 32768) for model in BOTH),
        ],
        "lm_head_argmax": [(model, rows) for rows in (1, 8, 32) for model in BOTH], "argmax": [("0.5B", 448)],
    },
    # Prompt and new; model, rows, target.
    tokens=(512, 128), end_to_end=(("0.5B", 1, "700 tok/s"), ("7B", 1, "0.8"), ("0.5B", 32, "-")),
)  # fmt: skip
TINY = SimpleNamespace(
    copy=2**12, matmul=64, most_calls=2, repetitions=1, dtypes=("bfloat16",), widths=(64,), groups=(4,),
    most_queries=20, most_keys=40,
    argmax=((5, 1001),), lm_head=((3, 72, 151, 0),), model="tiny", dtype="float32", prompts=(9, 4), new=4,
    timings={"prefill_attention": [("tiny", 1, 32, 32, 32)], "decode_attention": [("tiny", 2, 1, 20, 40)]}
    | dict.fromkeys(("lm_head_argmax", "argmax"), [("tiny", 2)]),
    tokens=(9, 4), end_to_end=(("tiny", 2, "-"),),
)  # fmt: skip

SECTION = flags.DEFINE_multi_enum(
    "sections", list(SECTIONS), list(SECTIONS), "What to run, besides the card's limits."
)
IMPL = flags.DEFINE_multi_enum(
    "impls", ["mosaic", "triton"], ["mosaic", "triton"], "Kernels to check and time."
)
BUDGET = flags.DEFINE_float("budget_s", 450, "Seconds after which nothing new is begun.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", None, "Of the random inputs; the clock by default.", lower_bound=0)
TRY = flags.DEFINE_bool("tune", False, "Time other tile sizes too.")
SMOKE = flags.DEFINE_bool(
    "smoke", False, "Tiny shapes on any device, emulated kernels: checks this program, not the GPU."
)


def main(argv: list[str]) -> int:
    logging.set_verbosity(logging.WARNING)  # not jax's search for back ends
    here, smoke = kernels_pallas.device_impl(), SMOKE.value
    if here.impl == "xla" and not smoke:
        refuse(ValueError(f"{here.reason}: run it where there is one, or with --smoke"))
    jax.config.update("jax_disable_most_optimizations", smoke)
    seed = time.time_ns() % 2**32 if SEED.value is None else SEED.value
    plan = SimpleNamespace(**vars(TINY if smoke else FULL), smoke=smoke, tune=TRY.value, seed=seed)
    left_out = {
        impl: reason for impl in IMPL.value if (reason := kernels_pallas.unavailable(impl)) and not smoke
    }
    plan.impls = ["interpret"] if smoke else [impl for impl in IMPL.value if impl not in left_out]
    driver = " ".join(jax.devices()[0].client.platform_version.split())
    facts = dict(
        device=here.reason,
        driver=driver,
        jax=jax.__version__,
        date=time.ctime(),
        command=" ".join(sys.argv),
        seed=seed,
    )
    report = Report(
        facts | dict(left_out=left_out), [name for name in SECTIONS if name in SECTION.value], BUDGET.value
    )
    plan.limits = measure_limits(report, plan)
    for section in (correctness, identities, timings, end_to_end):
        if section.__name__ in SECTION.value and report.begins(section.__name__):
            try:
                section(report, plan)
            except Exception as error:  # in what it prepares for its cases
                report.failed.append(f"{section.__name__}: {error!r}")
    return report.close()


class Report:
    """Prints every result as it comes, keeps it for the JSON, and knows how much time is left."""

    def __init__(self, facts: dict[str, Any], sections: list[str], budget_s: float):
        self.skipped, self.failed = [], []
        self._results = (
            facts
            | {name: [] for name in ("limits", *sections)}
            | {"skipped": self.skipped, "failed": self.failed}
        )
        shares, self._start = [SECTIONS[name] for name in sections], time.perf_counter()
        self._ends = dict(
            zip(sections, self._start + budget_s * np.cumsum(shares) / sum(shares), strict=True)
        )
        self._section, self.end = "limits", self._start + budget_s
        faulthandler.dump_traceback_later(budget_s + 28, exit=True)  # for a kernel that never ends
        print(*(f"{name}: {value}" for name, value in facts.items()), "\nlimits", sep="\n", flush=True)

    def begins(self, section: str) -> bool:
        """Whether there is time for the section; what it leaves of its own goes to those after it."""
        self._section, self.end, now = section, self._ends[section], time.perf_counter()
        print(f"\n{section}, from {now - self._start:.0f} to {self.end - self._start:.0f} s", flush=True)
        return now < self.end or bool(self.case("all of it", dict))  # notes that it is skipped

    def case(
        self, name: str, run: Callable[[], dict[str, Any]], *, may_refuse: bool = False
    ) -> dict[str, Any]:
        """Runs one case, unless it is too late, and returns what it found; `ok` False, or an exception, is a
        failure.
        """
        if (start := time.perf_counter()) > self.end:
            self.skipped.append(f"{self._section}: {name}")
            print(f"  {name}: skipped, out of time", flush=True)
            return {}
        print(f"  {name:50} ", end="", flush=True)  # if the case then hangs, this names it
        try:
            found = run()
        except Exception as error:  # whatever one case dies of, the others still run
            found = {"error": repr(error)[:400], "ok": None if may_refuse else False}
        found["seconds"] = round(time.perf_counter() - start, 1)
        words = [
            f"{key} {f'{value:.4g}' if isinstance(value, float) else value}"
            for key, value in found.items()
            if key != "ok"
        ]
        words.append({True: "ok", False: "FAIL", None: ""}[found.get("ok")])
        print("  ".join(f"{word:14}" for word in words).rstrip(), flush=True)
        finite = {
            key: str(value) if isinstance(value, float) and not np.isfinite(value) else value
            for key, value in found.items()
        }
        self._results[self._section].append({"name": name} | finite)
        self.failed += [f"{self._section}: {name}"] if found.get("ok") is False else []
        return found

    def close(self) -> int:
        """Prints the JSON and returns the exit code."""
        faulthandler.cancel_dump_traceback_later()
        seconds = time.perf_counter() - self._start
        print(
            f"\n{len(self.failed)} failed, {len(self.skipped)} skipped, {seconds:.0f} s",
            *self.failed,
            sep="\n  ",
        )
        print(json.dumps(self._results, default=str), flush=True)
        return 1 if self.failed else 0


def timed(
    work: float, call: Callable, args: tuple, calls: int, repetitions: int
) -> tuple[dict[str, float], Any]:
    """Median, least and most milliseconds of a call, its rate, and its result. A repetition is one program
    with many calls.
    """

    @jax.jit
    def loop(args):
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(call, *args))
        # The barrier ties the arguments to the loop counter: nothing can be computed once for all calls.
        return lax.fori_loop(0, calls, lambda i, _: call(*lax.optimization_barrier((args, i))[0]), start)

    out = jax.block_until_ready(loop(args))
    times: list[float] = []
    while len(times) < repetitions and (len(times) < 2 or calls * sum(times) < 1000):
        start = time.perf_counter()
        out = jax.block_until_ready(loop(args))
        times.append(1e3 * (time.perf_counter() - start) / calls)
    ms = float(np.median(times))
    return {"ms": ms, "min": min(times), "max": max(times), "T_per_s": work / ms / 1e9}, out


def random(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed, impl="rbg"), shape, dtype)


def measure_limits(report: Report, plan: SimpleNamespace) -> dict[str, float]:
    """Bytes per second of a copy (read and written) and flops per second of a bfloat16 product."""
    cases = {
        "copy, bytes": (8 * plan.copy, lambda x: x + 1, (random(0, (plan.copy,), jnp.float32),)),
        "bfloat16 matmul, flops": (
            2 * plan.matmul**3,
            jnp.matmul,
            tuple(random(i, (plan.matmul,) * 2, jnp.bfloat16) for i in range(2)),
        ),
    }
    size = min(20, plan.most_calls), plan.repetitions
    found = [report.case(name, lambda case=case: timed(*case, *size)[0]) for name, case in cases.items()]
    return dict(zip(("bytes", "flops"), (1e12 * case.get("T_per_s", np.nan) for case in found), strict=True))


def correctness(report: Report, plan: SimpleNamespace) -> None:
    draws = np.random.default_rng(plan.seed)
    attention_cases = [
        attention_case(draws, plan, i, *shape)
        for i, shape in enumerate(itertools.product(plan.widths, plan.groups))
    ]
    cases = {
        "argmax": [argmax_case(draws, *shape) for shape in plan.argmax],
        "lm_head_argmax": [lm_head_case(draws, *shape) for shape in plan.lm_head],
        "decode_attention": [
            ((q[:, 0], k, v, length), options) for (q, k, v, _, length), options in attention_cases
        ],
        "prefill_attention": attention_cases,
    }
    for kernel, some in cases.items():
        cases[kernel] = [
            (inputs, options, jax.jit(partial(getattr(reference, kernel), **options)))
            for inputs, options in some
        ]
    for i, dtype in enumerate(plan.dtypes):
        for kernel, impl in itertools.product(cases, plan.impls):
            # In the first dtype all, then every fourth one.
            some = cases[kernel][:: 4 if i and kernel.endswith("attention") else 1]
            report.case(f"{kernel} {impl} {dtype}", partial(compare, report, kernel, impl, dtype, some))


def compare(report: Report, kernel: str, impl: str, dtype: str, cases: list[tuple]) -> dict[str, Any]:
    """The worst error of a kernel over its cases."""
    # The head's kernels sum in float32.
    limit = 1e-5 if dtype == "float32" else 2e-2 if kernel.endswith("attention") else 1e-3
    errors: list[float] = []
    for inputs, options, oracle in cases:
        if errors and time.perf_counter() > report.end:
            break
        args = [jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype) for x in inputs]
        try:
            kernels_pallas.select(kernel, impl, *(x for x in args if x.dtype == dtype))
        except ValueError as refusal:
            return {"not served": str(refusal)}
        got = jax.jit(partial(kernels_pallas.run, impl, kernel, **options))(*args)
        want = oracle(*(x.astype(jnp.float32) if x.dtype == dtype else x for x in args))
        # NaN counts as most.
        errors.append(np.max([*map(error_of, jax.tree.leaves(got), jax.tree.leaves(want))]))
    worst = float(np.max(errors))
    return {"cases": f"{len(errors)}/{len(cases)}", "worst": worst, "limit": limit, "ok": worst <= limit}


def error_of(got: jax.Array, want: jax.Array) -> float:
    """Of ids the share that differ; else the largest distance of a row [..., H] from what it should be, over
    its length.
    """
    if want.dtype == jnp.int32:
        return float(np.mean(np.asarray(got) != np.asarray(want)))
    got, want = (np.asarray(x.astype(jnp.float32), np.float64).reshape(want.shape) for x in (got, want))
    no_number = np.isnan(got) & ~np.isfinite(want)  # XLA's max of NaN is NaN on one device, -inf on another
    off, size = (np.linalg.norm(np.where(no_number, 0, x), axis=-1) for x in (got - want, want))
    return float(np.max(np.where(off == 0, 0, off / np.maximum(size, 1e-30))))  # a row of zeros must be zeros


def attention_case(
    draws: np.random.Generator, plan: SimpleNamespace, i: int, H: int, G: int
) -> tuple[tuple, dict]:
    """Rows of length 0, 1, all and between, with NaN behind them; the i-th case decides on window and soft
    cap.
    """
    T, S = (int(draws.integers(2, most)) for most in (plan.most_queries, plan.most_keys))
    window, soft_cap = (int(draws.integers(1, S)) if i % 2 else None), (10.0 if i % 4 > 1 else None)
    length_B = np.array([0, 1, S, *draws.integers(1, S, 2)], np.int32)
    start_B = np.array(
        [0, 0, max(0, S - T), *(draws.integers(0, length) for length in length_B[3:])], np.int32
    )
    q_BTNH, k_BKSH, v_BKSH = (
        draws.standard_normal((5, *axes, H), np.float32) for axes in ((T, 2 * G), (2, S), (2, S))
    )
    for b, length in enumerate(length_B):
        k_BKSH[b, :, length:] = v_BKSH[b, :, length:] = np.nan
    return (q_BTNH, k_BKSH, v_BKSH, start_B, length_B), {
        "scale": H**-0.5,
        "window": window,
        "soft_cap": soft_cap,
    }


def argmax_case(draws: np.random.Generator, B: int, V: int) -> tuple[tuple, dict]:
    """Many equal numbers; a row with NaN, one of zeros of both signs, one of -inf."""
    x_BV = draws.standard_normal((B, V), np.float32).round(1)
    x_BV[1:2, draws.integers(0, V, 2)], x_BV[2:3], x_BV[3:4] = np.nan, np.copysign(0, x_BV[2:3]), -np.inf
    return (x_BV,), {}


def lm_head_case(draws: np.random.Generator, B: int, D: int, V: int, nans: int) -> tuple[tuple, dict]:
    """Whole numbers, whose sums are the same in every order; rows of the matrix come twice, so every maximum
    does.
    """
    weight_VD = draws.integers(-1, 2, (V, D)).astype(np.float32)[np.arange(V) % -(-V // 2)]
    weight_VD[V // 3 : V // 3 + nans] = np.nan
    return (draws.integers(-1, 2, (B, D)).astype(np.float32) / 8, weight_VD), {}


def identities(report: Report, plan: SimpleNamespace) -> None:
    params, config = load(plan.model, plan.dtype)
    draws = np.random.default_rng(plan.seed)
    prompts = [draws.integers(0, config.vocab_size, n).tolist() for n in plan.prompts]

    def ask(
        impl: str | None, rows: int | None = None, generate: Callable = xj.generate, **sampling: float
    ) -> Any:
        options = xj.GenerateOptions(plan.new, xj.SamplingConfig(**sampling), eos_token_ids=(), impl=impl)
        return generate(params, config, prompts[:rows], options, key=jax.random.key(0))

    want = ask("xla").tokens
    near = near_ties(params, config, prompts, want)
    checks = {
        "greedy ids as by xla": lambda impl: agreement(ask(impl).tokens, want, near),
        "a row alone as in the batch": lambda impl: agreement(ask(impl, 1).tokens, want[:1], near[:1]),
        "stream as generate": lambda impl: {
            "ok": [*map(list, zip(*ask(impl, generate=xj.stream), strict=True))] == ask(impl).tokens
        },
        "a sample again with its key": lambda impl: {
            "ok": len({str(ask(impl, temperature=1.0).tokens) for _ in range(2)}) == 1
        },
        "gradient of attention as by xla": partial(gradient, plan.dtype),
    }
    for impl, name in [(None, "greedy ids as by xla"), *itertools.product(plan.impls, checks)]:
        report.case(f"{impl}: {name}", partial(checks[name], impl))


def near_ties(
    params: dict, config: xj.ModelConfig, prompts: list[list[int]], answers: list[list[int]]
) -> list[list[bool]]:
    """For each token of an answer, whether the two best logits lie so near that rounding may exchange
    them.
    """
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tokens_BT = np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], np.int32)
    logits_BTV = jax.jit(lambda params, tokens: xj.forward(params, config, tokens, impl="xla")[0])(
        params, tokens_BT
    )
    near_BT = np.asarray(-jnp.diff(lax.top_k(logits_BTV, 2)[0])[..., 0] < NEAR * jnp.abs(logits_BTV).max(-1))
    return [
        near_BT[b, len(prompt) - 1 : len(row) - 1].tolist()
        for b, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]


def agreement(got: list[list[int]], want: list[list[int]], near: list[list[bool]]) -> dict[str, Any]:
    """Rows may part only where the two best logits are near; what follows is not compared."""
    parts = [len(commonprefix(pair)) for pair in zip(got, want, strict=True)]
    ok = all(part == len(near_T) or near_T[part] for part, near_T in zip(parts, near, strict=True))
    excluded = sum(map(len, want)) - sum(parts)
    return {"compared": sum(parts), "excluded": excluded, "ties": f"< {NEAR} of the largest logit", "ok": ok}


def gradient(dtype: str, impl: str) -> dict[str, Any]:
    q, k, v = (
        random(0, (2, 40, 4, 64), dtype),
        random(1, (2, 2, 40, 64), dtype),
        random(2, (2, 2, 40, 64), dtype),
    )

    def loss(impl, q, k, v):
        return jnp.square(
            attention(q, k, v, length_B=jnp.array([40, 17]), scale=0.125, impl=impl).astype(jnp.float32)
        ).sum()

    worst = max(
        map(error_of, *(jax.jit(jax.grad(partial(loss, impl), (0, 1, 2)))(q, k, v) for impl in (impl, "xla")))
    )
    return {"worst": worst, "ok": worst <= (1e-5 if dtype == "float32" else 2e-2)}


def timings(report: Report, plan: SimpleNamespace) -> None:
    rounds = itertools.zip_longest(
        *([(kernel, shape) for shape in shapes] for kernel, shapes in plan.timings.items())
    )
    for kernel, shape in filter(None, itertools.chain.from_iterable(rounds)):
        name = " ".join([kernel, *map(str, shape)])
        if time.perf_counter() > report.end:
            report.case(name, dict)  # notes that it is skipped
            continue
        args, options, work, others = (
            attention_job if kernel.endswith("attention") else partial(head_job, kernel)
        )(plan.dtype, *shape)
        kind, target = ("flops", "0.6; 0.9 of cudnn") if kernel == "prefill_attention" else ("bytes", "0.85")
        run = partial(measure, plan, plan.limits[kind], work, {})
        for other, call in others.items():
            report.case(f"{name} {other}", partial(run, other, *call), may_refuse=other != "xla")
        for impl in plan.impls:
            for more in ({}, *(TUNE.get(kernel, ()) if plan.tune and impl == "mosaic" else ())):
                call = partial(kernels_pallas.run, impl, kernel, **options, **more)
                label = " ".join([impl, *(f"{key}={value}" for key, value in more.items())])
                report.case(
                    f"{name} {label}", partial(run, label, call, args, target=target), may_refuse=bool(more)
                )


def attention_job(dtype: str, model: str, rows: int, T: int, length: int, capacity: int) -> tuple:
    """The kernel's arguments and options, the flops or bytes it cannot do without, and what others would run:
    function and arguments.
    """
    config = model_config(model)
    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q = random(0, (rows, T, N, H), dtype)
    k, v = (jnp.tile(random(i, (1, K, capacity, H), dtype), (rows, 1, 1, 1)) for i in (1, 2))
    start_B, length_B = jnp.full(rows, length - T, jnp.int32), jnp.full(rows, length, jnp.int32)

    def xla(q, k, v, start_B, length_B):
        return attention(q, k, v, start_B=start_B, length_B=length_B, scale=H**-0.5, impl="xla")

    others = {"xla": (xla, (q, k, v, start_B, length_B))}
    lengths = {"key_value_seq_lengths": length_B} if T == 1 else {"is_causal": True}
    theirs = (q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))  # other libraries have [B, S, K, H]
    if jax.default_backend() == "gpu":
        others["cudnn"] = partial(jax.nn.dot_product_attention, implementation="cudnn", **lengths), theirs
        others["tokamax"] = (
            lambda *args: importlib.import_module("tokamax").dot_product_attention(*args, **lengths),
            theirs,
        )
    if T == 1:
        return (
            (q[:, 0], k, v, length_B),
            {"scale": H**-0.5},
            2 * rows * length * K * H * k.dtype.itemsize,
            others,
        )
    return (q, k, v, start_B, length_B), {"scale": H**-0.5}, 2 * rows * N * H * T * length, others


def head_job(kernel: str, dtype: str, model: str, rows: int) -> tuple:
    D, V = model_config(model).hidden_size, model_config(model).vocab_size
    if kernel == "argmax":
        args = (random(0, (rows, V), jnp.float32),)
        return args, {}, args[0].nbytes, {"xla": (partial(jnp.argmax, axis=-1), args)}
    args = random(0, (rows, D), dtype), random(1, (V, D), dtype)
    return (
        args,
        {},
        args[1].nbytes,
        {"xla": (lambda x, w: jnp.argmax(jnp.dot(x, w.T, preferred_element_type=jnp.float32), -1), args)},
    )


def measure(
    plan, limit: float, work: float, known: dict, label: str, call: Callable, args: tuple, **facts: str
) -> dict[str, Any]:
    """Time, rate, share of the card's limit, and how many times as fast as those in `known`, which keeps all
    but the tuned ones.
    """
    # What the card could do in 20 ms; XLA may be far from that.
    calls = (0.005 if label == "xla" else 0.02) * limit / work
    found, out = timed(work, call, args, int(np.clip(calls, 2, plan.most_calls)), plan.repetitions)
    out, share = jax.tree.leaves(out)[0], 1e12 * found["T_per_s"] / limit
    off = error_of(out, known.setdefault("out", out))  # from the first; both may be 0.02 off
    faster = {f"x_{name}": ms / found["ms"] for name, ms in known.items() if name != "out"}
    known |= {label: found["ms"]} if "=" not in label else {}
    ok = off <= 0.04 and (share < 1.25 or plan.smoke)  # what outruns the card was left out of the loop
    return found | {"of_limit": share, **facts, **faster, "off": off, "ok": ok}


def model_config(name: str) -> xj.ModelConfig:
    settings = dict(
        model_type="qwen2", max_position_embeddings=32768, rope_theta=1e6, tie_word_embeddings=name == "0.5B"
    )
    return from_hf(settings | dict(zip(FIELDS, MODELS[name], strict=True)))


@cache
def load(name: str, dtype: str) -> tuple[dict, xj.ModelConfig]:
    """The bundled checkpoint, or one of MODELS with random weights."""
    if name == "bundled":
        model = xj.load_model(dtype=dtype)
        return model.params, model.config
    return xj.init_params(model_config(name), jax.random.key(0, impl="rbg"), dtype), model_config(name)


def end_to_end(report: Report, plan: SimpleNamespace) -> None:
    for impl, (model, rows, target) in itertools.product((None, "xla"), plan.end_to_end):
        report.case(
            f"{model}, {rows} rows, impl {impl}", partial(generation, plan, model, rows, impl, target)
        )


def generation(plan: SimpleNamespace, model: str, rows: int, impl: str | None, target: str) -> dict[str, Any]:
    """Statistics of the second of two generations, and the weights read per second as a share of the copy
    bandwidth.
    """
    params, config = load(model, plan.dtype)
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (rows, plan.tokens[0])).tolist()
    options = xj.GenerateOptions(plan.tokens[1], eos_token_ids=(), impl=impl)
    _, out = (xj.generate(params, config, prompts, options) for _ in range(2))
    stats, embedding = out.stats, 0 if config.tie_word_embeddings else params["embed"]["weight"].nbytes
    share = (stats.weight_bytes - embedding) / stats.tpot_seconds / plan.limits["bytes"]
    rates = {"prefill_tok/s": stats.prefill_tokens_per_second, "decode_tok/s": stats.decode_tokens_per_second}
    rates |= {"TPOT_ms": 1e3 * stats.tpot_seconds, "of_copy": share, "target": target}
    return rates | {"ok": bool(np.isfinite(out.logprobs).all())}


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
