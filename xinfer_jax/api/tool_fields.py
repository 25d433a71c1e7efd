"""Parses the fields of tools: which functions an answer may or must call."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..checkpoint.conversation import check_template_tools
from ..checkpoint.tokenizer import Tokenizer
from ..errors import InputError, format_value
from .fields import BodyError, Fields

_CHOICES = ("none", "auto", "required")


@dataclasses.dataclass(frozen=True)
class ToolSettings:
    """The tools of a request.

    Attributes:
        tools: that the prompt describes.
        format: how the model writes calls, one of `TOOL_FORMATS`.
        required: names of the functions of which the answer has to call one; (): it need not call any.
        most_calls: calls after this many are dropped; None: no limit.
    """

    tools: list[dict[str, Any]]
    format: str
    required: tuple[str, ...]
    most_calls: int | None


def parse_tools(fields: Fields, tokenizer: Tokenizer | None) -> ToolSettings | None:
    """The tools of a body; None: it has none, or tool_choice "none", with which the prompt leaves them out.

    Raises:
        BodyError: with the name of the field at fault.
    """
    given = fields.values.get("tools")
    choice = fields.values.get("tool_choice", "auto")
    parallel = fields.boolean("parallel_tool_calls", True)
    if not isinstance(choice, Mapping) and choice not in _CHOICES:
        said = format_value(choice)
        raise BodyError("tool_choice", f"tool_choice must be none, auto, required or a function, got {said}")
    if given in (None, []):
        if choice not in ("none", "auto"):
            raise BodyError("tool_choice", "tool_choice needs tools beside it: give tools, or leave it out")
        return None
    if choice == "none":
        return None
    if tokenizer is None:
        raise BodyError("tools", "tools need a chat template, which this checkpoint lacks: leave them out")
    try:
        tools = check_template_tools(tokenizer, given)
    except InputError as error:
        raise BodyError("tools", error) from error
    call_format = tokenizer.template_tools.format
    if call_format is None:
        raise BodyError(
            "tools",
            "the chat template of this model writes calls in a form that is not served: leave tools out",
        )
    if choice != "auto":
        said = (
            "tool_choice is none or auto here: a call that is required needs a grammar, which is not served"
        )
        raise BodyError("tool_choice", said)
    names = tuple(tool["function"]["name"] for tool in tools)
    if isinstance(choice, Mapping):
        return ToolSettings(tools, call_format, (_chosen_name(choice, names),), 1)
    required = names if choice == "required" else ()
    return ToolSettings(tools, call_format, required, None if parallel else 1)


def _chosen_name(choice: Mapping[str, Any], names: tuple[str, ...]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        form = "{'type': 'function', 'function': {'name': …}}"
        raise BodyError("tool_choice", f"tool_choice as an object must be {form}, got {format_value(choice)}")
    if name not in names:
        raise BodyError("tool_choice", f"tool_choice names {format_value(name)}, which is none of tools")
    return name
