"""The tools of a request: descriptions are checked, and earlier calls are prepared for a chat template."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import is_sequence
from ..errors import InputError, format_value

TOOL_FORM = "{'type': 'function', 'function': {'name': …, 'parameters': …}}"  # in error messages
MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Returns a copy of the tools after checking them.

    Source: the OpenAI API.

    Args:
        tools: [{"type": "function", "function": {"name": …, "description": …, "parameters": …}}, …]. The
            parameters are a JSON Schema of an object, or absent. Keywords of the schema that are null are
            left out.

    Raises:
        InputError: there is another value, there are too many functions, or several have one name.
    """
    if not is_sequence(tools):
        raise InputError(f"tools must be a list of {TOOL_FORM}, got {format_value(tools)}")
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools has {len(tools)} functions, more than the limit of {MAX_TOOLS}: give fewer")
    found = [_check_tool(tool) for tool in tools]
    names = Counter(tool["function"]["name"] for tool in found)
    name, count = names.most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise InputError(f"tools has {count} functions named {name!r}: give each another name")
    return found


def _check_tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise InputError(f"each of tools must be {TOOL_FORM}, got {format_value(tool)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"a tool's name must have 1 to 128 letters, digits or any of _.:/-, got {format_value(name)}"
        )
    if (parameters := function.get("parameters")) is None:
        return {**tool, "function": dict(function)}
    if (schema := _object_schema(parameters)) is None:
        raise InputError(
            f"the parameters of tool {name!r} must be the JSON Schema of an object,"
            f" got {format_value(parameters)}"
        )
    return {**tool, "function": {**function, "parameters": schema}}


def _object_schema(schema: Any) -> dict[str, Any] | None:
    """Returns the schema without keywords that are null, as some MCP servers write. None: it is not of
    objects.
    """
    if not isinstance(schema, Mapping):
        return None
    found = {key: value for key, value in schema.items() if value is not None}
    types = found.get("type", "object")
    is_of_objects = types == "object" or is_sequence(types) and "object" in types
    if not is_of_objects or not isinstance(found.get("properties", {}), Mapping):
        return None
    if not isinstance(found.get("required", []), list | tuple):
        return None
    return found | ({"type": "object"} if "type" in found else {})


def parameter_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the schema of each function's parameters, by name. tools: the result of `check_tools`."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def template_message(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Returns a copy of the message in the form that templates expect:

    - Arguments of its calls are objects, as templates iterate over them. The API sends JSON texts.
    - Content that is None is the refusal, or an empty text.
    - Calls that are None or an empty list are left out.
    - `reasoning` is also there as `reasoning_content`, and as `thinking` for a template of Harmony.

    Raises:
        InputError: the message has calls of another form, arguments that are no JSON object, or calls for a
            template without calls. Or it has several calls for Harmony, whose template writes one per
            message.
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
    """Returns the message for gpt-oss's template. Next to a call it takes a text as `content` or as
    `thinking`, and writes either on the channel `analysis`. If a message has both, they become one
    `thinking`.
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
