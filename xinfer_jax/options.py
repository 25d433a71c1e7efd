"""What `generate` and `stream` are asked for and what they give back; bad input is refused here, before any
tracing.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .attention import check_impl
from .checks import in_order, shown, token_ids, whole
from .config import ModelConfig, with_fixed_rope
from .decode import bucket
from .errors import InputError
from .kv import KV_BITS
from .logprobs import TokenLogprobs
from .params import Params, activation_dtype, resolve_dtype
from .prefix import Prefix
from .sampling import SamplingConfig, per_row, row_keys
from .speculative import MOST_GUESSES, check_guesser
from .stats import GenerateStats

_MOST_ANSWERS = 2**16  # of one prompt


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """What `generate` and `stream` do beyond the prompts."""

    max_new_tokens: int = 128
    # For all prompts, or one per prompt.
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig()
    eos_token_ids: Sequence[int] = ()  # any of them ends a row; none: never stop early
    capacity: int | None = None  # of the cache, in tokens; None: what the call needs, rounded up
    use_cache: bool = True  # False: recompute the whole sequence for every token, to compare
    # Of attention and argmax: None (what suits the device), "mosaic", "triton" or "xla".
    impl: str | None = None
    # Of keys and values: "int8", "int4", "gear", or a float type; None: float32 on CPU, or as activations.
    cache_dtype: str | None = None
    stop_token_ids: Sequence[int] = ()  # end a row as EOS ids do, with the finish_reason "stop"
    # End the text before the first of them; the text functions know what a string is.
    stop_strings: Sequence[str] = ()
    # Answers per prompt: rows i * n … i * n + n - 1 are those of prompt i, and answer j draws from
    # fold_in(row_key, j).
    n: int = 1
    # Generate so many per prompt, return the n of largest log-probability per token; None: n.
    best_of: int | None = None
    logprobs: int = 0  # alternatives noted for each token, before and after the processors
    # What guesses tokens ahead: a `Model` with the same vocabulary, "lookup" (what followed in the row
    # before), or a function (history_BS, length_B, count) -> int32 [B, count] that can be traced; None:
    # nothing.
    draft: Any = None
    draft_tokens: int = 3  # guesses per pass, at most 16; no more are made than the answer has room for
    # Of an earlier call: of each prompt, what its rows start with alike is not read again.
    prefix: Prefix | None = None
    keep_prefix: bool = False  # return the cache as out.prefix, for the next call
    logits: bool = False  # the logits of every step too, before any processor: float32 [steps, V] per row


@dataclasses.dataclass
class GenerateOutput:
    """What `generate` returns; one entry per prompt and answer."""

    tokens: list[list[int]]  # new ids, the EOS or stop id that ended them not included
    # The model's log-probability of each (before any processor), with the EOS entry last if there was one.
    logprobs: list[list[float]]
    finish_reason: list[str]  # "eos", "stop" or "length"
    stats: GenerateStats
    # With options.logprobs: of each entry of `logprobs`.
    alternatives: list[list[TokenLogprobs]] | None = None
    logits: list[np.ndarray] | None = None  # with options.logits: [entries of `logprobs`, V]
    prefix: Prefix | None = None  # with options.keep_prefix

    def best(self, n: int, of: int) -> "GenerateOutput":
        """Of every `of` answers in a row the n with the largest mean log-probability, best first."""
        mean = [np.mean(row) for row in self.logprobs]
        groups = (range(first, first + of) for first in range(0, len(mean), of))
        kept = [i for group in groups for i in sorted(group, key=lambda i: -mean[i])[:n]]
        lists = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("stats", "prefix")
        }
        return dataclasses.replace(
            self, **{name: value and [value[i] for i in kept] for name, value in lists.items()}
        )


@dataclasses.dataclass(frozen=True)
class Call:
    """A call whose arguments were checked, in the types that everything after it relies on."""

    params: Params
    config: ModelConfig  # with longrope's factors fixed
    prompts: list[list[int]]
    options: GenerateOptions  # numbers are ints, ids tuples of ints
    sampling_B: SamplingConfig  # of each prompt
    row_key_B: jax.Array  # of each prompt

    @property
    def ending(self) -> tuple[int, ...]:
        """All ids that end a row."""
        return (*self.options.eos_token_ids, *self.options.stop_token_ids)

    @property
    def answers(self) -> int:
        """Rows of each prompt."""
        return self.options.best_of or self.options.n

    @functools.cached_property
    def forbidden_BV(self) -> np.ndarray | None:
        """bool [B, V]: the tokens that no row of a prompt may choose."""
        bias_BV = self.sampling_B.logit_bias
        return None if bias_BV is None else np.asarray(bias_BV) == -np.inf

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def room(self) -> int:
        """Tokens of the longest row, rounded up so that few programs serve."""
        return bucket(self.longest) + bucket(self.options.max_new_tokens)

    @property
    def capacity(self) -> int:
        """Of the cache."""
        if self.options.prefix is not None:
            return self.options.prefix.cache.capacity
        return self.options.capacity or min(self.room, self.config.context_length)

    @property
    def guesses(self) -> int:
        """Per pass: no more than the answer or the cache has room for, since they would be thrown away."""
        return min(self.options.draft_tokens, bucket(self.options.max_new_tokens), self.capacity - 1)

    @property
    def broken(self) -> str:
        """Why numbers of the model may not be finite, and what helps."""
        if "float16" in (np.dtype(activation_dtype(self.params)).name, self.options.cache_dtype):
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
    options = _plain(config, GenerateOptions() if options is None else options)
    prompts = check_prompts(config, prompts)
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    _check_together(config, options)
    sampling_B = per_row(options.sampling, len(prompts), config.vocab_size)
    _check_prefix(options, prompts)
    _check_length(config, options, longest)
    if key is None and np.any(sampling_B.temperature > 0):
        raise InputError("sampling needs a PRNG key: give key=jax.random.key(seed), or temperature 0")
    if key is None:  # nothing will be drawn: any keys do, and making these compiles nothing
        key = jax.random.wrap_key_data(np.zeros((len(prompts), 2), np.uint32), impl="threefry2x32")
    config = with_fixed_rope(config, shortest, longest + options.max_new_tokens)
    call = Call(params, config, prompts, options, sampling_B, row_keys(key, len(prompts)))
    if options.draft is not None:
        _check_draft(call)
    return call


def _plain(config: ModelConfig, options: GenerateOptions) -> GenerateOptions:
    """The options with each value in its one type, or an InputError that names it."""
    if not isinstance(options, GenerateOptions):
        raise InputError(f"options must be GenerateOptions, got {shown(options)}")
    if options.stop_strings:
        raise InputError("stop_strings need text: use generate_text or stream_text, or stop_token_ids")
    check_impl(options.impl)
    if options.cache_dtype not in (None, *KV_BITS):
        resolve_dtype(options.cache_dtype)
    for name in ("use_cache", "keep_prefix", "logits"):
        if not isinstance(value := getattr(options, name), bool | np.bool_):
            raise InputError(f"{name} must be True or False, got {shown(value)}")
    values = {"n": whole("n", options.n, 1, _MOST_ANSWERS)}
    bounds = dict(
        max_new_tokens=(1, None), capacity=(1, None), best_of=(values["n"], _MOST_ANSWERS),
        logprobs=(0, None), draft_tokens=(1, MOST_GUESSES),
    )  # fmt: skip
    for name, (least, most) in bounds.items():
        value = getattr(options, name)
        if value is not None or name not in ("capacity", "best_of"):
            values[name] = whole(name, value, least, most)
    for name in ("eos_token_ids", "stop_token_ids"):
        values[name] = tuple(token_ids(name, getattr(options, name), config.vocab_size))
    return dataclasses.replace(options, **values)


def _check_together(config: ModelConfig, options: GenerateOptions) -> None:
    """What does not go with the model, or with other options."""
    if options.logprobs > config.vocab_size:
        raise InputError(f"logprobs={options.logprobs} exceeds the vocabulary of {config.vocab_size}")
    for name in ("draft", "prefix", "keep_prefix", "cache_dtype"):
        if getattr(options, name) not in (None, False) and not options.use_cache:
            raise InputError(f"{name} needs the cache: leave use_cache true")
    if options.keep_prefix and options.best_of not in (None, options.n):
        raise InputError(
            f"keep_prefix with best_of={options.best_of}: the cache would hold other rows, choose from n"
            " answers yourself"
        )


def _check_prefix(options: GenerateOptions, prompts: list[list[int]]) -> None:
    prefix = options.prefix
    if prefix is None:
        return
    if not isinstance(prefix, Prefix):
        raise InputError(
            f"prefix must be the out.prefix of an earlier call, or from load_prefix, got {shown(prefix)}"
        )
    prefix.shared(prompts)
    if options.capacity not in (None, prefix.cache.capacity):
        raise InputError(
            f"capacity={options.capacity}, but the prefix has a cache of {prefix.cache.capacity}:"
            " leave it out"
        )
    if options.cache_dtype not in (None, prefix.cache.dtype):
        raise InputError(
            f"cache_dtype={options.cache_dtype!r}, but the prefix is in {prefix.cache.dtype}: leave it out"
        )


def _check_length(config: ModelConfig, options: GenerateOptions, longest: int) -> None:
    """Prompt and answer must fit the model and the cache."""
    new = options.max_new_tokens
    for limit, name, remedy in (
        (config.context_length, "the model's context limit", "shorten the prompt or generate fewer tokens"),
        (options.capacity, "the capacity", "raise capacity or shorten the prompt"),
        (
            options.prefix and options.prefix.cache.capacity,
            "the capacity of the prefix",
            "start it with a larger capacity",
        ),
    ):
        if limit is not None and longest + new > limit:
            dynamic = (
                " (rope type 'dynamic' changes its frequencies there)"
                if config.rope.rope_type == "dynamic"
                else ""
            )
            raise InputError(
                f"prompt of {longest} tokens + max_new_tokens {new} exceeds {name} {limit}{dynamic}: {remedy}"
            )


def _check_draft(call: Call) -> None:
    draft, config, longest, new = call.options.draft, call.config, call.longest, call.options.max_new_tokens
    if isinstance(draft, str) and draft == "lookup":
        return
    if callable(draft):
        check_guesser(draft, call.guesses, len(call.prompts) * call.answers, call.room)
        return
    if not (hasattr(draft, "params") and isinstance(getattr(draft, "config", None), ModelConfig)):
        raise InputError(
            f"draft must be a model from load_model, or 'lookup', or a function, got {shown(draft)}"
        )
    if draft.config.vocab_size != config.vocab_size:
        raise InputError(
            f"the draft's vocabulary of {draft.config.vocab_size} is not the model's of {config.vocab_size}"
        )
    if draft.config.context_length < longest + new:
        raise InputError(
            f"prompt of {longest} tokens + max_new_tokens {new} exceeds the draft's context limit"
            f" {draft.config.context_length}"
        )


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
