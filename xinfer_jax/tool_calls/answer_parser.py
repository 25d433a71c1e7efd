"""`parse_tool_calls` and `AnswerParser`: an answer's reasoning, content and calls of tools."""

import dataclasses
import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import InputError, format_value
from .harmony import HarmonyParser, SpelledControlTokens, begins_in_harmony
from .reasoning import ReasoningParser
from .tool_call_form import tool_call_form, tool_call_forms
from .tool_call_parser import ToolCallDelta, ToolCallParser
from .tool_messages import check_tools, parameter_schemas

_SLICE = 4096  # characters of a whole text that are parsed at a time: the rest is not copied for each call


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model asks for.

    Attributes:
        id: a text of its own for each call; the message with the result repeats it as `tool_call_id`.
        name: of the function.
        arguments: by name.
        arguments_json: the same as JSON: as the model wrote it, if the name came before arguments in JSON.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    arguments_json: str

    def to_dict(self) -> dict[str, Any]:
        """The call as an entry of a message's `tool_calls`, in the form of the OpenAI API."""
        function = dict(name=self.name, arguments=self.arguments_json)
        return dict(id=self.id, type="function", function=function)


@dataclasses.dataclass(frozen=True)
class ParsedAnswer:
    """The parts of an answer.

    Attributes:
        content: the text that is neither reasoning nor a call; None: the answer ended within the reasoning,
            or has only calls.
        reasoning: the text between <think> and </think>, or on Harmony's channel `analysis`; None: there is
            none.
        tool_calls: in the order of the text.
    """

    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]

    def to_message(self) -> dict[str, Any]:
        """The answer as a message of a conversation, in the form of the OpenAI API."""
        message: dict[str, Any] = dict(role="assistant", content=self.content)
        if self.reasoning is not None:
            message |= reasoning_fields(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


@dataclasses.dataclass(frozen=True)
class AnswerDelta:
    """What is new of an answer.

    Attributes:
        content: the new part of the content.
        reasoning: the new part of the reasoning.
        tool_calls: what is new of calls; a call has one entry at most.
    """

    content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


class AnswerParser:
    """Takes the text of an answer apart while it is generated.

    Reasoning stands between <think> and </think> at the beginning, or <|channel>thought and <channel|> of
    Gemma 4. Calls stand in the content after it, in one of these forms:

    - "hermes", of Qwen 2.5 and 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    - "llama3_json", "qwen3_coder", "gemma4", and "glm45" of GLM 4.5 and later;
    - "harmony", of gpt-oss. An answer that begins with a header of Harmony has channels: `analysis` is the
      reasoning, and `final` the content.

    The names are vLLM's, except the last. The module of each form shows a call, and says what is repaired of
    what models leave out or add. Calls are also found at the end of reasoning that is not closed. If text
    follows such a call, it is a part of the reasoning.

    A call that is malformed or incomplete, or of a function that is not among the tools, is text: it becomes
    content. An object without a mark around it is text too, if it has fields that are no parameters of its
    function. Its name and the beginning of its arguments may have been returned by then, with an index that
    no other call has. Whitespace next to calls is left out.
    """

    def __init__(
        self,
        formats: Collection[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_reasoning: bool = False,
        most_calls: int | None = None,
        new_id: Callable[[int], str] | None = None,
        harmony_header: str | None = None,
        splitter: Any = None,
    ):
        """
        Args:
            formats: in which calls are recognized; `tokenizer.template_tools.format` is that of a model. An
                empty list: calls stay text. None: all forms.
            tools: as in `encode_prompt`. In Qwen3-Coder's form they tell the types of arguments, also through
                $ref, allOf and anyOf; otherwise arguments are texts. None: any function may be called.
            in_reasoning: the prompt ends within the reasoning.
            most_calls: what follows this many calls is dropped; None: no limit.
            new_id: returns the id of a call from its index; None: random ids.
            harmony_header: the answer has channels, and its text is that of `Tokenizer.decode_marked`; this
                is what `tokenization.conversation.harmony_header` returns. None: Harmony is recognized by
                spelled control tokens at the beginning, if it is among the formats.
            splitter: takes the text apart instead, as `tokenization.template_splitter` does; new_id,
                most_calls and tools are its own. None: there is none.

        Raises:
            InputError: an unknown format, or tools of another form.
        """
        if isinstance(formats, str):
            formats = [formats]
        forms = tool_call_forms() if formats is None else [tool_call_form(name) for name in formats]
        self._channels = [form for form in forms if form.has_channels]
        self._names = None if tools is None else parameter_schemas(check_tools(tools))
        self._new_calls = partial(
            ToolCallParser,
            parameters=self._names,
            most_calls=most_calls,
            new_id=new_id or (lambda _: f"call_{secrets.token_hex(12)}"),
        )
        self._calls: Any = splitter
        self._parts: Any = splitter
        if splitter is None:
            self._calls = self._new_calls(forms) if forms else None
            self._parts = ReasoningParser(in_reasoning, self._calls)
        self._spelled: SpelledControlTokens | None = None
        self._may_be_harmony = bool(self._channels) and not in_reasoning and splitter is None
        self._pending = ""  # may be the beginning of a header
        if harmony_header is not None:
            self._begin_harmony(harmony_header)

    def _begin_harmony(self, header: str) -> None:
        self._may_be_harmony = False
        self._calls = self._new_calls(self._channels) if self._channels else None
        self._parts = HarmonyParser(self._calls, self._names, header)

    def push(self, text: str, ended: bool = False) -> AnswerDelta:
        """Takes the next part of the text, and returns what is new. ended: it is the last part."""
        if self._may_be_harmony:
            text = self._pending + text
            is_harmony = begins_in_harmony(text, ended)
            if is_harmony is None:
                self._pending = text
                return AnswerDelta("", "", [])
            self._may_be_harmony = False
            if is_harmony:
                self._spelled = SpelledControlTokens()
                self._begin_harmony("")
        if self._spelled:
            text = self._spelled.push(text, ended)
        reasoning, content, deltas = self._parts.push(text, ended)
        return AnswerDelta(content, reasoning, deltas)

    @property
    def has_calls(self) -> bool:
        """Whether a call is complete."""
        return self._calls is not None and bool(self._calls.calls)

    def parse(self, text: str) -> ParsedAnswer:
        """Takes a whole text apart; instead of `push`."""
        starts = range(0, max(1, len(text)), _SLICE)
        deltas = [self.push(text[i : i + _SLICE], ended=i == starts[-1]) for i in starts]
        content = "".join(delta.content for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        calls = [] if self._calls is None else self._calls.calls
        found = [ToolCall(own, name, json.loads(arguments), arguments) for own, name, arguments in calls]
        has_content = self._parts.has_content and (content or not found)
        return ParsedAnswer(content if has_content else None, reasoning if self._parts.found else None, found)


def parse_tool_calls(
    text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, in_reasoning: bool = False
) -> ParsedAnswer:
    """Takes an answer apart: reasoning, content, and calls of tools in the forms that `AnswerParser` lists.

    Args:
        text: the whole answer.
        tools: as in `encode_prompt`; None: any function may be called.
        in_reasoning: the prompt ended with <think>, so the answer begins with the reasoning.

    Raises:
        InputError: not a text, or tools of another form.
    """
    if not isinstance(text, str):
        raise InputError(f"only a text can be parsed, got {format_value(text)}")
    return AnswerParser(tools=tools, in_reasoning=in_reasoning).parse(text)


def reasoning_fields(reasoning: str) -> dict[str, str]:
    """Returns the fields of a message or delta with the reasoning: by vLLM's name, and by DeepSeek's older
    one.
    """
    return dict(reasoning=reasoning, reasoning_content=reasoning)
