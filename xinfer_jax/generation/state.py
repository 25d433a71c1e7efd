"""`DecodeState`: everything that belongs to a row of the batch except its keys and values. Rows are the first
axis.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..annotations import AnyArray
from ..checks import array_module
from ..config.run_config import RunConfig
from ..errors import ShortRepr
from ..ops.operation import run
from ..sampling.context import Context
from ..sampling.sampler import choose_tokens
from ..sampling.sampling_config import SamplingConfig

if TYPE_CHECKING:
    from ..sampling.logprobs import Alternatives


class UnreadFeatures(NamedTuple):
    """Features of tokens for a draft head, which has not read the tokens after them yet."""

    features_BTX: Any  # of the tokens before the last `count_B` tokens of each row, one each
    count_B: Any  # int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class DecodeState(ShortRepr):
    """The state of a decode loop after each token. A `stop` function of `decode_loop` gets it.

    Attributes:
        token_B: int32: the last sampled token of each row.
        key_B: the PRNG keys of the rows.
        sampling_B: a `SamplingConfig` with the settings of each row, as arrays [B].
        limit_B: int32: the most tokens of each answer.
        finished_B: bool: the row has sampled an EOS token, or your `stop` has ended it.
        context: the data that the logits processors need: positions, EOS ids and tokens.
        tokens_BT: int32: the sampled tokens, the EOS token included. Entries after the end of a row are 0.
        logprobs_BT: float32: the log-probabilities of these tokens before any logits processor.
        alternatives: the alternatives of each token. None: the call did not ask for them.
        output_start_B: int32: the number of tokens that were sampled before the first column of these arrays.
            None: no tokens.
        unread: the values that a draft head needs next. None: no head drafts.
    """

    token_B: jax.Array
    key_B: jax.Array
    sampling_B: SamplingConfig
    limit_B: jax.Array
    finished_B: jax.Array
    context: Context
    tokens_BT: jax.Array
    logprobs_BT: jax.Array
    alternatives: "Alternatives | None" = None
    output_start_B: jax.Array | None = None
    unread: UnreadFeatures | None = None

    @property
    def length_B(self) -> jax.Array:
        """The number of tokens that each row has sampled, the EOS token included, int32 [B]."""
        return self.context.num_generated_B

    @property
    def position_B(self) -> jax.Array:
        """The position of the next token, int32 [B]. It is the length of the row."""
        return self.context.position_B

    @property
    def progress(self) -> "RowProgress":
        """The part of the state that the next forward pass needs."""
        return RowProgress(self.token_B, self.finished_B, self.length_B, self.limit_B)

    @property
    def active_B(self) -> jax.Array:
        """True for each row that has not sampled an EOS token and has not reached its limit, bool [B]."""
        return self.progress.active_B

    def with_masks(self, masks_BQW: AnyArray) -> "DecodeState":
        """Returns the state with masks of the tokens that rows may sample next (`Context.allowed_bits`)."""
        return dataclasses.replace(self, context=dataclasses.replace(self.context, allowed_bits=masks_BQW))


class RowSettings(NamedTuple):
    """The settings that sampling needs of each row, in addition to its tokens."""

    key_B: Any  # uint32 [B, 2]: data of the PRNG keys
    sampling_B: SamplingConfig  # from `settings_per_row`
    eos_BE: Any  # int32: ids that end the row; below 0: none
    limit_B: Any  # int32: the most tokens that it may sample


class RowProgress(NamedTuple):
    """The part of a `DecodeState` that has the same structure for all settings."""

    token_B: jax.Array
    finished_B: jax.Array
    length_B: jax.Array
    limit_B: jax.Array

    @property
    def active_B(self) -> jax.Array:
        return ~self.finished_B & (self.length_B < self.limit_B)

    def longest_B(self, position_B: Any) -> Any:
        """Returns, int32 [B], the number of tokens of the prompt and the longest possible answer. position_B:
        see `DecodeState`.
        """
        return position_B - self.length_B + self.limit_B


def new_state(
    key_B: jax.Array, sampling_B: SamplingConfig, limit_B: Any, context: Context, size: int
) -> DecodeState:
    """Returns rows before their first token. size: columns of `tokens_BT`."""
    B = limit_B.shape[0]
    xp = array_module(B)
    zeros_B = xp.zeros(B, np.int32)
    zeros_BT = xp.zeros((B, size), np.int32)
    logprobs_BT = zeros_BT.astype(np.float32)
    return DecodeState(zeros_B, key_B, sampling_B, limit_B, zeros_B > 0, context, zeros_BT, logprobs_BT)


class SampledTokens(NamedTuple):
    """Tokens that rows sampled, EOS included. B rows, T columns."""

    tokens_BT: Any  # int32
    logprobs_BT: Any  # float32: their log-probabilities before any logits processor
    count_B: Any  # int32: tokens of each row
    finished_B: Any  # bool: the row has ended by an EOS token, or a caller's `stop`
    alternatives: Any = None
    passes_B: Any = None  # int32: passes of the model that each row took part in; None: one for each token
    accepted_BT: Any = None  # int32: accepted draft tokens by their place in a step; None: there are none

    def rows(self) -> list[list[int]]:
        """Returns each row's tokens, on the host."""
        return [row[:n].tolist() for row, n in zip(self.tokens_BT, self.count_B, strict=True)]


