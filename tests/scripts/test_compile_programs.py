"""scripts/compile_programs.py: what it counts in the text of a compiled program and in kernels, and that the
counts of a small configuration stay.
"""

import importlib.util
from collections import Counter
from collections.abc import Callable

import compiled_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import known_choices
from gpu.hlo_text import parse_module
from gpu.kernel_bytes import kernel_bytes
from gpu.kernel_refs import UncountableError
from gpu.known_values import Evaluator, Observer, known_leaf
from gpu.program_counts import Choices, ProgramCounter, whole_copies
from jax import lax

import kernels_pallas
import xinfer_jax as xj
from xinfer_jax.weights.params import tree_bytes

# Upper bounds for one row of the 0.5B shape, H200, bfloat16. Lower them when the programs launch less.
LAYER_KERNELS = 8
BESIDE_KERNELS = 31
RATIO = 1.02  # bytes moved by those that a step has to move
PREDICATES = 2  # of the loop, and whether all rows are greedy

TEXT = """HloModule jit_f, is_scheduled=true

FileNames
1 "/a/loop.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

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
  %either = (s32[]) conditional(%p.9, %given, %given), true_computation=%then, false_computation=%else, metadata={op_name="jit(f)/while/body/cond" stack_frame_id=1}
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
  %loop = (s32[], bf16[8,64]{1,0}) while(%fixed), condition=%test, body=%body, metadata={op_name="jit(f)/while" stack_frame_id=1}
  ROOT %out = bf16[8,64]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
ROW = 64 * 2  # bytes
INDEX = 4


class FiveTrips(Choices):
    def trips(self, loop):
        return 5


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
@pytest.mark.parametrize("name", ["float32", "int8", "prefill", "loop"])
def test_counts_are_what_a_cpu_executes(name, tmp_path):
    """Operations by name, from a trace of the call; bytes of arguments and results from XLA's buffers. Bytes
    of operations lie between those of all weights and those of XLA's cost model, which counts what a fusion
    slices or updates whole.
    """
    function, args = calibrated(name)
    compiled = jax.jit(function).lower(*args).compile()
    module = parse_module(compiled.as_text())
    counts = ProgramCounter(module, FiveTrips()).of_call()
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
    for operation in counts.operations:
        counted[operation.name] += operation.times
    assert +counted == executed and sum(executed.values()) > 100

    entry = module.computations[module.entry]
    memory = compiled.memory_analysis()
    arguments = sum(i.bytes for i in entry.instructions if i.opcode == "parameter")
    assert arguments == memory.argument_size_in_bytes
    assert (
        entry.root.bytes + 8 * len(entry.root.arrays) == memory.output_size_in_bytes
    )  # and a pointer to each
    once = ProgramCounter(module).of_call().bytes
    assert tree_bytes(args[0]) < once < compiled.cost_analysis()["bytes accessed"]


def test_bytes_of_fusions_are_those_of_their_slices():
    counts = ProgramCounter(parse_module(TEXT)).step_and_around()[0]
    found = {launch.name: (launch.read, launch.written) for launch in counts.operations}
    assert found["row"] == (ROW, ROW)
    assert found["written"] == (ROW, ROW)
    assert found["copied"] == (8 * ROW + 8 * INDEX, 8 * ROW)


def test_a_gather_of_a_whole_leaf_is_a_copy_and_an_update_is_none():
    counts = ProgramCounter(parse_module(TEXT)).step_and_around()[0]
    assert [launch.name for launch in whole_copies(counts, [(8, 64)], least=1)] == ["copied"]
    assert whole_copies(counts, [(8, 64)]) == []  # so small that activations may have the size
    assert whole_copies(counts, [(16, 64)], least=1) == []


class Choice(Choices):
    def __init__(self, index, trips):
        self._index = index
        self._trips = trips

    def branch(self, conditional):
        assert conditional.op_name == "jit(f)/while/body/cond"
        return self._index

    def trips(self, loop):
        return self._trips


def test_loops_branches_and_collectives():
    module = parse_module(TEXT)
    assert module.lines[1] == ("/a/loop.py", 7)
    counts = ProgramCounter(module, Choice(1, 5)).of_call()
    launched = Counter()
    for launch in counts.operations:
        launched[launch.name] += launch.times
    assert launched["copy.1"] == 3  # of the known trip count
    assert launched["row"] == launched["copy.9"] == 5
    assert launched["less"] == 6  # the test of the other loop
    assert counts.unknown_loops == ["loop"]
    assert counts.predicates == 6 + 5
    assert counts.collectives == {"all-reduce": 5, "all-reduce bytes": 5 * 8 * ROW}
    assert "copy.9" not in {x.name for x in ProgramCounter(module, Choice(0, 5)).of_call().operations}
    unknown = ProgramCounter(module).step_and_around()[0]
    assert unknown.unknown_branches == {"either": (0, 1)}  # the smaller one is counted


@pytest.mark.newest
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="kernels are other primitives before jax 0.12")
@pytest.mark.parametrize("impl", ["mosaic", "triton"])
@pytest.mark.parametrize("length, window", [(40, None), (300, None), (300, 100), (1024, None)])
def test_bytes_of_a_kernel_follow_the_length(impl, length, window):
    B, K, G, S, H = 3, 2, 4, 4096, 64
    cache = jax.ShapeDtypeStruct((B, K, S, H), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((B, 1, K * G, H), jnp.bfloat16)
    lengths = np.full(B, length, np.int32)
    row = jax.ShapeDtypeStruct((B,), jnp.int32)
    jaxpr = jax.make_jaxpr(
        lambda *args: kernels_pallas.run_kernel(impl, "decode_attention", *args, scale=1.0, window=window)
    )(q, cache, cache, row, row)
    found = []

    class Kernels(Observer):
        def on_kernel(self, place, equation, values):
            found.append((kernel_bytes(equation, values), sum(var.aval.size * 4 for var in equation.outvars)))

    known = [known_leaf(lengths - 1), known_leaf(lengths)]
    Evaluator(Kernels()).closed(jaxpr, [None, None, None, *known], ())
    counted, outputs = found[0]  # Triton has a second kernel, which merges the splits
    first = 0 if window is None else (length - window) // 64 * 64
    end = -(-length // 64) * 64 if impl == "mosaic" else length  # Mosaic loads whole blocks
    keys = 2 * B * K * (end - first) * H * 2
    queries = B * K * 8 * H * 2  # padded to 8 by Mosaic
    rest = counted[0] - keys
    assert 0 < rest <= queries + outputs + 8 * B


def test_each_program_names_its_kernels_that_cannot_be_counted(monkeypatch):
    """Also if an earlier program had the kernel: a report takes the reasons from the last one."""

    def uncountable(*_):
        raise UncountableError("an unknown primitive")

    monkeypatch.setattr(known_choices, "kernel_bytes", uncountable)
    monkeypatch.setattr(known_choices, "_counted", {})
    logits = jax.ShapeDtypeStruct((2, 70), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x: kernels_pallas.run_kernel("triton", "argmax", x))(logits)
    for _ in range(2):
        choices = known_choices.KnownChoices(jaxpr, (logits,), parse_module(TEXT), False)
        assert choices.uncounted == {"": "an unknown primitive"}


@pytest.mark.newest
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="kernels are other primitives before jax 0.12")
@pytest.mark.parametrize("used", [False, True])
def test_what_rows_do_not_use_is_not_read(used):
    """The bias and the seen tokens of the pass over the logits."""
    B, V = 3, 5000
    logits_BV, bias_BV = jax.ShapeDtypeStruct((B, V), np.float32), jax.ShapeDtypeStruct((B, V), np.float32)
    seen_BV = jax.ShapeDtypeStruct((B, V), bool)
    penalty_B = np.full(B, 1 + used, np.float32)
    biased_B = np.full(B, used)
    jaxpr = jax.make_jaxpr(lambda *args: kernels_pallas.run_kernel("triton", "summarize_logits", *args))(
        logits_BV, penalty_B, seen_BV, bias_BV, biased_B
    )
    found = []

    class Kernels(Observer):
        def on_kernel(self, place, equation, values):
            found.append(kernel_bytes(equation, values)[0])

    known = [None, known_leaf(penalty_B), None, None, known_leaf(biased_B)]
    Evaluator(Kernels()).closed(jaxpr, known, ())
    (counted,) = found
    read = B * V * (4 + used * (4 + 1))
    assert read < counted < read + B * V * 4 // 32  # and the results


@pytest.mark.full
@pytest.mark.newest
@pytest.mark.skipif(not importlib.util.find_spec("jax_plugins"), reason="jax's CUDA plug-in is not installed")
def test_counts_of_a_small_configuration_stay():
    counted = compiled_programs.run("--target=h200", "--program=decode", "--layers=1,2")
    (decode,) = counted["programs"]
    assert decode["per_layer"]["kernels"] <= LAYER_KERNELS
    assert decode["beside"]["kernels"] <= BESIDE_KERNELS
    assert decode["per_layer"]["unknown_loops"] == 0
    assert decode["whole"]["predicates"] <= PREDICATES
    assert decode["whole"]["copies"] == 0, decode["copied"]
    assert decode["ratio"] <= RATIO
    assert decode["whole"]["temporaries"] <= decode["temporaries_limit"]
    assert decode["declared"] == {}, "bytes of a kernel could not be counted"
    assert not decode["unknown_branches"]
    kernels = counted["kernels"]
    # Append, attention, four products, the greedy token; of other rows the pass over the logits.
    assert len(kernels) == 8, kernels
    assert not any(kernel["spill_bytes"] for kernel in kernels), kernels
