"""Measures the perplexity of a checkpoint on a text, over sliding windows.

    python scripts/perplexity.py --text=TEXT.txt                                     # the bundled model
    python scripts/perplexity.py --model=DIR --text=TEXT.txt --window=2048 --stride=512 --quantize=int8

The text is one sequence of tokens. Every token except the first is scored once, given all tokens before it in
its window: at least window - stride tokens, if the text has that many (as in Hugging Face's guide to
perplexity). A smaller stride is slower, and its windows give more context. The last line is one JSON object.
Exit code 2: bad input, reported in one line on standard error.
"""

from launcher import start

# isort: split
import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import xinfer_jax as xj
from xinfer_jax.checks import check_integer
from xinfer_jax.plugins import names

MODEL = flags.DEFINE_string(
    "model", None, "Checkpoint: a directory, or a name owner/name on the hub. Default: the bundled model."
)
TEXT = flags.DEFINE_string("text", None, "File of UTF-8 text.")
WINDOW = flags.DEFINE_integer(
    "window", None, "Tokens of a window. Default: 1024, or the model's context if that is smaller."
)
STRIDE = flags.DEFINE_integer(
    "stride", None, "Tokens from the start of one window to the next. Default: half a window."
)
DTYPE = flags.DEFINE_string(
    "dtype", None, "float32, bfloat16 or float16. Default: float32 on CPU, bfloat16 on GPU and TPU."
)
QUANTIZE = flags.DEFINE_string("quantize", None, "int8 or int4: quantize the weights. Default: none.")
CACHE_DTYPE = flags.DEFINE_enum(
    "cache_dtype",
    None,
    [*names("cache dtype"), "float32", "bfloat16", "float16"],
    "Score through a KV cache of this dtype. Default: without a cache.",
)
_TOKENS = 4096  # tokens of a batch, approximately


def main(argv: list[str]) -> None:
    if TEXT.value is None:
        raise xj.InputError("no text: give --text=FILE")
    text = Path(TEXT.value).expanduser().read_text(encoding="utf-8")
    model = xj.load_model(MODEL.value, dtype=DTYPE.value, quantize=QUANTIZE.value)
    if model.tokenizer is None:
        raise xj.InputError(f"{MODEL.value} has no tokenizer.json, which is needed to score a text")
    limit = model.config.context_length
    window = min(1024, limit) if WINDOW.value is None else WINDOW.value
    stride = window // 2 if STRIDE.value is None else STRIDE.value
    check_integer("window", window, 2, limit)
    check_integer("stride", stride, 1, window - 1)
    ids = model.tokenizer.encode(text)
    if len(ids) < 2:
        raise xj.InputError(
            f"{TEXT.value} has {len(ids)} tokens: the first one cannot be scored, so give a longer text"
        )
    start = time.perf_counter()
    logprobs = log_probabilities(model, ids, window, stride)
    seconds = round(time.perf_counter() - start, 1)
    nats = -logprobs.mean()
    scored_bytes = len(text.encode()) - len(model.tokenizer.decode(ids[:1]).encode())
    bits = -logprobs.sum() / math.log(2) / max(1, scored_bytes)
    print(
        f"{len(ids)} tokens, {len(logprobs)} scored in {seconds} s: {nats:.4f} nats per token, "
        f"perplexity {math.exp(nats):.4f}, {bits:.4f} bits per byte"
    )
    report = dict(
        model=MODEL.value, text=TEXT.value, weights=model.load_stats.dtype, window=window, stride=stride,
        tokens=len(ids), scored_tokens=len(logprobs), bytes=scored_bytes, nats_per_token=nats,
        perplexity=math.exp(nats), bits_per_byte=bits, seconds=seconds,
    )  # fmt: skip
    print(json.dumps(report))


def windows(ids: list[int], window: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Windows of the text, each with the number of its last tokens that no window before had."""
    end = 0
    for begin in range(0, len(ids), stride):
        before = end
        end = min(begin + window, len(ids))
        yield ids[begin:end], end - before
        if end == len(ids):
            return


def log_probabilities(model: xj.Model, ids: list[int], window: int, stride: int) -> np.ndarray:
    """Log-probability of every token except the first, float64."""
    chunks = list(windows(ids, window, stride))
    logprobs = []
    rows = min(len(chunks), max(1, _TOKENS // window)) if CACHE_DTYPE.value is None else 1
    for at in range(0, len(chunks), rows):
        # All batches have one shape, for one compiled program.
        tokens_BT = np.zeros((rows, min(window, len(ids))), np.int32)
        num_tokens_B = np.zeros(rows, np.int32)
        batch = chunks[at : at + rows]
        for i, (chunk, _) in enumerate(batch):
            tokens_BT[i, : len(chunk)] = chunk
            num_tokens_B[i] = len(chunk)
        logprobs_BT = np.asarray(score(model, tokens_BT, num_tokens_B), np.float64)
        logprobs += [
            row[max(0, len(chunk) - 1 - new) : len(chunk) - 1]
            for row, (chunk, new) in zip(logprobs_BT, batch, strict=False)
        ]
    return np.concatenate(logprobs)


def score(model: xj.Model, tokens_BT: np.ndarray, num_tokens_B: np.ndarray) -> jax.Array:
    """Log-probabilities [B, T-1] of every token but the first of each row."""
    if CACHE_DTYPE.value is None:
        return xj.score(model.params, model.config, tokens_BT, num_tokens_B)
    cache = xj.init_cache(model.config, *tokens_BT.shape, CACHE_DTYPE.value)
    return score_through(cache, model.params, model.config, tokens_BT, num_tokens_B)


@partial(jax.jit, static_argnames="config")
def score_through(cache, params, config, tokens_BT, num_tokens_B):
    """`score` of tokens whose keys and values attention reads from this cache."""
    logits_BTV, _ = xj.forward(params, config, tokens_BT, cache, num_tokens_B)
    logprobs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1], -1)
    return jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], -1)[..., 0]


if __name__ == "__main__":
    start(main)
