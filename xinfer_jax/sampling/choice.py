"""From logits to a token: `process`, `warp`, `draw`, and `choose`, which is the three; keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32

from ..errors import InputError, shown
from ..model.greedy import argmax
from ..sharding import mesh_of, top_k
from . import processors
from .context import Context
from .settings import SamplingConfig, is_full

_DRAW_TOKEN = 0  # purpose of a draw, the last fold of its key; later strategies take the next numbers
DRAW_BEAMS = 1
_FEW = 65  # tokens that a draw looks at where top-k keeps fewer
_LEAST_TEMPERATURE = 1e-30  # what logits are divided by: below, they would leave float32


def choose(
    logits_BV: jax.Array,
    key_B: jax.Array,
    sampling_B: SamplingConfig,
    context: Context,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next token of each row, int32 [B], its log-probability before any processor, float32 [B], and the
    logits [B, V] that it was taken from. A batch of plain greedy rows takes the argmax and nothing else.

    Args:
        logits_BV: float32.
        key_B: one key per row.
        sampling_B: from `per_row`.
        context: what the processors look at. A draw depends on its `position_B` and the row's key alone.
        impl: of the argmax.
    """

    def processed() -> tuple[jax.Array, jax.Array]:
        kept_BV = process(logits_BV, sampling_B, context)

        def sampled() -> tuple[jax.Array, jax.Array]:
            return _sampled(kept_BV, key_B, sampling_B, context.position_B)

        return lax.cond(is_greedy(sampling_B), lambda: (argmax(kept_BV, impl), kept_BV), sampled)

    likeliest = takes_likeliest(sampling_B)
    token_B, taken_BV = lax.cond(likeliest, lambda: (argmax(logits_BV, impl), logits_BV), processed)
    logprob_B = logits_BV[jnp.arange(len(token_B)), token_B] - jax.nn.logsumexp(logits_BV, -1)
    return token_B, logprob_B, taken_BV


def _sampled(kept_BV, key_B, sampling_B, position_B):
    """A token of each row, and the logits that it was drawn from: of the A largest alone where top-k leaves
    no other, else of all. Which of the two hangs on the row alone, or its bits would hang on its company.
    Over a mesh always of all: what is put back among the others would gather them.
    """
    if mesh_of(kept_BV) is not None:
        return _of_all(kept_BV, key_B, sampling_B, position_B)
    few_BA, index_BA = top_k(kept_BV, min(_FEW, kept_BV.shape[1]))
    # By max and min, not as the first and the last: given those XLA takes the search for a sort of the
    # vocabulary.
    largest_B1 = jnp.max(few_BA, -1, keepdims=True)
    greedy_B = sampling_B.temperature <= 0
    scaled_BA = _scaled(few_BA, sampling_B, largest_B1)
    k_B = jnp.where(greedy_B, 1, sampling_B.top_k)
    last_B = jnp.min(scaled_BA, -1)
    at_B1 = jnp.clip(k_B - 1, 0, few_BA.shape[1] - 1)[:, None]
    above_B = jnp.take_along_axis(scaled_BA, at_B1, 1)[:, 0] > last_B  # no tie of the last that counts
    few_B = (k_B > 0) & (k_B <= few_BA.shape[1]) & (above_B | (last_B == -jnp.inf))
    few_B &= jnp.isfinite(largest_B1[:, 0])
    warped_BA = warp(few_BA, sampling_B, largest_B1)
    token_B = draw(warped_BA, key_B, sampling_B, position_B, index_BA, kept_BV.shape[1])

    def of_few() -> tuple[jax.Array, jax.Array]:
        row_B1 = jnp.arange(len(token_B))[:, None]
        warped_BV = jnp.full_like(kept_BV, -jnp.inf).at[row_B1, index_BA].set(warped_BA)
        return token_B, jnp.where(greedy_B[:, None], kept_BV, warped_BV)

    def of_all() -> tuple[jax.Array, jax.Array]:
        drawn_B, warped_BV = _of_all(kept_BV, key_B, sampling_B, position_B)
        token_B, few_BV = of_few()
        return jnp.where(few_B, token_B, drawn_B), jnp.where(few_B[:, None], few_BV, warped_BV)

    return lax.cond(jnp.all(few_B), of_few, of_all)


def _of_all(kept_BV, key_B, sampling_B, position_B):
    # Logits relative to the largest: divided by the smallest temperatures they must not overflow.
    warped_BV = warp(kept_BV, sampling_B, jnp.max(kept_BV, -1, keepdims=True))
    return draw(warped_BV, key_B, sampling_B, position_B, None, kept_BV.shape[1]), warped_BV


