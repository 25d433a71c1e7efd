"""A line's engine requests: submits them, and makes one line of output from their answers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..api.bodies import parse_request_body
from ..api.fields import BodyError, with_field_names
from ..api.responses import response_body
from ..api.routed_experts import check_recorded
from ..api.score_body import format_scores, parse_score_body
from ..checkpoint.loading import Model
from ..checkpoint.model_defaults import options_of_model
from ..checks import check_integer
from ..engine.engines import Engine
from ..engine.request_options import RequestOptions
from ..engine.requests import Request
from ..engine.submission import requests_of
from ..errors import InputError, format_value
from ..generation.options import GenerateOptions
from ..sampling.random_keys import key_from_seed
from ..sampling.sampling_config import SamplingConfig
from ..text import checked_stop_strings
from ..tool_calls.json_values import json_line
from .input_lines import Line, identity_digest, sha256_int

_MODEL_NOT_FOUND = "model_not_found"  # an error code of the OpenAI API


def line_key(seed: int, identity: int | str) -> jax.Array:
    """Returns the random key of a line that has no seed."""
    key = key_from_seed(seed)
    for number in np.frombuffer(identity_digest(identity), "<u4"):
        key = jax.random.fold_in(key, number)
    return key


def default_model_names(model: Model) -> tuple[str, ...]:
    """Returns the `model_names` that `generate_file` uses if the caller gives none."""
    return tuple(dict.fromkeys(filter(None, (Path(model.name).name, model.name, model.config.model_type))))


@dataclasses.dataclass(frozen=True)
class LineDefaults:
    """Values of the fields that a line leaves out."""

    options: GenerateOptions
    seed: int
    raw: bool
    system: str | None
    score: bool
    escape_control_tokens: bool

    @staticmethod
    def make(
        model: Model, options: Any, seed: int, raw: bool, system: Any, score: bool, escape: bool
    ) -> "LineDefaults":
        """Checks a caller's values. raw becomes True if the model has no chat template."""
        options = options_of_model(model, options)
        tokenizer = model.tokenizer
        options = dataclasses.replace(options, stop_strings=checked_stop_strings(options))
        if not isinstance(options.sampling, SamplingConfig):
            raise InputError("options.sampling must be one SamplingConfig: a line may give its own values")
        raw = bool(raw or tokenizer and not tokenizer.chat_template)
        seed = check_integer("seed", seed, 0, 2**64 - 1)
        return LineDefaults(options, seed, raw, system, score, bool(escape))

    def check(self, engine: Engine) -> None:
        """Raises InputError for options with which the engine could serve no line."""
        list(requests_of(engine, [[0]], self.options, [key_from_seed(0)], RequestOptions()))


