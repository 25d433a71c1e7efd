"""`ToolCallParser`: tells the calls in an answer from its other text, while it is generated."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .call_parser import GEMMA_END, GEMMA_START, CallParser, length_of_partial_mark
from .gemma_call import GemmaCallParser
from .json_call import JSONCallParser
from .parameter_types import Functions
from .xml_call import CALL_END, FUNCTION_START, XMLCallParser

CALL_START = "<tool_call>"
_PYTHON_TAG = "<|python_tag|>"  # Llama 3 may write it before a call
_SEPARATOR = ";"  # between two calls of Llama 3
HERMES = "hermes"
LLAMA3_JSON = "llama3_json"
QWEN3_CODER = "qwen3_coder"
GEMMA4 = "gemma4"
HARMONY = "harmony"  # `HarmonyParser` finds the calls
TOOL_FORMATS = (HERMES, LLAMA3_JSON, QWEN3_CODER, GEMMA4, HARMONY)
# What calls begin with. Qwen3-Coder leaves its first mark out at times.
_MARKS = {HERMES: (CALL_START,), QWEN3_CODER: (CALL_START, FUNCTION_START), GEMMA4: (GEMMA_START,)}
_LINE_OF_OBJECT = "\n{"  # begins a call of Llama 3 in `TrailingCallParser`
_CALL_ENDS = re.compile("|".join(map(re.escape, (CALL_END, GEMMA_END))))
_FILLER = " \t\r\n}],"  # between objects in one mark, and before the mark that ends them


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
    """A call that has begun."""

    raw: str  # its text so far, with the whitespace and the mark before it
    start: int  # where the call itself begins in it
    end_mark: str  # what may follow it
    parser: CallParser
    arguments: str = ""  # their JSON so far
    id: str | None = None  # until its first delta
    index: int = -1


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
        """parameters: the schema of each function that may be called; None: any function. The others are as
        in `AnswerParser`.
        """
        self.calls: list[tuple[str, str, str]] = []
        self._formats = formats
        self._marks = tuple({mark: None for form in formats for mark in _MARKS.get(form, ())})
        self._functions = Functions(parameters)
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

    def add(self, name: str, arguments: str) -> list[ToolCallDelta]:
        """Adds a complete call. Returns what is new: nothing, if there are enough calls."""
        if len(self.calls) == self._most_calls:
            return []
        own = self._new_id(self._num_indices)
        delta = ToolCallDelta(self._num_indices, own, name, arguments)
        self._num_indices += 1
        self.calls.append((own, name, arguments))
        return [delta]

    def trailing(self) -> "TrailingCallParser":
        """A parser of these calls at the end of a text."""
        return TrailingCallParser(self._formats, self._functions.schemas)

    # Each state returns the text that is left for the next one.

    def _push_start(self, text: str, ended: bool) -> str:
        """Llama 3 puts no mark around a call: an answer begins with it."""
        body = text.lstrip()
        tag = _PYTHON_TAG if body.startswith(_PYTHON_TAG) else ""
        body = body.removeprefix(tag).lstrip()
        objects = body.removeprefix("[").lstrip()
        if not ended and (not objects or not tag and _PYTHON_TAG.startswith(body)):
            self._pending = text
            return ""
        if not objects.startswith("{"):
            self._state = self._push_content
            return text
        parser = JSONCallParser(self._functions, is_marked=False)
        self.begin(parser, text[: len(text) - len(objects)], _SEPARATOR)
        return objects

    def _push_content(self, text: str, ended: bool) -> str:
        starts = {mark: at for mark in self._marks if (at := text.find(mark)) >= 0}
        mark = min(starts, key=lambda mark: starts[mark], default="")
        held = 0 if ended else length_of_partial_mark(text, self._marks)
        cut = starts[mark] if mark else len(text) - held
        before = text[:cut].rstrip() if self._marks and (mark or not ended) else text[:cut]
        self._add_content(before)
        if not mark:
            self._pending = text[len(before) :]
            return ""
        if mark == _LINE_OF_OBJECT:
            self._state = self._push_start
            return text[len(before) :]
        self._mark = text[len(before) : cut + len(mark)]
        after = text[cut + len(mark) :]
        if mark == CALL_START:
            self._state = self._push_form
        elif mark == GEMMA_START:
            self.begin(GemmaCallParser(self._functions), self._mark, GEMMA_END)
        else:
            self.begin(XMLCallParser(self._functions), text[len(before) : cut], CALL_END)
            return mark + after
        return after

    def _push_form(self, text: str, ended: bool) -> str:
        """The first character after the mark tells which form a call has."""
        body = text.lstrip()
        first = body[:1]
        if not first and not ended:
            self._pending = text
            return ""
        if QWEN3_CODER in self._formats and (first not in ("{", "[") or HERMES not in self._formats):
            self.begin(XMLCallParser(self._functions), self._mark, CALL_END)
            return text
        objects = body[1:] if first == "[" else text
        mark = self._mark + text[: len(text) - len(objects)]
        self.begin(JSONCallParser(self._functions), mark, CALL_END)
        return objects

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
        if ended and call.end_mark == CALL_END and not (parser.ended or parser.failed):
            piece += parser.push(CALL_END)  # which the end of an answer stands for
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
        cut = max(call.start + 1, call.start + call.parser.length) if call.parser.failed else len(call.raw)
        if end := _CALL_ENDS.search(call.raw, call.start, cut):
            cut = end.end()
        self._add_content(call.raw[:cut])
        self._state = self._push_content
        return call.raw[cut:]

    def _push_end_mark(self, text: str, ended: bool) -> str:
        """What follows a call: another one within the same mark, or the mark that ends it."""
        assert self._call is not None
        mark = self._call.end_mark
        is_json = isinstance(self._call.parser, JSONCallParser)
        has_filler = is_json or bool(mark) and not isinstance(self._call.parser, XMLCallParser)
        body = text.lstrip(_FILLER if has_filler else None)
        if not ended and len(body) < len(mark) and mark.startswith(body):
            self._pending = text
            return ""
        if mark == _SEPARATOR and body[:1] in (_SEPARATOR, "{"):
            self._state = self._push_start
            return body.removeprefix(mark)
        if is_json and body.startswith("{"):
            self.begin(JSONCallParser(self._functions), text[: len(text) - len(body)], mark)
            return body
        self._state = self._push_after_call
        if mark and body.startswith(mark):
            return body.removeprefix(mark)
        return "" if has_filler and not body else text

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
        if call.id is None:
            call.index = self._num_indices
            call.id = self._new_id(call.index)
            self._num_indices += 1
            self._deltas.append(ToolCallDelta(call.index, call.id, name, piece))
        elif piece:
            self._deltas.append(ToolCallDelta(call.index, None, None, piece))


class TrailingCallParser(ToolCallParser):
    """Tells the calls at the end of a text from its other text: if any text follows a call, it is none."""

    def __init__(self, formats: Collection[str], parameters: Mapping[str, Mapping[str, Any]] | None) -> None:
        super().__init__(formats, parameters, None, str)
        self._marks += (_LINE_OF_OBJECT,) if LLAMA3_JSON in formats else ()
        self.held = ""  # the end of the text, which may be calls

    def push_text(self, text: str, ended: bool) -> str:
        """The new text that is no call. ended: it is the last part, then `calls` has the calls at its end."""
        self.held += text
        text = self._pending + text
        self._pending = ""
        self._deltas = []
        known = []
        while text or ended and self._state in (self._push_form, self._push_call):
            self._content = []
            text = self._state(text, ended)
            if "".join(self._content).strip():
                cut = len(self.held) - len(text) - self._num_undecided()
                known.append(self.held[:cut])
                self.held = self.held[cut:]
                self.calls.clear()
        if ended and not self.calls:
            known.append(self.held)
        return "".join(known)

    def _num_undecided(self) -> int:
        """How many characters before what is left may begin a call."""
        if self._state == self._push_call and self._call is not None:
            return len(self._call.raw)
        return len(self._pending) + (len(self._mark) if self._state == self._push_form else 0)
