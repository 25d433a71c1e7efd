"""Every option of decoding with every other: additional options do not change the tokens, or raise an error
that names them.

BASES change the tokens, EXTRAS must not. REJECTED has the pairs that raise. All others work.
"""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from quick import full_except

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf

pytestmark = [pytest.mark.full, pytest.mark.oldest]

HF = tiny.CONFIG | dict(num_hidden_layers=1, vocab_size=64, eos_token_id=63)
PROMPTS = ([5, 6, 7, 5, 6, 7, 5], [11, 12, 13], [14, 15])  # three: a row of the batch holds nothing
RARER = xj.LogitsProcessor(None, lambda by_B, logits_BV, c: logits_BV - by_B[:, None] * c.seen_BV)
BASES = {
    "one-of-each": dict(
        sampling=[xj.SamplingConfig(), xj.SamplingConfig(temperature=0.7, top_k=5),
        xj.SamplingConfig(temperature=1.2)]
    ),
    "processors": dict(
        sampling=xj.SamplingConfig(
            temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.95, repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.1, no_repeat_ngram_size=3, min_tokens=2, logit_bias={3: 1.0},
            forbidden_token_ids=(4,), xtc_probability=0.5, dry_multiplier=0.5, dry_sequence_breakers=[9],
            bad_words_ids=[[9], [6, 7, 8]],
        )
    ),
    "n-and-stops": dict(n=2, stop_token_ids=tuple(range(0, 64, 5)), eos_token_ids=(1, 2)),
    "best-of": dict(n=1, best_of=2),
    "int8": dict(cache_dtype="int8"),
    "callers": dict(processors=[(RARER, np.float32([1, 2, 3]))]),
    "taps": dict(taps={0: xj.Tap(np.ones(HF["hidden_size"], np.float32), lambda x, more_D: x + more_D)}),
}  # fmt: skip
EXTRAS = ("stream", "no-cache", "lookup+logprobs", "draft+prefix+keep-prefix+logits")
REJECTED = {
    ("best-of", "stream"): "best_of=2 cannot be streamed",
    ("best-of", "draft+prefix+keep-prefix+logits"): "keep_prefix with best_of=2",
    ("int8", "no-cache"): "cache_dtype needs the cache",
    ("taps", "no-cache"): "taps needs the cache",
    ("taps", "lookup+logprobs"): "taps do not combine with draft: leave out draft or taps",
    ("taps", "draft+prefix+keep-prefix+logits"): "taps do not combine with draft",
}
NEEDS_THE_CACHE = {"lookup": "draft", "draft": "draft", "prefix": "prefix", "keep-prefix": "keep_prefix"}


@pytest.fixture(scope="module")
def models():
    config = from_hf(HF)
    return {
        name: dataclasses.make_dataclass("Model", ["params", "config"])(
            xj.init_params(config, jax.random.key(1), "float32", name), config
        )
        for name in (None, "int8")
    }


def settings(model, base: str, extras: str = "") -> dict:
    given = dict(max_tokens=6, capacity=64, sampling=xj.SamplingConfig(temperature=0.8)) | BASES[base]
    for extra in filter(None, extras.split("+")):
        given |= _adds(model, extra, given)
    return given


def _adds(model, extra: str, given: dict) -> dict:
    if extra == "prefix":
        begun = dict(capacity=64, keep_prefix=True, cache_dtype=given.get("cache_dtype"))
        out = xj.generate(
            model.params,
            model.config,
            [prompt[:-1] for prompt in PROMPTS],
            xj.GenerateOptions(max_tokens=1, **begun),
        )
        return dict(prefix=out.prefix)
    return {
        "logprobs": dict(logprobs=3), "logits": dict(logits=True), "lookup": dict(draft="lookup"),
        "draft": dict(draft=model),
        "keep-prefix": dict(keep_prefix=True), "stream": {}, "no-cache": dict(use_cache=False),
    }[extra]  # fmt: skip


def run(model, given: dict, streamed: bool = False) -> xj.types.GenerateOutput:
    call = xj.stream if streamed else xj.generate
    out = call(model.params, model.config, PROMPTS, xj.GenerateOptions(**given), key=jax.random.key(5))
    if not streamed:
        return out
    list(out)
    return out.output


@pytest.mark.parametrize("base", full_except((), BASES, soak=["n-and-stops", "best-of", "int8"]))
def test_additional_options_do_not_change_the_tokens(models, base):
    model = models[base if base in models else None]  # weights as narrow as keys
    want = run(model, settings(model, base))
    assert len(want.tokens) == len(PROMPTS) * BASES[base].get("n", 1)
    for extra in EXTRAS:
        if (base, extra) in REJECTED:
            with pytest.raises(xj.InputError, match=REJECTED[base, extra]):
                run(model, settings(model, base, extra), extra == "stream")
            continue
        out = run(model, settings(model, base, extra), extra == "stream")
        assert (out.tokens, out.finish_reason) == (want.tokens, want.finish_reason), extra
        for row, expected in zip(out.logprobs, want.logprobs, strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-4, err_msg=extra)
        assert "logprobs" not in extra or [len(row) for row in out.alternatives] == [
            len(row) for row in out.logprobs
        ]
        assert "logits" not in extra or [len(row) for row in out.logits] == [len(row) for row in out.logprobs]


@pytest.mark.parametrize("extra", NEEDS_THE_CACHE)
def test_options_that_need_the_cache_raise_without_one(models, extra):
    with pytest.raises(xj.InputError, match=f"{NEEDS_THE_CACHE[extra]} needs the cache"):
        run(models[None], settings(models[None], "one-of-each", extra) | dict(use_cache=False))


def test_a_prefix_in_another_format_raises(models):
    given = settings(models[None], "int8", "prefix")
    with pytest.raises(xj.InputError, match="cache_dtype='int4', but the prefix is in int8"):
        run(models[None], given | dict(cache_dtype="int4"))
