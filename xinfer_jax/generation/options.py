"""`GenerateOptions` and `GenerateOutput`: the options and the output of `generate` and `stream`."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..annotations import Dtype
from ..config.model_config import ModelConfig
from ..errors import format_token_counts
from ..old_names import OldAttribute, keyword_options
from ..sampling.sampling_config import SamplingConfig
from ..stats import GenerateStats
from .executor import bucket

if TYPE_CHECKING:
    import jax

    from ..cache.prefix import Prefix
    from ..checkpoint.loading import Model
    from ..grammar.grammars import Grammar
    from ..model.taps import Taps
    from ..sampling.caller_processors import LogitsProcessor
    from ..sampling.logprobs import TokenLogprobs

MAX_DRAFT_TOKENS = 16  # of a pass: the loop over them is unrolled, which takes long to compile


@keyword_options(max_new_tokens="max_tokens")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `generate`, `stream`, the functions of text and the requests of an engine.

    Some fields are options of a whole call. An engine raises `InputError` if the options of a request change
    one of them:

    - `capacity`, `impl`, `cache_dtype` and `draft`. Pass them to `Engine` (its `draft` can be "lookup").
    - `use_cache`, `prefix` and `keep_prefix`. An engine always has a KV cache, and shares prefixes itself.
    - `logits`. Use `generate` or `logprobs`.
    - `support`. Pass `return_support=True` to `Engine.submit`.

    A request to an engine can have at most 20 alternatives per token (`logprobs`), 8 EOS ids and 16 further
    stop ids.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> options = xj.GenerateOptions(max_tokens=4, logprobs=2)
        >>> ids = xj.encode_prompt(model, "What is the capital of France?")
        >>> out = xj.generate(model.params, model.config, [ids], options)
        >>> out.finish_reason
        ['length']

    Attributes:
        max_tokens: the most new tokens of a row, the EOS token included. At least 1.
        sampling: the sampling settings: one `SamplingConfig` for all prompts, or one per prompt. It replaces
            all settings of the checkpoint. If it is None, functions of a `Model` follow its
            generation_config.json (`Model.sampling_config`), and functions of `params` and `config` are
            greedy.
        eos_token_ids: ids that end a row. None takes the model's own ids (`ModelConfig.eos_token_ids`, which
            `load_model` finds). With `()` no EOS id ends a row.
        capacity: the most tokens that a row of the KV cache can hold. None takes the length of the longest
            prompt plus `max_tokens`, each rounded up to a power of two (16 at least), and no more than the
            context length.
        use_cache: False computes the whole sequence again for every token. Use it for comparisons.
        impl: the implementation of the operations: "mosaic", "triton", "tpu" or "xla". None chooses the one
            that suits the device.
        cache_dtype: the dtype of keys and values: "int8", "int4", "float8_e4m3fn", "gear", or a float type.
            None takes float32 on a CPU, and the dtype of the activations on other devices.
        stop_token_ids: further ids that end a row, as EOS ids do. A request to an engine takes at most 16.
        stop_strings: texts that end an answer. Its text ends before the first of them. There can be 64 of
            them, of at most 256 characters each. Only the functions of text, engines and the server take
            them. `generate` and `stream` raise `InputError`.
        n: the number of answers per prompt. Rows `i * n` to `i * n + n - 1` belong to prompt i. Answer 0
            samples with the prompt's key, as a single answer does, and answer j samples with
            `fold_in(key, j)`.
        best_of: the number of answers to generate per prompt. The call returns the n answers with the largest
            log-probability per token. None generates n.
        logprobs: the number k of alternatives to return for each token. The result then has `alternatives`,
            with a `TokenLogprobs` for each token: the k most likely tokens before and after the logits
            processors, and `TokenLogprobs.processed_logprob`, the log-probability of the token itself after
            the processors and the temperature. An engine takes at most 20. 0 returns no alternatives.
        draft: the source of draft tokens for speculative decoding. It is a `Model` with the same vocabulary,
            "lookup" (prompt lookup: the tokens that followed the same tokens earlier in the row), or your own
            function that JAX can trace: `(history_BS, length_B, count) -> int32 [B, count]`. `generate`
            rounds the number of rows up to a power of two. So your function can get more rows than you have
            answers, and the last rows are then padding. None: no speculative decoding.
        draft_tokens: the number of draft tokens per step, 1 to 16. Fewer are used if fewer fit into the
            answer.
        prefix: the `out.prefix` of an earlier call. The part of each prompt that it covers is not prefilled
            again. If a draft head drafts, the earlier call must have had the same `draft`. None prefills all
            tokens.
        keep_prefix: True returns the KV cache as `out.prefix`, for the next call. If a draft head drafts, the
            prefix has the cache of the head too, and X numbers for each token, for most heads D.
        logits: True also returns the logits of every step, before any logits processor: float32 [steps, V]
            per row.
        support: True also returns the sampling mask of every step, as `score` takes it: uint32 [steps,
            ceil(V/32)] per row.
        grammar: the grammar of the answers, from `xj.grammar.json_schema`, `json_object`, `regex`, `lark` or
            `choice`. Pass one for all prompts, or a list with one (or None) per prompt. An EOS token can come
            only at a point at which the grammar allows the answer to end. If an answer reaches max_tokens
            before, it is incomplete. None allows any text.
        processors: logits processors that you wrote: a list of pairs of a `LogitsProcessor` and its arguments
            for the prompts (see `decode_loop`). The `history_BS` of their context has the tokens of the
            prompts too. A request to an engine takes the list of processors that the engine was made with, or
            a dict {name: arguments}. In both, None stands for the default arguments.
        taps: edits of the residual stream (see `decode_loop`). They edit all rows in the same way, so their
            `args` have no row axis. A request to an engine takes taps {layer: Tap.steer(vector, factor)} of
            vectors that the engine was made with, or a dict {name: factor}.
    """

    max_tokens: int = 128
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None
    eos_token_ids: Sequence[int] | None = None
    capacity: int | None = None
    use_cache: bool = True
    impl: str | None = None
    cache_dtype: Dtype | None = None
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    n: int = 1
    best_of: int | None = None
    logprobs: int = 0
    draft: "Model | Callable[[jax.Array, jax.Array, int], jax.Array] | Literal['lookup'] | None" = None
    draft_tokens: int = 3
    prefix: "Prefix | None" = None
    keep_prefix: bool = False
    logits: bool = False
    support: bool = False
    grammar: "Grammar | Sequence[Grammar | None] | None" = None
    processors: "Sequence[tuple[LogitsProcessor, Any]] | Mapping[str, Any] | None" = None
    taps: "Taps | Mapping[str, float] | None" = None


