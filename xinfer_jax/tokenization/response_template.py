"""`ResponseTemplate`: how a model writes its answers, as a checkpoint declares it in tokenizer_config.json.

Source: transformers 5.24, `response_template`, version 1. Fields of a message have texts or regular
expressions that open and close them, and say how their content is parsed. The field without an opening takes
the rest.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import InputError, format_value
from ..grammar.regex_parser import NotRegularError, Ranges, Tree, parse_regex
from .template_content import PARSERS

_FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join",
    "optional", "transform", "transform_each",
}  # fmt: skip
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_LONGEST = 256  # characters of a pattern
_MOST_REPEATED = 64  # characters in a mark, as names of functions have in the OpenAI API
_QUANTIFIER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[*+]|\{(\d{1,2}),\}", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Mark:
    """A mark that opens or closes a field."""

    pattern: re.Pattern[str]  # finds it
    partial: re.Pattern[str]  # finds the last characters of a text that may become it


@dataclasses.dataclass(frozen=True)
class TemplateField:
    """A field of a message."""

    name: str
    open: Mark | None  # None: it takes what no other field does
    close: Mark | None  # None: the answer's end closes it
    content: str  # the name of a parser, one of `PARSERS`
    arguments: Mapping[str, Any]  # of the parser
    join: str  # between the texts of a field that occurs more than once
    transform: Any  # the value's form, with places for what was found; None: as parsed
    transforms_each: bool  # the transform applies to each item of a list


@dataclasses.dataclass(frozen=True)
class ResponseTemplate:
    """The fields of an answer."""

    fields: tuple[TemplateField, ...]  # in the order of the file
    anchor: re.Pattern[str]  # finds where a message of the model begins in a prompt

    @property
    def has_calls(self) -> bool:
        return any(field.name == "tool_calls" for field in self.fields)

    def begun(self, prompt: str) -> str:
        """Returns the part of the model's message that a prompt already has."""
        ends = [found.end() for found in self.anchor.finditer(prompt)]
        return prompt[ends[-1] :] if ends else ""


def parse_response_template(spec: Any) -> ResponseTemplate:
    """Checks and compiles a template. InputError: another form, or a pattern that is not regular."""
    if not isinstance(spec, Mapping) or {*spec} - _KEYS or spec.get("version", 1) != 1:
        raise InputError(f"response_template must be an object of version 1, got {format_value(spec)}")
    fields = spec.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise InputError(f"response_template must have fields, got {format_value(fields)}")
    found = tuple(_field(name, field) for name, field in fields.items())
    if sum(field.open is None for field in found) > 1:
        raise InputError("response_template: two fields have neither open nor open_pattern: give one of them")
    anchor = _mark("response_template", spec, "start_anchor")
    if anchor is None:
        raise InputError("response_template must have start_anchor or start_anchor_pattern: give one")
    return ResponseTemplate(found, anchor.pattern)


def _field(name: str, spec: Any) -> TemplateField:
    where = f"field {name!r} of response_template"
    if not isinstance(spec, Mapping) or {*spec} - _FIELD_KEYS:
        raise InputError(f"{where} has another form than is known: {format_value(spec)}")
    content = spec.get("content", "text")
    if content not in PARSERS:
        raise InputError(f"{where}: content must be one of {', '.join(PARSERS)}, got {format_value(content)}")
    arguments = spec.get("content_args", {})
    join = "\n" if spec.get("join") is None else spec["join"]
    if not isinstance(arguments, Mapping) or not isinstance(join, str):
        raise InputError(f"{where}: content_args must be an object, and join a text")
    if content == "xml-inline":
        _check_tags(where, arguments.get("tag_pattern"))
    opens, closes = (_mark(where, spec, key) for key in ("open", "close"))
    transform = spec.get("transform")
    return TemplateField(
        name, opens, closes, content, arguments, join, transform, bool(spec.get("transform_each"))
    )


def _check_tags(where: str, pattern: Any) -> None:
    try:
        if not isinstance(pattern, str) or len(pattern) > _LONGEST or "(?P<key>" not in pattern:
            raise NotRegularError(f"no text of {_LONGEST} characters at most with a group named key")
        _regular(pattern, blanks_may_touch=True)
        re.compile(pattern)
    except (NotRegularError, re.error, RecursionError, OverflowError) as error:
        raise InputError(f"{where}: tag_pattern {format_value(pattern)} is not served: {error}") from error


