"""Answers of /v1/responses: the events of a stream, and the JSON of a whole response."""

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..api.bodies import ParsedBody
from ..api.responses import TokenTextDecoder, format_logprobs, response_choices
from ..api.responses_output import (
    OutputItems,
    ended_fields,
    failed_fields,
    response_fields,
    responses_usage,
)
from ..api.responses_request import ResponsesRequest
from ..errors import format_message
from ..generation.options import GenerateOutput
from ..tokenization.tokenizer import Tokenizer
from .json_encoding import join_json, object_to_json, objects_to_json, to_json

_ABORTED = "the answer was ended by a pause or an update of the server: send the request again"


class ResponsesAnswer:
    """The answer to one request."""

    def __init__(
        self, request: ResponsesRequest, parsed: ParsedBody, tokenizer: Tokenizer, head: Mapping[str, Any]
    ):
        """Makes an answer.

        Args:
            request: the body of the request.
            parsed: the same request as a chat.
            tokenizer: counts the tokens of reasoning.
            head: id, created, model and seed.
        """
        self._parsed = parsed
        self._tokenizer = tokenizer
        self._fields = response_fields(request, parsed, head)
        own_id = head["id"].removeprefix("resp_")
        self._items = OutputItems(own_id, request.encrypts_reasoning, parsed.logprobs is not None)

    async def events(
        self,
        chunks: AsyncIterator[dict[str, Any] | None],
        count_usage: Callable[[Callable[[], dict[str, Any]]], Awaitable[dict[str, Any]]],
        chat_usage: Callable[[], dict[str, Any]],
    ) -> AsyncIterator[dict[str, Any] | None]:
        """Yields the events of a stream, and None whenever nothing is new for a while.

        Args:
            chunks: the chunks of the chat.
            count_usage: calls a function that returns the usage, in a thread.
            chat_usage: the usage of the chat, at its end.
        """
        numbers = itertools.count()

        def numbered(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            return [event | dict(sequence_number=next(numbers)) for event in events]

        def of_response(name: str, **changed: Any) -> dict[str, Any]:
            response = self._fields | dict(output=self._items.items) | changed
            (event,) = numbered([dict(type=f"response.{name}", response=response)])
            return event

        yield of_response("created")
        yield of_response("in_progress")
        is_cut = False
        is_aborted = False
        try:
            async for chunk in chunks:
                if chunk is None:
                    yield None
                    continue
                (choice,) = chunk["choices"]
                entries = choice.get("logprobs", {}).get("content", [])
                events = self._items.push(choice["delta"], entries)
                if reason := choice["finish_reason"]:
                    is_aborted = reason == "abort"
                    is_cut = reason == "length"
                    events += self._items.finish(is_cut or is_aborted)
                for event in numbered(events):
                    yield event
            usage = await count_usage(lambda: self._usage(chat_usage()))
        except Exception as error:  # of the engine: the status has been sent, so it becomes an event
            yield of_response("failed", **failed_fields(format_message(error) or type(error).__name__))
            return
        if is_aborted:
            yield of_response("failed", **failed_fields(_ABORTED), usage=usage)
            return
        changed = ended_fields(is_cut, int(time.time()), usage)
        yield of_response(changed["status"], **changed)

    def whole(self, out: GenerateOutput, chat_usage: Mapping[str, Any]) -> bytes:
        """Returns the JSON of a whole response.

        Args:
            out: the answer of the engine.
            chat_usage: the usage of the chat.
        """
        parsed = self._parsed
        ((choice, tokens),) = response_choices(parsed, [out], [[]], self._tokenizer)
        entries = []
        if parsed.logprobs is not None:
            texts = TokenTextDecoder(self._tokenizer, parsed.request_options.skip_special_tokens)
            entries = format_logprobs(texts, parsed, tokens)["content"]
        is_aborted = choice["finish_reason"] == "abort"
        is_cut = choice["finish_reason"] == "length"
        self._items.push(choice["message"], entries)
        self._items.finish(is_cut or is_aborted)
        ended = ended_fields(is_cut, int(time.time()), self._usage(chat_usage))
        if is_aborted:
            ended = failed_fields(_ABORTED) | dict(usage=ended["usage"])
        fields = self._fields | ended
        del fields["output"]
        return object_to_json(fields, output=join_json(map(_item_to_json, self._items.items)))

    def _usage(self, chat_usage: Mapping[str, Any]) -> dict[str, Any]:
        reasoning = self._items.reasoning
        ids = self._tokenizer.encode(reasoning, add_special_tokens=False) if reasoning else []
        return responses_usage(chat_usage, len(ids))


def _item_to_json(item: dict[str, Any]) -> bytes:
    """Returns the JSON of an item. Log-probabilities are encoded one by one."""
    (part,) = item.get("content") or [{}]
    if "logprobs" not in part:
        return to_json(item)
    without = {name: value for name, value in part.items() if name != "logprobs"}
    content = objects_to_json(without, "logprobs", part["logprobs"])
    fields = {name: value for name, value in item.items() if name != "content"}
    return object_to_json(fields, content=b"[%s]" % content)
