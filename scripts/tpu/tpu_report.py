"""Compiles a program for a TPU at two depths, and reports per layer, beside the layers and for the whole
model: bytes of HBM, time by kind of operation, copies of whole weights and caches, temporaries.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from bench.model_work import prefill_work
from gpu.hlo_text import parse_module
from gpu.known_choices import KnownChoices
from gpu.plan_estimates import Job, device_weights, indivisible_sizes
from gpu.program_report import MIB, at_depth, leaf_shapes, least_bytes
from gpu.programs import LOOPS, ProgramJob, find_call, layer_period, target_card, to_shapes, with_layers
from jax.sharding import Mesh

import kernels_pallas
from tpu.kernel_dma import kernel_work
from tpu.tpu_counts import TpuCounter
from tpu.tpu_specs import Tpu
from tpu.tpu_time import Operation, TpuCounts
from xinfer_jax.checkpoint.sharded_leaves import sharded_shapes, with_repeated_kv_heads
from xinfer_jax.errors import InputError
from xinfer_jax.sharding import MODEL, check_mesh
from xinfer_jax.weights.params import param_specs, tree_bytes

_MOST_LAYERS = 48  # of a model that is compiled as it is
_LEAST_LEAF = 2**16  # elements: smaller arrays may have the size of activations


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """A program of so many layers."""

    layers: int
    step: TpuCounts  # of one iteration of the outermost loop, or of the whole call
    around: TpuCounts  # before and after the loop
    temporaries: int  # bytes
    step_copies: list[Operation]  # of whole leaves
    around_copies: list[Operation]
    uncounted: dict[str, str]  # why kernels could not be counted


def _compile_program(jobs: "_Jobs", program: str, tpu: Tpu, mesh: Mesh) -> _Compiled:
    """Compiles one of `PROGRAMS` for a TPU, and counts it."""
    with kernels_pallas.assume_device(tpu.capability, tpu.name, tpu.platform):  # for the form of caches
        call = find_call(jobs.whole, program)
        leaves = {math.prod(shape) for shape in leaf_shapes(jobs.of_device, program)}
    is_loop = program in LOOPS
    with target_card(tpu, mesh):
        traced = call.program.trace(*to_shapes(call.args, mesh))
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    module = parse_module(compiled.as_text())
    choices = KnownChoices(traced.jaxpr, call.args, module, is_loop, "tpu", kernel_work)
    counter = TpuCounter(module, tpu, choices, mesh.size)
    step, around = counter.step_and_around() if is_loop else (counter.of_call(), TpuCounts())
    sizes = {size for size in leaves if size >= _LEAST_LEAF}
    return _Compiled(
        jobs.whole.config.num_hidden_layers,
        step,
        around,
        compiled.memory_analysis().temp_size_in_bytes,
        _whole_copies(step, sizes),
        _whole_copies(around, sizes),
        choices.uncounted,
    )


def _whole_copies(counts: TpuCounts, sizes: set[int]) -> list[Operation]:
    return [o for o in counts.operations if any(array.size in sizes for array in o.copied)]


def chosen_depths(full: ProgramJob, tpu: Tpu) -> tuple[int, int]:
    """Two depths whose difference is that of whole periods of layers: the model's own, unless it is deep, and
    one whose layers have twice the weights that VMEM holds, since XLA keeps those of fewer layers there
    during the whole loop.
    """
    period = layer_period(full.config)
    layers = full.config.num_hidden_layers
    of_layer = tree_bytes(full.params["layers"]) / layers
    few = max(1, math.ceil(2 * tpu.vmem_mib * MIB / of_layer / period)) * period
    if layers > _MOST_LAYERS:
        return few, few + 4 * period
    return (few, layers) if few < layers else (max(1, layers // 2), layers)


def report(
    full: ProgramJob, weights: str, program: str, tpu: Tpu, depths: tuple[int, ...] | None, devices: int = 1
) -> dict[str, Any]:
    """Figures of a program: counted at two depths, per layer, and scaled to the model's depth.

    Args:
        full: the job at the model's depth; its params are those of one device.
        weights: format of the weights.
        program: one of `PROGRAMS`.
        tpu: to compile for.
        depths: numbers of layers to compile, the smaller one first; one number: a model of so many layers,
            without figures per layer; None: `chosen_depths`.
        devices: of a mesh that the model is sharded over; then all figures are those of one device. More than
            one: only programs of an engine.
    """
    mesh = check_mesh(tpu.mesh(devices, MODEL)) if devices > 1 else tpu.mesh()
    depths = depths or chosen_depths(full, tpu)
    *fewer, more = (
        _compile_program(_at_depth(full, weights, n, mesh, tpu), program, tpu, mesh) for n in depths
    )
    full_depth = full.config.num_hidden_layers if len(depths) > 1 else depths[0]
    full = _at_depth(full, weights, full_depth, mesh, tpu).of_device
    layers = full.config.num_hidden_layers

    def parts(of: Callable[[_Compiled], float]) -> dict[str, float]:
        per_layer = 0.0
        for few in fewer:
            per_layer = (of(more) - of(few)) / (more.layers - few.layers)
        whole = of(more) + per_layer * (layers - more.layers)
        return {"per_layer": per_layer, "beside": whole - layers * per_layer, "whole": whole}

    figures = {name: parts(of) for name, of in _FIGURES.items()}
    least = least_bytes(full, program)
    least_seconds = sum(least.values()) / tpu.memory_gbs / 1e9
    result: dict[str, Any] = dict(
        program=program,
        layers=layers,
        depths=depths,
        per_layer={name: of["per_layer"] for name, of in figures.items()},
        beside={name: of["beside"] for name, of in figures.items()},
        whole={name: of["whole"] for name, of in figures.items()},
        least=least,
        ratio=figures["bytes"]["whole"] / sum(least.values()),
        seconds=figures["seconds"]["whole"],
        least_seconds=least_seconds,
        time_ratio=figures["seconds"]["whole"] / least_seconds,
        kinds={kind: _of_kind(kind, parts) for kind in more.step.by_kind},
        collectives=dict(more.step.collectives),
        unknown_branches=more.step.unknown_branches,
        declared=more.uncounted,
        kernels=_kernels(more.step),
        copied=_copies(more.step_copies, "step") + _copies(more.around_copies, "around"),
        largest=[
            (o.name, o.kind, o.times, o.read, o.written, o.alone, o.seconds, o.op_name)
            for o in sorted(more.step.operations, key=lambda o: -o.times * max(o.alone, o.seconds))[:32]
        ],
    )
    if program in ("prefill", "engine_prefill"):
        result["of_matrix_rate"] = _of_matrix_rate(full, program, tpu, result["seconds"]) / devices
    return result


class _Jobs(NamedTuple):
    """Two equal jobs."""

    whole: ProgramJob  # parameters are sharded over the mesh
    of_device: ProgramJob  # the sizes of one device


def _at_depth(full: ProgramJob, weights: str, count: int, mesh: Mesh, tpu: Tpu) -> _Jobs:
    """The job of a model with its first layers only."""
    with kernels_pallas.assume_device(tpu.capability, tpu.name, tpu.platform):  # for the form of weights
        return _jobs_at_depth(full, weights, count, mesh)


def _jobs_at_depth(full: ProgramJob, weights: str, count: int, mesh: Mesh) -> _Jobs:
    n = mesh.size
    if n == 1:
        job = at_depth(full, weights, count, mesh)
        return _Jobs(job, job)
    config = with_layers(full.config, count)
    job = Job(config, weights, full.cache_dtype, full.rows, full.capacity, full.chunk)
    if sizes := indivisible_sizes(job, n):
        raise InputError(f"{n} devices do not divide {sizes}")
    part = device_weights(job, n)
    to_sharded = partial(sharded_shapes, mesh=mesh, devices=n)
    params = jax.tree.map(to_sharded, param_specs(config), part)
    config = with_repeated_kv_heads(config, n)
    of_device = dataclasses.replace(
        config,
        num_key_value_heads=config.num_key_value_heads // n,
        vocab_size=-(-config.vocab_size // n),
    )
    return _Jobs(
        dataclasses.replace(full, config=config, params=params),
        dataclasses.replace(full, config=of_device, params=part),
    )


_FIGURES: dict[str, Callable[[_Compiled], float]] = {
    "bytes": lambda c: c.step.bytes,
    "seconds": lambda c: c.step.seconds,
    "seconds_apart": lambda c: c.step.seconds_apart,
    "operations": lambda c: c.step.launches,
    "copies": lambda c: sum(o.times for o in c.step_copies),
    "copied_bytes": lambda c: sum(o.bytes for o in c.step_copies),
    "unknown_loops": lambda c: len(c.step.unknown_loops),
    "around_copies": lambda c: sum(o.times for o in c.around_copies),
    "around_copied_bytes": lambda c: sum(o.bytes for o in c.around_copies),
    "around_bytes": lambda c: c.around.bytes,
    "around_seconds": lambda c: c.around.seconds,
    "temporaries": lambda c: c.temporaries,
}


def _of_kind(kind: str, parts: Any) -> dict[str, float]:
    """How often a kind of operation runs, its bytes and its seconds, of the whole model."""
    names = ("times", "bytes", "seconds")
    none = (0.0, 0.0, 0.0)
    return {
        name: parts(lambda c, i=i: c.step.by_kind.get(kind, none)[i])["whole"] for i, name in enumerate(names)
    }


def _of_matrix_rate(job: ProgramJob, program: str, tpu: Tpu, seconds: float) -> float:
    """The part of the matrix rate at which a prefill computes what it has to."""
    start = 0
    lengths = [job.length] * job.rows
    if program == "engine_prefill":
        start = max(0, job.length - job.chunk)
        lengths = [job.chunk]
    return prefill_work(job.config, start, lengths).flop / seconds / tpu.tflops / 1e12


def _kernels(counts: TpuCounts) -> list[dict[str, Any]]:
    """One entry for each different Pallas kernel."""
    found: dict[Any, dict[str, Any]] = {}
    for o in counts.operations:
        if o.kind == "Pallas":
            key = o.op_name, o.read, o.written
            entry = dict(op_name=o.op_name, bytes=o.read + o.written, seconds=o.alone, declared=o.is_declared)
            found.setdefault(key, entry | {"launches": 0})["launches"] += o.times
    return list(found.values())


def _copies(operations: list[Operation], where: str) -> list[tuple[str, str, str, float, float, str]]:
    return [(where, o.name, str(o.copied[0]), o.bytes, o.alone * o.times, o.op_name) for o in operations]


def print_report(result: dict[str, Any], tpu: Tpu, all_operations: bool) -> None:
    """Prints the figures of one program.

    Args:
        result: from `report`.
        tpu: that it was compiled for.
        all_operations: print the operations that take longest, too.
    """
    parts = ("per_layer", "beside", "whole")
    depth = f"{result['layers']} layers"
    print(f"{result['program']:34}{'a layer':>12}{'beside':>12}{depth:>12}  (compiled: {result['depths']})")
    for name, title, unit in (
        ("bytes", "MB of HBM", 1e6), ("seconds", "us, estimated", 1e-6),
        ("seconds_apart", "us, nothing runs beside", 1e-6), ("operations", "operations", 1),
        ("copies", "copies of weights or cache", 1), ("copied_bytes", "  MB", 1e6),
        ("unknown_loops", "loops, unknown trip count", 1),
        ("around_copies", "around the loop: such copies", 1), ("around_copied_bytes", "  MB", 1e6),
        ("around_bytes", "around the loop: MB of HBM", 1e6), ("around_seconds", "  us", 1e-6),
        ("temporaries", "MiB of temporaries", MIB),
    ):  # fmt: skip
        print(f"  {title:32}" + "".join(f"{result[part][name] / unit:12,.2f}" for part in parts))
    least = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in result["least"].items())
    print(f"  HBM / least: {result['ratio']:.3f} (least, MB: {least})")
    print(
        f"  time / reading the least: {result['time_ratio']:.3f} ({result['seconds'] * 1e6:,.0f} us by"
        f" {result['least_seconds'] * 1e6:,.0f} at {tpu.memory_gbs:,} GB/s; cycles at {tpu.ghz} GHz)"
    )
    if "of_matrix_rate" in result:
        print(f"  {result['of_matrix_rate']:.1%} of the matrix rate, {tpu.tflops:,} TFLOP/s")
    kinds = sorted(result["kinds"].items(), key=lambda item: -item[1]["seconds"])
    for kind, of in kinds:
        print(f"  {kind:24}{of['times']:9,.0f}x{of['bytes'] / 1e6:12,.1f} MB{of['seconds'] * 1e6:12,.1f} us")
    for kernel in result["kernels"]:
        how = "declared operands, no products" if kernel["declared"] else f"{kernel['seconds'] * 1e6:,.1f} us"
        print(
            f"  Pallas {kernel['launches']:g}x {kernel['bytes'] / 1e6:,.3f} MB ({how}): {kernel['op_name']}"
        )
    _print_copies(result["copied"])
    if result["collectives"]:
        print(f"  collectives: {result['collectives']}")
    for name in result["unknown_branches"]:
        print(f"  {name} depends on data; its shorter branch is counted")
    for path, why in result["declared"].items():
        print(f"  the kernel at {path} is not counted but by its operands: {why}")
    if all_operations:
        for name, kind, times, read, written, alone, seconds, op_name in result["largest"]:
            print(
                f"  {times:6g}x {read / 1e6:9.3f} + {written / 1e6:8.3f} MB {alone * 1e6:9.1f} us alone,"
                f" {seconds * 1e6:9.1f} {kind:12} {name}: {op_name}"
            )


def _print_copies(copied: list[Any]) -> None:
    """Prints copies, those of one form in one line."""
    found: dict[Any, list[float]] = {}
    for where, _, array, size, seconds, op_name in copied:
        of_one = found.setdefault((where, array, op_name), [0, 0.0, 0.0])
        for i, more in enumerate((1, size, seconds)):
            of_one[i] += more
    for (where, array, op_name), (count, size, seconds) in found.items():
        print(f"  COPY {where}: {count:g}x {array} {size / 1e6:,.2f} MB, {seconds * 1e6:,.0f} us: {op_name}")
