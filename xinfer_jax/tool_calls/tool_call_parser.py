"""`ToolCallParser`: tells the calls in an answer from its other text, while it is generated."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .call_parser import CallParser, length_of_partial_mark
from .parameter_types import Functions
from .tool_call_form import ToolCallForm, tool_call_forms


@dataclasses.dataclass(frozen=True)
class ToolCallDelta:
    """The new part of one call, in an `AnswerDelta`.

    Attributes:
        index: the index of the call in the answer.
        id: the id of the call, in the first delta of the call. None in later deltas.
        name: the name of the function, in the first delta of the call. None in later deltas.
        arguments: the next piece of the JSON of the arguments.
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
    form: ToolCallForm
    parser: CallParser
    arguments: str = ""  # their JSON so far
    id: str | None = None  # until its first delta
    index: int = -1


class ToolCallParser:
    """Splits a text into content and calls, in parts as it is generated or whole.

    A call that is malformed, incomplete or of an unknown function comes back as text. Its name and the
    beginning of its arguments may have been returned by then. Its index is not used again. Whitespace next to
    calls is left out, except between two texts.

    Attributes:
        calls: id, name and arguments' JSON of each complete call.
    """

    def __init__(
        self,
        forms: Sequence[ToolCallForm],
        parameters: Mapping[str, Mapping[str, Any]] | None,
        most_calls: int | None,
        new_id: Callable[[int], str],
    ):
        """Makes a parser. forms: the forms of calls. parameters: the schema of each function that may be
        called. None: any function. It also takes the other arguments of `AnswerParser`.
        """
        self.calls: list[tuple[str, str, str]] = []
        self._forms = forms
        starts = (mark for form in forms for mark in (form.start, *form.own_starts) if mark)
        self._marks = tuple(dict.fromkeys(starts))
        ends = dict.fromkeys(re.escape(form.end) for form in tool_call_forms() if form.start)
        self._call_ends = re.compile("|".join(ends))
        self._functions = Functions(parameters)
        self._most_calls = most_calls
        self._new_id = new_id
        self._pending = ""  # what the next part decides about
        self._leading = [form for form in forms if form.find_start]  # begin without a mark
        self._state = self._push_start if self._leading else self._push_content
        self._mark = ""  # the latest mark of a call, and the whitespace before it
        self._marked: list[ToolCallForm] = []  # forms with this mark
        self._call: _Call | None = None  # the latest
        self._num_indices = 0
        self._has_content = False
        self._content: list[str] = []  # of the last `push`
        self._deltas: list[ToolCallDelta] = []

    def push(self, text: str, ended: bool) -> tuple[str, list[ToolCallDelta]]:
        """Returns the new content, and the new part of each call. ended: this is the last part."""
        self._content = []
        self._deltas = []
        text = self._pending + text
        self._pending = ""
        while text or ended and self._state in (self._push_form, self._push_call):
            if len(self.calls) == self._most_calls:
                break
            text = self._state(text, ended)
            self._end_step(len(text))
        return "".join(self._content), self._deltas

    def _end_step(self, num_left: int) -> None:
        """Called after each step of `push`, with the number of characters that are left for the next one."""

    def add(self, name: str, arguments: str) -> list[ToolCallDelta]:
        """Adds a complete call. Returns the new part, or nothing if there are enough calls."""
        if len(self.calls) == self._most_calls:
            return []
        own = self._new_id(self._num_indices)
        delta = ToolCallDelta(self._num_indices, own, name, arguments)
        self._num_indices += 1
        self.calls.append((own, name, arguments))
        return [delta]

    def trailing(self) -> "TrailingCallParser":
        """Returns a parser of these calls at the end of a text."""
        return TrailingCallParser(self._forms, self._functions.schemas)

    # Each state returns the text that is left for the next one.

    def _push_start(self, text: str, ended: bool) -> str:
        """Parses the beginning of an answer. It begins with a call that has no mark before it, or with
        content.
        """
        for form in self._leading:
            at = form.find_start(text, ended) if form.find_start else -1
            if at is None:
                self._pending = text
                return ""
            if at >= 0:
                self.begin(form, text[:at])
                return text[at:]
        self._state = self._push_content
        return text

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
        self._marked = [form for form in self._forms if form.start == mark]
        if self._marked:
            self._mark = text[len(before) : cut + len(mark)]
            self._state = self._push_form
            return text[cut + len(mark) :]
        own = [form for form in self._forms if mark in form.own_starts]
        if not own:  # the line of a call without a mark
            self._state = self._push_start
            return text[len(before) :]
        self.begin(own[0], text[len(before) : cut])
        return text[cut:]

    def _push_form(self, text: str, ended: bool) -> str:
        """Finds the form of a call by the first character after the mark."""
        body = text.lstrip()
        if not body and not ended:
            self._pending = text
            return ""
        fits = (form for form in self._marked if not form.first or body[:1] in form.first)
        form = next(fits, self._marked[-1])
        has_list = form.list_start and body.startswith(form.list_start)
        calls = body.removeprefix(form.list_start) if has_list else text
        self.begin(form, self._mark + text[: len(text) - len(calls)])
        return calls

    def begin(self, form: ToolCallForm, mark: str = "", name: str | None = None) -> None:
        """Begins a call with the text from here on. mark: the text before it that is content if it is none.
        name: the name of the function, if a header has it.
        """
        self._call = _Call(mark, len(mark), form, form.parser(self._functions))
        self._call.parser.name = name
        self._state = self._push_call

    def _push_call(self, text: str, ended: bool) -> str:
        call = self._call
        assert call is not None
        parser = call.parser
        call.raw += text
        piece = parser.push(text)
        if ended and not (parser.ended or parser.failed):
            piece += parser.finish()
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
        """Turns the text up to the error, or up to the mark that ends a call, into content."""
        cut = max(call.start + 1, call.start + call.parser.length) if call.parser.failed else len(call.raw)
        if end := self._call_ends.search(call.raw, call.start, cut):
            cut = end.end()
        self._add_content(call.raw[:cut])
        self._state = self._push_content
        return call.raw[cut:]

    def _push_end_mark(self, text: str, ended: bool) -> str:
        """Parses the text after a call: another call within the same mark, or the mark that ends it."""
        assert self._call is not None
        form = self._call.form
        mark = form.end
        body = text.lstrip(form.filler)
        if not ended and len(body) < len(mark) and mark.startswith(body):
            self._pending = text
            return ""
        if form.find_start and body[:1] and body[:1] in (mark, form.next_start):
            self._state = self._push_start
            return body.removeprefix(mark)
        if form.next_start and body.startswith(form.next_start):
            self.begin(form, text[: len(text) - len(body)])
            return body
        self._state = self._push_after_call
        if mark and body.startswith(mark):
            return body.removeprefix(mark)
        return "" if form.filler and not body else text

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