def fetch_tokens(state: DecodeState, rows: int) -> SampledTokens:
    """Returns the tokens of the first rows, without alternatives, on the host. Each array costs some
    microseconds.
    """
    arrays = jax.device_get((state.tokens_BT, state.logprobs_BT, state.length_B, state.finished_B))
    return SampledTokens(*(array[:rows] for array in arrays))


def sample_and_append(
    logits_BV: jax.Array, state: DecodeState, run_config: RunConfig, among_B: Any = True
) -> DecodeState:
    """Samples the next token of each active row of `among_B` from logits, and appends it."""
    token_B, logprobs, sampled_from = choose_tokens(
        logits_BV, state.key_B, state.sampling_B, state.context, run_config
    )
    state = record_token(logits_BV, sampled_from, token_B, state, among_B)
    token_B, state = after_recording(token_B, state)
    return append_token(state, token_B, logprobs(token_B), among_B)


def after_recording(token: jax.Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
    """Returns tokens and state unchanged. A GPU records the alternatives before it appends the tokens:
    recording reads the context as it was, and appending changes it in place.
    """
    unordered = lambda token, alternatives: (token, alternatives)  # noqa: E731
    token, alternatives = run("after_recording", unordered, token=token, alternatives=state.alternatives)
    return token, dataclasses.replace(state, alternatives=alternatives)


def record_token(
    logits_BV: jax.Array, sampled_from: Callable[[], jax.Array], token_B: jax.Array, state: DecodeState,
    among_B: Any = True,
) -> DecodeState:  # fmt: skip
    """Returns the state with the alternatives of each row's next token, if they are requested. sampled_from:
    a function that gives the logits that the tokens were sampled from.
    """
    if state.alternatives is None:
        return state
    from ..sampling.logprobs import record_alternatives  # optional: alternatives

    column_B = _column(state, among_B)
    alternatives = record_alternatives(state.alternatives, column_B, logits_BV, sampled_from, token_B)
    return dataclasses.replace(state, alternatives=alternatives)


def append_token(
    state: DecodeState, token_B: jax.Array, logprob_B: jax.Array, among_B: Any = True
) -> DecodeState:
    """Returns the state with the next token of each active row of `among_B`. Other rows stay as they are."""
    active_B = state.active_B & among_B
    row_B = jnp.arange(token_B.shape[0])
    column_B = _column(state, among_B)
    ends_B = jnp.any(token_B[:, None] == state.context.eos_BE, -1)
    return dataclasses.replace(
        state,
        token_B=jnp.where(active_B, token_B, state.token_B),
        finished_B=state.finished_B | (active_B & ends_B),
        context=state.context.append_token(token_B, active_B),
        tokens_BT=jnp.asarray(state.tokens_BT).at[row_B, column_B].set(token_B, mode="drop"),
        logprobs_BT=jnp.asarray(state.logprobs_BT).at[row_B, column_B].set(logprob_B, mode="drop"),
    )


def _column(state: DecodeState, among_B: Any) -> jax.Array:
    """Returns, int32 [B], the column of each row's next token. It is past the end if the row gets none."""
    return jnp.where(state.active_B & among_B, next_column(state), state.tokens_BT.shape[1])


def next_column(state: DecodeState) -> jax.Array:
    """Returns int32 [B]: the column of each row's next token."""
    return state.length_B if state.output_start_B is None else state.length_B - state.output_start_B
