"""`LLAMA3_JSON`: calls as Llama 3 writes them, one or several with semicolons between: {"name": …,
"parameters": {…}}.

There is no mark around them: an answer begins with one, perhaps after <|python_tag|>.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from .call_grammar import any_function
from .json_call import JSONCallParser, json_call_rules
from .tool_call_form import FILLER, PROBE, ToolCallForm

_PYTHON_TAG = "<|python_tag|>"


def _find_start(text: str, ended: bool) -> int | None:
    body = text.lstrip()
    tag = _PYTHON_TAG if body.startswith(_PYTHON_TAG) else ""
    body = body.removeprefix(tag).lstrip()
    objects = body.removeprefix("[").lstrip()
    if not ended and (not objects or not tag and _PYTHON_TAG.startswith(body)):
        return None
    return len(text) - len(objects) if objects.startswith("{") else -1


def _grammar(parameters: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    """Returns the grammar of an answer. It is one call: the template writes no more."""
    rules = json_call_rules(parameters, "parameters")
    return "\n".join([f"start: {any_function(len(parameters))}", *rules])


LLAMA3_JSON = ToolCallForm(
    name="llama3_json",
    in_template=rf'\{{\s*"name":\s*"{PROBE}",\s*"parameters":',
    parser=partial(JSONCallParser, is_marked=False),
    grammar=_grammar,
    end=";",
    next_start="{",
    filler=FILLER,
    find_start=_find_start,
)
