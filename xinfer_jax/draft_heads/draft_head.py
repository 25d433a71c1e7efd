"""`DraftHead`: a small network that drafts tokens from hidden states of the model whose tokens it drafts (the
target).

A head has its own cache. Slot s of it holds a function of token s and of the features of token s - 1, so a
page of slots is a function of its own prefix alone, and prompts share pages as they do without a head. Slot 0
has no features before it, so no other slot sees it.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from ..cache.kv_cache import KVCache, update_layers
from ..cache.truncation import truncate
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..errors import InputError
from ..mixers.attention import FirstKey
from ..mixers.mixer import Positions
from ..model.decoder_layer import LayerInputs, all_layers, run_layers
from ..model.extras import NO_EXTRAS
from ..weights.layers import rotary_angles
from ..weights.params import Params


class HeadParams(NamedTuple):
    """The parameters of a head, and those of its target, whose embeddings and output matrix it may use."""

    own: Params
    target: Params


class UnreadTokens(NamedTuple):
    """Tokens that a head has not read yet, which follow the tokens in its cache. Token s comes with the
    features of token s - 1, which are zeros for token 0.
    """

    tokens_BT: Any  # int32
    features_BTX: Any  # of the token before each
    num_tokens_B: Any  # int32: the first tokens of each row are real


class DraftCall(NamedTuple):
    """What a head drafts from."""

    unread: UnreadTokens
    cache: KVCache | None  # of the head, with the tokens before these; None: it has none
    target_cache: KVCache  # of the target: it lacks the last token of each row
    context: Any  # `Context` of the rows before the first draft token
    # (logits_BV, context) -> token_B and the context with it: with the row's settings and noise.
    sample: Callable[[Any, Any], tuple[Any, Any]]
    run_config: RunConfig


@dataclasses.dataclass(frozen=True)
class DraftHead(abc.ABC):
    """A kind of head. It is static, and its arrays are `HeadParams`.

    Attributes:
        config: the numbers of its own layers.
        target: the config of the model whose tokens it drafts. None: the head was loaded alone, and `bound`
            was not called yet.
    """

    config: ModelConfig
    target: Any = None

    kind: ClassVar[str]  # as in `plugins.TABLE`

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the target, from 0, whose outputs `features` gets."""
        return ()

    @property
    def feature_size(self) -> int:
        """X, the numbers of a token that the head keeps of the target."""
        return self.target.hidden_size

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that it can draft in one step."""
        return 16

    def scratch_slots(self, count: int) -> int:
        """Returns the number of slots after the certain tokens that it writes to draft this number of
        tokens.
        """
        return 0

    @property
    def has_cache(self) -> bool:
        """True if it has a cache of its own."""
        return bool(self.config.cached_mixers)

    def bound(self, target: ModelConfig) -> Self:
        """Returns the head for this target. Raises InputError if it is a head of another model."""
        return dataclasses.replace(self, target=target)

    @abc.abstractmethod
    def param_specs(self) -> Params:
        """Returns the tree of `ParamSpec`s of its own parameters, which has "layers"."""

    def features(self, params: HeadParams, hidden_BTD: jax.Array, reads: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the features [B, T, X] of tokens that the target has run.

        Args:
            params: the parameters.
            hidden_BTD: the target's hidden states after its final norm.
            reads: the outputs of the layers of `taps`, [B, T, D] each.
        """
        return hidden_BTD

    @abc.abstractmethod
    def read(
        self, params: HeadParams, unread: UnreadTokens, cache: KVCache, run_config: RunConfig
    ) -> KVCache:
        """Returns the cache with these tokens."""

    @abc.abstractmethod
    def draft(self, params: HeadParams, call: DraftCall, count: int) -> tuple[jax.Array, KVCache | None]:
        """Returns draft tokens, int32 [B, count], and the cache with the unread tokens, without the drafts. A
        row without unread tokens gets any tokens.
        """