class LineRequest:
    """A line and its engine requests."""

    def __init__(self, line: Line, engine: Engine, defaults: LineDefaults, names: Sequence[str]):
        """Submits the line. names: names of the model that the line may give."""
        self.line = line
        self._engine = engine
        self._defaults = defaults
        self._names = names
        self.requests = list[Request]()
        self.error = line.error  # why there is no answer; "": no error so far
        self.reasons = list[str]()  # finish reasons of the answers; filled by `output_line`
        self._has_tokens = list[bool]()  # for each text to score, whether it has tokens
        self._code = "invalid_request"  # the error code, for a line of the OpenAI batch API
        try:
            if not self.error:
                (self._submit_scores if defaults.score else self._submit)()
        except InputError as error:
            self.error = with_field_names(error)
            self._code = getattr(error, "code", None) or self._code
            self.cancel()

    @property
    def ended(self) -> bool:
        return all(request.ended for request in self.requests)

    @property
    def started(self) -> bool:
        """Returns True if the engine has prefilled any part of the line."""
        return any("prefill" in request.times for request in self.requests)

    def output_line(self) -> bytes:
        """Returns the line of output: the same bytes in any run. Call it once the requests have ended."""
        found: dict[str, Any] = {}
        try:
            if not self.error:
                found = self._scores() if self._defaults.score else self._answers()
        except InputError as error:
            self.error = str(error)
        line = self.line
        if line.api:
            wrong = dict(code=self._code, message=f"line {line.number}: {self.error}")
            good = dict(status_code=200, request_id=self._id("req"), body=found)
            both = dict(response=None, error=wrong) if self.error else dict(response=good, error=None)
            value = dict(id=self._id("batch_req"), custom_id=line.identity, **both)
        else:
            problem = dict(error=f"line {line.number}: {self.error}")
            value = dict(id=line.identity, **(problem if self.error else found))
        return json_line(value).encode() + b"\n"

    def _id(self, prefix: str) -> str:
        return f"{prefix}-{sha256_int(repr(self.line.identity).encode()):016x}"

    def cancel(self) -> None:
        for request in self.requests:
            request.cancel()

    def _submit(self) -> None:
        engine = self._engine
        d = self._defaults
        line = self.line
        has_prompt = line.kind == "plain" and line.body.get("messages") is None
        fields: dict[str, Any] = dict(raw=d.raw, system=d.system) if has_prompt else {}
        escape = d.escape_control_tokens
        parsed = parse_request_body(
            engine.model, line.kind, self._body, d.options, engine.usable_capacity, escape, **fields
        )
        parsed.call_prefix = self._id("call")
        self._parsed = parsed
        adapter = self._adapter_or_model()
        if parsed.unknown_fields:
            raise InputError(f"{parsed.unknown_fields[0]} is not a field of a {line.kind} line: leave it out")
        check_recorded(parsed.routed_experts_start, engine.routed_experts)
        key = line_key(d.seed, line.identity) if parsed.seed is None else key_from_seed(parsed.seed)
        asked = dataclasses.replace(parsed.request_options, live=False, adapter=adapter)
        self.requests = engine.submit_many(parsed.prompts, parsed.options, asked, keys=parsed.keys(key))

    @property
    def _body(self) -> dict[str, Any]:
        """The fields of the API."""
        return {name: value for name, value in self.line.body.items() if name != "adapter"}

    def _adapter_or_model(self) -> str | None:
        """Returns the adapter that the line names as `adapter` or `model`."""
        adapter: str | None = self.line.body.get("adapter")
        name = self.line.body.get("model")
        if adapter is None and name in self._engine.adapters:
            return name
        if name is not None and name not in self._names:
            loaded = self._names[0]  # no directory: the error is the same wherever the checkpoint is
            why = f"the model {format_value(name)} is not the one here, which is {loaded!r}"
            raise BodyError("model", why, _MODEL_NOT_FOUND)
        return adapter

    def _answers(self) -> dict[str, Any]:
        parsed = self._parsed
        line = self.line
        model = self._engine.model
        outs = [request.result() for request in self.requests]
        prompt_logprobs = [request.prompt_logprobs for request in self.requests]
        self.reasons = [reason for out in outs for reason in out.finish_reason]
        adapter = outs[0].adapter
        name = line.body.get("model") or adapter or model.config.model_type
        head: dict[str, Any] = dict(
            id=self._id("chatcmpl" if parsed.kind == "chat" else "cmpl"), created=0, model=name
        )
        body = response_body(parsed, outs, prompt_logprobs, model.tokenizer, **head)
        if line.api:
            return body
        choices = body["choices"]
        usage = dict(usage=body["usage"]) | (dict(adapter=adapter) if adapter else {})
        if len(choices) > 1:
            return dict(choices=choices) | usage
        return {name: value for name, value in choices[0].items() if name != "index"} | usage

    def _submit_scores(self) -> None:
        if self.line.api:
            raise InputError('a line to score has "prompt" and "completions", or "text"')
        for context, ids in parse_score_body(self._engine.model, self._body):
            self._has_tokens.append(len(ids) > len(context))
            if not self._has_tokens[-1]:
                continue
            adapter = self.line.body.get("adapter")
            asked = RequestOptions(
                prompt_logprobs=1, prompt_logprobs_from=len(context), live=False, adapter=adapter
            )
            greedy = GenerateOptions(
                max_tokens=1, sampling=SamplingConfig(), eos_token_ids=()
            )  # its one token is not used
            self.requests.append(self._engine.submit(ids, greedy, asked))

    def _scores(self) -> dict[str, Any]:
        for request in self.requests:
            request.raise_error()
        logprobs = iter([request.prompt_logprobs for request in self.requests])
        return format_scores(self.line.body, [next(logprobs) if found else [] for found in self._has_tokens])
