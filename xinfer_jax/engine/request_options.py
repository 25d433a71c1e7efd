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
    """Options of `Engine.submit`, `submit_many` and `sample`, which also take each of them by its name.

    Attributes:
        priority: higher ones go first. A row goes first whatever its priority once 32 later rows of its
            client got slots before it, or once its client waited without a slot while 32 new rows of other
            clients got one. A priority higher by 16 or more preempts another row, which continues later.
        deadline: seconds from now, or from `received`, after which the request ends with what it has and the
            finish_reason "length" and the stop_reason "deadline".
        salt: prompts share pages only with prompts of the same salt.
        share_answers: this prompt may reuse pages of earlier answers, and later prompts the pages of this
            answer (for the turns of a chat). The last bits may then differ from those of the request alone.
        prompt_logprobs: also compute the log-probability of each token of the prompt, with so many
            alternatives.
        prompt_logprobs_from: of the tokens from this one on; pages before it may come from other such
            requests.
        live: the caller may stream the answer. False: more decode steps in each step of the engine.
        client: whose request it is. Clients with requests share the slots equally: rows of a client with more
            than its share are preempted for another's, and continue later with the same bits. More clients
            than slots take turns (`time_slice` of `Engine`).
        received: when the request arrived, by time.monotonic(), if that was before the call; its times count
            from then.
        escape_control_tokens: as in `encode_prompt`, for a text or messages.
        skip_special_tokens: special tokens have no text. False: stop strings are found in their text too.
        content_after: stop strings count in the content only, not in the reasoning; this is what the prompt
            has of the answer already: "<think>", a header of Harmony, or "". None: they count everywhere.
        processed_logprobs: also compute the log-probability of each sampled token after the logits
            processors, temperature included: `Answer.processed_logprobs`.
        adapter: the name of a LoRA adapter that the engine holds (`add_adapter`); None: the model alone.
        return_routed_experts: also give the experts that each token of the prompt and the answer used:
            `Answer.routed_experts`, of an engine with `routed_experts=True`.
        return_support: also give the sampling mask of each token of the answer: `Answer.support`, of an
            engine with `support=True`.
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
        """Returns them with the types above and the time of arrival. engine: that gets the request; its
        attributes say what it records. Raises InputError.
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
