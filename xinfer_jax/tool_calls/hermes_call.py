"""`HERMES`: calls as Qwen 2.5 and 3 write them, <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from collections.abc import Mapping
from typing import Any

from .call_grammar import CALL_END, CALL_START, marked_calls
from .json_call import JSONCallParser, json_call_rules
from .tool_call_form import FILLER, PROBE, ToolCallForm


def _grammar(parameters: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    return marked_calls(json_call_rules(parameters, "arguments"), len(parameters), several)


HERMES = ToolCallForm(
    name="hermes",
    in_template=rf'<tool_call>\s*\{{\s*"name":\s*"{PROBE}",\s*"arguments":',
    parser=JSONCallParser,
    grammar=_grammar,
    start=CALL_START,
    end=CALL_END,
    first="{[",
    list_start="[",
    next_start="{",
    filler=FILLER,
)
