"""Callers' functions between logits and tokens: `Processor`, and what `Context.callers` is made of."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..caller_functions import check_function, function_name
from ..checks import is_sequence
from ..errors import InputError, format_value
from .context import Context
from .random_keys import DRAW_CALLER
from .sampler import all_greedy, draw_tokens, process_logits, token_logprobs, warp_logits
from .sampling_config import SamplingConfig


class SamplingContext(NamedTuple):
    """What a caller's function knows of B rows when their next token is chosen.

    Attributes:
        key_B: PRNG keys of this position and function, of no other draw.
        position_B: int32: tokens of prompt and answer, the position of the next token.
        num_generated_B: int32: tokens of the answer.
        eos_BE: int32: ids that end each row; below 0: none.
        seen_BV: bool: tokens that `seen_BV` of the call named, and those of the answer.
        history_BS: int32: tokens of prompt and answer in order, if the call got them; else None.
    """

    key_B: Any
    position_B: Any
    num_generated_B: Any
    eos_BE: Any
    seen_BV: Any
    history_BS: Any


@dataclasses.dataclass(frozen=True)
class Processor:
    """A logits processor of a caller: pure functions over rows, traced in the loop.

    Tokens that a setting or a grammar forbids stay forbidden whatever it returns. Where it leaves no other
    token in a row, the row keeps its logits. NaN counts as -inf, +inf as a logit of 1e30. A program is
    compiled for each processor, which is known by its functions: a lambda that is made anew in each call
    compiles anew.

    Attributes:
        init: (arguments, `SamplingContext`) -> the state of B rows, a pytree with rows in front; None: the
            arguments are the state.
        apply: (state, logits_BV, `SamplingContext`) -> logits_BV, float32.
        update: (state, token_B, `SamplingContext`) -> the state after a token of each row; None: it stays.
        last: it is applied after the built-in processors, temperature and filters, instead of before all.
    """

    init: Callable[[Any, SamplingContext], Any] | None
    apply: Callable[[Any, jax.Array, SamplingContext], jax.Array]
    update: Callable[[Any, jax.Array, SamplingContext], Any] | None = None
    last: bool = False

    def __post_init__(self) -> None:
        for name in ("init", "apply", "update"):
            check_function(f"{name} of a Processor", getattr(self, name))
        if self.apply is None:
            raise InputError("apply of a Processor must be a function with a hash, got None")
        if not isinstance(self.last, bool):
            raise InputError(f"last of a Processor must be True or False, got {format_value(self.last)}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Callers:
    """`Context.callers`: callers' processors with the states of B rows, and a function that samples."""

    states: tuple[Any, ...]
    key_B: Any
    processors: tuple[Processor, ...] = dataclasses.field(metadata=dict(static=True))
    sample: Callable | None = dataclasses.field(metadata=dict(static=True))

    def start(self, context: Context, key_B: jax.Array) -> "Callers":
        """With the states that `init` makes of the arguments. key_B: of the rows."""
        self = dataclasses.replace(self, key_B=jax.vmap(jax.random.fold_in, (0, None))(key_B, DRAW_CALLER))
        known = self._context(context)

        def state(i: int, processor: Processor, arguments: Any) -> Any:
            if processor.init is None:
                return arguments
            made = processor.init(arguments, _for_function(i, known))
            for leaf in jax.tree.leaves(made):
                if not np.ndim(leaf) or len(leaf) != len(known.position_B):
                    what = (
                        f"an array of shape {np.shape(leaf)}, expected {len(known.position_B)} rows in front"
                    )
                    raise InputError(f"init {function_name(processor.init)} of a processor returned {what}")
            return jax.tree.map(jnp.asarray, made)

        states = tuple(map(state, range(len(self.states)), self.processors, self.states))
        return dataclasses.replace(self, states=states)

    def choose(
        self, logits_BV: jax.Array, key_B: jax.Array, settings: SamplingConfig, context: Context
    ) -> tuple[jax.Array, Callable, Callable]:
        """What `choose_tokens` returns, from the whole vocabulary of all rows. settings: of each row."""
        known = self._context(context)
        allowed = partial(process_logits, sampling_B=settings, context=context)
        processed_BV = allowed(self._apply(False, logits_BV, known))
        has_some_B1 = jnp.any(processed_BV > -jnp.inf, -1, keepdims=True)
        processed_BV = lax.cond(
            jnp.all(has_some_B1),
            lambda: processed_BV,
            lambda: jnp.where(has_some_B1, processed_BV, allowed(logits_BV)),
        )
        largest_B1 = jnp.max(processed_BV, -1, keepdims=True)
        warped_BV = lax.cond(
            all_greedy(settings),
            lambda: processed_BV,
            lambda: warp_logits(processed_BV, settings, largest_B1),
        )
        taken_BV = jnp.where(processed_BV > -jnp.inf, self._apply(True, warped_BV, known), -jnp.inf)
        taken_BV = jnp.where(jnp.any(taken_BV > -jnp.inf, -1, keepdims=True), taken_BV, warped_BV)
        if self.sample is None:
            draw = key_B, settings, known.position_B, None, logits_BV.shape[1]
            token_B = draw_tokens(taken_BV, *draw)
        else:
            known = _for_function(len(self.processors), known)
            token_B = self.sample(known.key_B, taken_BV, known)
            _check("sample", self.sample, token_B, known.position_B)
            token_B = jnp.clip(token_B, 0, logits_BV.shape[1] - 1)
        return token_B, lambda token_B: token_logprobs(logits_BV, token_B), lambda: taken_BV

    def append(self, context: Context, token_B: jax.Array, active_B: jax.Array) -> "Callers":
        """After a token of each active row. context: before it."""
        known = self._context(context)

        def after(i: int, processor: Processor, state: Any) -> Any:
            if processor.update is None:
                return state
            new = processor.update(state, token_B, _for_function(i, known))
            _check("update", processor.update, new, state)

            def put(old: jax.Array, new: jax.Array) -> jax.Array:
                return jnp.where(active_B.reshape(-1, *[1] * (old.ndim - 1)), new, old)

            return jax.tree.map(put, state, new)

        states = tuple(map(after, range(len(self.states)), self.processors, self.states))
        return dataclasses.replace(self, states=states)

    def _apply(self, last: bool, logits_BV: jax.Array, known: SamplingContext) -> jax.Array:
        for i, (processor, state) in enumerate(zip(self.processors, self.states, strict=True)):
            if processor.last == last:
                new_BV = processor.apply(state, logits_BV, _for_function(i, known))
                _check("apply", processor.apply, new_BV, logits_BV)
                logits_BV = jnp.nan_to_num(new_BV, nan=-jnp.inf, posinf=1e30, neginf=-jnp.inf)
        return logits_BV

    def _context(self, context: Context) -> SamplingContext:
        c = context
        key_B = jax.vmap(jax.random.fold_in)(self.key_B, c.position_B)
        known = key_B, c.position_B, c.num_generated_B, c.eos_BE, c.seen_BV, c.history_BS
        return SamplingContext(*jax.tree.map(jnp.asarray, known))


