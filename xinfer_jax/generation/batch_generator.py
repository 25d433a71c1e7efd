"""The rows of a call of `generate` or `stream`: prefill, decode steps, the checks of the generated tokens on
the host, and the output. `generate` and `stream` differ in the number of steps that they take at a time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.kv_cache import KVCache
from ..config.run_config import RunConfig
from ..model.extras import Extras
from ..stats import GenerateStats, Stopwatch, peak_bytes
from ..weights.params import tree_bytes
from .batch_arrays import generation_plan, initial_state, new_cache, pad_prompts, prompt_of_row
from .executor import Executor, Run, RunnableModel, run_program
from .executor_choice import Compilation, compile_ahead, executor_class
from .loop import TracedExecutor
from .options import GenerateOutput
from .output_checks import check_generated, check_overflow
from .state import DecodeState, SampledTokens, fetch_tokens
from .strategies import Plain, Strategy
from .validation import ValidatedCall


class BatchGenerator:
    """The rows of a call, and the tokens that they generated.

    Attributes:
        generated: the tokens of the rows so far, on the host. `start` sets it.
        stats: the cost of the call so far.
    """

    generated: SampledTokens

    def __init__(self, call: ValidatedCall, *, decodes_whole: bool):
        """Makes the arrays of the call, except its caches.

        Args:
            call: the result of `validate_call`.
            decodes_whole: True: decode with the traced executor, in one loop on the device. Otherwise, and
                for the prompts, the executor of `executor_class` serves.
        """
        with Stopwatch() as self._setup:
            self._prepare(call, decodes_whole)
        self.stats = GenerateStats(
            rows=len(self._row_prompts),
            prompt_tokens=sum(map(len, call.prompts)),
            weight_bytes=self._memory.parts["weights"],
            cache_bytes=0,
            memory=self._memory,
            reused_tokens=int(self._num_cached_B.sum()),
        )

    def _prepare(self, call: ValidatedCall, decodes_whole: bool) -> None:
        self._memory = generation_plan(call, call.rows)
        self._call = call
        self._decodes_whole = decodes_whole
        self._strategy: Strategy = Plain(call.config)
        self._drafting: Any = None
        if call.options.draft is not None:
            from .drafting import Drafting  # optional: speculative decoding

            self._drafting = Drafting(call)
            self._strategy = self._drafting.strategy
        self._executor, self._decoder = self._executors()
        self._row_prompts = [prompt for prompt in call.prompts for _ in range(call.answers)]
        self._grammars: Any = None
        if call.grammars:
            from .batch_matchers import BatchMatchers  # optional: grammars

            numbers = (i for i in range(len(call.prompts)) for _ in range(call.answers))
            self._grammars = BatchMatchers([call.new_matcher(i) for i in numbers])
        self._prompt_R = prompt_of_row(call)
        self._num_cached_B = np.zeros(call.prompt_rows, np.int32)  # tokens of each prompt in the prefix cache
        if call.options.prefix:
            self._num_cached_B[: len(call.prompts)] = call.options.prefix.shared(call.prompts)
        self._state = initial_state(call, self._prompt_R, self._grammars.dfas if self._grammars else ())
        uncached = [prompt[n:] for prompt, n in zip(call.prompts, self._num_cached_B, strict=False)]
        self._tokens = pad_prompts(uncached, call.capacity, call.prompt_rows)
        self._model = RunnableModel(call.params, call.config, Extras(taps=call.options.taps))
        self._constants: tuple = call.params, self._model.extras
        if self._drafting is not None:
            self._constants = self._drafting.constants

    def _executors(self, run: Run = run_program) -> tuple[Executor, Executor]:
        """Returns the executor that prefills and samples the first token, and the executor that decodes."""
        options = self._call.options
        if self._call.callers is not None or options.taps is not None:
            from ..sampling.caller_processors import guarded  # optional: functions of callers

            run = guarded(run, self._call.callers, None, options.taps)
        traced = TracedExecutor(RunConfig(options.impl), run)
        if options.taps is not None or self._drafting is not None and self._drafting.head:
            return traced, traced
        executor = executor_class(self._call.params)(RunConfig(options.impl), run, self._call.greedy)
        return executor, traced if self._decodes_whole and options.use_cache else executor

    def _new_caches(self) -> tuple[Any, Any]:
        """Returns the cache, with the prefix, and the draft model's cache, if there is one."""
        call = self._call
        if not call.options.use_cache:
            return None, None
        if prefix := call.options.prefix:
            from ..cache.truncation import truncate  # optional: prefixes

            cache = truncate(prefix.cache, self._num_cached_B)
            cache = dataclasses.replace(cache, layers=jax.tree.map(jnp.copy, cache.layers))
        else:
            cache = new_cache(call, call.params, call.config, call.capacity, call.prompt_rows)
        return cache, self._drafting and self._drafting.new_cache()

    def precompile(self) -> tuple[Compilation, int]:
        """Begins to compile the programs of the call in threads, once for each signature. Returns the
        compiler, and the number of programs that come before the first token.
        """

        def dry_run(compiler: Any) -> int:
            executor, decoder = self._executors(compiler)
            outputs, *rest = self._prefill(executor, *jax.eval_shape(self._new_caches))
            carry = self._sample(executor, outputs), *rest
            first = compiler.num_programs
            if self._call.options.max_tokens > 1:
                if self._call.options.use_cache:
                    decoder.decode(self._strategy, self._constants, carry, np.int32(1))
                else:
                    self._recompute(decoder, [[0]] * self._call.rows)
            return first

        return compile_ahead(self._call.params, self._signature(), dry_run)

    def _signature(self) -> Any:
        """Calls of equal signatures run the same programs."""
        call = self._call
        options = call.options
        prefix = options.prefix and options.prefix.cache
        arrays = self._constants, self._state, prefix, self._tokens
        sizes = call.capacity, call.prompt_rows, options.use_cache, options.cache_dtype
        # A draft model prefills the whole prompt, even if the model has a prefix.
        longest = call.longest, int(self._tokens[1].max())
        widths = [self._executor.prefill_width(tokens, call.prompt_rows) for tokens in longest]
        kinds = self._decodes_whole, call.greedy, options.max_tokens > 1
        return self._strategy, call.answers, *kinds, *sizes, options.impl, *widths, arrays

    def start(self) -> None:
        """Prefills the prompts and samples the first token of each row."""
        stats = self.stats
        with Stopwatch() as compiling:
            self._compiler, programs = self.precompile()
            self._compiler.wait(programs)
        with Stopwatch() as allocating:
            caches = self._new_caches()
        with Stopwatch() as prefilling:
            outputs, *self._rest = self._prefill(self._executor, *caches)
            outputs.block_until_ready()
        with Stopwatch() as sampling:
            self._set_masks(first=True)
            self._state = self._sample(self._executor, outputs)
            self._fetch()
        if self._cache is not None:
            stats.cache_bytes = tree_bytes(self._cache.layers)
        stats.prefill_seconds = prefilling.seconds
        watches = self._setup, allocating, prefilling, sampling
        stats.ttft_seconds = sum(watch.seconds for watch in watches)
        stats.compile_seconds = compiling.seconds
        stats.count(compiling, *watches)

    def decode(self, steps: int) -> None:
        """Takes this number of steps, or fewer if all rows end. Without a cache it takes one."""
        with Stopwatch() as compiling:
            self._compiler.wait()
        with Stopwatch() as decoding:
            steps = min(steps, self._call.options.max_tokens - self.steps)
            while steps > 0 and self.active_R.any():
                count = steps
                if self._grammars and self._grammars.need_masks(self.active_R):  # step by step
                    count = 1
                    self._set_masks()
                if self._cache is None:
                    self._state = self._recompute(self._decoder, self.generated.rows())
                else:
                    carry = self._state, *self._rest
                    carry = self._decoder.decode(self._strategy, self._constants, carry, np.int32(count))
                    self._state, *self._rest = carry
                self._fetch()
                steps -= count
        self.stats.compile_seconds += compiling.seconds
        self.stats.count(compiling, decoding)
        self.stats.decode_seconds += decoding.seconds
        self.stats.decode_steps = self.steps - 1

    def _fetch(self) -> None:
        self.generated = fetch_tokens(self._state, len(self._row_prompts))
        check_generated(self._call, self.generated)
        if self._grammars:
            self._grammars.append(self.generated.rows())

    def _set_masks(self, first: bool = False) -> None:
        """Writes the tokens that grammars allow into the state. first: no token is sampled yet."""
        if not self._call.needs_masks:
            return
        context = self._state.context
        draft_BT = None
        if self._drafting is not None and not first:
            args = self._constants, self._state, self._rest
            draft_BT, self._rest = self._drafting.propose(self._decoder, *args)
        active_R = None if first else self.active_R
        masks = self._grammars.masks(context.allowed_bits.shape, active_R, draft_BT)
        self._state = self._state.with_masks(masks)

    @property
    def _cache(self) -> KVCache | None:
        return self._rest[0]

    @property
    def active_R(self) -> np.ndarray:
        """bool: the row continues."""
        return ~self.generated.finished_B & (self.generated.count_B < self._call.options.max_tokens)

    @property
    def steps(self) -> int:
        """The number of tokens that every active row has or, once none is active, the number of tokens of the
        longest row.
        """
        of_active = self.generated.count_B[self.active_R]
        return int(of_active.min() if of_active.size else self.generated.count_B.max())

    def ids(self, step: int) -> list[int | None]:
        """Returns the tokens of a step, with None for a row that had ended."""
        column = self.generated.tokens_BT[:, step].tolist()
        rows = zip(column, self.generated.count_B, strict=True)
        return [token if step < n else None for token, n in rows]

    def _prefill(self, executor: Executor, cache: Any, draft_cache: Any) -> list[Any]:
        """Returns the outputs of the last tokens of the rows that answer, and the parts of the carry other
        than the state.
        """
        unread = None
        args = self._model, self._tokens, cache
        if self._drafting is None:
            outputs, cache, *_ = executor.prefill(*args)
        else:
            outputs, cache, draft_cache, unread = self._drafting.prefill(executor, *args, draft_cache)
        if self._call.answers > 1:
            outputs, unread = executor.run(_PICK, (outputs, unread), self._prompt_R)
            cache, draft_cache = (
                x if x is None else executor.reorder(x, self._prompt_R) for x in (cache, draft_cache)
            )
        self._unread = unread
        if self._drafting is None:
            return [outputs, cache]
        return [outputs, *self._drafting.start(executor, cache, draft_cache)]

    def _sample(self, executor: Executor, outputs: Any) -> DecodeState:
        state = dataclasses.replace(self._state, unread=self._unread)
        return executor.sample(executor.logits(self._model, outputs), state)[0]

    def _recompute(self, executor: Executor, generated: list[list[int]]) -> DecodeState:
        """Returns the state with the next token, after a forward pass of the whole rows, without a cache."""
        call = self._call
        pairs = zip(self._prompt_R, generated, strict=False)
        rows = [call.prompts[i] + ids for i, ids in pairs]
        tokens = pad_prompts(rows, call.config.context_length, call.rows)
        return self._sample(executor, executor.prefill(self._model, tokens, None).hidden)

    def output(self, stopped_at: int | None = None) -> GenerateOutput:
        """Returns the output of the call.

        Args:
            stopped_at: the number of tokens of each row after which the caller stopped the call. Later tokens
                do not count.
        """
        call = self._call
        options = call.options
        stats = self.stats
        check_overflow(call, self._cache)
        tokens_RT, logprobs_RT, length_R, finished_R, *_ = self.generated
        if stopped_at is not None:
            finished_R = finished_R & (length_R <= stopped_at)
            length_R = np.minimum(length_R, stopped_at)
        rows = self.generated._replace(count_B=length_R).rows()
        stats.generated_tokens = int(length_R.sum())
        stats.peak_bytes = peak_bytes()
        for draft in self._rest[1:]:
            self._drafting.count(draft, stats, len(rows))

        def reason(ids: list[int], finished: bool) -> str:
            if finished:
                return "stop"
            return "length" if stopped_at is None or len(ids) == options.max_tokens else "abort"

        ends = list(zip(rows, finished_R, strict=True))
        stop_ids = {*options.stop_token_ids}
        out = GenerateOutput(
            tokens=rows,
            logprobs=[row[:n].tolist() for row, n in zip(logprobs_RT, length_R, strict=True)],
            finish_reason=[reason(*end) for end in ends],
            stop_reason=[ids[-1] if finished and ids[-1] in stop_ids else None for ids, finished in ends],
            stats=stats,
        )
        if (recorded := self._state.alternatives) is not None:
            from ..sampling.logprobs import output_fields  # optional: alternatives

            found: Any = output_fields(recorded, tokens_RT, logprobs_RT, length_R)
            out = dataclasses.replace(out, **found)
        if options.keep_prefix:
            from ..cache.prefix import make_prefix  # optional: prefixes

            out.prefix = make_prefix(call.params, call.config, self._row_prompts, rows, self._cache)
        return out if options.best_of in (None, options.n) else out.best(options.n, options.best_of)


def _pick(outputs_B, prompt_R):
    return jax.tree.map(lambda x_B: x_B[prompt_R], outputs_B)


_PICK = jax.jit(_pick)
