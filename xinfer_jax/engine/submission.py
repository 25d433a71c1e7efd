"""`submit` and `generate` of engines: prompts and options are checked, and become requests."""

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import jax
import numpy as np

from ..checkpoint.loading import Model
from ..checkpoint.model_defaults import key_or_default, options_of_model
from ..checks import is_sequence
from ..config.model_config import with_fixed_rope
from ..errors import ContextLengthError, InputError, format_message, format_value
from ..generation.options import GenerateOptions, GenerateOutput
from ..generation.validation import ValidatedCall, check_prompts, validate_call
from ..grammar.grammars import with_tokenizer
from ..ops.operation import without_mesh_context
from ..sampling.caller_processors import callers_of_call
from ..sampling.random_keys import answer_keys, check_key
from ..sampling.sampling_config import SamplingConfig
from ..text import Prompt, checked_stop_strings, encode_prompt
from ..weights.params import Params
from .answers import Answer
from .async_sampling import AsyncSampling, SampleOutput
from .device_programs import MAX_LOGPROBS
from .engine_device import MAX_EOS_IDS, MAX_STOP_IDS
from .engine_options import EngineOptions, EngineSettings
from .held_adapters import HeldAdapters
from .held_processors import HeldProcessors
from .held_vectors import HeldVectors
from .part_method import PartMethod
from .pausing import Pausing
from .replay import AdapterVersions, replay_answer
from .request_options import ManyRequestFields, RequestFields, RequestOptions
from .requests import Request
from .row import Row
from .shape import EngineShape
from .statistics import EngineStats, collect_stats
from .weight_updates import WeightUpdates

_ENGINE_OPTIONS = dict(
    capacity="give it to Engine", impl="give it to Engine", cache_dtype="give it to Engine",
    draft="give draft='lookup' to Engine", use_cache="an engine has pages",
    prefix="an engine shares pages itself", keep_prefix="an engine shares pages itself",
    logits="use generate, or logprobs", support="give return_support to submit",
)  # fmt: skip


def requests_of(
    engine: Any,
    prompts: Sequence[Any],
    options: GenerateOptions | None,
    keys: Sequence[Any],
    request_options: RequestOptions,
) -> Iterator[Request]:
    """Returns a request to an engine for each prompt. All share the checked options and their arrays. keys:
    the key of each prompt, [1], into which no number is folded any more. Raises InputError.
    """
    model = engine.model
    request_options = request_options.checked(engine)
    name = request_options.adapter
    adapter = None if name is None else engine.adapters.find(name)
    given = options_of_model(model, options)
    options = _checked_options(engine, given)
    callers = None if given.processors is None else engine.processors.of_request(given.processors)
    factors = () if given.taps is None else engine.taps.of_request(given.taps)
    first = None
    for prompt, key in zip(prompts, keys, strict=True):
        is_text = isinstance(prompt, str)
        is_conversation = is_sequence(prompt) and len(prompt) and isinstance(prompt[0], Mapping)
        ids = prompt
        if is_text or is_conversation:
            escape = request_options.escape_control_tokens
            ids = encode_prompt(model, prompt, escape_control_tokens=escape)
        if first is None:
            first = validate_call(model.params, model.config, [ids], options, key)
            kept = dataclasses.replace(first.options, stop_strings=tuple(given.stop_strings))
            params = dict(final_norm=model.params["final_norm"])
            first = dataclasses.replace(first, params=params, options=kept, callers=callers)
        ids_of_call = check_prompts(model.config, [ids])
        call = dataclasses.replace(first, prompts=ids_of_call, key=check_key(key, 1))
        vars(call).update(greedy=first.greedy, all_settings_B=first.all_settings_B)  # computed once
        _check_sizes(engine, call)
        yield Request(engine, call, request_options, adapter, factors)


def _checked_options(engine: Any, options: GenerateOptions) -> GenerateOptions:
    """Returns the options as `validate_call` takes them. Raises InputError for options of an engine."""
    for name, why in _ENGINE_OPTIONS.items():
        if (value := getattr(options, name)) != getattr(GenerateOptions, name):
            raise InputError(f"{name}={format_value(value)} is not for a request: {why}")
    tokenizer = engine.model.tokenizer
    if checked_stop_strings(options) and tokenizer is None:
        raise InputError("stop_strings need a tokenizer, which this checkpoint lacks: use stop_token_ids")
    return dataclasses.replace(
        options,
        sampling=_with_host_arrays(options),
        grammar=with_tokenizer(options.grammar, tokenizer),
        impl=engine.impl,
        stop_strings=(),
        processors=None,
        taps=None,
    )


