"""Rollouts in the form for training: a prompt and its answer in one row. Also continues answers."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..cache.kv_cache import KVCache
from ..checks import check_array, check_range
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..modes import in_default_modes
from ..old_names import add_old_names, renamed_arguments
from ..weights.params import AnyArray, Params
from .functional import Decoded, prefill


class PackedRollout(NamedTuple):
    """Rows of a prompt and its answer, padded on the right, from `pack_rollout`.

    Attributes:
        tokens_BT: int32: the tokens of prompt and answer.
        num_tokens_B: int32: the number of tokens of prompt and answer.
        mask_BT: bool [B, T-1]: entry t is True if token t+1 was sampled, so it matches the entries of
            `score`.
        logprobs_BT: float32 [B, T-1]: the log-probabilities with which tokens were sampled, and 0 for other
            tokens.
        routed_experts: int32 [B, T, L, U], as `score` takes them. None: the answer has no recorded experts.
        support: uint32 [B, T, ceil(V/32)], as `score` takes them: the sampling masks of the sampled tokens,
            and 0 for other tokens. None: the answer has no recorded masks.
    """

    tokens_BT: jax.Array
    num_tokens_B: jax.Array
    mask_BT: jax.Array
    logprobs_BT: jax.Array
    routed_experts: jax.Array | None = None
    support: jax.Array | None = None


add_old_names(PackedRollout, routes="routed_experts")


@renamed_arguments(prompt_routes="prompt_routed_experts")
@in_default_modes
def pack_rollout(
    prompt_BT: AnyArray, num_tokens_B: AnyArray, out: Decoded, prompt_routed_experts: AnyArray | None = None
) -> PackedRollout:
    """Returns each prompt followed by its answer, with log-probabilities at the entries of `score`.

    Use it between `decode_loop` and your loss. It works under `jit`. If `decode_loop` recorded
    log-probabilities after the logits processors (`logprobs=`), `logprobs_BT` has them, since the tokens were
    sampled from that distribution. Otherwise it has the log-probabilities before the processors.

    Args:
        prompt_BT: int32 token ids of the prompts, padded on the right.
        num_tokens_B: int32: the number of real tokens in each row.
        out: the result of `decode_loop` for these rows. Its `routed_experts` are packed too.
        prompt_routed_experts: the experts of the prompt's tokens, from `run_model`. None puts -1, so `score`
            chooses these experts again.

    Returns:
        A `PackedRollout`.

    Raises:
        InputError: arrays have a wrong shape or type, or you give experts of the prompt and `out` has none.
            Outside a trace it is also raised if a number of tokens is outside the row.
    """
    check_array("prompt_BT", prompt_BT, jnp.integer, out.tokens_BT.shape[0], "tokens")
    check_array("num_tokens_B", num_tokens_B, jnp.integer, out.tokens_BT.shape[0])
    B, T = prompt_BT.shape
    check_range("num_tokens_B:", num_tokens_B, 0, T)
    if prompt_routed_experts is not None:
        if out.routed_experts is None:
            raise InputError("the answer has no routed experts: give decode_loop return_routed_experts=True")
        check_array(
            "prompt_routed_experts", prompt_routed_experts, jnp.integer, B, T, *out.routed_experts.shape[2:]
        )
    prompt_B = jnp.asarray(num_tokens_B, jnp.int32)
    size = T + out.tokens_BT.shape[1]
    index_BT = jnp.arange(size) - prompt_B[:, None]  # of the answer's tokens
    is_answer_BT = (index_BT >= 0) & (index_BT < out.length_B[:, None])
    at_BT = jnp.clip(index_BT, 0, out.tokens_BT.shape[1] - 1)

    def pack(of_prompt: Any, of_answer: jax.Array, padding: int = 0) -> jax.Array:
        """[B, size, ...]: of the prompt (None: padding), then of the answer, then padding."""
        expand = partial(jnp.expand_dims, axis=range(2, of_answer.ndim))
        row = jnp.where(expand(is_answer_BT), jnp.take_along_axis(of_answer, expand(at_BT), 1), padding)
        if of_prompt is None:
            return row
        widths = [(0, 0), (0, size - T), *[(0, 0)] * (row.ndim - 2)]
        return jnp.where(expand(index_BT < 0), jnp.pad(jnp.asarray(of_prompt, row.dtype), widths), row)

    tokens_BT = pack(prompt_BT, out.tokens_BT)
    sampled_BT = out.logprobs_BT if out.alternatives is None else out.alternatives.processed_logprobs_BT
    logprobs_BT = pack(None, sampled_BT)[:, 1:]
    routed_experts = (
        None if out.routed_experts is None else pack(prompt_routed_experts, out.routed_experts, -1)
    )
    support = None if out.alternatives is None else out.alternatives.support_BTW
    support = None if support is None else pack(None, support)
    num_tokens_B = prompt_B + out.length_B
    return PackedRollout(tokens_BT, num_tokens_B, is_answer_BT[:, 1:], logprobs_BT, routed_experts, support)


@in_default_modes
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
    """Appends tokens after answers, and returns the logits for the next token.

    Use it to append the result of a tool, for example.

    `decode_loop` does not append the last token of a row to the cache. This function appends it first, and
    then your tokens, as `prefill` does.

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        out: the result of `decode_loop`, with its cache.
        tokens_BT: int32 token ids, padded on the right.
        num_tokens_B: int32: the number of real tokens in each row. A row with 0 tokens only gets its last
            token.
        donate: True lets the call reuse the memory of the cache in `out`. That cache is deleted then.
        impl: the implementation of the operations (see `prefill`). None chooses the one that suits the
            device.

    Returns:
        float32 logits [B, V] after each row's last token, and the cache. Pass both to another `decode_loop`.

    Raises:
        InputError: `prefill` would raise it, or the result has no cache.
    """
    if out.cache is None:
        raise InputError("these rows have no cache: give what decode_loop returned")
    check_array("tokens_BT", tokens_BT, jnp.integer, out.tokens_BT.shape[0], "tokens")
    check_array("num_tokens_B", num_tokens_B, jnp.integer, out.tokens_BT.shape[0])
    check_range("num_tokens_B:", num_tokens_B, 0, tokens_BT.shape[1])
    together_BT = jnp.concatenate([out.token_B[:, None], jnp.asarray(tokens_BT, jnp.int32)], 1)
    count_B = jnp.asarray(num_tokens_B, jnp.int32) + 1
    return prefill(params, config, together_BT, count_B, out.cache, donate=donate, impl=impl)
