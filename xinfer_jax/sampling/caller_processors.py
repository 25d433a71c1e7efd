"""Callers' functions between logits and tokens: `LogitsProcessor`, and the parts of `Context.callers`."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import is_sequence
from ..config.run_config import RunConfig
from ..errors import InputError, format_value
from ..model.caller_functions import call_function, check_function, check_result, function_name
from .batched_settings import select_rows
from .context import Context
from .random_keys import DRAW_CALLER
from .sampler import all_greedy, choose_tokens, draw_tokens, process_logits, token_logprobs, warp_logits
from .sampling_config import SettingsOfRows


class SamplingContext(NamedTuple):
    """The data that your function gets about B rows when their next token is sampled.

    Attributes:
        key_B: PRNG keys of this position and function. No other draw uses them.
        position_B: int32: the number of tokens of prompt and answer. It is the position of the next token.
        num_generated_B: int32: the number of tokens of the answer.
        eos_BE: int32: ids that end each row. An entry below 0 is no id.
        seen_BV: bool: the tokens in the `seen_BV` of the call, and the tokens of the answer.
        history_BS: int32: the tokens of prompt and answer in order. None: the call did not get them.
    """

    key_B: jax.Array
    position_B: jax.Array
    num_generated_B: jax.Array
    eos_BE: jax.Array
    seen_BV: jax.Array
    history_BS: jax.Array | None


@dataclasses.dataclass(frozen=True)
class LogitsProcessor:
    """A logits processor that you write: pure functions over rows, which are traced in the decode loop.

    Pass it to `GenerateOptions(processors=…)` or to `decode_loop`. For example, this processor subtracts a
    number from the logits of tokens that the call has seen::

        def subtract(amount_B, logits_BV, context):
            return logits_BV - amount_B[:, None] * context.seen_BV

        processor = xj.LogitsProcessor(None, subtract)

    The result of `apply` is used by these rules:

    - Tokens that a setting or a grammar forbids stay forbidden.
    - If a processor leaves no token in a row, the row keeps its logits.
    - +inf counts as a logit of 1e30.
    - NaN is an error: the row's token is then below 0 and its log-probability is NaN. `generate` and engines
      raise `InputError`.

    A program is compiled for each processor, and its functions identify it. So define the functions once: a
    new lambda in each call compiles again.

    Attributes:
        init: a function `(arguments, SamplingContext)` that returns the state of B rows, a pytree with rows
            in front. None: the arguments are the state.
        apply: a function `(state, logits_BV, SamplingContext)` that returns float32 logits_BV.
        update: a function `(state, token_B, SamplingContext)` that returns the state after a token of each
            row. None: the state does not change.
        last: True applies it after the built-in processors, the temperature and the filters. False applies it
            before all of them.
    """

    init: Callable[[Any, SamplingContext], Any] | None
    apply: Callable[[Any, jax.Array, SamplingContext], jax.Array]
    update: Callable[[Any, jax.Array, SamplingContext], Any] | None = None
    last: bool = False

    def __post_init__(self) -> None:
        for name in ("init", "apply", "update"):
            check_function(f"{name} of a LogitsProcessor", getattr(self, name))
        if self.apply is None:
            raise InputError("apply of a LogitsProcessor must be a function with a hash, got None")
        if not isinstance(self.last, bool):
            raise InputError(
                f"last of a LogitsProcessor must be True or False, got {format_value(self.last)}"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Callers:
    """`Context.callers`: P callers' processors with the states of B rows, and a function that samples.
    uses_BP: bool: which processors a row has. None: all rows have all.
    """

    states: tuple[Any, ...]
    key_B: Any
    processors: tuple[LogitsProcessor, ...] = dataclasses.field(metadata=dict(static=True))
    sample: Callable | None = dataclasses.field(default=None, metadata=dict(static=True))
    uses_BP: Any = None

    @property
    def functions(self) -> list[Callable]:
        """All that the caller has given."""
        of_each = ((p.init, p.apply, p.update) for p in self.processors)
        return [f for f in (*itertools.chain(*of_each), self.sample) if f]

    def start(self, context: Context, key_B: jax.Array) -> "Callers":
        """Returns the callers with the states that `init` makes of the arguments. key_B: the keys of the
        rows.
        """
        self = dataclasses.replace(self, key_B=jax.vmap(jax.random.fold_in, (0, None))(key_B, DRAW_CALLER))
        known = self._context(context)
        rows = len(known.position_B)

        def state(i: int, processor: LogitsProcessor, arguments: Any) -> Any:
            if processor.init is None:
                return arguments
            made = call_function("init", processor.init, arguments, self._for_function(i, known))
            for leaf in jax.tree.leaves(made):
                if not np.ndim(leaf) or len(leaf) != rows:
                    what = f"an array of shape {np.shape(leaf)}, expected {rows} rows in front"
                    raise InputError(f"init {function_name(processor.init)} of a processor returned {what}")
            return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), made)

        states = tuple(map(state, range(len(self.states)), self.processors, self.states))
        return dataclasses.replace(self, states=states)

    def select_rows(self, rows_B: Any) -> "Callers":
        """Returns the callers without the processors of other rows, whose work is skipped. It only has an
        effect if rows have different processors.
        """
        if self.uses_BP is None:
            return self
        return dataclasses.replace(self, uses_BP=self.uses_BP & rows_B[:, None])

    def choose(
        self,
        logits_BV: jax.Array,
        key_B: jax.Array,
        settings: SettingsOfRows,
        context: Context,
        run_config: RunConfig,
    ) -> tuple[jax.Array, Callable, Callable]:
        """Returns the same as `choose_tokens`. Rows with processors choose from the whole vocabulary. All
        other rows choose as they do without callers, to the bit. settings: the settings of each row.
        """
        if self.uses_BP is None:
            token_B, taken_BV = self._choose(logits_BV, key_B, settings, context)
            return token_B, lambda token_B: token_logprobs(logits_BV, token_B), lambda: taken_BV
        has_B = jnp.any(self.uses_BP, -1)
        others = dataclasses.replace(context.select_rows(~has_B), callers=None)
        plain = choose_tokens(logits_BV, key_B, select_rows(settings, ~has_B), others, run_config)
        token_B, logprobs, sampled_from = plain

        def merged(i: int, of_others: Callable) -> jax.Array:
            def merge() -> jax.Array:
                own = self._choose(logits_BV, key_B, select_rows(settings, has_B), context)[i]
                return _where_rows(has_B, own, of_others())

            return lax.cond(jnp.any(has_B), merge, of_others)

        return merged(0, lambda: token_B), logprobs, lambda: merged(1, sampled_from)

    def _choose(self, logits_BV: Any, key_B: Any, settings: Any, context: Context) -> tuple[Any, Any]:
        """Returns tokens, and the logits that they were sampled from."""

        def warp(kept_BV: jax.Array) -> jax.Array:
            largest_B1 = jnp.max(kept_BV, -1, keepdims=True)
            return warp_logits(kept_BV, settings, largest_B1, draw=(key_B, context.position_B))

        taken_BV, broken_B = self.process(logits_BV, settings, context, warp)
        if self.sample is None:
            token_B = draw_tokens(taken_BV, key_B, settings, context.position_B, None, logits_BV.shape[1])
        else:
            known = self._for_function(len(self.processors), self._context(context))
            token_B = call_function("sample", self.sample, known.key_B, taken_BV, known)
            check_result("sample", self.sample, token_B, known.position_B)
            token_B = jnp.clip(token_B, 0, logits_BV.shape[1] - 1)
        return jnp.minimum(token_B, broken_B), taken_BV

    def process(
        self, logits_BV: jax.Array, settings: SettingsOfRows, context: Context, warp: Callable
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the logits that tokens are sampled from, and int32 [B]: -1 - i for the first processor i
        that gave a row NaN, otherwise the vocabulary's size. warp: a function that applies temperature and
        filters to processed logits.
        """
        known = self._context(context)
        (B, V) = logits_BV.shape
        allowed = partial(process_logits, sampling_B=settings, context=context)
        processed_BV, first_B = self._apply(False, logits_BV, known, jnp.full(B, V))
        processed_BV = allowed(processed_BV)
        has_some_B1 = jnp.any(processed_BV > -jnp.inf, -1, keepdims=True)
        processed_BV = lax.cond(
            jnp.all(has_some_B1),
            lambda: processed_BV,
            lambda: jnp.where(has_some_B1, processed_BV, allowed(logits_BV)),
        )
        warped_BV = lax.cond(all_greedy(settings), lambda: processed_BV, lambda: warp(processed_BV))
        taken_BV, broken_B = self._apply(True, warped_BV, known, first_B)
        taken_BV = jnp.where(processed_BV > -jnp.inf, taken_BV, -jnp.inf)
        return jnp.where(jnp.any(taken_BV > -jnp.inf, -1, keepdims=True), taken_BV, warped_BV), broken_B

    def nan_reason(self, token: int | None = None) -> str:
        """Says which function returned NaN in place of a token's logits. token: the mark of a processor that
        stands in place of the token, or None if it may have been any of the processors.
        """
        wrong = self.processors if token is None else [self.processors[-1 - token]]
        names = ", ".join(f"apply {function_name(processor.apply)}" for processor in wrong)
        return f"{names} of a processor returned nan in place of logits"

    def append(self, context: Context, token_B: jax.Array, active_B: jax.Array) -> "Callers":
        """Returns the callers after each active row has appended its token. context: the context before the
        token.
        """
        known = self._context(context)

        def after(i: int, processor: LogitsProcessor, state: Any) -> Any:
            if processor.update is None:
                return state
            changes_B = active_B if self.uses_BP is None else active_B & self.uses_BP[:, i]

            def updated() -> Any:
                new = call_function("update", processor.update, state, token_B, self._for_function(i, known))
                check_result("update", processor.update, new, state)

                return jax.tree.map(partial(_where_rows, changes_B), new, state)

            return self._if_any(changes_B, updated, state)

        states = tuple(map(after, range(len(self.states)), self.processors, self.states))
        return dataclasses.replace(self, states=states)

    def _apply(self, last: bool, logits_BV: jax.Array, known: SamplingContext, broken_B: Any) -> tuple:
        """Returns the logits, and as `process` whose are broken."""
        for i, (processor, state) in enumerate(zip(self.processors, self.states, strict=True)):
            if processor.last != last:
                continue

            def applied(i=i, processor=processor, state=state, old_BV=logits_BV, broken_B=broken_B) -> tuple:
                new_BV = call_function("apply", processor.apply, state, old_BV, self._for_function(i, known))
                check_result("apply", processor.apply, new_BV, old_BV)
                has_B1 = True if self.uses_BP is None else self.uses_BP[:, i, None]
                new_BV = jnp.where(has_B1, new_BV, old_BV)
                is_wrong_B = jnp.any(jnp.isnan(new_BV) & (old_BV > -jnp.inf), -1) & (broken_B >= 0)
                new_BV = jnp.nan_to_num(new_BV, nan=-jnp.inf, posinf=1e30, neginf=-jnp.inf)
                return new_BV, jnp.where(is_wrong_B, -1 - i, broken_B)

            has_B = None if self.uses_BP is None else self.uses_BP[:, i]
            logits_BV, broken_B = self._if_any(has_B, applied, (logits_BV, broken_B))
        return logits_BV, broken_B

    def _if_any(self, has_B: Any, changed: Callable, old: Any) -> Any:
        """Returns changed(). If rows have different processors, it does so only if any of them has this
        one.
        """
        return changed() if self.uses_BP is None else lax.cond(jnp.any(has_B), changed, lambda: old)

    def _context(self, context: Context) -> SamplingContext:
        c = context
        key_B = jax.vmap(jax.random.fold_in)(self.key_B, c.position_B)
        known = key_B, c.position_B, c.num_generated_B, c.eos_BE, c.seen_BV, c.history_BS
        return SamplingContext(*jax.tree.map(jnp.asarray, known))

    def _for_function(self, i: int, known: SamplingContext) -> SamplingContext:
        """Returns the context for one of the functions. Each function has its own keys, by its place among
        the functions of the row.
        """
        i_B = jnp.full(len(known.position_B), i)
        if self.uses_BP is not None:
            i_B = jnp.sum(self.uses_BP[:, :i], -1)
        return known._replace(key_B=jax.vmap(jax.random.fold_in)(known.key_B, i_B))