def _check_sizes(engine: Any, call: ValidatedCall) -> None:
    options = call.options
    total = Row(call.prompts[0], options.max_tokens).longest
    for name, count, limit in (
        ("logprobs", options.logprobs, MAX_LOGPROBS),
        ("eos_token_ids", len(options.eos_token_ids or ()), MAX_EOS_IDS),
        ("stop_token_ids", len(options.stop_token_ids), MAX_STOP_IDS),
    ):
        if count > limit:
            raise InputError(f"{name}: an engine takes {limit} at most, got {count}")
    request = f"prompt of {call.longest} tokens + max_tokens {options.max_tokens}"
    if total > engine.usable_capacity:
        raise ContextLengthError(
            f"{request} exceeds the {engine.usable_capacity} that a row of this engine can hold: shorten it,"
            " or make the engine with more capacity or pages"
        )
    with_fixed_rope(engine.model.config, call.longest, total)  # raises where they would change


def _with_host_arrays(options: GenerateOptions) -> SamplingConfig | list[SamplingConfig]:
    """Returns sampling settings with NumPy arrays in place of JAX arrays, for which jax would compile
    programs.
    """
    settings = options.sampling

    def convert(sampling: Any) -> Any:
        if not isinstance(sampling, SamplingConfig):
            return sampling  # `validate_call` raises
        arrays: dict[str, Any] = {
            name: np.asarray(x) for name, x in vars(sampling).items() if isinstance(x, jax.Array)
        }
        return dataclasses.replace(sampling, **arrays) if arrays else sampling

    return [*map(convert, settings)] if isinstance(settings, list | tuple) else convert(settings)


def _per_prompt(name: str, given: Any, prompts: int) -> list[Any]:
    each = list(given) if is_sequence(given) else [given] * prompts
    if len(each) != prompts:
        raise InputError(f"{len(each)} {name} for {prompts} prompts: give one, or one per prompt")
    return each


def _options_of_prompts(options: Any, prompts: int) -> list[Any]:
    """Returns the options of each prompt. Options for several prompts have arguments of processors with the
    same number of rows, which `generate` asks for too.
    """
    each = _per_prompt("options", options, prompts)
    pairs = getattr(options, "processors", None)
    if prompts < 2 or not is_sequence(pairs):
        return each
    callers = callers_of_call(pairs, None, None, prompts)  # checks them
    if callers is None:
        return each
    states = jax.tree.map(np.asarray, callers.states)

    def of_prompt(i: int) -> GenerateOptions:
        own = jax.tree.map(lambda x: x[i : i + 1], states)
        return dataclasses.replace(options, processors=list(zip(callers.processors, own, strict=True)))

    return [of_prompt(i) for i in range(prompts)]


def _prompt_keys(keys: Any, prompts: int) -> list[Any]:
    """Returns the key of each prompt, uint32 [1, 2]. No program is compiled for it. keys: see
    `submit_many`.
    """
    if isinstance(keys, list | tuple):
        return [_prompt_keys(key, 1)[0] for key in _per_prompt("keys", keys, prompts)]
    numbers = np.arange(prompts), np.zeros(prompts, np.int32)
    return list(answer_keys(check_key(key_or_default(keys), prompts), *numbers)[:, None])


# The key of each prompt, as of `submit`, in a list; or the key of `generate`.
Keys = jax.Array | Sequence[jax.Array | None] | None


