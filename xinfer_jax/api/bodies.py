"""Parses a request body: prompts as token ids, options, and the parts that the response must contain."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..checkpoint.loading import Model
from ..checkpoint.model_defaults import end_ids, options_of_model
from ..config.model_config import ModelConfig
from ..engine.engine_device import MAX_STOP_IDS
from ..engine.request_options import RequestOptions
from ..errors import ContextLengthError, InputError, format_value
from ..generation.options import GenerateOptions
from ..grammar.compiler import AUTO
from ..grammar.grammars import Grammar
from ..sampling.biases import check_min_tokens
from ..text import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from ..tokenization.conversation import ChatOptions, ends_in_reasoning, harmony_header, prompt_ids
from ..tokenization.response_template import ResponseTemplate
from ..tokenization.tokenizer import Tokenizer
from ..tool_calls.reasoning import THINK_END, THINK_START
from .fields import BodyError, Fields, check_fields, errors_of
from .grammar_fields import grammar_field, parse_grammar
from .prompts import EncodePrompt, PromptEncoder, continued_text
from .routed_experts import encoded_bytes_per_token, parse_routed_experts
from .sampling_fields import parse_sampling
from .tool_fields import ToolSettings, parse_tools

COMPLETION_TOKENS = 16  # the API's default max_tokens of a completion


@dataclasses.dataclass
class ParsedBody:
    """A request body after its checks."""

    kind: str  # "completion", "chat", or "plain": a line of a prompt file in our own form
    prompts: list[list[int]]  # token ids of each; only completions have several
    options: GenerateOptions  # for each prompt
    seed: int | None  # of the random draws; None: the body has none
    max_tokens: int  # may be 0, where the client wants only the echoed prompt
    logprobs: int | None  # how many alternatives to return; None: no log-probabilities
    echo: bool  # the response repeats the prompt before the answer
    return_token_ids: bool  # the response has token ids too
    request_options: RequestOptions  # for each prompt; skip_special_tokens holds for the response too
    unknown_fields: list[str]
    include_stop: bool = False  # the text includes the stop string that ended it
    in_reasoning: bool = False  # the prompt of a chat ends within the reasoning: the template opened <think>
    harmony_header: str | None = None  # that the prompt of a chat ends with; None: no Harmony is written
    tools: ToolSettings | None = None  # that the answer may call
    include_reasoning: bool = True  # the response has the reasoning of a chat
    # How the answer of a chat is taken apart, and what the prompt has of it already; None: as reasoning and
    # calls are marked in forms that are known.
    template: tuple[ResponseTemplate, str] | None = None
    call_prefix: str = "call"  # ids of calls begin with it; no other request has the same
    # The first token whose experts the response has; None: it has none.
    routed_experts_start: int | None = None
    routed_experts_bytes: int = 0  # of each token in the response

    def keys(self, key: jax.Array) -> list[jax.Array]:
        """Returns the random key of each prompt, made from the key of the request."""
        return [jax.random.fold_in(key, i) if i else key for i in range(len(self.prompts))]


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """The settings that say how a response is sent."""

    streamed: bool
    usage: bool  # a last chunk has the usage
    continuous_usage: bool  # each chunk has the usage so far, too
    unknown_fields: tuple[str, ...]


def pop_stream_options(body: dict[str, Any]) -> StreamOptions:
    """Removes `stream` and `stream_options` from a body, and returns their meaning (vLLM's)."""
    given = Fields({name: body.pop(name, None) for name in ("stream", "stream_options")})
    streamed = given.boolean("stream")
    fields = given.mapping("stream_options")
    if given.values["stream_options"] is not None and not streamed:
        raise BodyError("stream_options", "stream_options needs stream: true beside it")
    known = ("include_usage", "continuous_usage_stats")
    for name, value in fields.items():
        if name in known and value not in (None, True, False):
            raise BodyError("stream_options", f"{name} must be true or false, got {format_value(value)}")
    usage, continuous = (bool(fields.get(name)) for name in known)
    unknown = tuple(f"stream_options.{name}" for name in fields if name not in known)
    return StreamOptions(streamed, usage, usage and continuous, unknown)


def parse_request_body(
    model: Model,
    kind: str,
    body: Mapping[str, Any],
    defaults: GenerateOptions,
    max_length: int,
    escape: bool = True,
    check: Callable[[], None] = lambda: None,
    stop_in_reasoning: bool = False,
    **plain: Any,
) -> ParsedBody:
    """Checks a body and encodes its prompts.

    The field `priority` has vLLM's meaning: lower goes first. `Engine.submit` takes the negated value.

    Args:
        kind: see `ParsedBody`.
        body: the JSON object. A field that is null counts as absent.
        defaults: defaults of absent fields. Without `defaults.sampling` the model's settings count. Its
            max_tokens is the default of plain lines, and the limit of the default of chats.
        max_length: the most tokens of a prompt and its answer together.
        escape: True: control tokens that messages spell stay ordinary text.
        check: a function that is called before each prompt is encoded. It raises if nobody needs the body.
        stop_in_reasoning: the default of the field of that name. If it is True, stop strings of a chat count
            in the reasoning too.
        plain: defaults of the fields `raw` and `system`.
    """
    defaults = options_of_model(model, defaults)
    given = {name: value for name, value in body.items() if value is not None}
    given, unknown = check_fields(kind, plain | given)
    fields = Fields(given)
    config = model.config
    fields.string("model")  # the response repeats it
    echo = fields.boolean("echo")
    max_tokens = _requested_max_tokens(fields)
    tools = parse_tools(fields, model.tokenizer)
    default = {"chat": 1, "completion": COMPLETION_TOKENS}.get(kind, defaults.max_tokens)
    prompts = PromptEncoder(
        fields,
        kind,
        _encoder(model, check),
        tools.tools if tools else None,
        config.vocab_size,
        config.context_length,
        escape,
    ).encode(max_length - (default if max_tokens is None else max_tokens))
    left, length = min((min(max_length, _longest_with(config, n)) - n, n) for n in map(len, prompts))
    if max_tokens is None:
        max_tokens = _default_max_tokens(kind, echo, defaults.max_tokens, left)
    if max_tokens > left:
        text = (
            f"the prompt has {length} tokens, which with max_tokens {max_tokens} exceeds the limit of"
            f" {length + left} for one request: shorten it, or ask for fewer"
        )
        raise BodyError("messages" if "messages" in given else "prompt", ContextLengthError(text))
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    logprobs = _parse_logprobs(kind, fields, defaults.logprobs or None)
    n = fields.integer("n", 1, 128) or defaults.n
    in_reasoning = header = content_after = None
    if kind == "chat":
        in_reasoning = ends_in_reasoning(model.tokenizer, prompts[0], continued_text(fields))
        header = harmony_header(model.tokenizer, prompts[0])
        if not fields.boolean("stop_in_reasoning", stop_in_reasoning):
            content_after = header or (THINK_START if in_reasoning else "")
    routed_experts_start = parse_routed_experts(fields, config, min(map(len, prompts)))
    request_options = RequestOptions(
        priority=-(fields.integer("priority", -(2**30), 2**30) or 0),
        salt=fields.string("cache_salt") or "",
        prompt_logprobs=max(1, logprobs) if echo and logprobs is not None else None,
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        content_after=content_after,
        return_routed_experts=routed_experts_start is not None,
    )
    options = dataclasses.replace(
        defaults,
        max_tokens=max(1, max_tokens),
        sampling=parse_sampling(model.tokenizer, config.vocab_size, fields, defaults.sampling),
        eos_token_ids=() if fields.boolean("ignore_eos") else defaults.eos_token_ids,
        stop_token_ids=fields.token_ids("stop_token_ids", config.vocab_size, MAX_STOP_IDS)
        or defaults.stop_token_ids,
        stop_strings=fields.strings("stop", defaults.stop_strings, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS),
        n=n,
        best_of=fields.integer("best_of", n, 128) or (defaults.best_of if n == defaults.n else None),
        logprobs=0 if logprobs is None else max(1, logprobs),
        grammar=_parse_grammar(fields, defaults.grammar, tools, bool(in_reasoning)),
    )
    _check_min_tokens_field(model, options, "min_tokens" in given)
    include_stop = fields.boolean("include_stop_str_in_output")
    if include_stop and given.get("stop_token_ids"):
        said = "include_stop_str_in_output applies to stop, not to stop_token_ids: leave one out"
        raise BodyError("include_stop_str_in_output", said)
    seed = None if seed == -1 else seed  # -1 means none to llama.cpp's and other clients
    template = _begun_template(model.tokenizer, prompts[0]) if kind == "chat" else None
    return ParsedBody(
        kind,
        prompts,
        options,
        seed,
        max_tokens,
        logprobs,
        echo,
        fields.boolean("return_token_ids"),
        request_options,
        unknown,
        include_stop,
        bool(in_reasoning),
        header,
        tools,
        fields.boolean("include_reasoning", True),
        template,
        routed_experts_start=routed_experts_start,
        routed_experts_bytes=0 if routed_experts_start is None else encoded_bytes_per_token(config),
    )


def _begun_template(tokenizer: Tokenizer | None, ids: Sequence[int]) -> tuple[ResponseTemplate, str] | None:
    template = None if tokenizer is None else tokenizer.answer_template
    if tokenizer is None or template is None:
        return None
    return template, template.begun(tokenizer.decode(ids, skip_special_tokens=False))


def _encoder(model: Model, check: Callable[[], None]) -> EncodePrompt:
    """Runs `prompt_ids` with the model's tokenizer."""

    def encode(prompt: Any, limit: int, chat: ChatOptions, **how: bool) -> list[int]:
        check()
        if model.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: give token ids")
        return prompt_ids(model.tokenizer, prompt, limit, chat, **how)

    return encode


def _requested_max_tokens(fields: Fields) -> int | None:
    """Returns the number of tokens that the body asks for, or None if the body does not say."""
    least = 0 if fields.boolean("echo") else 1
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := fields.integer(name, least, 2**31 - 1)) is not None:
            return value
    return None


