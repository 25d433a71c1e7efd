"""Small models and random requests for engines, and the comparison of their answers, for check_engine.py,
soak_engine.py and tests.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj
from xinfer_jax.errors import InputError
from xinfer_jax.families.reading import from_hf

_SMALL = dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, rms_norm_eps=1e-6, eos_token_id=3,
    tie_word_embeddings=True,
)  # fmt: skip
_MORE: dict[str, dict] = dict(
    qwen2={},
    gemma3=dict(sliding_window=96, layer_types=["sliding_attention", "full_attention"] * 2),
    qwen3_moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    qwen3_5=dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_conv_kernel_dim=4, full_attention_interval=2,
    ),
)  # fmt: skip
_TYPES = dict(gemma3="gemma3_text", qwen3_5="qwen3_5_text")  # where they have other names
SHAPES = {
    family: _SMALL | dict(model_type=_TYPES.get(family, family)) | more for family, more in _MORE.items()
}
_SETTINGS: tuple[dict, ...] = (
    {},
    {},
    dict(temperature=1.0),
    dict(temperature=0.8, top_k=20, top_p=0.9),
    dict(repetition_penalty=1.3),
    dict(temperature=0.7, min_p=0.1, frequency_penalty=0.5, presence_penalty=0.2),
    dict(temperature=1.2, typical_p=0.8),
    dict(no_repeat_ngram_size=3),
    dict(min_tokens=5),
    dict(allowed_token_ids=[5, 6, 7, 8, 9]),
    dict(temperature=1.0, logit_bias={7: 3.0, 8: -5.0}),
    dict(temperature=1.0, bad_words_ids=[[5], [6, 7], [8, 8, 8]]),
    dict(temperature=1.0, xtc_probability=0.5, dry_multiplier=0.8, dry_sequence_breakers=[7]),
)


@dataclasses.dataclass
class RandomRequest:
    """The arguments of a random request."""

    ids: list[int]
    options: xj.GenerateOptions
    key: jax.Array
    more: dict  # further arguments of `submit`
    cancel: bool


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Inside, the list gets an entry for each program that is compiled."""
    found: list[str] = []

    def record(event: str, _: float, **__: object) -> None:
        if "/core/compile/" in event:
            found.append(event)

    jax.random.key(0)  # the programs of the caller's own keys
    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


def random_model(family: str, quantize: str | None) -> xj.Model:
    config = from_hf(SHAPES[family])
    params = xj.init_params(config, jax.random.key(0), "float32", quantize)
    return xj.Model(params, config)


def processors_and_taps(config: xj.ModelConfig) -> dict[str, Any]:
    """Returns arguments of an engine: a processor with a state, one that draws, and a vector."""

    def count(state, token_B, context):
        return state | dict(count=state["count"].at[jnp.arange(len(token_B)), token_B].add(1))

    def add_noise(by_B, logits_BV, context):
        return logits_BV + by_B[:, None] * jax.vmap(lambda k: jax.random.normal(k, logits_BV.shape[1:]))(
            context.key_B
        )

    less = xj.LogitsProcessor(
        lambda by_B, context: dict(by=by_B, count=jnp.zeros(context.seen_BV.shape, jnp.int32)),
        lambda state, logits_BV, context: logits_BV - state["by"][:, None] * state["count"],
        count,
    )
    noise = xj.LogitsProcessor(None, add_noise, last=True)
    vector = np.random.default_rng(0).standard_normal(config.hidden_size)
    return dict(processors=dict(less=(less, 0.0), noise=(noise, 0.0)), taps=dict(up={0: vector, 1: vector}))


