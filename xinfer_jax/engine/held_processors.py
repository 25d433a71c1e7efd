"""`HeldProcessors`: the logits processors of callers that an engine is made with, which requests name."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import is_sequence
from ..errors import InputError, format_value
from ..generation.state import DecodeState, append_token
from ..model.caller_functions import function_name
from ..sampling.caller_processors import Callers, LogitsProcessor, check_pair, guarded
from ..sampling.sampler import sample_tokens
from .held_table import HeldTable


class HeldProcessors(HeldTable[tuple[LogitsProcessor, Any]]):
    """P processors by name, with the arguments that a row has that does not name one."""

    noun = "processor"

    def __init__(self, given: Any):
        """Holds processors. given: (`LogitsProcessor`, arguments) by name. None: none. Raises InputError."""
        super().__init__()
        pairs = {}
        for name, pair in self.check_given(given, "pairs of a LogitsProcessor and arguments").items():
            if not (is_sequence(pair) and len(pair) == 2 and isinstance(pair[0], LogitsProcessor)):
                what = "(LogitsProcessor, arguments of a request that gives none)"
                raise InputError(f"the processor {name!r} must be {what}, got {format_value(pair)}")
            pairs[name] = pair[0], _arrays(name, pair[1])
        self.replace_all(pairs)

    def of_request(self, given: Any) -> Callers:
        """Returns the `Callers` of one row before `start`, for `GenerateOptions.processors` of a request.

        Args:
            given: arguments by name, or pairs as `generate` takes them. None: the defaults.

        Raises:
            InputError: there are other names or processors, or arguments of another form than the defaults.
        """
        if is_sequence(given):
            given = self._by_name(given)
        self.check_request(given, "arguments")
        states = []
        for name, (_, default) in self.items():
            own = default if given.get(name) is None else _arrays(name, given[name], default)
            states.append(jax.tree.map(lambda x: x[None], own))
        uses_1P = np.array([[name in given for name in self]])
        processors = tuple(processor for processor, _ in self.values())
        return Callers(tuple(states), None, processors, uses_BP=uses_1P)

    def _by_name(self, pairs: Sequence[Any]) -> dict[str, Any]:
        """Returns the arguments by name for pairs of a processor and the arguments of one row, which have the
        form that `generate` takes. Raises InputError if the engine does not hold a processor, or holds them
        in another order.
        """
        given: dict[str, Any] = {}
        for pair in pairs:
            check_pair(pair)
            processor, arguments = pair
            same = [name for name, (held, _) in self.items() if held == processor and name not in given]
            if not same:
                raise InputError(
                    f"processors of a request: the engine {self.in_words}, and none that applies"
                    f" {function_name(processor.apply)}: make the engine with"
                    " processors={name: (processor, arguments)}"
                )
            given[same[0]] = jax.tree.map(_only_row, arguments)
        if [*given] != (order := [name for name in self if name in given]):
            raise InputError(
                f"the engine applies its processors in the order {', '.join(order)}: give this order"
            )
        return given

    def of_row(self, leaves: Sequence[np.ndarray]) -> Callers:
        """Returns the `Callers` of a row before `start`. leaves: the leaves of the result of `of_request`.
        (): the row names none.
        """
        none = self.of_request({})
        return jax.tree.unflatten(jax.tree.structure(none), leaves) if leaves else none

    def with_rows(self, rows: DecodeState) -> DecodeState:
        """Returns the rows of all slots with processors that none of them names. Raises InputError for
        functions that a step cannot use.
        """
        row = jax.tree.map(lambda x: x[:1], rows)
        all_of_them = self.of_request(dict.fromkeys(self))
        attempt = guarded(_TRY, all_of_them)
        started, _ = attempt(all_of_them, row)
        # A function may only work for one row, or keep what it was traced with for the next time.
        attempt(jax.tree.map(lambda x: repeated(x, len(rows.limit_B)), all_of_them), rows)
        unused = dataclasses.replace(started, uses_BP=np.zeros_like(started.uses_BP))
        callers = jax.tree.map(lambda x: repeated(x, len(rows.limit_B)), unused)
        return _with_callers(rows, callers)


def _try(callers: Callers, row: DecodeState) -> tuple[Callers, DecodeState]:
    """Returns the callers of a row at its start, and the row after a step with them."""
    callers = callers.start(row.context, row.key_B)
    row = _with_callers(row, callers)
    logits_1V = jnp.zeros(row.context.seen_BV.shape, jnp.float32)
    token_1, logprob_1, _ = sample_tokens(logits_1V, row.key_B, row.sampling_B, row.context)
    return callers, append_token(row, token_1, logprob_1)


_TRY = jax.jit(_try)


def _with_callers(rows: DecodeState, callers: Callers) -> DecodeState:
    return dataclasses.replace(rows, context=dataclasses.replace(rows.context, callers=callers))


def _only_row(x: Any) -> Any:
    """Returns the entry of a number for all rows, or of an array of one row."""
    if np.ndim(x) and len(x) != 1:
        raise InputError(f"processors: arguments of shape {np.shape(x)}, for 1 row")
    return x[0] if np.ndim(x) else x


def repeated(x_1: Any, rows: int) -> Any:
    """Repeats an array of one row for this number of rows. It is made on the host, where nothing is
    compiled.
    """
    if not jnp.issubdtype(x_1.dtype, jax.dtypes.prng_key):
        return np.repeat(x_1, rows, 0)
    data_B: Any = np.repeat(np.asarray(jax.random.key_data(x_1)), rows, 0)
    return jax.random.wrap_key_data(data_B, impl=jax.random.key_impl(x_1))


def _arrays(name: str, arguments: Any, like: Any = None) -> Any:
    """Returns the arguments of one row as NumPy arrays of their own. like: arguments of the same tree, shapes
    and types.
    """
    try:
        arrays = jax.tree.map(_array, arguments)
        if like is None:
            return arrays
        tree: Any = jax.tree.structure(arrays)
        if tree == jax.tree.structure(like):
            cast = jax.tree.map(lambda x, default: _array(x, default.dtype), arrays, like)
            if [x.shape for x in jax.tree.leaves(cast)] == [x.shape for x in jax.tree.leaves(like)]:
                return cast
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = "a pytree of numbers or arrays" if like is None else f"as {format_value(like)}"
    raise InputError(f"arguments of the processor {name!r} must be {wanted}, got {format_value(arguments)}")


def _array(x: Any, dtype: Any = None) -> np.ndarray:
    """Converts a value to a NumPy array of this dtype. None: the dtype that JAX gives it. Raises
    OverflowError if the dtype cannot hold the numbers.
    """
    wide = np.asarray(x)
    with np.errstate(over="ignore"):
        array = wide.astype(dtype or jnp.result_type(x), casting="same_kind")
    is_same = array == wide if array.dtype.kind in "iu" else np.isfinite(array) | ~np.isfinite(wide)
    if not np.all(is_same):
        raise OverflowError(f"{x} in {array.dtype}")
    return array
