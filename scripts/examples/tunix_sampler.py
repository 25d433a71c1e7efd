"""An engine as a sampler of tunix's distributed reinforcement learning: its protocol
`tunix.experimental.rollout.sampler.Sampler` (as of November 2026, newer than google-tunix 0.1.7).

    sampler = EngineSampler(xj.load_model(path), convert=from_tunix_qwen3, routed_experts=True)

takes the place of tunix's VanillaSamplerAdapter. The conversion is one of trees_of_others.py. If tunix is not
installed, or is older, the class stands alone, as the program shows.

    python scripts/examples/tunix_sampler.py
"""

from checkout import start

# isort: split
import asyncio
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np

import xinfer_jax as xj

try:
    from tunix.experimental.common.datatypes import ErrorInfo
    from tunix.experimental.rollout.sampler import LoadInfo, SamplingParams, SamplingResponse
except ImportError:
    ErrorInfo = LoadInfo = SamplingResponse = SimpleNamespace
    # The fields of tunix's class, with its defaults.
    SamplingParams = partial(
        SimpleNamespace, max_tokens=64, temperature=1.0, top_p=None, top_k=None, seed=None,
        return_logprobs=False, return_logits=False, return_routed_experts=False,
        routed_experts_prompt_start=0, beam_size=None,
    )  # fmt: skip

_REASONS = dict(stop="stop", length="length", abort="cancelled", error="error")


