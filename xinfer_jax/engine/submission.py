"""What comes in: a prompt and options, checked before anything runs, become a request."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..checks import in_order, whole
from ..errors import ContextLengthError, InputError, one_line, shown
from ..generation.options import Call, GenerateOptions, GenerateOutput, asked, check_prompts, checked
from ..sampling.choice import check_key
from ..sampling.settings import SamplingConfig
from ..text import Prompt, encode_prompt, stops_of
from .device import MOST_EOS, MOST_LOGPROBS, MOST_STOPS
from .requests import Answer, Request
from .scheduler import Row
from .statistics import EngineStats, stats_of

_OF_THE_ENGINE = dict(
    capacity="give it to Engine", impl="give it to Engine", cache_dtype="give it to Engine",
    draft="give draft='lookup' to Engine", use_cache="an engine has pages",
    prefix="an engine shares pages itself", keep_prefix="an engine shares pages itself",
    logits="use generate, or logprobs",
)  # fmt: skip


def request_of(
    engine: Any, prompt: Any, options: GenerateOptions | None, key: Any, i: int, escape: bool = True
) -> Request:
    """A request to an `Engine`, whose answers draw as those of prompt i of `generate`. escape: as
    `escape_control_tokens` of `encode_prompt`.

    Raises:
        InputError: what can never be served there.
    """
    return next(requests_of(engine, [prompt], options, [key], i, escape))


def requests_of(
    engine: Any, prompts: Sequence[Any], options: GenerateOptions | None, keys: Sequence[Any], i: int,
    escape: bool, skip_special_tokens: bool = True,
) -> Iterator[Request]:  # fmt: skip
    """`request_of` for each prompt and its key; the options are checked once, and their arrays shared."""
    model = engine.model
    (options, stops) = _checked_options(engine, options)
    first = None
    for prompt, key in zip(prompts, keys, strict=True):
        text = isinstance(prompt, str) or in_order(prompt) and len(prompt) and isinstance(prompt[0], Mapping)
        ids = encode_prompt(model, prompt, escape_control_tokens=escape) if text else prompt
        if key is not None:  # from the host, wherever it was: nothing is compiled for it
            data: Any = np.asarray(jax.random.key_data(check_key(key, np.size(key))))
            key = jax.random.wrap_key_data(data[i : i + 1] if data.ndim > 1 else data)
        if first is None:
            first = checked(model.params, model.config, [ids], options, key)
            # Of the parameters only what tells their type: `Engine.update` lets go of the others.
            first = dataclasses.replace(first, params=dict(final_norm=model.params["final_norm"]))
        key = first.key if key is None else check_key(key, 1)
        call = dataclasses.replace(first, prompts=check_prompts(model.config, [ids]), key=key)
        _check_sizes(engine, call)
        request = Request(engine, call, model.tokenizer, stops, 0 if key.ndim else i, skip_special_tokens)
        for j in range(call.answers):
            row = Row(call.prompts[0], call.options.max_new_tokens, later=j // engine.rows)
            request.answers.append(Answer(request, row, j))
        yield request


def _checked_options(engine: Any, options: GenerateOptions | None) -> tuple[GenerateOptions, tuple[str, ...]]:
    """Options that a request may have, without stop strings, and these."""
    options = asked(options)
    for name, why in _OF_THE_ENGINE.items():
        if (value := getattr(options, name)) != getattr(GenerateOptions, name):
            raise InputError(f"{name}={shown(value)} is not for a request: {why}")
    stops = stops_of(options)
    if stops and engine.model.tokenizer is None:
        raise InputError("stop_strings need a tokenizer, which this checkpoint lacks: use stop_token_ids")
    sampling = _on_host(options)
    return dataclasses.replace(options, stop_strings=(), impl=engine.impl, sampling=sampling), stops


def _check_sizes(engine: Any, call: Call) -> None:
    options = call.options
    need = call.longest + call.options.max_new_tokens
    switch = engine.switches_at
    for name, count, limit in (
        ("logprobs", options.logprobs, MOST_LOGPROBS),
        ("eos_token_ids", len(options.eos_token_ids or ()), MOST_EOS),
        ("stop_token_ids", len(options.stop_token_ids), MOST_STOPS),
    ):
        if count > limit:
            raise InputError(f"{name}: an engine takes {limit} at most, got {count}")
    asked_for = f"prompt of {call.longest} tokens + max_new_tokens {options.max_new_tokens}"
    if need > engine.room:
        raise ContextLengthError(
            f"{asked_for} exceeds the {engine.room} that a row of this engine can hold: shorten it, or make"
            " the engine with more capacity or pages"
        )
    if switch is not None and need > switch:
        raise InputError(
            f"{asked_for} exceeds {switch}, beyond which rope type 'longrope' changes its factors:"
            " an engine's rows stay on one side, use generate"
        )


def _on_host(options: GenerateOptions) -> SamplingConfig | list[SamplingConfig]:
    """Its settings without arrays of the device, for which something would be compiled."""
    given = options.sampling

    def one(sampling: Any) -> Any:
        arrays = {name: np.asarray(x) for name, x in vars(sampling).items() if isinstance(x, jax.Array)}
        return dataclasses.replace(sampling, **arrays) if arrays else sampling

    return [*map(one, given)] if isinstance(given, list | tuple) else one(given)


class Entrance:
    """How requests come to an engine, or to several."""

    @property
    def engines(self) -> Sequence[Any]:
        """Those that answer."""
        return (self,)

    def submit(  # noqa: PLR0913  a door
        self,
        prompt: Prompt | Sequence[int],
        options: GenerateOptions | None = None,
        *,
        key: jax.Array | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: str = "",
        share_answers: bool = False,
        prompt_logprobs: int | None = None,
        prompt_logprobs_from: int = 0,
        live: bool = True,
        client: str = "",
        received: float | None = None,
        escape_control_tokens: bool = True,
        skip_special_tokens: bool = True,
    ) -> Request:
        """Queues a request; any thread may. Its tokens are those of `generate([ids], options, key=key)`.

        Args:
            prompt: token ids, a text, or messages.
            options: None: `GenerateOptions()`. What a whole engine has (capacity, impl, cache_dtype, draft)
                is refused here.
            key: as in `generate`.
            priority: higher ones go first; a row that 32 later ones of its client, or a client without a slot
                that 32 rows of others, passed over goes first whatever it is. One that is higher by 16 or
                more takes the place of another row, which goes on later.
            deadline: seconds from now, or from `received`, after which it ends as it is, with the
                finish_reason "deadline".
            salt: prompts share pages only with those of the same salt.
            share_answers: this prompt may find what earlier answers wrote, and later ones what this answer
                writes (turns of a chat); the last bits may then differ from those alone.
            prompt_logprobs: what the model says of each token of the prompt too, with so many alternatives.
            prompt_logprobs_from: of the tokens from this one on; what stands before may come from pages of
                other such requests.
            live: somebody may read along. Without it windows of decoding are longer.
            client: whose request it is. Clients that have requests share the slots equally: rows of one that
                has more than its share make way for another's, and go on later with the same bits.
            received: when it arrived, by time.monotonic(), where that was before this call; its times count
                from then.
            escape_control_tokens: as in `encode_prompt`, for a text or messages.
            skip_special_tokens: special tokens have no text; False: stop strings are found in theirs too.

        Raises:
            InputError: what cannot be served, or can never fit; the engine is closed, or broke down.
        """
        keys = None if key is None else [key]
        return self.submit_many(
            [prompt], options, keys=keys, priority=priority, deadline=deadline, salt=salt, live=live,
            share_answers=share_answers, prompt_logprobs=prompt_logprobs,
            prompt_logprobs_from=prompt_logprobs_from, client=client, received=received,
            escape_control_tokens=escape_control_tokens, skip_special_tokens=skip_special_tokens,
        )[0]  # fmt: skip

    def submit_many(  # noqa: PLR0913  a door
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        options: GenerateOptions | None = None,
        *,
        keys: Sequence[jax.Array] | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: str = "",
        share_answers: bool = False,
        prompt_logprobs: int | None = None,
        prompt_logprobs_from: int = 0,
        live: bool = True,
        client: str = "",
        received: float | None = None,
        escape_control_tokens: bool = True,
        skip_special_tokens: bool = True,
    ) -> list[Request]:
        """`submit` of several prompts at once, all with the same arguments. keys: one for each prompt."""
        self._check_open()
        if keys is not None and len(keys) != len(prompts):
            raise InputError(f"{len(keys)} keys for {len(prompts)} prompts: give one for each")
        if deadline is not None and (not isinstance(deadline, int | float | np.number) or not deadline > 0):
            raise InputError(f"deadline must be a number of seconds above 0, got {shown(deadline)}")
        for name, text in (("salt", salt), ("client", client)):
            if not isinstance(text, str):
                raise InputError(f"{name} must be a text, got {shown(text)}")
        asks = (
            None if prompt_logprobs is None else whole("prompt_logprobs", prompt_logprobs, 0, MOST_LOGPROBS)
        )
        scored = None if asks is None else whole("prompt_logprobs_from", prompt_logprobs_from, 0)
        priority = whole("priority", priority, -(2**31), 2**31)
        requests = []
        each: Sequence[Any] = keys or [None] * len(prompts)
        how = escape_control_tokens, skip_special_tokens
        for request in requests_of(self, prompts, options, each, 0, *how):
            request.live = bool(live)
            request.asks = asks
            if received is not None:
                request.submitted = received
            if deadline is not None:
                request.deadline = request.submitted + deadline
            for answer in request.answers:
                row = answer.row
                row.priority = priority
                row.salt = salt.encode("utf-8", "surrogatepass")
                row.client = client
                row.scored = scored if answer is request.answers[0] else None
                row.share_answers = bool(share_answers)
            requests.append(request)
        self._queue(requests)
        return requests

    def generate(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        options: GenerateOptions | Sequence[GenerateOptions] | None = None,
        *,
        key: jax.Array | None = None,
        escape_control_tokens: bool = True,
    ) -> list[GenerateOutput]:
        """Answers many prompts, in their order: those of `xj.generate` with the same key. options: for all,
        or one per prompt. escape_control_tokens: as in `encode_prompt`.
        """
        if not in_order(prompts):
            raise InputError(f"prompts must be a list of ids, texts or conversations, got {shown(prompts)}")
        self._check_open()
        each = list(options) if isinstance(options, Sequence) else [options] * len(prompts)
        if len(each) != len(prompts):
            raise InputError(f"{len(each)} options for {len(prompts)} prompts: give one, or one per prompt")
        key = None if key is None else check_key(key, len(prompts))
        requests = []
        for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                requests.append(request_of(self, prompt, own, key, i, escape_control_tokens))
            except InputError as error:
                raise InputError(f"prompt {i}: {error}") from error
        self._queue(requests)
        try:
            return [request.result() for request in requests]
        finally:
            for request in requests:
                if not request.ended:  # one failed, or the caller did: nobody waits for the others
                    request.cancel()

    @property
    def stats(self) -> EngineStats:
        """What is done and was done so far."""
        return stats_of(self.engines)

    @property
    def alive(self) -> bool:
        """Whether it can answer: nothing has broken down, or was closed."""
        return all(engine.error is None for engine in self.engines)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads; requests that have not ended get an error."""
        raise NotImplementedError

    def _check_open(self) -> None:
        for engine in self.engines:
            if engine.error is not None:
                why = one_line(engine.error) or type(engine.error).__name__
                raise InputError(f"{engine.name} is closed: {why}") from engine.error

    def _queue(self, requests: list[Request]) -> None:
        """Has them answered."""
        raise NotImplementedError