def is_greedy(sampling_B: SamplingConfig) -> jax.Array:
    """Whether no row draws."""
    return jnp.all(sampling_B.temperature <= 0)


def takes_likeliest(sampling_B: SamplingConfig) -> jax.Array:
    """Whether every row just takes its likeliest token."""
    if is_full(sampling_B):
        return jnp.bool_(False)
    return is_greedy(sampling_B) & jnp.all(sampling_B.repetition_penalty == 1)


def process(logits_BV: jax.Array, sampling_B: SamplingConfig, context: Context) -> jax.Array:
    """The processors that hold for greedy rows too: biases, penalties, forbidden tokens."""
    s = sampling_B
    c = context
    if is_full(s):
        logits_BV = logits_BV + s.logit_bias
    logits_BV = processors.repetition_penalty(logits_BV, s.repetition_penalty, c.seen_BV)
    if not is_full(s):
        return logits_BV

    def penalties(x_BV: jax.Array) -> jax.Array:
        return processors.presence_frequency(x_BV, s.presence_penalty, s.frequency_penalty, c.count_BV)

    def ngrams(x_BV: jax.Array) -> jax.Array:
        return processors.no_repeat_ngram(x_BV, s.no_repeat_ngram_size, c.history_BS, c.position_B)

    def words(x_BV: jax.Array) -> jax.Array:
        return processors.bad_words(x_BV, s.bad_words_ids, c.history_BS, c.position_B, c.eos_BE)

    def least(x_BV: jax.Array) -> jax.Array:
        return processors.min_new_tokens(x_BV, s.min_new_tokens, c.chosen_B, c.eos_BE)

    logits_BV = _where_asked((s.presence_penalty != 0) | (s.frequency_penalty != 0), penalties, logits_BV)
    if c.history_BS is not None:
        logits_BV = _where_asked(s.no_repeat_ngram_size > 0, ngrams, logits_BV)
    logits_BV = _where_asked(s.bad_words_ids >= 0, words, logits_BV)
    logits_BV = _where_asked(c.chosen_B < s.min_new_tokens, least, logits_BV)
    forbids = c.allowed_bits != np.uint32(2**32 - 1)
    return _where_asked(forbids, lambda x_BV: processors.allowed(x_BV, c.allowed_bits), logits_BV)


def _where_asked(asked: jax.Array, processor: Callable, logits_BV: jax.Array) -> jax.Array:
    """Processed where any row asks for it."""
    return lax.cond(jnp.any(asked), processor, lambda x_BV: x_BV, logits_BV)


def warp(
    logits_BV: jax.Array, sampling_B: SamplingConfig, zero_B1: jax.Array | float, fewest: int = 1
) -> jax.Array:
    """Logits less a zero of each row, divided by the temperature; then top-k, top-p, min-p and typical-p,
    which leave `fewest` tokens of each row at least: the rest becomes -inf. Rows at temperature 0 stay as
    they are.
    """
    s = sampling_B
    scaled_BV = _scaled(logits_BV, sampling_B, zero_B1)
    k_B = jnp.where(s.top_k > 0, jnp.maximum(s.top_k, fewest), 0)
    kept_BV = processors.top_k_top_p(scaled_BV, k_B, s.top_p)
    if is_full(s):
        kept_BV = _where_asked(s.min_p > 0, lambda x_BV: processors.min_p(x_BV, s.min_p), kept_BV)
    if fewest > 1:  # the three above keep what is likeliest, and one token of it in any case
        enough_BV = processors.top_k(scaled_BV, jnp.full_like(k_B, fewest)) > -jnp.inf
        kept_BV = jnp.where(enough_BV, scaled_BV, kept_BV)
    if is_full(s):
        typical = lambda x_BV: processors.typical_p(x_BV, s.typical_p, fewest)  # noqa: E731
        kept_BV = _where_asked(s.typical_p < 1, typical, kept_BV)
    return jnp.where((s.temperature <= 0)[:, None], logits_BV, kept_BV)


def _scaled(logits_BV: jax.Array, sampling_B: SamplingConfig, zero_B1: jax.Array | float) -> jax.Array:
    """Logits less a zero, divided by the temperature, or by nothing at 0."""
    temperature_B1 = sampling_B.temperature[:, None]
    divisor_B1 = jnp.where(temperature_B1 <= 0, 1.0, jnp.maximum(temperature_B1, _LEAST_TEMPERATURE))
    return (logits_BV - zero_B1) / divisor_B1


