"""Log-probabilities beside the tokens: alternatives before and after the processors, logits on request."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..brief import Brief
from ..sharding import top_k


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Alternatives(Brief):
    """What the decode loop notes for each chosen token; A alternatives."""

    id_BTA: jax.Array  # int32: the likeliest tokens before any processor
    logprob_BTA: jax.Array  # float32
    processed_id_BTA: jax.Array  # int32: the likeliest after all of them, temperature included
    processed_logprob_BTA: jax.Array  # float32
    processed_BT: jax.Array  # float32: log-probability of the chosen token after all processors
    logits_BTV: jax.Array | None  # float32: before any processor
    asked_B: Any = None  # bool: the row wants them; None: all do


class TokenLogprobs(NamedTuple):
    """One chosen token (EOS included) and its alternatives, likeliest first; natural logarithms.

    Attributes:
        id: the token.
        logprob: its log-probability before any processor.
        processed_logprob: that of the distribution it was drawn from; 0 where the likeliest was taken for
            certain.
        top: (id, log-probability) of the likeliest before any processor.
        processed_top: the same after all of them.
    """

    id: int
    logprob: float
    processed_logprob: float
    top: list[tuple[int, float]]
    processed_top: list[tuple[int, float]]


def no_alternatives(rows: int, size: int, count: int, vocab_size: int, logits: bool) -> Alternatives:
    """Empty, for `size` tokens a row and `count` alternatives each."""

    def zeros(*after: int) -> np.ndarray:
        return np.zeros((rows, size, *after), np.float32)

    ids = np.zeros((rows, size, count), np.int32)
    numbers = zeros(count)
    return Alternatives(ids, numbers, ids, numbers, zeros(), zeros(vocab_size) if logits else None)


def note_alternatives(
    old: Alternatives, column_B: jax.Array, logits_BV: jax.Array, processed_BV: jax.Array, token_B: jax.Array
) -> Alternatives:
    """Notes each row's token in its column, if there is one; processed: the logits that it was drawn from."""
    if old.asked_B is not None:  # finding the likeliest takes a while
        asked_B = old.asked_B
        old = dataclasses.replace(old, asked_B=None)
        wanted = jnp.any(asked_B & (column_B < old.processed_BT.shape[1]))
        args = old, column_B, logits_BV, processed_BV, token_B
        noted = lax.cond(wanted, note_alternatives, lambda old, *_: old, *args)
        return dataclasses.replace(noted, asked_B=asked_B)

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.asarray(array).at[jnp.arange(len(token_B)), column_B].set(new, mode="drop")

    count = old.id_BTA.shape[-1]
    after_BV = jax.nn.log_softmax(processed_BV)
    logprob_BA, id_BA = top_k(jax.nn.log_softmax(logits_BV), count)
    processed_BA, processed_id_BA = top_k(after_BV, count)
    chosen_B = jnp.take_along_axis(after_BV, token_B[:, None], 1)[:, 0]
    kept_BV = None if old.logits_BTV is None else logits_BV
    new = Alternatives(id_BA, logprob_BA, processed_id_BA, processed_BA, chosen_B, kept_BV)
    return jax.tree.map(put, old, new)


def rows_of_tokens(
    noted: Alternatives,
    tokens_BT: np.ndarray,
    logprobs_BT: np.ndarray,
    length_B: np.ndarray,
    most: int | None = None,
) -> list[list[TokenLogprobs]]:
    """On the host, one list per row. most: alternatives of each token, at most; None: all."""
    noted = jax.device_get(dataclasses.replace(noted, logits_BTV=None))

    def pairs(ids_TA: np.ndarray, logprobs_TA: np.ndarray) -> list[list[tuple[int, float]]]:
        both = zip(ids_TA[:, :most].tolist(), logprobs_TA[:, :most].tolist(), strict=True)
        return [list(zip(*of_token, strict=True)) for of_token in both]

    def row(i: int, n: int) -> list[TokenLogprobs]:
        numbers = (x_BT[i, :n].tolist() for x_BT in (tokens_BT, logprobs_BT, noted.processed_BT))
        before = pairs(noted.id_BTA[i, :n], noted.logprob_BTA[i, :n])
        after = pairs(noted.processed_id_BTA[i, :n], noted.processed_logprob_BTA[i, :n])
        return list(map(TokenLogprobs, *numbers, before, after))

    return [row(i, n) for i, n in enumerate(length_B)]
