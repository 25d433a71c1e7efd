"""The arrays of a call, made of lists of token ids, in sizes rounded up so that few programs are compiled."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..cache.kv_cache import KVCache, cache_bytes, init_cache
from ..config.model_config import ModelConfig
from ..memory_plan import MemoryPlan, program_parts
from ..registry import plugin
from ..sampling.batched_settings import has_all_settings
from ..sampling.context import init_context
from ..sampling.random_keys import answer_keys
from ..sampling.sampling_config import SamplingConfig
from ..weights.params import Params, activation_dtype, cache_dtype, tree_bytes
from .executor import bucket, device_chunk_size, run_program
from .executor_choice import executor_class
from .state import DecodeState, RowSettings, new_state
from .validation import ValidatedCall

_EOS_MULTIPLE = 8  # the number of end ids is rounded up to a multiple


def pad_prompts(prompts: Sequence[Sequence[int]], most: int, rows: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [B, T] and the length of each row [B]. T is the bucket of the longest prompt, at most
    `most`. Padding is on the right. If there are more `rows` than prompts, empty rows follow.
    """
    num_tokens_B = np.zeros(max(rows, len(prompts)), np.int32)
    num_tokens_B[: len(prompts)] = [len(prompt) for prompt in prompts]
    width = min(bucket(int(num_tokens_B.max())), most)
    return token_matrix(prompts, len(num_tokens_B), width), num_tokens_B


def generation_plan(call: ValidatedCall, rows: int) -> MemoryPlan:
    """Returns the bytes of a call that decodes this number of rows. Raises InputError if they exceed the
    memory.
    """
    options = call.options
    config = call.config
    new = options.max_tokens
    per_id = 4 * options.logits + options.support / 8
    per_token = 12 + 16 * options.logprobs + math.ceil(config.vocab_size * per_id)
    _, fraction = _mesh_of(call.params)
    parts = dict(weights=tree_bytes(call.params), cache=0)
    models = [(call.params, config)] if options.use_cache else []
    draft: Any = options.draft
    head: Any = None
    if hasattr(draft, "params"):  # needs the cache
        head = getattr(draft, "head", None)
        models.append((call.params if head else draft.params, draft.config))
        counted = set(map(id, jax.tree.leaves(call.params)))  # a head, or the model itself, is among them
        parts["draft"] = tree_bytes([x for x in jax.tree.leaves(draft.params) if id(x) not in counted])
    for tree, model in models:
        dtype = options.cache_dtype or cache_dtype(tree)
        parts["cache"] += cache_bytes(model, rows, call.capacity, dtype)
    if head and options.keep_prefix:  # `FeatureRows`
        itemsize = activation_dtype(call.params).itemsize
        parts["cache"] += rows * call.capacity * head.feature_size * itemsize
    if options.use_cache:
        width = executor_class(call.params).prefill_width(call.longest, call.prompt_rows)
        tokens = call.prompt_rows * min(width, device_chunk_size(np.empty(call.prompt_rows)))
    else:
        tokens = rows * bucket(call.longest + new)  # of whole sequences
    parts |= program_parts(config, tokens, rows, 18 if has_all_settings(call.sampling_B) else 9)
    parts["results"] = rows * (bucket(new) * per_token + 4 * bucket(call.longest))
    plan = MemoryPlan(parts, fraction)
    plan.check("ask for fewer max_tokens or rows, or a smaller cache dtype")
    return plan


def new_cache(call: ValidatedCall, params: Params, config: ModelConfig, capacity: int, rows: int) -> KVCache:
    """Returns an empty cache for the model of the call, or for its draft model."""
    dtype = call.options.cache_dtype or cache_dtype(params)
    mesh, _ = _mesh_of(params)
    return init_cache(config, rows, capacity, dtype, mesh)


def _mesh_of(params: Params) -> tuple[Any, float]:
    """Returns the mesh that divides the parameters, and the fraction of them in one memory. None and 1: no
    mesh divides them.
    """
    find = plugin("mesh", "of params")
    return find(params) if find else (None, 1)


def prompt_of_row(call: ValidatedCall) -> np.ndarray:
    """Returns, int32 [R], the prompt of each row. The answers of a prompt are consecutive rows. Padding rows
    follow.
    """
    prompt_R = np.repeat(np.arange(len(call.prompts), dtype=np.int32), call.answers)
    return np.pad(prompt_R, (0, call.rows - len(prompt_R)))


class StateSizes(NamedTuple):
    """Sizes of the arrays of rows, for which programs are compiled."""

    history: int | None  # tokens of a row whose order is kept; None: no setting needs the order
    output: int  # tokens of a row in `tokens_BT`
    masks: int = 1  # `num_masks` of `init_context`
    end_ids: int = _EOS_MULTIPLE  # that end a row, at most
    alternatives: int | None = None  # recorded of each token; None: nothing is recorded
    logits: bool = False  # they are recorded too
    support: bool = False  # sampling masks are recorded too


