"""`TemplateSplitter`: splits an answer into reasoning, content and calls, by a `ResponseTemplate`."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..tool_calls.json_values import json_text
from ..tool_calls.parameter_types import Functions
from ..tool_calls.tool_call_parser import ToolCallDelta, TrailingCalls
from .response_template import Mark, ResponseTemplate, TemplateField
from .template_content import NO_VALUE, PARSERS, transformed, typed_arguments

_REASONING = ("reasoning_content", "reasoning", "thinking")


class TemplateSplitter:
    """Splits an answer, in parts as it is generated or whole. Characters that may become a mark are held back
    until then.

    A call whose field ends is returned whole. A call that cannot be parsed, or of another function, is
    content. Reasoning that is not closed may end in calls, as in `ReasoningParser`.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        begun: str,
        parameters: Mapping[str, Mapping[str, Any]] | None,
        most_calls: int | None,
        new_id: Callable[[int], str],
    ):
        """Makes a splitter of one answer.

        Args:
            template: the response template of the checkpoint.
            begun: the part of the message that the prompt has already.
            parameters: the schema of each function that may be called. None: any function.
            most_calls: calls after this many are dropped. None: no limit.
            new_id: returns the id of a call from its index.
        """
        self._template = template
        self._rest = next((field for field in template.fields if field.open is None), None)
        self._functions = Functions(parameters)
        self._most_calls = most_calls
        self._new_id = new_id
        self._field = self._rest  # what the text belongs to; None: it is dropped
        self._captures: dict[str, str] = {}
        self._raw = ""  # of a field that is parsed when it ends, with what opened it
        self._body = ""
        self._blanks = ""  # at the end of a text, or before it
        self._in_text = False  # the field has a text
        self._pending = ""
        self._texts: dict[str, list[str]] = dict(reasoning=[], content=[])  # of the last `push`
        self._begun: set[str] = set()  # kinds with text
        self._deltas: list[ToolCallDelta] = []
        self.found = False  # the answer has reasoning, perhaps an empty one
        self.calls: list[tuple[str, str, str]] = []  # id, name and arguments' JSON
        self._trailing: _TrailingTemplateCalls | None = None  # of reasoning that is open
        self._num_left = 0  # characters from the latest mark on
        self.push(begun, False)
        if self._trailing:
            self._trailing = _TrailingTemplateCalls(template, self._functions)
        self.found = self._field is not None and _kind(self._field) == "reasoning"
        self._begun.clear()
        self.calls.clear()

    @property
    def has_content(self) -> bool:
        """Returns True if the answer has content, or nothing else."""
        return "content" in self._begun or not (self.found or self.calls)

    def push(self, text: str, ended: bool) -> tuple[str, str, list[ToolCallDelta]]:
        """Returns the new reasoning, the new content, and the new calls. ended: this is the last part."""
        self._texts = dict(reasoning=[], content=[])
        self._deltas = []
        text = self._pending + text
        while (found := self._next_mark(text, ended)) is not None:
            opened, match = found
            self._take(text[: match.start()])
            self._num_left = len(text) - match.start()
            text = text[match.end() :]
            self._captures |= {key: value for key, value in match.groupdict().items() if value is not None}
            self._end(match[0] if opened is None else "")
            if opened is not None:
                self._begin(opened, match)
        held = len(text) if ended else self._held(text)
        self._take(text[:held])
        self._pending = text[held:]
        if ended:
            self._end("")
        return "".join(self._texts["reasoning"]), "".join(self._texts["content"]), self._deltas

    def _marks(self) -> list[tuple[TemplateField | None, Mark]]:
        """Returns the marks that may come next: marks that open a field, or close this one."""
        close = [] if self._field is None or self._field.close is None else [(None, self._field.close)]
        if self._field is not self._rest:
            return list(close)
        return [*((field, field.open) for field in self._template.fields if field.open is not None), *close]

    def _next_mark(self, text: str, ended: bool) -> tuple[TemplateField | None, re.Match[str]] | None:
        """Returns the first mark that is decided. If several begin at one place, it is the longest, then one
        that opens a field.
        """
        held = len(text) if ended else self._held(text)
        if not held:
            return None
        matches = [(field, mark.pattern.search(text)) for field, mark in self._marks()]
        found = [(field, match) for field, match in matches if match and match.start() < held]
        return min(found, key=lambda one: (one[1].start(), -len(one[1][0])), default=None)

    def _held(self, text: str) -> int:
        """Returns the start of the last characters that may become a mark."""
        partials = (mark.partial.search(text) for _, mark in self._marks())
        return min((partial.start() for partial in partials if partial), default=len(text))

    def _begin(self, field: TemplateField, match: re.Match[str]) -> None:
        self._field = field
        self._captures = {key: value for key, value in match.groupdict().items() if value is not None}
        self._raw = match[0]
        if _kind(field) == "reasoning":
            self.found = True
            self._trailing = _TrailingTemplateCalls(self._template, self._functions)

    def _take(self, text: str) -> None:
        if self._field is None or not text:
            return
        kind = _kind(self._field)
        if kind == "calls":
            self._raw += text
            self._body += text
        elif kind:
            text = self._trailing.push_text(text, False) if self._trailing else text
            self._add_text(kind, text, self._field)

    def _add_text(self, kind: str, text: str, field: TemplateField) -> None:
        if field.arguments.get("strip", True):
            text = self._blanks + text if self._in_text else text.lstrip()
            self._blanks = text[len(text.rstrip()) :]
            text = text.rstrip()
        if text:
            is_next = not self._in_text and kind in self._begun
            self._texts[kind] += [field.join, text] if is_next else [text]
            self._in_text = True
            self._begun.add(kind)

    def _end(self, closed_by: str) -> None:
        """Ends the field. The text after it belongs to the field without an opening."""
        field = self._field
        if field is not None and _kind(field) == "calls":
            try:
                self._add_calls(self._calls_of(field))
            except NO_VALUE:
                self._in_text = False
                self._add_text("content", self._raw + closed_by, field)
        elif field is not None and self._trailing:
            text = self._trailing.held if closed_by else self._trailing.push_text("", True)
            self._add_text("reasoning", text, field)
            self._add_calls([call[1:] for call in self._trailing.calls] if not closed_by else [])
        self._trailing = None
        self._field = self._rest
        self._captures = {}
        self._raw = self._body = self._blanks = ""
        self._in_text = False

    def _calls_of(self, field: TemplateField) -> list[tuple[str, str]]:
        """Returns the names and arguments' JSON of the calls in the body."""
        value = PARSERS[field.content](self._body, field.arguments)
        if field.transform is not None and field.transforms_each:
            value = [transformed(field.transform, self._captures | one) for one in value]
        elif field.transform is not None:
            value = transformed(field.transform, self._captures | dict(content=value))
        found = []
        for call in value if isinstance(value, list) else [value]:
            function = call["function"] if "function" in call else call
            name = function["name"]
            if not isinstance(name, str) or not name.isprintable() or name not in self._functions:
                raise ValueError("another function")
            arguments = typed_arguments(dict(function).get("arguments"), self._functions.parameters(name))
            found.append((name, json_text(arguments)))
        return found

    def _add_calls(self, found: list[tuple[str, str]]) -> None:
        for name, arguments in found:
            index = len(self.calls)
            if index == self._most_calls:
                return
            self.calls.append((self._new_id(index), name, arguments))
            self._deltas.append(ToolCallDelta(index, *self.calls[-1]))


