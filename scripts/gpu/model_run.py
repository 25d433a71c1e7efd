"""A model with random weights on this machine: how fast it generates, and what it agrees with."""

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from bench.model_shapes import SHAPES
from bench.model_work import bytes_per_pass, decode_work, prefill_work

import xinfer_jax as xj
from gpu.agreement import Forced, agreement, checking_params, forced
from gpu.section_cases import emulated, limit
from xinfer_jax.cache.stored_kv import cache_dtype_of
from xinfer_jax.families.reading import from_hf

SMALL = dict(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096)


def settings(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a shape of Qwen2.5, or of a tiny one."""
    return (SHAPES[f"qwen2.5-{name}"] if name != "tiny" else {"model_type": "qwen2", **SMALL}) | changes


class ModelRun:
    """One model in one format, with `checking_params`."""

    def __init__(
        self,
        plan: SimpleNamespace,
        hf: dict[str, Any],
        dtype: str = "bfloat16",
        quantize: str | None = None,
        cache_dtype: str | None = None,
    ):
        self.plan = plan
        self.config = from_hf(hf)
        self.dtype = dtype
        self.quantize = quantize
        self.cache_dtype = cache_dtype or dtype
        self.kernels = emulated(plan)  # None: what suits the device
        self.prompt, self.new = (40, 40) if plan.tiny else (512, 128)
        self.params = cache(self._params)

    def _params(self) -> Any:
        return checking_params(self.config, jax.random.key(0, impl="rbg"), self.dtype, self.quantize)

    def prompts(self, rows: int) -> list[list[int]]:
        draws = np.random.default_rng(self.plan.seed)
        return draws.integers(0, self.config.vocab_size, (rows, self.prompt)).tolist()

    def generate(self, rows: int, impl: str | None, key: Any = None, **options: Any) -> xj.GenerateOutput:
        """Answers of `new` tokens. impl: None: the kernels. options: of `GenerateOptions`."""
        given = dict(impl=impl or self.kernels, cache_dtype=self.cache_dtype)
        options = xj.GenerateOptions(self.new, eos_token_ids=(), **given | options)
        return xj.generate(self.params(), self.config, self.prompts(rows), options, key=key)

    def compile_in_parallel(self, kinds: list[tuple[int, str | None]], **options: Any) -> dict[str, Any]:
        """Compiles `generate` of all these rows and impls in parallel, one per thread: XLA compiles on one
        core.
        """
        self.params()
        with ThreadPoolExecutor(len(kinds)) as pool:
            outs = list(pool.map(lambda kind: self.generate(*kind, **options), kinds))
        return {"each_compile_s": [round(out.stats.compile_seconds, 1) for out in outs]}

    def measure(self, rows: int, impl: str | None, **options: Any) -> dict[str, Any]:
        """Speeds as medians of three generations, and as fractions of the GPU's limits."""
        runs = [self.generate(rows, impl, **options) for _ in range(2 if self.plan.tiny else 4)]
        stats = [out.stats for out in runs[1:]]
        prefill, step, rate = (
            statistics.median(values)
            for values in zip(
                *((s.prefill_seconds, s.tpot_seconds, s.decode_tokens_per_second) for s in stats), strict=True
            )
        )
        flop = prefill_work(self.config, bytes_per_pass(self.params()), [self.prompt] * rows).flop
        program = "sampled" if "sampling" in options else "verify" if "draft" in options else "decode"
        more = {"acceptance": statistics.fmean(stats[-1].acceptance)} if program == "verify" else {}
        return {
            "decode_tok/s": rate,
            "TPOT_ms": 1e3 * step,
            **self.step_figures(rows, step, self.prompt, self.new, program != "decode"),
            **more,
            "prefill_tok/s": rows * self.prompt / prefill,
            "of_matmul": flop / prefill / limit(self.plan.tiny, "flops"),
            "peak_GB": stats[-1].peak_bytes / 1e9,
            "ok": bool(np.isfinite([*map(sum, runs[-1].logprobs)]).all()),
        }

    def step_figures(self, rows: int, seconds: float, length: int, new: int, logits: bool) -> dict[str, Any]:
        """What a decode step of these rows, `length` tokens long, moves at least (weights, valid keys and
        values, and `logits`, if it makes them, written once and read once), and what a copy of as many bytes
        would take of its time. new: steps that follow.
        """
        itemsize: Any = (
            cache_dtype_of(self.cache_dtype).vector_bytes(self.config.head_dim) / self.config.head_dim
        )
        weights = bytes_per_pass(self.params())
        moved = decode_work(self.config, weights, itemsize, [length] * rows, new).bytes
        moved += 2 * 4 * rows * self.config.vocab_size * logits
        return {"step_MB": moved / 1e6, "of_copy": moved / seconds / limit(self.plan.tiny, "bytes")}

    # --- agreement ------------------------------------------------------------------------------------------

    def forced(
        self, tokens: Any, prompt: int, impl: str | None, params: Any = None, cache_dtype: Any = None
    ) -> Forced:
        """The model along these tokens. impl: None: the kernels. params: others than its own."""
        tokens_BT = np.array(tokens, np.int32)
        kv_cache = xj.init_cache(self.config, *tokens_BT.shape, cache_dtype or self.cache_dtype)
        impl = impl or self.kernels
        return forced(
            self.params() if params is None else params, self.config, tokens_BT, kv_cache, prompt, impl
        )

    def agreement(self, rows: int = 2, want: Callable[[list, int], Forced] | None = None) -> dict[str, Any]:
        """Compares the logits of kernels and XLA along a forced sequence; also reports which kernels ran.
        want: gives the reference along tokens with a prompt of a number of them; None: this model with XLA.
        """
        draws = np.random.default_rng(self.plan.seed)
        tokens = draws.integers(0, self.config.vocab_size, (rows, self.prompt + min(self.new, 64))).tolist()
        want = want or (lambda tokens, prompt: self.forced(tokens, prompt, "xla"))
        self.params()
        with ThreadPoolExecutor(2) as pool:  # compiles both in parallel
            got, reference = pool.map(
                lambda run: run(tokens, self.prompt), (lambda *args: self.forced(*args, None), want)
            )
        return {"kernels": self.kernels_used(rows)} | agreement(got, reference, self.prompt, self.dtype)

    def kernels_used(self, rows: int) -> dict[str, str]:
        used = xj.kernels_used(self.params(), self.config, self.kernels, rows, self.cache_dtype)
        return {kernel: selection.impl for kernel, selection in used.items()}

    def along(self, prompts: list[list[int]], answers: list[list[int]]) -> Forced:
        """The model with XLA along prompts and answers, without the last token of each answer."""
        tokens = [prompt + answer[:-1] for prompt, answer in zip(prompts, answers, strict=True)]
        return self.forced(tokens, len(prompts[0]), "xla")

    def as_model(self) -> xj.Model:
        """It, as an engine takes it."""
        return xj.Model(self.params(), self.config)
