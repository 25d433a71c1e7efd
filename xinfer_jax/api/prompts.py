"""The prompts of a body as token ids."""

import json
from collections.abc import Callable
from typing import Any

from ..checks import token_ids
from ..errors import ContextLengthError, InputError, shown
from .fields import BodyError, Fields, template_variables

Encode = Callable[..., list[int]]  # `prompt_ids` of one tokenizer
_MOST_ANSWERS = 1024  # to one body
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Prompts:
    """What a body says of its prompts.

    Args:
        take: the fields.
        kind: as in `Asked`.
        encode: gives the ids of a text or of messages; called as `prompt_ids` without its tokenizer.
        template: the chat template; None: there is none.
        vocab_size: ids lie below it.
        limit: tokens of the model's context.
        escape: control tokens that a conversation spells get the ids of their letters.
    """

    def __init__(  # noqa: PLR0913  what ids depend on
        self, take: Fields, kind: str, encode: Encode, template: str | None, vocab_size: int, limit: int,
        escape: bool,
    ):  # fmt: skip
        self._take = take
        self._kind = kind
        self._encode = encode
        self._template = template
        self._vocab_size = vocab_size
        self._limit = limit
        self._escape = escape

    def ids(self, room: int) -> list[list[int]]:
        """The ids of each prompt. room: tokens of a prompt at most, where it is to be cut.

        Raises:
            BodyError: with the field at fault.
        """
        take = self._take
        kind = self._kind
        prompt: Any = take.given.get("prompt")
        messages = take.given.get("messages")
        needs = "messages" if kind == "chat" else "prompt"
        if (prompt is None) == (messages is None):
            names = "a prompt or messages, one of them" if kind == "plain" else needs
            raise BodyError(needs, f"the body must have {names}")
        try:
            if messages is not None:
                return [self._cut(self._of_messages(messages), room)]
            several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
            if not several or kind != "completion":
                return [self._cut(self._of_text(prompt), room)]
            rows = len(prompt) * max(take.whole(name, 1, 128) or 1 for name in ("n", "best_of"))
            if rows > _MOST_ANSWERS:
                raise InputError(
                    f"{rows} answers are more than the {_MOST_ANSWERS} of one request: send several"
                )
            return [self._cut(self._of_text(one), room) for one in prompt]
        except BodyError:
            raise
        except InputError as error:
            raise BodyError("prompt" if messages is None else "messages", error) from error

    def _of_text(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list):
            if len(prompt) > self._limit and not self._cuts:
                raise ContextLengthError(
                    f"the prompt has {len(prompt)} tokens, more than the {self._limit} of the model's"
                    " context: shorten it"
                )
            ids = token_ids("prompt", prompt, self._vocab_size)
            if not ids:
                raise InputError("the prompt is an empty list: give at least one token id")
            return ids
        if not isinstance(prompt, str):
            raise InputError(f"the prompt must be a text or a list of token ids, got {shown(prompt)}")
        take = self._take
        raw = self._kind == "completion" or take.switch("raw")
        if raw:
            special = take.switch("add_special_tokens", True)
            return self._ids(prompt, raw=True, add_special_tokens=special)
        return self._of_template(prompt)

    def _of_messages(self, messages: Any) -> list[int]:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InputError(f"messages must be a list of objects, got {shown(messages)}")
        if len(messages) > self._limit:
            raise ContextLengthError(
                f"{len(messages)} messages are more than the {self._limit} tokens of the model's context:"
                " send fewer"
            )
        if self._take.switch("raw"):
            raise InputError("raw takes a text as it is: it does not go with messages")
        return self._of_template([self._message(message) for message in messages])

    def _of_template(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        take = self._take
        variables = template_variables(self._take.mapping("chat_template_kwargs"))
        opens = take.given.get("add_generation_prompt")
        continues = take.switch("continue_final_message")
        if take.switch("add_special_tokens"):
            raise BodyError(
                "add_special_tokens",
                "add_special_tokens is not served beside a chat template, which writes them: leave it out",
            )
        if continues and opens:
            raise BodyError(
                "continue_final_message",
                "continue_final_message does not go with add_generation_prompt: true, leave one out",
            )
        variables["add_generation_prompt"] = take.switch("add_generation_prompt", not continues)
        return self._ids(
            prompt, system=take.text("system"), variables=variables, continue_final_message=continues
        )

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as templates take it: a text as its content, nothing that is null."""
        if (role := message.get("role")) not in _ROLES:
            raise InputError(f"a message's role is one of {', '.join(_ROLES)}, got {shown(role)}")
        found = {name: value for name, value in message.items() if value is not None}
        if calls := found.get("tool_calls"):
            if "tool_calls" not in (self._template or ""):
                raise InputError("the chat template of this model does not show tool_calls: leave them out")
            found["tool_calls"] = _with_arguments(calls)
            found.setdefault("content", "")
        if "content" in found:
            found["content"] = _flat(found["content"])
        return found

    def _ids(self, prompt: Any, **how: Any) -> list[int]:
        return self._encode(prompt, self._limit, escape=self._escape, truncate=self._cuts, **how)

    @property
    def _cuts(self) -> bool:
        """Whether prompts that are too long are cut."""
        return self._take.given.get("truncate_prompt_tokens") is not None

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """The last ids of a prompt, or the first, as `truncate_prompt_tokens` asks for."""
        take = self._take
        name = "truncate_prompt_tokens"
        most = take.whole(name, -1, self._limit)
        side = take.text("truncation_side") or "left"
        if side not in ("left", "right"):
            raise BodyError("truncation_side", f"truncation_side must be left or right, got {shown(side)}")
        if most is None:
            return ids
        if most == 0 or room < 1:
            raise BodyError(name, f"{name} leaves no token of the prompt: give 1 or more, or ask for less")
        kept = min(room, self._limit) if most == -1 else most
        return ids[-kept:] if side == "left" else ids[:kept]


def _flat(content: Any) -> Any:
    """Text parts as one text."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"a message's content is a text or text parts, got {shown(part)}")
    return "".join(part["text"] for part in content)


def _with_arguments(calls: Any) -> list[dict[str, Any]]:
    """Calls of tools with their arguments as objects, as templates expect them; the API has them as JSON."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"each of tool_calls has a function with a name, got {shown(call)}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"the arguments of a tool call must be JSON, got {shown(arguments)}"
                ) from error
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found
