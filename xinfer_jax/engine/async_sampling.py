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
    """An answer of T tokens. Arrays have the names of `Decoded`, without rows.

    Attributes:
        tokens_T: int32: all that was sampled, with the EOS or stop id.
        logprobs_T: float32: log-probability of each token before any logits processor.
        processed_logprobs_T: float32: after all of them, temperature included: of the distribution that the
            token was sampled from.
        versions_T: int32: version of the weights that each token was sampled by (`Engine.update`).
        adapter_versions_T: int32: of its adapter (`Engine.update_adapter`); 0: it has none.
        finish_reason, stop_reason: as in `GenerateOutput`.
        seed: of its random draws: in an engine of this shape and these weights it gives the same bits.
        alternatives: as in `GenerateOutput`, where `options.logprobs` asks for them.
        routed_experts: as in `Answer`, where `return_routed_experts` asks for them.
        support: as in `Answer`, where `return_support` asks for it.
        answer: what it was made of, for `Engine.replay`; None once it was copied or pickled.
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
    """Gives `SampleOutput` of an engine with a thread."""

    def __init__(self, owner: Any):
        """owner: the engine."""
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
        """Answers a prompt of token ids, while the event loop goes on. Needs no tokenizer. A task that is
        cancelled ends its request.

        Args:
            ids: the prompt: a list, or an int array [T].
            options: as of `submit`, for one answer: several are several calls, which share the prompt's
                pages. Without `options.sampling` the answer follows the model's generation_config.json, as of
                every function of a model: its top_k and top_p cut the distribution. Rollouts that train on
                log-probabilities of the whole distribution pass
                `GenerateOptions(sampling=SamplingConfig(temperature=1.0))`.
            seed: of the random draws, at least 0; None: a random one, which the result has.
            live, how: as of `submit`, but for `key` and `prompt_logprobs`.

        Raises:
            InputError: as `submit`; a text in place of ids; more than one answer.
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
