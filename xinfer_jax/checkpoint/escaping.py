"""Nobody forges a turn: where a message spells a control token, its ids are those of the letters."""

import functools
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import InputError, shown
from .tokenizer import Tokenizer

# Texts, lists and objects of one conversation, and lists within lists: what takes longer is no conversation.
_PARTS = 2**17
_DEPTH = 100


class _Control:
    """Some added tokens.

    Attributes:
        ids: theirs.
        spelled: a pattern of their texts, the longest first.
        folds: a text may become one only as the tokenizer normalizes it.
    """

    def __init__(self, tokenizer: Tokenizer, added: dict[int, Any]):
        self.ids = frozenset(added)
        self.spelled = re.compile(_any_of(token.content for token in added.values()) or "(?!)")
        self.folds = tokenizer.backend.normalizer is not None and any(t.normalized for t in added.values())


class Escaping:
    """Of one conversation. Control tokens are added tokens that are special, and those that the chat template
    spells, blanks aside; in what the assistant said only the special ones.
    """

    def __init__(self, tokenizer: Tokenizer):
        """tokenizer: whose template will be rendered."""
        self._tokenizer = tokenizer
        self._control, self._special = _controls(tokenizer, tokenizer.chat_template or "")
        self._mark = "".join(secrets.choice("0123456789") for _ in range(24))  # no template changes digits
        self._spelled: list[str] = []
        self._cuts: dict[str, int] = {}
        self._parts = 0

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """`hide` of each, after its role."""
        own = [self._special if m.get("role") == "assistant" else self._control for m in messages]
        return [self.hide(message, control) for message, control in zip(messages, own, strict=True)]

    def hide(self, value: Any, control: _Control | None = None, depth: int = _DEPTH) -> Any:
        """The same value with a number in the place of each control token that its texts spell.

        Raises:
            InputError: a text that becomes a control token only as it is normalized, or too many parts.
        """
        control = control or self._control
        self._parts = self._parts + 1
        if self._parts > _PARTS or not depth:
            raise InputError(
                f"the conversation has more than {_PARTS} parts, or lists nested more than {_DEPTH} deep:"
                " shorten it"
            )
        if isinstance(value, str):
            hidden = control.spelled.sub(self._number, value)
            if control.folds and not control.ids.isdisjoint(self._encode(hidden)):
                raise InputError("the conversation spells control tokens in other letters: leave them out")
            return hidden
        if isinstance(value, dict):
            inner = {self.hide(name, control): one for name, one in value.items()}
            return {name: self.hide(one, control, depth - 1) for name, one in inner.items()}
        if isinstance(value, list | tuple):
            return [self.hide(one, control, depth - 1) for one in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Ids of a text that was rendered from what `hide` gave.

        Raises:
            InputError: a spelling that cannot be told from its token.
        """
        first, *rest = re.split(f"{self._mark}([0-9]{{6}})", text)
        parts = [first]
        for number, after in zip(rest[::2], rest[1::2], strict=True):
            spelled = self._spelled[int(number)]
            at = self._cut(spelled)
            parts[-1] += spelled[:at]
            parts.append(spelled[at:] + after)
        flat = [i for part in parts if part for i in self._encode(part)]
        if self._spelled and self._count(flat) != self._count(self._encode(text)):
            raise InputError(
                f"the conversation spells control tokens, like {shown(self._spelled[0])}: leave them out"
            )
        return flat

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _number(self, match: re.Match[str]) -> str:
        if len(self._spelled) == 10**6:
            raise InputError("the conversation spells a million control tokens: leave them out")
        self._spelled.append(match[0])
        return f"{self._mark}{len(self._spelled) - 1:06d}"

    def _cut(self, spelled: str) -> int:
        """Where neither part spells a control token; 0: nowhere."""
        if spelled not in self._cuts:
            found = self._control.spelled.search
            cuts = (at for at in range(1, len(spelled)) if not (found(spelled[:at]) or found(spelled[at:])))
            self._cuts[spelled] = next(cuts, 0)
        return self._cuts[spelled]

    def _count(self, ids: Sequence[int]) -> int:
        return sum(i in self._control.ids for i in ids)


@functools.lru_cache(2)
def _controls(tokenizer: Tokenizer, template: str) -> tuple[_Control, _Control]:
    """The control tokens, and the special ones; thousands of some tokenizers."""
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {i: token for i, token in added.items() if token.special and token.content}
    named = {i: token for i, token in added.items() if token.content.strip() and token.content in template}
    return _Control(tokenizer, named | special), _Control(tokenizer, special)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of texts, letter by letter: its time does not grow with their number."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    ends = rests.pop("", None)
    found = [re.escape(letter) + _any_of(after) for letter, after in rests.items()]
    if len(found) == 1 and not ends or not found:
        return "".join(found)
    return f"(?:{'|'.join(found)}){'?' if ends else ''}"
