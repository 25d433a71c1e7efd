"""`ValidatedCall`: the checked arguments of `generate` and `stream`. All checks run before any tracing."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..cache.stored_kv import check_head_dim, resolve_cache_dtype
from ..checks import check_integer, check_token_ids, is_sequence
from ..config.model_config import ModelConfig, with_fixed_rope
from ..config.unsupported import check_causal
from ..errors import ContextLengthError, InputError, format_value
from ..ops.operation import check_impl
from ..registry import plugin
from ..sampling.batched_settings import has_all_settings, settings_per_row, takes_most_likely
from ..sampling.random_keys import check_key, key_from_seed
from ..sampling.sampling_config import SamplingConfig
from ..weights.params import Params, activation_dtype, check_params
from .executor import bucket, next_power_of_two
from .options import MAX_DRAFT_TOKENS, GenerateOptions, default_capacity, options_or_default

_MAX_ANSWERS = 2**16  # of one prompt


@dataclasses.dataclass(frozen=True)
class ValidatedCall:
    """A call whose arguments were checked and converted to the types that all later code relies on."""

    params: Params
    config: ModelConfig  # with longrope's factors fixed
    prompts: list[list[int]]
    options: GenerateOptions  # numbers are ints, ids tuples of ints
    sampling_B: SamplingConfig  # of each prompt
    key: jax.Array  # one, or one per prompt
    grammars: tuple[Any, ...] = ()  # `CompiledGrammar` or None of each prompt; (): no prompt has one
    callers: Any = None  # `Callers` of the prompts; None: there are none
    needs_masks: bool = False  # the host writes the masks of a row between its steps

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """All token ids that end a row: EOS ids and stop ids."""
        return (*(self.options.eos_token_ids or ()), *self.options.stop_token_ids)

    @functools.cached_property
    def answers(self) -> int:
        """Rows of each prompt."""
        return self.options.best_of or self.options.n

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @functools.cached_property
    def greedy(self) -> bool:
        """Returns True if every row takes its most likely token, without any logits processor."""
        return not self.grammars and self.callers is None and takes_most_likely(self.sampling_B)

    @functools.cached_property
    def all_settings_B(self) -> SamplingConfig:
        """`sampling_B` with all settings, as programs take them that serve all requests."""
        if self.sampling_B is not None and has_all_settings(self.sampling_B):
            return self.sampling_B
        sizes = len(self.prompts), self.config.vocab_size
        return settings_per_row(self.options.sampling, *sizes, all_settings=True)

    @functools.cached_property
    def prompt_rows(self) -> int:
        """Rows of the prefill: a power of two, so that another number of prompts compiles nothing. A prefix
        keeps its own number.
        """
        prefix = self.options.prefix
        return len(prefix.cache.length_B) if prefix else next_power_of_two(len(self.prompts))

    @functools.cached_property
    def rows(self) -> int:
        """Rows that decode: a power of two, like `prompt_rows`."""
        prompts = len(self.prompts)
        answers = self.answers
        return self.prompt_rows if answers == 1 else next_power_of_two(prompts * answers)

    @functools.cached_property
    def history_size(self) -> int:
        """Tokens of the longest row, rounded up so that few programs are compiled."""
        return bucket(self.longest) + bucket(self.options.max_tokens)

    @functools.cached_property
    def capacity(self) -> int:
        """Tokens that a row of the cache can hold."""
        if self.options.prefix is not None:
            return self.options.prefix.cache.capacity
        new = self.options.max_tokens
        return self.options.capacity or default_capacity(self.config, self.longest, new)

    @functools.cached_property
    def num_draft_tokens(self) -> int:
        """The number of draft tokens per step, at most the number that fits into the answer and the cache:
        others would be dropped.
        """
        return min(self.options.draft_tokens, bucket(self.options.max_tokens), self.capacity - 1)

    @functools.cached_property
    def num_masks(self) -> int:
        """Masks of allowed tokens in a row's state: of the next token, and after each draft token."""
        return 1 + self.num_draft_tokens if self.needs_masks and self.options.draft is not None else 1

    def new_matcher(self, prompt: int) -> Any:
        """Returns a matcher that follows an answer to this prompt through its grammar, or None without a
        grammar.
        """
        grammar = self.grammars[prompt] if self.grammars else None
        if grammar is None:
            return None
        return grammar.matcher(self.prompts[prompt], self.options.eos_token_ids or ())

    @functools.cached_property
    def non_finite_reason(self) -> str:
        """Why values of the model may not be finite, and the remedy."""
        of_taps = "an edit of taps returned nan or inf; or " if self.options.taps else ""
        return of_taps + non_finite_reason(self.params, self.options.cache_dtype)


