"""The arrays of a call, made of lists of token ids, in sizes rounded up so that few programs are compiled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .. import plugin
from ..cache.kv_cache import KVCache, cache_bytes, init_cache
from ..config.model_config import ModelConfig
from ..memory_plan import MemoryPlan, program_parts
from ..sampling.batched_settings import has_all_settings
from ..sampling.context import init_context
from ..sampling.random_keys import FOLD_IN, FOLD_IN_ANSWER
from ..weights.params import Params, cache_dtype, tree_bytes
from .executor import bucket, device_chunk_size
from .executor_choice import executor_class
from .state import DecodeState, RowSettings, new_state
from .validation import ValidatedCall

_EOS_MULTIPLE = 8  # the number of end ids is rounded up to a multiple


def pad_prompts(prompts: Sequence[Sequence[int]], most: int, rows: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] and the length of each row [B]. T is the bucket of the longest prompt, at most `most`.
    Padding is on the right. If there are more `rows` than prompts, empty rows follow.
    """
    num_tokens_B = np.zeros(max(rows, len(prompts)), np.int32)
    num_tokens_B[: len(prompts)] = [len(prompt) for prompt in prompts]
    width = min(bucket(int(num_tokens_B.max())), most)
    return token_matrix(prompts, len(num_tokens_B), width), num_tokens_B


def generation_plan(call: ValidatedCall, rows: int) -> MemoryPlan:
    """The bytes of a call that decodes so many rows. Raises InputError if they exceed the memory."""
    options = call.options
    config = call.config
    new = options.max_new_tokens
    per_token = 12 + 16 * options.logprobs + 4 * config.vocab_size * options.logits
    _, fraction = _mesh_of(call.params)
    parts = dict(weights=tree_bytes(call.params), cache=0)
    models = [(call.params, config)] if options.use_cache else []
    if hasattr(options.draft, "params"):  # needs the cache
        models.append((options.draft.params, options.draft.config))
    for tree, model in models:
        dtype = options.cache_dtype or cache_dtype(tree)
        parts["cache"] += cache_bytes(model, rows, call.capacity, dtype)
    if options.use_cache:
        width = executor_class(call.params).prefill_width(call.longest, call.prompt_rows)
        tokens = call.prompt_rows * min(width, device_chunk_size(np.empty(call.prompt_rows)))
    else:
        tokens = rows * bucket(call.longest + new)  # of whole sequences
    parts |= program_parts(config, tokens, rows, 18 if has_all_settings(call.sampling_B) else 9)
    parts["results"] = rows * (bucket(new) * per_token + 4 * bucket(call.longest))
    plan = MemoryPlan(parts, fraction)
    plan.check("ask for fewer max_new_tokens or rows, or a smaller cache dtype")
    return plan


def new_cache(call: ValidatedCall, params: Params, config: ModelConfig, capacity: int, rows: int) -> KVCache:
    """An empty cache for the model of the call, or for its draft model."""
    dtype = call.options.cache_dtype or cache_dtype(params)
    mesh, _ = _mesh_of(params)
    return init_cache(config, rows, capacity, dtype, mesh)


def _mesh_of(params: Params) -> tuple[Any, float]:
    """The mesh that divides the parameters, and the fraction of them in one memory; None and 1: none does."""
    find = plugin("mesh", "of params")
    return find(params) if find else (None, 1)


def prompt_of_row(call: ValidatedCall) -> np.ndarray:
    """int32 [R]: the prompt of each row. The answers of a prompt are consecutive rows; padding rows
    follow.
    """
    prompt_R = np.repeat(np.arange(len(call.prompts), dtype=np.int32), call.answers)
    return np.pad(prompt_R, (0, call.rows - len(prompt_R)))


