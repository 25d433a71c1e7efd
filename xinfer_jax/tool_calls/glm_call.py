"""`GLM45`: calls as GLM 4.5 and later models write them.

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

GLM 4.5 and 4.6 write these lines. Later models write all of it on one line. A text stands in its tags as it
is, with its spaces. It may have </arg_value> in it: a value ends there if the next key or the end of the call
follows. Models leave out <arg_value> at times. A call without </tool_call> is incomplete: more values may
have followed. Source: the chat templates of the models.
"""

import re
from collections.abc import Mapping
from typing import Any

from .call_grammar import CALL_END, CALL_START, marked_calls, quoted
from .call_parser import length_of_partial_mark
from .parameter_types import Functions
from .tagged_call import TaggedCallParser, Tags, tagged_rules
from .tool_call_form import PROBE, ToolCallForm

_KEY_START = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE_START = "<arg_value>"
_VALUE_END = "</arg_value>"
_NAME = re.compile(rf'([^\s<>{{}}\[\]"]{{1,512}})\s{{0,64}}(?={_KEY_START}|{CALL_END})')
_PARTIAL_NAME = re.compile(r'[^\s<>{}\[\]"]{1,512}\s{0,64}(?:<[a-z_/]{0,10})?')
_KEY = re.compile(rf"{_KEY_START}\s{{0,64}}([^<>\s][^<>]{{0,511}}){_KEY_END}")
_PARTIAL_KEY = re.compile(rf"{_KEY_START}[^<>]{{0,576}}(?:<[a-z_/]{{0,8}})?")
_END_OF_VALUE = re.compile(rf"{_VALUE_END}\s{{0,64}}(?={_KEY_START}|{CALL_END})|{CALL_END}")
_PARTIAL_END = re.compile(rf"{_VALUE_END}\s{{0,64}}(?:<[a-z_/]{{0,10}})?\Z")
_NEW_LINE = r'"\n"?'
_BETWEEN = f"{_NEW_LINE} {quoted(_VALUE_START)}"  # a key and its value
_TAGS = Tags(
    function=quoted,
    parameter=lambda key: f"{_NEW_LINE} {quoted(_KEY_START + key + _KEY_END)} {_BETWEEN}",
    value_end=_VALUE_END,
    function_end="",
    no_end=r"~/(?s:.*)<\/(arg_value|tool_call)>(?s:.*)/",
)


class _GLMCallParser(TaggedCallParser):
    """Parses one call in this form."""

    def __init__(self, functions: Functions):
        super().__init__(functions)
        self._step = self._push_name

    def _push_name(self, text: str) -> tuple[int, str]:
        if found := _NAME.match(text):
            return found.end(), self._begin_function(found[1])
        self.failed = bool(text) and not _PARTIAL_NAME.fullmatch(text)
        return 0, ""

    def _push_key(self, text: str) -> tuple[int, str]:
        if text.startswith(CALL_END):
            self.ended = True
            return 0, "}"
        if found := _KEY.match(text):
            self._step = self._push_value_start
            return found.end(), self._begin_parameter(found[1].rstrip())
        may_begin = CALL_END.startswith(text) or _KEY_START.startswith(text)
        self.failed = not may_begin and not _PARTIAL_KEY.fullmatch(text)
        return 0, ""

    def _push_value_start(self, text: str) -> tuple[int, str]:
        if text.startswith(_VALUE_START):
            return len(_VALUE_START), self._begin_value()
        if _VALUE_START.startswith(text):
            return 0, ""
        self.failed = text.startswith("<")  # another tag
        return 0, self._begin_value()

    def _value_end(self, text: str) -> tuple[int, int | None]:
        if end := _END_OF_VALUE.search(text):
            self.failed = end[0] == CALL_END
            return end.start(), None if self.failed else end.end()
        if partial := _PARTIAL_END.search(text):
            return partial.start(), None
        return len(text) - length_of_partial_mark(text, [_VALUE_END, CALL_END]), None


def _grammar(parameters: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    marks = (quoted(CALL_START), f"{_NEW_LINE} {quoted(CALL_END)}")
    return marked_calls(tagged_rules(parameters, _TAGS), len(parameters), several, marks, _NEW_LINE)


GLM45 = ToolCallForm(
    name="glm45",
    in_template=rf"{CALL_START}{PROBE}\s*{_KEY_START}a{_KEY_END}\s*{_VALUE_START}b{_VALUE_END}\s*{CALL_END}",
    parser=_GLMCallParser,
    grammar=_grammar,
    start=CALL_START,
    end=CALL_END,
)
