"""Keys and values side by side, as TPUs store them, are the same numbers as in two arrays, after every
operation and in all that is built on them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec
from quick import full_except
from random_matrices import random_params
from safetensors.numpy import load_file

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.cache.contiguous import Contiguous
from xinfer_jax.cache.kv_cache import cache_bytes
from xinfer_jax.cache.paged import PAGE_SIZE, Paged, empty_pools
from xinfer_jax.cache.ring import Ring
from xinfer_jax.cache.side_by_side import SideBySideKV
from xinfer_jax.cache.stored_kv import empty_pair
from xinfer_jax.families.reading import from_hf
from xinfer_jax.sharding import cache_specs
from xinfer_jax.weights.params import tree_bytes

pytestmark = pytest.mark.oldest

ON_TPU = functools.partial(kernels_pallas.assume_device, None, "a TPU", platform="tpu")
PROMPTS = [[5, 6, 7, 8, 9, 5, 6], [7, 8, 9]]
B, K, H = 3, 2, 4


def make_layer(kind, dtype, side_by_side, window=9):
    """An empty layer of three rows."""
    slots, capacity = (24, 100) if kind is Ring else (40, 37)
    if kind is not Paged:
        return kind(*empty_pair((B, K, slots, H), dtype, side_by_side), window, capacity)
    table_BP = jnp.array([[4, 2], [1, 0], [3, 5]])
    return Paged(*empty_pair((6, K, PAGE_SIZE, H), dtype, side_by_side), window, 2 * PAGE_SIZE, table_BP)


@jax.jit
def append(layer, *args):
    return layer.append(*args)


@functools.partial(jax.jit, static_argnums=(1, 2))
def get_blocks(layer, width, row, length_B):
    _, blocks = layer.block_layout(width)
    return [layer.get_block(i, width, length_B, row) for i in range(blocks)]


def assert_same(one, other):
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def assert_equal_layers(layer, plain, length_B):
    """Side by side, and in two arrays: what is stored, and the blocks of all rows and of one."""
    assert isinstance(layer.k, SideBySideKV) and layer.v is None
    assert layer.k.shape == plain.k.shape and layer.slots == plain.slots
    assert_same(layer.used_arrays(layer.slots), (plain.k, plain.v))
    for row in (None, 1):
        width = PAGE_SIZE if isinstance(layer, Paged) else 16
        assert_same(*(get_blocks(x, width, row, length_B) for x in (layer, plain)))


@pytest.mark.parametrize("kind", full_except([Contiguous], [Contiguous, Ring, Paged]))
@pytest.mark.parametrize("dtype", full_except(["float32"], ["float32", "int8"]))
def test_operations_of_layers(kind, dtype):
    layers = [make_layer(kind, dtype, side_by_side) for side_by_side in (True, False)]
    length_B = jnp.zeros(B, jnp.int32)
    for tokens, counts in ((16, [5, 2, 4]), (16, [16, 3, 12]), (16, [16, 16, 16]), (1, [1, 0, 1])):
        k_BTKH, v_BTKH = np.random.RandomState(tokens).randn(2, B, tokens, K, H).astype(np.float32)
        count_B = jnp.array(counts)
        layers = [append(layer, k_BTKH, v_BTKH, length_B, count_B) for layer in layers]
        length_B = length_B + count_B
        assert_equal_layers(*layers, layers[0].stored_length(length_B))
    if kind is Paged:
        return
    index_B = jnp.array([2, 2, 0])
    assert_equal_layers(*(layer.reorder(index_B) for layer in layers), length_B[index_B])
    assert_equal_layers(*(layer.reorder_tail(index_B, 3, 5) for layer in layers), length_B)
    used = [layer.used_arrays(20) for layer in layers]
    assert_same(*used)
    on_host = jax.tree.map(np.asarray, used[0])
    assert_equal_layers(*(make_layer(kind, dtype, x).fill(*on_host) for x in (True, False)), length_B)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_of_a_prefill_chunk(dtype):
    layers = []
    for side_by_side in (True, False):
        pools = empty_pair((6, K, PAGE_SIZE, H), dtype, side_by_side)
        layers.append(Paged(*pools, None, 3 * PAGE_SIZE, jnp.array([[3, 5, 1]])))
    new = np.random.RandomState(0).randn(2, 1, 2 * PAGE_SIZE, K, H).astype(np.float32)
    layers = [append(layer, *new, jnp.array([PAGE_SIZE]), jnp.array([100])) for layer in layers]
    for layer in layers:
        block = layer.get_block(1, PAGE_SIZE, jnp.array([PAGE_SIZE + 100]))
        np.testing.assert_allclose(block.k_BKSH[0], new[0, 0, :PAGE_SIZE].swapaxes(0, 1), atol=0.02)
    assert_same(layers[0].k.separate(), (layers[1].k, layers[1].v))


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "gear", "float8_e4m3fn"])
def test_a_process_with_a_tpu_stores_them_side_by_side(dtype):
    """The 4-bit formats, which no TPU kernel reads, stay in two arrays."""
    config = from_hf(tiny.CONFIG)
    plain = xj.init_cache(config, 2, 20, dtype)
    with ON_TPU():
        cache = xj.init_cache(config, 2, 20, dtype)
        fixed = sum(x.basis.nbytes for x in (*cache.k, *cache.v)) if dtype == "gear" else 0
        assert cache_bytes(config, 2, 24, dtype) == tree_bytes(cache.layers) - fixed
        traced = jax.jit(lambda: xj.init_cache(config, 2, 20, dtype).layers)()
        pools = None if dtype == "gear" else empty_pools(config, 5, dtype)
    assert jax.tree.structure(traced) == jax.tree.structure(cache.layers)
    assert (cache.dtype, cache.fits, cache.capacity) == (plain.dtype, plain.fits, plain.capacity)
    is_side_by_side = dtype in ("float32", "int8")
    assert [isinstance(k, SideBySideKV) for k in cache.k] == [is_side_by_side] * 2
    if pools is not None:
        assert [isinstance(k, SideBySideKV) for k, _ in pools] == [is_side_by_side] * 2
    mesh = jax.sharding.AbstractMesh((2,), ("model",))
    specs = jax.tree.leaves(cache_specs(cache.layers, mesh), is_leaf=lambda x: isinstance(x, PartitionSpec))
    assert {spec[1] for spec in specs if spec} == {"model"}


@pytest.fixture(scope="module")
def model():
    config = from_hf(tiny.CONFIG)
    params = random_params(config)
    return xj.Model(params, config)


def sampled(model, prompts, **options):
    options = xj.GenerateOptions(max_tokens=6, sampling=xj.SamplingConfig(temperature=0.7), **options)
    return xj.generate(model.params, model.config, prompts, options, key=jax.random.key(5))


@pytest.mark.full
def test_calls_and_prefix_files(model, tmp_path):
    """The same tokens. A prefix written on a CPU serves a TPU, and vice versa."""
    options = dict(cache_dtype="int8", keep_prefix=True, capacity=60)
    longer = [[*prompt, 4, 3] for prompt in PROMPTS]

    def first_calls(file):
        batch = sampled(model, PROMPTS, **options)
        xj.save_prefix(model.params, model.config, batch.prefix, tmp_path / file)
        return batch.tokens

    def continued(file):
        prefix = xj.load_prefix(model.params, model.config, tmp_path / file)
        batch = sampled(model, longer, prefix=prefix)
        return prefix, (batch.tokens, batch.stats.reused_tokens)

    on_cpu = first_calls("cpu")
    with ON_TPU():
        assert first_calls("tpu") == on_cpu
        prefix, with_cpu_prefix = continued("cpu")
    assert isinstance(prefix.cache.k[0], SideBySideKV)
    assert_same(*(load_file(tmp_path / name) for name in ("cpu", "tpu")))
    assert continued("tpu")[1] == with_cpu_prefix


@pytest.mark.full
def test_a_request_gets_the_same_bits_alone_and_beside_others(model):
    with (
        ON_TPU(),
        xj.Engine(model, rows=2, capacity=256, pages=5, chunk=128, cache_dtype="int8") as engine,
    ):
        assert isinstance(engine.core.device.pools[0][0], SideBySideKV)

        def submit(i):
            options = xj.GenerateOptions(
                max_tokens=100, sampling=xj.SamplingConfig(temperature=0.8 * (i % 2)), eos_token_ids=()
            )
            return engine.submit([3 + i] * (40 + 30 * i), options, key=jax.random.key(i), salt=f"{i}")

        alone = [submit(i).result() for i in range(3)]
        together = [request.result() for request in [submit(i) for i in range(3)]]
        device = engine.core.device
        swapped_out = device.copy_pages_out([1, 2])
        device.copy_pages_in([3, 1], swapped_out)
        first_two = [
            jax.tree.map(lambda x: x[:2], pages) for pages in (swapped_out, device.copy_pages_out([3, 1]))
        ]
        assert_same(*first_two)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
