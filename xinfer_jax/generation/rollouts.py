"""Rollouts as training takes them: a prompt and its answer in one row; and answers that go on."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..cache.kv_cache import KVCache, reorder
from ..checks import check_array, check_integer
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..weights.params import AnyArray, Params
from .functional import Decoded, prefill


class PackedRollout(NamedTuple):
    """Rows of a prompt and its answer, padded on the right."""

    tokens_BT: jax.Array  # int32
    num_tokens_B: jax.Array  # int32: of prompt and answer
    mask_BT: jax.Array  # bool [B, T-1]: entry t says whether token t+1 was sampled, as entries of `score`
    logprobs_BT: jax.Array  # float32 [B, T-1]: of sampled tokens, as they were sampled; else 0


def pack_rollout(prompt_BT: AnyArray, num_tokens_B: AnyArray, out: Decoded) -> PackedRollout:
    """Returns each prompt followed by its answer, with the log-probabilities at the entries of `score`.

    Works under `jit`. Log-probabilities are those after the logits processors where `decode_loop` recorded
    them (`logprobs=`): of the distribution that was sampled from; else those before.

    Args:
        prompt_BT: int32, padded on the right.
        num_tokens_B: int32: how many of each row are real.
        out: what `decode_loop` returned for these rows.

    Raises:
        InputError: arrays of another shape or type.
    """
    check_array("prompt_BT", prompt_BT, jnp.integer, len(out.tokens_BT), "tokens")
    check_array("num_tokens_B", num_tokens_B, jnp.integer, len(out.tokens_BT))
    (B, T) = prompt_BT.shape
    prompt_B = jnp.asarray(num_tokens_B)
    size = T + out.tokens_BT.shape[1]
    index_BT = jnp.arange(size) - prompt_B[:, None]  # of the answer's tokens
    is_answer_BT = (index_BT >= 0) & (index_BT < out.length_B[:, None])
    at_BT = jnp.clip(index_BT, 0, out.tokens_BT.shape[1] - 1)

    def answer(x_BT: jax.Array) -> jax.Array:
        return jnp.where(is_answer_BT, jnp.take_along_axis(x_BT, at_BT, 1), 0)

    padded_BT = jnp.pad(jnp.asarray(prompt_BT), ((0, 0), (0, size - T)))
    tokens_BT = jnp.where(index_BT < 0, padded_BT, answer(out.tokens_BT))
    sampled_BT = out.logprobs_BT if out.alternatives is None else out.alternatives.processed_BT
    return PackedRollout(tokens_BT, prompt_B + out.length_B, is_answer_BT[:, 1:], answer(sampled_BT)[:, 1:])


def continue_rows(
    params: Params,
    config: ModelConfig,
    out: Decoded,
    tokens_BT: AnyArray,
    num_tokens_B: AnyArray,
    *,
    donate: bool = False,
    impl: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Appends tokens after answers, as the result of a tool: `prefill` with each row's last token before
    them, which `decode_loop` has not appended.

    Args:
        params, config: the model.
        out: from `decode_loop`, with its cache.
        tokens_BT: int32, padded on the right.
        num_tokens_B: int32: how many of each row are real; a row with none only gets its last token.
        donate, impl: as in `prefill`.

    Returns:
        float32 logits [B, V] after each row's last token, and the cache, for another `decode_loop`.

    Raises:
        InputError: as `prefill`; a result without a cache.
    """
    if out.cache is None:
        raise InputError("these rows have no cache: give what decode_loop returned")
    check_array("tokens_BT", tokens_BT, jnp.integer, len(out.tokens_BT), "tokens")
    check_array("num_tokens_B", num_tokens_B, jnp.integer, len(out.tokens_BT))
    together_BT = jnp.concatenate([out.token_B[:, None], jnp.asarray(tokens_BT)], 1)
    count_B = jnp.asarray(num_tokens_B) + 1
    return prefill(params, config, together_BT, count_B, out.cache, donate=donate, impl=impl)


def repeat_rows(cache: KVCache, n: int) -> KVCache:
    """Returns the cache with each row n times, one after the other: for several answers to a prompt."""
    n = check_integer("n", n, 1)
    return reorder(cache, jnp.repeat(jnp.arange(len(cache.length_B)), n))