@dataclasses.dataclass(frozen=True)
class ChainHead(DraftHead):
    """A head that drafts one token after the other. After the first, it takes its own states for features."""

    def scratch_slots(self, count):
        return max(0, count - 1)

    @abc.abstractmethod
    def run(
        self, params: HeadParams, unread: UnreadTokens, call: DraftCall
    ) -> tuple[jax.Array, KVCache | None]:
        """Returns states [B, T, S] of these tokens, and the cache with the tokens. From the states `logits`
        computes the next token, and they are the features of the next step, so `run` accepts features of the
        width S too. S is X, unless the head needs other numbers for logits than for the next step. Only the
        cache, the target's cache and the `run_config` of the call are used.
        """

    @abc.abstractmethod
    def logits(self, params: HeadParams, states_BX: jax.Array) -> jax.Array:
        """Returns the logits of the token after these, float32 [B, V]."""

    def read(self, params, unread, cache, run_config):
        call = DraftCall(unread, cache, None, None, None, run_config)  # type: ignore[arg-type]
        return self.run(params, unread, call)[1]

    def draft(self, params, call, count):
        states_BTX, cache = self.run(params, call.unread, call)
        end_B1 = jnp.maximum(call.unread.num_tokens_B - 1, 0)[:, None]
        states_BX = jnp.take_along_axis(states_BTX, end_B1[..., None], 1)[:, 0]
        token_B, context = call.sample(self.logits(params, states_BX), call.context)
        draft_BT = jnp.zeros((len(token_B), count), jnp.int32).at[:, 0].set(token_B)
        one_B = jnp.ones_like(token_B)
        length_B = None if cache is None else cache.length_B

        def body(i: jax.Array, carry: Any) -> Any:
            draft_BT, token_B, states_BX, context, cache = carry
            unread = UnreadTokens(token_B[:, None], states_BX[:, None], one_B)
            states_BTX, cache = self.run(params, unread, call._replace(cache=cache))
            token_B, context = call.sample(self.logits(params, states_BTX[:, 0]), context)
            return draft_BT.at[:, i].set(token_B), token_B, states_BTX[:, 0], context, cache

        carry = draft_BT, token_B, states_BX, context, cache
        draft_BT, *_, cache = lax.fori_loop(1, count, body, carry)
        return draft_BT, cache if cache is None else truncate(cache, length_B)


def head_run_config(run_config: RunConfig) -> RunConfig:
    """Returns the settings of a program for a head. A kernel that the caller names is for the target. The
    head, which may have other widths, gets the kernels that support it.
    """
    return run_config if run_config.impl == "xla" else dataclasses.replace(run_config, impl=None)


def check_sizes(target: ModelConfig, **sizes: int) -> None:
    """Raises InputError unless the numbers of the target, by their names, are those that a head needs."""
    for name, size in sizes.items():
        if getattr(target, name) != size:
            raise InputError(
                f"this draft head is for a model with {name} {size}, and the model has"
                f" {getattr(target, name)}: use the head of this model"
            )


def run_head_layers(
    config: ModelConfig,
    layers: Any,
    x_BTD: jax.Array,
    num_tokens_B: jax.Array,
    cache: KVCache | None,
    run_config: RunConfig,
) -> tuple[jax.Array, KVCache | None]:
    """Returns the output of a head's layers, [B, T, D], and its cache with these tokens. cache: None: the
    tokens are whole rows, as in training.
    """
    positions = head_positions(config, x_BTD.shape[:2], num_tokens_B, cache)
    inputs = (LayerInputs(),) * config.num_hidden_layers
    caches = (None,) * len(config.cached_mixers) if cache is None else cache.layers
    args = x_BTD, positions, inputs, NO_EXTRAS, caches, run_config
    out = run_layers(layers, all_layers(config), *args)
    return out.hidden_BTD, cache and update_layers(cache, out.caches, num_tokens_B)


def head_positions(
    config: ModelConfig, shape: tuple[int, ...], num_tokens_B: jax.Array, cache: KVCache | None
) -> Positions:
    """Returns the positions of tokens [B, T], which follow the tokens in a head's cache. No token sees slot
    0, which has no features before it.
    """
    B, T = shape
    start_B = None if cache is None else cache.length_B
    position_BT = (jnp.zeros((B, 1), jnp.int32) if start_B is None else start_B[:, None]) + jnp.arange(T)
    length_B = num_tokens_B
    if cache is not None:
        length_B = jnp.zeros_like(cache.length_B) if cache.longest_B is None else cache.longest_B
    angles = rotary_angles(config, position_BT, length_B)
    first_BT = jnp.minimum(position_BT, 1)  # slot 0 sees itself
    return Positions(angles, start_B, num_tokens_B, position_BT, first_BT if cache is None else FirstKey(1))
