"""`beam_search`: beam search and beam sampling, which follow `num_beams` continuations of each prompt.

prompts ─ prefill, once each ─► W beams per prompt ─► loop: score → take C candidates → separate ended
sequences → append K/V → attend
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..cache.kv_cache import KVCache, without_layers
from ..checks import check_integer, is_sequence, number_array
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..errors import InputError, format_token_counts, format_value
from ..model.decoder import ModelOutput
from ..old_names import renamed_arguments
from ..ops.operation import without_mesh_context
from ..sampling.sampling_config import SamplingConfig
from ..sampling.used_settings import used_settings
from ..stats import GenerateStats, Stopwatch, peak_bytes
from ..weights.params import Params, tree_bytes
from .batch_arrays import generation_plan, initial_state, new_cache, pad_prompts, prompt_of_row
from .beam_steps import BeamRequest, BeamResults, BeamSearch
from .executor import Executor, RunnableModel, bucket
from .executor_choice import Compilation, compile_ahead, executor_class
from .options import GenerateOptions
from .output_checks import check_overflow
from .validation import ValidatedCall, validate_call

if TYPE_CHECKING:
    from ..sampling.caller_processors import LogitsProcessor

_MAX_DIGITS = 30  # of length ** length_penalty: float32 has 38, and sums need some


@dataclasses.dataclass(repr=False)
class BeamOutput:
    """The result of `beam_search`, with one entry per prompt. The best sequence of a prompt comes first.

    A call with a single prompt has the entry 0.

    Attributes:
        sequences: for each prompt, the new ids of each sequence, with the EOS id that ended it.
        scores: for each prompt, the score of each sequence: the sum of its log-probabilities, divided by the
            number of new tokens (EOS included) to the power of `length_penalty`.
        stats: the cost of the call. Each prompt counts as a row. Generated tokens are the tokens of the best
            sequence of each prompt, which are known only at the end.
    """

    sequences: list[list[list[int]]]
    scores: list[list[float]]
    stats: GenerateStats = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        prompts = f"{len(self.scores)} prompt{'' if len(self.scores) == 1 else 's'}"
        sequences = list(itertools.chain(*self.sequences))
        return f"BeamOutput({prompts}, {format_token_counts(sequences, 'sequence')})"


@dataclasses.dataclass(frozen=True)
class BeamSettings:
    """The arguments that only `beam_search` has, as it documents them."""

    num_beams: int = 4
    num_return_sequences: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False


@renamed_arguments(max_new_tokens="max_tokens")
@without_mesh_context
def beam_search(  # noqa: PLR0913  a public function
    params: Params,
    config: ModelConfig,
    ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    num_beams: int = 4,
    num_return_sequences: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    max_tokens: int = 32,
    eos_token_ids: Sequence[int] | None = None,
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    key: jax.Array | None = None,
    capacity: int | None = None,
    impl: str | None = None,
    cache_dtype: str | None = None,
    processors: "Sequence[tuple[LogitsProcessor, Any]] | None" = None,
) -> BeamOutput:
    """Returns the most likely continuations that a beam search finds, as transformers 5 does.

    Each prompt gets the sequences that it gets alone.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> ids = xj.encode_prompt(model, "What is the capital of France?")
        >>> out = xj.beam_search(model.params, model.config, ids, num_beams=2, max_tokens=12)
        >>> model.tokenizer.decode(out.sequences[0][0])
        'The capital of France is Paris.'

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        ids: one prompt as a list of token ids, or a list of prompts of any lengths.
        num_beams: the number of continuations of each prompt that the search follows. 1 returns the greedy
            continuation, which ends at its first EOS with every `early_stopping`.
        num_return_sequences: the number of sequences to return, at most `num_beams`. None returns all.
        length_penalty: scores are divided by length ** length_penalty. A value above 0 favours long
            sequences, and a value below 0 favours short ones.
        early_stopping: True stops when `num_beams` sequences have ended. False stops when the best beam,
            scored at its present length, is no better than the worst of the ended sequences. "never" stops
            when no beam could become better at any length.
        max_tokens: the most new tokens of a sequence. It is traced, like `length_penalty`, so another number
            below the same power of two compiles nothing.
        eos_token_ids: ids that end a sequence. None takes the model's own ids. With `()` no id ends a
            sequence.
        sampling: the sampling settings. None takes `SamplingConfig()`. The logits processors change each
            beam's log-probabilities, given the prompt and the tokens of that beam, and scores are sums of
            these processed log-probabilities. A temperature above 0 means beam sampling: candidates are drawn
            without replacement from the softmax of beam score plus processed log-probability.
        key: one PRNG key (prompt i then uses `fold_in(key, i)`), or one key per prompt. Only sampling needs
            it.
        capacity: the most tokens that a row of the KV cache can hold (see `GenerateOptions`).
        impl: the implementation of the operations (see `GenerateOptions`).
        cache_dtype: the dtype of keys and values (see `GenerateOptions`).
        processors: logits processors that you wrote (see `GenerateOptions`). The processors get
            log-probabilities, and their states follow the beams. The beams of a prompt have equal keys.

    Returns:
        A `BeamOutput` with `num_return_sequences` sequences and scores per prompt. If the settings leave
        fewer sequences, it has fewer, and it has none if no beam has an allowed token left.

    Raises:
        InputError: a prompt, a setting or the key is invalid. The call raises it before anything is traced.

    The search is `GenerationMixin._beam_search` of transformers 5. Candidates are drawn with Gumbel noise
    (Kool et al. 2019).
    """
    settings = BeamSettings(num_beams, num_return_sequences, length_penalty, early_stopping)
    with Stopwatch() as setup:
        options = GenerateOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            capacity=capacity,
            impl=impl,
            cache_dtype=cache_dtype,
            processors=processors,
        )
        search = BeamSearchPlan(params, config, ids, settings, options, key)
    call = search.call
    with Stopwatch() as compiling:
        search.prepare().wait()
    with Stopwatch() as prefilling:
        outputs, cache, *_ = search.prefill(search.executor, search.new_cache())
        outputs.block_until_ready()
    lengths = without_layers(cache)
    prompts = call.prompts
    sizes = search.memory.parts["weights"], num_beams * tree_bytes(cache.layers)
    stats = GenerateStats(len(prompts), sum(map(len, prompts)), *sizes, memory=search.memory)
    caches = [cache]
    del cache  # so that the executor can free it
    with Stopwatch() as searching:
        found = jax.device_get(search.search(search.executor, outputs, caches, call.options.max_tokens))
    check_overflow(call, lengths)  # of the prompts; the length of the beams is known and fits
    sequences, scores, longest = _lists(call, found, search.returned)
    stats.prefill_seconds = prefilling.seconds
    stats.decode_seconds = searching.seconds
    stats.ttft_seconds = setup.seconds + prefilling.seconds + searching.seconds
    stats.generated_tokens = longest
    stats.decode_steps = int(found.step) - 1
    stats.compile_seconds = compiling.seconds
    stats.count(setup, compiling, prefilling, searching)
    stats.peak_bytes = peak_bytes()
    return BeamOutput(sequences, scores, stats)


class BeamSearchPlan:
    """A checked call of `beam_search`, with its arrays except the cache, and its executor."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        ids: Any,
        settings: BeamSettings,
        options: GenerateOptions,
        key: jax.Array | None,
    ):
        """Checks the arguments, which are described in `beam_search`. The parameters may be shapes."""
        is_single = is_sequence(ids) and len(ids) > 0 and np.ndim(ids[0]) == 0
        self.call = call = validate_call(params, config, [ids] if is_single else ids, options, key)
        beams = check_integer("num_beams", settings.num_beams, 1)
        returned = beams if settings.num_return_sequences is None else settings.num_return_sequences
        self.returned = check_integer("num_return_sequences", returned, 1)
        _check(call, beams, self.returned, settings.length_penalty, settings.early_stopping)
        steps = call.options.max_tokens
        shortest = min(map(len, call.prompts))
        early_stopping = settings.early_stopping if beams > 1 else True  # one beam ends at its first EOS
        tail = bucket(call.longest - shortest + steps)
        size = bucket(steps)
        self._strategy = BeamSearch(call.config, beams, len(call.end_ids), early_stopping, size, tail)
        self.memory = generation_plan(call, beams * call.rows)
        rows = initial_state(call, prompt_of_row(call))
        self._request = BeamRequest(rows, np.int32(shortest), np.float32(settings.length_penalty))
        self._tokens = pad_prompts(call.prompts, call.capacity, call.rows)
        self._model = RunnableModel(call.params, call.config)
        self.executor = executor_class(params)(RunConfig(options.impl))

    def new_cache(self) -> KVCache:
        call = self.call
        return new_cache(call, call.params, call.config, call.capacity, call.rows)

    def prepare(self) -> Compilation:
        """Begins to compile the programs of the search, in threads."""
        call = self.call

        def dry_run(compiler: Any) -> int:
            executor = type(self.executor)(self.executor.run_config, compiler)
            out = self.prefill(executor, jax.eval_shape(self.new_cache))
            self.search(executor, out.hidden, [out.cache], 2)
            return compiler.num_programs

        width = self.executor.prefill_width(call.longest, call.rows)
        of_cache = call.capacity, call.options.cache_dtype
        arrays = call.params, self._tokens, self._request
        signature = self._strategy, self.executor.run_config, width, of_cache, arrays
        return compile_ahead(call.params, signature, dry_run)[0]

    def prefill(self, executor: Executor, cache: KVCache) -> ModelOutput[Any]:
        """Runs `Executor.prefill` of the prompts."""
        return executor.prefill(self._model, self._tokens, cache)

    def search(self, executor: Executor, outputs: Any, caches: list[KVCache], steps: int) -> BeamResults:
        """Returns the sequences that ended, best first, and the step at which the search stopped. caches: a
        list with the cache of `prefill`, which is taken out.
        """
        logits = executor.logits(self._model, outputs)
        constants = self.call.params, self._request
        return executor.search(self._strategy, constants, logits, caches.pop(), steps)


