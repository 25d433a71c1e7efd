"""Calls that need more memory than there is raise one line with the bytes, before any is allocated."""

import re
import resource

import jax
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax import device
from xinfer_jax.cache.kv_cache import cache_bytes
from xinfer_jax.families.reading import from_hf
from xinfer_jax.memory_plan import program_parts
from xinfer_jax.weights.params import tree_bytes

LONG = tiny.CONFIG | dict(max_position_embeddings=10**9)
WINDOWS = dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return xj.load_model(tiny.write(tmp_path_factory.mktemp("model"), LONG))


@pytest.fixture
def small(monkeypatch):
    """A machine with 16 GiB, or another number of bytes."""

    def make(count: int) -> None:
        monkeypatch.setattr(device, "memory_bytes", lambda: count)

    make(2**34)
    return make


def needed_bytes(call) -> int:
    """Returns the bytes that the error of a call reports."""
    with pytest.raises(xj.InputError, match=r"need [\d,]+ bytes of memory, and there are [\d,]+: ") as caught:
        call()
    return int(re.search(r"need ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))


MANY = xj.GenerateOptions(max_new_tokens=5 * 10**8)
CALLS = {
    "generate": lambda model: xj.generate(model.params, model.config, [[1]], MANY),
    "stream": lambda model: next(xj.stream(model.params, model.config, [[1]], MANY)),
    "text": lambda model: xj.generate_text(model, "Hi", MANY),
    "beam_search": lambda model: xj.beam_search(model.params, model.config, [1], max_new_tokens=5 * 10**8),
    "cache": lambda model: xj.init_cache(model.config, 1, 5 * 10**8),
    "int4 cache": lambda model: xj.init_cache(model.config, 1, 5 * 10**8, "int4"),
    "capacity": lambda model: xj.generate(
        model.params, model.config, [[1]], xj.GenerateOptions(capacity=5 * 10**8)
    ),
    "logits": lambda model: xj.generate(
        model.params, model.config, [[1]], xj.GenerateOptions(2**25, logits=True)
    ),
    "answers": lambda model: xj.generate(model.params, model.config, [[1]], xj.GenerateOptions(2**20, n=100)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_needs_too_much_memory_raises(model, small, name):
    assert needed_bytes(lambda: CALLS[name](model)) > 2**34


@pytest.mark.full
def test_bytes_of_a_call(model, small):
    """A draft model has a cache too; so have each answer and each beam."""
    small(0)

    def need(**options):
        options = xj.GenerateOptions(1000, capacity=1024, **options)
        return needed_bytes(lambda: xj.generate(model.params, model.config, [[1]], options))

    cache = cache_bytes(model.config, 1, 1024, "float32")
    alone = need()
    weights = model.load_stats.weight_bytes
    temporaries = program_parts(model.config, 16, 1, 9)["temporaries"]  # of a prompt's bucket
    assert weights + cache + temporaries < alone < weights + 1.1 * cache + temporaries
    assert need(draft=model) == alone + cache
    assert need(n=4) == alone + 3 * (alone - weights - temporaries)
    assert need(n=3) == need(n=4)  # rows come in powers of two
    assert need(logits=True) == alone + 1024 * 4 * model.config.vocab_size
    beams = needed_bytes(
        lambda: xj.beam_search(
            model.params, model.config, [1], num_beams=4, max_new_tokens=1000, capacity=1024
        )
    )
    assert beams == need(n=4)


def test_weights_that_need_too_much_memory(small, tmp_path):
    small(40_000)
    config = from_hf(tiny.CONFIG)
    path = tiny.write(tmp_path)
    size = needed_bytes(lambda: xj.init_params(config, jax.random.key(0), "float32"))
    assert size == sum(tensor.nbytes for tensor in tiny.tensors().values())
    assert needed_bytes(lambda: xj.load_model(path, "float32")) == size
    assert needed_bytes(lambda: xj.load_model(path, "bfloat16")) == size // 2
    assert tree_bytes(xj.load_model(path, "float32", "int8").params) < 40_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "gear", "float8_e4m3fn"])
def test_bytes_of_a_cache(dtype):
    config = from_hf(tiny.CONFIG | WINDOWS)
    cache = xj.init_cache(config, 2, 1024, dtype)
    fixed = sum(k.basis.nbytes for k in (*cache.k, *cache.v)) if dtype == "gear" else 0
    assert cache_bytes(config, 2, 1024, dtype) == tree_bytes((cache.k, cache.v)) - fixed


def test_the_limit_of_the_process_counts(monkeypatch):
    device.memory_bytes.cache_clear()
    size = device.memory_bytes()
    assert 2**28 < size < 2**50
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**9, -1))
    device.memory_bytes.cache_clear()
    assert device.memory_bytes() <= np.minimum(size, 10**9)
    device.memory_bytes.cache_clear()
