"""Prepares a conversation with calls of tools for a chat template."""

import json
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value


def template_message(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The message as templates expect it, copied.

    Arguments of its calls are objects, as templates iterate over them; the API sends JSON texts. Content that
    is None is the refusal, or an empty text; calls that are None or an empty list are left out.
    `reasoning` is also there as `reasoning_content`, and as `thinking` for a template of Harmony.

    Raises:
        InputError: calls of another form, arguments that are no JSON object, a template without calls, or
            several calls in a message of Harmony, whose template writes one.
    """
    found = dict(message)
    if found.get("tool_calls", ()) in (None, []):
        del found["tool_calls"]
    if isinstance(found.get("reasoning"), str):
        found.setdefault("reasoning_content", found["reasoning"])
    if calls := found.get("tool_calls"):
        if "tool_calls" not in template:
            raise InputError("the chat template of this model does not use tool_calls: leave them out")
        found["tool_calls"] = [*map(_template_call, calls if isinstance(calls, list) else [calls])]
    if found.get("content") is None:
        found["content"] = found["refusal"] if isinstance(found.get("refusal"), str) else ""
    return _harmony_message(found) if "<|channel|>" in template else found


def _harmony_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message for gpt-oss's template. Beside a call it takes a text as `content` or as `thinking`, and
    writes either on the channel `analysis`: where a message has both, they are one `thinking`.
    """
    calls = message.get("tool_calls", [])
    if len(calls) > 1:
        raise InputError(
            f"the chat template of this model writes one call per message, got {len(calls)}: send a message"
            " for each, followed by its result"
        )
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        message.setdefault("thinking", reasoning)
    thinking = message.get("thinking")
    if calls and message["content"] and thinking and isinstance(thinking, str):
        message["thinking"] = f"{thinking}\n{message['content']}"
        message["content"] = ""
    return message


def _template_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"each of tool_calls must have a function with a name, got {format_value(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"the arguments of a tool call must be JSON, got {format_value(arguments)}"
            ) from error
    if not isinstance(arguments, Mapping):
        raise InputError(f"the arguments of a tool call must be an object, got {format_value(arguments)}")
    return {**call, "function": {**function, "arguments": arguments}}