def _sizes(call: ValidatedCall) -> StateSizes:
    options = call.options
    ordered = has_all_settings(call.sampling_B) or options.draft is not None or call.callers is not None
    history = call.history_size if ordered else None
    end_ids = -(-max(1, len(call.end_ids)) // _EOS_MULTIPLE) * _EOS_MULTIPLE
    is_recorded = options.logprobs or options.logits or options.support
    output = bucket(options.max_tokens)
    recorded = options.logprobs if is_recorded else None, options.logits, options.support
    return StateSizes(history, output, call.num_masks, end_ids, *recorded)


def initial_state(call: ValidatedCall, prompt_R: np.ndarray, dfas: Sequence[Any] = ()) -> DecodeState:
    """Returns the rows of a call before their first token, in new arrays. Padding rows have ended. prompt_R:
    the result of `prompt_of_row`. dfas: the `Dfa` of each row's grammar, None for a row without one.
    """
    V = call.config.vocab_size
    R = len(prompt_R)
    sizes = _sizes(call)
    answer_R = np.arange(R, dtype=np.int32) % call.answers
    settings = settings_of_rows(call, call.sampling_B, prompt_R, answer_R, sizes.end_ids)
    real = call.answers * len(call.prompts)
    settings.limit_B[real:] = 0
    automata = None
    if any(dfas):
        from ..grammar.automaton import Dfa  # optional: grammars

        own_RE = settings.eos_BE[:, : len(call.options.eos_token_ids or ())]
        padded = [*dfas, *[None] * (R - len(dfas))]
        automata = Dfa.automata_of_rows(padded, V, own_RE, equal_sizes=True)
    prompts = [call.prompts[i] for i in prompt_R[:real]]
    state = state_of_rows(prompts, V, settings, sizes, automata)
    if sizes.alternatives is not None:
        from ..sampling.logprobs import empty_alternatives  # optional: alternatives

        recorded = empty_alternatives(R, sizes.output, sizes.alternatives, V, sizes.logits, sizes.support)
        state = dataclasses.replace(state, alternatives=recorded)
    if call.callers is None:
        return state
    from ..sampling.caller_processors import start_rows  # optional: functions of callers

    return start_rows(call.callers, prompt_R, state, run_program)


def settings_of_rows(
    call: ValidatedCall, sampling_B: SamplingConfig, prompt_R: np.ndarray, answer_R: np.ndarray, end_ids: int
) -> RowSettings:
    """Returns the settings of rows of a call, in NumPy arrays. sampling_B: the settings of the prompts.
    prompt_R, answer_R: the prompt of each row, and the number of its answer. end_ids: columns for EOS ids,
    and stop ids at the end.
    """
    options = call.options
    sampling_R = jax.tree.map(lambda setting_B: np.asarray(setting_B)[prompt_R], sampling_B)
    eos = options.eos_token_ids or ()
    eos_RE = np.full((len(prompt_R), end_ids), -1, np.int32)
    eos_RE[:, : len(eos)] = eos
    eos_RE[:, end_ids - len(options.stop_token_ids) :] = options.stop_token_ids
    limit_R = np.full(len(prompt_R), options.max_tokens, np.int32)
    return RowSettings(answer_keys(call.key, prompt_R, answer_R), sampling_R, eos_RE, limit_R)


def state_of_rows(
    prompts: Sequence[Sequence[int]],
    vocab_size: int,
    settings: RowSettings,
    sizes: StateSizes,
    automata: Any = None,
) -> DecodeState:
    """Returns rows before their first token, in new arrays. prompts: the prompts of the first rows. The other
    rows are padding. settings: the settings of all rows. automata: see `init_context`.
    """
    R = len(settings.limit_B)
    seen_RV = np.zeros((R, vocab_size), bool)
    length_R = np.zeros(R, np.int32)
    for row, prompt in enumerate(prompts):
        seen_RV[row, prompt] = True
        length_R[row] = len(prompt)
    history_RS = None if sizes.history is None else token_matrix(prompts, R, sizes.history)
    tokens = seen_RV, history_RS
    context = init_context(settings.sampling_B, length_R, settings.eos_BE, *tokens, sizes.masks, automata)
    key_R = jax.random.wrap_key_data(settings.key_B, impl="threefry2x32")
    return new_state(key_R, settings.sampling_B, settings.limit_B, context, sizes.output)


def token_matrix(prompts: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Returns int32 [rows, width]: the ids of each prompt, then zeros. Further rows are zeros."""
    tokens_BT = np.zeros((rows, width), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=False):
        row[: len(prompt)] = prompt
    return tokens_BT
