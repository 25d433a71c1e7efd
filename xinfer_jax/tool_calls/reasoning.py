"""The text between <think> and </think>, or between Gemma 4's marks, and the content after it."""

from .call_parser import length_of_partial_mark
from .gemma_call import GEMMA_CHANNEL, GEMMA_CHANNEL_END
from .tool_call_parser import ToolCallDelta, ToolCallParser

THINK_START = "<think>"
THINK_END = "</think>"
_ENDS = {THINK_START: THINK_END, f"{GEMMA_CHANNEL}thought": GEMMA_CHANNEL_END}


class ReasoningParser:
    """Splits an answer into reasoning, content and calls, in parts as it is generated or whole.

    If an answer ends within its reasoning, calls at its end are calls. If text follows a call, or the mark
    that ends the reasoning, it is a part of the reasoning.

    Attributes:
        found: the answer has reasoning, perhaps an empty one.
    """

    def __init__(self, in_reasoning: bool, calls: ToolCallParser | None = None):
        """Makes a parser. in_reasoning: True: the prompt ends within the reasoning. calls: a parser that
        splits the content.
        """
        self._calls = calls
        self._trailing = calls.trailing() if calls else None
        self._state = "reasoning" if in_reasoning else "start"
        self._end = THINK_END
        self._pending = ""  # may be the beginning of a mark
        self._blanks: list[str] = []  # before the first other character
        self._at_start = True  # of the reasoning: its first newline is left out
        self.found = in_reasoning

    @property
    def has_content(self) -> bool:
        """Returns True if the reasoning has ended, or if there is none."""
        return self._state in ("before content", "content")

    def push(self, text: str, ended: bool) -> tuple[str, str, list[ToolCallDelta]]:
        """Returns the new reasoning, the new content, and the new part of each call. ended: this is the last
        part.
        """
        reasoning, content = self._split(text, ended)
        if self._calls is None:
            return reasoning, content, []
        content, deltas = self._calls.push(content, ended)
        if ended and self._state == "reasoning" and self._trailing:
            for _, name, arguments in self._trailing.calls:
                deltas += self._calls.add(name, arguments)
        return reasoning, content, deltas

    def _split(self, text: str, ended: bool) -> tuple[str, str]:
        text = self._pending + text
        self._pending = ""
        reasoning = ""
        if self._state == "start":
            text = self._push_start(text, ended)
        if self._state == "reasoning":
            reasoning, text = self._push_reasoning(text, ended)
        if self._state == "before content":
            text = text.lstrip("\n")
            self._state = "content" if text else "before content"
        return (reasoning, text) if self.has_content else (reasoning, "")

    def _push_start(self, text: str, ended: bool) -> str:
        stripped = text.lstrip()
        self._blanks.append(text[: len(text) - len(stripped)])
        for start, end in _ENDS.items():
            if stripped.startswith(start):
                self._state = "reasoning"
                self._end = end
                self.found = True
                return stripped[len(start) :]
        if ended or not any(start.startswith(stripped) for start in _ENDS):
            self._state = "content"
            return "".join(self._blanks) + stripped
        self._pending = stripped
        return ""

    def _push_reasoning(self, text: str, ended: bool) -> tuple[str, str]:
        reasoning, mark, content = text.partition(self._end)
        if mark:
            self._state = "before content"
        elif not ended:
            cut = len(reasoning) - length_of_partial_mark(reasoning, [self._end])
            self._pending = reasoning[cut:]
            reasoning = reasoning[:cut]
        if self._trailing:
            reasoning = (
                self._trailing.held + reasoning if mark else self._trailing.push_text(reasoning, ended)
            )
        if reasoning and self._at_start:
            self._at_start = False
            reasoning = reasoning.removeprefix("\n")
        return reasoning, content


class ReasoningSplitter:
    """Splits an answer into parts that are content, and others, in the order of the text."""

    def __init__(self, start: str):
        """Makes a splitter. start: the part of the answer that the prompt has already, such as <think>."""
        self._parser = ReasoningParser(False)
        self._parser.push(start, False)
        self._unknown = ""  # may be the beginning of <think>, or content

    def push(self, text: str, ended: bool) -> list[tuple[str, bool]]:
        """Returns the new parts, each with True if it is content. ended: this is the last text."""
        _, content, _ = self._parser.push(text, ended)
        text = self._unknown + text
        self._unknown = "" if self._parser.found or self._parser.has_content else text
        other = text[: len(text) - len(content)]
        return [] if self._unknown else [(other, False), (content, True)]