def _check(
    call: ValidatedCall, num_beams: int, returned: int, length_penalty: Any, early_stopping: Any
) -> None:
    """Raises InputError for invalid arguments that only a beam search has."""
    new = call.options.max_tokens
    vocab_size = call.config.vocab_size
    ends = len(call.end_ids)
    if returned > num_beams:
        remedy = "raise num_beams or ask for fewer sequences"
        raise InputError(f"num_return_sequences {returned} exceeds num_beams {num_beams}: {remedy}")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise InputError(f"early_stopping must be True, False or 'never', got {format_value(early_stopping)}")
    penalty = number_array(length_penalty)
    if penalty is None or penalty.ndim or not np.isfinite(penalty):
        raise InputError(f"length_penalty must be a finite number, got {format_value(length_penalty)}")
    if abs(penalty) * math.log10(new) > _MAX_DIGITS:
        power = f"length_penalty {length_penalty} of {new} tokens"
        raise InputError(f"{power} leaves float32: bring it nearer to 0")
    if num_beams == 1 and np.any(call.sampling_B.temperature > 0):
        raise InputError(
            "num_beams 1 with a temperature above 0 is plain sampling: use generate, or raise num_beams"
        )
    for name in used_settings(call.sampling_B, lambda setting: bool(setting.warper) or not setting.beams):
        raise InputError(f"{name} does not combine with beams: leave it out")
    if num_beams * vocab_size >= 2**31:  # int32 numbers them
        raise InputError(
            f"num_beams {num_beams} with a vocabulary of {vocab_size} makes 2^31 candidates or more: lower"
            " num_beams"
        )
    possible = _possible(vocab_size, ends, new, num_beams)
    if possible < num_beams:
        asked_for = f"max_tokens {new} and a vocabulary of {vocab_size} with {ends} EOS ids"
        raise InputError(
            f"num_beams {num_beams} exceeds the {possible} different sequences that {asked_for} allow: lower"
            " num_beams or raise max_tokens"
        )


