"""What `generate` and `stream` are asked for and give back; bad input is refused here, before any tracing."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..brief import counted
from ..cache.prefix import Prefix
from ..cache.quantized import KV_BITS, check_width
from ..checks import in_order, token_ids, whole
from ..config.model_config import ModelConfig, with_fixed_rope
from ..errors import ContextLengthError, InputError, shown
from ..model.attention import check_impl
from ..sampling.choice import check_key
from ..sampling.logprobs import TokenLogprobs
from ..sampling.settings import SamplingConfig, check_min_tokens, per_row
from ..stats import GenerateStats
from ..weights.params import Params, activation_dtype, check_params, resolve_dtype
from .loop import bucket, power_of_two
from .speculation import MOST_GUESSES, check_guesser

_MOST_ANSWERS = 2**16  # of one prompt


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """What `generate`, `stream` and the text functions do beyond the prompts.

    Attributes:
        max_new_tokens: most new tokens of a row, EOS included; at least 1.
        sampling: how a token is chosen: for all prompts, or one per prompt.
        eos_token_ids: any of them ends a row; None: the model's own (`ModelConfig.eos_token_ids`, which
            `load_model` finds); (): none, rows end at max_new_tokens.
        capacity: of the cache, in tokens; None: what the call needs, rounded up.
        use_cache: False: recompute the whole sequence for every token, to compare.
        impl: of attention and argmax: "mosaic", "triton" or "xla"; None: what suits the device.
        cache_dtype: of keys and values: "int8", "int4", "gear", or a float type; None: float32 on CPU, or as
            activations.
        stop_token_ids: end a row as EOS ids do, with the finish_reason "stop".
        stop_strings: the text ends before the first of them; for the text functions, which know what a
            string is.
        n: answers per prompt: rows i * n … i * n + n - 1 are those of prompt i, and answer j draws from
            fold_in(row_key, j).
        best_of: generate so many per prompt, return the n of largest log-probability per token; None: n.
        logprobs: alternatives noted for each token, before and after the processors; 0: none.
        draft: what guesses tokens ahead: a `Model` with the same vocabulary, "lookup" (what followed in the
            row before), or a function (history_BS, length_B, count) -> int32 [B, count] that can be traced (B
            is a power of two: the last rows may hold nothing); None: nothing.
        draft_tokens: guesses per pass, 1 to 16; no more are made than the answer has room for.
        prefix: of an earlier call: of each prompt, what its rows start with alike is not read again; None:
            all is read.
        keep_prefix: return the cache as out.prefix, for the next call.
        logits: the logits of every step too, before any processor: float32 [steps, V] per row.
    """

    max_new_tokens: int = 128
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig()
    eos_token_ids: Sequence[int] | None = None
    capacity: int | None = None
    use_cache: bool = True
    impl: str | None = None
    cache_dtype: str | None = None
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    n: int = 1
    best_of: int | None = None
    logprobs: int = 0
    draft: Any = None
    draft_tokens: int = 3
    prefix: Prefix | None = None
    keep_prefix: bool = False
    logits: bool = False


@dataclasses.dataclass(repr=False)
class GenerateOutput:
    """What `generate` returns; one entry per prompt and answer.

    Attributes:
        tokens: new ids, the EOS or stop id that ended them not included.
        logprobs: the model's log-probability (natural, before any processor) of each, with the EOS entry last
            if there was one.
        finish_reason: "eos", "stop" or "length".
        stats: what the call cost.
        alternatives: with options.logprobs: of each entry of `logprobs`; else None.
        logits: with options.logits: float32 [entries of `logprobs`, V]; else None.
        prefix: with options.keep_prefix: what the cache holds now; else None.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reason: list[str]
    stats: GenerateStats
    alternatives: list[list[TokenLogprobs]] | None = None
    logits: list[np.ndarray] | None = None
    prefix: Prefix | None = None

    def __repr__(self) -> str:
        reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(self.finish_reason).items())
        return f"GenerateOutput({counted(self.tokens, 'answer')}, finish_reason: {reasons or 'none'})"

    def best(self, n: int, of: int) -> "GenerateOutput":
        """Of every `of` answers in a row the n with the largest mean log-probability, best first."""
        mean = [np.mean(row) if row else -np.inf for row in self.logprobs]
        groups = (range(first, first + of) for first in range(0, len(mean), of))
        kept = [i for group in groups for i in sorted(group, key=lambda i: -mean[i])[:n]]
        lists = {name: value for name, value in vars(self).items() if isinstance(value, list)}
        picked = {name: [value[i] for i in kept] for name, value in lists.items()}
        return dataclasses.replace(self, **picked)