class Engine:
    """Answers requests as they come, several at a time, with continuous batching and a paged KV cache.

    Use it if requests come and go, from several threads or clients. Each request gets, bit for bit, the
    tokens and log-probabilities that it gets alone in an engine of the same shape. The ideas are continuous
    batching (Orca, Yu et al. 2022) and PagedAttention (vLLM, Kwon et al. 2023).

    Create it with a model and `EngineOptions`: `Engine(model, EngineOptions(rows=4))`. You can also pass the
    fields of the options as keyword arguments: `Engine(model, rows=4)`. The constructor compiles the programs
    that a short greedy request needs. The other programs are compiled in the background, and a request that
    needs one of them waits for it. In a `with` block the engine has a thread that takes its steps. The
    constructor raises `InputError` if an option has a value that no engine can have.

    With `data_parallel=N` there are N engines behind one queue. A request has the same bits in each of them.
    It goes to the engine with the fewest requests. If the prefix cache of another engine has the beginning of
    its prompt, it goes to that engine, unless that engine is much busier.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> with xj.Engine(model, rows=2, capacity=256) as engine:
        ...     request = engine.submit("What is the capital of France?", xj.GenerateOptions(max_tokens=20))
        ...     print("".join(request.text()))
        The capital of France is Paris.

    Attributes:
        model: the model, with the weights of the last `update`.
        shape: the sizes of the engine. They are attributes of the engine too: `rows` (of all engines
            together), `capacity` and `pages`.
        memory: the planned bytes. `memory.parts` is a dict from names of parts to bytes, and `memory.total`
            is their sum in one memory. With `data_parallel` above 1, each of `engines` has its own `memory`.
        weights: the part of the engine with the method `update`.
        adapters: the part of the engine with the methods `add_adapter`, `update_adapter` and
            `remove_adapter`.
        pausing: the part of the engine with the methods `pause`, `resume`, `release_cache` and
            `restore_cache`.
        sampling: the part of the engine with the method `sample`.
        updating: a lock that a change of weights or adapters holds, so there is one change at a time.
    """

    _one: type["Engine"]  # the class of an engine, and that of several: their modules assign them
    _several: type["Engine"]
    shape: EngineShape
    error: BaseException | None = None
    name = "the engine"
    processors = HeldProcessors(None)
    taps = HeldVectors(None, {}, None)
    # Methods of the parts.
    update = PartMethod("weights", WeightUpdates.update)
    add_adapter = PartMethod("adapters", HeldAdapters.add)
    update_adapter = PartMethod("adapters", HeldAdapters.update)
    remove_adapter = PartMethod("adapters", HeldAdapters.remove)
    pause = PartMethod("pausing", Pausing.pause)
    resume = PartMethod("pausing", Pausing.resume)
    release_cache = PartMethod("pausing", Pausing.release_cache)
    restore_cache = PartMethod("pausing", Pausing.restore_cache)
    sample = PartMethod("sampling", AsyncSampling.sample)

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        if cls is not Engine:
            return super().__new__(cls)
        if len(args) > 2:  # (model, data_parallel, options), as `Engines` had them in version 0.1
            raise InputError("an engine takes a model and options: give the rest by name, as data_parallel=2")
        options = settings.get("options", args[1] if len(args) > 1 else None)
        count = settings.get("data_parallel", getattr(options, "data_parallel", 1))
        return super().__new__(cast(Any, cls._one if count == 1 else cls._several))

    def __init__(
        self, model: Model, options: EngineOptions | None = None, **settings: Unpack[EngineSettings]
    ) -> None:
        """Creates the engine, and compiles the programs that a short greedy request needs.

        The other programs are compiled in the background. A request that needs one of them waits for it. In a
        `with` block the engine has a thread that takes its steps.

        Args:
            model: a model from `load_model`.
            options: the options of the engine. None takes `EngineOptions()`.
            settings: fields of `EngineOptions`, for example `rows=4`. They replace the fields of `options`.

        Raises:
            InputError: an option has a value that no engine can have. The call raises it before anything is
                compiled. With `data_parallel` it is also raised if there are too few devices, or too little
                memory for all engines.
        """
        raise NotImplementedError  # the class that `__new__` chooses has it

    def create_parts(self) -> None:
        """Creates the parts that engines of all classes have. Each class calls it first."""
        self.updating = threading.Lock()
        self.weights = WeightUpdates(self)
        self.adapters = HeldAdapters(self)
        self.pausing = Pausing(self)
        self.sampling = AsyncSampling(self)

    if TYPE_CHECKING:  # attributes of the shape that callers read
        model: Model
        rows: int
        capacity: int
        pages: int
        chunk: int
        impl: str | None
        routed_experts: bool
        usable_capacity: int
        num_draft_tokens: int
        weight_bytes: int
    else:

        def __getattr__(self, name: str) -> Any:
            """Returns a size: an attribute of the shape."""
            if name == "shape" or name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if not hasattr(self.shape, name):
                raise AttributeError(f"an engine has no attribute {name!r}")
            return getattr(self.shape, name)

    @property
    def version(self) -> int:
        """The version of the weights. It is 0 at the start, and each `update` sets it."""
        return self.weights.version

    @property
    def engines(self) -> "Sequence[Engine]":
        """The engines that answer. A single engine lists itself."""
        return (self,)

    @property
    def missing(self) -> str:
        """The reason for which no request can be answered now, for example an engine that is gone.

        It is an empty text if requests can be answered.
        """
        return ""

    def check_local(self, what: str) -> None:
        """Raises `InputError` if the engines are in other processes, which keep their weights."""

    def forget_prompts(self) -> None:
        """Drops the pages of earlier prompts in all engines, after new weights."""

    def submit(
        self,
        prompt: Prompt | Sequence[int],
        options: GenerateOptions | None = None,
        request_options: RequestOptions | None = None,
        *,
        key: jax.Array | None = None,
        **fields: Unpack[RequestFields],
    ) -> Request:
        """Queues a request for one prompt, and returns it at once. You can call it from any thread.

        The tokens are equal to `generate([ids], options, key=key)` with the sampling settings of the request.
        `submit_many` queues several prompts.

        Args:
            prompt: token ids, a text, or messages.
            options: the options of the answer. None takes `GenerateOptions()`. If `options.sampling` is None,
                the answer follows the model's generation_config.json. `GenerateOptions` lists the fields for
                which an engine raises `InputError`.
            request_options: the way in which the engine serves the request. None takes `RequestOptions()`.
            key: the PRNG key of the request. None takes `jax.random.key(0)`.
            fields: fields of `RequestOptions`, for example `priority=3`. They replace the fields of
                `request_options`.

        Returns:
            A `Request`. Call its `result()`, or iterate over it or over its `text()`.

        Raises:
            InputError: the request can never be answered, or the engine is closed or has failed.
        """
        (request,) = self.submit_many([prompt], options, request_options, keys=[key], **fields)
        return request

    def submit_many(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        options: GenerateOptions | Sequence[GenerateOptions] | None = None,
        request_options: RequestOptions | None = None,
        *,
        keys: Keys = None,
        **fields: Unpack[ManyRequestFields],
    ) -> list[Request]:
        """Queues a request for each prompt, and returns the requests at once. You can call it from any
        thread.

        Args:
            prompts: a list of prompts: token ids, texts, or messages.
            options: `GenerateOptions` for all prompts, or a list with one per prompt. None takes
                `GenerateOptions()`. If `options.sampling` is None, an answer follows the model's
                generation_config.json. `GenerateOptions` lists the fields for which an engine raises
                `InputError`.
            request_options: the way in which the engine serves the requests. None takes `RequestOptions()`.
            keys: a list with the key of each prompt, as for `submit`, or one key, as for `generate`. None
                takes `jax.random.key(0)`, so another call gives the same answers.
            fields: fields of `RequestOptions`, for example `priority=3`. They replace the fields of
                `request_options`. `adapter` may be a list with one name per prompt.

        Returns:
            A list with a `Request` for each prompt.

        Raises:
            InputError: a request can never be answered, or the engine is closed or has failed.
        """
        requests = self.make_requests(prompts, options, request_options, keys, fields)
        self.enqueue(requests)
        return requests

    @without_mesh_context
    def make_requests(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        options: GenerateOptions | Sequence[GenerateOptions] | None,
        asked: RequestOptions | None,
        keys: Keys,
        fields: Mapping[str, object],
    ) -> list[Request]:
        """Returns the requests that `submit_many` queues, after it has checked its arguments."""
        self.check_open()
        if not is_sequence(prompts):
            what = "a list of ids, texts or conversations"
            raise InputError(f"prompts must be {what}, got {format_value(prompts)}")
        given: dict[str, Any] = dict(fields)
        asked = dataclasses.replace(asked or RequestOptions(), **given)
        prompt_keys = _prompt_keys(keys, len(prompts))
        each = _options_of_prompts(options, len(prompts))
        of_model = {id(one): options_of_model(self.model, one) for one in each}
        each = [of_model[id(one)] for one in each]
        adapters = _per_prompt("adapters", asked.adapter, len(prompts))
        requests = list[Request]()
        try:
            for _, alike in groupby(range(len(prompts)), lambda i: (id(each[i]), adapters[i])):
                (first, *others) = alike
                part = slice(first, first + 1 + len(others))
                own = dataclasses.replace(asked, adapter=adapters[first])
                for request in requests_of(self, prompts[part], each[first], prompt_keys[part], own):
                    requests.append(request)
        except InputError as error:
            if len(prompts) > 1:
                error.args = (format_message(f"prompt {len(requests)}: {error}"),)
            raise
        return requests

    @without_mesh_context
    def generate(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        options: GenerateOptions | Sequence[GenerateOptions] | None = None,
        request_options: RequestOptions | None = None,
        *,
        key: jax.Array | None = None,
        **fields: Unpack[ManyRequestFields],
    ) -> list[GenerateOutput]:
        """Answers a list of prompts, and returns the results in the order of the prompts.

        The results are equal to those that `xj.generate` returns with the same key and the same sampling
        settings. The call waits for the last answer.

        Args:
            prompts: a list of prompts: token ids, texts, or messages.
            options: `GenerateOptions` for all prompts, or a list with one per prompt (see `submit_many`).
            request_options: the way in which the engine serves the requests. None takes `RequestOptions()`.
            fields: fields of `RequestOptions`, for example `priority=3`. They replace the fields of
                `request_options`. `adapter` may be a list with one name per prompt.
            key: one PRNG key (prompt i then uses `fold_in(key, i)`), or one key per prompt. None takes
                `jax.random.key(0)`.

        Returns:
            A list with a `GenerateOutput` for each prompt.

        Raises:
            InputError: `submit_many` or `Request.result` would raise it.
        """
        self._start_all()
        fields.setdefault("live", False)
        requests = self.submit_many(prompts, options, request_options, keys=key, **fields)
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
        """Computes an answer again with its own tokens, by the engine's programs.

        The result is equal (`==`) to `answer.logprobs` if you pass the weights of its versions. Other
        requests wait meanwhile. Use it to check rollouts whose weights changed while they ran.

        Args:
            answer: an answer that has ended, from an engine of this shape. You can also pass a request with
                one answer, or the result of `sample`.
            params: the parameters of each version in `answer.switches`, as `update` takes them.
            adapters: the adapter of each adapter_version there, as `add_adapter` takes them. None: the answer
                has no adapter.

        Returns:
            The log-probability of each token.

        Raises:
            InputError: a version is missing.
            InputError: the answer may have pages of other answers (`share_answers`).
            InputError: the meshes for prompts and for answers have different sizes.
            InputError: the engine is in several processes.
        """
        engine: Any = self.engines[-1]  # of several one that decodes
        if engine.channel:
            raise InputError("replay needs an engine of one process: make one of this shape")
        engines: Sequence[Any] = self.engines
        if len({len(each.model.params["final_norm"].devices()) for each in engines}) > 1:
            raise InputError("replay needs equal meshes for prompts and answers: make such an engine")
        return replay_answer(engine, engine.core, answer, params, adapters or {})

    @property
    def stats(self) -> EngineStats:
        """The statistics of the engine, with its present state, and counts since its start."""
        engines: Sequence[Any] = self.engines
        return collect_stats(engines, [engine.counters for engine in engines])

    @property
    def alive(self) -> bool:
        """True if the engine can answer. It is False if an engine has failed or was closed."""
        return all(engine.error is None for engine in (*self.engines, self))

    def _start_all(self) -> None:
        """Starts the threads that `generate` needs. Several engines need one thread each. If there is a
        single engine, the caller's thread takes its steps.
        """

    def __enter__(self) -> Self:
        """Starts a thread that takes the steps of the engine."""
        raise NotImplementedError

    def __exit__(self, *exc: object) -> None:
        self.close()

    def enqueue(self, requests: list[Request]) -> None:
        """Adds requests to the queue. You can call it from any thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all requests with an error. You cannot call any method after it."""
        raise NotImplementedError

    def step(self) -> bool:
        """Takes one step on the caller's thread, for an engine without a thread.

        Returns:
            True if any request is unfinished.
        """
        raise NotImplementedError

    @property
    def last_step_time(self) -> float:
        """The time at which the last step ended, by time.monotonic()."""
        return min(engine.last_step_time for engine in self.engines)

    def follow(self) -> bool:
        """Repeats the device calls of process 0's engine in another process.

        If the model lies on devices of several processes, every process except process 0 calls this. If
        process 0 updates the weights from a directory, this process reads the directory here, and `follow`
        does not return.

        Returns:
            False once the engine of process 0 is closed. True if process 0 calls `update`. Then also call
            `update` here, with this process's part of the weights, and call `follow` again.
        """
        raise InputError("there is nobody to follow: only processes other than process 0 follow it")

    def check_open(self) -> None:
        """Raises `InputError` with the reason, if the engine was closed or has failed."""
        for engine in (*self.engines, self):
            if engine.error is not None:
                why = format_message(engine.error) or type(engine.error).__name__
                raise InputError(f"{engine.name} is closed: {why}") from engine.error
