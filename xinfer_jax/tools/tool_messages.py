"""Prepares a conversation with calls of tools for a chat template."""

import json
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value


def template_message(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The message as templates expect it, copied.

    Arguments of its calls are objects, as templates iterate over them; the API sends JSON texts. Where it has
    calls, content that is None is an empty text. `reasoning` is also there as `reasoning_content`.

    Raises:
        InputError: calls of another form, arguments that are no JSON object, or a template without calls.
    """
    found = dict(message)
    if isinstance(found.get("reasoning"), str):
        found.setdefault("reasoning_content", found["reasoning"])
    if calls := found.get("tool_calls"):
        if "tool_calls" not in template:
            raise InputError("the chat template of this model does not use tool_calls: leave them out")
        found["tool_calls"] = [
            _template_call(call) for call in (calls if isinstance(calls, list) else [calls])
        ]
        if found.get("content") is None:
            found["content"] = ""
    return found


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
