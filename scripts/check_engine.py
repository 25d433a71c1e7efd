"""Whether an engine keeps its promise: requests drawn at random, together and each alone, must have the same
tokens and log-probabilities, bit for bit; those of `generate` must be the same tokens.

    python scripts/check_engine.py                    # the bundled checkpoint, 300 requests
    python scripts/check_engine.py --families=qwen2,gemma3,qwen3_moe --quantize=none,int8,int4

Arrivals are Poisson; lengths, settings, cancels, deadlines and shared beginnings are drawn; few pages force
preemption. "By the margin rule": a token of `generate` may differ where the two likeliest are nearer to each
other than --margin, since its programs are others. Exit code 1: something differs.
"""

from one_line import start

# isort: split
import dataclasses
import json
import random
import time

import jax
import numpy as np
from absl import flags

import xinfer_jax as xj
from xinfer_jax.config.model_config import from_hf
from xinfer_jax.errors import InputError

MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled one.")
FAMILIES = flags.DEFINE_list("families", [], "Small random models instead: qwen2, gemma3, qwen3_moe.")
QUANTIZE = flags.DEFINE_list("quantize", ["none"], "Of the weights: none, int8 or int4; several in turn.")
CACHE = flags.DEFINE_string("cache_dtype", None, "Of keys and values.")
DRAFT = flags.DEFINE_string("draft", None, "lookup: the engine guesses.")
REQUESTS = flags.DEFINE_integer("requests", 300, "How many.", lower_bound=1)
COMPARED = flags.DEFINE_integer("compared", 20, "With how many of them generate is asked too.", lower_bound=0)
LONGEST = flags.DEFINE_integer("longest", 600, "Tokens of a prompt.", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 4, "Of the engine.", lower_bound=1)
PAGES = flags.DEFINE_integer("pages", 24, "Of the engine; few: rows are preempted.", lower_bound=2)
CHUNK = flags.DEFINE_integer("chunk", 128, "Of the engine.", lower_bound=64)
RATE = flags.DEFINE_float("rate", 30, "Arrivals a second.", lower_bound=0)
MARGIN = flags.DEFINE_float("margin", 2e-4, "In logits; see above.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", 0, "Of all that is drawn.")

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
)


@dataclasses.dataclass
class Asked:
    """A request as it was drawn."""

    ids: list[int]
    options: xj.GenerateOptions
    key: jax.Array
    more: dict
    cancel: bool


def main(argv: list[str]) -> int:
    wrong = 0
    for name, model in models():
        shape = dict(cache_dtype=CACHE.value, draft=DRAFT.value, rows=ROWS.value, pages=PAGES.value)
        shape |= dict(chunk=CHUNK.value, capacity=min(1024, model.config.context_length))
        rng = random.Random(SEED.value)
        asked = draw(rng, model.config.vocab_size, REQUESTS.value, LONGEST.value, shape)
        found = check(model, asked, shape, rng, RATE.value, COMPARED.value, MARGIN.value)
        print(json.dumps(dict(model=name, **found)))
        wrong += found["differ"] + found["differ_from_generate"]
    return int(wrong > 0)


def models():
    if not FAMILIES.value:
        for how in QUANTIZE.value:
            yield how, xj.load_model(MODEL.value, quantize=None if how == "none" else how)
    for family in FAMILIES.value:
        if family not in SHAPES:
            raise InputError(f"no family {family!r}: choose among {', '.join(SHAPES)}")
        for how in QUANTIZE.value:
            if family != "qwen3_moe" or how == "none":  # experts have float weights only
                yield f"{family}, {how}", random_model(family, None if how == "none" else how)


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
        more = dict(priority=rng.choice((0, 0, 1)), salt=rng.choice(("", "", "other")))
        more |= dict(deadline=0.2) if rng.random() < 0.03 else {}
        more |= dict(prompt_logprobs=rng.choice((0, 3))) if rng.random() < 0.1 else {}
        return Asked(ids, options, jax.random.key(rng.randrange(99)), more, rng.random() < 0.03)

    drawn = [one() for _ in range(count)]
    return [asked for asked in drawn if len(asked.ids) + asked.options.max_new_tokens <= room]


def check(
    model: xj.Model, asked: list[Asked], shape: dict, rng: random.Random, rate: float, compared: int,
    margin: float,
) -> dict:  # fmt: skip
    """How many requests have other bits alone, and how many other tokens from `generate`."""
    with xj.Engine(model, **shape) as engine:
        requests, began = [], time.perf_counter()
        for one in asked:
            requests.append(engine.submit(one.ids, one.options, key=one.key, **one.more))
            if rate:
                time.sleep(rng.expovariate(rate))
            if one.cancel:
                requests[-1].cancel()
        together = [said(request) for request in requests]
        seconds, stats = time.perf_counter() - began, engine.stats
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
    (out, prompt), (whole, whole_prompt) = one, other
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


if __name__ == "__main__":
    start(main)
