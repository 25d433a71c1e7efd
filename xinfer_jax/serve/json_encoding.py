"""Encodes a response as JSON in slices: neither all of its values nor the GIL are held for long."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..api.bodies import ParsedBody
from ..api.responses import TokenTextDecoder, format_logprobs, response_choices, response_object
from ..generation.options import GenerateOutput
from ..sampling.logprobs import TokenLogprobs
from ..tokenization.tokenizer import Tokenizer

_SLICE = 64  # tokens whose log-probabilities are formatted at a time
_VALUES = 2**13  # numbers of a list that are encoded at a time


def to_json(value: Any) -> bytes:
    """Encodes a value as JSON."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def distinct(versions: Sequence[int]) -> list[int]:
    """Returns the versions of the weights that sampled tokens of an answer, in their order, each once."""
    return [*dict.fromkeys(versions)]


def list_to_json(values: Sequence[Any]) -> bytes:
    """Encodes a list as JSON, in slices."""
    return join_json(to_json(values[at : at + _VALUES])[1:-1] for at in range(0, len(values), _VALUES))


def join_json(parts: Iterable[bytes]) -> bytes:
    """Returns a JSON list of parts, each one or several values that are JSON already."""
    return b"[%s]" % b",".join(parts)


def object_to_json(fields: dict[str, Any], **encoded: bytes) -> bytes:
    """Encodes an object as JSON. encoded: values of further fields that are JSON already."""
    parts = [b"%s:%s" % (to_json(name), value) for name, value in encoded.items()]
    first = to_json(fields)[1:-1]
    return b"{%s}" % b",".join([first, *parts] if first else parts)


def objects_to_json(fields: dict[str, Any], name: str, values: Iterable[Any]) -> bytes:
    """Encodes an object as JSON. values: the values of one more field, a list. They are encoded one by
    one.
    """
    return object_to_json(fields, **{name: join_json(map(to_json, values))})


def response_to_json(
    parsed: ParsedBody,
    outs: Sequence[GenerateOutput],
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]],
    tokenizer: Tokenizer,
    check: Callable[[], None],
    **head: Any,
) -> bytes:
    """Encodes the `response_body`. check: raises if no one needs it. head: more fields, as `usage`."""
    choices = list[bytes]()
    versions = [own for out in outs for own in out.token_versions or ()]
    for choice, entries in response_choices(parsed, outs, prompt_logprobs, tokenizer):
        check()
        choice["weight_versions"] = distinct(versions[choice["index"]])
        encoded = {}
        if parsed.logprobs is not None:
            encoded["logprobs"] = _logprobs_to_json(tokenizer, parsed, entries)
        if choice.get("routed_experts"):  # base64: nothing in it is escaped
            encoded["routed_experts"] = b'"%s"' % choice.pop("routed_experts").encode()
        choices.append(object_to_json(choice, **encoded))
    return object_to_json(dict(head, object=response_object(parsed)), choices=join_json(choices))


def _logprobs_to_json(tokenizer: Tokenizer, parsed: ParsedBody, entries: Sequence[Any]) -> bytes:
    texts = TokenTextDecoder(tokenizer, parsed.request_options.skip_special_tokens)
    lists = {name: list[bytes]() for name in format_logprobs(texts, parsed, [])}
    for i in range(0, len(entries), _SLICE):
        for name, values in format_logprobs(texts, parsed, entries[i : i + _SLICE]).items():
            lists[name].append(to_json(values)[1:-1])
    return object_to_json({}, **{name: join_json(parts) for name, parts in lists.items()})


def embeddings_to_json(vectors: Iterator[bytes], model: str, tokens: int) -> bytes:
    """Encodes the response of /v1/embeddings. vectors: each one is JSON already."""
    data = (object_to_json(dict(object="embedding", index=i), embedding=x) for i, x in enumerate(vectors))
    head = dict(object="list", model=model, usage=dict(prompt_tokens=tokens, total_tokens=tokens))
    return object_to_json(head, data=join_json(data))
