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
            parameters are a JSON Schema of an object, or absent.

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
    parameters = function.get("parameters")
    if not _is_object_schema({} if parameters is None else parameters):
        raise InputError(
            f"the parameters of tool {name!r} must be the JSON Schema of an object,"
            f" got {format_value(parameters)}"
        )
    return {**tool, "function": dict(function)}


def _is_object_schema(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        return False
    required = schema.get("required", [])
    return isinstance(schema.get("properties", {}), Mapping) and isinstance(required, list | tuple)


def parameter_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each function's parameters, by name. tools: from `check_tools`."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
