"""`MemoryPlan` against `memory_analysis` of the programs of a call and of an engine: never below, and at most
15% above.
"""

import jax
import pytest

import xinfer_jax as xj
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
from xinfer_jax.memory_plan import MemoryPlan
from xinfer_jax.model.extras import NO_EXTRAS
from xinfer_jax.sampling.sampling_config import SamplingConfig

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
    options = xj.GenerateOptions(100, SamplingConfig(temperature=1.0), eos_token_ids=())
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


@pytest.mark.full
@pytest.mark.parametrize("name", ["bfloat16", "int8", "windows"])
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
