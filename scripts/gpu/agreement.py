"""Whether two ways to run a model agree: by their logits along one forced sequence of tokens, or by whether
the tokens of an answer are those that a reference takes along that answer.

Bounds are fractions of the largest logit at a position (RMS: of all logits), for bfloat16; float16 has a
quarter of them. Measured on a CPU with the weights of `checking_params`, 2 to 24 layers, 64 to 512 tokens:

- blocked jnp and emulated kernels, both in bfloat16, differ from the same model in float32 by 0.009 to 0.024
  (RMS) and at most 0.064 at a position; from each other by at most 0.019 and 0.034. Ids differ only where the
  two best logits are closer than 0.024.
- two formulations that round independently may differ from each other by sqrt(2) of that: 0.034 and 0.090.
- attention's scale 5% too large gives an RMS of 0.06 to 0.17; windows, RoPE and cache errors 0.3 or more.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xinfer_jax as xj
from xinfer_jax.model.greedy import argmax, can_fuse_head, greedy_tokens
from xinfer_jax.sampling.batched_settings import settings_per_row
from xinfer_jax.sampling.sampler import draw_key, gumbel_noise, row_keys, warp_logits
from xinfer_jax.weights.quantized_weights import dequantize, is_quantized

SPREAD = 1.5
LARGEST = 0.1  # largest difference of a logit
RMS = 0.04  # root mean square of all differences
NEAR = 0.04  # ids may differ where the two best logits are closer
LEAST_IDS = 32  # fewer compared ids are a failure
LEAST_FRACTION = 0.25  # of all ids: in 152k random logits 0.42 of the best two are farther apart than `NEAR`


class Forced(NamedTuple):
    """What a model gives after each token of a forced sequence."""

    logits_BTV: jax.Array  # float32
    id_BT: jax.Array  # int32: greedy ids, by the model's own argmax


def checking_params(config: xj.ModelConfig, key: jax.Array, dtype: Any, quantize: str | None = None) -> Any:
    """Random parameters with which a wrong attention shows in the logits.

    `init_params` gives attention scores of deviation 1: over hundreds of keys their weights are almost equal,
    and a wrong scale changes little. `SPREAD` times as large, a few dozen keys have most of the weight.
    Larger factors also amplify rounding: at 3 a scale wrong by 5% shows 3.5 times as much as bfloat16, at
    1.5 it shows 6.5 times as much (480 tokens).
    """
    params = xj.init_params(config, key, dtype, quantize)

    def widen(layer: Any) -> Any:
        if "q_norm" in layer:  # it would undo a factor on the matrix
            weight = layer["q_norm"]
            return layer | {"q_norm": SPREAD * (weight + config.norm_offset) - config.norm_offset}
        weight = layer["q"]["weight"]
        if is_quantized(weight):
            weight = dataclasses.replace(weight, scale=SPREAD * weight.scale)
        else:
            weight = SPREAD * weight
        return layer | {"q": layer["q"] | {"weight": weight}}

    return params | {"layers": tuple(map(widen, params["layers"]))}


def float32_params(params: Any) -> Any:
    """The parameters in float32; quantized matrices are dequantized."""

    def leaf(x: Any) -> jax.Array:
        return dequantize(x) if is_quantized(x) else jnp.asarray(x, jnp.float32)

    return jax.tree.map(leaf, params, is_leaf=is_quantized)


@partial(jax.jit, static_argnames=("config", "prompt", "impl"))
def forced(
    params: Any, config: xj.ModelConfig, tokens_BT: Any, cache: xj.KVCache, prompt: int, impl: str | None
) -> Forced:
    """The model along these tokens: a prefill of the first `prompt` ones, then a decode step for each other.

    Args:
        params, config, impl: the model and how it runs.
        tokens_BT: int32, all of them real.
        cache: empty; its kind and dtype are those to check.
        prompt: tokens of the prefill.
    """

    def outputs(hidden_BTD: jax.Array) -> Forced:
        logits_BTV = xj.unembed(params, config, hidden_BTD)
        hidden_MD, logits_MV = (x.reshape(-1, x.shape[-1]) for x in (hidden_BTD, logits_BTV))
        if can_fuse_head(params, hidden_MD, impl):
            id_M = greedy_tokens(params, config, hidden_MD, impl)[0]
        else:
            id_M = argmax(logits_MV, impl)
        return Forced(logits_BTV, id_M.reshape(hidden_BTD.shape[:2]))

    def step(cache: xj.KVCache, token_B: jax.Array) -> tuple[xj.KVCache, jax.Array]:
        hidden_B1D, cache = xj.hidden_states(params, config, token_B[:, None], cache, impl=impl)
        return cache, hidden_B1D[:, 0]

    prefilled_BTD, cache = xj.hidden_states(params, config, tokens_BT[:, :prompt], cache, impl=impl)
    _, decoded_TBD = lax.scan(step, cache, tokens_BT[:, prompt:].T)
    return outputs(jnp.concatenate([prefilled_BTD, jnp.swapaxes(decoded_TBD, 0, 1)], 1))


def agreement(got: Forced, want: Forced, dtype: Any) -> dict[str, Any]:
    """Compares two ways to run a model along the same tokens: all logits by number, and the greedy ids
    wherever the two best logits differ by more than the bound.

    Args:
        got, want: from `forced`.
        dtype: of the activations; the bounds depend on it.

    Returns:
        The differences, how many ids were compared and their bounds, and "ok": all are within the bounds, and
        enough ids were compared.
    """
    off = {name: np.asarray(x) for name, x in _differences(got, want).items()}
    bound = bounds(dtype)
    largest = float(off["largest_BT"].max())
    rms = float(np.sqrt(off["square_BT"].sum() / off["want_square_BT"].sum()))
    compared_BT = off["gap_BT"] > bound["near"]
    differ = int((off["differ_BT"] & compared_BT).sum())
    within = largest <= bound["largest"] and rms <= bound["rms"] and differ == 0
    figures = {"largest": largest, "rms": rms, "differ": differ}
    return figures | verdict(compared_BT, within, bound)


@jax.jit
def _differences(got: Forced, want: Forced) -> dict[str, jax.Array]:
    off_BTV = got.logits_BTV - want.logits_BTV
    most_BT = jnp.abs(want.logits_BTV).max(-1)
    best_BT2, id_BT2 = lax.top_k(want.logits_BTV, 2)
    return {
        "largest_BT": jnp.abs(off_BTV).max(-1) / most_BT,
        "square_BT": jnp.square(off_BTV).mean(-1),
        "want_square_BT": jnp.square(want.logits_BTV).mean(-1),
        "gap_BT": (best_BT2[..., 0] - best_BT2[..., 1]) / most_BT,
        "differ_BT": got.id_BT != id_BT2[..., 0],
    }


def bounds(dtype: Any) -> dict[str, float]:
    """The bounds for activations of this dtype."""
    factor = 0.25 if jnp.dtype(dtype) == jnp.float16 else 1
    return {"largest": factor * LARGEST, "rms": factor * RMS, "near": factor * NEAR}


def verdict(compared: np.ndarray, within: bool, bound: Any) -> dict[str, Any]:
    """How many ids were compared, of how many, and "ok": all is within the bound, and these are enough.

    Args:
        compared: bool, for each id.
        within: whether all that was compared is within the bound.
        bound: for the record.
    """
    count = int(compared.sum())
    enough = count >= LEAST_IDS and count >= LEAST_FRACTION * compared.size
    few = {} if enough else {"too_few": f"at least {LEAST_IDS}, and {LEAST_FRACTION:.0%} of all"}
    return {"ids_compared": count, "of": compared.size, **few, "tolerance": bound, "ok": within and enough}


def greedy_agreement(want: Forced, answer_BT: Any, dtype: Any) -> dict[str, Any]:
    """Whether a greedy answer has the tokens that a reference takes along it: at each position the largest
    logit, or one that is lower by at most the bound.

    Args:
        want: the reference along prompt and answer, without the answer's last token.
        answer_BT: int32, each row's answer.
        dtype: of the activations.
    """
    answer_BT = jnp.asarray(answer_BT)
    logits_BTV = want.logits_BTV[:, -answer_BT.shape[1] :]
    most_BT = jnp.abs(logits_BTV).max(-1)
    best_BT2 = lax.top_k(logits_BTV, 2)[0]
    chosen_BT = jnp.take_along_axis(logits_BTV, answer_BT[..., None], -1)[..., 0]
    gap_BT, behind_BT = (np.asarray((best_BT2[..., 0] - x) / most_BT) for x in (best_BT2[..., 1], chosen_BT))
    near = bounds(dtype)["near"]
    behind = float(behind_BT.max())
    return {"behind": behind} | verdict(gap_BT > near, behind <= near, near)


def sampled_agreement(
    want: Forced, answer_BT: Any, sampling: xj.SamplingConfig, key: jax.Array, dtype: Any
) -> dict[str, Any]:
    """Whether a sampled answer has the tokens that a reference draws along it with the same keys.

    A position is not compared where the two largest perturbed logits differ by less than the bound, or where
    one of the two tokens is so close to the limit of top-k or top-p that either side may drop it.

    Args:
        want: the reference along prompt and answer, without the answer's last token.
        answer_BT: int32, each row's answer.
        sampling: temperature, top-k and top-p of all rows.
        key: as in `generate`.
        dtype: of the activations.
    """
    answer_BT = np.asarray(answer_BT)
    B, T = answer_BT.shape
    first = want.logits_BTV.shape[1] - T + 1  # position of the answer's first token
    logits_MV = want.logits_BTV[:, -T:].reshape(B * T, -1)
    key_M = jnp.repeat(row_keys(key, B), T)
    position_M = jnp.tile(first + jnp.arange(T), B)
    near = bounds(dtype)["near"]
    token_M = answer_BT.reshape(-1)
    sampling_M = settings_per_row(sampling, B * T, logits_MV.shape[1])
    drawn_M, compared_M = map(np.asarray, _draw(logits_MV, token_M, key_M, position_M, sampling_M, near))
    differ = int((compared_M & (drawn_M != token_M)).sum())
    return {"differ": differ} | verdict(compared_M, differ == 0, near)


@jax.jit
def _draw(logits_MV, token_M, key_M, position_M, sampling_M, near):  # noqa: PLR0913
    """The tokens that are drawn from the logits, int32 [M], and whether rounding cannot have changed them."""
    V = logits_MV.shape[1]
    limit_M = near * jnp.abs(logits_MV).max(-1)
    warped_MV = warp_logits(logits_MV, sampling_M, jnp.max(logits_MV, -1, keepdims=True))
    noise_MV = jax.vmap(lambda key, position: gumbel_noise(draw_key(key, position, 0), V))(key_M, position_M)
    best_M2, id_M2 = lax.top_k(warped_MV + noise_MV, 2)
    kept_MV = warped_MV > -jnp.inf
    least_kept_M = jnp.where(kept_MV, logits_MV, jnp.inf).min(-1)
    most_removed_M = jnp.where(kept_MV, -jnp.inf, logits_MV).max(-1)

    def inside(token_M):  # neither side may drop it
        logit_M = jnp.take_along_axis(logits_MV, token_M[:, None], 1)[:, 0]
        return (logit_M > least_kept_M + limit_M) | (logit_M < most_removed_M - limit_M)

    clear_M = best_M2[:, 0] - best_M2[:, 1] > limit_M / sampling_M.temperature
    return id_M2[:, 0], clear_M & inside(id_M2[:, 0]) & inside(token_M)
