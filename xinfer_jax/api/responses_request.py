"""Translates bodies of OpenAI's Responses API (`POST /v1/responses`) into bodies of chats, whose rules hold.

Source: the OpenAI API, and the types of the Python client `openai` 3.57.
"""

import base64
import binascii
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import InputError, format_value
from .fields import BodyError, Fields, errors_of, with_field_names

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_STATE = "this server keeps no responses: send the whole conversation as input"
# Fields that are not served, with the values that ask for nothing, and this server's way.
_NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = dict(
    previous_response_id=((), _STATE),
    conversation=((), _STATE),
    background=((False,), "leave it out, and stream the response"),
    prompt=((), "send the text as input and instructions"),
    context_management=(([],), "send a shorter input"),
    messages=((), "give input"),
    max_tokens=((), "give max_output_tokens"),
    max_completion_tokens=((), "give max_output_tokens"),
    response_format=((), "give text.format"),
    reasoning_effort=((), "give reasoning.effort"),
    logprobs=((False,), f'give include: ["{LOGPROBS}"]'),
    n=((1,), "send several requests"),
    return_token_ids=((False,), "use /v1/chat/completions"),
    return_routed_experts=((False,), "use /v1/chat/completions"),
    continue_final_message=((False,), "use /v1/chat/completions"),
    include_reasoning=((True,), "ignore the items of reasoning"),
)
# They change no answer. All tools are functions, which `max_tool_calls` does not count.
_WITHOUT_EFFECT = (
    "store",
    "background_options",
    "max_tool_calls",
    "access_programs",
    "image",
    "client_metadata",
)
_OF_REASONING = {"effort", "summary", "generate_summary"}  # nothing is summarized: reasoning comes as it is
# Names of a chat's fields, and what they are here: as the field at fault, and in messages of errors.
_NAMES = dict(
    messages="input", max_completion_tokens="max_output_tokens", max_tokens="max_output_tokens",
    response_format="text", reasoning_effort="reasoning", logprobs="include",
)  # fmt: skip
_IN_MESSAGES = dict(
    max_completion_tokens="max_output_tokens", max_tokens="max_output_tokens",
    response_format="text.format", reasoning_effort="reasoning.effort",
)  # fmt: skip
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


@dataclasses.dataclass(frozen=True)
class ResponsesRequest:
    """A body of the Responses API.

    Attributes:
        chat: the same request as a body of a chat.
        repeated: fields that the response repeats.
        encrypts_reasoning: items of reasoning also have `encrypted_content`.
    """

    chat: dict[str, Any]
    repeated: dict[str, Any]
    encrypts_reasoning: bool


def parse_responses_request(body: Mapping[str, Any]) -> ResponsesRequest:
    """Translates a body into the body of a chat. Fields that both APIs have, and this server's additional
    ones (`top_k`, `seed`, `stop`), are taken over as they are. `chat_error` names errors of the chat's body.

    Args:
        body: the JSON object. null counts as absent. `stream` and `stream_options` are left out before.

    Raises:
        BodyError: a field or an item is not served, or has another form.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in given if name in _NOT_SERVED]:
        nothing, way = _NOT_SERVED[name]
        if given.pop(name) not in nothing:
            raise BodyError(name, f"{name} is not served here: {way}")
    for name in _WITHOUT_EFFECT:
        given.pop(name, None)
    repeated = dict(given)
    fields = Fields(given)
    include = _parse_include(fields)
    chat = _translate_output(fields)
    instructions = fields.string("instructions")
    with errors_of("input"):
        chat["messages"] = _join_system_messages(instructions, _messages(given.get("input")))
    with errors_of("tools"):
        tools = _translate_tools(given.get("tools", []))
    if tools:
        chat["tools"] = tools
    if "tool_choice" in given:
        chat["tool_choice"] = _translate_tool_choice(given["tool_choice"])
    if LOGPROBS in include:
        chat["logprobs"] = True
    elif given.get("top_logprobs"):
        raise BodyError("top_logprobs", f'top_logprobs needs include: ["{LOGPROBS}"] beside it')
    fields.mapping("metadata")
    own = {
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "reasoning",
        "text",
        "tools",
        "tool_choice",
    }
    chat |= {name: value for name, value in given.items() if name not in own}
    return ResponsesRequest(chat, repeated, ENCRYPTED in include)


def chat_error(error: InputError) -> BodyError:
    """Returns the error of a chat's body, with the names of this API's fields."""
    param = getattr(error, "param", None) or "input"
    names = r"\b(" + "|".join(_IN_MESSAGES) + r")\b"
    message = re.sub(names, lambda found: _IN_MESSAGES[found[1]], with_field_names(error))
    return BodyError(_NAMES.get(param, param), message, getattr(error, "code", None))


@contextmanager
def errors_of_chat() -> Iterator[None]:
    """Within, an InputError of the chat's body becomes a `chat_error`."""
    try:
        yield
    except InputError as error:
        raise chat_error(error) from error


def encrypt_reasoning(text: str) -> str:
    """Returns the `encrypted_content` of an item of reasoning: its text in base64. It is not secret: the
    server only has to read it again, from clients that send no other part of the item back.
    """
    return base64.b64encode(text.encode("utf-8", "replace")).decode()


def _parse_include(fields: Fields) -> list[str]:
    include = fields.values.get("include", [])
    if not isinstance(include, list):
        raise BodyError("include", f"include must be a list of texts, got {format_value(include)}")
    for name in include:
        if name not in (LOGPROBS, ENCRYPTED):
            said = f"include must have {LOGPROBS} or {ENCRYPTED}, got {format_value(name)}"
            raise BodyError("include", f"{said}: leave it out")
    return include


