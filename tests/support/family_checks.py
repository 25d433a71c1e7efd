"""What a family's small model has to do, whatever its layers are.

`model` is what `small_model` returns.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import parity_cases as cases

import xinfer_jax as xj

NEW = 8
OPTIONS = xj.GenerateOptions(NEW, eos_token_ids=())
CACHED = dataclasses.replace(OPTIONS, capacity=128)


def small_model(case: cases.Case) -> tuple[Any, xj.ModelConfig, list[list[int]]]:
    """Parameters and config, and prompts (5, 23 and 77 tokens)."""
    return (
        cases.params_from(case.config, cases.random_tensors(case.config, 3)),
        case.config,
        cases.prompts(case),
    )


def check_tokens(model: Any) -> list[list[int]]:
    """Greedy tokens, returned, are those of the logits without a cache, and those with draft tokens."""
    params, config, prompts = model
    out = xj.generate(params, config, prompts, CACHED)
    rows = [prompt + tokens for prompt, tokens in zip(prompts, out.tokens, strict=True)]
    tokens_BT, num_tokens_B = cases.pad_prompts(rows)
    forward = jax.jit(xj.forward, static_argnames="config")
    logits_BTV = np.asarray(forward(params, config, tokens_BT, None, num_tokens_B)[0])
    for b, (prompt, tokens) in enumerate(zip(prompts, out.tokens, strict=True)):
        assert logits_BTV[b, len(prompt) - 1 :][:NEW].argmax(-1).tolist() == tokens
    drafted = dataclasses.replace(CACHED, draft="lookup", draft_tokens=2)
    assert xj.generate(params, config, prompts, drafted).tokens == out.tokens
    return out.tokens


def check_engine_bits(model: Any) -> None:
    """An engine over int8 pages gives the same bits alone and beside others, and the tokens of `generate`."""
    params, config, prompts = model
    whole = xj.Model(params, config)
    expected = xj.generate(params, config, prompts, dataclasses.replace(CACHED, cache_dtype="int8"))
    with xj.Engine(whole, rows=2, capacity=128, chunk=64, cache_dtype="int8") as engine:
        alone = [engine.submit(prompt, OPTIONS).result() for prompt in prompts]
        together = [request.result() for request in [engine.submit(prompt, OPTIONS) for prompt in prompts]]
        assert engine.stats.hits
    assert [out.tokens[0] for out in alone] == expected.tokens
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs


def check_gradients(model: Any) -> None:
    """Every leaf has a finite gradient that is not 0."""
    params, config, prompts = model
    tokens_BT = np.array([prompts[1][:12]])
    slopes = jax.jit(jax.grad(lambda p: xj.score(p, config, tokens_BT).mean()))(params)
    for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
        assert np.isfinite(slope).all() and np.abs(slope).max() > 0, jax.tree_util.keystr(path)