def draw(
    warped_BA: jax.Array, key_B: jax.Array, sampling_B: SamplingConfig, position_B: jax.Array,
    index_BA: jax.Array | None, size: int,
) -> jax.Array:  # fmt: skip
    """Draws from softmax(warped): the largest logit + Gumbel noise; rows at temperature 0 take the argmax.

    Args:
        warped_BA: float32, of some tokens, which hold the others' probability; or of all.
        key_B: one key per row.
        sampling_B: from `per_row`.
        position_B: int32, that of the token drawn.
        index_BA: int32, which tokens they are; None: all, in order.
        size: of the vocabulary.
    """
    noise_BA = jax.vmap(
        lambda key, position, index: gumbel(draw_key(key, position, _DRAW_TOKEN), size, index)
    )(key_B, position_B, index_BA)
    drawn_BA = jnp.where((sampling_B.temperature <= 0)[:, None], warped_BA, warped_BA + noise_BA)
    if index_BA is None:
        return argmax(drawn_BA, "xla")
    # As `argmax` does, the lowest of equal ones.
    return jnp.min(jnp.where(drawn_BA == jnp.max(drawn_BA, -1, keepdims=True), index_BA, size), -1)


def check_key(key: jax.Array, batch: int) -> jax.Array:
    """One key, or one per row. Old-style uint32 keys are taken too.

    Raises:
        InputError: no key, a number of keys that is not the batch, or keys of another kind than threefry.
    """
    if not isinstance(key, np.ndarray | jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or (key.dtype == np.uint32 and key.ndim in (1, 2))
    ):
        raise InputError(f"key must come from jax.random.key(seed), got {shown(key)}")
    if key.dtype == np.uint32 and key.shape[-1] == 2:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
    if str(key.dtype) != "key<fry>":  # rbg draws other numbers in a batch than alone
        raise InputError(
            f"keys of {key.dtype}{list(key.shape)} are not served: make them by"
            " jax.random.key(seed, impl='threefry2x32')"
        )
    if key.shape not in ((), (batch,)):
        raise InputError(f"keys of shape {key.shape} for {batch} rows: give one key, or one per row")
    return key


def seeded(seed: int) -> jax.Array:
    """`jax.random.key(seed)`, of 64 bits whatever jax's setting, without a program to compile."""
    words = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """One key per row: `fold_in(key, row)` of one key, or the keys themselves where there is one per row.

    Raises:
        InputError: as `check_key`.
    """
    key = check_key(key, batch)
    return key if key.ndim else _FOLD(key, np.arange(batch))


def answer_keys(key: jax.Array, prompt_R: np.ndarray, answer_R: np.ndarray | None) -> jax.Array:
    """`row_keys` for rows that continue prompts, in any number: another number of prompts compiles nothing.

    Args:
        key: from `check_key`: one, or one per prompt.
        prompt_R: int32, which prompt each row continues.
        answer_R: int32, which of its prompt's answers it is: folded into the key once more; None: the only
            one.
    """
    if key.ndim:  # picked on the host
        data_R = np.asarray(jax.random.key_data(key))[prompt_R]
        key_R = jax.random.wrap_key_data(data_R, impl="threefry2x32")
    else:
        key_R = _FOLD(key, prompt_R)
    return key_R if answer_R is None else _FOLD_EACH(key_R, answer_R)


_FOLD = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))
_FOLD_EACH = jax.jit(jax.vmap(jax.random.fold_in))


def draw_key(row_key: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """The key of one draw: fold_in(fold_in(row_key, position), purpose)."""
    return jax.random.fold_in(jax.random.fold_in(row_key, position), purpose)


def gumbel(key: jax.Array, size: int, index_A: jax.Array | None = None) -> jax.Array:
    """Standard Gumbel noise, float32 [size], from 23 random bits a number: written out so that every jax
    version draws the same. index_A: which of the numbers, [A]; None: all.
    """
    bits = jax.random.bits(key, (size,), jnp.uint32) if index_A is None else _bits_at(key, size, index_A)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _bits_at(key: jax.Array, size: int, index_A: jax.Array) -> jax.Array:
    """`jax.random.bits(key, (size,))[index_A]`, of which the others are not made. Threefry makes two words of
    two: by jax's setting of 0 and the index, or of indices half the size apart, filled up with 0.
    """
    index_A = index_A.astype(jnp.uint32)
    half = -(-size // 2)
    folded = jax.threefry_partitionable.value
    first_A = jnp.zeros_like(index_A) if folded else index_A % half
    second_A = index_A if folded else jnp.where(first_A + half < size, first_A + half, 0)
    words = threefry_2x32(tuple(jax.random.key_data(key)), jnp.concatenate([first_A, second_A]))
    first_A, second_A = jnp.split(words, 2)
    return first_A ^ second_A if folded else jnp.where(index_A < half, first_A, second_A)