def _possible(vocab_size: int, ends: int, max_tokens: int, enough: int) -> int:
    """Returns the number of different sequences, or `enough` if there are more."""
    ended = 0
    running = 1
    for _ in range(max_tokens):
        if ended + running >= enough:
            return enough
        ended = ended + running * ends
        running = running * (vocab_size - ends)
    return ended + running


def _lists(call: ValidatedCall, found: BeamResults, returned: int) -> tuple[list, list, int]:
    """Returns sequences and their scores, as nested lists, and the number of tokens of the best ones. Raises
    InputError for scores that are NaN.
    """
    sequences = []
    scores = []
    longest = 0
    for b, final_W in enumerate(found.final_BW[: len(call.prompts)]):
        if (step := found.broken_B[b]) >= 0:
            of_callers = f"; or {call.callers.nan_reason()}" if call.callers else ""
            reason = call.non_finite_reason + of_callers
            raise InputError(f"row {b}, step {step}: the scores are nan: {reason}")
        kept = [w for w in range(returned) if np.isfinite(final_W[w])]
        rows = [found.ended_BWT[b, w, : found.length_BW[b, w]].tolist() for w in kept]
        longest += len(rows[0]) if rows else 0
        sequences.append(rows)
        scores.append(final_W[kept].tolist())
    return sequences, scores, longest
