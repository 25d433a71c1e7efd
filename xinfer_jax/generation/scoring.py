"""Log-probabilities of given tokens: `score`, a differentiable function of arrays, and `score_completions`, a
host function of lists of ids.

The logits of a long text would take gigabytes: 4.6 GiB for 8192 tokens and a vocabulary of 152k. So they are
computed for a part of the tokens at a time, and the backward pass computes each part again.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config.model_config import ModelConfig
from ..config.unsupported import check_causal
from ..errors import InputError
from ..model.decoder import check_tokens, hidden_states, lm_head, unembed
from ..ops.operation import check_impl, over_any_mesh
from ..weights.params import AnyArray, Params, check_params
from .batch_arrays import pad_prompts
from .executor import next_power_of_two
from .validation import check_prompts

_MAX_LOGITS = 1 << 25  # that exist at the same time: 128 MiB


def score(
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    num_tokens_B: AnyArray | None = None,
    *,
    inputs_BTD: AnyArray | None = None,
    impl: str | None = None,
) -> jax.Array:
    """Returns the log-probability of every token but the first, given those before it. Works inside a
    caller's jit.

    Reverse-mode gradients exist in every float leaf of params and in inputs_BTD.

    Args:
        params, config: the model.
        tokens_BT: int32 token ids, padded on the right.
        num_tokens_B: how many of each row are real; None: all.
        inputs_BTD: the input of the first layer, instead of `embed_tokens(params, config, tokens_BT)`: for a
            soft prompt (Lester et al. 2021), in whose place the ids do not matter.
        impl: of attention: None (what suits the device), "mosaic", "triton", "tpu" or "xla".

    Returns:
        float32 [B, T-1]: entry t is that of token t+1; 0 at padding. Natural logarithm.

    Raises:
        InputError: a wrong shape or type; an id outside the vocabulary or a number of tokens outside the row,
            if they are not traced; an impl that this machine lacks, or that cannot serve the call.
    """
    check_impl(impl)
    check_params(params, config)
    check_causal(config, "score")
    check_tokens(config, tokens_BT, num_tokens_B, inputs_BTD, least=2)
    num_tokens_B = None if num_tokens_B is None else jnp.asarray(num_tokens_B)
    return _score(params, config, tokens_BT, num_tokens_B, inputs_BTD, impl)


def score_completions(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    batch_size: int = 16,
    impl: str | None = None,
) -> list[list[float]]:
    """Returns the log-probability of every token of each completion after its prompt. For multiple choice:
    repeat the prompt, and compare sums or means.

    Args:
        params, config: the model.
        prompts: token ids, at least one per prompt.
        completions: one per prompt; token ids, at least one.
        batch_size: how many are scored at a time.
        impl: as in `score`.

    Returns:
        One list per completion, as long as it.

    Raises:
        InputError: lists of different lengths, ids outside the vocabulary, more tokens than the context
            limit.
    """
    prompts = check_prompts(config, prompts)
    completions = check_prompts(config, completions, "completion")
    if len(prompts) != len(completions):
        raise InputError(
            f"{len(prompts)} prompts for {len(completions)} completions: give one prompt per completion"
        )
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    if (longest := max(map(len, rows))) > config.context_length:
        raise InputError(
            f"prompt + completion of {longest} tokens exceed the model's context limit"
            f" {config.context_length}: shorten them"
        )
    size = min(batch_size, next_power_of_two(len(rows)))
    found = []
    for at in range(0, len(rows), size):
        batch = rows[at : at + size]
        tokens_BT, num_tokens_B = pad_prompts(batch, config.context_length, size)  # full: one program
        found += list(np.asarray(score(params, config, tokens_BT, num_tokens_B, impl=impl))[: len(batch)])
    return [
        row[len(p) - 1 :][: len(c)].tolist() for row, p, c in zip(found, prompts, completions, strict=True)
    ]


@partial(jax.jit, static_argnames=("config", "impl"))
@over_any_mesh
def _score(params, config, tokens_BT, num_tokens_B, inputs_BTD, impl):
    hidden_BTD, _ = hidden_states(
        params, config, tokens_BT, None, num_tokens_B, inputs_BTD=inputs_BTD, impl=impl
    )
    logprobs_BT = _target_logprobs(params, config, hidden_BTD[:, :-1], tokens_BT[:, 1:])
    if num_tokens_B is None:
        return logprobs_BT
    return jnp.where(jnp.arange(1, tokens_BT.shape[1]) < num_tokens_B[:, None], logprobs_BT, 0)


def _target_logprobs(
    params: Params, config: ModelConfig, hidden_BTD: jax.Array, target_BT: jax.Array
) -> jax.Array:
    """Log-probabilities of the targets. T is split, not B: rows may be on different devices."""
    B, T = target_BT.shape
    parts = -(-T // max(1, _MAX_LOGITS // (B * lm_head(params)["weight"].shape[0])))
    size = -(-T // parts)

    def split(x_BT: jax.Array) -> jax.Array:  # [parts, B, size, ...]
        padded_BT = jnp.pad(x_BT, ((0, 0), (0, parts * size - T), *[(0, 0)] * (x_BT.ndim - 2)))
        return jnp.moveaxis(padded_BT.reshape(B, parts, size, *x_BT.shape[2:]), 1, 0)

    @partial(jax.checkpoint, prevent_cse=False)  # the iterations of a loop are not merged anyway
    def part(hidden_BTD: jax.Array, target_BT: jax.Array) -> jax.Array:  # [B, size]
        logits_BTV = unembed(params, config, hidden_BTD)
        chosen_BT = jnp.take_along_axis(logits_BTV, target_BT[..., None], -1)[..., 0]
        return chosen_BT - jax.nn.logsumexp(logits_BTV, -1)

    done = lax.map(lambda pair: part(*pair), (split(hidden_BTD), split(target_BT)))
    return jnp.moveaxis(done, 0, 1).reshape(B, -1)[:, :T]
