"""From logits to a token: processors `logits_BV -> logits_BV` in the order of transformers, and `sample`, from explicit keys.

Thresholds (the k-th largest logit, the edge of the nucleus) are found by bisection over the bits of the float instead of
by sorting: exact, 32 passes over the row, a fraction of the cost of sorting 152k numbers, and quick to compile.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .errors import InputError
from .greedy import argmax

_DRAW_TOKEN = 0  # purpose of a draw, the last fold of its key; later strategies take the next numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How to choose a token; numbers, or arrays [B] with one setting per row."""

    temperature: Any = 0.0  # 0: the most likely token
    top_k: Any = 0  # only the k most likely tokens; 0: all
    top_p: Any = 1.0  # only the most likely tokens that together reach this probability; 1: all
    repetition_penalty: Any = 1.0  # above 1: tokens already present become less likely (CTRL, Keskar et al. 2019); 1: off

    @classmethod
    def from_hf(cls, generation_config: Mapping[str, Any]) -> "SamplingConfig":
        """The defaults that a checkpoint's generation_config.json asks for; `do_sample` absent or false means temperature 0.

        Where it samples and is silent, transformers' own defaults hold: temperature 1, top_k 50.

        Raises:
            InputError: it asks for something that would change the result and is not supported.
        """
        for name, neutral in _UNSUPPORTED_DEFAULTS.items():
            value = generation_config.get(name)
            if value and value != neutral:
                raise InputError(
                    f"generation_config.json asks for {name}={value!r}, which is not supported: ignore that file or remove the setting"
                )
        sampled = bool(generation_config.get("do_sample"))
        given = {f.name: generation_config.get(f.name) for f in dataclasses.fields(cls)}
        config = cls(**({"temperature": 1.0, "top_k": 50} if sampled else {}) | {k: v for k, v in given.items() if v is not None})
        return config if sampled else dataclasses.replace(config, temperature=0.0)

    def validate(self) -> "SamplingConfig":
        """Returns itself.

        Raises:
            InputError: a setting outside its range.
        """
        _check(self.temperature, lambda x: (x >= 0) & np.isfinite(x), "temperature", "0 (greedy) or above")
        _check(self.top_k, lambda x: (x >= 0) & (x < 2**31) & (x == np.floor(x)), "top_k", "a whole number from 0 (off) to 2^31 - 1")
        _check(self.top_p, lambda x: (x > 0) & (x <= 1), "top_p", "above 0 and at most 1 (off)")
        _check(self.repetition_penalty, lambda x: (x > 0) & np.isfinite(x), "repetition_penalty", "above 0 (1: off)")
        return self


# generation_config.json fields that change the result, with the value at which they do nothing.
_UNSUPPORTED_DEFAULTS = dict(
    num_beams=1, min_p=0.0, typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0, no_repeat_ngram_size=0, encoder_repetition_penalty=1.0,
    bad_words_ids=None, sequence_bias=None, suppress_tokens=None, begin_suppress_tokens=None, forced_bos_token_id=None,
    forced_eos_token_id=None, min_length=0, min_new_tokens=None, penalty_alpha=None, guidance_scale=1.0, stop_strings=None,
    exponential_decay_length_penalty=None, watermarking_config=None, top_h=None,
)  # fmt: skip


def _check(value: Any, good: Any, name: str, remedy: str) -> None:
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if not np.all(good(array)):
        raise InputError(f"{name} must be {remedy}, got {value!r}")


