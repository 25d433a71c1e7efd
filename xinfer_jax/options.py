"""What `generate` and `stream` are asked for and what they give back; bad input is refused here, before any
tracing.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import jax
import numpy as np

from .attention import check_impl
from .brief import counted
from .config import ModelConfig, with_fixed_rope
from .errors import InputError
from .kv import KV_BITS
from .logprobs import TokenLogprobs
from .params import Params, check_params, resolve_dtype
from .prefix import Prefix
from .sampling import SamplingConfig, per_row, row_keys
from .stats import GenerateStats


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
            row before), or a function (history_BS, length_B, count) -> int32 [B, count] that can be traced;
            None: nothing.
        draft_tokens: guesses per pass; at least 1.
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
    check_params(params, config)
    options = with_ids(config, asked(options))
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
    for name in ("draft", "prefix", "keep_prefix", "cache_dtype"):
        if getattr(options, name) and not options.use_cache:
            raise InputError(f"{name} needs the cache: leave use_cache true")
    if options.keep_prefix and options.best_of not in (None, options.n):
        raise InputError(
            f"keep_prefix with best_of={options.best_of}: the cache would hold other rows, choose from n"
            " answers yourself"
        )
    if options.prefix is not None:
        options.prefix.shared(prompts)
        if options.capacity not in (None, options.prefix.cache.capacity):
            raise InputError(
                f"capacity={options.capacity}, but the prefix has a cache of {options.prefix.cache.capacity}:"
                " leave it out"
            )
        if options.cache_dtype not in (None, options.prefix.cache.dtype):
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
            options.prefix.cache.capacity if options.prefix else None,
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
    if key is None and np.any(sampling_B.temperature > 0):
        raise InputError("sampling needs a PRNG key: give key=jax.random.key(seed), or temperature 0")
    if key is None:  # nothing will be drawn: any keys do, and making these compiles nothing
        key = jax.random.wrap_key_data(np.zeros((len(prompts), 2), np.uint32), impl="threefry2x32")
    row_key_B = row_keys(key, len(prompts))
    return params, config, [list(map(int, p)) for p in prompts], options, sampling_B, row_key_B


def asked(options: Any) -> GenerateOptions:
    """The options, or the defaults for None."""
    if options is not None and not isinstance(options, GenerateOptions):
        raise InputError(f"options must be GenerateOptions, got {type(options).__name__}")
    return options or GenerateOptions()


def with_ids(config: ModelConfig, options: GenerateOptions) -> GenerateOptions:
    """Options with EOS and stop ids as tuples, each id once; the model's EOS ids where they name none.

    Raises:
        InputError: something that is no list of ids inside the vocabulary.
    """

    def checked_ids(name: str, ids: Any) -> tuple[int, ...]:
        given = ids.tolist() if isinstance(ids, np.ndarray | jax.Array) else ids
        if (
            isinstance(given, str | bytes)
            or not isinstance(given, Sequence | Set)
            or any(isinstance(i, bool) or not isinstance(i, int | np.integer) for i in given)
        ):
            raise InputError(f"{name.lower()}_token_ids must be a list of token ids, got {ids!r}")
        if outside := [i for i in given if not 0 <= i < config.vocab_size]:
            raise InputError(f"{name} token id {outside[0]} is outside the vocabulary of {config.vocab_size}")
        return tuple(dict.fromkeys(map(int, given)))

    eos = config.eos_token_ids if options.eos_token_ids is None else options.eos_token_ids
    return dataclasses.replace(
        options,
        eos_token_ids=checked_ids("EOS", eos),
        stop_token_ids=checked_ids("stop", options.stop_token_ids),
    )


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
