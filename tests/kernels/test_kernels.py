"""The engine on kernels: the same tokens and gradients as on plain jnp, and programs for NVIDIA GPUs lowered
on a machine without one.

Kernels run emulated here (`impl="interpret"`). Each is compared with its oracle in test_kernels_triton.py and
test_kernels_mosaic.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from layer_changes import with_mixer, with_windows
from small_models import QWEN, build, prompts

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.backends.kernels.head import can_fuse_head, greedy_tokens
from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.config.run_config import PLAIN, RunConfig
from xinfer_jax.families.reading import from_hf
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention
from xinfer_jax.model.decoder import unembed
from xinfer_jax.model.forward_parts import hidden_states
from xinfer_jax.weights.int8_weight import Int8Weight
from xinfer_jax.weights.quantization import with_int8_activations

pytestmark = pytest.mark.newest

HAS_GPU = kernels_pallas.device_impl().impl != "xla"
SD = jax.ShapeDtypeStruct


def h200(*axes):
    """A mesh of fake H200s, for which programs can be lowered."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    names = tuple(name for name, _ in axes)
    return AbstractMesh(
        tuple(n for _, n in axes), names, axis_types=(AxisType.Auto,) * len(axes), abstract_device=device
    )


def lowered_for_cuda(function, *args):
    with jax.sharding.use_abstract_mesh(h200()):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def arrays(*shapes, dtype=jnp.float32):
    draws = np.random.default_rng(0)
    return [jnp.asarray(draws.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.full
def test_kernels_support_soft_caps():
    """Soft caps of scores and of logits, as in gemma2: in prefill and decode attention and in the head, whose
    log-probability they change.
    """
    params, config = build("qwen2")
    params = params | {"layers": params["layers"][:1]}
    config = with_windows(config, (7,))
    capped = dataclasses.replace(with_mixer(config, logit_softcapping=1.5), final_logit_softcapping=4.0)
    tokens_BT = np.array(prompts(13, 13))
    used = xj.kernels_used(params, capped, "interpret")
    assert used.pop("product") == ("xla", "dtype float32")
    assert {s.impl for s in used.values()} == {"interpret"}

    @partial(jax.jit, static_argnums=(0, 1))
    def read(config, impl):
        """Logits of a prompt and of the token after it; the greedy token and its log-probability."""
        hidden_BTD, cache = hidden_states(params, config, tokens_BT, xj.init_cache(config, 2, 16), impl=impl)
        step_BV = xj.decode_step(params, config, tokens_BT[:, 0], cache, impl=impl)[0]
        likeliest = None
        if impl == "interpret":
            likeliest = greedy_tokens(params, config, hidden_BTD[:, -1], RunConfig(impl))
        return unembed(params, config, hidden_BTD), step_BV, likeliest

    wanted = read(capped, "xla")
    got = read(capped, "interpret")
    for want, have in zip(wanted[:2], got[:2], strict=True):
        np.testing.assert_allclose(have, want, atol=1e-5)
    logprobs_BV = jax.nn.log_softmax(wanted[0][:, -1])
    assert got[2][0].tolist() == jnp.argmax(logprobs_BV, -1).tolist()
    np.testing.assert_allclose(got[2][1], jnp.max(logprobs_BV, -1), atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 4])
def test_gradient_through_a_kernel_is_that_of_xla(window):
    q, k, v = arrays((2, 9, 4, 8), (2, 2, 9, 8), (2, 2, 9, 8))

    def loss(q, k, v, impl):
        return jnp.sum(
            attention(
                q,
                uncached_kv(k, v, window),
                VisibleKeys(None, jnp.array([9, 6])),
                Scoring(0.3),
                run_config=RunConfig(impl),
            )
            ** 2
        )

    for got, want in zip(
        *(
            jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)(q, k, v, impl)
            for impl in ("interpret", "xla")
        ),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)


def decode_programs(dtype="bfloat16"):
    """Prefill, decode step and decode loop of a small model, traced with shapes only."""
    config = from_hf(
        dict(model_type="qwen2", vocab_size=320, hidden_size=128, intermediate_size=64, num_hidden_layers=1)
        | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=256)
    )
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), dtype))
    cache = jax.eval_shape(lambda: xj.init_cache(config, 2, 64, dtype))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    rows = SD((2,), jnp.int32)

    def loop(params, logits_BV, cache, key_B):
        eos_ids = np.zeros(4, np.int32)
        return xj.decode_loop(params, config, logits_BV, cache, key_B, xj.SamplingConfig(), eos_ids, 16)

    yield jax.jit(xj.prefill, static_argnums=1).trace(params, config, SD((2, 32), jnp.int32), rows, cache)
    yield jax.jit(xj.decode_step, static_argnums=1).trace(params, config, rows, cache)
    yield jax.jit(loop).trace(params, SD((2, 320), jnp.float32), cache, keys)


