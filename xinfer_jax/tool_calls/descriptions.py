"""Checks the tools of a request: what the OpenAI API calls function tools."""

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
    """The tools, copied.

    Source: the OpenAI API.

    Args:
        tools: [{"type": "function", "function": {"name": …, "description": …, "parameters": …}}, …]; the
            parameters are a JSON Schema of an object, or absent; keywords of it that are null are left out.

    Raises:
        InputError: another value, too many functions, or several of one name.
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
    """The schema without keywords that are null, as some MCP servers write; None: it is not of objects."""
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
    """The schema of each function's parameters, by name. tools: from `check_tools`."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
