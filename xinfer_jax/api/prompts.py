"""Encodes the prompts of a body as token ids."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..checks import check_token_ids
from ..errors import ContextLengthError, InputError, format_value
from ..tokenization.conversation import ChatOptions
from .fields import BodyError, Fields, effort_variables, errors_of, template_variables

EncodePrompt = Callable[..., list[int]]  # `prompt_ids` of one tokenizer
_MOST_ANSWERS = 1024  # of one request
_CONTINUED = ("prefix", "partial")  # DeepSeek's, Mistral's and Moonshot's
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass
class PromptEncoder:
    """Turns the prompt fields of one body into token ids."""

    _fields: Fields
    _kind: str  # as in `ParsedBody`
    _encode: EncodePrompt
    _tools: Sequence[Mapping[str, Any]] | None  # that a conversation describes
    _vocab_size: int
    _limit: int  # tokens of the model's context
    _escape: bool  # control tokens that a conversation spells stay ordinary text

    def encode(self, max_prompt_tokens: int) -> list[list[int]]:
        """Returns the ids of each prompt. max_prompt_tokens: most that `truncate_prompt_tokens: -1`
        leaves.
        """
        fields = self._fields
        kind = self._kind
        prompt: Any = fields.values.get("prompt")
        messages = fields.values.get("messages")
        needed = "messages" if kind == "chat" else "prompt"
        if (prompt is None) == (messages is None):
            names = "a prompt or messages, one of them" if kind == "plain" else needed
            raise BodyError(needed, f"the body must have {names}")
        with errors_of("prompt" if messages is None else "messages"):
            if messages is not None:
                return [self._truncate(self._encode_messages(messages), max_prompt_tokens)]
            is_batch = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
            if not is_batch or kind != "completion":
                return [self._truncate(self._encode_prompt(prompt), max_prompt_tokens)]
            answers = len(prompt) * max(fields.integer(name, 1, 128) or 1 for name in ("n", "best_of"))
            if answers > _MOST_ANSWERS:
                said = f"{answers} answers are more than the {_MOST_ANSWERS} of one request"
                raise InputError(f"{said}: send several")
            return [self._truncate(self._encode_prompt(one), max_prompt_tokens) for one in prompt]

    def _encode_prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list):
            if len(prompt) > self._limit and not self._truncates:
                said = (
                    f"the prompt has {len(prompt)} tokens, more than the {self._limit} of the model's context"
                )
                raise ContextLengthError(f"{said}: shorten it")
            ids = check_token_ids("prompt", prompt, self._vocab_size)
            if not ids:
                raise InputError("the prompt is an empty list: give at least one token id")
            return ids
        if not isinstance(prompt, str):
            raise InputError(f"the prompt must be a text or a list of token ids, got {format_value(prompt)}")
        if self._kind == "completion" or self._fields.boolean("raw"):
            special = self._fields.boolean("add_special_tokens", True)
            return self._tokenize(prompt, ChatOptions(escape=self._escape), True, special)
        return self._encode_conversation(prompt)

    def _encode_messages(self, messages: Any) -> list[int]:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InputError(f"messages must be a list of objects, got {format_value(messages)}")
        if len(messages) > self._limit:
            said = f"{len(messages)} messages are more than the {self._limit} tokens of the model's context"
            raise ContextLengthError(f"{said}: send fewer")
        if self._fields.boolean("raw"):
            raise InputError("raw takes a text without the chat template: it does not go with messages")
        return self._encode_conversation([self._template_message(message) for message in messages])

    def _encode_conversation(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        fields = self._fields
        variables = effort_variables(fields.string("reasoning_effort"))
        variables |= template_variables(fields.mapping("chat_template_kwargs"))
        add_generation_prompt = fields.values.get("add_generation_prompt")
        continues = fields.boolean("continue_final_message")
        if fields.boolean("add_special_tokens"):
            said = "add_special_tokens is not served with a chat template, which writes them: leave it out"
            raise BodyError("add_special_tokens", said)
        if continues and add_generation_prompt:
            said = "continue_final_message does not go with add_generation_prompt: true, leave one out"
            raise BodyError("continue_final_message", said)
        variables["add_generation_prompt"] = fields.boolean("add_generation_prompt", not continues)
        system = fields.string("system")
        return self._tokenize(prompt, ChatOptions(system, self._tools, variables, self._escape, continues))

    def _template_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the message as templates expect it: its content is one text, and no value is null."""
        if (role := message.get("role")) not in _ROLES:
            raise InputError(f"a message's role must be one of {', '.join(_ROLES)}, got {format_value(role)}")
        found = {name: value for name, value in message.items() if value is not None}
        if name := next((name for name in _CONTINUED if found.get(name)), None):
            raise InputError(f"{name} of a message is not served: give continue_final_message: true")
        if "content" in found:
            found["content"] = _join_text_parts(found["content"])
        return found

    def _tokenize(self, prompt: Any, chat: ChatOptions, raw: bool = False, special: bool = True) -> list[int]:
        how = dict(raw=raw, add_special_tokens=special, truncate=self._truncates)
        return self._encode(prompt, self._limit, chat, **how)

    @property
    def _truncates(self) -> bool:
        """Returns True if prompts that are too long are truncated."""
        return self._fields.values.get("truncate_prompt_tokens") is not None

    def _truncate(self, ids: list[int], max_prompt_tokens: int) -> list[int]:
        """Returns the last ids of the prompt, or the first, as many as `truncate_prompt_tokens` asks for."""
        name = "truncate_prompt_tokens"
        count = self._fields.integer(name, -1, self._limit)
        side = self._fields.string("truncation_side") or "left"
        if side not in ("left", "right"):
            said = f"truncation_side must be left or right, got {format_value(side)}"
            raise BodyError("truncation_side", said)
        if count is None:
            return ids
        if count == 0 or max_prompt_tokens < 1:
            said = f"{name} leaves no token of the prompt: give 1 or more, or ask for fewer tokens"
            raise BodyError(name, said)
        if count == -1:
            count = min(max_prompt_tokens, self._limit)
        return ids[-count:] if side == "left" else ids[:count]


def continued_text(fields: Fields) -> str:
    """Returns the content that the answer continues, with `continue_final_message`, otherwise "". The body
    has been checked.
    """
    if not fields.boolean("continue_final_message"):
        return ""
    (*_, last) = fields.values["messages"]
    return str(_join_text_parts(last.get("content") or ""))


def _join_text_parts(content: Any) -> Any:
    """Joins a list of text parts. Other content is returned as it is."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"a message's content must be a text or text parts, got {format_value(part)}")
    return "".join(part["text"] for part in content)
