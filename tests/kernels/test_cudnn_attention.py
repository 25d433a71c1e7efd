"""Attention without a cache by cuDNN: when it is chosen; its numbers beside plain jnp, with XLA in the place
of cuDNN, and the calls in a program for a GPU. No kernel of cuDNN runs here.
"""

import dataclasses
import re
from functools import partial
from unittest import mock

import gpu_forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.backends.gpu.cudnn_attention import cudnn_form
from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.mixers import attention as attention_module
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention, blocked_attention
from xinfer_jax.ops.operation import Call


@pytest.fixture
def on_hopper():
    """This process has an H200, and cuDNN."""
    with (
        kernels_pallas.assume_device((9, 0), "an imaginary GPU"),
        mock.patch.object(cudnn, "check_cudnn_version", lambda: 91000),
    ):
        yield


def inputs(T=160, N=4, K=2, H=16, dtype=jnp.bfloat16, window=None):
    rng = np.random.default_rng(0)
    shapes = (2, T, N, H), (2, K, T, H), (2, K, T, H)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, uncached_kv(k, v, window)


@pytest.mark.parametrize("sizes", [dict(), dict(T=530, N=2, K=1, window=9)])
def test_numbers_and_gradients(on_hopper, sizes):
    q, kv = inputs(dtype=np.float32, **sizes)
    length_B = np.int32([q.shape[1], 131])
    real = np.arange(q.shape[1]) < length_B[:, None]
    by_xla = jax.nn.dot_product_attention

    def weighted(attend):
        def loss(q, k, v):
            out = attend(q, dataclasses.replace(kv, k=k, v=v))
            return jnp.sum(jnp.where(real[..., None, None], jnp.sin(3 * out), 0)), out

        gradient, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, kv.k, kv.v)
        return np.asarray(out)[real], *gradient

    def instead(*qkv, implementation, **options):
        assert implementation == "cudnn"
        return by_xla(*qkv, **options)

    with (
        gpu_forms.selected(),
        mock.patch.object(jax.nn, "dot_product_attention", side_effect=instead) as called,
    ):
        got = weighted(partial(attention, visible=VisibleKeys(None, length_B), scoring=Scoring(0.3)))
    assert called.called
    plain = partial(blocked_attention, scoring=Scoring(0.3), static=True)
    visible = VisibleKeys(jnp.zeros(2, jnp.int32), length_B)
    want = weighted(lambda q, kv: plain(q, kv, visible, None))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * np.max(np.abs(y)))


def chosen(q, kv, impl=None, sink_N=None, cap=None):
    operands = dict(q_BTNH=q, kv=kv, visible=None, sink_N=sink_N)
    return cudnn_form(Call(None, operands, dict(scoring=Scoring(0.3, cap)), RunConfig(impl))) is not None


def test_what_it_is_chosen_for(on_hopper):
    assert chosen(*inputs()) and chosen(*inputs(window=9)) and chosen(*inputs(dtype=np.float16))
    assert not chosen(*inputs(dtype=np.float32))
    assert not chosen(*inputs(T=100))
    assert not chosen(*inputs(H=12))
    q, kv = inputs()
    assert not chosen(q, kv, impl="triton") and not chosen(q, kv, impl="xla")
    assert not chosen(q, kv, sink_N=np.ones(4)) and not chosen(q, kv, cap=30.0)
    assert not chosen(q[:, :130], kv)
    assert not chosen(q, uncached_kv(kv.k, kv.v[..., :8]))
    with kernels_pallas.assume_device((7, 5), "an older GPU"):
        assert not chosen(q, kv)
    with mock.patch.object(cudnn, "check_cudnn_version", side_effect=RuntimeError("cuDNN not found.")):
        assert not chosen(q, kv)


def test_not_for_packed_rows_nor_caches():
    q, kv = inputs()
    length_B = np.int32([160, 131])
    for start_B, first_BT, ahead, want in (
        (None, None, 0, "causal_attention"),
        (None, None, 3, "attention"),
        (length_B, None, 0, "attention"),
        (None, np.zeros((2, 160), np.int32), 0, None),
    ):
        with (
            mock.patch.object(attention_module, "run") as run,
            mock.patch.object(attention_module, "blocked_attention"),
        ):
            attention(q, kv, VisibleKeys(start_B, length_B, first_BT), Scoring(0.3), ahead=ahead)
        assert (run.call_args and run.call_args.args[0]) == want


@pytest.mark.full
@pytest.mark.parametrize("manual", [None, {"data"}, {"data", "model"}])
def test_meshes(on_hopper, manual):
    """Rows are divided over all devices of a mesh, or in a `shard_map` over all its axes by the caller."""
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    over = NamedSharding(mesh, PartitionSpec("data"))
    found = []

    def call(q, kv):
        found.append(chosen(q, kv))
        return q

    if manual:
        call = jax.shard_map(call, mesh=mesh, in_specs=over.spec, out_specs=over.spec, axis_names=manual)
    for rows in (4, 6):

        def shape(x, rows=rows):
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=over)

        jax.jit(call).trace(*jax.tree.map(shape, inputs()))
    is_new = jax.__version_info__ >= (0, 12)
    assert found == ([True, False] if manual is None else [len(manual) == 2 and is_new] * 2)


@pytest.mark.full
def test_calls_in_the_gradient_of_score(on_hopper):
    config = xj.ModelConfig.from_hf(QWEN | dict(head_dim=16, num_hidden_layers=1))
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), "bfloat16"))
    gradient = jax.jit(
        jax.grad(lambda params, ids_BT: xj.score(params, config, ids_BT, remat="layer").logprobs_BT.sum())
    )
    traced = gradient.trace(params, jax.ShapeDtypeStruct((2, 128), jnp.int32))
    calls = re.findall(r"@__cudnn\$(\w+)", traced.lower(lowering_platforms=("cuda",)).as_text())
    assert sorted(calls) == ["fmhaSoftmax", "fmhaSoftmax", "fmhaSoftmaxBackward"]
