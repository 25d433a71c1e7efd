"""The work of `xinfer-jax perplexity` after its flags: scores a text, prints nats, perplexity and bits."""

import json
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.kv_cache import init_cache
from ..checkpoint.loading import Model
from ..checks import check_integer
from ..errors import InputError
from ..generation.scoring import score
from ..model.decoder import forward
from .startup import join_processes, open_model, use_compilation_cache
from .terminal import status, write

_TOKENS = 4096  # tokens of a batch, approximately


def measure_perplexity(command: str, flags: Any, text: str) -> int:
    """Prints the perplexity of a text. Returns the exit code. command: the name of the command, for log
    lines.
    """
    use_compilation_cache(command, flags.compilation_cache)
    join_processes()
    checkpoint = open_model(flags.model, flags)
    with status("loading the model"):
        model = checkpoint.read()
    if model.tokenizer is None:
        raise InputError(f"{flags.model} has no tokenizer.json, which is needed to score a text")
    limit = model.config.context_length
    window = check_integer("window", flags.window or min(1024, limit), 2, limit)
    stride = check_integer("stride", flags.stride or window // 2, 1, window - 1)
    ids = model.tokenizer.encode(text)
    if len(ids) < 2:
        raise InputError(
            f"{flags.text} has {len(ids)} tokens: the first one cannot be scored, so give a longer text"
        )
    start = time.perf_counter()
    with status(f"scoring {len(ids)} tokens"):
        logprobs = log_probabilities(model, ids, window, stride, flags.cache_dtype)
    seconds = round(time.perf_counter() - start, 1)
    nats = -logprobs.mean()
    scored_bytes = len(text.encode()) - len(model.tokenizer.decode(ids[:1]).encode())
    bits = -logprobs.sum() / math.log(2) / max(1, scored_bytes)
    write(
        f"{len(ids)} tokens, {len(logprobs)} scored in {seconds} s: {nats:.4f} nats per token, "
        f"perplexity {math.exp(nats):.4f}, {bits:.4f} bits per byte\n"
    )
    report = dict(
        model=flags.model, text=flags.text, weights=model.load_stats and model.load_stats.dtype,
        window=window, stride=stride, tokens=len(ids), scored_tokens=len(logprobs), bytes=scored_bytes,
        nats_per_token=nats, perplexity=math.exp(nats), bits_per_byte=bits, seconds=seconds,
    )  # fmt: skip
    write(f"{json.dumps(report)}\n")
    return 0


def sliding_windows(ids: list[int], window: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Yields windows of the text, each with the number of its last tokens that no window before had."""
    end = 0
    for begin in range(0, len(ids), stride):
        before = end
        end = min(begin + window, len(ids))
        yield ids[begin:end], end - before
        if end == len(ids):
            return


def log_probabilities(
    model: Model, ids: list[int], window: int, stride: int, cache_dtype: str | None
) -> np.ndarray:
    """Returns the log-probability of each token except the first, float64."""
    chunks = list(sliding_windows(ids, window, stride))
    logprobs = []
    rows = min(len(chunks), max(1, _TOKENS // window)) if cache_dtype is None else 1
    for at in range(0, len(chunks), rows):
        # All batches have one shape, for one compiled program.
        tokens_BT = np.zeros((rows, min(window, len(ids))), np.int32)
        num_tokens_B = np.zeros(rows, np.int32)
        batch = chunks[at : at + rows]
        for i, (chunk, _) in enumerate(batch):
            tokens_BT[i, : len(chunk)] = chunk
            num_tokens_B[i] = len(chunk)
        logprobs_BT = np.asarray(_score(model, tokens_BT, num_tokens_B, cache_dtype), np.float64)
        logprobs += [
            row[max(0, len(chunk) - 1 - new) : len(chunk) - 1]
            for row, (chunk, new) in zip(logprobs_BT, batch, strict=False)
        ]
    return np.concatenate(logprobs)


def _score(model: Model, tokens_BT: np.ndarray, num_tokens_B: np.ndarray, cache_dtype: str | None) -> Any:
    """Returns log-probabilities [B, T-1] of each token except the first of each row."""
    if cache_dtype is None:
        return score(model.params, model.config, tokens_BT, num_tokens_B).logprobs_BT
    rows, capacity = tokens_BT.shape
    cache = init_cache(model.config, rows, capacity, cache_dtype)
    return _score_through(cache, model.params, model.config, tokens_BT, num_tokens_B)


@partial(jax.jit, static_argnames="config")
def _score_through(cache, params, config, tokens_BT, num_tokens_B):
    """Runs `score` of tokens whose keys and values attention reads from this cache."""
    logits_BTV, _ = forward(params, config, tokens_BT, cache, num_tokens_B)
    logprobs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1], -1)
    return jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
