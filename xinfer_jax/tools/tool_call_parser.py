"""`ToolCallParser`: tells the calls in an answer from its other text, while it is generated."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .call_parser import CallParser
from .json_call import JSONCallParser
from .marks import length_of_partial_mark
from .xml_call import CALL_END, XMLCallParser

CALL_START = "<tool_call>"
_PYTHON_TAG = "<|python_tag|>"  # Llama 3 may write it before a call
_SEPARATOR = ";"  # between two calls of Llama 3
HERMES = "hermes"
LLAMA3_JSON = "llama3_json"
QWEN3_CODER = "qwen3_coder"
HARMONY = "harmony"  # `HarmonyParser` finds the calls
TOOL_FORMATS = (HERMES, LLAMA3_JSON, QWEN3_CODER, HARMONY)


@dataclasses.dataclass(frozen=True)
class ToolCallDelta:
    """What is new of one call.

    Attributes:
        index: of the call in the answer.
        id: of the call; None but for its first delta.
        name: of the function; None but for its first delta.
        arguments: the next piece of its arguments' JSON.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclasses.dataclass
class _Call:
    """A call that has begun.

    Attributes:
        raw: its text so far, with the whitespace and the mark before it.
        start: where the call itself begins in `raw`.
        end_mark: what may follow it.
        arguments: their JSON so far.
        id, index: None: no delta was returned yet.
    """

    raw: str
    start: int
    end_mark: str
    parser: CallParser
    arguments: str = ""
    id: str | None = None
    index: int | None = None


class ToolCallParser:
    """Splits a text into content and calls, in parts as it is generated or whole.

    A call that is malformed, incomplete or of a function that is not known comes back as text. Its name and
    the beginning of its arguments may have been returned by then; its index is not used again. Whitespace
    beside calls is left out, but for that between two texts.

    Attributes:
        calls: id, name and arguments' JSON of each complete call.
    """

    def __init__(
        self,
        formats: Collection[str],
        parameters: Mapping[str, Mapping[str, Any]] | None,
        most_calls: int | None,
        new_id: Callable[[int], str],
    ):
        """
        Args:
            formats: of `TOOL_FORMATS`.
            parameters: the schema of each function that may be called; None: any function.
            most_calls: text after this many is dropped; None: no limit.
            new_id: returns the id of a call from its index.
        """
        self.calls: list[tuple[str, str, str]] = []
        self._formats = formats
        self._parameters = parameters
        self._most_calls = most_calls
        self._new_id = new_id
        self._pending = ""  # what the next part decides about
        self._state = self._push_start if LLAMA3_JSON in formats else self._push_content
        self._mark = ""  # the latest mark of a call, and the whitespace before it
        self._call: _Call | None = None  # the latest
        self._num_indices = 0
        self._has_content = False
        self._content: list[str] = []  # of the last `push`
        self._deltas: list[ToolCallDelta] = []

    def push(self, text: str, ended: bool) -> tuple[str, list[ToolCallDelta]]:
        """The new content, and what is new of each call. ended: this is the last part."""
        self._content = []
        self._deltas = []
        text = self._pending + text
        self._pending = ""
        while text or ended and self._state in (self._push_form, self._push_call):
            if len(self.calls) == self._most_calls:
                break
            text = self._state(text, ended)
        return "".join(self._content), self._deltas

    # Each state returns the text that is left for the next one.

    def _push_start(self, text: str, ended: bool) -> str:
        """Llama 3 puts no mark around a call: an answer begins with it."""
        body = text.lstrip()
        tag = _PYTHON_TAG if body.startswith(_PYTHON_TAG) else ""
        body = body.removeprefix(tag).lstrip()
        if not ended and (not body or not tag and _PYTHON_TAG.startswith(body)):
            self._pending = text
            return ""
        if not body.startswith("{"):
            self._state = self._push_content
            return text
        self.begin(JSONCallParser(self._parameters), text[: len(text) - len(body)], _SEPARATOR)
        return body

    def _push_content(self, text: str, ended: bool) -> str:
        if not {HERMES, QWEN3_CODER} & {*self._formats}:
            self._add_content(text)
            return ""
        before, mark, after = text.partition(CALL_START)
        cut = len(before) if ended or mark else len(text) - length_of_partial_mark(text, [CALL_START])
        if mark or not ended:
            cut = len(text[:cut].rstrip())
        self._add_content(text[:cut])
        if mark:
            self._mark = before[cut:] + mark
            self._state = self._push_form
        else:
            self._pending = text[cut:]
        return after

    def _push_form(self, text: str, ended: bool) -> str:
        """The first character after the mark tells which form a call has."""
        first = text.lstrip()[:1]
        if not first and not ended:
            self._pending = text
        elif QWEN3_CODER in self._formats and (first != "{" or HERMES not in self._formats):
            self.begin(XMLCallParser(self._parameters), self._mark, CALL_END)
        else:
            self.begin(JSONCallParser(self._parameters), self._mark, CALL_END)
        return "" if self._pending else text

    def begin(self, parser: CallParser, mark: str = "", end_mark: str = "") -> None:
        """The text from here on is a call. mark: the text before it that is content if it is none."""
        self._call = _Call(mark, len(mark), end_mark, parser)
        self._state = self._push_call

    def _push_call(self, text: str, ended: bool) -> str:
        call = self._call
        assert call is not None
        parser = call.parser
        call.raw += text
        piece = parser.push(text)
        if parser.failed or ended and not parser.ended:
            return self._push_failed(call)
        call.arguments += piece
        if parser.name is not None:
            self._add_delta(call, parser.name, piece)
        if not parser.ended:
            return ""
        assert parser.name is not None and call.id is not None
        self.calls.append((call.id, parser.name, call.arguments))
        self._state = self._push_end_mark
        return call.raw[call.start + parser.length :]

    def _push_failed(self, call: _Call) -> str:
        """The text up to what is wrong, or up to the mark that ends a call, becomes content."""
        cut = call.start + call.parser.length if call.parser.failed else len(call.raw)
        if (end := call.raw.find(CALL_END, call.start, cut)) >= 0:
            cut = end + len(CALL_END)
        self._add_content(call.raw[:cut])
        self._state = self._push_content
        return call.raw[cut:]

    def _push_end_mark(self, text: str, ended: bool) -> str:
        assert self._call is not None
        body = text.lstrip()
        mark = self._call.end_mark
        if not ended and len(body) < len(mark) and mark.startswith(body):
            self._pending = text
            return ""
        is_next = mark == _SEPARATOR and body[:1] in (_SEPARATOR, "{")
        self._state = self._push_start if is_next else self._push_after_call
        return body.removeprefix(mark) if mark and body.startswith(mark) else text

    def _push_after_call(self, text: str, ended: bool) -> str:
        """Drops whitespace unless it stands between two texts."""
        body = text.lstrip()
        if body:
            self._state = self._push_content
            return text if self._has_content else body
        self._pending = "" if ended else text
        return ""

    def _add_content(self, text: str) -> None:
        self._content.append(text)
        self._has_content = self._has_content or bool(text)

    def _add_delta(self, call: _Call, name: str, piece: str) -> None:
        if call.index is None:
            call.index = self._num_indices
            call.id = self._new_id(call.index)
            self._num_indices += 1
            self._deltas.append(ToolCallDelta(call.index, call.id, name, piece))
        elif piece:
            self._deltas.append(ToolCallDelta(call.index, None, None, piece))