@pytest.fixture(params=["mosaic", "triton"])
def fake_gpu(request, monkeypatch):
    """Makes this process seem to have an NVIDIA GPU: calls with `impl=None` are lowered for it, not run."""
    selection = kernels_pallas.Selection(request.param, "an imaginary GPU")
    monkeypatch.setattr(kernels_pallas.dispatch, "device_impl", lambda: selection)
    jax.clear_caches()  # no earlier trace
    yield {"mosaic": "mosaic_gpu", "triton": "__gpu$xla.gpu.triton"}[request.param]
    jax.clear_caches()


@pytest.mark.full
def test_the_whole_decode_step_lowers_for_cuda(fake_gpu):
    """All three programs use the attention kernel, and Triton's for products; the loop also the head
    kernel. No program for a CPU has one.
    """
    with jax.sharding.use_abstract_mesh(h200()):
        programs = [*decode_programs()]
        texts = [program.lower(lowering_platforms=("cuda",)).as_text() for program in programs]
        on_cpu = programs[1].lower(lowering_platforms=("cpu",)).as_text()
    calls = [text.count(f'call_target_name = "{fake_gpu}') + text.count(f"@{fake_gpu}") for text in texts]
    # The decode step appends by a kernel too.
    assert calls[:2] == ([1, 1] if fake_gpu == "mosaic_gpu" else [5, 6]) and calls[2] >= 2, calls
    products_and_append = texts[1].count("@__gpu$xla.gpu.triton")
    assert products_and_append == (5 if fake_gpu == "mosaic_gpu" else 6)
    assert fake_gpu not in on_cpu


def test_select_states_its_reasons():
    q = SD((2, 1, 4, 64), jnp.float32)
    k = SD((2, 2, 32, 64), jnp.float32)
    x = SD((2, 64), jnp.bfloat16)
    w = SD((96, 64), jnp.bfloat16)
    assert kernels_pallas.select("decode_attention", "triton", q, k, k).impl == "triton"
    assert kernels_pallas.select("lm_head_argmax", "mosaic", x, w).impl == "mosaic"
    for impl, args, reason in [
        ("mosaic", (q, k, k), "TF32"),
        ("triton", (SD(q.shape, jnp.bfloat16), k, k), "different dtypes"),
        (
            "triton",
            (SD((2, 1, 4, 640), jnp.float32), *[SD((2, 2, 32, 640), jnp.float32)] * 2),
            "head width 640 is above 512",
        ),
        ("cuda", (q, k, k), "must be None or one of"),
        (
            "triton",
            (q, *[kernels_pallas.Levels(SD((2**17 + 1, 2, 128, 64), jnp.uint8), None)] * 2),
            "2147500032 numbers of 8",
        ),
    ]:
        with pytest.raises(ValueError, match=reason):
            kernels_pallas.select("prefill_attention", impl, *args)


def test_latents_are_for_triton_on_every_gpu():
    """Prompts have its kernel by name alone."""
    q = SD((2, 1, 20, 576), jnp.bfloat16)
    kv = SD((2, 1, 64, 576), jnp.bfloat16)
    args = q, kernels_pallas.Latents(kv, 512), None
    for capability in ((9, 0), (8, 0)):
        with kernels_pallas.assume_device(capability, "here"):
            assert kernels_pallas.select("decode_attention", None, *args) == ("triton", "here")
            assert kernels_pallas.select("rope_append", None, *args).impl == "triton"
            assert "often" in kernels_pallas.select("prefill_attention", None, *args).reason
    for impl in ("mosaic", "triton"):
        assert kernels_pallas.select("prefill_attention", impl, *args).impl == "triton"
    bias = kernels_pallas.KeyBias(None, None, None)
    for wrong, reason in [
        ((q, kernels_pallas.Latents(kv, 520), None), "head width 520 is above 512"),
        ((SD(q.shape, jnp.float32), *args[1:]), "different dtypes bfloat16, float32"),
        ((*args, bias), "latents with a bias of keys"),
    ]:
        with pytest.raises(ValueError, match=reason):
            kernels_pallas.select("decode_attention", "triton", *wrong)


