"""State of the logits processors: each row's tokens so far, their counts, EOS ids and allowed tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import is_traced
from .batched_settings import has_all_settings
from .sampling_config import SamplingConfig

ALL_BITS = np.uint32(2**32 - 1)  # a word of a mask that allows every token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """State of the logits processors, batch axis first. A field is None if the plain settings do not need
    it.
    """

    position_B: jax.Array  # int32: tokens of prompt and answer; the next token has this position
    num_generated_B: jax.Array  # int32: tokens of the answer, EOS included
    eos_BE: jax.Array  # int32: ids that end the row; below 0: none
    seen_BV: jax.Array  # bool: which tokens occur in prompt or answer
    count_BV: jax.Array | None  # int32: how often each token occurs in the answer
    history_BS: jax.Array | None  # int32: tokens of prompt and answer in order; None: not needed
    # uint32 [B, Q, ceil(V/32)]: bit v % 32 of word v // 32: v is allowed. The first mask is of the next
    # token; the host may write Q - 1 others, of the tokens after it.
    allowed_bits: Any
    biased_B: jax.Array | None = None  # bool: the row's `logit_bias` is not all zeros, so kernels read it
    automata: Any = None  # `grammar.automaton.Automata` of the rows; None: no row has one
    callers: Any = None  # `caller_processors.Callers` of the rows; None: no row has one

    def append_token(self, token_B: jax.Array, active_B: jax.Array) -> "Context":
        """Returns the context with a token appended to each active row."""
        row_B = jnp.arange(token_B.shape[0])
        one_B = active_B.astype(jnp.int32)
        history_BS = self.history_BS
        if history_BS is not None:
            at_B = jnp.where(active_B, self.position_B, history_BS.shape[1])
            history_BS = jnp.asarray(history_BS).at[row_B, at_B].set(token_B, mode="drop")
        count_BV = None if self.count_BV is None else jnp.asarray(self.count_BV).at[row_B, token_B].add(one_B)
        return dataclasses.replace(
            self,
            position_B=self.position_B + one_B,
            num_generated_B=self.num_generated_B + one_B,
            seen_BV=jnp.asarray(self.seen_BV).at[row_B, token_B].max(active_B),
            count_BV=count_BV,
            history_BS=history_BS,
            allowed_bits=next_masks(self.allowed_bits, one_B),
            automata=self.automata and self.automata.append(token_B, active_B),
            callers=self.callers and self.callers.append(self, token_B, active_B),
        )

    def select_rows(self, rows_B: Any) -> "Context":
        """Returns the context without the functions of other rows, whose work is skipped. rows_B: bool."""
        automata, callers = (part and part.select_rows(rows_B) for part in (self.automata, self.callers))
        return dataclasses.replace(self, automata=automata, callers=callers)

    def reorder(self, index_B: jax.Array) -> "Context":
        """Returns a context whose row b is row index_B[b]."""
        return jax.tree.map(lambda leaf: leaf[index_B], self)


def next_masks(bits: Any, count_B: jax.Array) -> Any:
    """Returns the masks [B, Q, W] after `count_B` tokens of each row. The last mask stays, and so does an
    only mask.
    """
    if bits is None or bits.shape[1] == 1:
        return bits
    index_BQ = jnp.minimum(count_B[:, None] + jnp.arange(bits.shape[1]), bits.shape[1] - 1)
    return jnp.take_along_axis(jnp.asarray(bits), index_BQ[..., None], 1)


def init_context(
    sampling_B: SamplingConfig, position_B: Any, eos_BE: Any, seen_BV: Any, history_BS: Any = None,
    num_masks: int = 1, automata: Any = None,
) -> Context:  # fmt: skip
    """Returns the context of prompts without answers. Every token is allowed.

    Args:
        sampling_B: settings from `settings_per_row`.
        position_B: int32, prompt lengths.
        eos_BE: int32, ids that end each row.
        seen_BV: bool, the tokens that occur in the prompts.
        history_BS: int32, the prompts' tokens in order, with free places for the answers.
        num_masks: Q of `allowed_bits`.
        automata: the automata of the rows.
    """
    (B, V) = seen_BV.shape
    full = has_all_settings(sampling_B)
    xp: Any = jnp if is_traced(position_B) else np  # on the host nothing is compiled
    return Context(
        position_B,
        xp.zeros(B, np.int32),
        eos_BE,
        seen_BV,
        xp.zeros((B, V), np.int32) if full else None,
        history_BS,
        xp.full((B, num_masks, -(-V // 32)), ALL_BITS) if full else None,
        _biased_rows(sampling_B.logit_bias) if full else None,
        automata,
    )


def _biased_rows(bias_BV: Any) -> Any:
    """Returns bool [B]: which rows have a bias."""
    if not isinstance(bias_BV, np.ndarray):
        return jnp.any(bias_BV != 0, -1)
    if bias_BV.strides[0] == 0:  # one row for all
        return np.repeat(np.any(bias_BV[:1] != 0, -1), len(bias_BV))
    return np.any(bias_BV != 0, -1)
