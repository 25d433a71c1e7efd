"""`find_template_tools` finds out whether a chat template uses tools, and how it writes calls of them."""

import dataclasses
import functools
import re
from typing import Any

from ..errors import InputError
from ..tool_calls.tool_call_form import PROBE, tool_call_forms
from .chat_template import render

_QUESTION = "question_of_the_probe"
_SCHEMA = dict(type="object", properties=dict(a=dict(type="string", description="a")), required=["a"])
_TOOL = dict(type="function", function=dict(name=PROBE, description="A probe.", parameters=_SCHEMA))
_CALL = dict(id="call00001", type="function", function=dict(name=PROBE, arguments=dict(a="b")))
_USER = dict(role="user", content=_QUESTION)


@dataclasses.dataclass(frozen=True)
class TemplateTools:
    """The use that a chat template makes of tools."""

    used: bool  # the tools of a request are in its prompt
    format: str | None  # how it writes calls, the name of a `ToolCallForm`; None: in another


@functools.lru_cache(8)
def find_template_tools(template: str, special_tokens: tuple[tuple[str, str], ...]) -> TemplateTools:
    """Renders small conversations with and without a tool, and one in which it is called. special_tokens:
    names and texts of the tokens that the template may use.
    """
    variables = dict(tools=None, documents=None, add_generation_prompt=True) | dict(special_tokens)

    def rendered(*messages: dict[str, Any], **more: Any) -> str:
        try:
            return render(template, variables | dict(messages=list(messages)) | more)
        except InputError:
            return ""

    with_tool = rendered(_USER, tools=[_TOOL])
    if PROBE not in with_tool or with_tool == rendered(_USER):
        return TemplateTools(False, None)
    called = rendered(_USER, dict(role="assistant", content="", tool_calls=[_CALL]), tools=[_TOOL])
    call = called.rpartition(_QUESTION)[2]
    found = (form.name for form in tool_call_forms() if re.search(form.in_template, call))
    return TemplateTools(True, next(found, None))