def non_finite_reason(params: Params, cache_dtype: str | None = None) -> str:
    """Returns the reason why values of a model may not be finite, and the remedy."""
    if "float16" in (np.dtype(activation_dtype(params)).name, cache_dtype):
        return "float16 overflows beyond 65504: use dtype bfloat16 or float32"
    return "the weights or activations contain NaN or inf: check the checkpoint, or use dtype float32"


def validate_call(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None,
    key: jax.Array | None,
) -> ValidatedCall:
    """Checks the arguments of `generate` and `stream`. Raises InputError."""
    check_params(params, config)
    check_causal(config, "generation")
    options = _canonical_options(config, options_or_default(options))
    if on_auto_mesh := plugin("mesh", "auto params"):
        params = on_auto_mesh(params)
        options = dataclasses.replace(options, taps=on_auto_mesh(options.taps))
    prompts = check_prompts(config, prompts)
    shortest = min(map(len, prompts))
    longest = max(map(len, prompts))
    _check_together(config, options)
    grammars, needs_masks = _compile_grammars(config, options, prompts)
    sampling_B = settings_per_row(options.sampling, len(prompts), config.vocab_size, needs_masks)
    if options.prefix is not None:
        _check_prefix(options, prompts)
    _check_length(config, options, longest)
    if key is None and np.any(sampling_B.temperature > 0):
        raise InputError("sampling needs a PRNG key: give key=jax.random.key(seed), or temperature 0")
    if key is None:  # greedy: any key serves
        key = key_from_seed(0)
    config = with_fixed_rope(config, shortest, longest + options.max_tokens)
    if options.prefix is not None:
        options = dataclasses.replace(options, prefix=options.prefix.usable(params, config))
    key = check_key(key, len(prompts))
    callers = None
    if options.processors is not None:
        from ..sampling.caller_processors import callers_of_call  # optional: functions of callers

        callers = callers_of_call(options.processors, None, None, len(prompts))
    call = ValidatedCall(params, config, prompts, options, sampling_B, key, grammars, callers, needs_masks)
    _check_min_tokens(options.sampling, call.end_ids)
    if options.draft is None:
        return call
    from .drafting import Drafting  # optional: speculative decoding

    return dataclasses.replace(call, options=dataclasses.replace(options, draft=Drafting.check(call)))


def _canonical_options(config: ModelConfig, options: GenerateOptions) -> GenerateOptions:
    """Returns the options with each value in its canonical type. Raises InputError for an invalid value."""
    if options.stop_strings:
        raise InputError("stop_strings need text: use generate_text or stream_text, or stop_token_ids")
    check_impl(options.impl)
    resolve_cache_dtype(options.cache_dtype)
    for name in ("use_cache", "keep_prefix", "logits", "support"):
        if not isinstance(value := getattr(options, name), bool | np.bool_):
            raise InputError(f"{name} must be True or False, got {format_value(value)}")
    values: dict[str, Any] = {"n": check_integer("n", options.n, 1, _MAX_ANSWERS)}
    values["sampling"] = SamplingConfig() if options.sampling is None else options.sampling
    bounds = dict(
        max_tokens=(1, None), capacity=(1, None), best_of=(values["n"], _MAX_ANSWERS),
        logprobs=(0, None), draft_tokens=(1, MAX_DRAFT_TOKENS),
    )  # fmt: skip
    for name, (least, most) in bounds.items():
        value = getattr(options, name)
        if value is not None or name not in ("capacity", "best_of"):
            values[name] = check_integer(name, value, least, most)
    if options.taps is not None:
        from ..model.taps import check_edits  # optional: taps

        values["taps"] = check_edits(options.taps, config, "generate")
    eos = config.eos_token_ids if options.eos_token_ids is None else options.eos_token_ids
    for name, ids in (("eos_token_ids", eos), ("stop_token_ids", options.stop_token_ids)):
        values[name] = tuple(dict.fromkeys(check_token_ids(name, ids, config.vocab_size)))
    return dataclasses.replace(options, **values)


