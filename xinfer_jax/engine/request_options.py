"""`RequestOptions`: how an engine serves a request, next to its prompt, its `GenerateOptions` and its key."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from ..checks import check_integer
from ..errors import InputError, format_value
from ..old_names import keyword_options
from .device_programs import MAX_LOGPROBS


class _SharedFields(TypedDict, total=False):
    """The fields of `RequestOptions` that all methods take by their names."""

    priority: int
    deadline: float | None
    salt: str
    share_answers: bool
    prompt_logprobs_from: int
    client: str
    received: float | None
    escape_control_tokens: bool
    skip_special_tokens: bool
    content_after: str | None
    return_routed_experts: bool
    return_support: bool


class RequestFields(_SharedFields, total=False):
    """The fields of `RequestOptions` as keyword arguments of `submit`: `submit(prompt, priority=3)`."""

    prompt_logprobs: int | None
    live: bool
    processed_logprobs: bool
    adapter: str | None


class ManyRequestFields(_SharedFields, total=False):
    """`RequestFields` of several prompts: the adapter may be a list with one for each."""

    prompt_logprobs: int | None
    live: bool
    processed_logprobs: bool
    adapter: str | Sequence[str | None] | None


class SampleFields(_SharedFields, total=False):
    """The keyword arguments of `sample` that it shares with `submit`."""

    adapter: str | None
    request_options: "RequestOptions | None"


@keyword_options(return_routes="return_routed_experts")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The way in which an engine serves a request: options of `Engine.submit`, `submit_many` and `sample`.

    You can also pass each field as a keyword argument, for example `engine.submit(prompt, priority=3)`.

    Attributes:
        priority: requests with a higher priority go first. A row goes first whatever its priority if 32 later
            rows of its client got slots before it, or if its client waited without a slot while 32 new rows
            of other clients got one. A priority that is higher by 16 or more preempts another row, which
            continues later.
        deadline: seconds from now, or from `received`. After this time the request ends with the tokens that
            it has, the finish_reason "length" and the stop_reason "deadline". None: no deadline.
        salt: prompts share pages only with prompts of the same salt.
        share_answers: True lets this prompt reuse pages of earlier answers, and lets later prompts reuse the
            pages of this answer. Use it for the turns of a chat. The last bits of numbers may then differ
            from the request alone.
        prompt_logprobs: the number of alternatives for the tokens of the prompt. The request then also
            computes the log-probability of each of these tokens. None: it does not.
        prompt_logprobs_from: the index of the first token with a log-probability. Pages before it may come
            from other such requests.
        live: True means that you may stream the answer. False lets the engine take more decode steps at a
            time.
        client: the name of the client who asks. Clients with requests share the slots equally. If a client
            has more rows than its share, they are preempted for other clients, and continue later with the
            same bits. If there are more clients than slots, they take turns (`EngineOptions.time_slice`).
        received: the time, by time.monotonic(), at which the request arrived, if that was before the call.
            The times of the request count from it. None: now.
        escape_control_tokens: True encodes control tokens that a text or messages spell as ordinary text (see
            `encode_prompt`).
        skip_special_tokens: True gives special tokens no text. With False, stop strings are found in their
            text too.
        content_after: the part of the answer that the prompt already has: "<think>", a header of Harmony, or
            "". Stop strings then count only in the content, and not in the reasoning. None: they count
            everywhere.
        processed_logprobs: True also computes the log-probability of each sampled token after the logits
            processors and the temperature (`Answer.processed_logprobs`).
        adapter: the name of a LoRA adapter that the engine has (`Engine.add_adapter`). None: the model alone.
        return_routed_experts: True also returns the experts that each token of the prompt and the answer used
            (`Answer.routed_experts`). The engine needs `routed_experts=True`.
        return_support: True also returns the sampling mask of each token of the answer (`Answer.support`).
            The engine needs `support=True`.
    """

    priority: int = 0
    deadline: float | None = None
    salt: str = ""
    share_answers: bool = False
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0
    live: bool = True
    client: str = ""
    received: float | None = None
    escape_control_tokens: bool = True
    skip_special_tokens: bool = True
    content_after: str | None = None
    processed_logprobs: bool = False
    adapter: str | None = None
    return_routed_experts: bool = False
    return_support: bool = False

    def checked(self, engine: Any) -> "RequestOptions":
        """Returns the options with the types above and the time of arrival.

        Args:
            engine: the engine that gets the request. Its attributes say which values it records.

        Raises:
            InputError: an option has a wrong type or range, or the engine does not record a value that it
                asks for.
        """
        values: dict[str, Any] = dict(priority=check_integer("priority", self.priority, -(2**31), 2**31))
        deadline = self.deadline
        if deadline is not None and (not isinstance(deadline, int | float | np.number) or not deadline > 0):
            raise InputError(f"deadline must be a number of seconds above 0, got {format_value(deadline)}")
        for name in ("salt", "client"):
            if not isinstance(text := getattr(self, name), str):
                raise InputError(f"{name} must be a string, got {format_value(text)}")
        for name in ("routed_experts", "support"):
            if getattr(self, f"return_{name}") and not getattr(engine, name):
                said = "needs an engine that records them: make it with"
                raise InputError(f"return_{name} {said} {name}=True")
        for name, most in (("prompt_logprobs", MAX_LOGPROBS), ("prompt_logprobs_from", None)):
            if self.prompt_logprobs is not None:
                values[name] = check_integer(name, getattr(self, name), 0, most)
        for name in (field.name for field in dataclasses.fields(self) if isinstance(field.default, bool)):
            values[name] = bool(getattr(self, name))
        if self.received is None:
            values["received"] = time.monotonic()
        return dataclasses.replace(self, **values)
