"""A whole response as JSON, made in slices: neither all its values nor the lock are held for long."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..api.bodies import Asked
from ..api.responses import echoed, response, shown_logprobs
from ..api.token_texts import TokenTexts
from ..checkpoint.tokenizer import Tokenizer
from ..generation.options import GenerateOutput
from ..sampling.logprobs import TokenLogprobs

_SLICE = 64  # tokens whose log-probabilities are formatted at a time
_VALUES = 2**13  # numbers of a list that are encoded at a time


def encoded(value: Any) -> bytes:
    """As JSON."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def encoded_list(values: Sequence[Any], at_once: int = _VALUES) -> bytes:
    """A list as JSON, so many values at a time."""
    parts = (encoded(values[at : at + at_once])[1:-1] for at in range(0, len(values), at_once))
    return b"[%s]" % b",".join(parts)


def encoded_object(fields: dict[str, Any], **ready: bytes) -> bytes:
    """An object as JSON; ready: values of further fields that are JSON already."""
    parts = [b"%s:%s" % (encoded(name), value) for name, value in ready.items()]
    own = encoded(fields)[1:-1]
    return b"{%s}" % b",".join([own, *parts] if own else parts)


def encoded_response(
    asked: Asked,
    outs: Sequence[GenerateOutput],
    noted: Sequence[Sequence[TokenLogprobs]],
    tokenizer: Tokenizer,
    opened: bool,
    check: Callable[[], None],
    **head: Any,
) -> bytes:
    """`response` as JSON. check: called before each choice, and raises where it is not wanted any more; head:
    its further fields; the usage among them.
    """
    choices = list[bytes]()
    plain = dataclasses.replace(asked, logprobs=None)
    for prompt, out, of_prompt in zip(asked.prompts, outs, noted, strict=True):
        of_one = dataclasses.replace(plain, prompts=[prompt])
        for j, tokens in enumerate(out.tokens):
            check()
            one = dataclasses.replace(
                out, tokens=[tokens], logprobs=[[]], finish_reason=[out.finish_reason[j]], alternatives=None
            )
            (choice,) = response(of_one, [one], [[]], tokenizer, opened)["choices"]
            choice["index"] = len(choices)
            ready = {}
            if asked.logprobs is not None:
                chosen = out.alternatives[j] if out.alternatives is not None and asked.max_tokens else []
                known = [*echoed(prompt, of_prompt), *chosen] if asked.echo else chosen
                ready["logprobs"] = _encoded_logprobs(tokenizer, asked, known)
            choices.append(encoded_object(choice, **ready))
    empty = response(dataclasses.replace(asked, prompts=[]), [], [], tokenizer, opened)
    del empty["choices"]
    return encoded_object(empty | head, choices=b"[%s]" % b",".join(choices))


def _encoded_logprobs(tokenizer: Tokenizer, asked: Asked, known: Sequence[Any]) -> bytes:
    texts = TokenTexts(tokenizer, asked.skip_special_tokens)
    lists = {name: list[bytes]() for name in shown_logprobs(texts, asked, [])}
    for i in range(0, len(known), _SLICE):
        for name, values in shown_logprobs(texts, asked, known[i : i + _SLICE]).items():
            lists[name].append(encoded(values)[1:-1])
    return encoded_object({}, **{name: b"[%s]" % b",".join(parts) for name, parts in lists.items()})


def encoded_embeddings(vectors: Iterator[bytes], model: str, tokens: int) -> bytes:
    """The response of /v1/embeddings; vectors: each as JSON."""
    data = (
        encoded_object(dict(object="embedding", index=i), embedding=vector)
        for i, vector in enumerate(vectors)
    )
    head = dict(object="list", model=model, usage=dict(prompt_tokens=tokens, total_tokens=tokens))
    return encoded_object(head, data=b"[%s]" % b",".join(data))
