"""Draft tokens in `decode_loop`: `prefill_with_draft` makes a `DraftState`, which `decode_loop` takes."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np

from ..cache.kv_cache import KVCache, init_cache
from ..checks import check_integer, is_traced
from ..config.model_config import ModelConfig, with_fixed_rope
from ..config.run_config import RunConfig
from ..draft_heads.draft import Draft
from ..errors import InputError, ShortRepr, format_value
from ..modes import in_default_modes
from ..registry import plugin
from ..weights.params import AnyArray, Params
from .draft_sources import DraftSource, PrefillSizes, checked_draft, chunk_of_caches, with_draft_slots
from .executor import RunnableModel, inline
from .functional import check_prefill
from .loop import TracedExecutor
from .options import MAX_DRAFT_TOKENS
from .proposers import FunctionProposer, Proposer, check_draft_function
from .speculation import SpeculationState, Speculative
from .state import DecodeState, UnreadFeatures
from .strategies import Plain

if TYPE_CHECKING:
    from ..checkpoint.loading import Model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class DraftState(ShortRepr):
    """The source of draft tokens of a `decode_loop`, after it has read the prompts. It is a pytree.

    Attributes:
        params: the parameters of the draft head or draft model. None: a function drafts.
        cache: its KV cache. None: it has none.
        unread: the values of the last tokens that a draft head needs next. None: no head drafts.
        proposer: the function, or the kind of the draft model or head.
        num_draft_tokens: the number of draft tokens in each pass of the model.
    """

    params: Params | None
    cache: KVCache | None
    unread: UnreadFeatures | None
    proposer: Proposer = dataclasses.field(metadata=dict(static=True))
    num_draft_tokens: int = dataclasses.field(metadata=dict(static=True))


class PrefilledDraft(NamedTuple):
    """The results of `prefill_with_draft`."""

    logits_BV: jax.Array
    cache: KVCache
    drafting: DraftState


@in_default_modes
def prefill_with_draft(  # noqa: PLR0913  a public function
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    num_tokens_B: AnyArray,
    cache: KVCache,
    draft: "Draft | Model | Callable[[jax.Array, jax.Array, int], jax.Array] | Literal['mtp', 'lookup']",
    draft_tokens: int = 3,
    *,
    donate: bool = False,
    impl: str | None = None,
) -> PrefilledDraft:
    """Appends whole prompts to an empty KV cache as `prefill` does, and prepares speculative decoding.

    Give the result `drafting` to `decode_loop`. The tokens equal those of a loop without it. Both functions
    work inside your own `jit`, and then `draft` may hold traced parameters.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import xinfer_jax as xj
        >>> model = xj.load_model(draft_head=True)
        >>> params, config = model.params, model.config
        >>> ids = jnp.array([xj.encode_prompt(model, "What is the capital of France?")])
        >>> length = ids.shape[1]
        >>> cache = xj.init_cache(config, rows=1, capacity=64)
        >>> logits_BV, cache, drafting = xj.prefill_with_draft(
        ...     params, config, ids, jnp.array([length]), cache, "mtp"
        ... )
        >>> out = xj.decode_loop(
        ...     params, config, logits_BV, cache, jax.random.key(0), xj.SamplingConfig(),
        ...     jnp.array(config.eos_token_ids), max_tokens=16,
        ...     history_BS=jnp.pad(ids, ((0, 0), (0, 16))), drafting=drafting,
        ... )
        >>> model.tokenizer.decode(out.tokens_BT[0, : out.length_B[0]].tolist())
        'The capital of France is Paris.'

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        tokens_BT: int32 token ids, padded on the right.
        num_tokens_B: int32 [B]: the number of real tokens in each row, at least 1.
        cache: an empty KV cache, from `init_cache`.
        draft: the source of draft tokens, as in `GenerateOptions`: "mtp", a `Draft`, a `Model`, "lookup" or a
            function.
        draft_tokens: the number of draft tokens in each pass, 1 to 16. It is lowered to the capacity minus 1.
        donate: True lets the call reuse the memory of `cache`. Your `cache` is deleted then.
        impl: the implementation of the operations (see `prefill`). None chooses the one that suits the
            device.

    Returns:
        A named tuple: float32 logits [B, V] after each row's last real token (`logits_BV`), the cache with
        the prompts (`cache`), and the `DraftState` for `decode_loop` (`drafting`).

    Raises:
        InputError: `prefill` would raise it.
        InputError: the cache has tokens. Under your `jit` this is not checked, and drafts are then wrong.
        InputError: the draft does not fit the model, or cannot draft this number of tokens.
    """
    check_prefill(config, tokens_BT, num_tokens_B, cache, impl)
    if not is_traced(cache.length_B) and np.any(np.asarray(cache.length_B)):
        raise InputError(
            "prefill_with_draft needs an empty cache, because a draft reads whole prompts: give one from"
            " init_cache"
        )
    count = check_integer("draft_tokens", draft_tokens, 1, MAX_DRAFT_TOKENS)
    count = min(count, cache.capacity - 1)
    source = DraftSource.of_draft(checked_draft(draft, params, config, count, cache.dtype))
    source, draft_cache = _with_cache(source, params, cache)
    chunk = chunk_of_caches(cache, draft_cache)
    static = config, source._replace(params=None), PrefillSizes(chunk, 1 + count, None)
    prefill = _PREFILL_DONATING if donate else _PREFILL
    models = params, source.params
    tokens = tokens_BT, num_tokens_B
    logits_BV, cache, draft_cache, unread = prefill(
        models, cache, draft_cache, tokens, static, RunConfig(impl)
    )
    drafting = DraftState(source.params, draft_cache, unread, source.proposer, count)
    return PrefilledDraft(logits_BV, cache, drafting)


def _with_cache(source: DraftSource, params: Params, cache: KVCache) -> tuple[DraftSource, KVCache | None]:
    """Returns the source with fixed factors of longrope, and its empty cache, or None if it has none. cache:
    the cache of the model.
    """
    if not source.has_cache:
        return source, None
    config: Any = source.config
    capacity = min(cache.capacity, config.context_length)  # draft tokens beyond are dropped
    if source.head is None:
        config = with_fixed_rope(config, capacity, capacity)
        source = DraftSource.of_model(config, source.params)
    find = plugin("mesh", "of params")
    mesh = find(params)[0] if find else None
    return source, init_cache(config, len(cache.length_B), capacity, cache.dtype, mesh)


def _prefill(models, cache, draft_cache, tokens, static, run_config):
    params, own = models
    config, source, sizes = static
    source = source._replace(params=own)
    caches = cache, draft_cache, None
    executor = TracedExecutor(run_config, inline)
    sizes = sizes._replace(whole=tokens)
    return source.prefill(executor, RunnableModel(params, config), tokens, caches, sizes)[:4]


def check_drafting(drafting: Any, cache: KVCache, history_BS: Any, size: int, others: dict[str, Any]) -> None:
    """Raises InputError if a `decode_loop` cannot draft.

    Args:
        drafting: the argument of the loop.
        cache: the cache of the model.
        history_BS: the tokens of the rows, or None.
        size: the most tokens of an answer.
        others: arguments of the loop that do not combine with drafts.
    """
    if not isinstance(drafting, DraftState):
        raise InputError(f"drafting must come from prefill_with_draft, got {format_value(drafting)}")
    for name, value in others.items():
        if value is not None and value is not False:
            raise InputError(f"{name} cannot be combined with drafting: leave out {name} or drafting")
    if history_BS is None:
        raise InputError(
            "drafting needs history_BS: give each row's tokens in order, with space for the new ones"
        )
    B, S = history_BS.shape
    drafted_B = drafting.cache.length_B if drafting.cache else drafting.unread and drafting.unread.count_B
    if drafted_B is not None and len(drafted_B) != B:
        raise InputError(f"drafting has {len(drafted_B)} rows, and the cache {B}: prefill both together")
    length = 1 if is_traced(cache.length_B) else int(np.max(np.asarray(cache.length_B)))
    if S < length + size:
        raise InputError(
            f"history_BS has space for {S} tokens of a row, and drafting needs {length + size}: pad it on the"
            " right"
        )
    if isinstance(drafting.proposer, FunctionProposer):
        check_draft_function(drafting.proposer.function, drafting.num_draft_tokens, B, S)


def start_drafting(
    drafting: DraftState, plain: Plain, constants: tuple, state: DecodeState, cache: KVCache
) -> tuple[Speculative, tuple, DecodeState, KVCache, list[SpeculationState]]:
    """Returns the strategy with drafts, its constants, and its carry: the state, the cache, and a list of the
    rest. All but the first argument belong to plain decoding.
    """
    count = drafting.num_draft_tokens
    strategy = Speculative(plain.config, drafting.proposer, count, plain.stop)
    state = dataclasses.replace(state, unread=drafting.unread)
    cache = with_draft_slots(cache, 1 + count)
    drafts = SpeculationState.of_rows(len(state.token_B), count, drafting.cache)
    return strategy, (*constants, drafting.params), state, cache, [drafts]


_PREFILL = jax.jit(_prefill, static_argnames=("static", "run_config"), donate_argnames="draft_cache")
_PREFILL_DONATING = jax.jit(
    _prefill, static_argnames=("static", "run_config"), donate_argnames=("cache", "draft_cache")
)