def chosen_capacity(config: ModelConfig, prompt_tokens: int, max_new_tokens: int) -> int:
    """The capacity of the cache where none is asked for, for the longest prompt."""
    return min(bucket(prompt_tokens) + bucket(max_new_tokens), config.context_length)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call whose arguments were checked, in the types that everything after it relies on."""

    params: Params
    config: ModelConfig  # with longrope's factors fixed
    prompts: list[list[int]]
    options: GenerateOptions  # numbers are ints, ids tuples of ints
    sampling_B: SamplingConfig  # of each prompt
    key: jax.Array  # one, or one per prompt

    @property
    def ending(self) -> tuple[int, ...]:
        """All ids that end a row."""
        return (*(self.options.eos_token_ids or ()), *self.options.stop_token_ids)

    @property
    def answers(self) -> int:
        """Rows of each prompt."""
        return self.options.best_of or self.options.n

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def prompt_rows(self) -> int:
        """Rows that read the prompts: a power of two, so that another number of prompts compiles nothing; a
        prefix keeps its own.
        """
        prefix = self.options.prefix
        return len(prefix.cache.length_B) if prefix else power_of_two(len(self.prompts))

    @property
    def rows(self) -> int:
        """Rows that answer: a power of two likewise."""
        prompts = len(self.prompts)
        answers = self.answers
        return self.prompt_rows if answers == 1 else power_of_two(prompts * answers)

    @property
    def history_size(self) -> int:
        """Tokens of the longest row, rounded up so that few programs serve."""
        return bucket(self.longest) + bucket(self.options.max_new_tokens)

    @property
    def capacity(self) -> int:
        """Of the cache."""
        if self.options.prefix is not None:
            return self.options.prefix.cache.capacity
        new = self.options.max_new_tokens
        return self.options.capacity or chosen_capacity(self.config, self.longest, new)

    @property
    def guesses(self) -> int:
        """Per pass: no more than the answer or the cache has room for, since they would be thrown away."""
        return min(self.options.draft_tokens, bucket(self.options.max_new_tokens), self.capacity - 1)

    @property
    def broken(self) -> str:
        """Why numbers of the model may not be finite, and what helps."""
        return why_not_finite(self.params, self.options.cache_dtype)


def why_not_finite(params: Params, cache_dtype: str | None = None) -> str:
    """Why numbers of a model may not be finite, and what helps."""
    if "float16" in (np.dtype(activation_dtype(params)).name, cache_dtype):
        return "float16 overflows beyond 65504: use dtype bfloat16 or float32"
    return "the weights or activations hold NaN or inf: check the checkpoint, or use dtype float32"


def checked(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None,
    key: jax.Array | None,
) -> Call:
    """The call, or an InputError."""
    check_params(params, config)
    options = _plain(config, asked(options))
    prompts = check_prompts(config, prompts)
    shortest = min(map(len, prompts))
    longest = max(map(len, prompts))
    _check_together(config, options)
    sampling_B = per_row(options.sampling, len(prompts), config.vocab_size)
    _check_prefix(options, prompts)
    _check_length(config, options, longest)
    if key is None and np.any(sampling_B.temperature > 0):
        raise InputError("sampling needs a PRNG key: give key=jax.random.key(seed), or temperature 0")
    if key is None:  # nothing will be drawn: any keys do, and making these compiles nothing
        key = jax.random.wrap_key_data(np.zeros((len(prompts), 2), np.uint32), impl="threefry2x32")
    config = with_fixed_rope(config, shortest, longest + options.max_new_tokens)
    if options.prefix is not None:
        options = dataclasses.replace(options, prefix=options.prefix.usable(params, config))
    call = Call(params, config, prompts, options, sampling_B, check_key(key, len(prompts)))
    for settings in options.sampling if isinstance(options.sampling, list | tuple) else [options.sampling]:
        check_min_tokens(settings, call.ending)
    if options.draft is None:
        return call
    return dataclasses.replace(call, options=dataclasses.replace(options, draft=_checked_draft(call)))


def _plain(config: ModelConfig, options: GenerateOptions) -> GenerateOptions:
    """The options with each value in its one type, or an InputError that names it."""
    if options.stop_strings:
        raise InputError("stop_strings need text: use generate_text or stream_text, or stop_token_ids")
    check_impl(options.impl)
    if options.cache_dtype not in (None, *KV_BITS):
        resolve_dtype(options.cache_dtype)
    for name in ("use_cache", "keep_prefix", "logits"):
        if not isinstance(value := getattr(options, name), bool | np.bool_):
            raise InputError(f"{name} must be True or False, got {shown(value)}")
    values: dict[str, Any] = {"n": whole("n", options.n, 1, _MOST_ANSWERS)}
    bounds = dict(
        max_new_tokens=(1, None), capacity=(1, None), best_of=(values["n"], _MOST_ANSWERS),
        logprobs=(0, None), draft_tokens=(1, MOST_GUESSES),
    )  # fmt: skip
    for name, (least, most) in bounds.items():
        value = getattr(options, name)
        if value is not None or name not in ("capacity", "best_of"):
            values[name] = whole(name, value, least, most)
    eos = config.eos_token_ids if options.eos_token_ids is None else options.eos_token_ids
    for name, ids in (("eos_token_ids", eos), ("stop_token_ids", options.stop_token_ids)):
        values[name] = tuple(dict.fromkeys(token_ids(name, ids, config.vocab_size)))
    return dataclasses.replace(options, **values)


def _check_together(config: ModelConfig, options: GenerateOptions) -> None:
    """What does not go with the model, or with other options."""
    if options.logprobs > config.vocab_size:
        raise InputError(f"logprobs={options.logprobs} exceeds the vocabulary of {config.vocab_size}")
    for name in ("draft", "prefix", "keep_prefix", "cache_dtype"):
        if getattr(options, name) not in (None, False) and not options.use_cache:
            raise InputError(f"{name} needs the cache: leave use_cache true")
    check_width(config.head_dim, options.cache_dtype)
    if options.keep_prefix and options.best_of not in (None, options.n):
        why = "the cache would hold other rows, choose from n answers yourself"
        raise InputError(f"keep_prefix with best_of={options.best_of}: {why}")


def _check_prefix(options: GenerateOptions, prompts: list[list[int]]) -> None:
    prefix = options.prefix
    if prefix is None:
        return
    if not isinstance(prefix, Prefix):
        raise InputError(
            f"prefix must be the out.prefix of an earlier call, or from load_prefix, got {shown(prefix)}"
        )
    prefix.shared(prompts)
    capacity = options.capacity
    dtype = options.cache_dtype
    held = prefix.cache
    if capacity not in (None, held.capacity):
        raise InputError(f"capacity={capacity}, but the prefix has a cache of {held.capacity}: leave it out")
    named = dtype if dtype in (None, *KV_BITS) else np.dtype(resolve_dtype(dtype)).name  # as `KVCache.dtype`
    if named not in (None, held.dtype):
        raise InputError(f"cache_dtype={dtype!r}, but the prefix is in {held.dtype}: leave it out")


def _check_length(config: ModelConfig, options: GenerateOptions, longest: int) -> None:
    """Prompt and answer must fit the model and the cache."""
    new = options.max_new_tokens
    held = options.prefix.cache.capacity if options.prefix else None
    limits = (
        (config.context_length, "the model's context limit", "shorten the prompt or generate fewer tokens"),
        (options.capacity, "the capacity", "raise capacity or shorten the prompt"),
        (held, "the capacity of the prefix", "start it with a larger capacity"),
    )
    is_dynamic = config.rope.rope_type == "dynamic"
    dynamic = " (rope type 'dynamic' changes its frequencies there)" if is_dynamic else ""
    for limit, name, remedy in limits:
        if limit is not None and longest + new > limit:
            need = f"prompt of {longest} tokens + max_new_tokens {new}"
            raise ContextLengthError(f"{need} exceeds {name} {limit}{dynamic}: {remedy}")


def asked(options: Any) -> GenerateOptions:
    """The options, or the defaults for None."""
    if options is not None and not isinstance(options, GenerateOptions):
        raise InputError(f"options must be GenerateOptions, got {shown(options)}")
    return options or GenerateOptions()


def _checked_draft(call: Call) -> Any:
    """The draft; a model's longrope has the factors of the longest sequence, also where they would change on
    the way: it only guesses, so the tokens are the model's own all the same.
    """
    draft = call.options.draft
    config = call.config
    longest = call.longest
    new = call.options.max_new_tokens
    if isinstance(draft, str) and draft == "lookup":
        return draft
    if callable(draft):
        check_guesser(draft, call.guesses, call.rows, call.history_size)
        return draft
    if not (hasattr(draft, "params") and isinstance(getattr(draft, "config", None), ModelConfig)):
        kinds = "a model from load_model, or 'lookup', or a function"
        raise InputError(f"draft must be {kinds}, got {shown(draft)}")
    own = draft.config.vocab_size
    limit = draft.config.context_length
    if own != config.vocab_size:
        raise InputError(f"the draft's vocabulary of {own} is not the model's of {config.vocab_size}")
    check_width(draft.config.head_dim, call.options.cache_dtype)
    if limit < longest + new:
        need = f"prompt of {longest} tokens + max_new_tokens {new}"
        raise InputError(f"{need} exceeds the draft's context limit {limit}")
    fixed = with_fixed_rope(draft.config, longest + new, longest + new)
    return draft if fixed is draft.config else dataclasses.replace(draft, config=fixed)


def check_prompts(config: ModelConfig, prompts: Any, name: str = "prompt") -> list[list[int]]:
    """The prompts as lists of ints.

    Raises:
        InputError: they (called by `name`) are not non-empty lists of ids inside the vocabulary.
    """
    if not in_order(prompts):
        raise InputError(f"{name}s must be a list of lists of token ids, got {shown(prompts)}")
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)  # row by row it would be sliced on the device
    if not len(prompts):
        raise InputError(f"no {name}s: give at least one list of token ids")
    for i, prompt in enumerate(prompts):
        if not in_order(prompt) or not len(prompt):
            raise InputError(f"{name} {i} must be a non-empty list of token ids, got {shown(prompt)}")
    return [token_ids(f"{name} {i}", prompt, config.vocab_size) for i, prompt in enumerate(prompts)]
