"""Encodes a response as JSON in slices: neither all of its values nor the GIL are held for long."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..api.bodies import ParsedBody
from ..api.responses import echo_entries, format_logprobs, response_body
from ..api.token_texts import TokenTextDecoder
from ..checkpoint.tokenizer import Tokenizer
from ..generation.options import GenerateOutput
from ..sampling.logprobs import TokenLogprobs

_SLICE = 64  # tokens whose log-probabilities are formatted at a time
_VALUES = 2**13  # numbers of a list that are encoded at a time


def to_json(value: Any) -> bytes:
    """Encodes a value as JSON."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def list_to_json(values: Sequence[Any], slice_length: int = _VALUES) -> bytes:
    """Encodes a list as JSON, `slice_length` values at a time."""
    starts = range(0, len(values), slice_length)
    parts = (to_json(values[at : at + slice_length])[1:-1] for at in starts)
    return _join(parts)


def _join(parts: Iterable[bytes]) -> bytes:
    """A JSON list of parts, each one or several values that are JSON already."""
    return b"[%s]" % b",".join(parts)


def object_to_json(fields: dict[str, Any], **encoded: bytes) -> bytes:
    """Encodes an object as JSON. encoded: values of further fields that are JSON already."""
    parts = [b"%s:%s" % (to_json(name), value) for name, value in encoded.items()]
    first = to_json(fields)[1:-1]
    return b"{%s}" % b",".join([first, *parts] if first else parts)


def response_to_json(
    parsed: ParsedBody,
    outs: Sequence[GenerateOutput],
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]],
    tokenizer: Tokenizer,
    check: Callable[[], None],
    **head: Any,
) -> bytes:
    """Encodes the `response_body`.

    Args:
        parsed, outs, prompt_logprobs, tokenizer: as in `response_body`.
        check: called before each choice; it raises if the response is not needed any more.
        head: further fields of the response; `usage` among them.
    """
    choices = list[bytes]()
    without_logprobs = dataclasses.replace(parsed, logprobs=None)
    for prompt, out, of_prompt in zip(parsed.prompts, outs, prompt_logprobs, strict=True):
        parsed_one = dataclasses.replace(without_logprobs, prompts=[prompt])
        for j, tokens in enumerate(out.tokens):
            check()
            reason = out.finish_reason[j]
            out_one = dataclasses.replace(
                out, tokens=[tokens], logprobs=[[]], finish_reason=[reason], alternatives=None
            )
            (choice,) = response_body(parsed_one, [out_one], [[]], tokenizer, len(choices))["choices"]
            encoded = {}
            if parsed.logprobs is not None:
                of_answer = out.alternatives[j] if out.alternatives is not None and parsed.max_tokens else []
                entries = [*echo_entries(prompt, of_prompt), *of_answer] if parsed.echo else of_answer
                encoded["logprobs"] = _logprobs_to_json(tokenizer, parsed, entries)
            choices.append(object_to_json(choice, **encoded))
    empty = response_body(dataclasses.replace(parsed, prompts=[]), [], [], tokenizer)
    del empty["choices"]
    return object_to_json(empty | head, choices=_join(choices))


def _logprobs_to_json(tokenizer: Tokenizer, parsed: ParsedBody, entries: Sequence[Any]) -> bytes:
    texts = TokenTextDecoder(tokenizer, parsed.skip_special_tokens)
    lists = {name: list[bytes]() for name in format_logprobs(texts, parsed, [])}
    for i in range(0, len(entries), _SLICE):
        for name, values in format_logprobs(texts, parsed, entries[i : i + _SLICE]).items():
            lists[name].append(to_json(values)[1:-1])
    return object_to_json({}, **{name: _join(parts) for name, parts in lists.items()})


def embeddings_to_json(vectors: Iterator[bytes], model: str, tokens: int) -> bytes:
    """Encodes the response of /v1/embeddings. vectors: each one is JSON already."""
    data = (
        object_to_json(dict(object="embedding", index=i), embedding=vector)
        for i, vector in enumerate(vectors)
    )
    head = dict(object="list", model=model, usage=dict(prompt_tokens=tokens, total_tokens=tokens))
    return object_to_json(head, data=_join(data))
