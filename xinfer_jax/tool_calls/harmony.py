"""Harmony, the form of answers of gpt-oss: messages with a header and a channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

Source: OpenAI's harmony response format. In a text for `HarmonyParser` each control token is one character
that no decoded text has, half of a surrogate pair. So a control token that the model only spells, in ordinary
tokens, stays text.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .call_grammar import closed, json_expression
from .call_parser import CallParser, length_of_partial_mark
from .json_scanner import JSONObjectScanner
from .parameter_types import Functions
from .tool_call_form import PROBE, ToolCallForm
from .tool_call_parser import ToolCallDelta, ToolCallParser

_NAMES = ("start", "channel", "constrain", "message", "end", "call", "return")
CONTROL_TOKENS = {f"<|{name}|>": chr(0xD800 + i) for i, name in enumerate(_NAMES)}
START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN = CONTROL_TOKENS.values()
STOP_TOKENS = ("<|return|>", "<|call|>")
SPELLINGS = {ord(mark): name for name, mark in CONTROL_TOKENS.items()}  # for `str.translate`
_CONTROL_TOKEN = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
_MARK = re.compile(f"[{START}-{RETURN}]")
_MARK_OR_TEXT = re.compile(f"[{START}-{RETURN}]|[^{START}-{RETURN}]+")
_MESSAGE_END = re.compile(f"[{START}{CHANNEL}{END}{CALL}{RETURN}]")
_HEADER_START = re.compile(f"[{START}{END}{CALL}{RETURN}]")
_CHANNEL_NAME = re.compile(rf"{CHANNEL}\s*(\w*)")
_RECIPIENT = re.compile(rf"(?:^|[\s{CHANNEL}])to=functions\.([^\s{START}-{RETURN}]+)")
_LONGEST_HEADER = 1024  # characters; a longer one is text
# The beginning of a text in Harmony, whose control tokens are spelled.
_BEGINNINGS = ("<|start|>", "<|channel|>")
_MOST_BLANKS = 64  # before it
_RECIPIENT_FIRST = re.compile(r"to=functions\.[^\s<]{1,512}\s{0,8}<\|channel\|>")
_RECIPIENT_PART = re.compile(r"to=functions\.[^\s<]{0,512}\s{0,8}<?[|chanel]{0,9}")


def begins_in_harmony(text: str, ended: bool) -> bool | None:
    """Returns True if an answer begins with a header whose control tokens are spelled, or None if it is not
    known yet.
    """
    body = text.lstrip()
    if len(text) - len(body) > _MOST_BLANKS:
        return False
    if body.startswith(_BEGINNINGS) or _RECIPIENT_FIRST.match(body):
        return True
    may_begin = any(start.startswith(body) for start in (*_BEGINNINGS, "to=functions."))
    return None if not ended and (may_begin or _RECIPIENT_PART.fullmatch(body)) else False


def header_fields(header: str) -> tuple[str, str | None]:
    """Returns the channel of a message, "" if it has none, and the function that it is to. None: to no
    function.
    """
    channel = _CHANNEL_NAME.search(header)
    name = _RECIPIENT.search(header)
    return channel[1] if channel else "", name[1] if name else None


def last_header(text: str) -> tuple[str, str | None] | None:
    """Returns `header_fields` of the header that a text ends with. None: it ends within a message."""
    text = text.removesuffix(MESSAGE)
    start = 1 + max(map(text.rfind, (START, MESSAGE, END, CALL, RETURN)))
    if text[start - 1 : start] == MESSAGE:  # of a message that <|channel|> ends
        start = text.find(CHANNEL, start)
    return None if start < 0 else header_fields(text[start:])


def with_marks(stops: Sequence[str]) -> tuple[str, ...]:
    """Returns stop strings as they are, and with characters for the control tokens that they spell."""
    marked = map(_with_characters, stops)
    return tuple(dict.fromkeys((*stops, *marked)))


def _with_characters(text: str) -> str:
    return _CONTROL_TOKEN.sub(lambda found: CONTROL_TOKENS[found[0]], text)


class SpelledControlTokens:
    """Replaces control tokens that a text spells by their characters, in parts or whole."""

    def __init__(self) -> None:
        self._pending = ""

    def push(self, text: str, ended: bool) -> str:
        """Returns the text that is known. ended: this is the last part."""
        text = self._pending + text
        cut = len(text) if ended else len(text) - length_of_partial_mark(text, CONTROL_TOKENS)
        self._pending = text[cut:]
        return _with_characters(text[:cut])


class HarmonyParser:
    """Splits an answer into reasoning, content and calls, as `ReasoningParser` does.

    - Messages on the channel `analysis` are reasoning.
    - Messages to a function that may be called are calls.
    - All other messages are content: `final`, the text that a model writes on `commentary` before its calls
      (OpenAI: unlike the reasoning, it is intended for users), and calls of other functions.

    Messages of a kind are separated by a newline.
    """

    def __init__(self, calls: ToolCallParser | None, names: Collection[str] | None, header: str):
        """Makes a parser. calls: the parser of calls. None: calls are content. header: the text after the
        last <|start|> of the prompt, with control tokens as characters.
        """
        self._calls = calls
        self._names = names
        self._kind: str | None = None  # of the message: "reasoning", "content" or "call"; None: in a header
        self._header = ""
        self._begun: set[str] = set()  # kinds with text
        self._is_new = False  # the message has no text yet
        self._reasoning: list[str] = []  # of the last `push`
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self.found = False
        self._has_message = False
        self._given = 0
        self.push(header, False)
        self._given = len(self._header)  # characters of the header that are the prompt's

    @property
    def has_content(self) -> bool:
        """Returns True if a message of content has begun, or if nothing else has."""
        return self._has_message or not (self.found or self._calls and self._calls.calls)

    @property
    def in_content(self) -> bool:
        """Returns True if the text so far ends within a message of content."""
        return self._kind == "content"

    def push(self, text: str, ended: bool) -> tuple[str, str, list[ToolCallDelta]]:
        """Returns the new reasoning, the new content, and the new part of each call. ended: this is the last
        part.
        """
        self._reasoning = []
        self._content = []
        self._deltas = []
        while text:
            text = self._push_header(text) if self._kind is None else self._push_body(text)
        if ended:
            self._end_message()
            self._end_header()
        return "".join(self._reasoning), "".join(self._content), self._deltas

    def _push_header(self, text: str) -> str:
        room = _LONGEST_HEADER + self._given - len(self._header)
        head, mark, rest = text[:room].partition(MESSAGE)
        self._header += head
        if mark:
            self._begin_message(_HEADER_START.split(self._header)[-1])
            return rest + text[room:]
        if len(head) < room:
            return ""
        return self._leave_header() + text[room:]

    def _leave_header(self) -> str:
        """Begins a message of content, with the text that is no header."""
        text = _MARK.sub("", self._header[self._given :])
        self._begin_message("")
        return text

    def _begin_message(self, header: str) -> None:
        channel, name = header_fields(header)
        self._header = ""
        self._given = 0
        self._is_new = True
        if name and self._calls and (self._names is None or name in self._names):
            self._kind = "call"
            self._calls.begin(HARMONY, name=name)
        elif channel == "analysis":
            self._kind = "reasoning"
            self.found = True
        else:
            self._kind = "content"
            self._has_message = True

    def _push_body(self, text: str) -> str:
        end = _MESSAGE_END.search(text)
        body = _MARK.sub("", text[: end.start()] if end else text)
        self._add_body(body, False)
        if end is None:
            return ""
        self._end_message()
        self._header = end[0] if end[0] in (START, CHANNEL) else ""
        return text[end.end() :]

    def _add_body(self, text: str, ended: bool) -> None:
        if self._kind == "call" and self._calls:
            content, deltas = self._calls.push(text, ended)
            self._deltas += deltas
            self._add("content", content)
        elif self._kind:
            self._add(self._kind, text)

    def _add(self, kind: str, text: str) -> None:
        if not text:
            return
        pieces = self._reasoning if kind == "reasoning" else self._content
        if self._is_new and kind in self._begun:
            pieces.append("\n")
        pieces.append(text)
        self._is_new = False
        self._begun.add(kind)
        self._has_message = self._has_message or kind == "content"

    def _end_message(self) -> None:
        self._add_body("", True)
        self._kind = None

    def _end_header(self) -> None:
        """Handles the end of the answer: a text that is no part of a header is content."""
        own = self._header[self._given :].rstrip(END + CALL + RETURN).strip()
        if own and not _MARK.search(own) and not _RECIPIENT.fullmatch(own):
            self._add("content", self._leave_header())
            self._kind = None


class HarmonySplitter:
    """Splits an answer into parts that are content, and others, in the order of the text."""

    def __init__(self, header: str):
        self._parser = HarmonyParser(ToolCallParser([HARMONY], None, None, str), None, header)

    def push(self, text: str, ended: bool) -> list[tuple[str, bool]]:
        """Returns the new parts, each with True if it is content."""
        parts = []
        for part in _MARK_OR_TEXT.findall(text):
            parts.append((part, self._parser.in_content))
            self._parser.push(part, False)
        return parts


class _ArgumentsParser(CallParser):
    """Parses a message to a function, which the header names: its arguments as a JSON object."""

    def __init__(self, functions: Functions):
        super().__init__()
        self._text = ""
        self._object = JSONObjectScanner()

    def push(self, text: str) -> str:
        used = self._object.push(text)
        piece = text[:used]
        self.length += used
        if not self._text:
            piece = piece.lstrip()
        self._text += piece
        self.failed = self._object.failed
        if self._object.ended:
            try:
                json.dumps(json.loads(self._text), allow_nan=False)
            except (ValueError, RecursionError):  # a number that is too large
                self.failed = True
            self.ended = not self.failed
        return piece


def _grammar(parameters: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    """Returns the grammar of an answer. It is one call: the template writes no more."""
    heads = (
        f'{json.dumps(f"commentary to=functions.{name} ")} <|constrain|> "json" <|message|> a{i}'
        for i, name in enumerate(parameters)
    )
    rules = [
        "start: reasoning? <|channel|> call",
        'reasoning: <|channel|> "analysis" <|message|> REASONING <|end|> <|start|> "assistant"',
        "REASONING: /(?s:.*)/",
        f"call: {' | '.join(heads)}",
    ]
    schemas = enumerate(parameters.items())
    rules += [f"a{i}: {json_expression(name, closed(schema))}" for i, (name, schema) in schemas]
    return "\n".join(rules)


HARMONY = ToolCallForm(
    name="harmony",
    in_template=rf"to=functions\.{PROBE}\b.*<\|message\|>",
    parser=_ArgumentsParser,
    grammar=_grammar,
    has_channels=True,
)
