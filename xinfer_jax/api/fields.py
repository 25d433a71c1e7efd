"""Fields of a body: which are known, which are not served, and their values by their types."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import token_ids
from ..errors import InputError, shown

# Fields of numbers, and the settings of `SamplingConfig` that they are.
SAMPLING = dict(
    temperature="temperature", top_p="top_p", top_k="top_k", min_p="min_p", typical_p="typical_p",
    repetition_penalty="repetition_penalty", presence_penalty="presence_penalty",
    frequency_penalty="frequency_penalty", no_repeat_ngram_size="no_repeat_ngram_size",
    min_tokens="min_new_tokens",
)  # fmt: skip
# What options are called in a body; an error names the client's own field.
_FIELDS = dict(
    max_new_tokens="max_tokens", min_new_tokens="min_tokens", stop_strings="stop", bad_words_ids="bad_words"
)
_SERVED = {
    *SAMPLING, "model", "max_tokens", "n", "stop", "seed", "logprobs", "logit_bias", "ignore_eos",
    "stop_token_ids", "allowed_token_ids", "bad_words", "add_special_tokens", "return_token_ids",
    "cache_salt", "priority", "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens",
    "truncation_side",
}  # fmt: skip
# These change no answer: who asks, how it is kept or sent, and what only media or tools look at.
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "session_id",
    "request_id", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "stream_interval",
    "mm_processor_kwargs", "media_io_kwargs", "return_mm_kwargs", "return_token_offsets",
    "routed_experts_prompt_start",
}  # fmt: skip
_TEMPLATE = {"chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
_OWN: dict[str, set[str]] = dict(
    completion={"prompt", "best_of", "echo"},
    chat={"messages", "max_completion_tokens", "top_logprobs"} | _TEMPLATE,
    plain={"prompt", "messages", "best_of", "raw", "system"} | _TEMPLATE,
)
# Known fields that are not served, with the values that ask for nothing.
_NOT_SERVED: dict[str, Sequence[Any]] = dict(
    suffix=("",), tools=([],), tool_choice=("none", "auto"), functions=([],), function_call=("none", "auto"),
    documents=([],), chat_template=(), response_format=({"type": "text"},), audio=(), modalities=(["text"],),
    web_search_options=(), prediction=(), moderation=(), verbosity=(), reasoning_effort=(), reasoning=(),
    include_reasoning=(True,), thinking_token_budget=(-1,),
    guided_json=(), guided_regex=(), guided_choice=(), guided_grammar=(), guided_decoding=(),
    guided_decoding_backend=(), guided_whitespace_pattern=(), structural_tag=(), structured_outputs=(),
    use_beam_search=(False,), length_penalty=(1,), early_stopping=(False,), diversity_penalty=(0,),
    spaces_between_special_tokens=(True,), detokenize=(True,), prompt_logprobs=(), logprob_token_ids=(),
    return_tokens_as_token_ids=(False,), return_prompt_text=(False,), logits_processors=([],),
    repetition_detection=(), watermarking=(False,), prompt_embeds=(), vllm_xargs=({},),
    kv_transfer_params=(), ec_transfer_params=(), stream=(False,),
)  # fmt: skip
_OF_A_TEMPLATE = {"reasoning_effort"}  # fields that are not served, and templates have variables of that name
_NO_VARIABLE = {"conversation", "tokenize"}  # arguments of transformers' apply_chat_template


class BodyError(InputError):
    """A body that cannot be served.

    Attributes:
        param: the field at fault.
        code: the API's word for what is wrong; None: there is none.
    """

    def __init__(self, param: str, message: object, code: str | None = None):
        super().__init__(in_fields(message))
        self.param = param
        self.code = code or getattr(message, "code", None)

    def __reduce__(self) -> Any:
        return BodyError, (self.param, str(self), self.code)


def in_fields(message: object) -> str:
    """A message in which options have the names of a body's fields."""
    return re.sub(r"\b(" + "|".join(_FIELDS) + r")\b", lambda found: _FIELDS[found[1]], str(message))


