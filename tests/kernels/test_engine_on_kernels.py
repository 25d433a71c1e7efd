"""The engine and quantized caches on emulated kernels."""

import contextlib

import family_checks
import jax
import numpy as np
import parity_cases as cases
import pytest
from random_matrices import quantized_experts, random_params
from small_models import CONFIGS, QWEN, build, prompts

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.families.reading import from_hf

pytestmark = [
    pytest.mark.oldest,  # attention, append and compiling run on the newest
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16)


def latent_model(**changes):
    """A model whose layer has latent attention and an MLP."""
    return family_checks.small_model(cases.CASES["deepseek-v3-yarn-groups"], num_hidden_layers=1, **changes)


@pytest.mark.parametrize(
    "family, cache_dtype",
    [("qwen2", None), ("qwen2", "int4"), ("qwen3_moe", "bfloat16"), ("deepseek_v3", None)],
)
def test_a_request_gets_the_same_bits_alone_and_beside_others(family, cache_dtype):
    """The mixture of experts is in bfloat16, so that products and experts are kernels too. Experts of one
    layer are in int4.
    """
    if family == "qwen2":
        params, config = build("qwen2")
    elif family == "deepseek_v3":
        params, config, _ = latent_model()
    else:
        config = from_hf(QWEN | EXPERTS | dict(model_type=family, hidden_size=64))
        params = random_params(config, dtype="bfloat16")
        first, *others = params["layers"]
        params["layers"] = quantized_experts(first, "int4", 32), *others
    model = xj.Model(params, config)
    asked = [[token % config.vocab_size for token in prompt] for prompt in prompts(3, 130)]
    options = [
        xj.GenerateOptions(max_tokens=9),
        xj.GenerateOptions(
            max_tokens=6, sampling=xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.9), logprobs=2
        ),
    ]
    with xj.Engine(
        model, rows=2, capacity=256, chunk=128, cache_dtype=cache_dtype, impl="interpret"
    ) as engine:

        def submit(i):
            return engine.submit(asked[i], options[i % 2], key=jax.random.key(i), salt=str(i))

        alone = [submit(i).result() for i in range(2)]
        together = [request.result() for request in [submit(i) for i in range(2)]]
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs


@pytest.mark.parametrize(  # others: test_kernels.py
    "name, cache_dtype", [("qwen2", "int4"), ("windows-nope-untied", "int8")]
)
def test_logits_over_rings_and_quantized_keys_are_those_of_xla(name, cache_dtype):
    """The models have a bias of keys (qwen2) that is larger than the keys are, and rings."""
    config = from_hf(CONFIGS[name] | dict(hidden_size=64, head_dim=32)) if name == "qwen2" else None
    if config is None:
        params, config = build(name)
    else:
        params = random_params(config)
        for layer in params["layers"]:
            layer["k"]["bias"] = 5 * jax.random.normal(jax.random.key(2), layer["k"]["bias"].shape)
    tokens_BT = np.array(prompts(70, 70))

    def logits(impl):
        cache = xj.init_cache(config, 2, 700, cache_dtype)
        out_BV, cache = xj.prefill(params, config, tokens_BT, np.array([70, 9]), cache, impl=impl)
        outs = [out_BV]
        for token in (1, 2):
            out_BV, cache = xj.decode_step(params, config, np.full(2, token), cache, impl=impl)
            outs.append(out_BV)
        return np.stack(outs)

    want = logits("xla")
    np.testing.assert_allclose(logits("interpret"), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("impl", ["interpret", "interpret_tpu"])
def test_logits_over_latents_are_those_of_xla(impl):
    is_tpu = impl == "interpret_tpu"
    params, config, prompts = latent_model(kv_lora_rank=128 if is_tpu else 28)
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts)
    as_tpu = kernels_pallas.assume_device(None, "TPU v6 lite", "tpu")

    def logits(impl):
        cache = xj.init_cache(config, len(prompts), 128)
        assert cache.layers[0].k.values.shape[3] == (256 if is_tpu else 36)  # lanes are filled
        out_BV, cache = xj.prefill(params, config, tokens_BT, num_tokens_B, cache, impl=impl)
        outs = [out_BV]
        for token in (1, 2):
            out_BV, cache = xj.decode_step(params, config, np.full(len(prompts), token), cache, impl=impl)
            outs.append(out_BV)
        return np.stack(outs)

    with as_tpu if is_tpu else contextlib.nullcontext():
        np.testing.assert_allclose(logits(impl), logits("xla"), atol=1e-4)
        assert xj.kernels_used(params, config, impl=impl)["decode_attention"].impl == impl
