"""What check_engine.py and soak_engine.py ask engines: small models, requests drawn at random, and whether
two answers are the same.
"""

import dataclasses
import random
import time

import jax
import numpy as np

import xinfer_jax as xj
from xinfer_jax.config.model_config import from_hf
from xinfer_jax.errors import InputError

_SMALL = dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, rms_norm_eps=1e-6, eos_token_id=3,
    tie_word_embeddings=True,
)  # fmt: skip
SHAPES = dict(
    qwen2=_SMALL | dict(model_type="qwen2"),
    gemma3=_SMALL
    | dict(
        model_type="gemma3_text", sliding_window=96, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    qwen3_moe=_SMALL
    | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
)
_SETTINGS: tuple[dict, ...] = (
    {},
    {},
    dict(temperature=1.0),
    dict(temperature=0.8, top_k=20, top_p=0.9),
    dict(repetition_penalty=1.3),
    dict(temperature=0.7, min_p=0.1, frequency_penalty=0.5, presence_penalty=0.2),
    dict(temperature=1.2, typical_p=0.8),
    dict(no_repeat_ngram_size=3),
    dict(min_new_tokens=5),
    dict(allowed_token_ids=[5, 6, 7, 8, 9]),
    dict(temperature=1.0, logit_bias={7: 3.0, 8: -5.0}),
    dict(temperature=1.0, bad_words_ids=[[5], [6, 7], [8, 8, 8]]),
)


@dataclasses.dataclass
class Asked:
    """A request as it was drawn."""

    ids: list[int]
    options: xj.GenerateOptions
    key: jax.Array
    more: dict
    cancel: bool


def random_model(family: str, quantize: str | None) -> xj.Model:
    config = from_hf(SHAPES[family])
    params = xj.init_params(config, jax.random.key(0), "float32", quantize)
    return xj.Model(params, config, None, {}, xj.LoadStats(0.0, 0, "float32"))


def draw(rng: random.Random, vocab: int, count: int, longest: int, shape: dict) -> list[Asked]:
    """Requests, a third of them with a common beginning."""
    common = [rng.randrange(vocab) for _ in range(longest)]
    room = min(shape["capacity"], 64 * (shape["pages"] - 1))

    def one() -> Asked:
        size = int(np.exp(rng.uniform(0, np.log(longest))))
        ids = [rng.randrange(vocab) for _ in range(size)]
        if rng.random() < 1 / 3:
            ids = (common[: rng.choice((64, 128, 300))] + ids)[:longest]
        new = min(rng.choice((1, 2, 9, 40, 150)), room - len(ids))
        options = xj.GenerateOptions(
            max(1, new),
            xj.SamplingConfig(**rng.choice(_SETTINGS)),
            eos_token_ids=rng.choice((None, None, (), (7, 11))),
            stop_token_ids=rng.choice(((), (), (13,))),
            logprobs=rng.choice((0, 0, 0, 4)),
            n=rng.choice((1, 1, 1, 2)),
        )
        more = dict(priority=rng.choice((0, 0, 0, 1, 20)), salt=rng.choice(("", "", "other")))
        more |= dict(client=rng.choice("aaab"))
        more |= dict(deadline=0.2) if rng.random() < 0.03 else {}
        if rng.random() < 0.2:
            more |= dict(
                prompt_logprobs=rng.choice((0, 3)), prompt_logprobs_from=rng.choice((0, len(ids) // 2))
            )
        return Asked(ids, options, jax.random.key(rng.randrange(99)), more, rng.random() < 0.03)

    drawn = [one() for _ in range(count)]
    return [asked for asked in drawn if len(asked.ids) + asked.options.max_new_tokens <= room]


def check(
    model: xj.Model, asked: list[Asked], shape: dict, rng: random.Random, rate: float, compared: int,
    margin: float,
) -> dict:  # fmt: skip
    """How many requests have other bits alone, and how many other tokens from `generate`."""
    with xj.Engine(model, **shape) as engine:
        requests = []
        began = time.perf_counter()
        for one in asked:
            requests.append(engine.submit(one.ids, one.options, key=one.key, **one.more))
            if rate:
                time.sleep(rng.expovariate(rate))
            if one.cancel:
                requests[-1].cancel()
        together = [said(request) for request in requests]
        seconds = time.perf_counter() - began
        stats = engine.stats
        alone = []
        for one in asked:
            more = {name: value for name, value in one.more.items() if name != "deadline"}
            alone.append(said(engine.submit(one.ids, one.options, key=one.key, **more)))
    differ = sum(not agree(*pair) for pair in zip(together, alone, strict=True))
    whole = [i for i, one in enumerate(asked) if not one.cancel and "deadline" not in one.more]
    others = sum(not near(model, asked[i], together[i], margin) for i in whole[:compared])
    return dict(
        requests=len(asked), differ=differ, differ_from_generate=others, seconds=round(seconds, 1),
        preemptions=stats.preemptions, hits=stats.hits, read=stats.read_tokens, chosen=stats.chosen_tokens,
        pages_left=[stats.pages_used, stats.pages_cached, stats.pages_free], engine=engine.about,
    )  # fmt: skip


def said(request) -> tuple:
    """All that a request gives."""
    try:
        out = request.result()
    except InputError as error:
        return str(error), None
    return out, request.prompt_logprobs


def agree(one: tuple, other: tuple) -> bool:
    """Whether they are the same, bit for bit; what was broken off as far as it goes."""
    (out, prompt) = one
    (whole, whole_prompt) = other
    if isinstance(out, str):
        return out == whole
    for j, reason in enumerate(out.finish_reason):
        count = len(out.logprobs[j]) if reason in ("cancelled", "deadline") else None
        same = out.tokens[j] == whole.tokens[j][:count] and out.logprobs[j] == whole.logprobs[j][:count]
        if not same or (count is None and reason != whole.finish_reason[j]):
            return False
        if out.alternatives and out.alternatives[j] != whole.alternatives[j][:count]:
            return False
    return prompt is None or prompt == whole_prompt[: len(prompt)]


def near(model: xj.Model, asked: Asked, one: tuple, margin: float) -> bool:
    """Whether `generate` gives these tokens, up to where the likeliest two are too near to each other."""
    if isinstance(one[0], str):
        return True
    options = dataclasses.replace(asked.options, logprobs=2)
    whole = xj.generate(model.params, model.config, [asked.ids], options, key=asked.key)
    for tokens, others, noted in zip(one[0].tokens, whole.tokens, whole.alternatives, strict=True):
        at = next((i for i, pair in enumerate(zip(tokens, others, strict=False)) if len({*pair}) > 1), None)
        if at is not None and asked.options.sampling.temperature == 0:
            (_, first), (_, second) = noted[at].processed_top
            if first - second > margin:
                return False
        elif at is not None or len(tokens) != len(others):
            return False
    return True
