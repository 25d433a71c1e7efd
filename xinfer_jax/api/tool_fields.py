"""Parses the fields of tools: the functions that an answer may or must call."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import format_value
from ..grammar.grammars import Grammar
from ..tokenization.conversation import check_template_tools
from ..tokenization.tokenizer import Tokenizer
from ..tokenization.tool_choice import known_format, tool_grammar
from .fields import BodyError, Fields, errors_of

_CHOICES = ("none", "auto", "required")


@dataclasses.dataclass(frozen=True)
class ToolSettings:
    """The tools of a request."""

    tools: list[dict[str, Any]]  # that the prompt describes
    format: str | None  # how the model writes calls: the name of a form; None: as its response template says
    grammar: Grammar | None  # of answers that are calls; None: the answer need not have any
    most_calls: int | None  # calls after this many are dropped; None: no limit
    tokenizer: Tokenizer

    def calls_or(self, answer: Grammar) -> Grammar:
        """Returns a grammar of answers that are calls, or that follow another grammar."""
        with errors_of("tools", "tools beside a grammar: "):
            return tool_grammar(self.tools, self.tokenizer, several=self.most_calls is None, answer=answer)


def parse_tools(fields: Fields, tokenizer: Tokenizer | None) -> ToolSettings | None:
    """Returns the tools of a body. None: it has none, or tool_choice "none": the prompt leaves them out."""
    given = fields.values.get("tools")
    choice = fields.values.get("tool_choice", "auto")
    parallel = fields.boolean("parallel_tool_calls", True)
    if not isinstance(choice, Mapping) and choice not in _CHOICES:
        said = format_value(choice)
        raise BodyError("tool_choice", f"tool_choice must be none, auto, required or a function, got {said}")
    if given in (None, []) and choice not in ("none", "auto"):
        raise BodyError("tool_choice", "tool_choice needs tools beside it: give tools, or leave it out")
    if given in (None, []) or choice == "none":
        return None
    name = _chosen_name(choice) if isinstance(choice, Mapping) else None
    if tokenizer is None:
        raise BodyError("tools", "tools need a chat template, which this checkpoint lacks: leave them out")
    with errors_of("tools"):
        tools = check_template_tools(tokenizer, given)
        template = tokenizer.answer_template
        call_format = None if template and template.has_calls else known_format(tokenizer)
    grammar = None
    if choice != "auto":
        with errors_of("tool_choice", "tool_choice: "):
            grammar = tool_grammar(tools, tokenizer, name=name, several=parallel)
    return ToolSettings(tools, call_format, grammar, 1 if name or not parallel else None, tokenizer)


def _chosen_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        form = "{'type': 'function', 'function': {'name': …}}"
        raise BodyError("tool_choice", f"tool_choice as an object must be {form}, got {format_value(choice)}")
    return name
