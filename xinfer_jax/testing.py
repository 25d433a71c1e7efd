"""Checks for your own tests: `xj.testing`.

- `assert_parity` compares the logits of a checkpoint with the logits of transformers.
- `assert_rollout_matches_score` compares the log-probabilities of rollouts with the ones of training.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from .annotations import Remat
from .cache.kv_cache import init_cache
from .checkpoint.loading import Model, load_model
from .config.model_config import ModelConfig
from .errors import InputError
from .generation.batch_arrays import pad_prompts
from .generation.functional import decode_loop, prefill
from .generation.rollouts import pack_rollout
from .generation.scoring import score
from .generation.validation import check_prompts
from .model.decoder import forward
from .model.taps import Taps
from .modes import in_default_modes
from .sampling.sampling_config import SamplingConfig
from .weights.params import Params
from .weights.stacking import unstack_layers


@in_default_modes
def assert_parity(
    path: str | Path, *, tokens: Sequence[Sequence[int]], atol: float = 1e-4, model: Model | None = None
) -> float:
    """Asserts that the logits of a checkpoint equal the logits of transformers, in float32.

    Use it in tests of a model family that you add.

    Args:
        path: a checkpoint that both libraries open: a directory or a hub name.
        tokens: a list of texts, as token ids.
        atol: the largest difference of logits that passes.
        model: the model to compare. None takes `load_model(path, dtype="float32")`.

    Returns:
        The largest difference.

    Raises:
        AssertionError: the difference is larger. The message says which logit differs most, and by how much.
        InputError: torch or transformers is not installed, or ids are outside the vocabulary.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise InputError(
            f"assert_parity needs torch and transformers: pip install torch transformers ({error})"
        ) from None
    if model is None:
        model = load_model(str(path), dtype="float32")
    config = model.config
    texts = check_prompts(config, tokens, "text")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens_BT, num_tokens_B = pad_prompts(texts, config.context_length)
    compute = jax.jit(forward, static_argnames="config")
    logits_BTV = np.array(compute(model.params, config, tokens_BT, None, num_tokens_B)[0])
    expected_BTV = np.zeros_like(logits_BTV)
    with torch.no_grad():
        for row, text in enumerate(texts):
            logits_BTV[row, len(text) :] = 0
            expected_BTV[row, : len(text)] = theirs(torch.tensor([text])).logits[0].numpy()
    return _assert_close(logits_BTV, expected_BTV, atol, "logit", "transformers")


class ScoreOptions(TypedDict, total=False):
    """Arguments of `score` that choose the way in which it computes.

    Attributes:
        chunk: the number of tokens of each row whose logits exist at the same time.
        taps: edits of the residual stream (see `run_model`).
        remat: the values of a layer that the backward pass stores (see `run_model`).
        impl: the implementation of attention.
    """

    chunk: int | None
    taps: Taps | None
    remat: Remat
    impl: str | None


@in_default_modes
def assert_rollout_matches_score(
    params: Params,
    config: ModelConfig,
    *,
    prompts: Sequence[Sequence[int]] = ((0,), (1, 2, 3)),
    max_tokens: int = 16,
    temperature: float = 1.0,
    scored_by: Params | None = None,
    atol: float = 1e-4,
    seed: int = 0,
    **options: Unpack[ScoreOptions],
) -> float:
    """Asserts that `decode_loop` records the log-probabilities that `score` computes for its tokens.

    Use it in tests of a trainer: a difference between both is a common cause of unstable training.

    Args:
        params: the parameter tree of the model that samples. The layers may be stacked.
        config: the config of the model.
        prompts: a list of prompts, as token ids.
        max_tokens: the number of tokens in each answer. No id ends an answer.
        temperature: the temperature of the samples and of the log-probabilities. Above 0.
        scored_by: parameters that score the tokens, for example the copy of a trainer. None takes `params`.
        atol: the largest difference that passes. bfloat16 needs about 0.2.
        seed: the seed of the samples.
        options: further arguments of `score`: chunk, taps, remat, impl.

    Returns:
        The largest difference.

    Raises:
        AssertionError: the difference is larger. The message says which token differs most, and by how much.
        InputError: `decode_loop` or `score` raises it.
    """
    texts = check_prompts(config, prompts)
    (tokens_BT, num_tokens_B) = pad_prompts(texts, config.context_length)
    capacity = tokens_BT.shape[1] + max_tokens
    sampling = SamplingConfig(temperature=temperature)

    @jax.jit
    def rollout(params: Params, key: jax.Array) -> Any:
        own = unstack_layers(params) if isinstance(params["layers"], dict) else params
        cache = init_cache(config, len(texts), capacity)
        logits_BV, cache = prefill(own, config, tokens_BT, num_tokens_B, cache)
        how = sampling, np.zeros(0, np.int32), max_tokens
        out = decode_loop(own, config, logits_BV, cache, key, *how, logprobs=0)
        return pack_rollout(tokens_BT, num_tokens_B, out)

    packed = jax.device_get(rollout(params, jax.random.key(seed)))
    trained = params if scored_by is None else scored_by
    given = packed.tokens_BT, packed.num_tokens_B
    scores = score(trained, config, *given, temperature=temperature, **options)
    scores_BT = np.where(packed.mask_BT, scores.logprobs_BT, 0)
    return _assert_close(packed.logprobs_BT, scores_BT, atol, "log-probability", "score")


def _assert_close(found: np.ndarray, expected: np.ndarray, atol: float, what: str, whose: str) -> float:
    """Returns the largest difference. Raises `AssertionError` if it exceeds `atol` or is not a number."""
    apart = np.abs(found - expected)
    apart = np.where(np.isnan(apart), np.inf, apart)
    worst = np.unravel_index(apart.argmax(), apart.shape)
    place = [*map(int, worst)]
    if not apart[worst] <= atol:
        raise AssertionError(
            f"the {what} at {place} is {found[worst]:.6g}, by {whose} {expected[worst]:.6g}: they differ by"
            f" {apart[worst]:.3g}, more than {atol:g}; {np.mean(apart > atol):.1%} of all do"
        )
    return float(apart[worst])
