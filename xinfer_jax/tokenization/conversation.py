"""Encodes a prompt as token ids: a plain text, or a conversation through the chat template.

Nothing here imports jax, so that a process without jax can do this work.
"""

import dataclasses
import secrets
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ContextLengthError, InputError, format_value
from ..tool_calls.harmony import MESSAGE, START
from ..tool_calls.reasoning import THINK_END, THINK_START
from ..tool_calls.tool_messages import check_tools, template_message
from .escaping import ControlTokenEscaper
from .tokenizer import Tokenizer

MESSAGES_FORM = "[{'role': …, 'content': …}, …]"  # in error messages
_HARMONY_EFFORTS = dict(none="low", minimal="low", xhigh="high")  # Harmony has low, medium and high
_CHARS_PER_TOKEN = 16  # a text with more characters per token of the limit is checked before tokenizing


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """The options by which the chat template renders a conversation.

    Attributes:
        system, tools: see `xinfer_jax.encode_prompt`.
        variables: the variables of the chat template. `add_generation_prompt` defaults to True.
        escape: True: control tokens that the conversation spells are encoded as ordinary text.
        continue_final_message: True: the ids end within the last message, so that the answer continues it.
    """

    system: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None
    escape: bool = True
    continue_final_message: bool = False


def prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    limit: int,
    chat: ChatOptions = ChatOptions(),
    *,
    raw: bool = False,
    add_special_tokens: bool = True,
    truncate: bool = False,
) -> list[int]:
    """Returns the token ids of a prompt, at least one. There may be more than the limit. It also takes the
    arguments of `xinfer_jax.encode_prompt`, and raises its errors.

    Args:
        limit: the tokens of the model's context. A text whose length alone shows that it has more raises
            ContextLengthError.
        chat: the options of a prompt that is not raw.
        truncate: True: the caller truncates the ids, so a text longer than the context is accepted.
    """
    system = chat.system
    if system is not None and not isinstance(system, str):
        raise InputError(f"system must be a text, got {format_value(system)}")
    is_plain_text = isinstance(prompt, str) and system is None and not chat.tools
    if raw and not is_plain_text:
        raise InputError(
            "raw takes a text as it is: it goes with neither a system message, a conversation nor tools"
        )
    template_variables = _template_variables(tokenizer, chat.tools, chat.variables or {})
    template = tokenizer.get_chat_template(template_variables.get("tools") is not None) or ""
    messages = _check_messages(prompt, limit, template)
    if is_plain_text and not raw and tokenizer.chat_template is None:
        warnings.warn("this checkpoint has no chat template: the prompt is continued as it is", stacklevel=3)
        raw = True
    if raw:
        text = messages[0]["content"]
        escaper = None
    else:
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        escaper = ControlTokenEscaper(tokenizer, template) if chat.escape else None
        if escaper:
            messages = escaper.mask_messages(messages)
            template_variables = escaper.mask(template_variables)
        text = _render(tokenizer, messages, template_variables, chat.continue_final_message)
    if not truncate:
        check_text_length("the prompt", text, tokenizer, limit)
    if escaper:
        ids = escaper.encode(text)
    else:
        ids = tokenizer.encode(text, add_special_tokens=raw and add_special_tokens)
    if not ids:
        raise InputError(f"the prompt {format_value(prompt)} gives no tokens")
    return ids


def check_template_tools(tokenizer: Tokenizer, tools: Any) -> list[dict[str, Any]]:
    """Returns the tools, copied. InputError: they have another form, or the chat template ignores them."""
    checked = check_tools(tools)
    if not tokenizer.template_tools.used:
        raise InputError("the chat template of this model ignores tools: leave them out")
    return checked