class _TrailingTemplateCalls(TemplateSplitter, TrailingCalls):
    """Finds the calls at the end of reasoning as a response template says it."""

    def __init__(self, template: ResponseTemplate, functions: Functions):
        calls = (field for field in template.fields if _kind(field) == "calls")
        other = TemplateField("content", None, None, "text", dict(strip=False), "", None, False)
        fields = dataclasses.replace(template, fields=(*calls, other))
        TrailingCalls.__init__(self)
        self._has_text = False  # since the latest call
        super().__init__(fields, "", functions.schemas, None, str)

    def push(self, text: str, ended: bool) -> tuple[str, str, list[ToolCallDelta]]:
        parts = super().push(text, ended)
        if self._field is self._rest:
            self._release_text(len(self._pending))
        return parts

    def _release_text(self, num_left: int) -> None:
        if self._has_text:
            self._release(num_left)
        self._has_text = False

    def _begin(self, field: TemplateField, match: re.Match[str]) -> None:
        self._release_text(self._num_left)
        super()._begin(field, match)

    def _add_text(self, kind: str, text: str, field: TemplateField) -> None:
        self._has_text = self._has_text or bool(text.strip())


def _kind(field: TemplateField) -> str:
    """Returns the kind of a field. "": the field is left out."""
    if field.name in _REASONING:
        return "reasoning"
    return {"content": "content", "tool_calls": "calls"}.get(field.name, "")