def draw(rng: random.Random, vocab: int, count: int, longest: int, shape: dict) -> list[RandomRequest]:
    """Returns random requests. A third of them starts with one of four common prefixes."""
    common = [[rng.randrange(vocab) for _ in range(longest)] for _ in range(4)]
    limit = min(shape["capacity"], 64 * (shape["pages"] - 1))

    def draw_request() -> RandomRequest:
        size = int(np.exp(rng.uniform(0, np.log(longest))))
        ids = [rng.randrange(vocab) for _ in range(size)]
        if rng.random() < 1 / 3:
            ids = (rng.choice(common)[: rng.choice((64, 128, 300))] + ids)[:longest]
        new = min(rng.choice((1, 2, 9, 40, 150)), limit - len(ids))
        options = xj.GenerateOptions(
            max_tokens=max(1, new),
            sampling=xj.SamplingConfig(**rng.choice(_SETTINGS)),
            eos_token_ids=rng.choice((None, None, (), (7, 11))),
            stop_token_ids=rng.choice(((), (), (13,))),
            logprobs=rng.choice((0, 0, 0, 4)),
            n=rng.choice((1, 1, 1, 2)),
        )
        more = dict(priority=rng.choice((0, 0, 0, 1, 20)), salt=rng.choice(("", "", "other")))
        more |= dict(client=rng.choice("aaabcdef"))
        more |= dict(deadline=0.2) if rng.random() < 0.03 else {}
        if rng.random() < 0.2:
            more |= dict(
                prompt_logprobs=rng.choice((0, 3)), prompt_logprobs_from=rng.choice((0, len(ids) // 2))
            )
        return RandomRequest(ids, options, jax.random.key(rng.randrange(99)), more, rng.random() < 0.03)

    requests = [draw_request() for _ in range(count)]
    return [r for r in requests if len(r.ids) + r.options.max_tokens <= limit]


def check(
    model: xj.Model, requests: list[RandomRequest], shape: dict, rng: random.Random, rate: float,
    compared: int, margin: float, **further: Any,
) -> dict:  # fmt: skip
    """Submits the requests together and then alone. Counts the requests whose bits differ, and, among the
    first `compared`, the requests whose tokens differ from `generate`. further: arguments of the engine to
    which the requests come together, for example the devices of prompts. Alone they go to an engine without
    them.
    """
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(xj.Engine(model, **shape, **further))
        single = stack.enter_context(xj.Engine(model, **shape)) if further else engine
        submitted = []
        start_s = time.perf_counter()
        for request in requests:
            submitted.append(engine.submit(request.ids, request.options, key=request.key, **request.more))
            if rate:
                time.sleep(rng.expovariate(rate))
            if request.cancel:
                submitted[-1].cancel()
        together = [outcome(request) for request in submitted]
        seconds = time.perf_counter() - start_s
        while engine.stats.pages_used:  # a move may end after its request
            time.sleep(0.01)
        stats = engine.stats
        alone = []
        for request in requests:
            more = {name: value for name, value in request.more.items() if name != "deadline"}
            alone.append(outcome(single.submit(request.ids, request.options, key=request.key, **more)))
    differ = sum(not same_outcome(*pair) for pair in zip(together, alone, strict=True))
    complete = [i for i, r in enumerate(requests) if not r.cancel and "deadline" not in r.more]
    given = model, shape.get("cache_dtype"), margin
    others = sum(not matches_generate(*given, requests[i], together[i]) for i in complete[:compared])
    return dict(
        requests=len(requests), differ=differ, differ_from_generate=others, seconds=round(seconds, 1),
        preemptions=stats.preemptions, hits=stats.hits,
        host_hits=stats.host_hits, file_hits=stats.file_hits,
        prefill_tokens=stats.prefill_tokens, generated_tokens=stats.generated_tokens,
        pages_left=[stats.pages_used, stats.pages_cached, stats.pages_free], engine=single.about,
    )  # fmt: skip


def outcome(request) -> tuple:
    """Returns output and prompt log-probabilities of a request, or its error and None."""
    try:
        out = request.result()
    except InputError as error:
        return str(error), None
    return out, request.prompt_logprobs


def answer_of(request: xj.types.Request) -> tuple[list[int], list[float]]:
    """Returns tokens of a request with one answer, and their log-probabilities."""
    out = request.result()
    return out.tokens[0], out.logprobs[0]


def same_outcome(first: tuple, complete: tuple) -> bool:
    """Returns True if two outcomes are equal bit for bit. If the first one was cut short, only its tokens
    count.
    """
    (out, prompt) = first
    (expected, expected_prompt) = complete
    if isinstance(out, str):
        return out == expected
    for j, reason in enumerate(out.finish_reason):
        count = len(out.logprobs[j]) if out.stop_reason[j] in ("cancelled", "deadline") else None
        same_tokens = out.tokens[j] == expected.tokens[j][:count]
        same_logprobs = out.logprobs[j] == expected.logprobs[j][:count]
        if not (same_tokens and same_logprobs):
            return False
        if count is None and reason != expected.finish_reason[j]:
            return False
        if out.alternatives and out.alternatives[j] != expected.alternatives[j][:count]:
            return False
    return prompt is None or prompt == expected_prompt[: len(prompt)]


def matches_generate(
    model: xj.Model, cache_dtype: str | None, margin: float, request: RandomRequest, outcome: tuple
) -> bool:
    """Returns True if `generate` gives these tokens, up to a token whose two best logits differ by less than
    the margin.
    """
    out = outcome[0]
    if isinstance(out, str):
        return True
    options = dataclasses.replace(request.options, logprobs=2, cache_dtype=cache_dtype)
    expected = xj.generate(model.params, model.config, [request.ids], options, key=request.key)
    for tokens, others, alternatives in zip(out.tokens, expected.tokens, expected.alternatives, strict=True):
        at = next((i for i, pair in enumerate(zip(tokens, others, strict=False)) if len({*pair}) > 1), None)
        if at is not None and request.options.sampling.temperature == 0:
            (_, first), (_, second) = alternatives[at].processed_top
            if first - second > margin:
                return False
        elif at is not None or len(tokens) != len(others):
            return False
    return True