def _template_variables(tokenizer: Tokenizer, tools: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(variables)
    if tools:
        found["tools"] = check_template_tools(tokenizer, tools)
    if tokenizer.writes_harmony and "reasoning_effort" in found:
        effort = str(found["reasoning_effort"])
        found["reasoning_effort"] = _HARMONY_EFFORTS.get(effort, effort)
    return found


def ends_in_reasoning(tokenizer: Tokenizer | None, ids: Sequence[int], continued: str = "") -> bool:
    """Returns True if a prompt ends within the reasoning. This is so if the chat template has opened <think>
    for the answer, or if the answer continues a message that ends within its reasoning. continued: the text
    of that message.
    """
    if tokenizer is None:
        return False
    if continued.lstrip().startswith(THINK_START) and THINK_END not in continued:
        return True
    return tokenizer.decode(ids[-8:], skip_special_tokens=False).rstrip().endswith(THINK_START)


def harmony_header(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str | None:
    """Returns the text after the last <|start|> of a prompt, up to a <|message|>, by `decode_marked`. None:
    the model does not write Harmony, because its vocabulary or its chat template lacks the control tokens.
    """
    if tokenizer is None or not tokenizer.writes_harmony:
        return None
    backward = enumerate(reversed(ids))
    after_start = next((i for i, token in backward if tokenizer.harmony_marks.get(token) == START), 0)
    header, mark, _ = tokenizer.decode_marked(ids[len(ids) - after_start :]).partition(MESSAGE)
    return header + mark


def check_text_length(name: str, text: str, tokenizer: Tokenizer, limit: int) -> None:
    """Raises ContextLengthError if the text's length alone shows that it has more than `limit` tokens:
    tokenizing such a text could take long. name: the name of the text.
    """
    if len(text) > _CHARS_PER_TOKEN * limit and (fewest := tokenizer.fewest_ids(text)) > limit:
        raise ContextLengthError(
            f"{name} has at least {fewest} tokens ({len(text)} characters), which exceeds the context limit"
            f" {limit}: shorten it"
        )


def _check_messages(prompt: Any, limit: int, template: str) -> list[dict[str, Any]]:
    """Returns the messages of a conversation, for the chat template. A text becomes a user's message."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InputError(f"the prompt is empty: got {format_value(prompt)}, give some text")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt or not all(isinstance(m, Mapping) for m in prompt):
        raise InputError(f"a prompt is a text, or messages {MESSAGES_FORM}, got {format_value(prompt)}")
    if len(prompt) > limit:
        raise ContextLengthError(
            f"{len(prompt)} messages are more than the {limit} tokens of the model's context: send fewer"
        )
    for i, message in enumerate(prompt):
        content = message.get("content")
        if not isinstance(message.get("role"), str) or not all(isinstance(name, str) for name in message):
            raise InputError(
                f"message {i} must have a role, like 'user', and only texts as keys:"
                f" got {format_value(message)}"
            )
        may_be_none = message["role"] in ("assistant", "tool") or message.get("tool_calls")
        if not isinstance(content, str) and (content is not None or not may_be_none):
            raise InputError(f"message {i} must have a text as its content, got {format_value(content)}")
    if not any(message.get("tool_calls") or (message.get("content") or "").strip() for message in prompt):
        raise InputError(f"the prompt is empty: no message of {format_value(prompt)} has a text, give some")
    return [template_message(message, template) for message in prompt]


def _render(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any], continue_final: bool
) -> str:
    """Renders the conversation as one text. continue_final: it ends with the last message's content."""
    if not continue_final:
        return tokenizer.apply_chat_template(messages, **variables)
    if variables.get("add_generation_prompt"):
        raise InputError("continue_final_message does not go with add_generation_prompt: leave one out")
    *before, last = messages
    if not isinstance(last.get("content"), str):
        raise InputError("continue_final_message needs a text as the content of the last message: give one")
    # A marker after the content shows where it ends. A template may strip the content: then the space after
    # the marker is missing.
    marker = "".join(secrets.choice("0123456789") for _ in range(24))
    marked = [*before, {**last, "content": f"{last['content']}{marker} "}]
    text = tokenizer.apply_chat_template(marked, **variables | dict(add_generation_prompt=False))
    kept, found, after = text.rpartition(marker)
    if not found:
        raise InputError("the chat template leaves out the last message: it cannot be continued")
    return kept if after.startswith(" ") else kept.rstrip()
