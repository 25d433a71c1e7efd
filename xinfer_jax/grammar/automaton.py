"""Finite automata over tokens: a form of grammar that needs no host between steps."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..annotations import AnyArray
from ..checks import is_sequence, is_traced
from ..errors import GrammarError, InputError, ShortRepr, format_value
from .regex_parser import NotRegularError
from .token_automaton import ENDS, MAX_ENTRIES, NEVER, token_automaton
from .vocabulary import token_bytes

if TYPE_CHECKING:
    from ..tokenization.tokenizer import Tokenizer
    from .grammars import Grammar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Dfa(ShortRepr):
    """A deterministic finite automaton over tokens, as arrays. `compile_dfa` makes it for `decode_loop`.

    Tokens of one class lead from each state to the same next state. So the table has a column per class, and
    not one per token. A row begins in state 0.

    Attributes:
        class_V: int16: the class of each token. 0: the token has no class, and shares column 0 with the ids
            that end the row. 1: the token is never allowed.
        next_SC: int16: the next state for each state and class. An entry below 0: the class is not allowed.
            Column 0: the row may end in this state.
    """

    class_V: AnyArray
    next_SC: AnyArray

    @staticmethod
    def automata_of_rows(
        dfas: "Sequence[Dfa | None]", vocab_size: int, eos_BE: Any, *, equal_sizes: bool = False
    ) -> "Automata":
        """Returns the automata of rows before their first token.

        Args:
            dfas: the automaton of each row, or one for all rows.
            vocab_size: the size V of the vocabulary. Tokens beyond the vocabulary of an automaton are never
                allowed.
            eos_BE: int32: ids that end each row. An entry below 0 is no id.
            equal_sizes: True gives every table the size `MAX_ENTRIES`, so other grammars compile nothing.
                False gives all tables the size of the largest one.
        """
        B = len(eos_BE)
        size = max([1, *(np.size(dfa.next_SC) for dfa in dfas if dfa is not None)])
        size = MAX_ENTRIES if equal_sizes else size
        tables = [_table(dfa, vocab_size, size) for dfa in dfas]
        xp: Any = jnp if any(map(is_traced, jax.tree.leaves((dfas, eos_BE)))) else np
        parts = zip(*tables, strict=True)
        class_BV, next_BN, width_B = (xp.stack([xp.asarray(x) for x in xs]) for xs in parts)
        class_BV, next_BN = (xp.broadcast_to(x, (B, x.shape[1])) for x in (class_BV, next_BN))
        row_B1 = np.arange(B)[:, None]
        ends_BE = xp.where(xp.asarray(eos_BE) < 0, vocab_size, eos_BE)
        padded_BV = xp.concatenate([class_BV, xp.zeros((B, 1), np.int16)], 1)
        if xp is jnp:
            padded_BV = padded_BV.at[row_B1, ends_BE].set(ENDS)
        else:
            padded_BV[row_B1, ends_BE] = ENDS
        width_B = xp.broadcast_to(width_B, (B,))
        return Automata(padded_BV[:, :vocab_size], next_BN, width_B, np.zeros(B, np.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Automata:
    """The automata of rows, and their states. It is `Context.automata`, whose interface the samplers use."""

    class_BV: Any  # int16
    next_BN: Any  # int16: the table of each row, state by state, then anything
    width_B: Any  # int32: classes of each row's table; 0: the row has no automaton
    state_B: Any  # int32; below 0: the row got a token that is not allowed

    @property
    def used_B(self) -> jax.Array:
        """bool: the row has an automaton."""
        return jnp.asarray(self.width_B) > 0

    def mask(self, logits_BV: jax.Array) -> jax.Array:
        """Returns the logits, -inf for tokens that the automaton of a row does not allow. In a wrong state a
        row may only end.
        """
        next_BV = self._next(jnp.asarray(self.class_BV))
        wrong_B1 = jnp.asarray(self.state_B)[:, None] < 0
        allowed_BV = jnp.where(wrong_B1, jnp.asarray(self.class_BV) == ENDS, next_BV >= 0)
        return jnp.where(allowed_BV | ~self.used_B[:, None], logits_BV, -jnp.inf)

    def append(self, token_B: jax.Array, active_B: jax.Array) -> "Automata":
        """Returns the automata after each active row has appended its token."""
        class_B1 = jnp.asarray(self.class_BV)[jnp.arange(len(token_B)), token_B][:, None]
        next_B = jnp.where(jnp.asarray(self.state_B) < 0, -1, self._next(class_B1)[:, 0])
        return dataclasses.replace(self, state_B=jnp.where(active_B & self.used_B, next_B, self.state_B))

    def select_rows(self, rows_B: Any) -> "Automata":
        """Returns the automata of these rows. rows_B: bool."""
        return dataclasses.replace(self, width_B=jnp.where(rows_B, self.width_B, 0))

    def _next(self, class_BX: jax.Array) -> jax.Array:
        """Returns int32 [B, X]: the next state after a token of each class."""
        start_B1 = (jnp.maximum(self.state_B, 0) * self.width_B)[:, None]
        return jnp.take_along_axis(jnp.asarray(self.next_BN), start_B1 + class_BX, 1).astype(jnp.int32)


def automata_of_call(grammar: Any, rows: int, vocab_size: int, eos_ids: Any) -> "Automata | None":
    """Returns the automata of the rows of `decode_loop`. None: no row has one. InputError: grammar is not
    `Dfa`s.
    """
    dfas = grammar if is_sequence(grammar) else [grammar]
    given = [dfa for dfa in dfas if dfa is not None]
    if not all(isinstance(dfa, Dfa) for dfa in given):
        raise InputError(f"grammar must be from dfa, or one per row, got {format_value(grammar)}")
    if is_sequence(grammar) and len(dfas) != rows:
        raise InputError(f"{len(dfas)} grammars for {rows} rows: give one, or one per row")
    if not given:
        return None
    if not eos_ids.shape[0]:
        raise InputError("grammar needs an EOS id, which ends the row: eos_ids is empty")
    eos_BE = (jnp if is_traced(eos_ids) else np).broadcast_to(eos_ids, (rows, len(eos_ids)))
    return Dfa.automata_of_rows(dfas, vocab_size, eos_BE)


def compile_dfa(pattern: "str | Grammar", tokenizer: "Tokenizer") -> Dfa:
    """Compiles a regular expression to arrays, which a loop on the device follows without the host.

    Pass the result to `decode_loop(…, grammar=…)`. It works in your own `jit`, under `vmap`, and traced. For
    `generate` and engines you do not need it: pass the grammar from `regex` or `choice`. They use this form
    themselves if it fits, and sample the same tokens.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> xj.grammar.compile_dfa("yes|no", model.tokenizer).class_V.shape
        (1920,)

    Args:
        pattern: a regular expression, or a grammar from `regex` or `choice`. It matches the answer as a
            whole.
        tokenizer: the tokenizer of the model.

    Returns:
        A `Dfa` with at most 512 states, 65,536 entries of the table, and 16.8 million pairs of a state and a
        token that may occur.

    Raises:
        GrammarError: the expression has syntax other than literals, classes, groups, `|` and quantifiers, or
            its automaton is too large. Pass `GenerateOptions(grammar=regex(…))` then, which llguidance
            serves.
    """
    source = getattr(pattern, "source", pattern)
    if not isinstance(source, str) or getattr(pattern, "kind", "regex") != "regex":
        raise InputError(
            f"compile_dfa takes a regular expression, or regex or choice, got {format_value(pattern)}"
        )
    vocab_size = tokenizer.backend.get_vocab_size()
    try:
        return Dfa(*token_automaton(source, *token_bytes(tokenizer, vocab_size)))
    except NotRegularError as error:
        remedy = "give GenerateOptions(grammar=regex(…)) to generate"
        raise GrammarError(f"compile_dfa does not serve {format_value(source)}: {error}; {remedy}") from error


def _table(dfa: Dfa | None, vocab_size: int, size: int) -> tuple[Any, Any, Any]:
    """Returns the classes of tokens [V], the table [N] and its width."""
    if dfa is None:
        return np.full(vocab_size, NEVER, np.int16), np.zeros(size, np.int16), np.int32(0)
    xp: Any = jnp if any(map(is_traced, jax.tree.leaves(dfa))) else np
    class_V = xp.asarray(dfa.class_V)[:vocab_size]
    class_V = xp.pad(class_V, (0, vocab_size - len(class_V)), constant_values=NEVER)
    next_N = xp.reshape(dfa.next_SC, -1)
    return class_V, xp.pad(next_N, (0, size - len(next_N))), np.int32(dfa.next_SC.shape[1])
