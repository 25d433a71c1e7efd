"""`tool_grammar`: answers that call a function, in the form in which the chat template writes calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, format_value
from ..grammar.compiler import AUTO, CALLS
from ..grammar.grammars import Grammar
from ..grammar.served_schemas import served_schema
from ..grammar.token_masks import lark_text
from ..tool_calls.tool_call_form import tool_call_form
from ..tool_calls.tool_messages import parameter_schemas
from .conversation import check_template_tools
from .tokenizer import Tokenizer


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    several: bool = True,
    reasoning_end: str | None = AUTO,
    answer: Grammar | None = None,
) -> Grammar:
    """Returns a grammar of answers that call your tools with valid arguments.

    Use it if the model must call a tool. Properties that a schema does not describe never occur, even if the
    schema allows them. Some unsupported schemas raise `InputError` only at the first use of the grammar.

    Args:
        tools: the tools, in the form of the OpenAI API. `encode_prompt` puts them into the prompt.
        tokenizer: the tokenizer of the model. Its chat template decides the form of a call.
        name: the name of the function that must be called, once. None allows any of the tools.
        several: True allows more than one call. Llama 3 and gpt-oss write one call.
        reasoning_end: the text after which the grammar begins (see `Grammar`). For Harmony, "auto" means
            None, because the grammar allows reasoning before a call.
        answer: a grammar of answers without calls, which has its own `reasoning_end`. The model may then
            write such an answer in place of calls. gpt-oss writes calls on another channel, so it can call
            tools next to any grammar, and the result is `answer` itself. None: the answer must be a call.

    Raises:
        InputError: there are no tools, or no tool has this name.
        InputError: the chat template ignores tools, or writes calls in an unknown form.
        InputError: the form cannot express a keyword of a schema.
        InputError: a schema would allow invalid arguments.
    """
    checked = check_template_tools(tokenizer, tools)
    schemas = parameter_schemas(checked)
    if name is not None and name not in schemas or not schemas:
        raise InputError(f"{format_value(name)} is none of the {len(schemas)} tools: give one of their names")
    form = tool_call_form(known_format(tokenizer))
    if answer is not None and form.has_channels:
        return answer
    chosen = {
        one["name"]: _served(one, schemas[one["name"]])
        for one in (tool["function"] for tool in checked)
        if name in (None, one["name"])
    }
    source = form.grammar(chosen, several and name is None)
    if answer is not None:
        other = f"answer: %lark {{\n{lark_text(answer.kind, answer.source)}\n}}"
        source = "\n".join(["start: calls | answer", other, source.replace("start:", "calls:", 1)])
        reasoning_end = answer.reasoning_end
    if form.has_channels and reasoning_end == AUTO:
        reasoning_end = None
    return Grammar(CALLS, source, tokenizer, reasoning_end)


def _served(function: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
    try:
        return served_schema(schema, function.get("strict") is True)
    except InputError as error:
        raise InputError(f"tool {function['name']!r}: {error}") from error


def known_format(tokenizer: Tokenizer) -> str:
    """Returns the form in which a chat template that uses tools writes calls. InputError: it is not known."""
    if (call_format := tokenizer.template_tools.format) is None:
        raise InputError(
            "the chat template writes calls of tools in a form that is not served: leave tools out"
        )
    return call_format