class TrailingCalls:
    """Tells the calls at the end of reasoning from its other text: if other text follows a call, it is none.
    The base of parsers of such calls, which take text by `push` and have the complete `calls`.

    Attributes:
        held: the end of the text, which may be calls.
    """

    calls: list[tuple[str, str, str]]

    def __init__(self) -> None:
        self.held = ""
        self._known: list[str] = []  # text that is no call, of the last `push_text`

    def push(self, text: str, ended: bool) -> Any:
        """Takes the next part of the text, and calls `_release` when some of it is no call."""
        raise NotImplementedError

    def push_text(self, text: str, ended: bool) -> str:
        """Returns the new text that is no call. ended: it is the last part, then `calls` has the calls at its
        end.
        """
        self._known = []
        self.held += text
        self.push(text, ended)
        return "".join([*self._known, self.held if ended and not self.calls else ""])

    def _release(self, num_left: int) -> None:
        """The text is no call, and so are calls in it, except for the characters that are left."""
        cut = len(self.held) - num_left
        self._known.append(self.held[:cut])
        self.held = self.held[cut:]
        self.calls.clear()


class TrailingCallParser(ToolCallParser, TrailingCalls):
    """Finds the calls at the end of reasoning in the forms of models."""

    def __init__(
        self, forms: Sequence[ToolCallForm], parameters: Mapping[str, Mapping[str, Any]] | None
    ) -> None:
        TrailingCalls.__init__(self)
        super().__init__(forms, parameters, None, str)
        self._marks += tuple(f"\n{form.next_start}" for form in self._leading)  # a line may begin with a call

    def _end_step(self, num_left: int) -> None:
        if "".join(self._content).strip():
            self._release(num_left + self._num_undecided())
        self._content = []

    def _num_undecided(self) -> int:
        """Returns the number of characters before the rest that may begin a call."""
        if self._state == self._push_call and self._call is not None:
            return len(self._call.raw)
        return len(self._pending) + (len(self._mark) if self._state == self._push_form else 0)
