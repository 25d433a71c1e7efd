"""Lists of token ids → arrays, in sizes that few programs serve."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from ..cache.kv_cache import KVCache, cache_bytes, init_cache
from ..config.model_config import ModelConfig
from ..memory import check_memory
from ..sampling.choice import answer_keys
from ..sampling.context import start
from ..sampling.logprobs import no_alternatives
from ..sampling.settings import is_full
from ..sharding import lies_over, share
from ..weights.params import Params, cache_dtype, tree_bytes
from .loop import bucket
from .options import Call
from .state import DecodeState, new_state

_EOS_MULTIPLE = 8  # that many ids end a row, some of them none


def padded(prompts: Sequence[Sequence[int]], most: int, rows: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] padded on the right to a bucket (or to `most`, if that is less), and their numbers [B];
    B is `rows` where that is more than the prompts: empty ones follow them.
    """
    num_tokens_B = np.zeros(max(rows, len(prompts)), np.int32)
    num_tokens_B[: len(prompts)] = [len(prompt) for prompt in prompts]
    width = min(bucket(int(num_tokens_B.max())), most)
    return _matrix(prompts, len(num_tokens_B), width), num_tokens_B


def check_room(call: Call, rows: int) -> None:
    """Raises InputError where weights, caches and results of so many rows exceed the memory there is."""
    options = call.options
    config = call.config
    new = bucket(options.max_new_tokens)
    vocabulary = config.vocab_size
    noted = 12 + 16 * options.logprobs + 4 * vocabulary * options.logits  # of each new token
    looked_at = (17 if is_full(call.sampling_B) else 9) * vocabulary  # logits and what processors look at
    part = share(lies_over(call.params))
    need = part * tree_bytes(call.params) + rows * (new * noted + 4 * bucket(call.longest) + looked_at)
    if not options.use_cache:  # the whole sequence passes through the model
        need += 4 * rows * bucket(call.longest + options.max_new_tokens) * config.hidden_size
    models = [(call.params, config)] + [(d.params, d.config) for d in [options.draft] if hasattr(d, "params")]
    for tree, model in models if options.use_cache else ():
        need += part * cache_bytes(model, rows, call.capacity, options.cache_dtype or cache_dtype(tree))
    check_memory(
        int(need),
        f"a model, {rows} rows of {call.capacity} tokens and what they give",
        "ask for fewer max_new_tokens or rows, or a smaller cache dtype",
    )


def empty_cache(call: Call, params: Params, config: ModelConfig, capacity: int, rows: int) -> KVCache:
    """As the call asks for it: of its model, or of its draft's."""
    dtype = call.options.cache_dtype or cache_dtype(params)
    return init_cache(config, rows, capacity, dtype, lies_over(params))


def prompts_of_rows(call: Call) -> np.ndarray:
    """int32 [R]: which prompt each row continues: a prompt's answers in turn, then rows that hold nothing."""
    prompt_R = np.repeat(np.arange(len(call.prompts), dtype=np.int32), call.answers)
    return np.pad(prompt_R, (0, call.rows - len(prompt_R)))


def first_state(call: Call, prompt_R: np.ndarray) -> DecodeState:
    """The rows (`prompts_of_rows`) of a call before their first token, in new arrays; padding rows have
    ended.
    """
    options = call.options
    config = call.config
    answers = call.answers
    R = len(prompt_R)
    real = answers * len(call.prompts)
    size = bucket(options.max_new_tokens)
    sampling_R = jax.tree.map(lambda setting_B: np.asarray(setting_B)[prompt_R], call.sampling_B)
    answer_R = np.arange(R, dtype=np.int32) % answers if answers > 1 else None
    seen_RV = np.zeros((R, config.vocab_size), bool)
    length_R = np.zeros(R, np.int32)
    rows = [call.prompts[i] for i in prompt_R[:real]]
    for row, prompt in enumerate(rows):
        seen_RV[row, prompt] = True
        length_R[row] = len(prompt)
    ordered = is_full(sampling_R) or options.draft is not None
    history_RS = _matrix(rows, R, call.history_size) if ordered else None
    ends = call.ending
    eos_RE = np.full((R, -(-max(1, len(ends)) // _EOS_MULTIPLE) * _EOS_MULTIPLE), -1, np.int32)
    eos_RE[:, : len(ends)] = ends
    context = start(sampling_R, length_R, eos_RE, seen_RV, history_RS)
    limit_R = np.where(np.arange(R) < real, options.max_new_tokens, 0).astype(np.int32)
    noted = None
    if options.logprobs or options.logits:
        noted = no_alternatives(R, size, options.logprobs, config.vocab_size, options.logits)
    state = new_state(answer_keys(call.key, prompt_R, answer_R), sampling_R, limit_R, context, size)
    return dataclasses.replace(state, alternatives=noted)


def _matrix(prompts: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """int32 [rows, width]."""
    tokens_BT = np.zeros((rows, width), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=False):
        row[: len(prompt)] = prompt
    return tokens_BT