def callers_of_call(given: Any, sample: Any, stop: Any, rows: int) -> Callers | None:
    """Those of a call's rows, before `start`: the arguments are in place of the states. None: tokens
    are chosen without them.

    Raises:
        InputError: processors or functions of another type; arguments of another type or number of rows.
    """
    check_function("sample", sample)
    check_function("stop", stop)
    pairs = [] if given is None else given if is_sequence(given) else [given]
    for pair in pairs:
        if not (is_sequence(pair) and len(pair) == 2 and isinstance(pair[0], Processor)):
            what = "a list of (Processor, arguments of the rows)"
            raise InputError(f"processors must be {what}, got an entry {format_value(pair)}")
    states = tuple(_of_rows(arguments, rows) for _, arguments in pairs)
    if not states and sample is None:
        return None
    return Callers(states, None, tuple(processor for processor, _ in pairs), sample)


def start_rows(callers: Callers, prompt_R: np.ndarray, state: Any) -> Any:
    """The `DecodeState` of rows that continue these prompts, with the callers of the prompts."""
    of_rows = jax.tree.map(lambda x: x[prompt_R], callers)
    callers = _START(of_rows, state.context, state.key_B)
    return dataclasses.replace(state, context=dataclasses.replace(state.context, callers=callers))


_START = jax.jit(Callers.start)


def _of_rows(arguments: Any, rows: int) -> Any:
    """The arguments as arrays with rows in front."""
    if isinstance(arguments, list) and all(isinstance(x, int | float | np.number) for x in arguments):
        what = "processors: arguments of the rows must be an array, as np.array makes of a list"
        raise InputError(f"{what}, got {format_value(arguments)}")
    try:
        # A number's own type would be weak: another program.
        arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), arguments)
    except (TypeError, ValueError, OverflowError) as error:
        what = "processors: arguments must be a pytree of numbers or arrays"
        raise InputError(f"{what}, got {format_value(arguments)}") from error
    for x in jax.tree.leaves(arrays):
        if x.ndim and len(x) != rows:
            raise InputError(f"processors: arguments of shape {x.shape}, for {rows} rows")
    return jax.tree.map(lambda x: x if x.ndim else jnp.broadcast_to(x, (rows,)), arrays)


def end_rows(stop: Callable, state: Any) -> Any:
    """The `DecodeState` in which rows have also ended where a caller's function of it says so."""
    ends_B = stop(state)
    finished_B = jnp.asarray(state.finished_B)
    _check("stop", stop, ends_B, finished_B)
    return dataclasses.replace(state, finished_B=finished_B | ends_B)


def _for_function(i: int, known: SamplingContext) -> SamplingContext:
    """What one of the functions knows: its keys are its own."""
    return known._replace(key_B=jax.vmap(jax.random.fold_in, (0, None))(known.key_B, i))


def _check(what: str, function: Callable, got: Any, like: Any) -> None:
    """Raises InputError where a caller's function has not returned arrays like these."""

    def shapes(tree: Any) -> str:
        leaves = [f"{jnp.result_type(x)}{list(np.shape(x))}" for x in jax.tree.leaves(tree)]
        return ", ".join(leaves) or "no array"

    called = f"{what} {function_name(function)}"
    try:
        found = shapes(got)
    except (TypeError, ValueError) as error:
        raise InputError(f"{called} must return arrays, got {format_value(got)}") from error
    wanted = shapes(like)
    if found == wanted:  # in other trees?
        found += f" in {jax.tree.structure(got)}"
        wanted += f" in {jax.tree.structure(like)}"
    if found != wanted:
        raise InputError(f"{called} returned {found}, expected {wanted}")
