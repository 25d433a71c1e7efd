"""Compiles a program at two depths for a GPU or TPU, and reports per layer, beside the layers and for the
whole model: bytes, launched operations, copies, loops, predicates, collectives, temporaries, beside the bytes
that it has to move; of a TPU also estimated times.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from bench.model_work import bytes_per_pass, expert_fraction, prefill_work
from jax.sharding import Mesh

import kernels_pallas
from gpu.card_specs import Card, Tpu
from gpu.hlo_text import Module, parse_module
from gpu.known_choices import KnownChoices
from gpu.machine_code import assemble, empty, pallas_ptx
from gpu.operation_bytes import PALLAS
from gpu.plan_estimates import Job, device_weights, indivisible_sizes, visible_kv_bytes
from gpu.program_counts import Counts, Operation, ProgramCounter, whole_copies
from gpu.programs import (
    DRAFT_TOKENS,
    LOOPS,
    ProgramJob,
    find_call,
    layer_period,
    target_card,
    to_shapes,
    with_held_adapters,
)
from xinfer_jax.adapters.adapter import row_matrices
from xinfer_jax.cache.kv_cache import empty_layers, state_bytes
from xinfer_jax.cache.paged import PAGE_SIZE, empty_pools
from xinfer_jax.checkpoint.sharded_leaves import sharded_shapes
from xinfer_jax.engine.pages import num_pages_for
from xinfer_jax.errors import InputError
from xinfer_jax.sharding import MODEL, check_mesh
from xinfer_jax.weights.params import param_specs, tree_bytes
from xinfer_jax.weights.resharding import with_repeated_kv_heads

MIB = 2**20
_MOST_LAYERS = 48  # of a model that is compiled for a TPU as it is


# --- the job ------------------------------------------------------------------------------------------------


class _Jobs(NamedTuple):
    """Two equal jobs."""

    whole: ProgramJob  # parameters are sharded over the mesh
    of_device: ProgramJob  # the sizes of one device


def _at_depth(full: ProgramJob, weights: str, count: int, mesh: Mesh) -> _Jobs:
    """The job of a model with its first layers only."""
    config = dataclasses.replace(full.config, num_hidden_layers=count)
    job = Job(config, weights, full.cache_dtype, full.rows, full.capacity, full.chunk)
    n = mesh.size
    if sizes := indivisible_sizes(job, n):
        raise InputError(f"{n} devices do not divide {sizes}")
    part = device_weights(job, n)
    if n == 1:
        whole = dataclasses.replace(full, config=config, params=to_shapes(part, mesh))
        return _Jobs(with_held_adapters(whole), whole)
    params = jax.tree.map(partial(sharded_shapes, mesh=mesh, devices=n), param_specs(config), part)
    config = with_repeated_kv_heads(config, n)
    of_device = dataclasses.replace(
        config, num_key_value_heads=config.num_key_value_heads // n, vocab_size=-(-config.vocab_size // n)
    )
    return _Jobs(
        dataclasses.replace(full, config=config, params=params),
        dataclasses.replace(full, config=of_device, params=part),
    )


def _chosen_depths(full: ProgramJob, card: Card | Tpu) -> tuple[int, int]:
    """Two depths whose difference is that of whole periods of layers. For a TPU the model's own, unless it is
    deep, and one whose layers have twice the weights that VMEM holds, since XLA keeps those of fewer layers
    there during the whole loop.
    """
    period = layer_period(full.config)
    layers = full.config.num_hidden_layers
    if isinstance(card, Card):
        return 2 * period, 4 * period
    of_layer = tree_bytes(full.params["layers"]) / layers
    few = max(1, math.ceil(2 * card.vmem_mib * MIB / of_layer / period)) * period
    if layers > _MOST_LAYERS:
        return few, few + 4 * period
    return (few, layers) if few < layers else (max(1, layers // 2), layers)


def _leaf_shapes(job: ProgramJob, program: str) -> list[tuple[int, ...]]:
    """Shapes of weights, dequantized weights, caches and of the pages of all rows."""
    shapes = [x.shape for x in jax.tree.leaves(job.params) if len(x.shape) > 1]
    # Two weights in a byte.
    shapes += [(2, *x.shape) for x in jax.tree.leaves(job.params) if x.dtype == "uint8"]
    config = job.config
    caches: Any = jax.eval_shape(lambda: empty_layers(config, job.rows, job.capacity, job.kv))
    if program.startswith("engine"):
        pages = job.rows * num_pages_for(job.capacity) + 1
        caches = caches, jax.eval_shape(lambda: empty_pools(config, pages, job.kv))
        slots = num_pages_for(job.capacity) * PAGE_SIZE
        shapes += [
            (rows, mixer.fits[0], slots, width * mixer.fits[1])
            for rows in {1, job.rows}
            for width in (1, 2)  # keys and values may be side by side
            for mixer in config.cached_mixers
            if mixer.has_keys
        ]
    return shapes + [x.shape for x in jax.tree.leaves(caches) if len(x.shape) > 2]


def least_bytes(job: ProgramJob, program: str) -> dict[str, float]:
    """Bytes that a step or call has to move: weights (of experts those chosen), valid keys and values,
    recurrent states read and written, the rows' adapters, and the logits written once and read once.
    """
    config = job.config
    rows = 1 if program == "engine_prefill" else job.rows
    tokens = {
        "prefill": job.length,
        "engine_prefill": job.chunk,
        "verify": 1 + (job.draft_tokens or DRAFT_TOKENS),
        "engine_decode": 1 + job.draft_tokens,
    }.get(program, 1)
    weights = bytes_per_pass(job.params)
    experts = tree_bytes([layer.get("experts", ()) for layer in job.params["layers"]])
    weights -= (1 - expert_fraction(config, rows * tokens)) * experts
    length = job.length + (tokens - 1) * (program in LOOPS)
    keys = rows * visible_kv_bytes(config, job.kv, length)
    positions = rows * (tokens if program in LOOPS else 1)
    least = {"weights": weights, "keys and values": keys, "logits": 2 * 4 * positions * config.vocab_size}
    if job.adapters:
        numbers = sum(job.rank * sum(spec.shape) for spec in row_matrices(config).values())
        itemsize = job.params["final_norm"].dtype.itemsize
        least["adapters"] = min(rows, job.adapters) * numbers * itemsize
    of_state = state_bytes(config)
    return least | ({"states": 2 * rows * of_state} if of_state else {})


# --- compiling ----------------------------------------------------------------------------------------------


class _MachineProgram(NamedTuple):
    """A compiled program."""

    module: Module
    temporaries: int  # bytes
    # That XLA's cost model has, with one iteration of each loop of unknown trip count; 0: it gives none.
    xla_bytes: float
    # Registers and spilled bytes of a GPU's Pallas kernels that no earlier program of the process has.
    kernels: list[dict[str, Any]]


class _Compiled(NamedTuple):
    """A program of so many layers, and what it does."""

    layers: int
    program: _MachineProgram
    step: Counts  # of one iteration of the outermost loop, or of the whole call
    around: Counts  # before and after the loop
    step_copies: list[Operation]  # of whole leaves
    around_copies: list[Operation]
    uncounted: dict[str, str]  # why bytes of kernels are those of declared operands


# By their text before compilation: settings do not change a program.
_programs: dict[str, _MachineProgram] = {}


def _compile_program(jobs: _Jobs, program: str, card: Card | Tpu, mesh: Mesh, folder: str) -> _Compiled:
    """Compiles one of `PROGRAMS`, and counts it. folder: where this process writes PTX."""
    call = find_call(jobs.whole, program)
    leaves = _leaf_shapes(jobs.of_device, program)
    with target_card(card, mesh):
        traced = call.program.trace(*to_shapes(call.args, mesh))
        empty(folder)
        lowered = traced.lower(lowering_platforms=(card.platform,))
        text = f"{card.name}: {lowered.as_text()}"
        if text not in _programs:
            compiled = lowered.compile()
            kernels = [
                dict(kernel=name, **assemble(card.capability, path)) for name, path in pallas_ptx(folder)
            ]
            temporaries = compiled.memory_analysis().temp_size_in_bytes
            xla_bytes = (compiled.cost_analysis() or {}).get("bytes accessed", 0.0)
            module = parse_module(compiled.as_text())
            _programs[text] = _MachineProgram(module, temporaries, xla_bytes, kernels)
    compiled_program = _programs[text]
    module = compiled_program.module
    is_loop = program in LOOPS
    choices = KnownChoices(traced.jaxpr, call.args, module, is_loop, card.platform)
    counter = ProgramCounter(module, choices, card if isinstance(card, Tpu) else None, mesh.size)
    step, around = counter.step_and_around() if is_loop else (counter.of_call(), Counts())
    copies = (whole_copies(counts, leaves) for counts in (step, around))
    layers = jobs.whole.config.num_hidden_layers
    return _Compiled(layers, compiled_program, step, around, *copies, choices.uncounted)


# --- the report ---------------------------------------------------------------------------------------------

_PARTS = ("per_layer", "beside", "whole")
_FIGURES: dict[str, Callable[[_Compiled], float]] = {
    "bytes": lambda c: c.step.bytes,
    "seconds": lambda c: c.step.seconds,
    "kernels": lambda c: c.step.launches,
    "copies": lambda c: sum(o.times for o in c.step_copies),
    "copied_bytes": lambda c: sum(o.bytes for o in c.step_copies),
    "unknown_loops": lambda c: len(c.step.unknown_loops),
    "predicates": lambda c: c.step.predicates,
    "around_copies": lambda c: sum(o.times for o in c.around_copies),
    "around_copied_bytes": lambda c: sum(o.bytes for o in c.around_copies),
    "temporaries": lambda c: c.program.temporaries,
    "call_bytes": lambda c: c.step.bytes + c.around.bytes,
    "xla_bytes": lambda c: c.program.xla_bytes,
}
_TITLES = {
    "bytes": ("MB moved", 1e6), "seconds": ("us, estimated", 1e-6),
    "kernels": ("operations launched", 1),
    "copies": ("copies of weights or cache", 1), "copied_bytes": ("  MB", 1e6),
    "unknown_loops": ("loops, unknown trip count", 1), "predicates": ("predicates on a GPU's host", 1),
    "around_copies": ("around the loop: such copies", 1), "around_copied_bytes": ("  MB", 1e6),
    "temporaries": ("MiB of temporaries", MIB),
}  # fmt: skip


def report(
    full: ProgramJob, weights: str, program: str, card: Card | Tpu, folder: str,
    depths: Sequence[int] | None, devices: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Figures of a program: counted at two depths, per layer, and scaled to the model's depth.

    Args:
        full: the job at the model's depth; its params are those of one device.
        weights: format of the weights.
        program: one of `PROGRAMS`.
        card: to compile for.
        folder: where this process writes PTX (`machine_code.dump_settings`).
        depths: numbers of layers to compile, the smaller one first; one number: a model of so many layers,
            without figures per layer; None: two that suit the card.
        devices: of a TPU mesh that the model is sharded over; then all figures are those of one device.
    """
    mesh = check_mesh(card.mesh(devices, MODEL)) if devices > 1 else card.mesh()
    depths = depths or _chosen_depths(full, card)
    with kernels_pallas.assume_device(card.capability, card.name, card.platform):  # for the form of arrays
        jobs = [_at_depth(full, weights, n, mesh) for n in depths]
        *fewer, more = (_compile_program(job, program, card, mesh, folder) for job in jobs)
        layers = full.config.num_hidden_layers if len(depths) > 1 else depths[0]
        full = _at_depth(full, weights, layers, mesh).of_device

    def parts(of: Callable[[_Compiled], float]) -> dict[str, float]:
        per_layer = 0.0
        for few in fewer:
            per_layer = (of(more) - of(few)) / (more.layers - few.layers)
        whole = of(more) + per_layer * (layers - more.layers)
        return {"per_layer": per_layer, "beside": whole - layers * per_layer, "whole": whole}

    figures = {name: parts(of) for name, of in _FIGURES.items()}
    least = least_bytes(full, program)
    least_seconds = sum(least.values()) / card.memory_gbs / 1e9
    seconds = figures["seconds"]["whole"]
    result: dict[str, Any] = dict(
        program=program,
        layers=layers,
        depths=depths,
        **{part: {name: of[part] for name, of in figures.items()} for part in _PARTS},
        least=least,
        ratio=figures["bytes"]["whole"] / sum(least.values()),
        temporaries_limit=64 * MIB + least["logits"],
        kinds={kind: _of_kind(kind, parts) for kind in more.step.by_kind},
        collectives=dict(more.step.collectives),
        unknown_branches=more.step.unknown_branches,
        declared=more.uncounted,
        kernels=_kernels(more.step),
        compiled=list({str(k): k for of in (*fewer, more) for k in of.program.kernels}.values()),
        copied=_copies(more.step_copies, "step") + _copies(more.around_copies, "around"),
        largest=[
            (o.name, o.kind, o.times, o.read, o.written, o.alone, o.seconds, o.op_name)
            for o in sorted(
                more.step.operations, key=lambda o: (-o.times * max(o.alone, o.seconds), -o.bytes)
            )[:32]
        ],
    )
    if isinstance(card, Tpu):
        result |= dict(
            seconds=seconds, least_seconds=least_seconds, time_ratio=seconds / least_seconds,
            gbs=card.memory_gbs, ghz=card.ghz,
        )  # fmt: skip
        if "prefill" in program:
            lengths = [full.chunk] if program == "engine_prefill" else [full.length] * full.rows
            flop = prefill_work(full.config, 0, lengths).flop
            result["of_matrix_rate"] = flop / seconds / card.tflops / 1e12 / devices
    return result


