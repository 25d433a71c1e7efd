"""`AsyncSampling`: answers as arrays, for event loops, from and to token ids, as rollouts need them."""

import asyncio
import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from ..annotations import AnyArray
from ..checks import check_integer, check_token_ids
from ..errors import InputError, ShortRepr
from ..generation.options import GenerateOptions, options_or_default
from ..old_names import OldAttribute
from ..sampling.logprobs import TokenLogprobs
from ..sampling.random_keys import key_from_seed
from .answers import Answer
from .request_options import SampleFields
from .requests import check_started


@dataclasses.dataclass(frozen=True, repr=False)
class SampleOutput(ShortRepr):
    """The result of `Engine.sample`: an answer of T tokens as arrays.

    The arrays have the names of `Decoded`, without rows.

    Attributes:
        tokens_T: int32: all sampled ids, with the EOS or stop id.
        logprobs_T: float32: the natural log-probability of each token before any logits processor.
        processed_logprobs_T: float32: the log-probability after all logits processors and the temperature.
            The token was sampled from this distribution.
        versions_T: int32: the version of the weights that sampled each token (`Engine.update`).
        adapter_versions_T: int32: the version of the adapter that sampled each token
            (`Engine.update_adapter`). 0: the request has no adapter.
        finish_reason: "stop", "length", "abort" or "error" (see `GenerateOutput`).
        stop_reason: the id or the text that stopped the answer (see `GenerateOutput`).
        seed: the seed of the random draws. In an engine of this shape and these weights it gives the same
            bits.
        alternatives: a `TokenLogprobs` for each token, if you set `options.logprobs`. Otherwise None.
        routed_experts: the experts of each token (`Answer.routed_experts`), if you set
            `return_routed_experts`. Otherwise None.
        support: the sampling mask of each token (`Answer.support`), if you set `return_support`. Otherwise
            None.
        answer: the `Answer` behind the arrays, for `Engine.replay`. It is None after you copied or pickled
            the result.
    """

    tokens_T: np.ndarray
    logprobs_T: np.ndarray
    processed_logprobs_T: np.ndarray
    versions_T: np.ndarray
    adapter_versions_T: np.ndarray
    finish_reason: str
    stop_reason: int | str | None
    seed: int
    alternatives: list[TokenLogprobs] | None = None
    routed_experts: np.ndarray | None = None
    support: np.ndarray | None = None
    answer: Answer | None = dataclasses.field(default=None, repr=False, compare=False)
    routes = OldAttribute("routed_experts")
    processed_T = OldAttribute("processed_logprobs_T")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | dict(answer=None)


class AsyncSampling:
    """Returns `SampleOutput` from an engine with a thread."""

    def __init__(self, owner: Any):
        """Creates the part of an engine. owner: the engine."""
        self._owner = owner

    async def sample(
        self,
        ids: Sequence[int] | AnyArray,
        options: GenerateOptions | None = None,
        *,
        seed: int | None = None,
        live: bool = False,
        **how: Unpack[SampleFields],
    ) -> SampleOutput:
        """Answers a prompt of token ids, while the event loop continues. `await` it for the result.

        It needs no tokenizer. If you cancel the task, its request ends.

        If `options.sampling` is None, the answer follows the model's generation_config.json, like in every
        function of a model, so its top_k and top_p cut the distribution. If you train on log-probabilities of
        the whole distribution, pass `GenerateOptions(sampling=SamplingConfig(temperature=1.0))`.

        Args:
            ids: the prompt: a list of ids, or an int array [T].
            options: the `GenerateOptions` of one answer. None takes `GenerateOptions()`. For several answers
                call `sample` several times. The calls share the prompt's pages.
            seed: the seed of the random draws, at least 0. None takes a random seed, and the result has it.
            live: True means that you may stream the answer. False lets the engine take more decode steps at
                a time.
            how: fields of `RequestOptions`, for example `priority=3`. `prompt_logprobs` raises `InputError`.
                You can also pass `request_options=RequestOptions(…)`. The fields then replace its fields.

        Returns:
            A `SampleOutput`.

        Raises:
            InputError: `submit` would raise it, you pass a text in place of ids, or you ask for more than one
                answer.
        """
        ids = check_token_ids("ids", ids)
        options = options_or_default(options)
        if (options.best_of or options.n) != 1:
            raise InputError(
                f"sample gives one answer, got n={options.n}: call it for each, with asyncio.gather"
            )
        if unknown := {"key", "prompt_logprobs"} & {*how}:
            raise InputError(f"sample takes no {' and '.join(sorted(unknown))}: give a seed; use submit")
        seed = secrets.randbits(63) if seed is None else check_integer("seed", seed, 0, 2**64 - 1)
        key = key_from_seed(seed)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for engine in self._owner.engines:
            check_started(engine)
        fields: dict[str, Any] = dict(live=live, processed_logprobs=True, **how)
        asked = fields.pop("request_options", None)
        (request,) = self._owner.make_requests([ids], options, asked, [key], fields)
        # Other tasks of `asyncio.gather` make their requests too. A step that began with the first one would
        # decode few rows for a long time, while the others wait.
        await asyncio.sleep(0)
        self._owner.enqueue([request])

        def wake() -> None:
            if request.ended:
                loop.call_soon_threadsafe(ended.set)

        request.listeners.append(wake)
        try:
            if not request.ended:  # before the listener was there
                await ended.wait()
        finally:
            if not request.ended:
                request.cancel()
        request.raise_error()
        (answer,) = request.answers
        return SampleOutput(
            np.array(answer.tokens, np.int32),
            np.array(answer.logprobs, np.float32),
            np.array(answer.processed_logprobs, np.float32),
            np.array(answer.token_versions, np.int32),
            np.array(answer.adapter_versions, np.int32),
            answer.finish_reason or "",
            answer.stop_reason,
            seed,
            list(answer.alternatives) if options.logprobs else None,
            answer.routed_experts,
            answer.support,
            answer,
        )
