"""`submit` and `generate` of engines: prompts and options are checked, and become requests."""

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from ..checks import check_integer, is_sequence
from ..config.model_config import with_fixed_rope
from ..errors import ContextLengthError, InputError, format_message, format_value
from ..generation.options import GenerateOptions, GenerateOutput, options_or_default
from ..generation.validation import ValidatedCall, check_prompts, validate_call
from ..grammar.grammars import with_tokenizer
from ..ops.operation import without_mesh_context
from ..sampling.random_keys import check_key
from ..sampling.sampling_config import SamplingConfig
from ..text import Prompt, checked_stop_strings, encode_prompt
from ..weights.params import Params
from .async_sampling import AsyncSampling, SampleOutput
from .device_programs import MAX_LOGPROBS
from .engine_device import MAX_EOS_IDS, MAX_STOP_IDS
from .held_adapters import HeldAdapters
from .held_processors import HeldProcessors
from .held_vectors import HeldVectors
from .pausing import Pausing
from .replay import AdapterVersions, replay_answer
from .requests import Answer, Request
from .row import Row
from .statistics import EngineStats, collect_stats
from .weight_updates import WeightUpdates

_ENGINE_OPTIONS = dict(
    capacity="give it to Engine", impl="give it to Engine", cache_dtype="give it to Engine",
    draft="give draft='lookup' to Engine", use_cache="an engine has pages",
    prefix="an engine shares pages itself", keep_prefix="an engine shares pages itself",
    logits="use generate, or logprobs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """How a request reads and writes text. Fields as the arguments of `EngineBase.submit_many`."""

    escape_control_tokens: bool = True
    skip_special_tokens: bool = True
    content_after: str | None = None


def make_request(
    engine: Any,
    prompt: Any,
    options: GenerateOptions | None,
    key: Any,
    i: int,
    text: TextOptions = TextOptions(),
    adapter: str | None = None,
) -> Request:
    """A request to an engine, with the random draws of prompt i of `generate`. adapter: as in `submit`."""
    return next(make_requests(engine, [prompt], options, [key], i, text, adapter))


def make_requests(
    engine: Any,
    prompts: Sequence[Any],
    options: GenerateOptions | None,
    keys: Sequence[Any],
    i: int,
    text: TextOptions,
    adapter: str | None,
) -> Iterator[Request]:
    """`make_request` for each prompt and its key; all share the checked options and their arrays."""
    model = engine.model
    held = None if adapter is None else engine.adapters.find(adapter)
    (options, stops) = _checked_options(engine, options)
    callers = None if options.processors is None else engine.processors.of_request(options.processors)
    factors = () if options.taps is None else engine.taps.of_request(options.taps)
    options = dataclasses.replace(options, processors=None, taps=None)
    first = None
    for prompt, key in zip(prompts, keys, strict=True):
        is_text = isinstance(prompt, str)
        is_conversation = is_sequence(prompt) and len(prompt) and isinstance(prompt[0], Mapping)
        ids = prompt
        if is_text or is_conversation:
            ids = encode_prompt(model, prompt, escape_control_tokens=text.escape_control_tokens)
        if key is not None:  # copied through the host, so that no device makes jax compile anything
            data: Any = np.asarray(jax.random.key_data(check_key(key, np.size(key))))
            key = jax.random.wrap_key_data(data[i : i + 1] if data.ndim > 1 else data)
        if first is None:
            first = validate_call(model.params, model.config, [ids], options, key)
            # A request keeps one parameter, for its type: `Engine.update` frees the others.
            params = dict(final_norm=model.params["final_norm"])
            first = dataclasses.replace(first, params=params, callers=callers)
        key = first.key if key is None else check_key(key, 1)
        call = dataclasses.replace(first, prompts=check_prompts(model.config, [ids]), key=key)
        _check_sizes(engine, call)
        number = 0 if key.ndim else i
        request = Request(engine, call, model.tokenizer, stops, number, text.skip_special_tokens)
        request.content_after = text.content_after
        request.adapter = held
        for j in range(call.answers):
            sizes = call.prompts[0], call.options.max_new_tokens
            row = Row(*sizes, answer_group=j // engine.rows, adapter=held, factors=factors)
            request.answers.append(Answer(request, row, j))
        yield request


def _checked_options(engine: Any, options: GenerateOptions | None) -> tuple[GenerateOptions, tuple[str, ...]]:
    """The options without stop strings, and the stop strings. Raises InputError for options of an engine."""
    options = options_or_default(options)
    for name, why in _ENGINE_OPTIONS.items():
        if (value := getattr(options, name)) != getattr(GenerateOptions, name):
            raise InputError(f"{name}={format_value(value)} is not for a request: {why}")
    stops = checked_stop_strings(options)
    if stops and engine.model.tokenizer is None:
        raise InputError("stop_strings need a tokenizer, which this checkpoint lacks: use stop_token_ids")
    own = dict(
        sampling=_with_host_arrays(options), grammar=with_tokenizer(options.grammar, engine.model.tokenizer)
    )
    return dataclasses.replace(options, stop_strings=(), impl=engine.impl, **own), stops


def _check_sizes(engine: Any, call: ValidatedCall) -> None:
    options = call.options
    total = Row(call.prompts[0], options.max_new_tokens).longest
    for name, count, limit in (
        ("logprobs", options.logprobs, MAX_LOGPROBS),
        ("eos_token_ids", len(options.eos_token_ids or ()), MAX_EOS_IDS),
        ("stop_token_ids", len(options.stop_token_ids), MAX_STOP_IDS),
    ):
        if count > limit:
            raise InputError(f"{name}: an engine takes {limit} at most, got {count}")
    request = f"prompt of {call.longest} tokens + max_new_tokens {options.max_new_tokens}"
    if total > engine.usable_capacity:
        raise ContextLengthError(
            f"{request} exceeds the {engine.usable_capacity} that a row of this engine can hold: shorten it,"
            " or make the engine with more capacity or pages"
        )
    with_fixed_rope(engine.model.config, call.longest, total)  # raises where they would change


def _check_row_settings(deadline: Any, texts: dict[str, Any]) -> None:
    if deadline is not None and (not isinstance(deadline, int | float | np.number) or not deadline > 0):
        raise InputError(f"deadline must be a number of seconds above 0, got {format_value(deadline)}")
    for name, text in texts.items():
        if not isinstance(text, str):
            raise InputError(f"{name} must be a string, got {format_value(text)}")


def _with_host_arrays(options: GenerateOptions) -> SamplingConfig | list[SamplingConfig]:
    """Sampling settings with NumPy arrays in place of JAX arrays, for which jax would compile programs."""
    settings = options.sampling

    def convert(sampling: Any) -> Any:
        arrays = {name: np.asarray(x) for name, x in vars(sampling).items() if isinstance(x, jax.Array)}
        return dataclasses.replace(sampling, **arrays) if arrays else sampling

    return [*map(convert, settings)] if isinstance(settings, list | tuple) else convert(settings)


class EngineBase:
    """The common methods of `Engine` and `Engines`.

    Attributes:
        weights, adapters, pausing, sampling: parts, each with methods of its own.
        updating: is held by a change of weights or adapters: there is one at a time.
    """

    shape: Any  # `EngineShape`
    error: BaseException | None = None
    name = "the engine"
    processors = HeldProcessors(None)
    taps = HeldVectors(None, {}, None)
    # Methods of the parts.
    update = property(attrgetter("weights.update"))
    version = property(attrgetter("weights.version"))
    add_adapter = property(attrgetter("adapters.add"))
    update_adapter = property(attrgetter("adapters.update"))
    remove_adapter = property(attrgetter("adapters.remove"))
    pause = property(attrgetter("pausing.pause"))
    resume = property(attrgetter("pausing.resume"))
    release_cache = property(attrgetter("pausing.release_cache"))
    restore_cache = property(attrgetter("pausing.restore_cache"))
    sample = property(attrgetter("sampling.sample"))

    def __init__(self) -> None:
        self.updating = threading.Lock()
        self.weights = WeightUpdates(self)
        self.adapters = HeldAdapters(self)
        self.pausing = Pausing(self)
        self.sampling = AsyncSampling(self)

    def __getattr__(self, name: str) -> Any:
        """Returns a size: an attribute of the shape."""
        if name == "shape" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.shape, name)

    @property
    def engines(self) -> Sequence[Any]:
        """The engines that answer: this one."""
        return (self,)

    @property
    def missing(self) -> str:
        """What there is not, so that no request can be answered now; "": nothing."""
        return ""

    def check_local(self, what: str) -> None:
        """Raises InputError where the engines are in other processes, which keep their weights."""

    def forget_prompts(self) -> None:
        """After new weights: no engine has pages of earlier prompts."""

    def submit(
        self,
        prompt: Prompt | Sequence[int],
        options: GenerateOptions | None = None,
        *,
        key: jax.Array | None = None,
        **how: Any,
    ) -> Request:
        """`submit_many` of one prompt, with the same arguments (`how`). Its tokens are those of
        `generate([ids], options, key=key)`.
        """
        (request,) = self.submit_many([prompt], options, keys=None if key is None else [key], **how)
        return request

    @without_mesh_context
    def submit_many(  # noqa: PLR0913
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
        content_after: str | None = None,
        processed_logprobs: bool = False,
        adapter: str | None = None,
        return_routes: bool = False,
    ) -> list[Request]:
        """Queues a request for each prompt, from any thread.

        Args:
            prompts: token ids, texts, or messages.
            options: None: `GenerateOptions()`. Options of a whole engine (capacity, impl, cache_dtype, draft)
                are rejected.
            keys: of each prompt, as in `generate`.
            priority: higher ones go first. A row goes first whatever its priority once 32 later rows of its
                client got slots before it, or once its client waited without a slot while 32 new rows of
                other clients got one. A priority higher by 16 or more preempts another row, which continues
                later.
            deadline: seconds from now, or from `received`, after which the request ends with what it has and
                the finish_reason "deadline".
            salt: prompts share pages only with prompts of the same salt.
            share_answers: this prompt may reuse pages of earlier answers, and later prompts the pages of this
                answer (for the turns of a chat). The last bits may then differ from those of the request
                alone.
            prompt_logprobs: also compute the log-probability of each token of the prompt, with so many
                alternatives.
            prompt_logprobs_from: of the tokens from this one on; pages before it may come from other such
                requests.
            live: the caller may stream the answer. False: more decode steps in each step of the engine.
            client: whose request it is. Clients with requests share the slots equally: rows of a client with
                more than its share are preempted for another's, and continue later with the same bits. More
                clients than slots take turns (`time_slice` of `Engine`).
            received: when the request arrived, by time.monotonic(), if that was before this call; its times
                count from then.
            escape_control_tokens: as in `encode_prompt`, for a text or messages.
            skip_special_tokens: special tokens have no text. False: stop strings are found in their text too.
            content_after: stop strings count in the content only, not in the reasoning; this is what the
                prompt has of the answer already: "<think>", a header of Harmony, or "". None: they count
                everywhere.
            processed_logprobs: also compute the log-probability of each sampled token after the logits
                processors, temperature included: `Answer.processed`.
            adapter: the name of a LoRA adapter that the engine holds (`add_adapter`); None: the model alone.
            return_routes: also give the experts that each token of the prompt and the answer used:
                `Answer.routes`, of an engine with `routes=True`.

        Raises:
            InputError: a request that can never be answered; the engine is closed, or has failed.
        """
        self.check_open()
        if keys is not None and len(keys) != len(prompts):
            raise InputError(f"{len(keys)} keys for {len(prompts)} prompts: give one for each")
        _check_row_settings(deadline, dict(salt=salt, client=client))
        if return_routes and not self.routes:
            raise InputError("return_routes needs an engine that records them: make it with routes=True")
        logprobs_from = None
        if prompt_logprobs is not None:
            prompt_logprobs = check_integer("prompt_logprobs", prompt_logprobs, 0, MAX_LOGPROBS)
            logprobs_from = check_integer("prompt_logprobs_from", prompt_logprobs_from, 0)
        priority = check_integer("priority", priority, -(2**31), 2**31)
        requests = []
        each: Sequence[Any] = keys or [None] * len(prompts)
        text = TextOptions(escape_control_tokens, skip_special_tokens, content_after)
        engine: Any = self
        switch = engine.model.config.rope.switches_at
        for request in make_requests(self, prompts, options, each, 0, text, adapter):
            request.live = bool(live)
            request.processed_logprobs = bool(processed_logprobs)
            request.return_routes = bool(return_routes)
            request.num_prompt_logprobs = prompt_logprobs
            if received is not None:
                request.submitted = received
            if deadline is not None:
                request.deadline = request.submitted + deadline
            for answer in request.answers:
                row = answer.row
                row.priority = priority
                # Long factors of longrope have pages of their own. No text encodes to b"\xff".
                side = b"\xff" if switch is not None and row.longest > switch else b""
                row.salt = side + salt.encode("utf-8", "surrogatepass")
                row.client = client
                row.logprobs_from = logprobs_from if answer is request.answers[0] else None
                row.share_answers = bool(share_answers)
            requests.append(request)
        self.enqueue(requests)
        return requests

    @without_mesh_context
    def generate(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        options: GenerateOptions | Sequence[GenerateOptions] | None = None,
        *,
        key: jax.Array | None = None,
        escape_control_tokens: bool = True,
        adapter: str | None | Sequence[str | None] = None,
    ) -> list[GenerateOutput]:
        """Answers of many prompts in their order, equal to those of `xj.generate` with the same key. options:
        for all, or one per prompt; escape_control_tokens: as in `encode_prompt`; adapter: as of `submit`, for
        all, or one per prompt.
        """
        if not is_sequence(prompts):
            raise InputError(
                f"prompts must be a list of ids, texts or conversations, got {format_value(prompts)}"
            )
        self.check_open()
        each = list(options) if isinstance(options, Sequence) else [options] * len(prompts)
        if len(each) != len(prompts):
            raise InputError(f"{len(each)} options for {len(prompts)} prompts: give one, or one per prompt")
        adapters: Any = adapter if is_sequence(adapter) else [adapter] * len(prompts)
        if len(adapters) != len(prompts):
            raise InputError(
                f"{len(adapters)} adapters for {len(prompts)} prompts: give one, or one for each"
            )
        key = None if key is None else check_key(key, len(prompts))
        requests = []
        text = TextOptions(escape_control_tokens)
        for i, (prompt, own, name) in enumerate(zip(prompts, each, adapters, strict=True)):
            try:
                requests.append(make_request(self, prompt, own, key, i, text, name))
            except InputError as error:
                raise InputError(f"prompt {i}: {error}") from error
        self.enqueue(requests)
        try:
            return [request.result() for request in requests]
        finally:
            for request in requests:
                if not request.ended:  # another one failed, or the caller was interrupted
                    request.cancel()

    def replay(
        self,
        answer: Answer | Request | SampleOutput,
        params: Mapping[int, Params],
        adapters: AdapterVersions | None = None,
    ) -> list[float]:
        """Computes an answer again, with its own tokens, by the engine's programs. The result is `==`
        `answer.logprobs` if the weights are those of its versions. Other requests wait meanwhile.

        Args:
            answer: that has ended, of an engine of this shape; or a request with one, or what `sample` gave.
            params: of each version in `answer.switches`, as `update` takes them.
            adapters: of each adapter_version there, as `add_adapter` takes them, for an answer with one.

        Raises:
            InputError: a version is missing; the answer may have pages of other answers (`share_answers`);
                prompts and answers are on meshes of other sizes, or in several processes.
        """
        engine = self.engines[-1]  # of several one that decodes
        if engine.channel:
            raise InputError("replay needs an engine of one process: make one of this shape")
        if len({len(each.model.params["final_norm"].devices()) for each in self.engines}) > 1:
            raise InputError("replay needs equal meshes for prompts and answers: make such an engine")
        return replay_answer(engine, engine.core, answer, params, adapters or {})

    @property
    def stats(self) -> EngineStats:
        """What the engine does now and did so far."""
        return collect_stats(self.engines, [engine.counters for engine in self.engines])

    @property
    def alive(self) -> bool:
        """Whether it can answer: no engine has failed or was closed."""
        return all(engine.error is None for engine in (*self.engines, self))

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check_open(self) -> None:
        for engine in (*self.engines, self):
            if engine.error is not None:
                why = format_message(engine.error) or type(engine.error).__name__
                raise InputError(f"{engine.name} is closed: {why}") from engine.error
