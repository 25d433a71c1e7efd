"""`Grammar` and the functions that make one: `json_schema`, `json_object`, `regex`, `lark`, `choice`."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..checks import is_sequence
from ..errors import GrammarError, InputError, format_value
from ..tool_calls.call_grammar import ESCAPES
from .compiler import AUTO
from .matcher import CompiledGrammar
from .served_schemas import served_schema

if TYPE_CHECKING:
    from ..tokenization.tokenizer import Tokenizer

MAX_CHARACTERS = 2**18  # of a grammar; a schema of so many compiles for about two seconds


@dataclasses.dataclass(frozen=True, repr=False)
class Grammar:
    """The form that an answer must have (structured output). Pass it to `GenerateOptions(grammar=…)`.

    `json_schema`, `json_object`, `regex`, `choice`, `lark` and `xj.tools.tool_grammar` make it. Functions of
    text, engines, files and the server use the tokenizer of their model. `generate` and `stream` take ids, so
    they need the tokenizer in the grammar, for example `json_schema(schema, tokenizer=model.tokenizer)`.

    Attributes:
        kind: "json", "regex" or "lark". It is "calls" for `tool_grammar`.
        source: a JSON Schema as JSON, a regular expression, or a grammar in llguidance's Lark syntax.
        tokenizer: the tokenizer of the model. None takes the tokenizer of the call's model, if there is one.
        reasoning_end: the text after which the grammar begins. None: it begins with the answer. "auto": it
            begins after "</think>" if the chat template lets the model think and the prompt ends at this
            point. For gpt-oss it begins after the header of the channel `final`, and the answer may also be a
            call.
    """

    kind: str
    source: str
    tokenizer: "Tokenizer | None" = None
    reasoning_end: str | None = AUTO

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source.strip():
            raise InputError(f"the {self.kind} grammar must be a text, got {format_value(self.source)}")
        if len(self.source) > MAX_CHARACTERS:
            size = f"{len(self.source)} characters, more than {MAX_CHARACTERS}"
            raise GrammarError(f"the {self.kind} grammar has {size}: give a smaller one")
        if re.search("[\ud800-\udfff]", self.source):
            raise GrammarError(f"the {self.kind} grammar has half of a surrogate pair: leave it out")
        end = self.reasoning_end
        if end is not None and not (isinstance(end, str) and end):
            raise InputError(f"reasoning_end must be a text, 'auto' or None, got {format_value(end)}")

    def compile(self, vocab_size: int) -> CompiledGrammar:
        """Returns the compiled grammar, which follows the answers of a model with V logits.

        Args:
            vocab_size: the number V of logits.

        Raises:
            InputError: the grammar has no tokenizer, or it is not supported.
        """
        if self.tokenizer is None:
            raise InputError("a grammar needs the tokenizer: give tokenizer=model.tokenizer beside it")
        return CompiledGrammar(self, vocab_size)

    def __repr__(self) -> str:
        return f"Grammar({self.kind}, {format_value(self.source, 40)})"


def json_schema(
    schema: Any,
    *,
    compact: bool = True,
    strict: bool = True,
    tokenizer: "Tokenizer | None" = None,
    reasoning_end: str | None = AUTO,
) -> Grammar:
    """Returns a grammar of the JSON values that are valid for a JSON Schema.

    It supports the keywords that llguidance implements, and raises an error with the names of other keywords.
    If a schema declares properties of an object and does not say whether there may be others, there are no
    others.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        >>> options = xj.GenerateOptions(grammar=xj.grammar.json_schema(schema))
        >>> text = xj.generate_text(model, "What is the capital of France?", options)
        >>> text.startswith('{"city":"')
        True

    Args:
        schema: a dict, JSON text, or a pydantic model (a class with `model_json_schema`).
        compact: True allows no whitespace between the tokens of JSON. False allows any whitespace, and a
            model may then generate whitespace without end.
        strict: True raises an error for `uniqueItems` and for formats that cannot be enforced. False leaves
            them out.
        tokenizer: the tokenizer of the model (see `Grammar`). None takes the tokenizer of the call's model.
        reasoning_end: the text after which the grammar begins (see `Grammar`). None: it begins with the
            answer.

    Raises:
        GrammarError: the argument is not a schema, the schema is too large, or it would allow invalid
            answers. Other unsupported schemas raise it at their first use.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        value = json.loads(schema) if isinstance(schema, str) and len(schema) <= MAX_CHARACTERS else schema
        source = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"a JSON schema must be JSON, got {format_value(schema)}: {error}") from error
    is_large = len(source) > MAX_CHARACTERS  # `Grammar` says so
    if not (is_large or isinstance(value, Mapping | bool)):
        raise GrammarError(f"a JSON schema must be an object, true or false, got {format_value(schema)}")
    if value and not is_large:
        served = served_schema({} if value is True else json.loads(source), strict)
        options = ESCAPES | ({"whitespace_flexible": False} if compact else {})
        source = json.dumps(served | {"x-guidance": options}, ensure_ascii=False)
    return Grammar("json", source, tokenizer, reasoning_end)