def _default_max_tokens(kind: str, echo: bool, default: int, left: int) -> int:
    """Returns max_tokens of a body without it. left: tokens that fit after each prompt."""
    if kind == "plain":
        return default
    return 0 if echo else max(1, min(COMPLETION_TOKENS if kind == "completion" else default, left))


def _parse_logprobs(kind: str, fields: Fields, default: int | None) -> int | None:
    """Returns the number of alternatives to return, or None if no log-probabilities are returned."""
    if kind != "chat":
        found = fields.integer("logprobs", 0, 20)
        return default if found is None and kind == "plain" else found
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, 20)
    if top and not wanted:
        raise BodyError("top_logprobs", "top_logprobs needs logprobs: true beside it")
    return (top or 0) if wanted else None


def _parse_grammar(fields: Fields, default: Any, tools: ToolSettings | None, in_reasoning: bool) -> Any:
    """Returns the grammar of the answer. If calls are required, it is the grammar of calls. Otherwise it is
    the grammar of other fields, next to which tools may be called. in_reasoning: True: the prompt ends in the
    reasoning, and the grammar begins after it.
    """
    grammar = parse_grammar(fields, default if tools is None or tools.grammar is None else None)
    if tools is not None and tools.grammar is not None:
        if grammar is not None:
            said = "tool_choice requires calls: no other field may constrain the answer"
            raise BodyError("tool_choice", said)
        grammar = tools.grammar
    elif tools is not None and isinstance(grammar, Grammar):
        grammar = tools.calls_or(grammar)
    if grammar is not None and fields.boolean("ignore_eos"):
        field = "tool_choice" if tools is not None else grammar_field(fields.values)
        raise BodyError("ignore_eos", f"ignore_eos lets an answer go on where {field} ends it: leave one out")
    if in_reasoning and isinstance(grammar, Grammar) and grammar.reasoning_end == AUTO:
        return dataclasses.replace(grammar, reasoning_end=THINK_END)
    return grammar


def _check_min_tokens_field(model: Model, options: GenerateOptions, given: bool) -> None:
    """Raises BodyError if an answer cannot have min_tokens tokens. given: the body has the field."""
    least: Any = options.sampling.min_tokens  # type: ignore[union-attr]
    most = options.max_tokens
    if given and least > most:
        raise BodyError("min_tokens", f"min_tokens {least} is more than max_tokens {most}: lower it")
    with errors_of("min_tokens"):
        check_min_tokens(options.sampling, end_ids(model, options))  # type: ignore[arg-type]


def _longest_with(config: ModelConfig, prompt: int) -> int:
    """Returns the largest sum of tokens of a prompt of this length and its answer: longrope's factors change
    within no sequence.
    """
    switch = config.rope.switches_at
    return config.context_length if switch is None or prompt > switch else switch
