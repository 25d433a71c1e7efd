"""`QWEN3_CODER`: calls as Qwen3-Coder writes them, <function=name> <parameter=name> value </parameter> … .

Models leave out </parameter> at times: then the next parameter ends a value, or the end of the call. At times
they also leave out the mark before the call, and write lists and objects as Python does.
"""

import re
from collections.abc import Mapping
from typing import Any

from .call_grammar import CALL_END, CALL_START, marked_calls, quoted
from .call_parser import length_of_partial_mark
from .parameter_types import Functions
from .tagged_call import TaggedCallParser, Tags, tagged_rules
from .tool_call_form import PROBE, ToolCallForm

_FUNCTION_START = "<function="
_VALUE_END = "</parameter>"
_FUNCTION = re.compile(r"<function=([^<>\s]{1,512})>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,512})>")
_FUNCTION_END = "</function>"
_END_OF_VALUE = re.compile(
    rf"\n?{_VALUE_END}|{CALL_END}|\n?(?=<parameter=(?P<key>[^<>\s]{{1,512}})>)"
    rf"|\n?(?={_FUNCTION_END}\s{{0,64}}(?:{CALL_END}|{CALL_START}|{_FUNCTION_START}))"
)
# What may become such an end, at the end of a text.
_PARTIAL_END = re.compile(
    rf"\n?(?:<parameter=[^<>\s]{{0,512}}|{_FUNCTION_END}\s{{0,64}}(?:<[a-z_/]{{0,12}})?)\Z"
)
_TAGS = Tags(
    function=lambda name: quoted(f"<function={name}>\n"),
    parameter=lambda key: quoted(f"<parameter={key}>\n"),
    value_end="\n</parameter>\n",
    function_end=quoted(_FUNCTION_END),
    no_end=r"~/(?s:.*)<\/(parameter|tool_call)>(?s:.*)/",
)


class _Qwen3CoderCallParser(TaggedCallParser):
    """Parses one call in this form."""

    def __init__(self, functions: Functions):
        super().__init__(functions)
        self._step = self._push_function
        self._verbatim = (self._push_first_of_value, self._push_value)

    def _push_function(self, text: str) -> tuple[int, str]:
        used, name = self._match(text, _FUNCTION_START, _FUNCTION)
        return used, "" if name is None else self._begin_function(name)

    def _push_key(self, text: str) -> tuple[int, str]:
        if text.startswith(_FUNCTION_END):
            self.ended = True
            return len(_FUNCTION_END), "}"
        if _FUNCTION_END.startswith(text):
            return 0, ""
        used, key = self._match(text, "<parameter=", _PARAMETER)
        if key is None:
            return used, ""
        self._step = self._push_first_of_value
        return used, self._begin_parameter(key)

    def _push_first_of_value(self, text: str) -> tuple[int, str]:
        return (int(text[0] == "\n"), self._begin_value()) if text else (0, "")

    def _may_have(self, key: str) -> bool:
        """Returns True if a parameter of this name may follow. Otherwise its tag is text within a value."""
        described = self._parameters.described
        return (described is None or key in described) and key not in self._keys

    def _value_end(self, text: str) -> tuple[int, int | None]:
        ends = _END_OF_VALUE.finditer(text)
        end = next((end for end in ends if end["key"] is None or self._may_have(end["key"])), None)
        if end is None:
            return _undecided(text), None
        self.failed = end[0] == CALL_END
        return end.start(), None if self.failed else end.end()

    def _match(self, text: str, start: str, pattern: re.Pattern[str]) -> tuple[int, str | None]:
        """Matches an opening tag. Returns how far it got, and the name in the tag."""
        if found := pattern.match(text):
            return found.end(), found[1]
        self.failed = not (start.startswith(text) or re.fullmatch(rf"{start}[^<>\s]{{0,512}}", text))
        return 0, None

    def finish(self) -> str:
        return self.push(CALL_END)  # which the end of an answer stands for


def _undecided(text: str) -> int:
    """Returns the start of the last characters that may become the end of a value."""
    if partial := _PARTIAL_END.search(text):
        return partial.start()
    marks = (_VALUE_END, CALL_END, _FUNCTION_END, "<parameter=")
    return len(text) - length_of_partial_mark(text, (*marks, *(f"\n{mark}" for mark in marks)))


def _grammar(parameters: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    return marked_calls(tagged_rules(parameters, _TAGS), len(parameters), several)


QWEN3_CODER = ToolCallForm(
    name="qwen3_coder",
    in_template=rf"<tool_call>\s*<function={PROBE}>",
    parser=_Qwen3CoderCallParser,
    grammar=_grammar,
    start=CALL_START,
    end=CALL_END,
    own_starts=(_FUNCTION_START,),
    first="<",
)
