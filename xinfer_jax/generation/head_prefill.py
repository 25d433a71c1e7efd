"""Draft heads in a call: the head for a model, and prefill, after which the head has read the prompts."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..cache.draft_prefix import FeatureRows
from ..cache.kv_cache import KVCache
from ..config.model_config import ModelConfig
from ..draft_heads.draft import Draft, bind_draft
from ..draft_heads.draft_head import DraftHead, HeadParams, UnreadTokens, head_run_config
from ..errors import InputError
from ..model.decoder import Inputs, apply_model, head_logits
from ..ops.operation import over_any_mesh
from ..registry import plugin
from ..weights.params import Params, activation_dtype
from .executor import Executor
from .loop import last_hidden
from .proposers import HeadProposer
from .state import UnreadFeatures


class BoundHead(NamedTuple):
    """A head for a model, with its parameters."""

    head: DraftHead
    params: Params

    @property
    def config(self) -> ModelConfig:
        """The config of the head's own layers."""
        return self.head.config


def bound_head(draft: Any, params: Params, config: ModelConfig, count: int) -> BoundHead:
    """Returns the head of a model's own parameters for "mtp", or a `Draft` for the model. Raises InputError
    if there is none, it is a head of another model, or it cannot draft `count` tokens in a step.
    """
    if isinstance(draft, Draft):
        found = BoundHead(*bind_draft(draft, params, config))
        return _checked(found, count)
    if config.draft_head is None:
        raise InputError(
            "draft='mtp' needs the draft head of the checkpoint: load the model by load_model(path,"
            " draft_head=True)"
        )
    head = plugin("draft head", config.draft_head.kind).of_model(config)
    return _checked(BoundHead(head, params["draft_head"]), count)


def _checked(found: BoundHead, count: int) -> BoundHead:
    """Returns the head. Raises InputError if it cannot draft so many tokens in a step."""
    if count > (most := found.head.max_draft_tokens):
        raise InputError(f"draft_tokens={count}: this draft head drafts at most {most}")
    return found


class Prefilled(NamedTuple):
    """The results of a prefill with a proposer."""

    outputs: Any  # logits [B, V] after the last token of each row
    cache: KVCache
    draft_cache: KVCache | None  # of the draft head or model; None: it has none
    unread: UnreadFeatures | None  # None: no head drafts
    features: FeatureRows | None  # None: they are not kept


class ReadChunk(NamedTuple):
    """A chunk of prompts that the target and a head have read."""

    hidden_BTD: Any  # of the target, after its final norm
    features_BTX: Any
    cache: KVCache
    head_cache: KVCache | None


@over_any_mesh
def read_chunk(
    head: DraftHead, models: tuple, inputs: Inputs, before_BX: jax.Array, caches: tuple, run_config: Any
) -> ReadChunk:
    """Runs the target and then a head on a chunk of prompts.

    Args:
        head: the head.
        models: the parameters, the config and the extras of the target, and the parameters of the head.
        inputs: the tokens.
        before_BX: the features of the token before the chunk.
        caches: the caches of the target and of the head.
        run_config: see `apply_model`.
    """
    params, config, extras, own = models
    proposer = HeadProposer(head)
    cache, head_cache = caches
    out = apply_model(params, config, inputs, cache, proposer.extras(extras), run_config)
    features_BTX = proposer.features((own, params), out.hidden, out.reads)
    if head_cache is not None:
        shifted_BTX = jnp.concatenate([before_BX[:, None].astype(features_BTX.dtype), features_BTX], 1)[
            :, :-1
        ]
        unread = UnreadTokens(inputs.tokens_BT, shifted_BTX, inputs.num_tokens_B)
        head_cache = head.read(HeadParams(own, params), unread, head_cache, head_run_config(run_config))
    return ReadChunk(out.hidden, features_BTX, out.cache, head_cache)


def prefill_with_head(executor: Executor, static: tuple, caches: tuple, args: tuple) -> Prefilled:
    """Prefills prompts, or the rest of prompts, in chunks.

    Args:
        executor: the executor of a trace.
        static: the head, the config of the target, the tokens of a chunk, and the most unread tokens.
        caches: the caches of the target and of the head, and `FeatureRows` with the features of the tokens in
            them. If the latter are None, features are not kept, and the caches are empty.
        args: the parameters and extras of the target, the parameters of the head, and the tokens.
    """
    head, config, chunk, most_unread = static
    (params, extras), own, (tokens_BT, num_tokens_B) = args
    read = partial(read_chunk, head, (params, config, extras, own), run_config=executor.run_config)
    tokens_BT, num_tokens_B = jnp.asarray(tokens_BT), jnp.asarray(num_tokens_B)
    B, T = tokens_BT.shape
    chunk = min(chunk, T)
    tokens_BT = jnp.pad(tokens_BT, ((0, 0), (0, -T % chunk)))

    def body(i: Any, carry: tuple) -> tuple:
        last_BD, features_BX, cache, head_cache, kept = carry
        start_B = cache.length_B
        part_BT = lax.dynamic_slice_in_dim(tokens_BT, i * chunk, chunk, 1)
        count_B = jnp.clip(num_tokens_B - i * chunk, 0, chunk)
        found = read(Inputs(part_BT, count_B), features_BX, (cache, head_cache))
        kept = kept and kept.record(found.features_BTX, start_B, count_B)
        has_tokens_B1 = (count_B > 0)[:, None]
        last_BD = jnp.where(has_tokens_B1, last_hidden(found.hidden_BTD, count_B), last_BD)
        features_BX = jnp.where(has_tokens_B1, last_hidden(found.features_BTX, count_B), features_BX)
        return last_BD, features_BX, found.cache, found.head_cache, kept

    dtype = activation_dtype(params)
    states_BD = jnp.zeros((B, config.hidden_size), dtype)
    cache, _, kept = caches
    features_BX = jnp.zeros((B, head.feature_size), dtype)
    features_BX = features_BX if kept is None else kept.before(cache.length_B).astype(dtype)
    carry = states_BD, features_BX, *caches
    chunks = -(-jnp.max(num_tokens_B) // chunk)
    carry = body(0, carry) if tokens_BT.shape[1] == chunk else lax.fori_loop(0, chunks, body, carry)
    last_BD, features_BX, cache, head_cache, kept = carry
    unread_BTX = jnp.pad(features_BX[:, None], ((0, 0), (0, most_unread - 1), (0, 0)))
    unread = UnreadFeatures(unread_BTX, jnp.ones(B, jnp.int32))
    return Prefilled(head_logits(params, config, last_BD), cache, head_cache, unread, kept)
