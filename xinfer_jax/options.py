"""What `generate` and `stream` are asked for and what they give back; bad input is refused here, before any
tracing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .attention import check_impl
from .config import ModelConfig, with_fixed_rope
from .errors import InputError
from .kv import KV_BITS
from .logprobs import TokenLogprobs
from .params import Params, resolve_dtype
from .prefix import Prefix
from .sampling import SamplingConfig, per_row, row_keys
from .stats import GenerateStats


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
    draft_tokens: int = 3  # guesses per pass
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


def checked(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None,
    key: jax.Array | None,
) -> tuple[Any, ...]:
    """params, config, prompts, options, and settings and keys for each prompt; or an InputError."""
    options = options or GenerateOptions()
    check_impl(options.impl)
    check_prompts(config, prompts)
    longest, new = max(map(len, prompts)), options.max_new_tokens
    if isinstance(new, bool) or not isinstance(new, int | np.integer) or new < 1:
        raise InputError(f"max_new_tokens must be a whole number of at least 1, got {new!r}")
    for sampling in [options.sampling] if isinstance(options.sampling, SamplingConfig) else options.sampling:
        sampling.validate()
    if options.cache_dtype is not None and options.cache_dtype not in KV_BITS:
        resolve_dtype(options.cache_dtype)
    if options.stop_strings:
        raise InputError("stop_strings need text: use generate_text or stream_text, or stop_token_ids")
    for name, least in (("n", 1), ("logprobs", 0), ("draft_tokens", 1), ("best_of", options.n)):
        value = getattr(options, name)
        if (value is not None or name != "best_of") and (
            isinstance(value, bool) or not isinstance(value, int) or value < least
        ):
            raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if options.draft not in (None, "lookup") and not callable(options.draft):
        if not hasattr(options.draft, "params"):
            raise InputError(f"draft must be a model from load_model, or 'lookup', got {options.draft!r}")
        if options.draft.config.vocab_size != config.vocab_size:
            raise InputError(
                f"the draft's vocabulary of {options.draft.config.vocab_size} is not the model's of"
                f" {config.vocab_size}"
            )
        if options.draft.config.context_length < longest + new:
            raise InputError(
                f"prompt of {longest} tokens + max_new_tokens {new} exceeds the draft's context limit"
                f" {options.draft.config.context_length}"
            )
        options = dataclasses.replace(options, draft=_fixed_draft(options.draft, longest + new))
    for name in ("draft", "prefix", "keep_prefix", "cache_dtype"):
        if getattr(options, name) and not options.use_cache:
            raise InputError(f"{name} needs the cache: leave use_cache true")
    if options.keep_prefix and options.best_of not in (None, options.n):
        raise InputError(
            f"keep_prefix with best_of={options.best_of}: the cache would hold other rows, choose from n"
            " answers yourself"
        )
    if options.prefix is not None:
        if not isinstance(options.prefix, Prefix):
            raise InputError(
                f"prefix must be the out.prefix of a call, or from load_prefix, got {options.prefix!r}"
            )
        options.prefix.shared(prompts)
        if options.capacity not in (None, options.prefix.cache.capacity):
            raise InputError(
                f"capacity={options.capacity}, but the prefix has a cache of {options.prefix.cache.capacity}:"
                " leave it out"
            )
        if options.cache_dtype is not None and _cache_name(options.cache_dtype) != options.prefix.cache.dtype:
            raise InputError(
                f"cache_dtype={options.cache_dtype!r}, but the prefix is in {options.prefix.cache.dtype}:"
                " leave it out"
            )
    if options.logprobs > config.vocab_size:
        raise InputError(f"logprobs={options.logprobs} exceeds the vocabulary of {config.vocab_size}")
    sampling_B = per_row(options.sampling, len(prompts), config.vocab_size)
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
    config = with_fixed_rope(config, min(map(len, prompts)), longest + new)
    if options.prefix is not None:
        options = dataclasses.replace(options, prefix=options.prefix.usable(params, config))
    for name, ids in (("EOS", options.eos_token_ids), ("stop", options.stop_token_ids)):
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise InputError(f"{name} token id {token} is outside the vocabulary of {config.vocab_size}")
    if key is None and np.any(sampling_B.temperature > 0):
        raise InputError("sampling needs a PRNG key: give key=jax.random.key(seed), or temperature 0")
    if key is None:  # nothing will be drawn: any keys do, and making these compiles nothing
        key = jax.random.wrap_key_data(np.zeros((len(prompts), 2), np.uint32), impl="threefry2x32")
    row_key_B = row_keys(key, len(prompts))
    return params, config, [list(map(int, p)) for p in prompts], options, sampling_B, row_key_B


def _fixed_draft(draft: Any, longest: int) -> Any:
    """The draft model with longrope's factors for the longest sequence, also where they would change on the
    way: it only guesses, so the tokens are the model's own all the same.
    """
    config = with_fixed_rope(draft.config, longest, longest)
    return draft if config is draft.config else dataclasses.replace(draft, config=config)


def _cache_name(dtype: Any) -> str:
    """As `KVCache.dtype` names it."""
    return dtype if dtype in KV_BITS else np.dtype(resolve_dtype(dtype)).name


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], name: str = "prompt") -> None:
    """Raises InputError, which calls them by `name`, unless prompts are non-empty lists of ids inside the
    vocabulary.
    """
    if not len(prompts):
        raise InputError(f"no {name}s: give at least one list of token ids")
    for i, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"{name} {i} must be a non-empty list of token ids, got {prompt!r}")
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            bad = ids[(ids < 0) | (ids >= config.vocab_size)][0]
            raise InputError(
                f"{name} {i} holds token id {bad}, outside the vocabulary of {config.vocab_size}"
            )
