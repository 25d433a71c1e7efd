"""A prompt as token ids: a text as it is, or a conversation through the chat template. Nothing here imports
jax, so that a process without it can do this work.
"""

import secrets
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ContextLengthError, InputError, shown
from .escaping import Escaping
from .tokenizer import Tokenizer

FORM = "[{'role': …, 'content': …}, …]"  # of messages


def prompt_ids(  # noqa: PLR0913  all that a prompt may ask for
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    limit: int,
    *,
    system: str | None = None,
    raw: bool = False,
    add_special_tokens: bool = True,
    variables: Mapping[str, Any] | None = None,
    escape: bool = True,
    continue_final_message: bool = False,
    truncate: bool = False,
) -> list[int]:
    """The token ids of a prompt.

    Args:
        tokenizer: with the chat template.
        prompt: the user's text, or messages.
        limit: tokens of the model's context.
        system: the system message put before the prompt.
        raw: take the text as it is, without the chat template.
        add_special_tokens: to such a text, what the checkpoint puts around each text (BOS, say).
        variables: further variables of the chat template; `add_generation_prompt` is True where it is absent.
        escape: control tokens that the conversation spells get the ids of their letters.
        continue_final_message: the ids end within the last message, so that the answer continues it.
        truncate: the caller cuts the ids, so that a text longer than the context is no error.

    Returns:
        At least one id; they may exceed the limit.

    Raises:
        ContextLengthError: more than the context can hold, as far as that is known before tokenizing.
        InputError: as `xinfer_jax.encode_prompt`.
    """
    if system is not None and not isinstance(system, str):
        raise InputError(f"system must be a text, got {shown(system)}")
    alone = isinstance(prompt, str) and system is None
    if raw and not alone:
        raise InputError(
            "raw takes a text as it is: it goes with neither a system message nor a conversation"
        )
    messages = _checked_messages(prompt, limit)
    if alone and not raw and tokenizer.chat_template is None:
        warnings.warn("this checkpoint has no chat template: the prompt is continued as it is", stacklevel=3)
        raw = True
    if raw:
        text = messages[0]["content"]
        _check_length(tokenizer, text, None if truncate else limit)
        ids = tokenizer.encode(text, add_special_tokens)
    else:
        spoken = [] if system is None else [{"role": "system", "content": system}]
        conversation = [*spoken, *messages]
        given = dict(variables or {})
        escaping = Escaping(tokenizer) if escape else None
        if escaping:
            conversation = escaping.messages(conversation)
            given = escaping.hide(given)
        text = _rendered(tokenizer, conversation, given, continue_final_message)
        _check_length(tokenizer, text, None if truncate else limit)
        ids = escaping.encode(text) if escaping else tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise InputError(f"the prompt {shown(prompt)} gives no tokens")
    return ids


def _checked_messages(prompt: Any, limit: int) -> list[dict[str, Any]]:
    """A conversation; a text is what its user says."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InputError(f"the prompt is empty: got {shown(prompt)}, give some text")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt or not all(isinstance(m, Mapping) for m in prompt):
        raise InputError(f"a prompt is a text, or messages {FORM}, got {shown(prompt)}")
    if len(prompt) > limit:
        raise ContextLengthError(
            f"{len(prompt)} messages are more than the {limit} tokens of the model's context: send fewer"
        )
    for i, message in enumerate(prompt):
        content = message.get("content")
        if not isinstance(message.get("role"), str) or not all(isinstance(name, str) for name in message):
            raise InputError(
                f"message {i} must have a role, like 'user', and names that are texts: {shown(message)}"
            )
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            raise InputError(f"message {i} must have a text as its content, got {shown(content)}")
    if not any(message.get("tool_calls") or (message["content"] or "").strip() for message in prompt):
        raise InputError(f"the prompt is empty: no message of {shown(prompt)} has a text, give some")
    return list(map(dict, prompt))


def _rendered(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any], continued: bool
) -> str:
    """The conversation as one text; continued: up to the end of the last message's content."""
    if not continued:
        return tokenizer.apply_chat_template(messages, **variables)
    if variables.get("add_generation_prompt"):
        raise InputError("continue_final_message does not go with add_generation_prompt: leave one out")
    *before, last = messages
    if not isinstance(last.get("content"), str):
        raise InputError("continue_final_message needs a text as the content of the last message: give one")
    # A template may strip the content: then the blank behind the mark is missing.
    mark = "".join(secrets.choice("0123456789") for _ in range(24))
    marked = [*before, {**last, "content": f"{last['content']}{mark} "}]
    text = tokenizer.apply_chat_template(marked, **variables | dict(add_generation_prompt=False))
    kept, found, after = text.rpartition(mark)
    if not found:
        raise InputError("the chat template leaves out the last message: it cannot be continued")
    return kept if after.startswith(" ") else kept.rstrip()


def _check_length(tokenizer: Tokenizer, text: str, limit: int | None) -> None:
    """Far beyond the limit tokenizing takes long, and the length often says enough."""
    if limit is not None and len(text) > 16 * limit and (fewest := tokenizer.fewest_ids(text)) > limit:
        raise ContextLengthError(
            f"the prompt has at least {fewest} tokens ({len(text)} characters), which exceeds the model's"
            f" context limit {limit}: shorten the prompt"
        )