class EngineSampler:
    """Samples by an `xj.Engine`. All requests, of any number of calls, share its slots.

    Args:
        model: an `xj.Model`.
        convert: (tunix's parameters as a pure dict, config) -> a tree of this library. None: they are one.
        mode: the fate of unfinished answers when weights are replaced, as in `Engine.update`.
        engine: further arguments of `xj.Engine`, for example rows and capacity. `routed_experts=True` is for
            experts of a mixture, and `support=True` for sampling masks.
    """

    def __init__(self, model, convert=None, mode="continue", **engine):
        self.engine = xj.Engine(model, **engine)
        self._convert = convert and jax.jit(partial(convert, config=model.config))
        self._mode = mode

    # --- Lifecycle ---

    def initialize(self):
        """Does nothing: the constructor makes the engine."""

    async def start(self, **kwargs):
        """Starts the engine's thread. A second call does nothing."""
        if not self.engine.started:
            self.engine.__enter__()
        return True

    async def stop(self, **kwargs):
        """Ends all requests with an error."""
        await asyncio.to_thread(self.engine.close)
        return True

    async def pause(self, **kwargs):
        """Stops between two steps. Requests are taken, and wait."""
        await asyncio.to_thread(self.engine.pause)
        return True

    async def resume(self, **kwargs):
        self.engine.resume()
        return True

    async def get_mesh(self, **kwargs):
        """Returns the mesh of the parameters. None: they are on one device."""
        return getattr(self._params["final_norm"].sharding, "mesh", None)

    # --- Inference ---

    async def sample(self, sampling_requests, **kwargs):
        """Returns one response for each request, in their order. For a single request it returns its
        response. A request that the engine rejects has a response with an `error`, and the others are
        sampled.

        A prompt is a text, token ids, or the messages of a chat. Log-probabilities are from the distribution
        that was sampled from. `metadata` has the version of the weights of each token (`policy_versions`),
        and with `support=True` the sampling masks, as `xj.score` takes them.
        """
        await self.start()
        if isinstance(sampling_requests, list | tuple):
            return list(await asyncio.gather(*map(self._sample_one, sampling_requests)))
        return await self._sample_one(sampling_requests)

    async def _sample_one(self, request):
        request_id = getattr(request, "request_id", "")
        try:
            return await self._sampled(request, request_id)
        except xj.InputError as error:
            info = ErrorInfo(error_type=type(error).__name__, message=str(error))
            return SamplingResponse(request_id=request_id, error=info, finish_reason="error")

    async def _sampled(self, request, request_id):
        asked = getattr(request, "sampling_params", None) or SamplingParams()
        for name in ("beam_size", "return_logits"):
            if getattr(asked, name):
                raise xj.InputError(f"an engine has no {name}={getattr(asked, name)}: leave it out")
        model = self.engine.model
        ids = self._encode(request.prompt)
        top_p = 1.0 if asked.top_p is None else asked.top_p
        sampling = xj.SamplingConfig(temperature=asked.temperature, top_k=asked.top_k or 0, top_p=top_p)
        out = await self.engine.sample(
            ids,
            xj.GenerateOptions(max_tokens=asked.max_tokens, sampling=sampling),
            seed=asked.seed,
            return_routed_experts=asked.return_routed_experts,
            return_support=self.engine.support,
        )
        text_ids = out.tokens_T[:-1] if out.finish_reason == "stop" else out.tokens_T
        routed_experts = (
            None if out.routed_experts is None else out.routed_experts[asked.routed_experts_prompt_start : -1]
        )
        metadata = dict(policy_versions=out.versions_T)
        return SamplingResponse(
            request_id=request_id,
            text=model.tokenizer.decode(text_ids.tolist()),
            prompt_token_ids=np.array(ids, np.int32),
            token_ids=out.tokens_T,
            logprobs=out.processed_logprobs_T if asked.return_logprobs else None,
            finish_reason=_REASONS[out.finish_reason],
            routed_experts=routed_experts,
            metadata=metadata if out.support is None else metadata | dict(support=out.support),
        )

    def _encode(self, prompt):
        """Returns the ids of a prompt. A text is tokenized as it is: tunix has applied the chat template."""
        if isinstance(prompt, str):
            return self.engine.model.tokenizer.encode(prompt)
        is_chat = isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict)
        return xj.encode_prompt(self.engine.model, prompt) if is_chat else prompt

    async def get_load_info(self, **kwargs):
        stats = self.engine.stats
        unused = stats.pages_free + stats.pages_cached
        return LoadInfo(
            num_requests_waiting=stats.waiting,
            num_requests_running=stats.running + stats.prefilling,
            kv_cache_usage_perc=stats.pages_used / max(1, stats.pages_used + unused),
        )

    # --- Weights ---

    def get_target_state(self):
        """Returns shapes and dtypes of the parameters."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._params)

    async def get_weight_sync_metadata(self, **kwargs):
        """Returns the shardings of the parameters."""
        return jax.tree.map(lambda x: x.sharding, self._params)

    async def bind_weight_sync(self, sync_request=None, **kwargs):
        """Binds nothing: the request of `weight_sync` brings the weights."""

    async def pre_weight_sync(self, sync_request=None, **kwargs):
        """Stages nothing."""

    async def weight_sync(self, sync_request=None, **kwargs):
        """Replaces the weights between two steps by `sync_request.weights`, without compiling, and returns
        their version. Its transport by a controller (Raiden) is not served.
        """
        weights = getattr(sync_request, "weights", None)
        if weights is None:
            raise xj.InputError("the request brings no weights: choose tunix's WeightSyncMode.FALLBACK")
        weights = weights.to_pure_dict() if hasattr(weights, "to_pure_dict") else weights
        params = self._convert(weights) if self._convert else weights
        how = dict(version=sync_request.policy_version, mode=self._mode)
        await asyncio.to_thread(partial(self.engine.update, params, **how))
        return sync_request.policy_version

    async def post_weight_sync(self, sync_request=None, **kwargs):
        """Does nothing: the new weights are in use already."""

    async def abort_weight_sync(self, sync_request=None, **kwargs):
        """Does nothing, because nothing was staged: the weights are the old ones, or the new ones."""

    async def get_transfer_status(self, req_id, **kwargs):
        """`weight_sync` returns when the weights are replaced."""
        return "SUCCESS"

    async def migrate_kv_cache(self, source_server_id, target_server_id, token_ids, **kwargs):
        """Returns False: keys and values stay on their server."""
        return False

    @property
    def _params(self):
        return self.engine.model.params


async def show(sampler):
    params = SamplingParams(max_tokens=12, temperature=0.7, top_k=3, seed=4, return_logprobs=True)
    prompts = ["The capital of Spain is", [dict(role="user", content="Hello!")], []]
    requests = [
        SimpleNamespace(request_id=f"r{i}", prompt=prompt, sampling_params=params)
        for i, prompt in enumerate(prompts)
    ]
    *responses, rejected = await sampler.sample(requests)
    for response in responses:
        print(f"{response.request_id}: {response.text!r}, {response.finish_reason}")
    print(f"{rejected.request_id}: {rejected.error.message}")
    first = responses[0]
    tokens_1T = np.array([[*first.prompt_token_ids, *first.token_ids]])
    support_1TW = np.pad(first.metadata["support"], ((len(first.prompt_token_ids), 0), (0, 0)))[None]
    model = sampler.engine.model
    scores_1T = xj.score(
        model.params, model.config, tokens_1T, temperature=0.7, support=support_1TW
    ).logprobs_BT
    apart = np.abs(scores_1T[0, -len(first.token_ids) :] - first.logprobs).max()
    print(f"log-probabilities apart by {apart:.1e}")
    weights = jax.tree.map(lambda x: 0.9 * x, model.params)
    version = await sampler.weight_sync(SimpleNamespace(weights=weights, policy_version=7))
    again = await sampler.sample(requests[0])
    print(f"version {version}, of each token: {again.metadata['policy_versions'].tolist()}")
    print(f"running: {(await sampler.get_load_info()).num_requests_running}")
    await sampler.stop()


def main(argv):
    model = xj.load_model(dtype="float32")
    asyncio.run(show(EngineSampler(model, rows=2, capacity=64, support=True)))


if __name__ == "__main__":
    start(main)
