"""Compiles a program at two depths, and reports per layer and for the whole model: bytes, launches, copies,
loops, predicates, collectives, temporaries, beside the bytes that it has to move.
"""

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import jax
from bench.model_work import bytes_per_pass, expert_fraction
from jax.sharding import Mesh

from gpu.gpu_specs import Card
from gpu.hlo_text import Module, parse_module
from gpu.known_choices import KnownChoices
from gpu.machine_code import assemble, empty, pallas_ptx
from gpu.plan_estimates import Job, device_weights, visible_kv_bytes
from gpu.program_counts import PALLAS, Counts, count_program, whole_copies
from gpu.programs import (
    DRAFT_TOKENS,
    LOOPS,
    ProgramJob,
    find_call,
    layer_period,
    target_card,
    to_shapes,
    with_layers,
)
from xinfer_jax.cache.kv_cache import empty_layers, state_bytes
from xinfer_jax.cache.paged import PAGE_SIZE, empty_pools
from xinfer_jax.engine.pages import num_pages_for
from xinfer_jax.weights.params import tree_bytes

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program of so many layers."""

    layers: int
    counts: Counts
    temporaries: int  # bytes
    copies: list[Any]  # launches that copy or gather a whole leaf
    uncounted: dict[str, str]  # why bytes of kernels are those of declared operands
    # Registers and spilled bytes of the Pallas kernels that no earlier program of the process has.
    kernels: list[dict[str, Any]]


class MachineProgram(NamedTuple):
    """A compiled program."""

    module: Module
    temporaries: int  # bytes
    # Registers and spilled bytes of the Pallas kernels that no earlier program of the process has.
    kernels: list[dict[str, Any]]


# By their text before compilation: settings do not change a program.
_compiled: dict[str, MachineProgram] = {}


def compile_program(job: ProgramJob, program: str, card: Card, mesh: Mesh, folder: str) -> Compiled:
    """Compiles one of `PROGRAMS` for a card, and counts it. folder: where this process writes PTX."""
    call = find_call(job, program)
    with target_card(card, mesh):
        traced = call.program.trace(*to_shapes(call.args, mesh))
        empty(folder)
        lowered = traced.lower()
        text = f"{card.name}: {lowered.as_text()}"
        if text not in _compiled:
            _compiled[text] = _compile(lowered, card, folder)
    module, temporaries, kernels = _compiled[text]
    choices = KnownChoices(traced.jaxpr, call.args, module, program in LOOPS)
    counts = count_program(module, choices, program in LOOPS)
    copies = whole_copies(counts, leaf_shapes(job, program))
    return Compiled(job.config.num_hidden_layers, counts, temporaries, copies, choices.uncounted, kernels)


def _compile(lowered: Any, card: Card, folder: str) -> MachineProgram:
    compiled = lowered.compile()
    kernels = [dict(kernel=name, **assemble(card.capability, path)) for name, path in pallas_ptx(folder)]
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return MachineProgram(parse_module(compiled.as_text()), temporaries, kernels)


def leaf_shapes(job: ProgramJob, program: str) -> list[tuple[int, ...]]:
    """Shapes of weights, dequantized weights, caches and of the pages of all rows."""
    shapes = [x.shape for x in jax.tree.leaves(job.params) if len(x.shape) > 1]
    for x in jax.tree.leaves(job.params):
        if x.dtype == "uint8":  # two weights in a byte
            shapes.append((2, *x.shape))
    config = job.config
    caches: Any = jax.eval_shape(lambda: empty_layers(config, job.rows, job.capacity, job.kv))
    if program.startswith("engine"):
        caches = caches, jax.eval_shape(lambda: empty_pools(config, num_pages(job), job.kv))
        slots = num_pages_for(job.capacity) * PAGE_SIZE
        for rows in {1, job.rows}:
            for width in (1, 2):  # keys and values may be side by side
                for layer in config.layers_with_kv:
                    shapes.append((rows, config.kv_heads(layer), slots, width * config.head_width(layer)))
    for x in jax.tree.leaves(caches):
        if len(x.shape) > 2:
            shapes.append(x.shape)
    return shapes


def num_pages(job: ProgramJob) -> int:
    """Pages of an engine, including the one that no row uses."""
    return job.rows * num_pages_for(job.capacity) + 1


def least_bytes(job: ProgramJob, program: str) -> dict[str, float]:
    """Bytes that a step or call has to move: weights (of experts those chosen), valid keys and values,
    recurrent states read and written, and the logits written once and read once.
    """
    config = job.config
    rows = 1 if program == "engine_prefill" else job.rows
    tokens = {
        "prefill": job.length,
        "engine_prefill": job.chunk,
        "verify": 1 + (job.draft_tokens or DRAFT_TOKENS),
    }.get(program, 1)
    if program == "engine_decode" and job.draft_tokens:
        tokens = 1 + job.draft_tokens
    params = job.params
    weights = bytes_per_pass(params)
    experts = tree_bytes([layer.get("experts", ()) for layer in params["layers"]])
    weights -= (1 - expert_fraction(config, rows * tokens)) * experts
    length = job.length + (tokens - 1) * (program in LOOPS)
    keys = rows * visible_kv_bytes(config, job.kv, length)
    positions = rows * (tokens if program in LOOPS else 1)
    least = {"weights": weights, "keys and values": keys, "logits": 2 * 4 * positions * config.vocab_size}
    return least | ({"states": 2 * rows * state_bytes(config)} if config.linear_attention else {})


def report(  # noqa: PLR0913
    full: ProgramJob, weights: str, program: str, card: Card, folder: str, depths: tuple[int, int] | None
) -> dict[str, Any]:
    """Figures of a program: counted at two depths, per layer, and scaled to the model's depth.

    Args:
        full: the job at the model's depth; its params are those of one device.
        weights: format of the weights.
        program: one of `PROGRAMS`.
        card: to compile for.
        folder: where this process writes PTX (`machine_code.dump_settings`).
        depths: numbers of layers to compile; None: two and four times the period of its kinds of layers.
    """
    mesh = card.mesh()
    period = layer_period(full.config)
    depths = depths or (2 * period, 4 * period)
    few, more = (
        compile_program(at_depth(full, weights, n, mesh), program, card, mesh, folder) for n in depths
    )
    layers = full.config.num_hidden_layers
    between = more.layers - few.layers

    def per_layer(of: Any) -> float:
        return (of(more) - of(few)) / between

    def of_model(of: Any) -> float:
        return of(few) + per_layer(of) * (layers - few.layers)

    figures = {
        "bytes": lambda c: c.counts.bytes,
        "kernels": lambda c: c.counts.kernels,
        "unknown_loops": lambda c: len(c.counts.unknown_loops),
        "predicates": lambda c: c.counts.predicates,
        "copies": lambda c: sum(launch.times for launch in c.copies),
        "copied_bytes": lambda c: sum(launch.bytes for launch in c.copies),
        "temporaries": lambda c: c.temporaries,
    }
    least = least_bytes(full, program)
    limit = sum(least.values())
    moved = of_model(figures["bytes"])
    result: dict[str, Any] = dict(
        program=program,
        layers=layers,
        per_layer={name: per_layer(of) for name, of in figures.items()},
        beside={name: of_model(of) - layers * per_layer(of) for name, of in figures.items()},
        whole={name: of_model(of) for name, of in figures.items()},
        least=least,
        ratio=moved / limit,
        temporaries_limit=64 * MIB + least["logits"],
        collectives=dict(more.counts.collectives),
        kinds_per_layer=_difference(more.counts.kinds, few.counts.kinds, between),
        unknown_branches=more.counts.unknown_branches,
        declared=more.uncounted,
        kernels=_pallas(more.counts),
        compiled=[kernel for kernel in few.kernels if kernel not in more.kernels] + more.kernels,
        copied=[(x.name, str(x.copied[0]), x.bytes, x.op_name) for x in more.copies],
        largest=[
            (x.name, x.kind, x.times, x.read, x.written, x.op_name)
            for x in sorted(more.counts.launches, key=lambda x: -x.bytes)[:16]
        ],
    )
    return result


def at_depth(full: ProgramJob, weights: str, count: int, mesh: Mesh) -> ProgramJob:
    """The job of a model with its first layers only."""
    config = with_layers(full.config, count)
    params = device_weights(Job(config, weights, full.cache_dtype, full.rows, full.capacity, full.chunk), 1)
    return dataclasses.replace(full, config=config, params=to_shapes(params, mesh))


def _difference(more: Counter, few: Counter, between: int) -> dict[str, float]:
    return {kind: (more[kind] - few[kind]) / between for kind in more if more[kind] != few[kind]}


def _pallas(counts: Counts) -> list[dict[str, Any]]:
    """One entry for each different Pallas kernel."""
    found: dict[Any, dict[str, Any]] = {}
    for x in counts.launches:
        if x.kind in PALLAS.values():
            key = x.op_name, x.read, x.written
            entry = dict(op_name=x.op_name, bytes=x.read + x.written, declared=x.declared)
            found.setdefault(key, entry | {"launches": 0})["launches"] += x.times
    return list(found.values())
