"""A line's way through the engine: submitted, and answered as one line of output."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax

from ..api.bodies import read_body, seed_key
from ..api.responses import finite, response
from ..checkpoint.loading import Model
from ..checks import token_ids, whole
from ..engine.engine import Engine
from ..engine.requests import Request
from ..engine.submission import request_of
from ..errors import InputError, shown
from ..generation.options import GenerateOptions, asked
from ..sampling.choice import seeded
from ..sampling.settings import SamplingConfig
from ..text import encode_prompt, stops_of
from .lines import Line, hash_of

_SCORED = {"prompt", "completions", "text", "add_special_tokens"}


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What holds where a line is silent."""

    options: GenerateOptions
    seed: int
    raw: bool
    system: str | None
    score: bool

    @staticmethod
    def of(model: Model, options: Any, seed: int, raw: bool, system: Any, score: bool) -> "Defaults":
        """Those that a caller gives; what has no chat template is continued.

        Raises:
            InputError: they cannot hold for every line.
        """
        options, tokenizer = asked(options), model.tokenizer
        options = dataclasses.replace(options, stop_strings=stops_of(options))
        if not isinstance(options.sampling, SamplingConfig):
            raise InputError("options.sampling must be one SamplingConfig: what differs stands on the lines")
        raw = bool(raw or tokenizer and not tokenizer.chat_template)
        return Defaults(options, whole("seed", seed, 0, 2**64 - 1), raw, system, score)

    def check(self, engine: Engine) -> None:
        """Raises InputError for options that no line could be served with."""
        request_of(engine, [0], self.options, seeded(0), 0)


class Work:
    """A line, what it asks the engine for, and its answer.

    Attributes:
        requests: that it waits for.
        error: why there is no answer; "": nothing so far.
        reasons: finish reasons of its answers, once there are any.
    """

    def __init__(self, line: Line, engine: Engine, defaults: Defaults):
        self.line, self._engine, self._defaults = line, engine, defaults
        self.requests, self.error, self.reasons = list[Request](), line.error, list[str]()
        try:
            if not self.error:
                (self._submit_scores if defaults.score else self._submit)()
        except InputError as error:
            self.error = str(error)
            self.cancel()

    @property
    def ended(self) -> bool:
        return all(request.ended for request in self.requests)

    @property
    def begun(self) -> bool:
        """Whether the engine has read any of it."""
        return any("read" in request.times for request in self.requests)

    def answer(self) -> bytes:
        """The line of output, once it has ended: the same bytes in any run."""
        found: dict[str, Any] = {}
        try:
            if not self.error:
                found = self._scores() if self._defaults.score else self._answers()
        except InputError as error:
            self.error = str(error)
        line = self.line
        if line.api:
            wrong = dict(code="invalid_request", message=f"line {line.number}: {self.error}")
            good = dict(status_code=200, request_id=self._name("req"), body=found)
            both = dict(response=None, error=wrong) if self.error else dict(response=good, error=None)
            value = dict(id=self._name("batch_req"), custom_id=line.identity, **both)
        else:
            problem = dict(error=f"line {line.number}: {self.error}")
            value = dict(id=line.identity, **(problem if self.error else found))
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"

    def _name(self, kind: str) -> str:
        return f"{kind}-{hash_of(repr(self.line.identity).encode()):016x}"

    def cancel(self) -> None:
        """What was submitted is not wanted any more."""
        for request in self.requests:
            request.cancel()

    def _submit(self) -> None:
        engine, d, line = self._engine, self._defaults, self.line
        prompted = line.kind == "plain" and line.body.get("messages") is None
        own: dict[str, Any] = dict(raw=d.raw, system=d.system) if prompted else {}
        asked = self._asked = read_body(engine.model, line.kind, line.body, d.options, engine.room, **own)
        if asked.unknown:
            raise InputError(f"{asked.unknown[0]} is no option of a {line.kind} line: leave it out")
        key = jax.random.fold_in(seed_key(d.seed), hash_of(str(line.identity).encode(), 4))
        key = key if asked.seed is None else seed_key(asked.seed)
        for i, prompt in enumerate(asked.prompts):
            own_key = jax.random.fold_in(key, i) if i else key
            self.requests.append(
                engine.submit(prompt, asked.options, key=own_key, live=False, **asked.submit)
            )

    def _answers(self) -> dict[str, Any]:
        asked, line, model = self._asked, self.line, self._engine.model
        outs, noted = [r.result() for r in self.requests], [r.prompt_logprobs for r in self.requests]
        self.reasons = [reason for out in outs for reason in out.finish_reason]
        name = line.body.get("model") or model.config.model_type
        head: dict[str, Any] = dict(
            id=self._name("chatcmpl" if asked.kind == "chat" else "cmpl"), created=0, model=name
        )
        body = response(asked, outs, noted, model.tokenizer, **head)
        if line.api:
            return body
        choices, used = body["choices"], dict(usage=body["usage"])
        if len(choices) > 1:
            return dict(choices=choices) | used
        return {name: value for name, value in choices[0].items() if name != "index"} | used

    def _submit_scores(self) -> None:
        body = {name: value for name, value in self.line.body.items() if value is not None}
        both = ("text" in body) == ("prompt" in body or "completions" in body)
        if both or self.line.api or {*body} - _SCORED:
            raise InputError('a line to score has "prompt" and "completions", or "text"')
        pairs = [([], self._ids(body["text"], body))] if "text" in body else self._pairs(body)
        for context, ids in pairs:
            if len(ids) <= max(1, len(context)):
                raise InputError(f"there is nothing to score behind {len(context)} tokens of prompt")
            since: dict[str, Any] = dict(prompt_logprobs=1, prompt_logprobs_from=len(context), live=False)
            options = GenerateOptions(1, eos_token_ids=())
            self.requests.append(self._engine.submit(ids, options, **since))

    def _pairs(self, body: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
        """Of each completion the prompt's ids, and those of both: together encoded, and cut where the prompt
        alone ends; spaces at its end belong to the completion, as lm-eval has it.
        """
        prompt, completions = body.get("prompt"), body.get("completions")
        if not isinstance(completions, list) or not completions:
            raise InputError(f"completions must be a list that is not empty, got {shown(completions)}")
        if isinstance(prompt, list) and prompt:
            context = self._ids(prompt, body)
            return [(context, context + self._ids(one, body)) for one in completions]
        if not isinstance(prompt, str) or not all(isinstance(one, str) for one in completions):
            raise InputError("prompt and completions are all texts, or all lists of ids; no prompt is empty")
        context = self._ids(prompt.rstrip() or prompt, body)
        cut = len(context)
        return [(context, context + self._ids(prompt + one, body)[cut:]) for one in completions]

    def _ids(self, text: Any, body: Mapping[str, Any]) -> list[int]:
        if isinstance(text, list):
            return token_ids("a list", text, self._engine.model.config.vocab_size)
        if not isinstance(text, str):
            raise InputError(f"what is scored is a text or a list of token ids, got {shown(text)}")
        special = body.get("add_special_tokens", True) is True
        return encode_prompt(self._engine.model, text, raw=True, add_special_tokens=special)

    def _scores(self) -> dict[str, Any]:
        scores = []
        for request in self.requests:
            request.raise_error()
            noted = request.prompt_logprobs
            logprob = finite(math.fsum(t.logprob for t in noted))
            greedy = all(t.id == t.top[0][0] for t in noted)
            scores.append(dict(logprob=logprob, tokens=len(noted), greedy=greedy))
        return scores[0] if "text" in self.line.body else dict(completions=scores)