def _check_together(config: ModelConfig, options: GenerateOptions) -> None:
    """Raises InputError for options that contradict the model or other options."""
    if options.logprobs > config.vocab_size:
        raise InputError(f"logprobs={options.logprobs} exceeds the vocabulary of {config.vocab_size}")
    for name in ("draft", "prefix", "keep_prefix", "cache_dtype", "taps"):
        if getattr(options, name) not in (None, False) and not options.use_cache:
            raise InputError(f"{name} needs the cache: leave use_cache true")
    for other in ("draft", "prefix", "keep_prefix"):
        if options.taps is not None and getattr(options, other) not in (None, False):
            raise InputError(f"taps do not combine with {other}: leave out {other} or taps")
    for width in config.head_widths:
        check_head_dim(width, options.cache_dtype)
    if options.keep_prefix and options.best_of not in (None, options.n):
        why = "the cache has rows that are not returned: use n, and choose the best answers yourself"
        raise InputError(f"keep_prefix with best_of={options.best_of}: {why}")


def _compile_grammars(
    config: ModelConfig, options: GenerateOptions, prompts: list[list[int]]
) -> tuple[tuple[Any, ...], bool]:
    """Returns `ValidatedCall.grammars`, and `needs_masks`."""
    if options.grammar is None:
        return (), False
    from .batch_matchers import compile_grammars  # optional: grammars

    return compile_grammars(config, options, prompts)


def _check_min_tokens(sampling: Any, end_ids: tuple[int, ...]) -> None:
    for settings in sampling if isinstance(sampling, list | tuple) else [sampling]:
        if settings.allowed_token_ids is not None:
            from ..sampling.biases import check_min_tokens  # optional: other settings

            check_min_tokens(settings, end_ids)


def _check_prefix(options: GenerateOptions, prompts: list[list[int]]) -> None:
    prefix: Any = options.prefix
    if not hasattr(prefix, "check_call"):
        got = format_value(prefix)
        raise InputError(f"prefix must be the out.prefix of an earlier call, or from load_prefix, got {got}")
    prefix.check_call(prompts, options.capacity, options.cache_dtype)


def _check_length(config: ModelConfig, options: GenerateOptions, longest: int) -> None:
    """Raises ContextLengthError if prompt and answer exceed the model's context or the cache."""
    new = options.max_tokens
    computed = longest + (new if new > 1 else 0)  # a single token comes from the prompt's own logits
    prefix_capacity = options.prefix.cache.capacity if options.prefix else None
    limits = (
        (config.context_length, "the model's context limit", "shorten the prompt or generate fewer tokens"),
        (options.capacity, "the capacity", "raise capacity or shorten the prompt"),
        (prefix_capacity, "the capacity of the prefix", "make it with a larger capacity"),
    )
    is_dynamic = config.rope.rope_type == "dynamic"
    dynamic = " (rope type 'dynamic' changes its frequencies there)" if is_dynamic else ""
    for limit, name, remedy in limits:
        if limit is not None and computed > limit:
            need = f"prompt of {longest} tokens + max_tokens {new}"
            raise ContextLengthError(f"{need} exceeds {name} {limit}{dynamic}: {remedy}")


def check_prompts(config: ModelConfig, prompts: Any, name: str = "prompt") -> list[list[int]]:
    """Returns the prompts as lists of ints. Raises InputError if they, called by `name`, are not non-empty
    lists of ids of text.
    """
    if not is_sequence(prompts):
        raise InputError(f"{name}s must be a list of lists of token ids, got {format_value(prompts)}")
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)  # row by row it would be sliced on the device
    if not len(prompts):
        raise InputError(f"no {name}s: give at least one list of token ids")
    for i, prompt in enumerate(prompts):
        if not is_sequence(prompt) or not len(prompt):
            raise InputError(f"{name} {i} must be a non-empty list of token ids, got {format_value(prompt)}")
    images = config.placeholder_ids
    return [check_token_ids(f"{name} {i}", x, config.vocab_size, images) for i, x in enumerate(prompts)]
