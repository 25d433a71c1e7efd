"""The fields of a body: the known and the served ones. Reads their values by type."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..checks import check_token_ids
from ..errors import InputError, format_value
from ..sampling.settings import FIELD_OF_ARGUMENT, SETTINGS
from .other_servers import why_not_served

_SERVED = {setting.field for setting in SETTINGS.values() if setting.in_bodies} | {
    "model", "max_tokens", "n", "stop", "seed", "logprobs", "ignore_eos", "stop_token_ids",
    "add_special_tokens", "return_token_ids", "cache_salt", "priority", "include_stop_str_in_output",
    "skip_special_tokens", "truncate_prompt_tokens", "truncation_side", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "return_routed_experts", "routed_experts_prompt_start",
}  # fmt: skip
# These change no answer: the client's identity, storage, transport, and settings of media.
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "session_id",
    "request_id", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "stream_interval",
    "mm_processor_kwargs", "media_io_kwargs", "return_mm_kwargs", "return_token_offsets",
    "guided_decoding_backend", "verbosity",
}  # fmt: skip
_TEMPLATE = {"chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
_REASONING = {"reasoning_effort", "include_reasoning"}  # without effect on a completion
_TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
_OF_KIND: dict[str, set[str]] = dict(
    completion={"prompt", "best_of", "echo"},
    chat={"messages", "max_completion_tokens", "top_logprobs", "stop_in_reasoning"} | _TEMPLATE | _TOOLS,
    plain={"prompt", "messages", "best_of", "raw", "system"} | _TEMPLATE,
)
# Known fields that are not served; each with the values that are accepted, since they ask for nothing.
_NOT_SERVED: dict[str, Sequence[Any]] = dict(
    suffix=("",), functions=([],), function_call=("none", "auto"),
    documents=([],), chat_template=(), audio=(), modalities=(["text"],),
    web_search_options=(), prediction=(), moderation=(), reasoning=(), thinking_token_budget=(-1,),
    guided_decoding=(), guided_whitespace_pattern=(), structural_tag=(),
    use_beam_search=(False,), length_penalty=(1,), early_stopping=(False,), diversity_penalty=(0,),
    spaces_between_special_tokens=(True,), detokenize=(True,), prompt_logprobs=(), logprob_token_ids=(),
    return_tokens_as_token_ids=(False,), return_prompt_text=(False,), logits_processors=([],),
    repetition_detection=(), watermarking=(False,), prompt_embeds=(), vllm_xargs=({},),
    kv_transfer_params=(), ec_transfer_params=(), stream=(False,),
)  # fmt: skip
# This server's way for some of them.
_WAYS = dict(
    functions="give tools", function_call="give tool_choice", reasoning="give reasoning_effort",
    thinking_token_budget="give reasoning_effort", guided_decoding="give structured_outputs",
    structural_tag="give structured_outputs, or tools", prompt_logprobs="give echo and logprobs",
    chat_template="give chat_template_kwargs",
)  # fmt: skip
_MOST_UNKNOWN = 100  # of one body
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_NO_VARIABLES = {"conversation", "tokenize"}  # arguments of transformers' apply_chat_template


class BodyError(InputError):
    """A body that cannot be served. param: the field at fault. code: the API's error code, if it has one."""

    def __init__(self, param: str, message: object, code: str | None = None):
        super().__init__(with_field_names(message) if isinstance(message, Exception) else message)
        self.param = param
        self.code = code or getattr(message, "code", None)

    def __reduce__(self) -> Any:
        return BodyError, (self.param, str(self), self.code)


def with_field_names(message: object) -> str:
    """Returns the message with the names of a body's fields in place of the names of options, for a
    `BodyError`.
    """
    if isinstance(message, BodyError):
        return str(message)
    names = r"\b(" + "|".join(FIELD_OF_ARGUMENT) + r")\b"
    return re.sub(names, lambda found: FIELD_OF_ARGUMENT[found[1]], str(message))


@contextmanager
def errors_of(param: str, prefix: str = "") -> Iterator[None]:
    """Within, an InputError becomes a BodyError of this field. prefix: the beginning of its message."""
    try:
        yield
    except BodyError:
        raise
    except InputError as error:
        raise BodyError(param, f"{prefix}{error}" if prefix else error) from error


