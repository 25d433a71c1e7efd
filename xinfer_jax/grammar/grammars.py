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
    """What an answer has to be. `GenerateOptions(grammar=…)` takes it.

    The text functions, engines, files and the server use their model's tokenizer; `generate` and `stream` of
    ids need it: `json_schema(schema, tokenizer=model.tokenizer)`.

    Attributes:
        kind: "json", "regex" or "lark"; "calls" of `tool_grammar`.
        source: a JSON Schema as JSON, a regular expression, or a grammar in llguidance's Lark syntax.
        tokenizer: from `load_model`; None: that of the model, where there is one.
        reasoning_end: the text after which the grammar begins; None: it begins with the answer. "auto":
            "</think>" where the chat template lets the model think, and the prompt ends where it does so; for
            gpt-oss the header of the channel `final`. Its answer may be a call instead.
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
        """What follows answers of a model with V logits. InputError: no tokenizer, or it is not served."""
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
    """A grammar of JSON values that are valid for a schema.

    Source: JSON Schema, the keywords that llguidance implements; others are rejected by name. Objects that
    declare properties, and do not say whether there are others, have no others.

    Args:
        schema: a dict, JSON text, or a pydantic model (a class with `model_json_schema`).
        compact: no whitespace between the tokens of JSON. False: any whitespace, in which a model may wander.
        strict: `uniqueItems` and formats that are not enforced are an error. False: they are left out.
        tokenizer, reasoning_end: as in `Grammar`.

    Raises:
        GrammarError: not a schema, one that is too large, or that would allow answers that are not valid.
            Whether it is served otherwise is known when it is used.
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
    """A grammar of JSON objects. tokenizer, reasoning_end: as in `Grammar`."""
    return json_schema({"type": "object"}, tokenizer=tokenizer, reasoning_end=reasoning_end)


def regex(pattern: str, *, tokenizer: "Tokenizer | None" = None, reasoning_end: str | None = AUTO) -> Grammar:
    r"""A grammar of texts that match a regular expression as a whole.

    Source: the syntax of Rust's regex crate, without anchors within, look-around and references. `\d`, `\w`
    and `\s` are those of ASCII, as with `re.ASCII` and in JSON Schema.

    Args:
        pattern: the expression; ^ and $ around it are not needed.
        tokenizer, reasoning_end: as in `Grammar`.
    """
    return Grammar("regex", pattern, tokenizer, reasoning_end)


def lark(grammar: str, *, tokenizer: "Tokenizer | None" = None, reasoning_end: str | None = AUTO) -> Grammar:
    """A context-free grammar in llguidance's Lark syntax, whose rule is `start`.

    Args:
        grammar: the text.
        tokenizer, reasoning_end: as in `Grammar`.
    """
    return Grammar("lark", grammar, tokenizer, reasoning_end)


def choice(
    texts: Sequence[str], *, tokenizer: "Tokenizer | None" = None, reasoning_end: str | None = AUTO
) -> Grammar:
    """A grammar of these texts alone.

    Args:
        texts: at least one; none is empty.
        tokenizer, reasoning_end: as in `Grammar`.
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