def _translate_output(fields: Fields) -> dict[str, Any]:
    """Returns the fields of a chat that limit the length of the answer, and set its form and its amount of
    reasoning.
    """
    chat: dict[str, Any] = {}
    if (most := fields.integer("max_output_tokens", 1, 2**31 - 1)) is not None:
        chat["max_completion_tokens"] = most
    for name, known in (("reasoning", _OF_REASONING), ("text", {"format", "verbosity"})):
        if others := sorted(fields.mapping(name).keys() - known):
            raise BodyError(name, f"{name}: {format_value(others[0])} is not known here: leave it out")
    if (effort := fields.mapping("reasoning").get("effort")) is not None:
        chat["reasoning_effort"] = effort
    text = fields.mapping("text")
    if (form := text.get("format")) is None:
        return chat
    if not isinstance(form, Mapping):
        raise BodyError("text", f"text: format must be an object, got {format_value(form)}")
    if form.get("type") != "json_schema":
        return chat | dict(response_format=form)
    spec = {name: value for name, value in form.items() if name != "type"}
    return chat | dict(response_format=dict(type="json_schema", json_schema=spec))


def _translate_tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise InputError(f"tools must be a list of functions, got {format_value(tools)}")
    for tool in tools:
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            given = tool.get("type") if isinstance(tool, Mapping) else tool
            raise InputError(
                f"tools must have the type function, got {format_value(given)}: leave others out"
            )
    own = ("name", "description", "parameters", "strict")
    return [
        dict(type="function", function={name: tool[name] for name in own if tool.get(name) is not None})
        for tool in tools
    ]


def _translate_tool_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        form = "{'type': 'function', 'name': …}"
        raise BodyError("tool_choice", f"tool_choice as an object must be {form}, got {format_value(choice)}")
    return dict(type="function", function=dict(name=choice["name"]))


# --- input --------------------------------------------------------------------------------------------------


def _messages(given: Any) -> list[dict[str, Any]]:
    """Returns the messages of a chat for a text or a list of items. The parts of one answer (reasoning, a
    text, calls) are one message of the assistant.
    """
    if isinstance(given, str):
        return [dict(role="user", content=given)]
    if not isinstance(given, list) or not given or not all(isinstance(item, Mapping) for item in given):
        raise InputError(
            f"input must be a text, or a list of items that is not empty, got {format_value(given)}"
        )
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _ITEMS:
            known = ", ".join(_ITEMS)
            raise InputError(f"item {i} of input must have a type of {known}, got {format_value(kind)}")
        with errors_of("input", f"item {i} of input: "):
            _ITEMS[kind](messages, item)
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    content = _text_of(item.get("content"))
    if item.get("role") != "assistant":
        messages.append(dict(role=item.get("role"), content=content))
        return
    answer = _answer(messages, lambda last: last["content"] is None and "tool_calls" not in last)
    answer["content"] = content


def _add_reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    text = _text_of(item.get("content") or [])
    if not text and isinstance(encrypted := item.get("encrypted_content"), str):
        try:
            text = base64.b64decode(encrypted, validate=True).decode()
        except (binascii.Error, ValueError) as error:
            said = "encrypted_content is not of this server: leave the item out"
            raise InputError(f"{said}, got {format_value(encrypted)}") from error
    if text := text or _text_of(item.get("summary") or []):
        _answer(messages, lambda last: False)["reasoning"] = text


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise InputError(f"{name} must be a text, got {format_value(item.get(name))}")
    function = dict(name=item["name"], arguments=item["arguments"])
    answer = _answer(messages, lambda last: True)
    answer.setdefault("tool_calls", []).append(dict(id=item["call_id"], type="function", function=function))


def _add_call_output(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    if not isinstance(item.get("call_id"), str):
        raise InputError(f"call_id must be a text, got {format_value(item.get('call_id'))}")
    messages.append(dict(role="tool", tool_call_id=item["call_id"], content=_text_of(item.get("output"))))


# How each type of item is added to the messages so far.
_ITEMS: dict[str, Callable[[list[dict[str, Any]], Mapping[str, Any]], None]] = dict(
    message=_add_message, reasoning=_add_reasoning, function_call=_add_call,
    function_call_output=_add_call_output,
)  # fmt: skip


def _answer(messages: list[dict[str, Any]], takes: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Returns the last message if it is the assistant's and `takes` one more part, otherwise a new
    message.
    """
    if not messages or messages[-1]["role"] != "assistant" or not takes(messages[-1]):
        messages.append(dict(role="assistant", content=None))
    return messages[-1]


def _text_of(content: Any) -> str:
    """Returns the text of a content: a text, or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"the content must be a text or a list of text parts, got {format_value(content)}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise InputError(f"a part of the content must be a text, got {format_value(part)}")
        texts.append(text)
    return "".join(texts)


def _join_system_messages(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages after the instructions. Several system or developer messages at the beginning
    become one, since chat templates allow one, at the first place.
    """
    system = [] if instructions is None else [dict(role="system", content=instructions)]
    found = [*system, *messages]
    count = next((i for i, one in enumerate(found) if one["role"] not in ("system", "developer")), len(found))
    if count < 2:
        return found
    content = "\n\n".join(one["content"] for one in found[:count] if one["content"])
    return [dict(role="system", content=content), *found[count:]]
