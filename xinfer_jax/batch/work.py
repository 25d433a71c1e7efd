"""A line's way through the engine: submitted, and answered as one line of output."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..api.bodies import read_body
from ..api.fields import BodyError, in_fields
from ..api.responses import response
from ..api.scoring import read_texts, shown_scores
from ..checkpoint.loading import Model
from ..checks import whole
from ..engine.engines import AnyEngine
from ..engine.requests import Request
from ..engine.submission import request_of
from ..errors import InputError, shown
from ..generation.options import GenerateOptions, asked
from ..sampling.choice import seeded
from ..sampling.settings import SamplingConfig
from ..text import stops_of
from .lines import Line, digest_of, hash_of

_NO_MODEL = "model_not_found"  # the OpenAI API's word


def line_key(seed: int, identity: int | str) -> jax.Array:
    """What a line without a seed of its own draws with."""
    key = seeded(seed)
    for number in np.frombuffer(digest_of(identity), "<u4"):
        key = jax.random.fold_in(key, number)
    return key


def names_of(model: Model) -> tuple[str, ...]:
    """What requests may call a model by: where it was loaded from, the last part of that, or its type."""
    return tuple(dict.fromkeys(filter(None, (Path(model.name).name, model.name, model.config.model_type))))


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What holds where a line is silent."""

    options: GenerateOptions
    seed: int
    raw: bool
    system: str | None
    score: bool
    escape_control_tokens: bool

    @staticmethod
    def of(  # noqa: PLR0913  what a file has
        model: Model, options: Any, seed: int, raw: bool, system: Any, score: bool, escape: bool
    ) -> "Defaults":
        """Those that a caller gives; what has no chat template is continued.

        Raises:
            InputError: they cannot hold for every line.
        """
        options = asked(options)
        tokenizer = model.tokenizer
        options = dataclasses.replace(options, stop_strings=stops_of(options))
        if not isinstance(options.sampling, SamplingConfig):
            raise InputError("options.sampling must be one SamplingConfig: what differs stands on the lines")
        raw = bool(raw or tokenizer and not tokenizer.chat_template)
        return Defaults(options, whole("seed", seed, 0, 2**64 - 1), raw, system, score, bool(escape))

    def check(self, engine: AnyEngine) -> None:
        """Raises InputError for options that no line could be served with."""
        request_of(engine, [0], self.options, seeded(0), 0)


class Work:
    """A line, what it asks the engine for, and its answer.

    Attributes:
        requests: that it waits for.
        error: why there is no answer; "": nothing so far.
        reasons: finish reasons of its answers, once there are any.
    """

    def __init__(self, line: Line, engine: AnyEngine, defaults: Defaults, names: Sequence[str]):
        """names: that its model may have."""
        self.line = line
        self._engine = engine
        self._defaults = defaults
        self._names = names
        self.requests = list[Request]()
        self.error = line.error
        self.reasons = list[str]()
        self._scored = list[bool]()  # of each text, whether there are tokens to score
        self._code = "invalid_request"  # of an error of a line of the OpenAI batch API
        try:
            if not self.error:
                (self._submit_scores if defaults.score else self._submit)()
        except InputError as error:
            self.error = in_fields(error)
            self._code = getattr(error, "code", None) or self._code
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
            wrong = dict(code=self._code, message=f"line {line.number}: {self.error}")
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
        engine = self._engine
        d = self._defaults
        line = self.line
        prompted = line.kind == "plain" and line.body.get("messages") is None
        own: dict[str, Any] = dict(raw=d.raw, system=d.system) if prompted else {}
        asked = self._asked = read_body(
            engine.model, line.kind, line.body, d.options, engine.room, d.escape_control_tokens, **own
        )
        if (wanted := line.body.get("model")) is not None and wanted not in self._names:
            here = self._names[0]  # the same text wherever the checkpoint lies
            raise BodyError(
                "model", f"the model {shown(wanted)} is not the one here, which is {here!r}", _NO_MODEL
            )
        if asked.unknown:
            raise InputError(f"{asked.unknown[0]} is no option of a {line.kind} line: leave it out")
        key = line_key(d.seed, line.identity) if asked.seed is None else seeded(asked.seed)
        for i, prompt in enumerate(asked.prompts):
            own_key = jax.random.fold_in(key, i) if i else key
            self.requests.append(
                engine.submit(prompt, asked.options, key=own_key, live=False, **asked.submit)
            )

    def _answers(self) -> dict[str, Any]:
        asked = self._asked
        line = self.line
        model = self._engine.model
        outs = [r.result() for r in self.requests]
        noted = [r.prompt_logprobs for r in self.requests]
        self.reasons = [reason for out in outs for reason in out.finish_reason]
        name = line.body.get("model") or model.config.model_type
        head: dict[str, Any] = dict(
            id=self._name("chatcmpl" if asked.kind == "chat" else "cmpl"), created=0, model=name
        )
        body = response(asked, outs, noted, model.tokenizer, **head)
        if line.api:
            return body
        choices = body["choices"]
        used = dict(usage=body["usage"])
        if len(choices) > 1:
            return dict(choices=choices) | used
        return {name: value for name, value in choices[0].items() if name != "index"} | used

    def _submit_scores(self) -> None:
        if self.line.api:
            raise InputError('a line to score has "prompt" and "completions", or "text"')
        for context, ids in read_texts(self._engine.model, self.line.body):
            self._scored.append(len(ids) > len(context))
            if not self._scored[-1]:
                continue
            since: dict[str, Any] = dict(prompt_logprobs=1, prompt_logprobs_from=len(context), live=False)
            self.requests.append(self._engine.submit(ids, GenerateOptions(1, eos_token_ids=()), **since))

    def _scores(self) -> dict[str, Any]:
        for request in self.requests:
            request.raise_error()
        noted = iter([request.prompt_logprobs for request in self.requests])
        return shown_scores(self.line.body, [next(noted) if some else [] for some in self._scored])
