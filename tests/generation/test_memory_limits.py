"""Calls that need more memory than there is raise one line with the bytes, before any is allocated.

`MemoryPlan` is compared with `memory_analysis` of the programs of a call and of an engine: it is never below,
and at most 15% above.
"""

import re
import resource

import jax
import numpy as np
import pytest
import tiny
from quick import full_except

import xinfer_jax as xj
from xinfer_jax import device
from xinfer_jax.cache.kv_cache import cache_bytes
from xinfer_jax.cache.paged import PAGE_SIZE
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.engine.engine_device import Device
from xinfer_jax.engine.engine_options import EngineOptions
from xinfer_jax.engine.shape import engine_shape
from xinfer_jax.families.reading import from_hf
from xinfer_jax.generation.batch_arrays import (
    generation_plan,
    initial_state,
    new_cache,
    pad_prompts,
    prompt_of_row,
)
from xinfer_jax.generation.executor import RunnableModel
from xinfer_jax.generation.loop import TracedExecutor
from xinfer_jax.generation.strategies import Plain
from xinfer_jax.generation.validation import validate_call
from xinfer_jax.layerwise.precompile import shape_struct
from xinfer_jax.memory_plan import MemoryPlan, program_parts
from xinfer_jax.model.extras import NO_EXTRAS
from xinfer_jax.sampling.sampling_config import SamplingConfig
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


MANY = xj.GenerateOptions(max_tokens=5 * 10**8)
CALLS = {
    "generate": lambda model: xj.generate(model.params, model.config, [[1]], MANY),
    "stream": lambda model: next(xj.stream(model.params, model.config, [[1]], MANY)),
    "text": lambda model: xj.generate_text(model, "Hi", MANY),
    "beam_search": lambda model: xj.beam_search(model.params, model.config, [1], max_tokens=5 * 10**8),
    "cache": lambda model: xj.init_cache(model.config, 1, 5 * 10**8),
    "int4 cache": lambda model: xj.init_cache(model.config, 1, 5 * 10**8, "int4"),
    "capacity": lambda model: xj.generate(
        model.params, model.config, [[1]], xj.GenerateOptions(capacity=5 * 10**8)
    ),
    "logits": lambda model: xj.generate(
        model.params, model.config, [[1]], xj.GenerateOptions(max_tokens=2**25, logits=True)
    ),
    "answers": lambda model: xj.generate(
        model.params, model.config, [[1]], xj.GenerateOptions(max_tokens=2**20, n=100)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_needs_too_much_memory_raises(model, small, name):
    assert needed_bytes(lambda: CALLS[name](model)) > 2**34


@pytest.mark.full
def test_bytes_of_a_call(model, small):
    """A draft model has a cache too; so have each answer and each beam."""
    small(0)

    def need(**options):
        options = xj.GenerateOptions(max_tokens=1000, capacity=1024, **options)
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
        lambda: xj.beam_search(model.params, model.config, [1], num_beams=4, max_tokens=1000, capacity=1024)
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


# --- the plan -----------------------------------------------------------------------------------------------

# The proportions of a real model: a model as small as others in the tests needs more for a chunk than for its
# weights.
CONFIG = dict(
    model_type="qwen2", vocab_size=16000, hidden_size=512, intermediate_size=1536, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
WIDE = CONFIG | dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14)
MODELS = {
    "float32": (CONFIG, "float32", None),
    "bfloat16": (CONFIG, "bfloat16", None),
    "int8": (WIDE, "float32", "int8"),
    "windows": (
        CONFIG | dict(model_type="gemma3_text", head_dim=128, sliding_window=64, sliding_window_pattern=2),
        "float32",
        None,
    ),
    "experts": (
        CONFIG
        | dict(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
        | dict(head_dim=64),
        "float32",
        None,
    ),
}


class _Recorder:
    """The `run` of an executor that compiles programs, and keeps the bytes of the largest."""

    most = 0

    def __call__(self, program, *args):
        traced = program.trace(*jax.tree.map(shape_struct, args))
        memory = traced.lower().compile().memory_analysis()
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        size = memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes
        self.most = max(self.most, size)
        return traced.out_info


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_plan_of_a_call_bounds_what_its_programs_need(name, monkeypatch):
    """Prefill and decoding, each of the whole model."""
    hf, dtype, quantize = MODELS[name]
    rows, tokens = (4, 20) if name in ("bfloat16", "windows") else (1, 100)
    config = from_hf(hf)
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), dtype, quantize))
    options = xj.GenerateOptions(max_tokens=100, sampling=SamplingConfig(temperature=1.0), eos_token_ids=())
    call = validate_call(params, config, [[0] * tokens] * rows, options, jax.random.key(0))
    monkeypatch.setattr("xinfer_jax.generation.batch_arrays.executor_class", lambda _: TracedExecutor)
    plan = generation_plan(call, call.rows)
    recorder = _Recorder()
    executor = TracedExecutor(RunConfig(), recorder)
    cache = jax.eval_shape(lambda: new_cache(call, params, config, call.capacity, call.rows))
    prompts = pad_prompts(call.prompts, call.capacity, call.prompt_rows)
    out = executor.prefill(RunnableModel(params, config), prompts, cache)
    state, _ = executor.sample(out.hidden, initial_state(call, prompt_of_row(call)))
    executor.decode(Plain(config), (params, NO_EXTRAS), (state, out.cache), 2)
    assert recorder.most <= plan.total <= 1.15 * recorder.most, (plan.total / recorder.most, str(plan))


@pytest.mark.parametrize("name", full_except((), ["bfloat16", "int8", "windows"], ["bfloat16", "windows"]))
def test_plan_of_an_engine_bounds_what_its_programs_need(name, monkeypatch):
    """Prefill of a chunk, and decoding, each of the whole model."""
    hf, dtype, quantize = MODELS[name]
    config = from_hf(hf)
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), dtype, quantize))
    options = EngineOptions(rows=32, capacity=1024, chunk=128, pages=32 * 1024 // PAGE_SIZE + 1)
    shape = engine_shape(xj.Model(params, config), options)
    plan = shape.memory_plan(params, config)
    monkeypatch.setattr("xinfer_jax.engine.engine_device.executor_class", lambda _: TracedExecutor)
    recorder = _Recorder()
    device = Device(params, config, shape, recorder, dry_run=True)
    device.stages()["greedy"]()
    device.prefill(0, [0] * (1024 // PAGE_SIZE), [0] * 128, 0, 1024, True)
    assert recorder.most <= plan.total <= 1.15 * recorder.most, (plan.total / recorder.most, str(plan))


def test_a_plan_prints_its_parts():
    plan = MemoryPlan(dict(weights=3 * 2**20, states=0, cache=2**25), fraction=0.5)
    assert str(plan) == "weights (1.5 MiB) + cache (16 MiB)"
    assert plan.total == 3 * 2**19 + 2**24
    with pytest.raises(xj.InputError, match=r"cache \(16 MiB\) need [\d,]+ bytes of memory.* 5: use less"):
        plan.check("use less", have=5)
