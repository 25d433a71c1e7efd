"""scripts/compile_programs.py for TPUs: bytes of layouts and operations, and that the counts of a small
configuration stay.
"""

import compiled_programs
import pytest
from gpu.hlo_text import parse_module
from gpu.program_counts import ProgramCounter

# Upper bounds for two layers of the 0.5B shape, eight rows, bfloat16. Lower them when the program does less.
MOST_BYTES = 1.02  # of HBM, by those that a step has to move


TEXT = """HloModule jit_f, is_scheduled=true

%slice_of (p: f32[1024,128], i: s32[]) -> f32[8,128] {
  %p = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %z = s32[]{:T(128)} constant(0)
  ROOT %slice = f32[8,128]{1,0:T(8,128)S(1)} dynamic-slice(%p, %i, %z), dynamic_slice_sizes={8,128}
}

%update_of (q: f32[1024,128], new: f32[8,128], j: s32[]) -> f32[1024,128] {
  %q = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %new = f32[8,128]{1,0:T(8,128)S(1)} parameter(1)
  %j = s32[]{:T(128)} parameter(2)
  %y = s32[]{:T(128)} constant(0)
  ROOT %update = f32[1024,128]{1,0:T(8,128)} dynamic-update-slice(%q, %new, %j, %y)
}

%scatter_of (r: bf16[8,2,4096,64], at: s32[8,2], rows: bf16[8,2,64]) -> bf16[8,2,4096,64] {
  %r = bf16[8,2,4096,64]{3,1,2,0:T(2,128)(2,1)} parameter(0)
  %at = s32[8,2]{1,0:T(8,128)S(1)} parameter(1)
  %rows = bf16[8,2,64]{2,1,0:T(2,128)(2,1)S(1)} parameter(2)
  ROOT %scatter = bf16[8,2,4096,64]{3,1,2,0:T(2,128)(2,1)} scatter(%r, %at, %rows), update_window_dims={1,2}, inserted_window_dims={0,2}, scatter_dims_to_operand_dims={0,2}, index_vector_dim=1, to_apply=%add
}

%product_of (a: f32[8,1024], w: f32[1024,128]) -> f32[8,128] {
  %a = f32[8,1024]{1,0:T(8,128)S(1)} parameter(0)
  %w = f32[1024,128]{1,0:T(8,128)} parameter(1)
  ROOT %conv = f32[8,128]{1,0:T(8,128)S(1)} convolution(%a, %w), dim_labels=bf_io->bf
}

%tiles_of (u: f32[1024,128]) -> f32[1024,128] {
  %u = f32[1024,128]{1,0:T(8,128)} parameter(0)
  ROOT %other = f32[1024,128]{1,0:T(4,128)} copy(%u)
}

%view_of (v: f32[1024,128], m: s32[]) -> f32[8,128] {
  %v = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %m = s32[]{:T(128)} parameter(1)
  %view = f32[1024,128]{1,0:T(4,128)} fusion(%v), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%tiles_of
  ROOT %of_view = f32[8,128]{1,0:T(8,128)} dynamic-slice(%view, %m, %m), dynamic_slice_sizes={8,128}
}

%nested_of (t: f32[1024,128], k: s32[]) -> f32[8,128] {
  %t = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %k = s32[]{:T(128)} parameter(1)
  ROOT %inner = f32[8,128]{1,0:T(8,128)} fusion(%t, %k), kind=kLoop, calls=%slice_of
}

%test (s: (s32[], f32[1024,128])) -> pred[] {
  %s = (s32[]{:T(128)}, f32[1024,128]{1,0:T(8,128)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %less = pred[]{:T(512)} compare(%n, %n), direction=LT
}

%body (s.1: (s32[], f32[1024,128])) -> (s32[], f32[1024,128]) {
  %s.1 = (s32[]{:T(128)}, f32[1024,128]{1,0:T(8,128)}) parameter(0)
  %n.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
  %x = f32[1024,128]{1,0:T(8,128)} get-tuple-element(%s.1), index=1
  %row = f32[8,128]{1,0:T(8,128)S(1)} fusion(%x, %n.1), kind=kLoop, calls=%slice_of
  %written = f32[1024,128]{1,0:T(8,128)} fusion(%x, %row, %n.1), kind=kLoop, calls=%update_of
  ROOT %next = (s32[]{:T(128)}, f32[1024,128]{1,0:T(8,128)}) tuple(%n.1, %written)
}

ENTRY %main (a.1: f32[8,1024], w.1: f32[1024,128], kv: bf16[8,2,4096,64], rows.1: bf16[8,2,64], at.1: s32[8,2]) -> f32[1024,128] {
  %a.1 = f32[8,1024]{1,0:T(8,128)S(1)} parameter(0)
  %w.1 = f32[1024,128]{1,0:T(8,128)} parameter(1)
  %kv = bf16[8,2,4096,64]{3,1,2,0:T(2,128)(2,1)} parameter(2)
  %rows.1 = bf16[8,2,64]{2,1,0:T(2,128)(2,1)S(1)} parameter(3)
  %at.1 = s32[8,2]{1,0:T(8,128)S(1)} parameter(4)
  %zero = s32[]{:T(128)} constant(0)
  %copy-start.1 = (f32[1024,128]{1,0:T(8,128)S(1)}, f32[1024,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w.1)
  %product = f32[8,128]{1,0:T(8,128)S(1)} fusion(%a.1, %w.1), kind=kOutput, calls=%product_of, backend_config={"window_config":{"estimated_cycles":"175"}}
  %copy-done.1 = f32[1024,128]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  %appended = bf16[8,2,4096,64]{3,1,2,0:T(2,128)(2,1)} fusion(%kv, %at.1, %rows.1), kind=kCustom, calls=%scatter_of
  %relaid = bf16[8,2,4096,64]{2,3,1,0:T(8,128)(2,1)} copy(%appended), backend_config={"window_config":{"estimated_cycles":"1750000"}}
  %slice-start.1 = ((f32[1024,128]{1,0:T(8,128)}), f32[256,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%w.1), slice={[0:256], [0:128]}
  %slice-done.1 = f32[256,128]{1,0:T(8,128)S(1)} slice-done(%slice-start.1)
  %nested = f32[8,128]{1,0:T(8,128)S(1)} fusion(%w.1, %zero), kind=kOutput, calls=%nested_of
  %viewed = f32[8,128]{1,0:T(8,128)S(1)} fusion(%w.1, %zero), kind=kLoop, calls=%view_of
  %state = (s32[]{:T(128)}, f32[1024,128]{1,0:T(8,128)}) tuple(%zero, %w.1)
  %fixed = (s32[]{:T(128)}, f32[1024,128]{1,0:T(8,128)}) while(%state), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %loop = (s32[]{:T(128)}, f32[1024,128]{1,0:T(8,128)}) while(%fixed), condition=%test, body=%body
  ROOT %out = f32[1024,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
WEIGHTS = 1024 * 128 * 4
ROWS = 8 * 128 * 4
CACHE = 8 * 2 * 4096 * 64 * 2


def operations(counts):
    return {operation.name: operation for operation in counts}


def test_bytes_of_hbm_by_layouts_slices_updates_and_loops():
    counts = ProgramCounter(parse_module(TEXT), trips=5, is_tpu=True).of_call()
    found = operations(counts)
    moved = {name: (o.read, o.written) for name, o in found.items()}
    assert moved["copy-start.1"] == (WEIGHTS, 0)
    assert moved["product"] == (WEIGHTS, 0)
    assert moved["appended"] == (0, 8 * 2 * 64 * 2)  # rows of both heads, in place
    assert moved["relaid"] == (CACHE, CACHE)
    assert moved["slice-start.1"] == (256 * 128 * 4, 0)
    assert moved["row"] == moved["nested"] == moved["viewed"] == (ROWS, 0)
    assert moved["written"] == (0, ROWS)
    assert sum(o.times for o in counts if o.name == "row") == 3 + 5
    assert ProgramCounter(parse_module(TEXT), is_tpu=True).of_step().bytes == 2 * ROWS
    assert [array.size for array in found["relaid"].copied] == [CACHE // 2]
    assert not found["copy-start.1"].copied and not found["appended"].copied


@pytest.mark.full
@pytest.mark.newest
def test_counts_of_a_tpu_program_stay():
    counted = compiled_programs.run("--target=v6e", "--program=decode", "--layers=2", "--rows=8")
    (decode,) = counted["programs"]
    whole = decode["whole"]
    assert whole["copies"] == 0, decode["copied"]
    # Of a layer the append, attention and four products; the greedy token.
    assert sum(decode["kernels"].values()) == 2 * 6 + 1, decode["kernels"]
    assert 0.8 < decode["ratio"] < MOST_BYTES  # VMEM may hold some weights of so few layers
