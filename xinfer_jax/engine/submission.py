"""What comes in: a prompt and options, checked before anything runs, become a request."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..checks import in_order
from ..errors import InputError, shown
from ..generation.options import Call, GenerateOptions, asked, checked
from ..sampling.choice import answer_keys, check_key
from ..sampling.settings import SamplingConfig
from ..text import encode_prompt, stops_of
from .device import MOST_EOS, MOST_LOGPROBS, MOST_STOPS
from .requests import Answer, Request
from .scheduler import Row

_OF_THE_ENGINE = dict(
    capacity="give it to Engine", impl="give it to Engine", cache_dtype="give it to Engine",
    draft="give draft='lookup' to Engine", use_cache="an engine has pages",
    prefix="an engine shares pages itself", keep_prefix="an engine shares pages itself",
    logits="use generate, or logprobs",
)  # fmt: skip


def request_of(engine: Any, prompt: Any, options: GenerateOptions | None, key: Any, i: int) -> Request:
    """A request to an `Engine`, whose answers draw as those of prompt i of `generate`.

    Raises:
        InputError: what can never be served there.
    """
    options, model = asked(options), engine.model
    for name, why in _OF_THE_ENGINE.items():
        if (value := getattr(options, name)) != getattr(GenerateOptions, name):
            raise InputError(f"{name}={shown(value)} is not for a request: {why}")
    stops = stops_of(options)
    if stops and model.tokenizer is None:
        raise InputError("stop_strings need a tokenizer, which this checkpoint lacks: use stop_token_ids")
    text = isinstance(prompt, str) or in_order(prompt) and len(prompt) and isinstance(prompt[0], Mapping)
    ids = encode_prompt(model, prompt) if text else prompt
    if key is not None:  # from the host, wherever it was: nothing is compiled for it
        data: Any = np.asarray(jax.random.key_data(check_key(key, np.size(key))))
        key = jax.random.wrap_key_data(data[i : i + 1] if data.ndim > 1 else data)
    options = dataclasses.replace(options, stop_strings=(), impl=engine.impl, sampling=_on_host(options))
    call = checked(model.params, model.config, [ids], options, key)
    _check_sizes(engine, call)
    request, prompt_1 = Request(engine, call, model.tokenizer, stops), np.array([0 if call.key.ndim else i])
    for j in range(call.answers):
        answer_1 = np.array([j], np.int32) if call.answers > 1 else None
        key_1 = answer_keys(call.key, prompt_1.astype(np.int32), answer_1)
        row = Row(call.prompts[0], call.options.max_new_tokens)
        request.answers.append(Answer(request, row, key_1))
    return request


def _check_sizes(engine: Any, call: Call) -> None:
    options, need, switch = call.options, call.longest + call.options.max_new_tokens, engine.switches_at
    for name, count, limit in (
        ("logprobs", options.logprobs, MOST_LOGPROBS),
        ("eos_token_ids", len(options.eos_token_ids or ()), MOST_EOS),
        ("stop_token_ids", len(options.stop_token_ids), MOST_STOPS),
    ):
        if count > limit:
            raise InputError(f"{name}: an engine takes {limit} at most, got {count}")
    asked_for = f"prompt of {call.longest} tokens + max_new_tokens {options.max_new_tokens}"
    if need > engine.room:
        raise InputError(
            f"{asked_for} exceeds the {engine.room} that a row of this engine can hold: shorten it, or make"
            " the engine with more capacity or pages"
        )
    if switch is not None and need > switch:
        raise InputError(
            f"{asked_for} exceeds {switch}, beyond which rope type 'longrope' changes its factors:"
            " an engine's rows stay on one side, use generate"
        )


def _on_host(options: GenerateOptions) -> SamplingConfig | list[SamplingConfig]:
    """Its settings without arrays of the device, for which something would be compiled."""
    given = options.sampling

    def one(sampling: Any) -> Any:
        arrays = {name: np.asarray(x) for name, x in vars(sampling).items() if isinstance(x, jax.Array)}
        return dataclasses.replace(sampling, **arrays) if arrays else sampling

    return [*map(one, given)] if isinstance(given, list | tuple) else one(given)
