"""Logits processors, each logits_BV -> logits_BV with one setting per row, as transformers defines them.

Thresholds (the k-th largest logit, the smallest logit of the nucleus) are found by searching the bits of the
float, not by sorting. This is exact, costs a fraction of sorting 152k numbers and compiles quickly: 32 passes
over the row with one sum each, on NVIDIA GPUs 8 passes with 15 sums each. Rows of few candidates need no
search: the sum of the larger ones is computed for each.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..ops.operation import run

FEW = 65  # logits that are compared with each other: the candidates


def repetition_penalty(logits_BV: jax.Array, penalty_B: jax.Array, seen_BV: jax.Array) -> jax.Array:
    """Divides positive logits of tokens in the row by the penalty, multiplies negative ones (CTRL)."""
    penalty = penalty_B[:, None]
    return jnp.where(seen_BV, jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty), logits_BV)


def top_k(logits_BV: jax.Array, k_B: jax.Array) -> jax.Array:
    """Keeps the k largest logits of each row and their ties, all at k = 0. Others become -inf."""
    return _keep(logits_BV, logits_BV, jnp.ones_like(logits_BV), _count(k_B))


def top_p(logits_BV: jax.Array, p_B: jax.Array) -> jax.Array:
    """Keeps the fewest largest logits whose probabilities sum to at least p (Holtzman et al. 2020). Others
    become -inf.
    """
    return _keep(logits_BV, logits_BV, jax.nn.softmax(logits_BV, -1), _mass(p_B))


def top_k_top_p(logits_BV: jax.Array, k_B: jax.Array, p_B: jax.Array) -> jax.Array:
    """Returns top_p(top_k(logits)). If they search, they are one loop over both, since compiling takes
    long.
    """
    if logits_BV.shape[1] <= FEW:
        return top_p(top_k(logits_BV, k_B), p_B)

    def stage(i, logits_BV):
        least_B = jnp.where(i == 0, _count(k_B), _mass(p_B))

        def search() -> jax.Array:
            return _keep(logits_BV, logits_BV, jnp.where(i == 0, 1.0, jax.nn.softmax(logits_BV, -1)), least_B)

        return lax.cond(jnp.all(jnp.isinf(least_B)), lambda: logits_BV, search)  # no row uses it

    return lax.fori_loop(0, 2, stage, logits_BV)


def min_p(logits_BV: jax.Array, p_B: jax.Array) -> jax.Array:
    """Keeps tokens at least p times as likely as the most likely one (Nguyen et al. 2024). 0 keeps all."""
    least_B1 = jnp.max(logits_BV, -1, keepdims=True) + jnp.log(p_B)[:, None]
    return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)  # NaN stays, as in rows at 0


def typical_p(logits_BV: jax.Array, p_B: jax.Array, min_tokens_to_keep: int = 1) -> jax.Array:
    """Keeps the tokens whose information content is nearest to the entropy, until their probabilities sum to
    p (Meister et al. 2023). It keeps at least `min_tokens_to_keep`. p = 1 keeps all.
    """
    logprob_BV = jax.nn.log_softmax(logits_BV, -1)
    probability_BV = jnp.exp(logprob_BV)
    entropy_B1 = -jnp.sum(jnp.where(probability_BV > 0, probability_BV * logprob_BV, 0), -1, keepdims=True)
    key_BV = -jnp.abs(-logprob_BV - entropy_B1)
    kept_BV = _keep(logits_BV, key_BV, probability_BV, _mass(p_B))
    if min_tokens_to_keep == 1:
        return kept_BV
    most_typical_BV = _keep(logits_BV, key_BV, jnp.ones_like(key_BV), jnp.full_like(p_B, min_tokens_to_keep))
    return jnp.maximum(kept_BV, most_typical_BV)


def _count(k_B: jax.Array) -> jax.Array:
    """Returns top-k as the number of tokens that are kept: 0 (off) keeps all."""
    return jnp.where(k_B > 0, k_B, jnp.inf)


def _mass(p_B: jax.Array) -> jax.Array:
    return jnp.where(p_B < 1, p_B, jnp.inf)


def _keep(logits_BV: jax.Array, key_BV: jax.Array, weight_BV: jax.Array, least_B: jax.Array) -> jax.Array:
    """Keeps the fewest logits with the largest keys whose weights sum to at least `least`, or all logits if
    no sum reaches it. Others become -inf. Logits whose keys are equal are kept or removed together.
    """
    least_B = jnp.maximum(least_B, jnp.finfo(jnp.float32).tiny)  # the largest key always stays
    if key_BV.shape[1] <= FEW:
        larger_BVV = key_BV[:, :, None] > key_BV[:, None, :]
        before_BV = jnp.sum(jnp.where(larger_BVV, weight_BV[:, :, None], 0), 1)
        return jnp.where(before_BV < least_B[:, None], logits_BV, -jnp.inf)
    bits_BV = lax.bitcast_convert_type(jnp.where(key_BV == 0, 0.0, key_BV), jnp.int32)  # -0.0 ties with 0.0
    # Negative floats have the opposite order as integers.
    order_BV = jnp.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV)
    operands = dict(order_BV=order_BV, weight_BV=weight_BV, least_B=least_B)
    threshold_B = run("threshold", _threshold_by_halves, **operands)
    return jnp.where(order_BV >= threshold_B[:, None], logits_BV, -jnp.inf)


def _threshold_by_halves(order_BV: jax.Array, weight_BV: jax.Array, least_B: jax.Array) -> jax.Array:
    """Returns, int32 [B], the largest threshold for which the weights at or above it sum to at least `least`.
    If there is none, it is at most the smallest number of the row. Each pass computes one sum and one bit.
    """

    def halve(_, bounds):
        low, high = bounds  # low <= threshold <= high
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        enough = jnp.sum(jnp.where(order_BV >= middle[:, None], weight_BV, 0), -1) >= least_B
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    return lax.fori_loop(0, 32, halve, (jnp.min(order_BV, -1), jnp.max(order_BV, -1)))[0]
