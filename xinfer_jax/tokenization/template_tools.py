"""`find_template_tools`: whether a chat template uses tools, and how it writes calls of them."""

import dataclasses
import functools
import re
from typing import Any

from ..errors import InputError
from ..tool_calls.tool_call_parser import GEMMA4, HARMONY, HERMES, LLAMA3_JSON, QWEN3_CODER
from .chat_template import render

_NAME = "probe_of_tools"
_QUESTION = "question_of_the_probe"
_SCHEMA = dict(type="object", properties=dict(a=dict(type="string", description="a")), required=["a"])
_TOOL = dict(type="function", function=dict(name=_NAME, description="A probe.", parameters=_SCHEMA))
_CALL = dict(id="call00001", type="function", function=dict(name=_NAME, arguments=dict(a="b")))
_USER = dict(role="user", content=_QUESTION)
# How each form begins a call.
_CALLS = {
    QWEN3_CODER: rf"<tool_call>\s*<function={_NAME}>",
    HERMES: rf'<tool_call>\s*\{{\s*"name":\s*"{_NAME}",\s*"arguments":',
    LLAMA3_JSON: rf'\{{\s*"name":\s*"{_NAME}",\s*"parameters":',
    GEMMA4: rf"<\|tool_call>call:{_NAME}\{{",
    HARMONY: rf"to=functions\.{_NAME}\b.*<\|message\|>",
}


@dataclasses.dataclass(frozen=True)
class TemplateTools:
    """What a chat template does with tools."""

    used: bool  # the tools of a request are in its prompt
    format: str | None  # how it writes calls, one of `TOOL_FORMATS`; None: in another form


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
    if _NAME not in with_tool or with_tool == rendered(_USER):
        return TemplateTools(False, None)
    called = rendered(_USER, dict(role="assistant", content="", tool_calls=[_CALL]), tools=[_TOOL])
    call = called.rpartition(_QUESTION)[2]
    return TemplateTools(True, next((name for name, start in _CALLS.items() if re.search(start, call)), None))