@dataclasses.dataclass(repr=False)
class GenerateOutput:
    """The result of `generate`, with one entry per answer. The n answers to a prompt are next to each other.

    Attributes:
        tokens: all sampled ids of each answer. If an EOS or stop id ended the answer, it is the last id.
        logprobs: the natural log-probability of each token before any logits processor.
        finish_reason: OpenAI's values: "stop" (an EOS id, a stop id or a stop string ended the answer) or
            "length". It is "abort" if you stopped the call. In an engine it can also be "error".
        stop_reason: the id or the text that stopped the answer (vLLM's field). None: an EOS id or the length
            did. A number is the stop id. A text is the stop string, or the reason for which an engine ended
            the answer early: "deadline" (with the finish_reason "length"), "cancelled", or "aborted" (by
            `Engine.update` or `Engine.pause`).
        stats: the cost of the call in time, tokens and memory.
        alternatives: the alternatives of each token, if you set `options.logprobs`. Otherwise None.
        logits: float32 [tokens, V] per answer, if you set `options.logits`. Otherwise None.
        prefix: the KV cache for the next call, if you set `options.keep_prefix`. Otherwise None.
        token_versions: the version of the weights that sampled each token, if an engine generated the answer.
            Otherwise None.
        adapter: the name of the LoRA adapter of a request to an engine. None: the request names no adapter.
        adapter_versions: the version of the adapter that sampled each token. None: the request names no
            adapter.
        routed_experts: the experts of each token (`Answer.routed_experts`), if a request to an engine asks
            for them. Otherwise None.
        support: the sampling masks uint32 [entries of `logprobs`, ceil(V/32)] per answer, if you set
            `options.support`, or if a request to an engine asks for them. If token t could be id v, bit
            `v % 32` of word `v // 32` of entry t is set. Otherwise None.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reason: list[str]
    stop_reason: list[int | str | None]
    stats: GenerateStats
    alternatives: "list[list[TokenLogprobs]] | None" = None
    logits: list[np.ndarray] | None = None
    prefix: "Prefix | None" = None
    token_versions: list[list[int]] | None = None
    adapter: str | None = None
    adapter_versions: list[list[int]] | None = None
    routed_experts: list[np.ndarray] | None = None
    support: list[np.ndarray] | None = None
    routes = OldAttribute("routed_experts")

    def __repr__(self) -> str:
        reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(self.finish_reason).items())
        answers = format_token_counts(self.tokens, "answer")
        return f"GenerateOutput({answers}, finish_reason: {reasons or 'none'})"

    def text_ids(self, row: int) -> list[int]:
        """Returns the ids of an answer without the EOS or stop id that ended it.

        Args:
            row: the index of the answer.
        """
        ends_with_id = self.finish_reason[row] == "stop" and not isinstance(self.stop_reason[row], str)
        return self.tokens[row][: -1 if ends_with_id else None]

    def best(self, n: int, of: int) -> "GenerateOutput":
        """Returns the best answers of each group, by their mean log-probability.

        Args:
            n: the number of answers to keep of each group. The best one comes first.
            of: the number of consecutive answers that form a group.
        """
        mean = [np.mean(row) if row else -np.inf for row in self.logprobs]
        groups = (range(first, first + of) for first in range(0, len(mean), of))
        kept = [i for group in groups for i in sorted(group, key=lambda i: -mean[i])[:n]]
        lists = {name: value for name, value in vars(self).items() if isinstance(value, list)}
        picked = {name: [value[i] for i in kept] for name, value in lists.items()}
        return dataclasses.replace(self, **picked)


def default_capacity(config: ModelConfig, prompt_tokens: int, max_tokens: int) -> int:
    """Returns the capacity of the cache if the caller gives none. prompt_tokens: the number of tokens of the
    longest prompt.
    """
    return min(bucket(prompt_tokens) + bucket(max_tokens), config.context_length)


def options_or_default(options: GenerateOptions | None) -> GenerateOptions:
    """Returns the options, or the defaults for None."""
    if options is not None and not isinstance(options, GenerateOptions):
        from ..wrong_types import not_options  # optional: objects of transformers

        raise not_options(options)
    return options or GenerateOptions()
