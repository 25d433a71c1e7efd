"""The answers of a chat in the form of OpenAI's Responses API: items of output, and events of a stream."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from .bodies import ParsedBody
from .responses_request import ResponsesRequest, encrypt_reasoning

# Fields of a request that the response has in any case, and their values without one.
_DEFAULTS: dict[str, Any] = dict(
    instructions=None, max_output_tokens=None, metadata={}, parallel_tool_calls=True, reasoning=None,
    text=dict(format=dict(type="text")), tool_choice="auto", tools=[], top_logprobs=0,
)  # fmt: skip
_REPEATED_IF_GIVEN = ("user", "safety_identifier", "prompt_cache_key", "service_tier")


class OutputItems:
    """Makes the items of a response from the new parts of a chat's answer, and the events for them.

    The answer's parts come one after another: reasoning, a text, calls. Each is an item.
    """

    def __init__(self, response_id: str, encrypts_reasoning: bool, with_logprobs: bool):
        """Makes the items of one answer.

        Args:
            response_id: the id of the response. Ids of items contain it.
            encrypts_reasoning: True: items of reasoning also have `encrypted_content`.
            with_logprobs: True: texts have log-probabilities.
        """
        self.items: list[dict[str, Any]] = []  # those that have ended
        self.reasoning = ""  # all of it
        self._response_id = response_id
        self._encrypts = encrypts_reasoning
        self._with_logprobs = with_logprobs
        self._open: dict[str, Any] | None = None  # the item that goes on
        self._texts: list[str] = []  # parts of its text or arguments
        self._entries = TokenEntries()
        self._call: int | None = None  # the index of its call

    def push(self, delta: Mapping[str, Any], entries: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Takes the new part of an answer, and returns its events.

        Args:
            delta: a chunk's `delta`, or the whole message of a chat.
            entries: log-probabilities of its tokens, in the form of a chat.
        """
        events: list[dict[str, Any]] = []
        self._entries.append(entries)
        if text := delta.get("reasoning"):
            events += self._push_text("reasoning", text, [])
        if text := delta.get("content"):
            events += self._push_text("message", text, entries)
        for i, call in enumerate(delta.get("tool_calls") or []):
            events += self._push_call(call.get("index", i), call)
        return events

    def finish(self, is_cut: bool) -> list[dict[str, Any]]:
        """Ends the last item, and returns the events that tell of it. is_cut: the answer had no more room."""
        events = [] if self._open or self.items else self._begin("message")
        return events + self._end("incomplete" if is_cut else "completed")

    def _push_text(self, kind: str, text: str, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        events = []
        if self._open is None or self._open["type"] != kind:
            events = self._end() + self._begin(kind)
        self._texts.append(text)
        event = self._event(f"{_text_name(kind)}.delta", content_index=0, delta=text)
        if kind == "message":
            event["logprobs"] = list(entries)
        return [*events, event]

    def _push_call(self, index: int, call: Mapping[str, Any]) -> list[dict[str, Any]]:
        function = call["function"]
        events = []
        if self._call != index:
            events = self._end() + self._begin("function_call", call_id=call["id"], name=function["name"])
            self._call = index
        if text := function["arguments"]:
            self._texts.append(text)
            events.append(self._event("function_call_arguments.delta", delta=text))
        return events

    def _begin(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        prefix, more = _KINDS[kind]
        item_id = f"{prefix}_{self._response_id}_{len(self.items)}"
        self._open = dict(id=item_id, type=kind, status="in_progress", **more, **fields)
        self._texts = []
        events = [self._event("output_item.added", with_id=False, item=dict(self._open))]
        if kind != "function_call":
            part = _part(kind, "", [] if self._with_logprobs else None)
            events.append(self._event("content_part.added", content_index=0, part=part))
        return events

    def _end(self, status: str = "completed") -> list[dict[str, Any]]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        item = self._open
        kind = item["type"]
        text = "".join(self._texts)
        events = []
        if kind == "function_call":
            item |= dict(arguments=text, status=status if _is_object(text) else "incomplete")
            events.append(self._event("function_call_arguments.done", arguments=text))
        else:
            entries = self._entries.of_text(text) if self._with_logprobs else None
            part = _part(kind, text, entries)
            item |= dict(content=[part], status=status)
            own: dict[str, Any] = dict(logprobs=entries or []) if kind == "message" else {}
            events.append(self._event(f"{_text_name(kind)}.done", content_index=0, text=text, **own))
            events.append(self._event("content_part.done", content_index=0, part=part))
        if kind == "reasoning":
            self.reasoning += text
            item |= dict(encrypted_content=encrypt_reasoning(text)) if self._encrypts else {}
        events.append(self._event("output_item.done", with_id=False, item=item))
        self.items.append(item)
        self._open = self._call = None
        return events

    def _event(self, name: str, with_id: bool = True, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        own = dict(item_id=self._open["id"]) if with_id else {}
        return dict(type=f"response.{name}", output_index=len(self.items), **own, **fields)


# Of each type of item: the prefix of its id, and what it has at its beginning.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = dict(
    reasoning=("rs", dict(summary=[], content=[])),
    message=("msg", dict(role="assistant", content=[])),
    function_call=("fc", dict(arguments="")),
)


def _text_name(kind: str) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _part(kind: str, text: str, entries: list[dict[str, Any]] | None) -> dict[str, Any]:
    if kind == "reasoning":
        return dict(type="reasoning_text", text=text)
    return dict(type="output_text", text=text, annotations=[]) | (
        {} if entries is None else dict(logprobs=entries)
    )


def _is_object(text: str) -> bool:
    """Returns True if the text is a complete JSON object, so the arguments of a call are complete."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class TokenEntries:
    """The log-probabilities of all tokens of an answer, also of reasoning, calls and EOS, in the form of a
    chat.
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._ends: list[int] = []  # in bytes of the text
        self._text = bytearray()
        self._at = 0  # where the last text that was asked for ends

    def append(self, entries: Sequence[dict[str, Any]]) -> None:
        for entry in entries:
            self._text += bytes(entry["bytes"] or entry["token"].encode())
            self._ends.append(len(self._text))
        self._entries += entries

    def of_text(self, text: str) -> list[dict[str, Any]]:
        """Returns the entries of the tokens that a part of the answer has. Ask for the parts in their
        order.
        """
        wanted = text.encode("utf-8", "replace")
        begin = self._text.find(wanted, self._at)
        if begin < 0 or not wanted:
            return []
        self._at = begin + len(wanted)
        return self._entries[bisect_right(self._ends, begin) : bisect_left(self._ends, self._at) + 1]


def response_fields(request: ResponsesRequest, parsed: ParsedBody, head: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a response before its answer begins.

    Args:
        request: the body of the request.
        parsed: the same request as a chat.
        head: id, created, model and seed.
    """
    given = request.repeated
    sampling: Any = parsed.options.sampling
    fields = dict(
        id=head["id"], object="response", created_at=head["created"], model=head["model"],
        seed=head["seed"], status="in_progress", background=False, error=None, incomplete_details=None,
        output=[], previous_response_id=None, store=False, truncation="disabled", usage=None,
        temperature=sampling.temperature, top_p=sampling.top_p,
    )  # fmt: skip
    fields |= {name: given.get(name, value) for name, value in _DEFAULTS.items()}
    return fields | {name: given[name] for name in _REPEATED_IF_GIVEN if name in given}


def ended_fields(is_cut: bool, completed_at: int, usage: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that change when the answer has ended.

    Args:
        is_cut: the answer had no more room.
        completed_at: seconds since 1970.
        usage: the result of `responses_usage`.
    """
    if is_cut:
        details = dict(reason="max_output_tokens")
        return dict(status="incomplete", incomplete_details=details, usage=usage)
    return dict(status="completed", completed_at=completed_at, usage=usage)


def failed_fields(message: str) -> dict[str, Any]:
    """Returns the fields that change when the answer fails."""
    return dict(status="failed", error=dict(code="server_error", message=message))


def responses_usage(usage: Mapping[str, Any], reasoning_tokens: int) -> dict[str, Any]:
    """Returns the counts of tokens in this API's names.

    Args:
        usage: the usage of a chat, with `prompt_tokens_details`.
        reasoning_tokens: the number of tokens in the text of the reasoning.
    """
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    own = {name: usage[name] for name in ("draft_tokens_details",) if name in usage}
    return dict(
        input_tokens=usage["prompt_tokens"],
        input_tokens_details=dict(cached_tokens=cached, cache_write_tokens=0),
        output_tokens=usage["completion_tokens"],
        output_tokens_details=dict(reasoning_tokens=reasoning_tokens),
        total_tokens=usage["total_tokens"],
        **own,
    )
