"""What a body asks for: prompts as token ids, options, and what the response has to show."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.loading import Model
from ..checks import token_ids
from ..errors import InputError, shown
from ..generation.options import GenerateOptions
from ..sampling.settings import SamplingConfig
from ..text import encode_prompt

COMPLETION_TOKENS = 16  # of completions that name no limit, as the API has it
_MOST_ANSWERS = 1024  # to one body
# Fields of numbers and the settings of a row that they are.
_SAMPLING = dict(
    temperature="temperature", top_p="top_p", top_k="top_k", min_p="min_p", typical_p="typical_p",
    repetition_penalty="repetition_penalty", presence_penalty="presence_penalty",
    frequency_penalty="frequency_penalty", no_repeat_ngram_size="no_repeat_ngram_size",
    min_tokens="min_new_tokens",
)  # fmt: skip
_BOTH = {
    *_SAMPLING, "model", "max_tokens", "n", "stop", "seed", "logprobs", "logit_bias", "user", "ignore_eos",
    "stop_token_ids", "metadata", "store", "service_tier", "parallel_tool_calls", "allowed_token_ids",
    "add_special_tokens", "return_token_ids", "cache_salt", "priority",
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")
_OWN = dict(
    completion={"prompt", "best_of", "echo"},
    chat={"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"},
    plain={"prompt", "messages", "best_of", "raw", "system", "chat_template_kwargs"},
)
# Known fields of the API that are not served; where they ask for nothing they are passed over.
_NOTHING = dict(
    suffix=("",), tools=([],), tool_choice=("none", "auto"), functions=([],), function_call=("none", "auto"),
    response_format=({"type": "text"},), audio=(), modalities=(["text"],), web_search_options=(),
    guided_json=(), guided_regex=(), guided_grammar=(), structured_outputs=(), reasoning_effort=(),
    use_beam_search=(False,), prompt_logprobs=(), stream=(False,),
)  # fmt: skip


class BodyError(InputError):
    """A body that cannot be served; `param` is the field at fault."""

    def __init__(self, param: str, message: object):
        super().__init__(message)
        self.param = param


@dataclasses.dataclass
class Asked:
    """Of one body.

    Attributes:
        kind: "completion", "chat", or "plain": a line of our own, whose prompt is what a user says.
        prompts: token ids; several of completions only.
        options: of each prompt.
        seed: of the draws; None: none was given.
        max_tokens: may be 0, where only what is echoed counts.
        logprobs: alternatives to show; None: no log-probabilities.
        echo: the prompt comes before the answer.
        token_ids: the response shows ids too.
        submit: further arguments of `Engine.submit`.
        unknown: fields that nobody knows.
    """

    kind: str
    prompts: list[list[int]]
    options: GenerateOptions
    seed: int | None
    max_tokens: int
    logprobs: int | None
    echo: bool
    token_ids: bool
    submit: dict[str, Any]
    unknown: list[str]


def read_body(
    model: Model,
    kind: str,
    body: Mapping[str, Any],
    defaults: GenerateOptions,
    room: int,
    escape: bool = False,
    **plain: Any,
) -> Asked:
    """Checks a body, and encodes its prompts.

    Args:
        model: whose tokenizer and chat template hold.
        kind: as in `Asked`.
        body: the JSON object; a field of null is as good as none.
        defaults: where the body is silent; max_new_tokens is that of plain lines, and of chat at most.
        room: tokens of a prompt and its answer together at most.
        escape: control tokens that messages spell stay letters.
        plain: defaults of the fields `raw` and `system`.

    Of the field `priority` lower ones go first, as vLLM has it; of the engine's, higher ones.

    Raises:
        BodyError: with the field at fault.
    """
    given = {**plain} | {name: value for name, value in body.items() if value is not None}
    for name, nothing in _NOTHING.items():
        if name in given and given.pop(name) not in nothing:
            raise BodyError(name, f"{name} is not served here: leave it out")
    known = _BOTH | _OWN[kind]
    others = [name for name in given if name not in known]
    for name in others:
        if any(name in fields for fields in _OWN.values()):
            raise BodyError(name, f"{name} does not belong to a {kind} request: leave it out")
    take = _Fields(given, escape)
    take.text("model")  # a response repeats it
    echo = take.switch("echo")
    prompts = _prompts(model, kind, take)
    longest = max(map(len, prompts))
    limit = _limit(kind, take, echo, defaults.max_new_tokens, room - longest)
    if longest + max(1, limit) > room:
        raise BodyError(
            "prompt" if kind == "completion" else "messages",
            f"the prompt has {longest} tokens, with max_tokens {limit} more than the {room} that there is"
            " room for: shorten it, or ask for fewer",
        )
    logprobs = _logprobs(kind, take, defaults.logprobs or None)
    n = take.whole("n", 1, 128) or defaults.n
    submit: dict[str, Any] = dict(
        priority=-(take.whole("priority", -(2**30), 2**30) or 0), salt=take.text("cache_salt") or ""
    )
    if echo and logprobs is not None:
        submit["prompt_logprobs"] = max(1, logprobs)
    options = dataclasses.replace(
        defaults,
        max_new_tokens=max(1, limit),
        sampling=_sampling(model, take, defaults.sampling),
        eos_token_ids=() if take.switch("ignore_eos") else defaults.eos_token_ids,
        stop_token_ids=take.ids("stop_token_ids", model) or defaults.stop_token_ids,
        stop_strings=take.texts("stop", defaults.stop_strings),
        n=n,
        best_of=take.whole("best_of", n, 128) or (defaults.best_of if n == defaults.n else None),
        logprobs=0 if logprobs is None else max(1, logprobs),
    )
    seed, token_ids = take.whole("seed", -(2**63), 2**64 - 1), take.switch("return_token_ids")
    return Asked(kind, prompts, options, seed, limit, logprobs, echo, token_ids, submit, others)


class _Fields:
    """Values of a body by their kinds; None where there is none."""

    def __init__(self, given: dict[str, Any], escape: bool):
        self.given, self.escape = given, escape

    def _of(self, name: str, fits: Any, form: str) -> Any:
        value = self.given.get(name)
        if value is not None and not fits(value):
            raise BodyError(name, f"{name} must be {form}, got {shown(value)}")
        return value

    def switch(self, name: str) -> bool:
        return bool(self._of(name, lambda x: isinstance(x, bool), "true or false"))

    def whole(self, name: str, least: int, most: int) -> int | None:
        form = f"a whole number from {least} to {most}"
        value: int | None = self._of(name, lambda x: type(x) is int and least <= x <= most, form)
        return value

    def number(self, name: str) -> float | None:
        value: float | None = self._of(name, lambda x: type(x) in (int, float), "a number")
        return value

    def text(self, name: str) -> str | None:
        fits = lambda x: isinstance(x, str) and x.encode(errors="ignore").decode() == x  # noqa: E731
        value: str | None = self._of(name, fits, "a text")
        return value

    def texts(self, name: str, default: Sequence[str]) -> tuple[str, ...]:
        value = self.given.get(name)
        if value is None:
            return tuple(default)
        several = value if isinstance(value, list) else [value]
        if not all(text is None or isinstance(text, str) and text for text in several):
            raise BodyError(name, f"{name} must be a text or a list of texts, got {shown(value)}")
        return tuple(text for text in several if text is not None)

    def ids(self, name: str, model: Model) -> list[int]:
        try:
            return token_ids(name, self.given.get(name, []), model.config.vocab_size)
        except InputError as error:
            raise BodyError(name, error) from error

    def mapping(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] | None = self._of(name, lambda x: isinstance(x, dict), "an object")
        return value or {}


def _limit(kind: str, take: _Fields, echo: bool, most: int, left: int) -> int:
    """Tokens of an answer."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := take.whole(name, 0 if echo else 1, 2**31 - 1)) is not None:
            return value
    if kind == "completion":
        return 0 if echo else COMPLETION_TOKENS
    return max(1, min(most, left)) if kind == "chat" else most


