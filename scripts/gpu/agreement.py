"""Tests whether two ways to run a model agree: their logits along one forced sequence of tokens are compared.

Bounds are fractions of the largest logit at a position (RMS: of all logits), for bfloat16. The bounds for
float16 are a quarter of them. Measured on a CPU with the weights of `checking_params`, 2 to 28 layers, 64 to
512 tokens:

- Blocked jnp and emulated kernels, both in bfloat16, differ from each other by an RMS of at most 0.018 for
  the 0.5B shape, and 0.022 for any shape. At a position they differ by at most 0.034 and 0.051. Their ids
  differ only if the two best logits are closer than 0.016.
- Both differ from the same model in float32 by 0.009 (one layer), 0.019 (four) to 0.031 (28), and at a
  position by at most 0.048 (four) and 0.091.
- If attention's scale is 5% too large, the RMS is 0.052 or more (one layer: 0.040), and 0.094 for the 0.5B
  shape. A shorter window, no window, twice the RoPE theta or keys one slot off give 0.22 or more.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xinfer_jax as xj
from gpu.section_cases import emulated
from xinfer_jax.backends.kernels.head import can_fuse_head, greedy_tokens
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.families.reading import from_hf
from xinfer_jax.ops.largest import argmax
from xinfer_jax.weights.quantized_weight import is_quantized

SPREAD = 1.5
LARGEST = 0.1  # largest difference of a logit
RMS = 0.04  # root mean square of the differences in a row
NEAR = 0.04  # ids may differ where the two best logits are closer
LEAST_IDS = 32  # fewer compared ids are a failure
LEAST_FRACTION = 0.25  # of all ids: in 152k random logits 0.42 of the best two are farther apart than `NEAR`


class Forced(NamedTuple):
    """The outputs of a model after each token of a forced sequence."""

    logits_BTV: jax.Array  # float32
    id_BT: jax.Array  # int32: greedy ids, by the model's own argmax


def checking_params(config: xj.ModelConfig, key: jax.Array, dtype: Any, quantize: str | None = None) -> Any:
    """Returns random parameters with which a wrong attention shows in the logits.

    `init_params` gives attention scores of deviation 1: over hundreds of keys their weights are almost equal,
    and a wrong scale changes little. `SPREAD` times as large, a few dozen keys have most of the weight.
    Larger factors also amplify rounding: at 3 a scale wrong by 5% shows 3.5 times as much as bfloat16, at 1.5
    it shows 6.5 times as much (480 tokens).
    """
    params = xj.init_params(config, key, dtype, quantize)

    def widen(layer: Any) -> Any:
        if "q_norm" in layer:  # it would undo a factor on the matrix
            offset = config.norm_offset or 0
            return layer | {"q_norm": SPREAD * (layer["q_norm"] + offset) - offset}
        weight = layer["q"]["weight"]
        if is_quantized(weight):
            weight = dataclasses.replace(weight, scale=SPREAD * weight.scale)
        else:
            weight = SPREAD * weight
        return layer | {"q": layer["q"] | {"weight": weight}}

    return params | {"layers": tuple(map(widen, params["layers"]))}


def float32_params(params: Any) -> Any:
    """Returns the parameters in float32. Quantized matrices are dequantized."""

    def leaf(x: Any) -> jax.Array:
        return x.dequantize() if is_quantized(x) else jnp.asarray(x, jnp.float32)

    return jax.tree.map(leaf, params, is_leaf=is_quantized)


@partial(jax.jit, static_argnames=("config", "prompt", "impl"))
def forced(
    params: Any, config: xj.ModelConfig, tokens_BT: Any, cache: xj.KVCache, prompt: int, impl: str | None
) -> Forced:
    """Runs the model along these tokens: a prefill of the first `prompt` ones, then a decode step for each
    other. The cache is empty. Its kind and dtype are the ones to check.
    """

    run_config = RunConfig(impl)

    def step(cache: xj.KVCache, token_B: jax.Array) -> tuple[xj.KVCache, Forced]:
        hidden_B1D, cache = xj.hidden_states(params, config, token_B[:, None], cache, impl=impl)
        hidden_BD = hidden_B1D[:, 0]
        logits_BV = xj.unembed(params, config, hidden_BD)
        if can_fuse_head(params, hidden_BD, run_config):
            return cache, Forced(logits_BV, greedy_tokens(params, config, hidden_BD, run_config)[0])
        return cache, Forced(logits_BV, argmax(logits_BV, run_config))

    logits_BTV, cache = xj.forward(params, config, tokens_BT[:, :prompt], cache, impl=impl)
    id_BT = argmax(logits_BTV.reshape(-1, logits_BTV.shape[-1]), run_config).reshape(len(tokens_BT), -1)
    _, decoded = lax.scan(step, cache, tokens_BT[:, prompt:].T)
    parts = zip((logits_BTV, id_BT), decoded, strict=True)
    return Forced(*(jnp.concatenate([first, jnp.swapaxes(rest, 0, 1)], 1) for first, rest in parts))


def agreement(got: Forced, want: Forced, prompt: int, dtype: Any) -> dict[str, Any]:
    """Compares two ways to run a model along the same tokens: all logits by number, and the greedy ids
    wherever the two best logits differ by more than the bound.

    The root mean square is taken for each row, its prefill and its decode steps on their own: an error of one
    kernel must not disappear among the positions of the other. dtype: the dtype of the activations. The
    bounds depend on it.

    Returns:
        The differences, the number of ids that were compared, their bounds, and "ok": all are within the
        bounds, and enough ids were compared.
    """
    off = {name: np.asarray(x) for name, x in _differences(got, want).items()}
    factor = 0.25 if jnp.dtype(dtype) == jnp.float16 else 1
    bound = {"largest": factor * LARGEST, "rms": factor * RMS, "near": factor * NEAR}
    largest = float(off["largest_BT"].max())
    parts = {"rms_prefill": np.s_[:, :prompt], "rms_decode": np.s_[:, prompt:]}
    rms = {
        name: float(np.sqrt((off["square_BT"][at].sum(1) / off["want_square_BT"][at].sum(1)).max()))
        for name, at in parts.items()
    }
    compared_BT = off["gap_BT"] > bound["near"]
    differ = int((off["differ_BT"] & compared_BT).sum())
    within = largest <= bound["largest"] and all(x <= bound["rms"] for x in rms.values()) and differ == 0
    count = int(compared_BT.sum())
    enough = count >= LEAST_IDS and count >= LEAST_FRACTION * compared_BT.size
    few = {} if enough else {"too_few": f"at least {LEAST_IDS}, and {LEAST_FRACTION:.0%} of all"}
    ids = {"differ": differ, "ids_compared": count, "of": compared_BT.size}
    return {"largest": largest, **rms, **ids, **few, "tolerance": bound, "ok": within and enough}


@jax.jit
def _differences(got: Forced, want: Forced) -> dict[str, jax.Array]:
    off_BTV = got.logits_BTV - want.logits_BTV
    most_BT = jnp.abs(want.logits_BTV).max(-1)
    best_BT = want.logits_BTV.max(-1)
    id_BT = jnp.argmax(want.logits_BTV, -1)
    is_best_BTV = jnp.arange(want.logits_BTV.shape[-1]) == id_BT[..., None]
    second_BT = jnp.where(is_best_BTV, -jnp.inf, want.logits_BTV).max(-1)
    return {
        "largest_BT": jnp.abs(off_BTV).max(-1) / most_BT,
        "square_BT": jnp.square(off_BTV).mean(-1),
        "want_square_BT": jnp.square(want.logits_BTV).mean(-1),
        "gap_BT": (best_BT - second_BT) / most_BT,
        "differ_BT": got.id_BT != id_BT,
    }


class ForcedModel:
    """A model in one format, with `checking_params`, to be run along forced tokens."""

    def __init__(
        self,
        plan: SimpleNamespace,
        hf: dict[str, Any],
        dtype: str = "bfloat16",
        quantize: str | None = None,
    ):
        self._plan = plan
        self._config = from_hf(hf)
        self._dtype = dtype
        self._kernels = emulated(plan)  # None: what suits the device
        key = jax.random.key(0, impl="rbg")
        self.params = functools.cache(lambda: checking_params(self._config, key, dtype, quantize))

    def forced(
        self, tokens_BT: Any, prompt: int, impl: str | None, params: Any = None, cache_dtype: Any = None
    ) -> Forced:
        """Returns the model along these tokens. impl: None: the kernels. params: others than its own."""
        cache = xj.init_cache(self._config, *tokens_BT.shape, cache_dtype or self._dtype)
        params = self.params() if params is None else params
        return forced(params, self._config, tokens_BT, cache, prompt, impl or self._kernels)

    def agreement(self, want: Callable[[Any, int], Forced] | None = None) -> dict[str, Any]:
        """Compares the logits of kernels and XLA along a forced sequence. Also reports which kernels ran.
        want: gives the reference along tokens with a prompt of a number of them. None: this model with XLA.
        """
        prompt, length = (40, 80) if self._plan.tiny else (512, 576)
        draws = np.random.default_rng(0)
        tokens_BT = draws.integers(0, self._config.vocab_size, (2, length)).astype(np.int32)
        got = self.forced(tokens_BT, prompt, None)
        reference = want(tokens_BT, prompt) if want else self.forced(tokens_BT, prompt, "xla")
        used = xj.kernels_used(self.params(), self._config, self._kernels, 2, self._dtype, length)
        kernels = {kernel: selection.impl for kernel, selection in used.items()}
        return {"kernels": kernels} | agreement(got, reference, prompt, self._dtype)