def served(kind: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a body that ask for something, and the names of those that nobody knows.

    Raises:
        BodyError: a field that is known and not served, or belongs to another kind of body.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in given if name in _NOT_SERVED]:
        if given.pop(name) not in _NOT_SERVED[name]:
            raise BodyError(name, f"{name} is not served here: leave it out")
    if kind != "completion" and given.get("echo") is False:
        del given["echo"]
    known = _SERVED | _WITHOUT_EFFECT | _OWN[kind]
    others = [name for name in given if name not in known]
    for name in others:
        if any(name in fields for fields in _OWN.values()):
            raise BodyError(name, f"{name} does not belong to a {kind} request: leave it out")
    return given, others


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that `chat_template_kwargs` may give a template.

    Raises:
        BodyError: a name that has a field of its own, or is not served.
    """
    variables = {name: value for name, value in given.items() if value is not None}
    fields = set.union(_SERVED, _NO_VARIABLE, *_OWN.values())
    kwargs = "chat_template_kwargs"
    for name in [name for name in variables if name not in _OF_A_TEMPLATE]:
        if name in _NOT_SERVED and variables.pop(name) not in _NOT_SERVED[name]:
            raise BodyError(kwargs, f"{kwargs}: {name} is not served here: leave it out")
        if name in fields:
            raise BodyError(kwargs, f"{kwargs}: {name} is no variable of a template: leave it out")
    return variables


class Fields:
    """Values of a body by their types; None where there is none."""

    def __init__(self, given: dict[str, Any]):
        self.given = given

    def _of(self, name: str, fits: Any, form: str) -> Any:
        value = self.given.get(name)
        if value is not None and not fits(value):
            raise BodyError(name, f"{name} must be {form}, got {shown(value)}")
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        value = self._of(name, lambda x: isinstance(x, bool), "true or false")
        return default if value is None else bool(value)

    def whole(self, name: str, least: int, most: int) -> int | None:
        form = f"a whole number from {least} to {most}"
        value: int | None = self._of(name, lambda x: type(x) is int and least <= x <= most, form)
        return value

    def number(self, name: str) -> float | None:
        value: float | None = self._of(name, lambda x: type(x) in (int, float), "a number")
        return value

    def text(self, name: str) -> str | None:
        value: str | None = self._of(name, _is_text, "a text")
        return value

    def texts(self, name: str, default: Sequence[str], most: int, longest: int) -> tuple[str, ...]:
        """One text or a list of them; most: texts; longest: characters of each."""
        value = self.given.get(name)
        if value is None:
            return tuple(default)
        several = value if isinstance(value, list) else [value]
        if len(several) > most:
            raise BodyError(
                name, f"{name} has {len(several)} texts, more than the {most} of a body: give fewer"
            )
        if not all(text is None or _is_text(text) and text for text in several):
            raise BodyError(name, f"{name} must be a text or a list of texts, got {shown(value)}")
        if any(text and len(text) > longest for text in several):
            raise BodyError(name, f"{name} has a text of more than {longest} characters: give shorter ones")
        return tuple(dict.fromkeys(text for text in several if text is not None))

    def ids(self, name: str, vocab_size: int, most: int | None = None) -> list[int]:
        """Ids of tokens, each once; most: of a list, by default as many as the vocabulary."""
        value = self.given.get(name, [])
        most = vocab_size if most is None else most
        if isinstance(value, list) and len(value) > most:
            raise BodyError(name, f"{name} has {len(value)} ids, more than the {most} that it may have")
        try:
            return list(dict.fromkeys(token_ids(name, value, vocab_size)))
        except InputError as error:
            raise BodyError(name, error) from error

    def mapping(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] | None = self._of(name, lambda x: isinstance(x, dict), "an object")
        return value or {}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value