def _where_rows(rows_B: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the new array for these rows, the old one for others."""
    return jnp.where(rows_B.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def callers_of_call(given: Any, sample: Any, stop: Any, rows: int) -> Callers | None:
    """Returns the callers of a call's rows, before `start`: the arguments are in place of the states. None:
    tokens are chosen without them.

    Raises:
        InputError: processors or functions have another type, or arguments have another type or number of
            rows.
    """
    check_function("sample", sample)
    check_function("stop", stop)
    pairs = [] if given is None else given if is_sequence(given) else [given]
    for pair in pairs:
        check_pair(pair)
    states = tuple(_of_rows(arguments, rows) for _, arguments in pairs)
    if not states and sample is None:
        return None
    return Callers(states, None, tuple(processor for processor, _ in pairs), sample)


def check_pair(pair: Any) -> None:
    """Raises InputError if an entry of `processors` is no pair of a processor and arguments."""
    if not (is_sequence(pair) and len(pair) == 2 and isinstance(pair[0], LogitsProcessor)):
        what = "a list of (LogitsProcessor, arguments of the rows)"
        raise InputError(f"processors must be {what}, got an entry {format_value(pair)}")


def guarded(
    program: Callable, callers: Callers | None, stop: Callable | None = None, taps: Any = None
) -> Callable:
    """Returns a program with these functions of a caller: InputError takes the place of JAX's error for a
    traced value that one of them keeps.
    """

    def call(*args: Any) -> Any:
        try:
            return program(*args)
        except jax.errors.UnexpectedTracerError as error:
            of_callers = callers.functions if callers else []
            others = stop, *(tap.edit for tap in (taps or {}).values())
            names = ", ".join(map(function_name, filter(None, (*of_callers, *others))))
            what = "uses a traced value of another call: keep it in a state or an argument"
            raise InputError(f"{names}: a function of yours {what}") from error

    return call


def start_rows(callers: Callers, prompt_R: np.ndarray, state: Any, run: Callable) -> Any:
    """Returns the `DecodeState` of rows that continue these prompts, with the callers of the prompts. run:
    runs a program.
    """
    of_rows = jax.tree.map(lambda x: x[prompt_R], callers)
    callers = run(_START, of_rows, state.context, state.key_B)
    return dataclasses.replace(state, context=dataclasses.replace(state.context, callers=callers))


_START = jax.jit(Callers.start)


def _of_rows(arguments: Any, rows: int) -> Any:
    """Returns the arguments as arrays with rows in front."""
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
    """Returns the `DecodeState` in which rows have also ended if a caller's function of it says so."""
    ends_B = call_function("stop", stop, state)
    finished_B = jnp.asarray(state.finished_B)
    check_result("stop", stop, ends_B, finished_B)
    return dataclasses.replace(state, finished_B=finished_B | ends_B)