def _logprobs(kind: str, take: _Fields, default: int | None) -> int | None:
    """Alternatives to show."""
    if kind != "chat":
        found = take.whole("logprobs", 0, 20)
        return default if found is None and kind == "plain" else found
    wanted, top = take.switch("logprobs"), take.whole("top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise BodyError("top_logprobs", "top_logprobs needs logprobs: true beside it")
    return (top or 0) if wanted else None


def _sampling(model: Model, take: _Fields, defaults: Any) -> SamplingConfig:
    values: dict[str, Any] = {}
    for name, setting in _SAMPLING.items():
        if (number := take.number(name)) is not None:
            values[setting] = 0 if name == "top_k" and number == -1 else number
    if biases := take.mapping("logit_bias"):
        good = lambda i, b: i.isdecimal() and len(i) < 10 and type(b) in (int, float) and abs(b) <= 1e30  # noqa: E731
        wrong = [i for i, b in biases.items() if not good(i, b)]
        if wrong:
            raise BodyError("logit_bias", f"logit_bias maps token ids to numbers, got {shown(wrong[0])}")
        take.given["logit_bias"] = [int(i) for i in biases]
        ids = take.ids("logit_bias", model)
        values["logit_bias"] = dict(zip(ids, map(float, biases.values()), strict=True))
    if allowed := take.ids("allowed_token_ids", model):
        values["allowed_token_ids"] = allowed
    for name, value in values.items():
        try:
            SamplingConfig(**{name: value}).validate()
        except InputError as error:
            back = {setting: field for field, setting in _SAMPLING.items()}
            raise BodyError(back.get(name, name), error) from error
    return dataclasses.replace(defaults, **values)


def _prompts(model: Model, kind: str, take: _Fields) -> list[list[int]]:
    """Token ids of each prompt of a body."""
    prompt, messages = take.given.get("prompt"), take.given.get("messages")
    if (prompt is None) == (messages is None):
        names = "a prompt or messages, one of them" if kind == "plain" else _needs(kind)
        raise BodyError(_needs(kind), f"the body must have {names}")
    field = "prompt" if messages is None else "messages"
    try:
        if messages is not None:
            return [_chat_ids(model, messages, take)]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and kind == "completion":
            rows = len(prompt) * max(take.whole(name, 1, 128) or 1 for name in ("n", "best_of"))
            if rows > _MOST_ANSWERS:
                raise InputError(
                    f"{rows} answers are more than the {_MOST_ANSWERS} of one request: send several"
                )
            return [_ids(model, kind, one, take) for one in prompt]
        return [_ids(model, kind, prompt, take)]
    except BodyError:
        raise
    except InputError as error:
        raise BodyError(field, error) from error


def _needs(kind: str) -> str:
    return "messages" if kind == "chat" else "prompt"


def _ids(model: Model, kind: str, prompt: Any, take: _Fields) -> list[int]:
    if isinstance(prompt, list):
        ids = token_ids("prompt", prompt, model.config.vocab_size)
        if not ids:
            raise InputError("the prompt is an empty list: give at least one token id")
        return ids
    if not isinstance(prompt, str):
        raise InputError(f"the prompt must be a text or a list of token ids, got {shown(prompt)}")
    raw = kind == "completion" or take.switch("raw")
    special = take.given.get("add_special_tokens") is None or take.switch("add_special_tokens")
    system, variables = None if raw else take.text("system"), take.mapping("chat_template_kwargs")
    return encode_prompt(
        model,
        prompt,
        system=system,
        raw=raw,
        add_special_tokens=special,
        chat_template_kwargs=variables,
        escape_control_tokens=take.escape,
    )


def _chat_ids(model: Model, messages: Any, take: _Fields) -> list[int]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError(f"messages must be a list of objects, got {shown(messages)}")
    for message in messages:
        if (role := message.get("role")) not in _ROLES:
            raise InputError(f"a message's role is one of {', '.join(_ROLES)}, got {shown(role)}")
    variables, system = take.mapping("chat_template_kwargs"), take.text("system")
    flat = [{**m, "content": _flat(m["content"])} if "content" in m else m for m in messages]
    raw = take.switch("raw")  # refused
    return encode_prompt(
        model, flat, system=system, raw=raw, chat_template_kwargs=variables, escape_control_tokens=take.escape
    )


def _flat(content: Any) -> Any:
    """Text parts as one text."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"a message's content is a text or text parts, got {shown(part)}")
    return "".join(part["text"] for part in content)
