"""Text in, text out: conversation → chat template → ids → `generate` or `stream` → text."""

import dataclasses
import math
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .errors import InputError
from .generation import generate, stream
from .loading import Model
from .options import GenerateOptions, GenerateOutput
from .tokenizer import IncrementalDecoder, Tokenizer

Prompt = str | Sequence[dict[str, Any]]  # a text, or messages [{"role": …, "content": …}, …]


def encode_prompt(model: Model, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
    """The ids that `generate_text` would start from.

    Args:
        model: from `load_model`.
        prompt: the user's text, or a whole conversation.
        system: the system message put before a text.
        raw: take the text as it is, without the chat template.

    A text for a checkpoint without a chat template is taken as it is, with a warning.

    Raises:
        InputError: no tokenizer, an empty prompt, no messages, more text than the context limit can hold, or
            a system message or a conversation with raw or for a checkpoint without a chat template.
    """
    tokenizer = _tokenizer(model)
    if raw and (system is not None or not isinstance(prompt, str)):
        raise InputError(
            "raw takes a text as it is: it goes with neither a system message nor a conversation"
        )
    if isinstance(prompt, str) and not prompt.strip():
        raise InputError(f"the prompt is empty: got {prompt!r}, give some text")
    if not isinstance(prompt, str) and not (
        prompt and all(isinstance(message, Mapping) for message in prompt)
    ):
        raise InputError(f"a prompt is a text, or messages [{{'role': …, 'content': …}}, …], got {prompt!r}")
    if not raw and tokenizer.chat_template is None and isinstance(prompt, str) and system is None:
        warnings.warn("this checkpoint has no chat template: the prompt is continued as it is", stacklevel=2)
        raw = True
    text = prompt
    if not raw:
        messages = prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
        messages = [*([] if system is None else [{"role": "system", "content": system}]), *messages]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    limit = model.config.context_length
    # Far beyond the limit tokenizing takes long, and the length often says enough.
    if len(text) > 16 * limit and (fewest := tokenizer.fewest_ids(text)) > limit:
        raise InputError(
            f"the prompt has at least {fewest} tokens ({len(text)} characters), which exceeds the model's"
            f" context limit {limit}: shorten the prompt"
        )
    ids = tokenizer.encode(text, add_special_tokens=raw)
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
    options = options or GenerateOptions()
    if options.stop_strings:
        return "".join(stream_text(model, prompt, options, key=key, system=system, raw=raw))
    ids = encode_prompt(model, prompt, system=system, raw=raw)
    _one_answer(options)
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
) -> Generator[str, bool | None, GenerateOutput]:
    """`generate_text`, piece by piece, whole characters only; the generator's return value is the
    `GenerateOutput`.

    The text ends before the first of `options.stop_strings`, across token borders too; the output's tokens go
    up to the one that completed it. `send(True)` ends the answer.
    """
    ids, options = encode_prompt(model, prompt, system=system, raw=raw), with_eos(model, options)
    _one_answer(options)
    if any(not isinstance(stop, str) or not stop for stop in options.stop_strings):
        raise InputError(
            f"stop_strings must be texts that are not empty, got {tuple(options.stop_strings)!r}"
        )
    tokens = stream(model.params, model.config, [ids], dataclasses.replace(options, stop_strings=()), key=key)
    return _pieces(_tokenizer(model), tokens, options.stop_strings)


class TokenText(NamedTuple):
    """A token as a reader sees it."""

    id: int
    text: str
    probability: float


def alternatives_text(model: Model, out: GenerateOutput, row: int = 0) -> list[list[TokenText]]:
    """For each chosen token: itself, then `options.logprobs` alternatives with their probabilities before any
    processor.
    """
    tokenizer = _tokenizer(model)
    if out.alternatives is None:
        raise InputError("this output has no alternatives: generate with GenerateOptions(logprobs=…)")

    def readable(token: int, logprob: float) -> TokenText:
        return TokenText(token, tokenizer.decode([token], skip_special_tokens=False), math.exp(logprob))

    return [[readable(*pair) for pair in ((t.id, t.logprob), *t.top)] for t in out.alternatives[row]]


def with_eos(model: Model, options: GenerateOptions | None) -> GenerateOptions:
    """Options with the model's EOS ids where they name none; an id that the model cannot produce is left
    out.
    """
    options = options or GenerateOptions()
    possible = tuple(i for i in _tokenizer(model).eos_token_ids if 0 <= i < model.config.vocab_size)
    return options if options.eos_token_ids else dataclasses.replace(options, eos_token_ids=possible)


def _one_answer(options: GenerateOptions) -> None:
    if options.n != 1:
        raise InputError(
            f"n={options.n}: the text functions give one answer; from Python, generate and the tokenizer give"
            " several"
        )


def _pieces(
    tokenizer: Tokenizer,
    steps: Generator[list[int | None], bool | None, GenerateOutput],
    stops: Sequence[str],
) -> Generator[str, bool | None, GenerateOutput]:
    decoder, held, told = IncrementalDecoder(tokenizer), "", None
    while True:
        try:
            (token,) = steps.send(told)
        except StopIteration as stop:
            if rest := "" if told else _until_stop(held + decoder.finish(), stops)[0]:
                yield rest
            return stop.value
        held += decoder.push(token)
        text, told = _until_stop(held, stops)
        ready = len(text) if told else len(text) - max((_overlap(text, stop) for stop in stops), default=0)
        asked = (yield text[:ready]) if ready else None
        told, held = told or asked or None, text[ready:]


def _until_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string in it, and whether there is one."""
    found = [at for at in map(text.find, stops) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise InputError(
            "this checkpoint has no tokenizer.json: text needs a tokenizer (from Python, token ids work"
            " without one)"
        )
    return model.tokenizer
