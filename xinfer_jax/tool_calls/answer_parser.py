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
    """A call of a tool in an answer of the model. You run the tool, and append its result as a message.

    Attributes:
        id: a unique text for each call. The message with the result repeats it as `tool_call_id`.
        name: the name of the function.
        arguments: the arguments by their names.
        arguments_json: the arguments as JSON. It is the text that the model wrote if the name came before
            arguments in JSON.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    arguments_json: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the call as an entry of a message's `tool_calls`, in the form of the OpenAI API."""
        function = dict(name=self.name, arguments=self.arguments_json)
        return dict(id=self.id, type="function", function=function)


@dataclasses.dataclass(frozen=True)
class ParsedAnswer:
    """The parts of an answer: content, reasoning and calls of tools.

    Attributes:
        content: the text outside reasoning and calls. None: the answer ended within the reasoning, or has
            only calls.
        reasoning: the text between `<think>` and `</think>`, or on Harmony's channel `analysis`. None: there
            is no reasoning.
        tool_calls: the calls, in the order of the text.
    """

    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]

    def to_message(self) -> dict[str, Any]:
        """Returns the answer as a message of a conversation, in the form of the OpenAI API."""
        message: dict[str, Any] = dict(role="assistant", content=self.content)
        if self.reasoning is not None:
            message |= reasoning_fields(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


@dataclasses.dataclass(frozen=True)
class AnswerDelta:
    """The new parts of an answer, from `AnswerParser.push`.

    Attributes:
        content: the new part of the content.
        reasoning: the new part of the reasoning.
        tool_calls: the new parts of calls, with at most one entry per call.
    """

    content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


class AnswerParser:
    """Splits the text of an answer into reasoning, content and calls of tools, while it is generated.

    Call `push` for each piece of text, or `parse` for a whole text. Reasoning is the text between `<think>`
    and `</think>` at the beginning of an answer. In Gemma 4 it is between `<|channel>thought` and
    `<channel|>`. The parser finds calls in the content after it, in these formats:

    - "hermes" (Qwen 2.5 and 3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
    - "llama3_json", "qwen3_coder", "gemma4", and "glm45" (GLM 4.5 and later).
    - "harmony" (gpt-oss). An answer that begins with a header of Harmony has channels: `analysis` is the
      reasoning, and `final` is the content.

    All names except the last are vLLM's. The module of each format in `xinfer_jax.tool_calls` has an
    example of a call, and lists the errors of models that it repairs.

    The parser follows these rules:

    - Calls are also found at the end of reasoning that is not closed. If text follows such a call, the call
      is a part of the reasoning.
    - A call that is malformed, incomplete, or of an unknown function is text, and becomes content. Its name
      and the beginning of its arguments may have been returned before, with an index that no other call has.
    - An object without marks around it is text too, if it has fields that are not parameters of its function.
    - Whitespace next to calls is left out.

    Args:
        formats: the formats of calls to recognize. `tokenizer.template_tools.format` is the format of a
            model. With an empty list, calls stay text. None recognizes all formats.
        tools: the tools that the answer may call (see `encode_prompt`). In the format of Qwen3-Coder they
            give the types of arguments, also through $ref, allOf and anyOf. Without them its arguments are
            texts. None allows calls of any function.
        in_reasoning: True if the prompt ends within the reasoning.
        most_calls: the most calls. The text after this number of calls is dropped. None: no limit.
        new_id: a function that returns the id of a call from its index. None takes random ids.
        harmony_header: the result of `tokenization.conversation.harmony_header`, if the answer has
            channels and its text comes from `Tokenizer.decode_marked`. None recognizes Harmony by spelled
            control tokens at the beginning, if it is one of the formats.
        splitter: an object that splits the text instead, like the ones of
            `tokenization.template_splitter`. It has its own new_id, most_calls and tools. None: there is
            none.

    Raises:
        InputError: a format is unknown, or the tools have another form.
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
        """Creates a parser for one answer."""
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
        """Takes the next piece of the text, and returns the new parts of the answer.

        Args:
            text: the next piece.
            ended: True if it is the last piece.

        Returns:
            An `AnswerDelta`.
        """
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
        """True if a call is complete."""
        return self._calls is not None and bool(self._calls.calls)

    def parse(self, text: str) -> ParsedAnswer:
        """Splits a whole text. Call it in place of `push`."""
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
    """Splits a whole answer into reasoning, content and calls of tools, in the formats of `AnswerParser`.

    Example:
        >>> import xinfer_jax as xj
        >>> answer = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
        >>> [call] = xj.tools.parse_tool_calls(answer).tool_calls
        >>> call.name, call.arguments
        ('weather', {'city': 'Paris'})

    Args:
        text: the whole answer.
        tools: the tools that the answer may call (see `encode_prompt`). None allows calls of any function.
        in_reasoning: True if the prompt ended with `<think>`, so that the answer begins with the reasoning.

    Returns:
        A `ParsedAnswer`.

    Raises:
        InputError: the argument is not a text, or the tools have another form.
    """
    if not isinstance(text, str):
        raise InputError(f"only a text can be parsed, got {format_value(text)}")
    return AnswerParser(tools=tools, in_reasoning=in_reasoning).parse(text)


def reasoning_fields(reasoning: str) -> dict[str, str]:
    """Returns the fields of a message or delta with the reasoning: by vLLM's name, and by DeepSeek's older
    one.
    """
    return dict(reasoning=reasoning, reasoning_content=reasoning)
