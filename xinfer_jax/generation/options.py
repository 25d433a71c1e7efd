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
    """Options of `generate`, `stream` and the text functions.

    Attributes:
        max_tokens: most new tokens of a row, EOS included; at least 1.
        sampling: how a token is sampled: one `SamplingConfig` for all prompts, or one per prompt; it counts
            as a whole. None: functions of a `Model` follow its generation_config.json
            (`Model.sampling_config`), and functions of `params` and `config` are greedy.
        eos_token_ids: any of them ends a row; None: the model's own (`ModelConfig.eos_token_ids`, which
            `load_model` finds); (): none, rows end at max_tokens.
        capacity: tokens that a row of the cache can hold; None: what the call needs, rounded up.
        use_cache: False: compute the whole sequence again for every token, for comparisons.
        impl: of the operations: "mosaic", "triton", "tpu" or "xla"; None: what suits the device.
        cache_dtype: of keys and values: "int8", "int4", "float8_e4m3fn", "gear", or a float type; None:
            float32 on CPU, else the type of the activations.
        stop_token_ids: end a row as EOS ids do.
        stop_strings: the text ends before the first of them; only for the text functions.
        n: answers per prompt. Rows i * n … i * n + n - 1 are those of prompt i; answer 0 samples with
            row_key, as a single one does, and answer j with fold_in(row_key, j).
        best_of: generate so many answers per prompt and return the n with the largest log-probability per
            token; None: n.
        logprobs: alternatives returned for each token, before and after the logits processors; 0: none.
        draft: what proposes draft tokens: a `Model` with the same vocabulary; "lookup" (prompt look-up: the
            tokens that followed earlier in the row); or a traceable function (history_BS, length_B, count) ->
            int32 [B, count], where B is a power of two and the last rows may be padding; None: no
            speculation.
        draft_tokens: draft tokens per step, 1 to 16; at most what fits into the answer.
        prefix: from an earlier call. The part of each prompt that this prefix covers is not prefilled again.
            None: prefill everything.
        keep_prefix: return the cache as out.prefix, for the next call.
        logits: also return the logits of every step, before any logits processor: float32 [steps, V] per row.
        support: also return the sampling mask of every step, as `score` takes it: uint32 [steps, ceil(V/32)]
            per row.
        grammar: what an answer has to be: from `json_schema`, `json_object`, `regex`, `lark` or `choice`; one
            for all prompts, or one (or None) per prompt. An EOS id comes where it may end, and only there; an
            answer that reaches max_tokens before is cut. None: anything.
        processors: logits processors of yours, each with the arguments of the prompts, as in `decode_loop`;
            `history_BS` of their context has the prompts' tokens. A request to an engine takes the same list
            of processors that the engine was made with, or {name: arguments} of them, where None stands for
            the default arguments.
        taps: edits of the residual stream, as in `decode_loop`: of all rows alike, so `args` have no rows. A
            request to an engine takes the taps {layer: Tap.steer(vector, factor)} of vectors that the engine
            was made with, or {name: factor} of them.
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
    """What `generate` returns; one entry per prompt and answer.

    Attributes:
        tokens: all ids that were sampled. If an EOS or stop id ended the answer, it is the last one.
        logprobs: the natural log-probability of each token before any logits processor.
        finish_reason: OpenAI's values: "stop" (an EOS id, a stop id or a stop string) or "length"; also
            "abort", if you stopped the call, and in an engine "error".
        stop_reason: what stopped the answer (vLLM's field). None: an EOS id, or the length. A number: that
            stop id. A text: that stop string, or why an engine ended the answer before its end: "deadline"
            (its finish_reason is "length"), "cancelled", or "aborted" by `Engine.update` or `Engine.pause`.
        stats: the cost of the call.
        alternatives: with options.logprobs: of each token; else None.
        logits: with options.logits: float32 [tokens, V]; else None.
        prefix: with options.keep_prefix: the cache, for the next call; else None.
        token_versions: of an engine: the version of the weights that sampled each token; else None.
        adapter, adapter_versions: of an engine, if the request names an adapter: that name, and as
            `token_versions` the version of the adapter; else None.
        routed_experts: of an engine that is asked for them: `Answer.routed_experts`; else None.
        support: with options.support, or of an engine that is asked for it: uint32 [entries of `logprobs`,
            ceil(V/32)]. If entry t could be id v, bit v % 32 of word v // 32 is set. Else None.
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
        """Returns the ids of an answer that have text: all but the EOS or stop id that ended them."""
        ends_with_id = self.finish_reason[row] == "stop" and not isinstance(self.stop_reason[row], str)
        return self.tokens[row][: -1 if ends_with_id else None]

    def best(self, n: int, of: int) -> "GenerateOutput":
        """The n answers with the largest mean log-probability of each group of `of` consecutive ones, best
        first.
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
