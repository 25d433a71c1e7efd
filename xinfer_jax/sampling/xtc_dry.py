"""XTC and DRY, llama.cpp's samplers against repetition, as logits processors with one setting per row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .context import Context
from .random_keys import DRAW_XTC, gumbel_noise
from .sampling_config import SettingsOfRows

_MOST_REPEATED = 256  # tokens above the allowed length: these bound a step's work


def xtc(
    warped_BV: jax.Array, logits_BV: jax.Array, settings: SettingsOfRows, key_B: jax.Array,
    position_B: jax.Array,
) -> jax.Array:  # fmt: skip
    """Excludes top choices (llama.cpp): at some positions, by chance, it removes the tokens that reach a
    probability. It keeps the least likely of them and its ties.

    Args:
        warped_BV: float32, logits after temperature and filters, -inf for tokens that these removed.
        logits_BV: float32, the logits before them: the tokens that they kept have their probabilities at
            temperature 1.
        settings: the settings of each row.
        key_B: one key per row.
        position_B: int32, the position of the token that is drawn.
    """
    kept_BV = warped_BV > -jnp.inf
    probability_BV = jax.nn.softmax(jnp.where(kept_BV, logits_BV, -jnp.inf), -1)
    reach_BV = kept_BV & (probability_BV >= settings.xtc_threshold[:, None])
    least_B1 = jnp.min(jnp.where(reach_BV, logits_BV, jnp.inf), -1, keepdims=True)
    first_1 = jnp.zeros(1, jnp.int32)
    noise_B1 = jax.vmap(gumbel_noise, (0, 0, None, None))(key_B, position_B, DRAW_XTC, first_1)
    # A uniform number below the probability: both as a logarithm of a logarithm.
    happens_B1 = noise_B1 < -jnp.log(-jnp.log(settings.xtc_probability))[:, None]
    happens_B1 &= settings.xtc_threshold[:, None] <= 0.5  # more have no effect in llama.cpp either
    return jnp.where(happens_B1 & (logits_BV > least_B1), -jnp.inf, warped_BV)


def dry(logits_BV: jax.Array, settings: SettingsOfRows, context: Context) -> jax.Array:
    """Subtracts multiplier * base ** (n - allowed length) from the logit of each token that follows an
    earlier occurrence of the row's last n tokens, for the largest n ("don't repeat yourself", llama.cpp).

    n is at most the allowed length + 256, and counts no sequence breaker and no token before the last
    `dry_penalty_last_n`. Breakers get no penalty.

    Args:
        logits_BV: float32.
        settings: the settings of each row.
        context: the context, with the row's tokens in order.
    """
    s = settings
    history_BS: Any = context.history_BS
    allowed_B1 = s.dry_allowed_length[:, None]
    (B, S) = history_BS.shape
    slot_S = jnp.arange(S)
    length_B1 = context.position_B[:, None]
    last_n_B1 = s.dry_penalty_last_n[:, None]
    first_B1 = jnp.where(last_n_B1 < 0, 0, jnp.maximum(length_B1 - last_n_B1, 0))
    breaks_BS = jnp.take_along_axis(jnp.asarray(s.dry_sequence_breakers), history_BS, 1)
    unbroken_BS = jnp.where(breaks_BS, -1, history_BS)
    follows_BS = (slot_S > first_B1) & (slot_S < length_B1) & (s.dry_multiplier > 0)[:, None] & ~breaks_BS

    def compare(carry):  # whether the token k places before equals the row's k-th last token
        k, same_BS, count_BS = carry
        last_B1 = jnp.take_along_axis(unbroken_BS, jnp.maximum(length_B1 - k, 0), 1)
        same_BS &= (jnp.roll(history_BS, k, 1) == last_B1) & (slot_S - k >= first_B1)
        same_BS &= k - _MOST_REPEATED <= allowed_B1
        return k + 1, same_BS, count_BS + same_BS

    start = 1, follows_BS, jnp.zeros_like(history_BS)
    _, _, count_BS = lax.while_loop(lambda carry: jnp.any(carry[1]), compare, start)
    over_BS = count_BS - allowed_B1
    power_BS = jnp.minimum(s.dry_base[:, None] ** over_BS.astype(jnp.float32), 1e38)  # 0 * inf is NaN
    # With a larger one logits could overflow float32.
    penalty_BS = jnp.minimum(s.dry_multiplier[:, None] * power_BS, 1e30)
    penalty_BS = jnp.where(follows_BS & (over_BS >= 0), penalty_BS, 0)
    return logits_BV - jnp.zeros_like(logits_BV).at[jnp.arange(B)[:, None], history_BS].max(penalty_BS)
