"""What a body asks for: prompts as token ids, options, and what the response has to show."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..checkpoint.conversation import prompt_ids
from ..checkpoint.loading import Model
from ..engine.device import MOST_STOPS as MOST_STOP_IDS
from ..errors import ContextLengthError, InputError
from ..generation.options import GenerateOptions
from ..sampling.settings import check_min_tokens
from ..text import LONGEST_STOP_STRING, MOST_STOP_STRINGS
from .fields import BodyError, Fields, served
from .prompts import Encode, Prompts
from .sampling_fields import sampling_of

COMPLETION_TOKENS = 16  # of completions that name no limit, as the API has it


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
        include_stop: the text ends with the stop string that ended it, not before it.
        skip_special_tokens: special tokens have no text.
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
    include_stop: bool = False
    skip_special_tokens: bool = True


def read_body(  # noqa: PLR0913  what a body depends on
    model: Model,
    kind: str,
    body: Mapping[str, Any],
    defaults: GenerateOptions,
    room: int,
    escape: bool = True,
    encode: Encode | None = None,
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
        encode: gives the ids of a prompt, called as `prompt_ids` without its tokenizer; None: that function.
        plain: defaults of the fields `raw` and `system`.

    Of the field `priority` lower ones go first, as vLLM has it; of the engine's, higher ones.

    Raises:
        BodyError: with the field at fault.
    """
    given = {name: value for name, value in body.items() if value is not None}
    given, unknown = served(kind, plain | given)
    take = Fields(given)
    config = model.config
    take.text("model")  # a response repeats it
    echo = take.switch("echo")
    asked_for = _asked_limit(take)
    template = model.tokenizer.chat_template if model.tokenizer else None
    least = 1 if kind == "chat" else COMPLETION_TOKENS if kind == "completion" else defaults.max_new_tokens
    left = room - max(1, least if asked_for is None else asked_for)
    prompts = Prompts(
        take, kind, encode or _encoder(model), template, config.vocab_size, config.context_length, escape
    ).ids(left)
    longest = max(map(len, prompts))
    limit = _limit(kind, asked_for, echo, defaults.max_new_tokens, room - longest)
    if longest + max(1, limit) > room:
        text = (
            f"the prompt has {longest} tokens, with max_tokens {limit} more than the {room} that there is"
            " room for: shorten it, or ask for fewer"
        )
        raise BodyError("messages" if "messages" in given else "prompt", ContextLengthError(text))
    logprobs = _logprobs(kind, take, defaults.logprobs or None)
    n = take.whole("n", 1, 128) or defaults.n
    submit: dict[str, Any] = dict(
        priority=-(take.whole("priority", -(2**30), 2**30) or 0), salt=take.text("cache_salt") or "",
        skip_special_tokens=take.switch("skip_special_tokens", True),
    )  # fmt: skip
    if echo and logprobs is not None:
        submit["prompt_logprobs"] = max(1, logprobs)
    options = dataclasses.replace(
        defaults,
        max_new_tokens=max(1, limit),
        sampling=sampling_of(model.tokenizer, config.vocab_size, take, defaults.sampling),
        eos_token_ids=() if take.switch("ignore_eos") else defaults.eos_token_ids,
        stop_token_ids=take.ids("stop_token_ids", config.vocab_size, MOST_STOP_IDS)
        or defaults.stop_token_ids,
        stop_strings=take.texts("stop", defaults.stop_strings, MOST_STOP_STRINGS, LONGEST_STOP_STRING),
        n=n,
        best_of=take.whole("best_of", n, 128) or (defaults.best_of if n == defaults.n else None),
        logprobs=0 if logprobs is None else max(1, logprobs),
    )
    _check_least(model, options, "min_tokens" in given)
    if take.switch("include_stop_str_in_output") and given.get("stop_token_ids"):
        raise BodyError(
            "include_stop_str_in_output", "include_stop_str_in_output holds for stop, not for stop_token_ids"
        )
    return Asked(
        kind, prompts, options, take.whole("seed", -(2**63), 2**64 - 1), limit, logprobs, echo,
        take.switch("return_token_ids"), submit, unknown, take.switch("include_stop_str_in_output"),
        submit["skip_special_tokens"],
    )  # fmt: skip


def _encoder(model: Model) -> Encode:
    """`prompt_ids` of a model's tokenizer."""

    def encode(prompt: Any, limit: int, **how: Any) -> list[int]:
        if model.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: give token ids")
        return prompt_ids(model.tokenizer, prompt, limit, **how)

    return encode


def _asked_limit(take: Fields) -> int | None:
    """Tokens of an answer that the body asks for."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := take.whole(name, 0 if take.switch("echo") else 1, 2**31 - 1)) is not None:
            return value
    return None


def _limit(kind: str, asked_for: int | None, echo: bool, most: int, left: int) -> int:
    """Tokens of an answer. left: beside the longest prompt."""
    if asked_for is not None:
        return asked_for
    if kind == "completion":
        return 0 if echo else COMPLETION_TOKENS
    return max(1, min(most, left)) if kind == "chat" else most


def _logprobs(kind: str, take: Fields, default: int | None) -> int | None:
    """Alternatives to show."""
    if kind != "chat":
        found = take.whole("logprobs", 0, 20)
        return default if found is None and kind == "plain" else found
    wanted = take.switch("logprobs")
    top = take.whole("top_logprobs", 0, 20)
    if top and not wanted:
        raise BodyError("top_logprobs", "top_logprobs needs logprobs: true beside it")
    return (top or 0) if wanted else None


def _check_least(model: Model, options: GenerateOptions, given: bool) -> None:
    """Whether so many tokens can come at least. given: the body says how many."""
    least = options.sampling.min_new_tokens  # type: ignore[union-attr]
    most = options.max_new_tokens
    if given and least > most:
        raise BodyError("min_tokens", f"min_tokens {least} is more than max_tokens {most}: lower it")
    eos = model.config.eos_token_ids if options.eos_token_ids is None else options.eos_token_ids
    try:
        check_min_tokens(options.sampling, (*eos, *options.stop_token_ids))  # type: ignore[arg-type]
    except InputError as error:
        raise BodyError("min_tokens", error) from error
