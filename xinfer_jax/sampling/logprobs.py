"""Log-probabilities of sampled tokens and of alternatives, before and after the processors, and logits."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShortRepr
from ..ops.largest import largest_k
from .support import pack_support


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Alternatives(ShortRepr):
    """The values that the decode loop records for each sampled token. A is the number of alternatives."""

    id_BTA: jax.Array  # int32: the most likely tokens before any processor
    logprobs_BTA: jax.Array  # float32
    processed_id_BTA: jax.Array  # int32: the most likely after all processors, temperature included
    processed_logprobs_BTA: jax.Array  # float32
    processed_logprobs_BT: jax.Array  # float32: log-probability of the sampled token after all processors
    logits_BTV: jax.Array | None  # float32: before any processor
    wanted_B: jax.Array | None = None  # bool: rows that asked for alternatives; None: all rows
    support_BTW: jax.Array | None = None  # uint32: the ids that it was sampled from, as in `support.py`

    @property
    def sampled_only(self) -> "Alternatives":
        """The record of all rows with only the log-probabilities of sampled tokens."""
        none: Any = None
        return Alternatives(none, none, none, none, self.processed_logprobs_BT, none)

    @property
    def parts(self) -> list["Alternatives"]:
        """Returns the parts that one program each records. If rows may ask for `processed_logprobs_BT` alone,
        one program records it in any case: the numbers of another program may have other bits.
        """
        none: Any = None
        if self.wanted_B is None:
            return [self]
        others = dataclasses.replace(self, processed_logprobs_BT=none)
        return [self.sampled_only] if self.id_BTA is None else [self.sampled_only, others]


class TokenLogprobs(NamedTuple):
    """A sampled token and its most likely alternatives, with natural log-probabilities.

    The EOS token has an entry too. Alternatives are sorted, and the most likely one comes first.

    Attributes:
        id: the id of the sampled token.
        logprob: its log-probability before any logits processor.
        processed_logprob: its log-probability after all logits processors and the temperature. It is 0 if
            only this token was possible.
        top: pairs (id, log-probability) of the most likely tokens before any logits processor.
        processed_top: pairs (id, log-probability) of the most likely tokens after all logits processors.
    """

    id: int
    logprob: float
    processed_logprob: float
    top: list[tuple[int, float]]
    processed_top: list[tuple[int, float]]


def empty_alternatives(
    rows: int, size: int, count: int, vocab_size: int, logits: bool = False, support: bool = False
) -> Alternatives:
    """Returns arrays for `size` tokens of each row and `count` alternatives of each token."""

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros((rows, size, *shape), np.float32)

    ids = np.zeros((rows, size, count), np.int32)
    numbers = zeros(count)
    masks = np.zeros((rows, size, -(-vocab_size // 32)), np.uint32) if support else None
    logits_BTV = zeros(vocab_size) if logits else None
    return Alternatives(ids, numbers, ids, numbers, zeros(), logits_BTV, support_BTW=masks)


def record_alternatives(
    old: Alternatives, column_B: jax.Array, logits_BV: jax.Array, sampled_from: Callable[[], jax.Array],
    token_B: jax.Array,
) -> Alternatives:  # fmt: skip
    """Records each row's token in its column. Columns beyond the arrays are dropped. Fields that are None
    stay.

    Args:
        old: the record before.
        column_B: int32.
        logits_BV: logits before any processor.
        sampled_from: a function from `choose_tokens` that gives the logits that the tokens were sampled from.
        token_B: int32.
    """
    if old.wanted_B is not None:
        args = column_B, logits_BV, sampled_from, token_B
        return if_wanted(old, column_B, lambda old: record_alternatives(old, *args))

    def put(array: Any, new: jax.Array) -> jax.Array | None:
        if array is None:
            return None
        return jnp.asarray(array).at[jnp.arange(len(token_B)), column_B].set(new, mode="drop")

    count = 0 if old.id_BTA is None else old.id_BTA.shape[-1]
    sampled_from_BV = sampled_from()
    processed_logprob_BV = jax.nn.log_softmax(sampled_from_BV)
    logprob_BA, id_BA = largest_k(jax.nn.log_softmax(logits_BV), count)
    processed_BA, processed_id_BA = largest_k(processed_logprob_BV, count)
    sampled_B = jnp.take_along_axis(processed_logprob_BV, token_B[:, None], 1)[:, 0]
    kept_BV = None if old.logits_BTV is None else logits_BV
    support_BW = None if old.support_BTW is None else pack_support(sampled_from_BV)
    new = Alternatives(
        id_BA, logprob_BA, processed_id_BA, processed_BA, sampled_B, kept_BV, support_BTW=support_BW
    )
    return jax.tree.map(put, old, new, is_leaf=lambda x: x is None)


def if_wanted(
    old: Alternatives, column_B: jax.Array, record: Callable[[Alternatives], Alternatives]
) -> Alternatives:
    """Returns `record(old)`. If no row that asked for alternatives has a column within the arrays, it returns
    `old`: top-k over the vocabulary is skipped. `record` gets alternatives that all rows want.
    """
    if old.wanted_B is None:
        return record(old)
    wanted_B = old.wanted_B
    old = dataclasses.replace(old, wanted_B=None)
    wanted = jnp.any(wanted_B & (column_B < jax.tree.leaves(old)[0].shape[1]))
    recorded = lax.cond(wanted, lambda: record(old), lambda: old)
    return dataclasses.replace(recorded, wanted_B=wanted_B)


def output_fields(
    recorded: Alternatives, tokens_BT: np.ndarray, logprobs_BT: np.ndarray, length_B: np.ndarray
) -> dict[str, list[Any]]:
    """Returns the records as fields of `GenerateOutput`: one entry per row, on the host."""
    found: dict[str, list[Any]] = {}
    if recorded.id_BTA.shape[-1]:
        found["alternatives"] = token_logprob_rows(recorded, tokens_BT, logprobs_BT, length_B)
    for name, recorded_BT in (("logits", recorded.logits_BTV), ("support", recorded.support_BTW)):
        if recorded_BT is not None:
            of_rows = zip(map(np.asarray, recorded_BT), length_B, strict=False)
            found[name] = [of_row[:n] for of_row, n in of_rows]  # cut on the host: nothing to compile
    return found


def token_logprob_rows(
    recorded: Alternatives,
    tokens_BT: np.ndarray,
    logprobs_BT: np.ndarray,
    length_B: np.ndarray,
    most: int | None = None,
) -> list[list[TokenLogprobs]]:
    """Returns one list per row, on the host. most: number of alternatives of each token. None: all."""
    recorded = jax.device_get(dataclasses.replace(recorded, logits_BTV=None, support_BTW=None))

    def pairs(ids_TA: np.ndarray, logprobs_TA: np.ndarray) -> list[list[tuple[int, float]]]:
        both = zip(ids_TA[:, :most].tolist(), logprobs_TA[:, :most].tolist(), strict=True)
        return [list(zip(*of_token, strict=True)) for of_token in both]

    def row(i: int, n: int) -> list[TokenLogprobs]:
        numbers = (x_BT[i, :n].tolist() for x_BT in (tokens_BT, logprobs_BT, recorded.processed_logprobs_BT))
        before = pairs(recorded.id_BTA[i, :n], recorded.logprobs_BTA[i, :n])
        after = pairs(recorded.processed_id_BTA[i, :n], recorded.processed_logprobs_BTA[i, :n])
        return list(map(TokenLogprobs, *numbers, before, after))

    return [row(i, n) for i, n in enumerate(length_B)]