def json_object(*, tokenizer: "Tokenizer | None" = None, reasoning_end: str | None = AUTO) -> Grammar:
    """Returns a grammar of JSON objects with any content.

    Args:
        tokenizer: the tokenizer of the model (see `Grammar`). None takes the tokenizer of the call's model.
        reasoning_end: the text after which the grammar begins (see `Grammar`). None: it begins with the
            answer.
    """
    return json_schema({"type": "object"}, tokenizer=tokenizer, reasoning_end=reasoning_end)


def regex(pattern: str, *, tokenizer: "Tokenizer | None" = None, reasoning_end: str | None = AUTO) -> Grammar:
    r"""Returns a grammar of the texts that match a regular expression as a whole.

    The syntax is the syntax of Rust's regex crate, without look-around, references, and anchors inside the
    expression. `\d`, `\w` and `\s` match ASCII only, as with `re.ASCII` and in JSON Schema.

    Args:
        pattern: the expression, for example `[0-9]{4}-[0-9]{2}`. It needs no ^ and $ around it.
        tokenizer: the tokenizer of the model (see `Grammar`). None takes the tokenizer of the call's model.
        reasoning_end: the text after which the grammar begins (see `Grammar`). None: it begins with the
            answer.
    """
    return Grammar("regex", pattern, tokenizer, reasoning_end)


def lark(grammar: str, *, tokenizer: "Tokenizer | None" = None, reasoning_end: str | None = AUTO) -> Grammar:
    """Returns a context-free grammar in llguidance's Lark syntax. Its main rule has the name `start`.

    Args:
        grammar: the text of the grammar.
        tokenizer: the tokenizer of the model (see `Grammar`). None takes the tokenizer of the call's model.
        reasoning_end: the text after which the grammar begins (see `Grammar`). None: it begins with the
            answer.
    """
    return Grammar("lark", grammar, tokenizer, reasoning_end)


def choice(
    texts: Sequence[str], *, tokenizer: "Tokenizer | None" = None, reasoning_end: str | None = AUTO
) -> Grammar:
    """Returns a grammar that allows only the given texts.

    Args:
        texts: at least one text, for example `["yes", "no"]`. No text is empty.
        tokenizer: the tokenizer of the model (see `Grammar`). None takes the tokenizer of the call's model.
        reasoning_end: the text after which the grammar begins (see `Grammar`). None: it begins with the
            answer.
    """
    if not is_sequence(texts) or not len(texts) or not all(isinstance(x, str) and x for x in texts):
        raise InputError(f"choice must be a list of texts that are not empty, got {format_value(texts)}")
    return Grammar("regex", "|".join(map(escape_regex, texts)), tokenizer, reasoning_end)


def escape_regex(text: str) -> str:
    """Returns a regular expression that matches this text alone."""
    return "".join(rf"\{c}" if c in r"\.+*?()|[]{}^$#&-~/" else c for c in text)


def with_tokenizer(grammar: Any, tokenizer: Any) -> Any:
    """Returns a grammar, or a list of them, with this tokenizer if it has none."""
    if is_sequence(grammar):
        return [with_tokenizer(one, tokenizer) for one in grammar]
    if isinstance(grammar, Grammar) and grammar.tokenizer is None:
        return dataclasses.replace(grammar, tokenizer=tokenizer)
    return grammar