def per_row(sampling: SamplingConfig | Sequence[SamplingConfig], batch: int) -> SamplingConfig:
    """Settings as arrays [B] (float32, top_k int32) from one setting for all rows, arrays, or one setting per row.

    Raises:
        InputError: a sequence whose length is not the batch.
    """
    if not isinstance(sampling, SamplingConfig):
        if len(sampling) != batch:
            raise InputError(f"{len(sampling)} sampling settings for {batch} prompts: give one setting, or one per prompt")
        sampling = jax.tree.map(lambda *rows: np.asarray(rows), *sampling)

    def spread(value: Any, dtype: Any) -> Any:
        xp = jnp if isinstance(value, jax.Array) else np  # numbers stay on the host: no program is compiled for them
        if np.shape(value) not in ((), (1,), (batch,)):
            raise InputError(f"sampling settings of shape {np.shape(value)} for {batch} rows: give one number, or one per row")
        return xp.broadcast_to(xp.asarray(value, dtype), (batch,))

    return SamplingConfig(
        *(spread(getattr(sampling, f.name), np.int32 if f.name == "top_k" else np.float32) for f in dataclasses.fields(sampling))
    )


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """One key per row: `fold_in(key, row)` of one key, or the keys themselves where there is one per row.

    Old-style uint32 keys are taken too.

    Raises:
        InputError: a number of keys that is not the batch.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
    if key.shape != (batch,):
        raise InputError(f"keys of shape {key.shape} for {batch} rows: give one key, or one per row")
    return key


def choose(
    logits_BV: jax.Array,
    row_key_B: jax.Array,
    position_B: jax.Array,
    sampling: SamplingConfig,
    seen_BV: jax.Array,
    impl: str | None = None,
) -> jax.Array:
    """The next token of each row, int32 [B]. A batch without temperature and penalty takes the argmax and nothing else.

    Args:
        logits_BV: float32.
        row_key_B: one key per row.
        position_B: the position that the new token will have in its row: the draw depends on it and the key alone.
        sampling: arrays [B].
        seen_BV: bool, tokens already present in each row.
        impl: of the argmax.
    """

    def processed() -> jax.Array:
        logits = repetition_penalty(logits_BV, sampling.repetition_penalty, seen_BV)
        return lax.cond(
            jnp.all(sampling.temperature <= 0), lambda: argmax(logits, impl), lambda: sample(row_key_B, position_B, logits, sampling)
        )

    return lax.cond(plain(sampling), lambda: argmax(logits_BV, impl), processed)


def plain(sampling: SamplingConfig) -> jax.Array:
    """Whether every row just takes its likeliest token."""
    return jnp.all((sampling.temperature <= 0) & (sampling.repetition_penalty == 1))


def sample(row_key_B: jax.Array, position_B: jax.Array, logits_BV: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """Draws from softmax(top_p(top_k(logits / temperature))) by the largest logit + Gumbel noise; rows at temperature 0 take the argmax."""
    greedy_B = sampling.temperature <= 0
    above = jnp.max(logits_BV, -1, keepdims=True)  # taken off first: the smallest temperatures must not overflow
    scaled = (logits_BV - above) / jnp.where(greedy_B, 1.0, jnp.maximum(sampling.temperature, 1e-37))[:, None]
    kept = top_k_top_p(scaled, sampling.top_k, sampling.top_p)
    noise = jax.vmap(lambda key, position: gumbel(draw_key(key, position, _DRAW_TOKEN), logits_BV.shape[1]))(row_key_B, position_B)
    return jnp.where(greedy_B, argmax(logits_BV, "xla"), argmax(kept + noise, "xla"))


def draw_key(row_key: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """The key of one draw: fold_in(fold_in(row_key, position), purpose)."""
    return jax.random.fold_in(jax.random.fold_in(row_key, position), purpose)


def gumbel(key: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise, float32 [size], from 23 random bits a number: written out so that every jax version draws the same."""
    bits = jax.random.bits(key, (size,), jnp.uint32)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


# --- processors, each logits_BV -> logits_BV ------------------------------------------------------------------------------


def repetition_penalty(logits_BV: jax.Array, penalty_B: jax.Array, seen_BV: jax.Array) -> jax.Array:
    """Divides positive logits of tokens already present by the penalty and multiplies negative ones (Keskar et al. 2019)."""
    penalty = penalty_B[:, None]
    return jnp.where(seen_BV, jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty), logits_BV)


def top_k(logits_BV: jax.Array, k_B: jax.Array) -> jax.Array:
    """Keeps the k largest logits of each row (and their ties), the rest becomes -inf; k = 0 keeps all."""
    return _keep(logits_BV, jnp.ones_like(logits_BV), _count(k_B))


def top_p(logits_BV: jax.Array, p_B: jax.Array) -> jax.Array:
    """Keeps the smallest set of largest logits whose probabilities sum to at least p (Holtzman et al. 2020), the rest becomes -inf."""
    return _keep(logits_BV, jax.nn.softmax(logits_BV, -1), _mass(p_B))


def top_k_top_p(logits_BV: jax.Array, k_B: jax.Array, p_B: jax.Array) -> jax.Array:
    """top_p(top_k(logits)), as one loop over the two: the search is the same, and compiling it takes long."""

    def stage(i, logits_BV):
        weight_BV = jnp.where(i == 0, 1.0, jax.nn.softmax(logits_BV, -1))
        return _keep(logits_BV, weight_BV, jnp.where(i == 0, _count(k_B), _mass(p_B)))

    return lax.fori_loop(0, 2, stage, logits_BV)


def _count(k_B: jax.Array) -> jax.Array:
    return jnp.where(k_B > 0, k_B, jnp.inf)


def _mass(p_B: jax.Array) -> jax.Array:
    return jnp.where(p_B < 1, p_B, jnp.inf)


def _keep(logits_BV: jax.Array, weight_BV: jax.Array, least_B: jax.Array) -> jax.Array:
    """Keeps the fewest largest logits whose weights sum to at least `least` (all, where that cannot be), the rest becomes -inf.

    The threshold is found bit by bit, on integers that are ordered as the floats are.
    """
    bits = lax.bitcast_convert_type(jnp.where(logits_BV == 0, 0.0, logits_BV), jnp.int32)  # -0.0 ties with 0.0
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative floats are ordered backwards as integers

    def halve(_, bounds):
        low, high = bounds  # the threshold lies in low … high
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        enough = jnp.sum(jnp.where(order >= middle[:, None], weight_BV, 0), -1) >= least_B
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low, _ = lax.fori_loop(0, 32, halve, (jnp.min(order, -1), jnp.max(order, -1)))
    return jnp.where(order >= low[:, None], logits_BV, -jnp.inf)