def initial_state(call: ValidatedCall, prompt_R: np.ndarray, dfas: Sequence[Any] = ()) -> DecodeState:
    """The rows of a call before their first token, in new arrays. Padding rows have ended.

    Args:
        prompt_R: from `prompt_of_row`.
        dfas: the `Dfa`s of the rows' grammars; None for rows without one.
    """
    options = call.options
    config = call.config
    answers = call.answers
    R = len(prompt_R)
    real = answers * len(call.prompts)
    size = bucket(options.max_new_tokens)
    sampling_R = jax.tree.map(lambda setting_B: np.asarray(setting_B)[prompt_R], call.sampling_B)
    answer_R = np.arange(R, dtype=np.int32) % answers if answers > 1 else None
    rows = [call.prompts[i] for i in prompt_R[:real]]
    ordered = has_all_settings(sampling_R) or options.draft is not None or call.callers is not None
    history_size = call.history_size if ordered else None
    ends = call.end_ids
    eos_RE = np.full((R, -(-max(1, len(ends)) // _EOS_MULTIPLE) * _EOS_MULTIPLE), -1, np.int32)
    eos_RE[:, : len(ends)] = ends
    limit_R = np.where(np.arange(R) < real, options.max_new_tokens, 0).astype(np.int32)
    alternatives = None
    if options.logprobs or options.logits:
        from ..sampling.logprobs import empty_alternatives  # optional: alternatives

        alternatives = empty_alternatives(R, size, options.logprobs, config.vocab_size, options.logits)
    key_R = answer_keys(call.key, prompt_R, answer_R)
    settings = RowSettings(key_R, sampling_R, eos_RE, limit_R)
    sizes = history_size, size, call.num_masks
    automata = None
    if dfa := next(filter(None, dfas), None):
        padded = [*dfas, *[None] * (R - len(dfas))]
        own_RE = eos_RE[:, : len(options.eos_token_ids or ())]  # without stop ids, which a grammar may use
        automata = dfa.automata_of_rows(padded, config.vocab_size, own_RE, equal_sizes=True)
    state = state_of_rows(rows, config.vocab_size, settings, *sizes, automata)
    state = dataclasses.replace(state, alternatives=alternatives)
    if call.callers is None:
        return state
    from ..sampling.caller_processors import start_rows  # optional: functions of callers

    return start_rows(call.callers, prompt_R, state)


def state_of_rows(
    prompts: Sequence[Sequence[int]],
    vocab_size: int,
    settings: RowSettings,
    history_size: int | None,
    output_size: int,
    num_masks: int = 1,
    automata: Any = None,
) -> DecodeState:
    """Rows before their first token, in new arrays.

    Args:
        prompts: of the first rows; the others are padding.
        settings: of all rows.
        history_size: tokens of a row whose order is kept; None: no setting needs the order.
        output_size: tokens of a row in `tokens_BT`.
        num_masks, automata: as in `init_context`.
    """
    R = len(settings.limit_B)
    seen_RV = np.zeros((R, vocab_size), bool)
    length_R = np.zeros(R, np.int32)
    for row, prompt in enumerate(prompts):
        seen_RV[row, prompt] = True
        length_R[row] = len(prompt)
    history_RS = None if history_size is None else token_matrix(prompts, R, history_size)
    tokens = seen_RV, history_RS
    context = init_context(settings.sampling_B, length_R, settings.eos_BE, *tokens, num_masks, automata)
    return new_state(settings.key_B, settings.sampling_B, settings.limit_B, context, output_size)


def token_matrix(prompts: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """int32 [rows, width]: the ids of each prompt, then zeros. Further rows are zeros."""
    tokens_BT = np.zeros((rows, width), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=False):
        row[: len(prompt)] = prompt
    return tokens_BT


def answer_keys(key: jax.Array, prompt_R: np.ndarray, answer_R: np.ndarray | None) -> jax.Array:
    """`row_keys` for rows that continue prompts; another number of prompts compiles no program.

    Args:
        key: from `check_key`: one, or one per prompt.
        prompt_R: int32, which prompt each row continues.
        answer_R: int32, index of the answer among its prompt's answers, as of `FOLD_IN_ANSWER`; None: all are
            first ones.
    """
    if key.ndim:  # indexed on the host: no program is compiled
        data_R = np.asarray(jax.random.key_data(key))[prompt_R]
        key_R = jax.random.wrap_key_data(data_R, impl="threefry2x32")
    else:
        key_R = FOLD_IN(key, prompt_R)
    return key_R if answer_R is None else FOLD_IN_ANSWER(key_R, answer_R)
