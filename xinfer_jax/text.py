"""Text in, text out: conversation → chat template → ids → `generate` or `stream` → text."""

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax

from .errors import InputError
from .generate import GenerateOptions, GenerateOutput, generate, stream
from .loading import Model
from .tokenizer import IncrementalDecoder, Tokenizer

Prompt = str | Sequence[dict[str, Any]]  # a text, or messages [{"role": …, "content": …}, …]


def encode_prompt(model: Model, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
    """The ids that `generate_text` would start from.

    Args:
        model: from `load_model`.
        prompt: the user's text, or a whole conversation.
        system: the system message put before a text.
        raw: take the text as it is, without the chat template.

    Raises:
        InputError: no tokenizer, an empty prompt, no messages, or a system message or a conversation with raw.
    """
    tokenizer = _tokenizer(model)
    if raw and (system is not None or not isinstance(prompt, str)):
        raise InputError("raw takes a text as it is: it goes with neither a system message nor a conversation")
    if isinstance(prompt, str) and not prompt.strip():
        raise InputError(f"the prompt is empty: got {prompt!r}, give some text")
    if not isinstance(prompt, str) and not (prompt and all(isinstance(message, Mapping) for message in prompt)):
        raise InputError(f"a prompt is a text, or messages [{{'role': …, 'content': …}}, …], got {prompt!r}")
    if raw:
        ids = tokenizer.encode(prompt)
    else:
        messages = prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
        messages = [*([] if system is None else [{"role": "system", "content": system}]), *messages]
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True), add_special_tokens=False)
    if not ids:
        raise InputError(f"the prompt {prompt!r} gives no tokens")
    return ids


def generate_text(
    model: Model,
    prompt: Prompt,
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
    system: str | None = None,
    raw: bool = False,
) -> str:
    """The answer to a prompt, as one text. EOS ids come from the model where `options` names none.

    Args:
        model: from `load_model`.
        prompt, system, raw: as in `encode_prompt`.
        options: None: greedy, 128 tokens at most.
        key: PRNG key, needed when sampling.

    Raises:
        InputError: as `encode_prompt` and `generate`.
    """
    ids = encode_prompt(model, prompt, system=system, raw=raw)
    out = generate(model.params, model.config, [ids], with_eos(model, options), key=key)
    return _tokenizer(model).decode(out.tokens[0])


def stream_text(
    model: Model,
    prompt: Prompt,
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
    system: str | None = None,
    raw: bool = False,
) -> Generator[str, None, GenerateOutput]:
    """`generate_text`, piece by piece, whole characters only; the generator's return value is the `GenerateOutput`."""
    ids = encode_prompt(model, prompt, system=system, raw=raw)
    return _pieces(_tokenizer(model), stream(model.params, model.config, [ids], with_eos(model, options), key=key))


def with_eos(model: Model, options: GenerateOptions | None) -> GenerateOptions:
    """Options with the model's EOS ids where they name none; an id that the model cannot produce is left out."""
    options = options or GenerateOptions()
    possible = tuple(i for i in _tokenizer(model).eos_token_ids if 0 <= i < model.config.vocab_size)
    return options if options.eos_token_ids else dataclasses.replace(options, eos_token_ids=possible)


def _pieces(tokenizer: Tokenizer, steps: Generator[list[int | None], None, GenerateOutput]) -> Generator[str, None, GenerateOutput]:
    decoder = IncrementalDecoder(tokenizer)
    while True:
        try:
            (token,) = next(steps)
        except StopIteration as stop:
            if rest := decoder.finish():
                yield rest
            return stop.value
        if piece := decoder.push(token):
            yield piece


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise InputError("this checkpoint has no tokenizer.json: text needs a tokenizer (from Python, token ids work without one)")
    return model.tokenizer
