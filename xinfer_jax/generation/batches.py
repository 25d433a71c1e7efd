"""Lists of token ids → arrays, in sizes that few programs serve."""

from collections.abc import Sequence

import numpy as np

from ..cache.kv_cache import cache_bytes
from ..memory import check_memory
from ..sampling.choice import Context, SamplingConfig
from ..weights.params import cache_dtype, tree_bytes
from .doors import bucket, new_context
from .options import Call


def lengths(prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [B]."""
    return np.array([len(p) for p in prompts], np.int32)


def padded(prompts: Sequence[Sequence[int]], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] padded on the right to a bucket (or to `most`, if that is less), and their numbers
    [B].
    """
    num_tokens_B = lengths(prompts)
    return _matrix(prompts, min(bucket(int(num_tokens_B.max())), most)), num_tokens_B


def check_room(call: Call, rows: int) -> None:
    """Raises InputError where weights, caches and results of a call exceed the memory there is.

    Args:
        call: from `checked`.
        rows: prompts times answers, or beams.
    """
    options, config = call.options, call.config
    new, vocabulary = bucket(options.max_new_tokens), config.vocab_size
    noted = 12 + 16 * options.logprobs + 4 * vocabulary * options.logits  # of each new token
    need = tree_bytes(call.params) + rows * (new * noted + 4 * bucket(call.longest) + 9 * vocabulary)
    if not options.use_cache:  # the whole sequence passes through the model
        need += 4 * rows * bucket(call.longest + options.max_new_tokens) * config.hidden_size
    models = [(call.params, config)] + [(d.params, d.config) for d in [options.draft] if hasattr(d, "params")]
    for tree, model in models if options.use_cache else ():
        need += cache_bytes(model, rows, call.capacity, options.cache_dtype or cache_dtype(tree))
    check_memory(
        need,
        f"a model, {rows} rows of {call.capacity} tokens and what they give",
        "ask for fewer max_new_tokens or rows, or a smaller cache dtype",
    )


def tokens_seen(prompts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """bool [B, V]: which tokens each prompt holds, for the repetition penalty."""
    seen_BV = np.zeros((len(prompts), vocab_size), bool)
    for row, prompt in zip(seen_BV, prompts, strict=True):
        row[prompt] = True
    return seen_BV


def prompt_context(
    prompts: Sequence[Sequence[int]], sampling_B: SamplingConfig, vocab_size: int, room: int | None
) -> Context:
    """What the processors look at before the first choice: of each prompt which tokens it holds, and where
    there is `room` their order.
    """
    return new_context(
        sampling_B, tokens_seen(prompts, vocab_size), None if room is None else _matrix(prompts, room)
    )


def eos_array(eos_token_ids: Sequence[int]) -> np.ndarray:
    """Padded to a multiple of 4 with an id that no token has, so that another number of them compiles
    nothing.
    """
    ids = list(eos_token_ids)
    return np.array(ids + [-1] * (-len(ids) % 4 if ids else 4), np.int32)


def _matrix(prompts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    tokens_BT = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens_BT