def test_the_head_of_an_int8_vocabulary():
    """Kernels under every name are Triton's. float32 and int8 activations take logits."""
    config = from_hf(QWEN)
    numbers = np.random.RandomState(0)
    values_VD = numbers.randint(-127, 128, (config.vocab_size, config.hidden_size)).astype(np.int8)
    scale_V = numbers.random_sample(config.vocab_size).astype(np.float32)
    params = {"embed": {"weight": Int8Weight(values_VD, scale_V)}}
    hidden_BD = jnp.asarray(numbers.standard_normal((3, config.hidden_size)), jnp.bfloat16)
    for impl in ("mosaic", "triton", "interpret"):
        run_config = RunConfig(impl)
        assert can_fuse_head(params, hidden_BD, run_config)
        assert not can_fuse_head(params, hidden_BD.astype(jnp.float32), run_config)
        assert not can_fuse_head(with_int8_activations(params), hidden_BD, run_config)
    assert not can_fuse_head(params, hidden_BD, PLAIN)
    token_B, logprob_B = greedy_tokens(params, config, hidden_BD, RunConfig("interpret"))
    logits_BV = jnp.asarray(hidden_BD, jnp.float32) @ (values_VD * scale_V[:, None]).T
    assert token_B.tolist() == jnp.argmax(logits_BV, -1).tolist()
    np.testing.assert_allclose(logprob_B, jax.nn.log_softmax(logits_BV).max(-1), atol=2e-3)


@pytest.mark.full
def test_kernels_serve_every_cache_but_gear(fake_gpu):
    """Rings and quantized keys too. Hopper reads quantized keys by the Triton kernel."""
    config = from_hf(QWEN | dict(head_dim=16))
    config = with_windows(config, (7, None))
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), "bfloat16"))
    for kind in ("bfloat16", "int8" if fake_gpu == "mosaic_gpu" else "int4", "gear"):
        used = xj.kernels_used(params, config, cache_dtype=kind, capacity=1024)
        assert used["prefill_attention"] == used["decode_attention"]
        assert used["argmax"].reason == used["lm_head_argmax"].reason == "an imaginary GPU"
        cache = jax.eval_shape(lambda kind=kind: xj.init_cache(config, 2, 1024, kind))
        text = lowered_for_cuda(
            lambda *args: hidden_states(args[0], config, *args[1:]), params, SD((2, 1), jnp.int32), cache
        )
        calls = {name: text.count(name) for name in ("mosaic_gpu", "__gpu$xla.gpu.triton")}
        if kind == "gear":
            assert used["decode_attention"] == ("xla", "keys in GEAR's format")
            assert not calls["mosaic_gpu"]
        elif kind == "bfloat16":
            assert used["decode_attention"].reason == "an imaginary GPU" and calls[fake_gpu]
        else:
            assert used["decode_attention"].impl == "triton" and calls["__gpu$xla.gpu.triton"]


@pytest.mark.skipif(HAS_GPU, reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_none_means_xla_and_kernel_names_raise():
    params, config = build("qwen2")
    assert kernels_pallas.select("argmax", None, SD((1, 10), jnp.float32)) == (
        "xla",
        "no NVIDIA GPU or TPU here",
    )
    for impl in ("mosaic", "triton"):
        with pytest.raises(xj.InputError, match="needs an NVIDIA GPU of compute capability"):
            xj.generate(params, config, [[1]], xj.GenerateOptions(impl=impl))
        with pytest.raises(xj.InputError, match="needs an NVIDIA GPU of compute capability"):
            xj.decode_step(params, config, np.array([1]), xj.init_cache(config), impl=impl)
        with pytest.raises(xj.InputError, match="needs an NVIDIA GPU of compute capability"):
            xj.forward(params, config, np.array([[1]]), impl=impl)
    with pytest.raises(
        xj.InputError, match="one of mosaic, triton, tpu, xla, interpret, interpret_tpu, got 'fast'"
    ):
        xj.generate(params, config, [[1]], xj.GenerateOptions(impl="fast"))


# Heads of full layers are 512 wide, those of sliding layers 64.
HF = QWEN | dict(model_type="gemma4_text", num_attention_heads=2, head_dim=64, global_head_dim=512)
HF |= dict(num_key_value_heads=2, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=9)
HF |= dict(layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0)
GEMMA4 = from_hf(HF)


@pytest.mark.parametrize(
    "capability, platform, impl, others",
    [
        ((9, 0), "cuda", "mosaic", "1 of 2 layers by triton: here; head width 512 is above 256"),
        ((8, 0), "cuda", "triton", None),
        (None, "tpu", "tpu", None),
    ],
)
def test_kernels_used_says_which_layers_have_another_one(capability, platform, impl, others):
    params = jax.eval_shape(lambda: xj.init_params(GEMMA4, jax.random.key(1), "bfloat16"))
    with kernels_pallas.assume_device(capability, "here", platform):
        used = xj.kernels_used(params, GEMMA4, cache_dtype="bfloat16")
    for kernel in ("prefill_attention", "decode_attention"):
        assert used[kernel] == (impl, "here" if others is None else f"here; {others}")
