"""The rows of a call of `generate` or `stream`: prefill, decode steps, the checks of the generated tokens on
the host, and the output. `generate` and `stream` differ in how many steps they take at a time.
"""

import copy
import dataclasses
from typing import Any

import jax
import numpy as np

from .. import plugin
from ..cache.kv_cache import KVCache, truncate
from ..sampling.logprobs import token_logprob_rows
from ..stats import GenerateStats, Stopwatch, peak_bytes
from ..weights.params import tree_bytes
from .batch_arrays import check_generation_memory, initial_state, new_cache, pad_prompts, prompt_of_row
from .batch_matchers import BatchMatchers
from .executor import IMMEDIATE, Executor, compile_ahead
from .options import GenerateOutput
from .output_checks import check_generated, check_overflow
from .runners import WholeModelRunner, runner_class
from .state import GeneratedTokens, fetch_tokens
from .strategies import Plain, Strategy
from .validation import ValidatedCall


class BatchGenerator:
    """The rows of a call, and what they generated.

    Attributes:
        generated: the tokens of the rows so far, on the host; set by `start`.
        stats: the cost of the call so far.
    """

    generated: GeneratedTokens

    def __init__(self, call: ValidatedCall, *, decodes_whole: bool, executor: Executor = IMMEDIATE):
        """Makes the arrays of the call.

        Args:
            call: from `validate_call`.
            decodes_whole: decode with the whole-model runner, in one loop on the device. Otherwise, and for
                the prompts, the runner of `runner_class` serves.
            executor: in a dry run the arrays are only shapes.
        """
        with Stopwatch() as self._setup:
            self._allocate(call, decodes_whole, executor)
        self.stats = GenerateStats(
            rows=len(self._row_prompts),
            prompt_tokens=sum(map(len, call.prompts)),
            weight_bytes=tree_bytes(call.params),
            cache_bytes=0,
            reused_tokens=int(self._num_cached_B.sum()),
        )

    def _allocate(self, call: ValidatedCall, decodes_whole: bool, executor: Executor) -> None:
        check_generation_memory(call, call.rows)
        self._call = call
        self._decodes_whole = decodes_whole
        self._use(executor)
        self._row_prompts = [prompt for prompt in call.prompts for _ in range(call.answers)]
        numbers = (i for i in range(len(call.prompts)) for _ in range(call.answers))
        self._grammars = BatchMatchers([call.new_matcher(i) for i in numbers])
        self._prompt_R = prompt_of_row(call)
        self._num_cached_B = np.zeros(call.prompt_rows, np.int32)  # tokens of each prompt in the prefix cache
        self._cache: KVCache | None = None
        prefix = call.options.prefix
        if prefix:
            self._num_cached_B[: len(call.prompts)] = prefix.shared(call.prompts)
            self._cache = executor.create(lambda: truncate(prefix.cache, self._num_cached_B))
        elif call.options.use_cache:
            size = call.capacity, call.prompt_rows
            self._cache = executor.create(lambda: new_cache(call, call.params, call.config, *size))
        self._state = initial_state(call, self._prompt_R, self._grammars.dfas)
        uncached = [prompt[n:] for prompt, n in zip(call.prompts, self._num_cached_B, strict=False)]
        self._tokens = pad_prompts(uncached, call.capacity, call.prompt_rows)
        self._model = call.params, call.config
        self._draft: list[Any] = []  # of the carry; one where the call has a draft
        self._constants: tuple = (call.params,)
        self._strategy: Strategy = Plain(call.config)
        self._drafting: Any = None
        if call.options.draft is not None:
            self._drafting = plugin("decoding", "draft")(call)
            self._constants = self._drafting.constants
            self._strategy = self._drafting.strategy

    def _use(self, executor: Executor) -> None:
        impl = self._call.options.impl
        self._executor = executor
        self._runner = runner_class(self._call.params)(executor, impl, self._call.greedy)
        self._decoder = WholeModelRunner(executor, impl) if self._decodes_whole else self._runner

    def precompile(self) -> tuple[Any, int]:
        """Begins to compile the programs of the call in threads, once for each signature. Returns the
        compiler, and how many programs come before the first token.
        """

        def dry_run(compiler: Any) -> int:
            batch = copy.copy(self)
            batch._use(compiler)
            batch._cache = compiler.shapes(self._cache)
            batch._sample(batch._prefill())
            first = compiler.num_programs
            if self._call.options.max_new_tokens > 1:
                batch._decode(1)
            return first

        return compile_ahead(self._call.params, self._signature(), dry_run)

    def _signature(self) -> Any:
        """Calls of equal signatures run the same programs."""
        call = self._call
        options = call.options
        arrays = self._constants, self._state, self._cache, self._tokens
        # A draft model prefills the whole prompt, even if the model has a prefix.
        longest = call.longest, int(self._tokens[1].max())
        widths = [self._runner.prefill_width(tokens, call.prompt_rows) for tokens in longest]
        kinds = self._decodes_whole, call.greedy, options.max_new_tokens > 1, options.prefix is None
        return self._strategy, call.answers, *kinds, options.impl, *widths, arrays

    def start(self) -> None:
        """Prefills the prompts and samples the first token of each row."""
        stats = self.stats
        with Stopwatch() as compiling:
            self._compiler, programs = self.precompile()
            self._compiler.wait(programs)
        with Stopwatch() as prefilling:
            outputs = self._prefill().block_until_ready()
        with Stopwatch() as sampling:
            self._set_masks(first=True)
            self._sample(outputs)
            self._fetch()
        if self._cache is not None:
            stats.cache_bytes = tree_bytes(self._cache.layers)
        stats.prefill_seconds = prefilling.seconds
        stats.ttft_seconds = self._setup.seconds + prefilling.seconds + sampling.seconds
        stats.compile_seconds = compiling.seconds
        stats.count(self._setup, compiling, prefilling, sampling)

    def decode(self, steps: int) -> None:
        """Takes so many steps, or fewer where all rows end; without a cache one."""
        with Stopwatch() as compiling:
            self._compiler.wait()
        with Stopwatch() as decoding:
            steps = min(steps, self._call.options.max_new_tokens - self.steps)
            while steps > 0 and self._grammars.need_masks(self.active_R):  # step by step
                self._set_masks()
                self._decode(1)
                self._fetch()
                steps -= 1
            if steps and self.active_R.any():
                self._decode(steps)
                self._fetch()
        self.stats.compile_seconds += compiling.seconds
        self.stats.count(compiling, decoding)
        self.stats.decode_seconds += decoding.seconds
        self.stats.decode_steps = self.steps - 1

    def _fetch(self) -> None:
        self.generated = fetch_tokens(self._state, len(self._row_prompts))
        check_generated(self._call, self.generated)
        self._grammars.append(self.generated.rows())

    def _set_masks(self, first: bool = False) -> None:
        """Writes the tokens that grammars allow into the state. first: no token is sampled yet."""
        if not self._call.needs_masks:
            return
        context = self._state.context
        draft_BT = None
        if self._drafting is not None and not first:
            draft_BT = self._drafting.draft_tokens(context, self._executor)
        active_R = None if first else self.active_R
        masks = self._grammars.masks(context.allowed_bits.shape, active_R, draft_BT)
        context = dataclasses.replace(context, allowed_bits=masks)
        self._state = dataclasses.replace(self._state, context=context)

    @property
    def active_R(self) -> np.ndarray:
        """bool: the row continues."""
        return ~self.generated.finished_B & (self.generated.length_B < self._call.options.max_new_tokens)

    @property
    def steps(self) -> int:
        """Tokens that every active row has; those of the longest row once none is active."""
        of_active = self.generated.length_B[self.active_R]
        return int(of_active.min() if of_active.size else self.generated.length_B.max())

    def ids(self, step: int) -> list[int | None]:
        """The tokens of a step; None for a row that had ended, or ends there."""
        column = self.generated.tokens_BT[:, step].tolist()
        end_ids = self._call.end_ids
        rows = zip(column, self.generated.length_B, strict=True)
        return [token if step < n and token not in end_ids else None for token, n in rows]

    def _prefill(self) -> Any:
        """The outputs of the last tokens, of the rows that answer."""
        call = self._call
        donate = call.options.prefix is None
        outputs, self._cache = self._runner.prefill(self._model, self._tokens, self._cache, donate)
        draft_cache = None
        if self._drafting is not None:
            draft_cache = self._drafting.prefill(self._runner, self._executor)
        if call.answers > 1:
            outputs = self._executor(_PICK, outputs, self._prompt_R)
            if self._cache is not None:
                self._cache = self._runner.reorder(self._cache, self._prompt_R)
            if draft_cache is not None:
                draft_cache = self._runner.reorder(draft_cache, self._prompt_R)
        if self._drafting is not None:
            self._cache, draft = self._drafting.start(self._cache, draft_cache, self._executor)
            self._draft = [draft]
        return outputs

    def _sample(self, outputs: Any) -> None:
        self._state = self._runner.sample(self._model, outputs, self._state)

    def _decode(self, steps: int) -> None:
        if self._cache is None:
            self._recompute()
            return
        carry: Any = self._state, self._cache, *self._draft
        carry = self._decoder.decode(self._strategy, self._constants, carry, steps)
        self._state, self._cache, *self._draft = carry

    def _recompute(self) -> None:
        """Samples the next token after a forward pass of the whole rows, without a cache."""
        call = self._call
        prompts = [call.prompts[i] for i in self._prompt_R]
        # In a dry run nothing is generated yet.
        generated = self.generated.rows() if hasattr(self, "generated") else [[0]] * len(prompts)
        rows = [prompt + ids for prompt, ids in zip(prompts, generated, strict=False)]
        tokens = pad_prompts(rows, call.config.context_length, call.rows)
        self._sample(self._runner.prefill(self._model, tokens, None, True)[0])

    def output(self, stopped_at: int | None = None) -> GenerateOutput:
        """What the call returns.

        Args:
            stopped_at: the caller stopped the call after so many tokens of each row: later ones do not count.
        """
        call = self._call
        options = call.options
        stats = self.stats
        check_overflow(call, self._cache)
        tokens_RT, logprobs_RT, length_R, finished_R = self.generated
        if stopped_at is not None:
            finished_R = finished_R & (length_R <= stopped_at)
            length_R = np.minimum(length_R, stopped_at)
        rows = self.generated._replace(length_B=length_R).rows()
        stats.generated_tokens = int(length_R.sum())
        stats.peak_bytes = peak_bytes()
        for draft in self._draft:
            self._drafting.count(draft, stats, len(rows))

        def reason(ids: list[int], finished: bool) -> str:
            if finished:
                return "stop" if ids[-1] in options.stop_token_ids else "eos"
            return "length" if stopped_at is None or len(ids) == options.max_new_tokens else "stop"

        ends = list(zip(rows, finished_R, strict=True))
        out = GenerateOutput(
            tokens=[ids[:-1] if finished else ids for ids, finished in ends],
            logprobs=[row[:n].tolist() for row, n in zip(logprobs_RT, length_R, strict=True)],
            finish_reason=[reason(*end) for end in ends],
            stats=stats,
        )
        alternatives = self._state.alternatives
        if options.logprobs and alternatives:
            out.alternatives = token_logprob_rows(alternatives, tokens_RT, logprobs_RT, length_R)
        if options.logits and alternatives:
            of_rows = zip(map(np.asarray, alternatives.logits_BTV), length_R, strict=False)
            out.logits = [logits_TV[:n] for logits_TV, n in of_rows]  # cut on the host: nothing to compile
        if options.keep_prefix:
            model = call.params, call.config
            out.prefix = plugin("cache", "prefix")(*model, self._row_prompts, rows, self._cache)
        return out if options.best_of in (None, options.n) else out.best(options.n, options.best_of)


def _pick(outputs_B, prompt_R):
    return outputs_B[prompt_R]


_PICK = jax.jit(_pick)
