"""scripts/compile_programs.py: what it counts in the text of a compiled program, and that the counts of a
small configuration stay.
"""

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Callable

import compiled_programs
import jax
import jax.numpy as jnp
import pytest
from gpu.hlo_text import parse_module
from gpu.program_counts import ProgramCounter
from gpu.program_report import least_bytes
from gpu.programs import ProgramJob
from jax import lax

import xinfer_jax as xj
from xinfer_jax.estimates.model_shapes import hf_config
from xinfer_jax.estimates.plan_estimates import device_weights
from xinfer_jax.families.reading import from_hf
from xinfer_jax.weights.params import tree_bytes

# Upper bounds for one row of the 0.5B shape, H200, bfloat16. Lower them when the programs launch less.
LAYER_LAUNCHES = 8
BESIDE_LAUNCHES = 31
RATIO = 1.02  # bytes moved by those that a step has to move
TEMPORARIES = 64 * 2**20  # bytes, without the logits

TEXT = """HloModule jit_f, is_scheduled=true

%fused_slice (p: bf16[8,64], i: s32[]) -> bf16[1,64] {
  %p = bf16[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %c = s32[] constant(0)
  ROOT %slice = bf16[1,64]{1,0} dynamic-slice(%p, %i, %c), dynamic_slice_sizes={1,64}
}

%fused_update (p.1: bf16[8,64], new: bf16[1,64], i.1: s32[]) -> bf16[8,64] {
  %p.1 = bf16[8,64]{1,0} parameter(0)
  %new = bf16[1,64]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %c.1 = s32[] constant(0)
  ROOT %update = bf16[8,64]{1,0} dynamic-update-slice(%p.1, %new, %i.1, %c.1)
}

%fused_gather (p.2: bf16[8,64], j: s32[8,1]) -> bf16[8,64] {
  %p.2 = bf16[8,64]{1,0} parameter(0)
  %j = s32[8,1]{1,0} parameter(1)
  ROOT %gathered = bf16[8,64]{1,0} gather(%p.2, %j), offset_dims={1}, slice_sizes={1,64}
}

%then (t: (s32[])) -> (s32[]) {
  %t = (s32[]) parameter(0)
  %t.0 = s32[] get-tuple-element(%t), index=0
  %copy.9 = s32[] copy(%t.0)
  ROOT %t.1 = (s32[]) tuple(%copy.9)
}

%else (e: (s32[])) -> (s32[]) {
  ROOT %e = (s32[]) parameter(0)
}

%test (state: (s32[], bf16[8,64])) -> pred[] {
  %state = (s32[], bf16[8,64]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%n, %n), direction=LT
}

%body (state.1: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {
  %state.1 = (s32[], bf16[8,64]{1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%state.1), index=0
  %x = bf16[8,64]{1,0} get-tuple-element(%state.1), index=1
  %row = bf16[1,64]{1,0} fusion(%x, %n.1), kind=kLoop, calls=%fused_slice
  %written = bf16[8,64]{1,0} fusion(%x, %row, %n.1), kind=kLoop, calls=%fused_update
  %index = s32[8,1]{1,0} iota(), iota_dimension=0
  %copied = bf16[8,64]{1,0} fusion(%written, %index), kind=kLoop, calls=%fused_gather
  %all-reduce.1 = bf16[8,64]{1,0} all-reduce(%copied), replica_groups={}, to_apply=%add
  %given = (s32[]) tuple(%n.1)
  %p.9 = pred[] constant(true)
  %either = (s32[]) conditional(%p.9, %given, %given), true_computation=%then, false_computation=%else, metadata={op_name="jit(f)/while/body/cond"}
  ROOT %next = (s32[], bf16[8,64]{1,0}) tuple(%n.1, %all-reduce.1)
}

%inner (state.2: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {
  %state.2 = (s32[], bf16[8,64]{1,0}) parameter(0)
  %n.2 = s32[] get-tuple-element(%state.2), index=0
  %copy.1 = s32[] copy(%n.2)
  %x.2 = bf16[8,64]{1,0} get-tuple-element(%state.2), index=1
  ROOT %next.2 = (s32[], bf16[8,64]{1,0}) tuple(%copy.1, %x.2)
}

ENTRY %main (a: s32[], b: bf16[8,64]) -> bf16[8,64] {
  %a = s32[] parameter(0)
  %b = bf16[8,64]{1,0} parameter(1)
  %first = (s32[], bf16[8,64]{1,0}) tuple(%a, %b)
  %fixed = (s32[], bf16[8,64]{1,0}) while(%first), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %loop = (s32[], bf16[8,64]{1,0}) while(%fixed), condition=%test, body=%body, metadata={op_name="jit(f)/while"}
  ROOT %out = bf16[8,64]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
ROW = 64 * 2  # bytes
INDEX = 4


def calibrated(name: str) -> tuple[Callable, tuple]:
    """A function of the library, and its arguments."""
    model = xj.load_model(quantize="int8" if name == "int8" else None)
    params, config = model.params, model.config
    cache = xj.init_cache(config, 2, 64)
    if name == "prefill":
        tokens_BT = jnp.zeros((2, 20), jnp.int32)
        args = params, tokens_BT, jnp.full(2, 20), cache
        return lambda params, *others: xj.prefill(params, config, *others), args

    def step(params, token_B, cache):
        return xj.decode_step(params, config, token_B, cache)

    def five_steps(params, token_B, cache):
        def body(state):
            (logits_BV, cache) = step(params, *state[1:])
            return state[0] - 1, jnp.argmax(logits_BV, -1).astype(jnp.int32), cache

        return lax.while_loop(lambda state: state[0] > 0, body, (5 + token_B[0], token_B, cache))

    return five_steps if name == "loop" else step, (params, jnp.zeros(2, jnp.int32), cache)


@pytest.mark.full
@pytest.mark.newest
@pytest.mark.parametrize("name", ["int8", "prefill", "loop"])
def test_counts_are_what_a_cpu_executes(name, tmp_path):
    """Operations by name, from a trace of the call. Bytes of operations lie between those of all weights and
    those of XLA's cost model, which counts what a fusion slices or updates whole.
    """
    function, args = calibrated(name)
    compiled = jax.jit(function).lower(*args).compile()
    module = parse_module(compiled.as_text())
    counts = ProgramCounter(module, trips=5).of_call()
    jax.block_until_ready(compiled(*args))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(compiled(*args))
    (file,) = tmp_path.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = (event.name for plane in planes for line in plane.lines for event in line.events)
    opcodes = {i.name: i.opcode for c in module.computations.values() for i in c.instructions}
    parts = None, "while", "call", "conditional"
    executed = Counter(event for event in events if opcodes.get(event) not in parts)
    counted = Counter()
    for operation in counts:
        counted[operation.name] += operation.times
    assert +counted == executed and sum(executed.values()) > 100

    once = ProgramCounter(module).of_call().bytes
    assert tree_bytes(args[0]) < once < compiled.cost_analysis()["bytes accessed"]


def test_bytes_of_fusions_are_those_of_their_slices():
    counts = ProgramCounter(parse_module(TEXT)).of_step()
    found = {launch.name: (launch.read, launch.written) for launch in counts}
    assert found["row"] == (ROW, ROW)
    assert found["written"] == (ROW, ROW)
    assert found["copied"] == (8 * ROW + 8 * INDEX, 8 * ROW)


def test_a_gather_of_a_whole_leaf_is_a_copy_and_an_update_is_none():
    counts = ProgramCounter(parse_module(TEXT)).of_step()
    assert [launch.name for launch in counts.whole_copies([(8, 64)], least=1)] == ["copied"]
    assert counts.whole_copies([(8, 64)]) == []  # so small that activations may have the size
    assert counts.whole_copies([(16, 64)], least=1) == []


def test_loops_and_branches():
    module = parse_module(TEXT)
    counts = ProgramCounter(module, trips=5).of_call()
    launched = Counter()
    for launch in counts:
        launched[launch.name] += launch.times
    assert launched["copy.1"] == 3  # of the known trip count
    assert launched["row"] == 5 and "copy.9" not in launched
    assert launched["less"] == 6  # the test of the other loop
    step = ProgramCounter(module).of_step()
    assert {"row", "all-reduce.1"} <= {x.name for x in step}
    assert "copy.9" in {x.name for x in step}, "the last branch"
    other = ProgramCounter(module, branch=0).of_step()
    assert other.launches == step.launches - 1


def test_a_kernel_moves_what_its_caller_says():
    call = '%kernel = bf16[8,64]{1,0} custom-call(%b), custom_call_target="mosaic_gpu_v2"'
    module = parse_module(TEXT.replace("%fixed = ", f"{call}\n  %fixed = "))
    for count, wanted in ((None, 2 * 8 * ROW), (lambda call, operands: float(len(operands)), 1.0)):
        (kernel,) = [x for x in ProgramCounter(module, count).of_call() if x.name == "kernel"]
        assert (kernel.kind, kernel.bytes) == ("mosaic", wanted)


def test_a_head_reads_its_weights_and_the_output_matrix_for_each_draft_token():
    config = from_hf(hf_config("qwen2.5-0.5b"))
    params = device_weights(config, "bfloat16", 1)
    job = ProgramJob(config, params, jnp.bfloat16, 8, 2048, 1024, draft_tokens=3)
    with_head = job.with_head()
    params = device_weights(with_head.config, "bfloat16", 1)
    least = least_bytes(dataclasses.replace(with_head, params=params), "mtp")
    assert least["head's weights"] == 3 * tree_bytes(params["draft_head"])
    assert least["head's output matrix"] == 3 * tree_bytes(params["embed"])  # the model is tied
    assert least["head's keys and values"] == 8 * (1024 + 1025 + 1026) * 2 * 2 * 64 * 2
    of_model = least_bytes(job, "verify")
    assert {name: least[name] for name in of_model} == of_model


@pytest.mark.full
@pytest.mark.newest
@pytest.mark.skipif(not importlib.util.find_spec("jax_plugins"), reason="jax's CUDA plug-in is not installed")
def test_counts_of_a_small_configuration_stay():
    counted = compiled_programs.run("--target=h200", "--program=decode", "--layers=1,2")
    (decode,) = counted["programs"]
    assert decode["per_layer"]["launches"] <= LAYER_LAUNCHES
    assert decode["beside"]["launches"] <= BESIDE_LAUNCHES
    assert decode["whole"]["copies"] == 0, decode["copied"]
    assert decode["ratio"] <= RATIO
    assert decode["whole"]["temporaries"] <= TEMPORARIES + decode["least"]["logits"]
    # Of each of two layers the append, attention and four products; the greedy token.
    assert sum(decode["kernels"].values()) == 2 * 6 + 1, decode["kernels"]


@pytest.mark.soak
@pytest.mark.newest
@pytest.mark.skipif(not importlib.util.find_spec("jax_plugins"), reason="jax's CUDA plug-in is not installed")
def test_a_draft_head_reads_its_cache_once():
    flags = "--rows=8", "--capacity=2048", "--draft_tokens=1"
    counted = compiled_programs.run("--target=h200", "--program=mtp", "--layers=1", *flags)
    (step,) = counted["programs"]
    assert step["whole"]["copies"] == 0, step["copied"]
    assert step["ratio"] <= RATIO
    attention = [
        n
        for path, n in step["kernels"].items()
        if path.endswith("run_layer)/cond/branch_0_fun/kernel/mpmd_map")
    ]
    assert attention == [2], step["kernels"]  # of the model's layer and of the head
