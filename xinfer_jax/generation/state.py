"""One state per row: everything that belongs to a row, rows in front. Keys and values stand apart."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..brief import Brief
from ..sampling.choice import choose
from ..sampling.context import Context
from ..sampling.logprobs import Alternatives, note_alternatives
from ..sampling.settings import SamplingConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class DecodeState(Brief):
    """What the decode loop carries of each row, and what it gives."""

    token_B: jax.Array  # int32: the last token chosen
    key_B: jax.Array  # PRNG keys
    sampling_B: SamplingConfig  # from `per_row`
    limit_B: jax.Array  # int32: tokens that the row may choose
    finished_B: jax.Array  # bool: the row chose an EOS token
    context: Context  # what the processors look at: position, EOS ids, tokens
    tokens_BT: jax.Array  # int32: tokens chosen, EOS included, 0 behind a row's end
    logprobs_BT: jax.Array  # float32: their log-probabilities before any processor
    alternatives: Alternatives | None = None  # noted where asked for
    noted_B: Any = None  # int32: tokens chosen before the first column of these; None: none

    @property
    def length_B(self) -> jax.Array:
        """int32 [B]: how many tokens each row chose, EOS included."""
        return self.context.chosen_B

    @property
    def position_B(self) -> jax.Array:
        """int32 [B]: position of the next token to choose, which is the row's length."""
        return self.context.position_B

    @property
    def turn(self) -> "Turn":
        """What the next pass of the model wants to know."""
        return Turn(self.token_B, self.finished_B, self.length_B, self.limit_B)

    @property
    def active_B(self) -> Any:
        """bool [B]: the row has not ended: no EOS yet, and its limit not reached."""
        return self.turn.active_B


class Turn(NamedTuple):
    """Of a `DecodeState` what is the same with any settings."""

    token_B: Any
    finished_B: Any
    length_B: Any
    limit_B: Any

    @property
    def active_B(self) -> Any:
        return ~self.finished_B & (self.length_B < self.limit_B)


def new_state(
    key_B: jax.Array, sampling_B: SamplingConfig, limit_B: Any, context: Context, size: int
) -> DecodeState:
    """Rows that have chosen nothing yet, with room for `size` tokens each."""
    zeros_B = np.zeros(len(limit_B), np.int32)
    zeros_BT = np.zeros((len(limit_B), size), np.int32)
    logprobs_BT = zeros_BT.astype(np.float32)
    return DecodeState(zeros_B, key_B, sampling_B, limit_B, zeros_B > 0, context, zeros_BT, logprobs_BT)


class Chosen(NamedTuple):
    """Of the state what the host looks at: NumPy arrays of the same meaning."""

    tokens_BT: np.ndarray
    logprobs_BT: np.ndarray
    length_B: np.ndarray
    finished_B: np.ndarray

    def rows(self) -> list[list[int]]:
        """Each row's tokens, EOS included."""
        return [row[:n].tolist() for row, n in zip(self.tokens_BT, self.length_B, strict=True)]


def look(state: DecodeState, rows: int) -> Chosen:
    """What the first rows chose; each array that is brought to the host costs some microseconds."""
    chosen = state.tokens_BT, state.logprobs_BT, state.length_B, state.finished_B
    return Chosen(*(array[:rows] for array in jax.device_get(chosen)))


def choose_and_note(
    logits_BV: jax.Array, state: DecodeState, impl: str | None, among_B: Any = True
) -> DecodeState:
    """The state with the next token of each active row (of those `among` them), chosen from logits."""
    token_B, logprob_B, taken_BV = choose(logits_BV, state.key_B, state.sampling_B, state.context, impl)
    noted = state.alternatives
    if noted is not None:
        noted = note_alternatives(noted, _column(state, among_B), logits_BV, taken_BV, token_B)
    return note(dataclasses.replace(state, alternatives=noted), token_B, logprob_B, among_B)


def note(state: DecodeState, token_B: jax.Array, logprob_B: jax.Array, among_B: Any = True) -> DecodeState:
    """The state with each active row's next token; rows that ended, or are not `among` them, stay."""
    active_B = state.active_B & among_B
    row_B = jnp.arange(len(token_B))
    column_B = _column(state, among_B)
    ends_B = jnp.any(token_B[:, None] == state.context.eos_BE, -1)
    return dataclasses.replace(
        state,
        token_B=jnp.where(active_B, token_B, state.token_B),
        finished_B=state.finished_B | (active_B & ends_B),
        context=state.context.advance(token_B, active_B),
        tokens_BT=jnp.asarray(state.tokens_BT).at[row_B, column_B].set(token_B, mode="drop"),
        logprobs_BT=jnp.asarray(state.logprobs_BT).at[row_B, column_B].set(logprob_B, mode="drop"),
    )


def _column(state: DecodeState, among_B: Any) -> jax.Array:
    """int32 [B]: where each row's next token is noted; past the end where it gets none."""
    column_B = state.length_B if state.noted_B is None else state.length_B - state.noted_B
    return jnp.where(state.active_B & among_B, column_B, state.tokens_BT.shape[1])
