"""Nobody forges a turn: where a message spells a control token, its ids are those of the letters."""

import re
import secrets
from collections.abc import Sequence
from typing import Any

from ..errors import InputError, shown
from .tokenizer import Tokenizer


class Escaping:
    """Of one conversation. Control tokens are added tokens that are special, and those that the chat template
    spells; in what the assistant said only the special ones.
    """

    def __init__(self, tokenizer: Tokenizer):
        """tokenizer: whose template will be rendered."""
        added, template = tokenizer.backend.get_added_tokens_decoder(), tokenizer.chat_template or ""
        self._tokenizer = tokenizer
        self._special = [token.content for token in added.values() if token.special]
        self._control = [t.content for t in added.values() if t.special or t.content in template]
        self._ids = {i for i, token in added.items() if token.content in self._control}
        self._mark = "".join(secrets.choice("0123456789") for _ in range(24))  # no template changes digits
        self._spelled: list[str] = []

    def hide(self, value: Any, tokens: Sequence[str] | None = None) -> Any:
        """The same messages or variables with a number in the place of each control token that they spell."""
        if isinstance(value, str):
            longest_first = sorted(self._control if tokens is None else tokens, key=len, reverse=True)
            found = "|".join(map(re.escape, filter(None, longest_first)))
            return re.sub(found, self._number, value) if found else value
        if isinstance(value, dict):
            own = self._special if value.get("role") == "assistant" else tokens
            return {self.hide(name, own): self.hide(one, own) for name, one in value.items()}
        return [self.hide(one, tokens) for one in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str) -> list[int]:
        """Ids of a text that was rendered from what `hide` gave.

        Raises:
            InputError: a spelling that cannot be told from its token.
        """
        first, *rest = re.split(f"{self._mark}([0-9]{{6}})", text)
        parts = [first]
        for number, after in zip(rest[::2], rest[1::2], strict=True):
            spelled = self._spelled[int(number)]
            at = next((i for i in range(1, len(spelled)) if self._harmless(spelled[:i], spelled[i:])), 0)
            parts[-1] += spelled[:at]
            parts.append(spelled[at:] + after)
        ids = [self._tokenizer.encode(part, add_special_tokens=False) for part in parts if part]
        flat = [i for part in ids for i in part]
        if self._spelled and self._count(flat) != self._count(
            self._tokenizer.encode(text, add_special_tokens=False)
        ):
            raise InputError(
                f"the conversation spells control tokens, like {shown(self._spelled[0])}: leave them out"
            )
        return flat

    def _number(self, match: re.Match[str]) -> str:
        if len(self._spelled) == 10**6:
            raise InputError("the conversation spells a million control tokens: leave them out")
        self._spelled.append(match[0])
        return f"{self._mark}{len(self._spelled) - 1:06d}"

    def _harmless(self, *parts: str) -> bool:
        return not any(token in part for part in parts for token in self._control if token)

    def _count(self, ids: Sequence[int]) -> int:
        return sum(i in self._ids for i in ids)