def check_fields(kind: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields that ask for something, and the names of unknown ones. BodyError: a field that is
    known but not served, or that belongs to another kind of body, or one of another server that would change
    the answer.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in given if name in _NOT_SERVED]:
        if given.pop(name) not in _NOT_SERVED[name]:
            raise BodyError(name, f"{name} is not served here: {_WAYS.get(name, 'leave it out')}")
    if kind != "completion" and given.get("echo") is False:
        del given["echo"]
    known = _SERVED | _WITHOUT_EFFECT | _REASONING | _OF_KIND[kind]
    unknown = [name for name in given if name not in known]
    for name in unknown:
        if any(name in fields for fields in _OF_KIND.values()):
            raise BodyError(name, f"{name} does not belong to a {kind} request: leave it out")
    if len(unknown) > _MOST_UNKNOWN:
        raise BodyError(unknown[0], f"{len(unknown)} fields are not known here: give this server's fields")
    whys = {name: why_not_served(given, name, known) for name in unknown}
    for name, why in whys.items():
        if why:
            raise BodyError(name, why)
    return given, [name for name, why in whys.items() if why is None]


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables in `chat_template_kwargs`. Raises BodyError if a variable has its own field, or
    is not served.
    """
    variables = {name: value for name, value in given.items() if value is not None}
    fields = set.union(_SERVED, _NO_VARIABLES, *_OF_KIND.values())
    kwargs = "chat_template_kwargs"
    for name in list(variables):
        if name in _NOT_SERVED and variables.pop(name) not in _NOT_SERVED[name]:
            raise BodyError(kwargs, f"{kwargs}: {name} is not served here: leave it out")
        if name in fields:
            raise BodyError(kwargs, f"{kwargs}: {name} is not a template variable: leave it out")
    return variables


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Returns the variables of `reasoning_effort`. "none" also turns thinking off by a template's switch."""
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        name = "reasoning_effort"
        raise BodyError(name, f"{name} must be one of {', '.join(_EFFORTS)}, got {format_value(effort)}")
    return dict(reasoning_effort=effort) | (dict(enable_thinking=False) if effort == "none" else {})


class Fields:
    """Reads the values of a body by type. An absent field is None, and a value of another type raises
    BodyError.
    """

    def __init__(self, values: dict[str, Any]):
        """Makes the fields. values: the values of the fields that are present. None of them is null."""
        self.values = values

    def _checked(self, name: str, is_valid: Any, description: str) -> Any:
        value = self.values.get(name)
        if value is not None and not is_valid(value):
            raise BodyError(name, f"{name} must be {description}, got {format_value(value)}")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._checked(name, lambda x: isinstance(x, bool), "true or false")
        return default if value is None else bool(value)

    def integer(self, name: str, least: int, most: int) -> Any:
        is_valid = lambda x: type(x) is int and least <= x <= most  # noqa: E731
        return self._checked(name, is_valid, f"a whole number from {least} to {most}")

    def number(self, name: str) -> Any:
        return self._checked(name, lambda x: type(x) in (int, float), "a number")

    def string(self, name: str) -> Any:
        return self._checked(name, _is_text, "a text")

    def strings(self, name: str, default: Sequence[str], most: int, longest: int) -> tuple[str, ...]:
        """Returns a text or a list of texts, without duplicates. most: the largest number of texts. longest:
        the most characters of each.
        """
        value = self.values.get(name)
        if value is None:
            return tuple(default)
        texts = value if isinstance(value, list) else [value]
        if len(texts) > most:
            raise BodyError(name, f"{name} has {len(texts)} texts, more than the limit of {most}: give fewer")
        if not all(text is None or _is_text(text) and text for text in texts):
            raise BodyError(name, f"{name} must be a text or a list of texts, got {format_value(value)}")
        if any(text and len(text) > longest for text in texts):
            raise BodyError(name, f"{name} has a text of more than {longest} characters: give shorter ones")
        return tuple(dict.fromkeys(text for text in texts if text is not None))

    def token_ids(self, name: str, vocab_size: int, most: int | None = None) -> list[int]:
        """Returns a list of token ids, without duplicates. most: the most ids in the list. None: the
        vocabulary's size.
        """
        value = self.values.get(name, [])
        most = vocab_size if most is None else most
        if isinstance(value, list) and len(value) > most:
            raise BodyError(name, f"{name} has {len(value)} ids, more than the limit of {most}: give fewer")
        with errors_of(name):
            return list(dict.fromkeys(check_token_ids(name, value, vocab_size)))

    def mapping(self, name: str) -> Any:
        return self._checked(name, lambda x: isinstance(x, dict), "an object") or {}


def _is_text(value: Any) -> bool:
    """Returns True if a value is a string that UTF-8 can encode. Half a surrogate pair cannot be encoded."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value
