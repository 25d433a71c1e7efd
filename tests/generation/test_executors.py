"""Both executors return the same: layer by layer, and whole models."""

import compiling
import jax
import numpy as np
import pytest
from test_programs import FULL, LONG, PROMPT, SMALL, WARM, layers, options, ours, streamed

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.generation import batch_generator

pytestmark = [pytest.mark.full, pytest.mark.oldest]


@pytest.fixture(scope="module")
def model():
    config = from_hf(SMALL)
    return xj.init_params(config, jax.random.key(0)), config


@pytest.mark.parametrize(
    "given",
    [
        dict(),
        dict(prompts=[PROMPT, LONG, [3]], sampling=WARM),
        dict(sampling=FULL, logprobs=2, n=2),
        dict(draft="lookup", max_new_tokens=12),
        dict(cache_dtype="int4"),
        dict(use_cache=False),
        dict(prompts=[LONG * 3], capacity=None, eos_token_ids=(7, 9)),
    ],
    ids=["one-row", "rows", "answers", "look-up", "int4-keys", "no-cache", "long"],
)
def test_both_executors_return_the_same_tokens(model, given, monkeypatch):
    """Tokens and finish reasons are equal, log-probabilities nearly."""
    layered = streamed(model, **given)
    monkeypatch.setattr(batch_generator, "executor_class", lambda params: batch_generator.TracedExecutor)
    with compiling.programs() as seen:
        whole = streamed(model, **given)
    assert "_layers" not in seen and ours(seen), "this was the other executor"
    assert layered[0] == whole[0] and layered[1].finish_reason == whole[1].finish_reason
    for one, other in zip(layered[1].logprobs, whole[1].logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_the_same_call_has_the_same_bits_cold_and_warm():
    """Whatever was compiled before it."""
    model = layers(3, max_position_embeddings=512, num_attention_heads=1, num_key_value_heads=1)
    calls = [([PROMPT], options(max_new_tokens=12)), ([PROMPT], options(max_new_tokens=300, capacity=512))]

    def bits():
        return [xj.generate(*model, *call).logprobs for call in calls]

    jax.clear_caches()
    cold = bits()
    calls.reverse()
    assert bits() == cold[::-1]


def test_a_row_with_a_gear_cache_is_the_row_alone(model):
    """GEAR takes its directions from the first tokens of the row."""
    long = list(range(40)) * 2
    given = dict(cache_dtype="gear", capacity=128)
    (alone,) = streamed(model, [long], **given)[1].logprobs
    among = streamed(model, [long] + [PROMPT] * 15, **given)[1].logprobs[0]
    np.testing.assert_allclose(alone, among, atol=1e-5)
