"""`ToolCallForm`: a form in which models write calls of tools. `plugins.py` has a line for each."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, format_value
from ..plugins import load, names
from .call_parser import CallParser
from .parameter_types import Functions

TOOL_CALLS = "tool calls"  # the kind of its lines in `plugins.py`
PROBE = "probe_of_tools"  # the function that `find_template_tools` lets a template call
FILLER = " \t\r\n}],"  # what models write too much of between a call and the mark after it


@dataclasses.dataclass(frozen=True)
class ToolCallForm:
    """The form of calls of some models: marks, a parser, a grammar, and the way to find it in a chat
    template.

    Attributes:
        name: vLLM's name of the form.
        in_template: a regular expression that finds the beginning of a call of the function `PROBE` in a chat
            template. Its arguments are {"a": "b"}.
        parser: makes the parser of one call, which begins after `start`.
        grammar: returns the Lark text of answers that are calls and nothing else. Its arguments are the
            schema of each function's parameters, and whether an answer may have several calls. It raises
            `InputError` for a schema that calls of this form cannot follow.
        start: the mark before a call. "": there is none, so `find_start` or `has_channels` tells.
        end: the mark after a call.
        own_starts: the beginnings of a call itself, if models leave `start` out at times.
        first: the characters of which one follows `start`, if other forms have the same `start`. "": any.
        list_start: a bracket that models write between `start` and calls. "": none.
        next_start: the beginning of another call that follows within the same marks. "": none does.
        filler: characters that may stand between a call and the text after it. None: whitespace.
        find_start: returns the number of characters of a text, an answer's beginning, that precede its first
            call. None: this is not known yet, unless the text has ended, as the second argument says. -1: it
            begins with no call.
        tokens: marks that are special tokens of tokenizers, but a part of an answer's text.
        has_channels: True: calls stand on a separate channel, while content may follow a grammar.
    """

    name: str
    in_template: str
    parser: Callable[[Functions], CallParser]
    grammar: Callable[[Mapping[str, Mapping[str, Any]], bool], str]
    start: str = ""
    end: str = ""
    own_starts: tuple[str, ...] = ()
    first: str = ""
    list_start: str = ""
    next_start: str = ""
    filler: str | None = None
    find_start: Callable[[str, bool], int | None] | None = None
    tokens: tuple[str, ...] = ()
    has_channels: bool = False


def tool_call_form(name: str) -> ToolCallForm:
    """Returns the form of a name. InputError: it is in no line of `plugins.py`."""
    known = names(TOOL_CALLS)
    if name not in known:
        raise InputError(f"formats may have {', '.join(known)}, got {format_value(name)}: leave it out")
    form: ToolCallForm = load(TOOL_CALLS, name)
    return form


def tool_call_forms() -> list[ToolCallForm]:
    """Returns all forms, in the order of `plugins.py`."""
    return [tool_call_form(name) for name in names(TOOL_CALLS)]
