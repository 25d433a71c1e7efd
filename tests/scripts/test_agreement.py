"""scripts/gpu/agreement.py: models that are right agree, models made wrong on purpose do not, for four seeds
each. Comparisons of too few ids fail.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import agreement
from gpu.agreement import Forced, checking_params, float32_params, forced
from layer_changes import with_mixer, with_windows

import xinfer_jax as xj
from xinfer_jax.cache.contiguous import Contiguous
from xinfer_jax.families.reading import from_hf

pytestmark = [pytest.mark.full, pytest.mark.oldest]

SEEDS = range(4)
PROMPT, TOKENS = 40, 60
CONFIG = from_hf(
    dict(
        model_type="mistral", vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, sliding_window=30,
    )
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneSlotOff(Contiguous):
    """A cache that writes each key and value one slot after its own."""

    def append(self, k_BTKH, v_BTKH, start_B, num_tokens_B):
        return super().append(k_BTKH, v_BTKH, start_B + 1, num_tokens_B)


def one_slot_off(cache):
    layers = tuple(OneSlotOff(layer.k, layer.v, layer.window, layer.capacity) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers)


WRONG = {
    "window of 25 for 30": with_windows(CONFIG, (25, 25)),
    "no window": with_windows(CONFIG, (None, None)),
    "scale + 5%": with_mixer(CONFIG, query_pre_attn_scalar=CONFIG.head_dim / 1.05**2),
    "RoPE theta doubled": dataclasses.replace(
        CONFIG, rope=dataclasses.replace(CONFIG.rope, rope_theta=20000.0)
    ),
}


@pytest.fixture(scope="module")
def models():
    """Returns, for each seed, the model's parameters, tokens, and its outputs along them."""
    init = jax.jit(lambda key: checking_params(CONFIG, key, "bfloat16"))

    def model(seed):
        params = init(jax.random.key(seed))
        tokens_BT = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (2, TOKENS)).astype(np.int32)
        return params, tokens_BT, along(params, tokens_BT)

    return [model(seed) for seed in SEEDS]


def along(params, tokens_BT, config=CONFIG, impl="xla", cache_dtype="bfloat16", change=None):
    cache = xj.init_cache(CONFIG, len(tokens_BT), 64, cache_dtype)
    return forced(params, config, tokens_BT, change(cache) if change else cache, PROMPT, impl)


def results(models, **changes):
    """Returns, for each seed, the comparison of the model with itself after these changes."""
    found = [
        agreement.agreement(along(params, tokens_BT, **changes), want, PROMPT, "bfloat16")
        for params, tokens_BT, want in models
    ]
    show(found)
    return found


def show(found):
    for figure in ("largest", "rms_prefill", "rms_decode", "differ", "ids_compared"):
        values = [result[figure] for result in found]
        print(f"{figure} {min(values):.3g} to {max(values):.3g}", end="  ")


def test_kernels_agree_with_jnp(models):
    assert all(result["ok"] for result in results(models, impl="interpret"))


def test_bfloat16_agrees_with_float32(models):
    """The differences are less than half of the bounds: two formulations may err in opposite ways."""
    exact = [(float32_params(params), tokens_BT, want) for params, tokens_BT, want in models]
    for result in results(exact, cache_dtype="float32"):
        bound = result["tolerance"]["rms"] / 2
        assert result["ok"] and result["rms_prefill"] < bound and result["rms_decode"] < bound
        assert result["largest"] < result["tolerance"]["largest"] / 2


@pytest.mark.parametrize("name", WRONG)
def test_a_model_made_wrong_does_not_agree(models, name):
    assert not any(result["ok"] for result in results(models, config=WRONG[name]))


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_wrong_scale_of_one_kernel_does_not_agree(models, part):
    """The outputs are mixed, as if only the kernel of prefill, or only the kernel of decode steps, were
    wrong.
    """
    found = []
    for params, tokens_BT, want in models:
        wrong = along(params, tokens_BT, config=WRONG["scale + 5%"])
        first, rest = (wrong, want) if part == "prefill" else (want, wrong)
        parts = zip(first, rest, strict=True)
        mixed = Forced(*(jnp.concatenate([x[:, :PROMPT], y[:, PROMPT:]], 1) for x, y in parts))
        found.append(agreement.agreement(mixed, want, PROMPT, "bfloat16"))
    show(found)
    assert not any(result["ok"] for result in found)


def test_a_cache_written_one_slot_off_does_not_agree(models):
    assert not any(result["ok"] for result in results(models, change=one_slot_off))


# --- what a comparison must not accept ----------------------------------------------------------------------


def outputs(logits_BTV):
    return Forced(jnp.asarray(logits_BTV), jnp.argmax(jnp.asarray(logits_BTV), -1))


def random_logits(rows, tokens, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, tokens, 50)).astype(np.float32)


def test_too_few_compared_ids_are_a_failure():
    """This holds also if nothing differs: there are too few positions, or two best logits are equal
    everywhere.
    """
    enough = outputs(random_logits(2, 40))
    assert agreement.agreement(enough, enough, 20, "bfloat16")["ok"]
    for few in (random_logits(2, 15), np.ones((2, 400, 50), np.float32)):
        result = agreement.agreement(outputs(few), outputs(few), 10, "bfloat16")
        assert not result["ok"] and "at least 32" in result["too_few"]


def test_a_wrong_logit_or_id_is_a_failure():
    logits_BTV = random_logits(2, 40)
    want = outputs(logits_BTV)
    for value in (9.0, np.nan):
        wrong_BTV = logits_BTV.copy()
        wrong_BTV[1, 7, 3] = value
        assert not agreement.agreement(outputs(wrong_BTV), want, 20, "bfloat16")["ok"]
    other = want._replace(id_BT=(want.id_BT + 1) % 50)  # as from an argmax kernel that is wrong
    assert agreement.agreement(other, want, 20, "bfloat16")["differ"] > 32