def _of_kind(kind: str, parts: Any) -> dict[str, float]:
    """How often a kind of operation runs, its bytes and its seconds, of the whole model."""
    none = (0.0, 0.0, 0.0)
    return {
        name: parts(lambda c, i=i: c.step.by_kind.get(kind, none)[i])["whole"]
        for i, name in enumerate(("times", "bytes", "seconds"))
    }


def _kernels(counts: Counts) -> list[dict[str, Any]]:
    """One entry for each different Pallas kernel."""
    found: dict[Any, dict[str, Any]] = {}
    for o in counts.operations:
        if o.kind in PALLAS.values():
            key = o.op_name, o.read, o.written
            entry = dict(op_name=o.op_name, bytes=o.read + o.written, seconds=o.alone, declared=o.declared)
            found.setdefault(key, entry | {"launches": 0})["launches"] += o.times
    return list(found.values())


def _copies(operations: list[Operation], where: str) -> list[tuple[str, str, str, float, float, str]]:
    return [(where, o.name, str(o.copied[0]), o.bytes, o.alone * o.times, o.op_name) for o in operations]


def print_report(result: dict[str, Any], all_operations: bool) -> None:
    """Prints the figures of one program. all_operations: those that move most or take longest, too."""
    depth = f"{result['layers']} layers"
    print(f"{result['program']:34}{'a layer':>12}{'beside':>12}{depth:>12}  (compiled: {result['depths']})")
    for name, (title, unit) in _TITLES.items():
        if "seconds" not in name or "seconds" in result:
            print(f"  {title:32}" + "".join(f"{result[part][name] / unit:12,.2f}" for part in _PARTS))
    least = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in result["least"].items())
    limit = result["temporaries_limit"] / MIB
    print(
        f"  moved / least: {result['ratio']:.3f} (least, MB: {least}); temporaries at most {limit:,.1f} MiB"
    )
    if of_xla := result["whole"]["xla_bytes"]:
        counted = result["whole"]["call_bytes"]
        print(f"  a step and around it: {counted / 1e6:,.1f} MB, by XLA's cost model {of_xla / 1e6:,.1f}")
    if "seconds" in result:
        print(
            f"  time / reading the least: {result['time_ratio']:.3f} ({result['seconds'] * 1e6:,.0f} us by"
            f" {result['least_seconds'] * 1e6:,.0f} at {result['gbs']:,} GB/s; cycles at {result['ghz']} GHz)"
        )
    if "of_matrix_rate" in result:
        print(f"  {result['of_matrix_rate']:.1%} of the matrix rate")
    _print_operations(result, all_operations)
    if result["collectives"]:
        print(f"  collectives: {result['collectives']}")
    for name, (size, launches) in result["unknown_branches"].items():
        more = f"moves {size / 1e6:,.1f} MB more in {launches:g} more operations"
        print(f"  {name} depends on data; its other branch {more}")
    for path, why in result["declared"].items():
        print(f"  bytes of the kernel at {path} are those of its operands: {why}")


def _print_operations(result: dict[str, Any], all_operations: bool) -> None:
    kinds = sorted(result["kinds"].items(), key=lambda item: (-item[1]["seconds"], -item[1]["bytes"]))
    for kind, of in kinds:
        print(f"  {kind:24}{of['times']:9,.0f}x{of['bytes'] / 1e6:12,.1f} MB{of['seconds'] * 1e6:12,.1f} us")
    for kernel in result["kernels"]:
        how = "declared operands, no products" if kernel["declared"] else f"{kernel['seconds'] * 1e6:,.1f} us"
        print(
            f"  Pallas {kernel['launches']:g}x {kernel['bytes'] / 1e6:,.3f} MB ({how}): {kernel['op_name']}"
        )
    for kernel in result["compiled"]:
        print(f"  {kernel['kernel']}: {kernel['registers']} registers, {kernel['spill_bytes']} bytes spilled")
    _print_copies(result["copied"])
    for name, kind, times, read, written, alone, seconds, op_name in result["largest"] * all_operations:
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