def _mark(where: str, spec: Mapping[str, Any], key: str) -> Mark | None:
    """Returns the mark that opens or closes a field: a text, one of several texts, or a regular
    expression.
    """
    if (texts := spec.get(key)) is not None:
        texts = [texts] if isinstance(texts, str) else texts
        if not texts or not isinstance(texts, list) or not all(isinstance(x, str) and x for x in texts):
            raise InputError(f"{where}: {key} must be a text or several, got {format_value(texts)}")
        whole = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        partials = [rf"{re.escape(text[:n])}\Z" for text in texts for n in range(len(text) - 1, 0, -1)]
        return Mark(re.compile(whole), re.compile("|".join(partials) or r"(?!)"))
    pattern: Any = spec.get(f"{key}_pattern")
    if pattern is None:
        return None
    try:
        is_text = isinstance(pattern, str) and len(pattern) <= _LONGEST
        if not is_text or pattern[:1] == "^" or pattern[-1:] == "$":
            raise NotRegularError(f"no text of {_LONGEST} characters at most, without ^ and $ around it")
        pattern = _QUANTIFIER.sub(_bounded, pattern)
        tree = _regular(pattern)
        compiled = re.compile(pattern, re.DOTALL | re.ASCII)
        if compiled.fullmatch(""):
            raise NotRegularError("it matches the empty text")
        return Mark(compiled, re.compile(_partial(tree)))
    except (NotRegularError, re.error, RecursionError, OverflowError) as error:
        raise InputError(f"{where}: {key}_pattern {format_value(pattern)} is not served: {error}") from error


def _bounded(found: re.Match[str]) -> str:
    """Gives a bound to a quantifier without one, so that the time of a search is linear in the text."""
    least = {"*": 0, "+": 1}.get(found[0], found[1])
    return found[0] if least is None else f"{{{least},{_MOST_REPEATED}}}"


def _regular(pattern: str, blanks_may_touch: bool = False) -> Tree:
    """Returns the tree of a pattern for whose matches `re` needs no long search. For every two repetitions,
    one begins with a character that the other lacks, or something between them does. Raises NotRegularError.
    blanks_may_touch: True: repetitions of spaces may stand next to others.
    """
    tree = parse_regex(re.sub(r"\(\?P<\w+>", "(?:", pattern))
    parts = [*_parts(tree)]
    for at, (own, repeats, _) in enumerate(parts):
        for other, other_repeats, must in parts[at + 1 :] if repeats else []:
            overlap = _overlap(own, other)
            if overlap and other_repeats and not (blanks_may_touch and _SPACES in (own, other)):
                raise NotRegularError("repetitions of the same characters beside each other")
            if must and not overlap:
                break
    return tree


_SPACES = parse_regex(r"\s")[1][0]


def _parts(tree: Tree, must: bool = True) -> Iterator[tuple[Ranges, bool, bool]]:
    """Returns sets of characters in order. For each set it says whether it may repeat, and whether it must
    occur.
    """
    kind = tree[0] if tree else ""
    if kind in ("join", "or"):
        for one in tree[1]:
            yield from _parts(one, must and kind == "join")
    elif kind == "repeat":
        _, one, least, most = tree
        within = [*_parts(one, must and least > 0)]
        if most is None or most > 1:
            if any(repeats for _, repeats, _ in within):
                raise NotRegularError("a repetition within a repetition")
            within = [(tuple(pair for ranges, *_ in within for pair in ranges), True, must and least > 0)]
        yield from within
    else:
        yield tree, False, must


def _overlap(one: Ranges, other: Ranges) -> bool:
    return any(low <= last and first <= high for low, high in one for first, last in other)


def _partial(tree: Tree) -> str:
    """Returns a regular expression of the ends of a text with which a text of the tree may begin."""
    kind = tree[0] if tree else ""
    if kind == "or":
        return f"(?:{'|'.join(map(_partial, tree[1]))})"
    if kind == "repeat":
        return f"{_whole(tree[1])}{{0,{tree[3] - 1}}}{_partial(tree[1])}"
    if kind == "join":
        found = "(?!)"
        for one in reversed(tree[1]):
            found = f"(?:{_partial(one)}|{_whole(one)}{found})"
        return found
    return r"\Z"


def _whole(tree: Tree) -> str:
    if not tree:
        return "(?!)"
    if tree[0] == "or":
        return f"(?:{'|'.join(map(_whole, tree[1]))})"
    if tree[0] == "repeat":
        _, one, least, most = tree
        return f"{_whole(one)}{{{least},{most}}}"
    if tree[0] == "join":
        return f"(?:{''.join(map(_whole, tree[1]))})"
    if tree[0] == (0, 9) and tree[1:2] == ((11, 0xD7FF),):  # a dot, which here is any character
        return r"[\s\S]"
    if len(tree) == 1 and tree[0][0] == tree[0][1]:
        return _code(tree[0][0])
    return f"[{''.join(f'{_code(low)}-{_code(high)}' for low, high in tree)}]"


def _code(character: int) -> str:
    return rf"\U{character:08x}"
