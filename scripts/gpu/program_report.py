"""Compiles a program at two depths for a GPU or TPU, and reports bytes, launched operations, copies and
temporaries of a step: per layer, next to the layers, and for the whole model. The bytes that a step has to
move are next to them.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from gpu.hlo_text import Array, Instruction, Module, parse_module
from gpu.operation_bytes import PALLAS
from gpu.program_counts import Counts, KernelBytes, Operation, ProgramCounter
from gpu.programs import DRAFTING, LOOPS, ProgramJob, find_call, layer_period, target_card, to_shapes
from xinfer_jax import kernels_pallas
from xinfer_jax.cache.kv_cache import empty_layers, state_bytes
from xinfer_jax.cache.paged import PAGE_SIZE, empty_pools
from xinfer_jax.config.model_config import ModelConfig
from xinfer_jax.draft_heads.mtp import Mtp
from xinfer_jax.engine.pages import num_pages_for
from xinfer_jax.estimates.card_specs import Card, Tpu
from xinfer_jax.estimates.model_work import bytes_per_pass, expert_fraction
from xinfer_jax.estimates.plan_estimates import device_weights, visible_kv_bytes
from xinfer_jax.weights.params import tree_bytes

MIB = 2**20


def _at_depth(full: ProgramJob, weights: str, count: int) -> ProgramJob:
    """Returns the job of a model with its first layers only."""
    config = dataclasses.replace(full.config, num_hidden_layers=count)
    return dataclasses.replace(full, config=config, params=device_weights(config, weights, 1))


def _caches(job: ProgramJob, program: str) -> Any:
    """Returns the shapes of the caches: pools of pages of an engine, or arrays of rows."""
    if program.startswith("engine"):
        pages = job.rows * num_pages_for(job.capacity) + 1
        return jax.eval_shape(lambda: empty_pools(job.config, pages, job.kv))
    return jax.eval_shape(lambda: empty_layers(job.config, job.rows, job.capacity, job.kv))


def _leaf_shapes(job: ProgramJob, program: str) -> list[tuple[int, ...]]:
    """Returns the shapes of weights, dequantized weights, caches and of the pages of all rows."""
    shapes = [x.shape for x in jax.tree.leaves(job.params) if len(x.shape) > 1]
    # Two weights in a byte.
    shapes += [(2, *x.shape) for x in jax.tree.leaves(job.params) if x.dtype == "uint8"]
    if program.startswith("engine"):
        slots = num_pages_for(job.capacity) * PAGE_SIZE
        shapes += [
            (rows, mixer.fits[0], slots, width * mixer.fits[1])
            for rows in {1, job.rows}
            for width in (1, 2)  # keys and values may be side by side
            for mixer in job.config.cached_mixers
            if mixer.has_keys
        ]
    caches = _caches(job, program), _caches(job, "decode")
    return shapes + [x.shape for x in jax.tree.leaves(caches) if len(x.shape) > 2]


def _tokens(job: ProgramJob, program: str) -> int:
    """Returns the tokens of each row in a step or call."""
    if program in DRAFTING:
        return 1 + job.draft_tokens
    return {"prefill": job.length, "engine_prefill": job.chunk}.get(program, 1)


def least_bytes(job: ProgramJob, program: str) -> dict[str, float]:
    """Returns the bytes that a step or call has to move: weights (only of chosen experts), valid keys and
    values, recurrent states read and written, and the logits written once and read once. A draft head adds
    the bytes of all draft tokens.
    """
    if job.config.draft_head is not None:
        return _least_of_model(_without_head(job), program) | _least_of_head(job)
    return _least_of_model(job, program)


def _without_head(job: ProgramJob) -> ProgramJob:
    """Returns the job of a model without its draft head."""
    params = {name: leaf for name, leaf in job.params.items() if name != "draft_head"}
    return dataclasses.replace(job, config=dataclasses.replace(job.config, draft_head=None), params=params)


def _least_of_head(job: ProgramJob) -> dict[str, float]:
    """Returns the bytes that a draft head has to move in a step. It runs once for each draft token: first on
    all tokens that a step may append, and then on one token of each row. Each time it reads its weights, its
    keys and values, and the output matrix of the model.
    """
    head = Mtp.of_model(job.config)
    own = job.params["draft_head"]
    experts = tree_bytes([layer.get("experts", ()) for layer in own["layers"]])
    weights = keys = 0.0
    for draft in range(job.draft_tokens):
        tokens = job.rows * (1 if draft else 1 + job.draft_tokens)
        weights += tree_bytes(own) - (1 - expert_fraction(head.config, tokens)) * experts
        keys += job.rows * visible_kv_bytes(head.config, job.kv, job.length + draft)
    matrix = job.params["lm_head" if "lm_head" in job.params else "embed"]
    return {
        "head's weights": weights,
        "head's keys and values": keys,
        "head's output matrix": job.draft_tokens * tree_bytes(matrix),
        "head's logits": 2 * 4 * job.rows * job.draft_tokens * head.config.vocab_size,
    }


def _least_of_model(job: ProgramJob, program: str) -> dict[str, float]:
    config = job.config
    rows = 1 if program == "engine_prefill" else job.rows
    tokens = _tokens(job, program)
    weights = bytes_per_pass(job.params)
    experts = tree_bytes([layer.get("experts", ()) for layer in job.params["layers"]])
    weights -= (1 - expert_fraction(config, rows * tokens)) * experts
    length = job.length + (tokens - 1) * (program in LOOPS)
    keys = rows * visible_kv_bytes(config, job.kv, length)
    positions = rows * (tokens if program in LOOPS else 1)
    least = {"weights": weights, "keys and values": keys, "logits": 2 * 4 * positions * config.vocab_size}
    of_state = state_bytes(config)
    return least | ({"states": 2 * rows * of_state} if of_state else {})


def _kernel_bytes(job: ProgramJob, program: str) -> KernelBytes:
    """Returns a function that gives the bytes that a Pallas kernel has to move, by its operands and results.
    For a cache they are the valid tokens, and nothing if the kernel appends to it. For experts they are the
    ones that the rows chose. The text does not say which bytes a kernel reads.
    """
    rows = 1 if program == "engine_prefill" else job.rows
    length = min(job.length, job.capacity)
    parts: dict[int, float] = {}  # fraction that is read of an operand with so many elements
    # A recurrent state is read and written whole.
    stored = [layer for layer in _caches(job, program) if getattr(layer, "has_keys", True)]
    for x in jax.tree.leaves(stored):
        if len(x.shape) == 4:
            slots = x.shape[0] * x.shape[2]  # rows or pages of so many tokens
            parts[x.size] = min(1.0, rows * length / slots)
    layers = [*job.params["layers"], *job.params.get("draft_head", {}).get("layers", ())]
    experts = {x.size for x in jax.tree.leaves([layer.get("experts", ()) for layer in layers])}
    caches = {x.size for x in jax.tree.leaves(stored) if len(x.shape) == 4}

    def moved(call: Instruction, operands: list[Array]) -> float:
        aliases = re.findall(r"\{(\d*)\}: \((\d+),", call.attributes)
        in_place = {int(operand) for _, operand in aliases}
        results = {int(result or 0) for result, _ in aliases}
        total = 0.0
        chosen = expert_fraction(
            job.config, min(rows * _tokens(job, program), _expert_tokens(job.config, operands))
        )
        for arrays, aliased in ((operands, in_place), (call.arrays, results)):
            for at, array in enumerate(arrays):
                if not array.is_in_hbm:
                    continue
                is_append = at in aliased and array.size in caches
                part = chosen if array.size in experts else parts.get(array.size, 1.0)
                total += 0.0 if is_append else array.bytes * part
        return total

    return moved


def _expert_tokens(config: ModelConfig, operands: list[Array]) -> float:
    """Returns the number of tokens in a call of a kernel of experts, which has a matrix of the tokens, or of
    the inner numbers of each token for each of its experts. Infinite: it has no such matrix.
    """
    widths = {config.hidden_size: 1}
    if config.experts:
        widths[config.experts.intermediate_size] = config.num_experts_per_tok
    tokens = [x.dims[0] / widths[x.dims[1]] for x in operands if len(x.dims) == 2 and x.dims[1] in widths]
    return max(tokens, default=math.inf)


class _Compiled(NamedTuple):
    """A program with this number of layers, and its counts."""

    layers: int
    temporaries: int  # bytes
    step: Counts  # of one iteration of the outermost loop, or of the whole call
    copies: list[Operation]  # of whole leaves


# Modules and bytes of temporaries, by their text before compilation: settings do not change a program.
_programs: dict[str, tuple[Module, int]] = {}


def _compile_program(job: ProgramJob, program: str, card: Card | Tpu) -> _Compiled:
    """Compiles one of `PROGRAMS`, and counts it."""
    mesh = card.mesh()
    job = dataclasses.replace(job, params=to_shapes(job.params, mesh))
    call = find_call(job, program)
    with target_card(card, mesh):
        traced = call.program.trace(*to_shapes(call.args, mesh))
        lowered = traced.lower(lowering_platforms=(card.platform,))
        text = f"{card.name}: {lowered.as_text()}"
        if text not in _programs:
            compiled = lowered.compile()
            temporaries = compiled.memory_analysis().temp_size_in_bytes
            _programs[text] = parse_module(compiled.as_text()), temporaries
    module, temporaries = _programs[text]
    # Of the conditional on whether all rows are greedy. An engine's step has others, on rare settings.
    branch = dict(sampled=0, engine_decode=None).get(program, -1)
    counter = ProgramCounter(module, _kernel_bytes(job, program), branch=branch, is_tpu=isinstance(card, Tpu))
    step = counter.of_step() if program in LOOPS else counter.of_call()
    copies = step.whole_copies(_leaf_shapes(job, program))
    return _Compiled(job.config.num_hidden_layers, temporaries, step, copies)


_PARTS = ("per_layer", "beside", "whole")
_FIGURES: dict[str, tuple[str, float, Callable[[_Compiled], float]]] = {  # title, unit, value
    "bytes": ("MB moved", 1e6, lambda c: c.step.bytes),
    "launches": ("operations launched", 1, lambda c: c.step.launches),
    "copies": ("copies of weights or cache", 1, lambda c: sum(o.times for o in c.copies)),
    "temporaries": ("MiB of temporaries", MIB, lambda c: c.temporaries),
}


def report(
    full: ProgramJob, weights: str, program: str, card: Card | Tpu, depths: Sequence[int] | None
) -> dict[str, Any]:
    """Returns the figures of a program: counted at two depths, per layer, and scaled to the model's depth.

    Args:
        full: the job at the model's depth.
        weights: the format of the weights.
        program: one of `PROGRAMS`.
        card: the card to compile for.
        depths: the two numbers of layers to compile, the smaller one first. One number: a model with this
            number of layers, without figures per layer. None: two and four periods of the layers' kinds. For
            a TPU, whose XLA keeps the weights of few layers in VMEM during the whole loop, None is the
            model's own depth.
    """
    layers = full.config.num_hidden_layers
    full = full.with_head() if "mtp" in program else full
    if depths is None:
        period = layer_period(full.config)
        is_whole = isinstance(card, Tpu) or 4 * period > layers
        depths = (layers,) if is_whole else (2 * period, 4 * period)
    layers = layers if len(depths) > 1 else depths[0]
    with kernels_pallas.assume_device(card.capability, card.name, card.platform):  # for the form of arrays
        *fewer, more = (_compile_program(_at_depth(full, weights, n), program, card) for n in depths)
        least = least_bytes(_at_depth(full, weights, layers), program)

    def parts(of: Callable[[_Compiled], float]) -> dict[str, float]:
        per_layer = 0.0
        for few in fewer:
            per_layer = (of(more) - of(few)) / (more.layers - few.layers)
        whole = of(more) + per_layer * (layers - more.layers)
        return {"per_layer": per_layer, "beside": whole - layers * per_layer, "whole": whole}

    figures = {name: parts(of) for name, (_, _, of) in _FIGURES.items()}
    return dict(
        program=program,
        layers=layers,
        depths=depths,
        **{part: {name: of[part] for name, of in figures.items()} for part in _PARTS},
        least=least,
        ratio=figures["bytes"]["whole"] / sum(least.values()),
        kernels=Counter(o.op_name for o in more.step if o.kind in PALLAS.values()),
        copied=[(str(o.copied[0]), o.bytes, o.op_name) for o in more.copies],
    )


def print_report(result: dict[str, Any]) -> None:
    """Prints the figures of one program."""
    depth = f"{result['layers']} layers"
    print(f"{result['program']:34}{'a layer':>12}{'beside':>12}{depth:>12}  (compiled: {result['depths']})")
    for name, (title, unit, _) in _FIGURES.items():
        print(f"  {title:32}" + "".join(f"{result[part][name] / unit:12,.2f}" for part in _PARTS))
    least = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in result["least"].items())
    print(f"  moved / least: {result['ratio']:.3f} (least, MB: {least})")
    for path, times in result["kernels"].items():
        print(f"  Pallas {times}x {path}")
    for array, size, op_name in result["copied"]:
        print(f"  COPY {array} {size / 1e6:,.2f} MB: {op_name}")
