"""Encodes control tokens that a user's text spells as ordinary text: no user can fake another role."""

import functools
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import InputError, format_value
from .tokenizer import Tokenizer

# Limits of one conversation: texts, lists and objects, and nested lists.
_MAX_PARTS = 2**17
_MAX_DEPTH = 100


class _ControlTokens:
    """Some of the tokenizer's added tokens."""

    def __init__(self, tokenizer: Tokenizer, added: dict[int, Any]):
        self.ids = frozenset(added)
        self.pattern = re.compile(_any_of(token.content for token in added.values()) or "(?!)")
        # Whether the tokenizer's normalizer can turn another text into one of them.
        has_normalizer = tokenizer.backend.normalizer is not None
        self.normalized = has_normalizer and any(token.normalized for token in added.values())


class ControlTokenEscaper:
    """Escapes the control tokens in one conversation: `mask` before the chat template, `encode` after it.

    Control tokens are the special added tokens, and the added tokens that the chat template spells, other
    than whitespace. In assistant messages only the special ones count.
    """

    def __init__(self, tokenizer: Tokenizer, template: str):
        """Makes an escaper. template: the template that will be rendered."""
        self._tokenizer = tokenizer
        self._control, self._special = _control_tokens(tokenizer, template)
        self._marker = "".join(secrets.choice("0123456789") for _ in range(24))  # templates keep digits
        self._spelled: list[str] = []
        self._split_points: dict[str, int] = {}
        self._parts = 0

    def mask_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Runs `mask` of each message, with the control tokens of its role."""
        masked = []
        for message in messages:
            control = self._special if message.get("role") == "assistant" else self._control
            masked.append(self.mask(message, control))
        return masked

    def mask(self, value: Any, control: _ControlTokens | None = None, depth: int = _MAX_DEPTH) -> Any:
        """Returns a value with a numbered marker in place of each control token that its texts spell. Raises
        InputError for a text that only normalization turns into a control token, or too many parts.
        """
        control = control or self._control
        self._parts = self._parts + 1
        if self._parts > _MAX_PARTS or not depth:
            raise InputError(
                f"the conversation has more than {_MAX_PARTS} parts, or lists nested more than {_MAX_DEPTH}"
                " deep: shorten it"
            )
        if isinstance(value, str):
            masked = control.pattern.sub(self._mark, value)
            if control.normalized and not control.ids.isdisjoint(self._encode(masked)):
                raise InputError("the conversation spells control tokens in other letters: leave them out")
            return masked
        if isinstance(value, dict):
            with_masked_names = {self.mask(name, control): item for name, item in value.items()}
            return {name: self.mask(item, control, depth - 1) for name, item in with_masked_names.items()}
        if isinstance(value, list | tuple):
            return [self.mask(item, control, depth - 1) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text that was rendered from masked values: markers become ordinary text again.
        Raises InputError for a spelling that the tokenizer cannot encode without its control token.
        """
        first, *rest = re.split(f"{self._marker}([0-9]{{6}})", text)
        # A spelling is split in two, and each part is encoded on its own: neither contains a control token.
        parts = [first]
        for number, after in zip(rest[::2], rest[1::2], strict=True):
            spelled = self._spelled[int(number)]
            at = self._split_point(spelled)
            parts[-1] += spelled[:at]
            parts.append(spelled[at:] + after)
        ids = [i for part in parts if part for i in self._encode(part)]
        if self._spelled and self._count_control(ids) != self._count_control(self._encode(text)):
            raise InputError(
                f"the conversation spells control tokens, like {format_value(self._spelled[0])}: leave them"
                " out"
            )
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _mark(self, match: re.Match[str]) -> str:
        """Returns the marker for a spelled control token, which is remembered by its number."""
        if len(self._spelled) == 10**6:
            raise InputError("the conversation spells a million control tokens: leave them out")
        self._spelled.append(match[0])
        return f"{self._marker}{len(self._spelled) - 1:06d}"

    def _split_point(self, spelled: str) -> int:
        """Returns the index at which a spelling is split so that neither part spells a control token, or 0 if
        there is none.
        """
        if spelled not in self._split_points:
            search = self._control.pattern.search
            points = (i for i in range(1, len(spelled)) if not (search(spelled[:i]) or search(spelled[i:])))
            self._split_points[spelled] = next(points, 0)
        return self._split_points[spelled]

    def _count_control(self, ids: Sequence[int]) -> int:
        return sum(i in self._control.ids for i in ids)


def encode_wrapped(
    tokenizer: Tokenizer, pieces: Sequence[str], escape: bool = True, template: str = ""
) -> list[int]:
    """Returns the ids of pieces as one text, without the tokenizer's special tokens around it. Pieces at even
    places are of a template and may spell control tokens. Those between them are texts of a user and never
    become control tokens, unless escape is False.

    Args:
        template: the whole template, if the pieces have a part of it.

    Raises:
        InputError: as the methods of `ControlTokenEscaper`.
    """
    if not escape:
        return tokenizer.encode("".join(pieces), add_special_tokens=False)
    escaper = ControlTokenEscaper(tokenizer, template or "".join(pieces[::2]))
    return escaper.encode("".join(escaper.mask(piece) if i % 2 else piece for i, piece in enumerate(pieces)))


@functools.lru_cache(8)
def _control_tokens(tokenizer: Tokenizer, template: str) -> tuple[_ControlTokens, _ControlTokens]:
    """Returns the control tokens, and the special ones among them. Cached: some tokenizers have thousands."""
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {i: token for i, token in added.items() if token.special and token.content}
    named = {i: token for i, token in added.items() if token.content.strip() and token.content in template}
    return _ControlTokens(tokenizer, named | special), _ControlTokens(tokenizer, special)


def _any_of(texts: Iterable[str]) -> str:
    """Returns a pattern that matches the longest of the texts: a trie, whose time does not grow with their
    number.
    """
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    can_end = rests.pop("", None)
    branches = [re.escape(letter) + _any_of(after) for letter, after in rests.items()]
    if len(branches) == 1 and not can_end or not branches:
        return "".join(branches)
    return f"(?:{'|'.join(branches)}){'?' if can_end else ''}"
