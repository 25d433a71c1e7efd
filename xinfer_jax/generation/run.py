"""A call under way: its prompts are read, its rows advance, the host looks at them. `generate` and `stream`
are this in two rhythms.
"""

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ..cache.kv_cache import KVCache, reorder, truncate
from ..cache.prefix import kept_prefix
from ..config.model_config import ModelConfig
from ..sampling.logprobs import rows_of_tokens
from ..stats import GenerateStats, Stopwatch, give_back_memory, peak_bytes
from ..weights.params import tree_bytes
from .batches import check_room, empty_cache, first_state, padded, prompts_of_rows
from .doors import prefill, prompt_chunk
from .faults import check_cache, check_chosen
from .loop import ADVANCE, READ, READ_AGAIN
from .options import Call, GenerateOptions, GenerateOutput
from .speculation import SPECULATE, Guessing, Speculation, look_up
from .state import Chosen, DecodeState, choose_and_note, look

_CHOOSE = jax.jit(choose_and_note, static_argnames="impl")
_SHARE = jax.jit(reorder)  # a prompt's cache for each of its answers
_PICK = jax.jit(lambda logits_BV, prompt_R: logits_BV[prompt_R])


class Run:
    """The rows of a call.

    Attributes:
        chosen: what they chose, as the host knows it.
        stats: what it cost so far.
    """

    def __init__(self, call: Call, *, compile_ahead: bool = False):
        """Reads the prompts and chooses every row's first token.

        Args:
            call: from `checked`.
            compile_ahead: compile the loop too, at the same time.
        """
        self._call, options = call, call.options
        self._cache: KVCache | None = None
        self._draft: Speculation | None = None
        self._state: DecodeState
        self.stats: GenerateStats
        self.chosen: Chosen
        with Stopwatch() as setup:
            tokens_BT, num_tokens_B = self._set_up()
        started = time.perf_counter()
        simple = call.answers == 1 and options.draft is None and options.prefix is None
        if compile_ahead and simple and self._cache is not None:
            _compile_side_by_side(call, tokens_BT, num_tokens_B, self._state, self._cache)
        compiling = time.perf_counter() - started
        with Stopwatch() as reading:
            logits_RV = self._read(tokens_BT, num_tokens_B)
            logits_RV.block_until_ready()
        with Stopwatch() as choosing:
            self._state = _CHOOSE(logits_RV, self._state, options.impl)
            self._look()
        self.stats.prefill_seconds = reading.seconds
        self.stats.ttft_seconds = setup.seconds + reading.seconds + choosing.seconds
        self.stats.compile_seconds = self.stats.total_seconds = compiling
        self.stats.count(setup, reading, choosing)

    def _set_up(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and cache before anything is read; what there is to read, [B, T], and how much of it."""
        call, prefix = self._call, self._call.options.prefix
        prompts, B = len(call.prompts), call.prompt_rows
        self._prompt_R = prompts_of_rows(call)
        check_room(call, call.rows)
        self._rows = [call.prompts[i] for i in self._prompt_R[: prompts * call.answers]]
        held_B = np.zeros(B, np.int32)
        if prefix:
            held_B[:prompts] = prefix.shared(call.prompts)
            self._cache = truncate(prefix.cache, held_B)
        elif call.options.use_cache:
            self._cache = empty_cache(call, call.params, call.config, call.capacity, B)
        self._state = first_state(call, self._prompt_R)
        read, reused = sum(map(len, call.prompts)), int(held_B.sum())
        self.stats = GenerateStats(len(self._rows), read, tree_bytes(call.params), 0, reused)
        rest = [prompt[held:] for prompt, held in zip(call.prompts, held_B, strict=False)]
        return padded(rest, call.capacity, B)

    def _read(self, tokens_BT: np.ndarray, num_tokens_B: np.ndarray) -> jax.Array:
        """Logits [R, V] behind the prompt of each row, which the cache and the draft then hold."""
        call, impl, donate = self._call, self._call.options.impl, self._call.options.prefix is None
        model = call.params, call.config
        if self._cache is None:
            logits_BV = READ_AGAIN(*model, tokens_BT, num_tokens_B, impl)
        else:
            logits_BV, self._cache = prefill(
                *model, tokens_BT, num_tokens_B, self._cache, donate=donate, impl=impl
            )
        draft_cache = _read_for_draft(call, len(num_tokens_B))
        if call.answers > 1:
            logits_BV = _PICK(logits_BV, self._prompt_R)
            caches = (cache and _SHARE(cache, self._prompt_R) for cache in (self._cache, draft_cache))
            self._cache, draft_cache = caches
        if call.options.draft is not None:
            nothing_R = np.zeros(call.rows, np.int32)
            self._draft = Speculation(draft_cache, nothing_R, nothing_R)
        self.stats.cache_bytes = tree_bytes((self._cache.k, self._cache.v)) if self._cache else 0
        return logits_BV

    @property
    def active_R(self) -> np.ndarray:
        """bool: the row goes on."""
        return ~self.chosen.finished_B & (self.chosen.length_B < self._call.options.max_new_tokens)

    @property
    def steps(self) -> int:
        """Tokens that every row has which goes on; the longest row's, once none does."""
        of_active = self.chosen.length_B[self.active_R]
        return int(of_active.min() if of_active.size else self.chosen.length_B.max())

    def advance(self, steps: int) -> None:
        """Takes so many steps, or fewer where all rows end; without a cache, one."""
        call, impl = self._call, self._call.options.impl
        with Stopwatch() as decoding:
            if self._cache is None:
                rows = [row + ids for row, ids in zip(self._rows, self.chosen.rows(), strict=True)]
                tokens_RT, num_tokens_R = padded(rows, call.config.context_length, call.rows)
                logits_RV = READ_AGAIN(call.params, call.config, tokens_RT, num_tokens_R, impl)
                self._state = _CHOOSE(logits_RV, self._state, impl)
            elif self._draft is None:
                self._state, self._cache = ADVANCE.donating(
                    call.params, call.config, self._state, self._cache, np.int32(steps), impl
                )
            else:
                draft_params, guesser = _guesser(call.options)
                who = Guessing(guesser, call.guesses)
                self._state, self._cache, self._draft = SPECULATE.donating(
                    call.params, call.config, draft_params, who, self._state, self._cache, self._draft,
                    np.int32(steps), impl,
                )  # fmt: skip
            self._look()
        self.stats.count(decoding)
        self.stats.decode_seconds += decoding.seconds
        self.stats.decode_steps = self.steps - 1

    def _look(self) -> None:
        self.chosen = look(self._state, len(self._rows))
        check_chosen(self._call, self.chosen)

    def ids(self, step: int) -> list[int | None]:
        """What the rows chose at a step; None of a row that had ended, or ends there."""
        column, ends = self.chosen.tokens_BT[:, step].tolist(), self._call.ending
        rows = zip(column, self.chosen.length_B, strict=True)
        return [token if step < n and token not in ends else None for token, n in rows]

    def output(self, told: int | None = None) -> GenerateOutput:
        """What the call gives.

        Args:
            told: a caller's word to stop came after so many tokens a row: what was chosen ahead of it does
                not count.
        """
        call, options, stats = self._call, self._call.options, self.stats
        check_cache(call, self._cache)
        tokens_RT, logprobs_RT, length_R, finished_R = self.chosen
        if told is not None:
            finished_R, length_R = finished_R & (length_R <= told), np.minimum(length_R, told)
        rows = self.chosen._replace(length_B=length_R).rows()
        stats.generated_tokens, stats.peak_bytes = int(length_R.sum()), peak_bytes()
        if self._draft is not None:
            passes_R = np.asarray(self._draft.passes_B)[: len(rows)]
            accepted_R = np.asarray(self._draft.accepted_B)[: len(rows)]
            stats.passes = passes_R.tolist()
            stats.acceptance = (accepted_R / (np.maximum(passes_R, 1) * call.guesses)).tolist()

        def reason(ids: list[int], finished: bool) -> str:
            if finished:
                return "stop" if ids[-1] in options.stop_token_ids else "eos"
            return "length" if told is None or len(ids) == options.max_new_tokens else "stop"

        ends = list(zip(rows, finished_R, strict=True))
        out = GenerateOutput(
            tokens=[ids[:-1] if finished else ids for ids, finished in ends],
            logprobs=[row[:n].tolist() for row, n in zip(logprobs_RT, length_R, strict=True)],
            finish_reason=[reason(*end) for end in ends],
            stats=stats,
        )
        noted = self._state.alternatives
        if options.logprobs and noted:
            out.alternatives = rows_of_tokens(noted, tokens_RT, logprobs_RT, length_R)
        if options.logits and noted:
            of_rows = zip(map(np.asarray, noted.logits_BTV), length_R, strict=False)
            out.logits = [logits_TV[:n] for logits_TV, n in of_rows]  # cut on the host: nothing to compile
        if options.keep_prefix:
            out.prefix = kept_prefix(call.params, call.config, self._rows, rows, self._cache)
        return out if options.best_of in (None, options.n) else out.best(options.n, options.best_of)


def _read_for_draft(call: Call, rows: int) -> KVCache | None:
    """The draft model's cache, which holds the prompts; None where no model guesses."""
    params, config = _guesser(call.options)
    if not isinstance(config, ModelConfig):
        return None
    impl = call.options.impl
    capacity = min(call.capacity, config.context_length)  # guesses beyond are dropped
    cache = empty_cache(call, params, config, capacity, rows)
    tokens_BT, num_tokens_B = padded(call.prompts, capacity, rows)
    return prefill(params, config, tokens_BT, num_tokens_B, cache, donate=True, impl=impl)[1]


def _guesser(options: GenerateOptions) -> tuple[Any, Any]:
    """The draft model's parameters and configuration; or None and a function, or None."""
    if options.draft is None or options.draft == "lookup" or callable(options.draft):
        return None, look_up if options.draft == "lookup" else options.draft
    return options.draft.params, options.draft.config


def _compile_side_by_side(
    call: Call, tokens_BT: np.ndarray, num_tokens_B: np.ndarray, state: DecodeState, cache: KVCache
) -> None:
    """Compiles the three programs of a stream at once, for whoever waits for a first answer."""
    leaves, tree = jax.tree.flatten((call.params, tokens_BT, num_tokens_B, state, cache))
    shardings = (
        x.sharding if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 else None for x in leaves
    )
    kinds = tuple((x.shape, x.dtype, sharding) for x, sharding in zip(leaves, shardings, strict=True))
    _compile(call.config, call.options.impl, prompt_chunk(cache), tree, kinds)


# Once for each kind of call: looking the programs up again takes milliseconds.
@functools.lru_cache(maxsize=256)
def _compile(config: ModelConfig, impl: str | None, chunk: int, tree: Any, kinds: tuple) -> None:
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in kinds]
    params, tokens_BT, num_tokens_B, state, cache = jax.tree.unflatten(tree, structs)
    logits_BV = jax.ShapeDtypeStruct(state.context.seen_BV.shape, np.float32)
    steps = jax.ShapeDtypeStruct((), np.int32)
    calls = (
        (ADVANCE.donating, params, config, state, cache, steps, impl),
        (_CHOOSE, logits_BV, state, impl),
        (READ.donating, params, config, tokens_BT, num_tokens_B, cache, impl, chunk),
    )
    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(lambda call: call[0].lower(*call[1:]).compile(), calls))
    give_back_memory()
