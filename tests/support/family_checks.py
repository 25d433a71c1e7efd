"""Checks that a family's small model has to pass, whatever its layers are.

`model` is the result of `small_model`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases

import xinfer_jax as xj

NEW = 8
OPTIONS = xj.GenerateOptions(max_tokens=NEW, eos_token_ids=())
CACHED = dataclasses.replace(OPTIONS, capacity=128)


def small_model(case: cases.Case, **changes: Any) -> tuple[Any, xj.ModelConfig, list[list[int]]]:
    """Parameters and config, and prompts (5, 23 and 77 tokens). changes: of config.json, as fewer layers,
    which compile in less time.
    """
    config = cases.Case(case.hf | changes).config
    params = cases.params_from(config, cases.random_tensors(config, 3))
    return params, config, cases.prompts(case)


def check_chunks(model: Any, splits: tuple[int, ...]) -> xj.KVCache:
    """The logits after each prompt, in chunks with these ends, are those without a cache. Rows that have
    ended wait next to others. Returns the cache.
    """
    params, config, prompts = model
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts)
    forward = jax.jit(xj.forward, static_argnames="config")
    logits_BTV = forward(params, config, tokens_BT, None, num_tokens_B)[0]
    cache = xj.init_cache(config, len(prompts), 128)
    found = {}
    for first, end in zip((0, *splits), splits, strict=False):
        count_B = np.clip(num_tokens_B - first, 0, end - first)
        logits_BV, cache = xj.prefill(params, config, tokens_BT[:, first:end], count_B, cache)
        found |= {i: logits_BV[i] for i in np.flatnonzero(count_B)}
    for i, n in enumerate(num_tokens_B):
        np.testing.assert_allclose(found[i], logits_BTV[i, n - 1], atol=1e-4)
    assert cache.length_B.tolist() == num_tokens_B.tolist()
    return cache


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


def check_packed_texts(model: Any) -> None:
    """Two texts in one row have the log-probabilities that each has alone."""
    params, config, prompts = model
    row_1T = np.array([sum(prompts[:2], [])])
    ids_1T = np.repeat([0, 1], [5, 23])[None]
    together_1T = xj.score(params, config, row_1T, segment_ids_BT=ids_1T).logprobs_BT[0]
    alone = [xj.score(params, config, np.array([prompt])).logprobs_BT[0] for prompt in prompts[:2]]
    np.testing.assert_allclose(together_1T[:4], alone[0], atol=1e-4)
    np.testing.assert_allclose(together_1T[5:], alone[1], atol=1e-4)


def check_engine_bits(model: Any, cache_dtype: str = "int8") -> None:
    """An engine over pages of this dtype gives the same bits alone and next to others, and the tokens of
    `generate`.
    """
    params, config, prompts = model
    whole = xj.Model(params, config)
    expected = xj.generate(params, config, prompts, dataclasses.replace(CACHED, cache_dtype=cache_dtype))
    with xj.Engine(whole, rows=2, capacity=128, chunk=64, cache_dtype=cache_dtype) as engine:
        alone = [engine.submit(prompt, OPTIONS).result() for prompt in prompts]
        together = [request.result() for request in [engine.submit(prompt, OPTIONS) for prompt in prompts]]
        assert engine.stats.hits
    assert [out.tokens[0] for out in alone] == expected.tokens
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs


def check_drafts_are_undone(model: Any, out: xj.types.GenerateOutput) -> None:
    """States after wrong draft tokens are those without them, also in a prefix. out: of `CACHED`."""
    params, config, prompts = model
    rows = [*zip(prompts, out.tokens, strict=True)]
    rows += rows[:1]  # calls are padded to four rows
    tail = jnp.array([prompt[-5:] + tokens for prompt, tokens in rows])
    first_B1 = jnp.array([[len(prompt) - 5] for prompt, _ in rows])

    def half_right(history_BS, length_B, count):  # of two draft tokens the second is wrong
        at_BT = jnp.minimum(length_B[:, None] - first_B1 + jnp.arange(count), 4 + NEW)
        return (jnp.take_along_axis(tail, at_BT, 1) + jnp.arange(count)) % cases.VOCAB

    options = dataclasses.replace(CACHED, draft=half_right, draft_tokens=2, keep_prefix=True)
    drafted = xj.generate(params, config, prompts, options)
    assert drafted.tokens == out.tokens and min(drafted.stats.acceptance) > 0.3
    longer = [p + t + [1] for p, t in zip(prompts, out.tokens, strict=True)]
    again = xj.generate(params, config, longer, dataclasses.replace(CACHED, prefix=drafted.prefix))
    assert again.tokens == xj.generate(params, config, longer, CACHED).tokens
    assert again.stats.reused_tokens == sum(map(len, prompts)) + 3 * (NEW - 1)


def check_prefix_of_states(model: Any, out: xj.types.GenerateOutput, path: Path) -> None:
    """A prefix in a file is reused where a text goes on after its state, and not where it leaves it before.
    out: of `CACHED`, with its prefix.
    """
    params, config, prompts = model
    xj.save_prefix(params, config, out.prefix, path)
    prefix = xj.load_prefix(params, config, path)
    longer = [p + t + [1, 2] for p, t in zip(prompts, out.tokens, strict=True)]
    whole = [len(p) + NEW - 1 for p in prompts]
    assert prefix.shared(longer).tolist() == whole
    assert prefix.shared([p[:-1] + [0, 0] for p in longer]).tolist() == whole
    assert prefix.shared([p[:4] + [0] for p in longer]).tolist() == [0, 0, 0]
    options = dataclasses.replace(CACHED, prefix=prefix)
    expected = xj.generate(params, config, longer, CACHED).tokens
    assert xj.generate(params, config, longer, options).tokens == expected
