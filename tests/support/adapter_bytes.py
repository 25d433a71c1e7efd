"""Compiles the products of an MLP in a decode step for a GPU or TPU that need not be present, and prints what
they move more with adapters than without, by the bytes of min(rows, held) adapters. Argument: the target.
"""

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu.card_specs import CARDS, TPUS
from gpu.hlo_text import parse_module
from gpu.known_choices import KnownChoices
from gpu.program_counts import ProgramCounter
from gpu.programs import target_card, to_shapes

from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.weights.adapted_weight import AdaptedWeight
from xinfer_jax.weights.layers import Norm, products

D, F = 512, 1024
SHAPES = dict(gate=(F, D), up=(F, D), down=(D, F))
CASES = (8, 4, 16), (4, 16, 8)  # rows, adapters that are held, rank


def struct(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def mlp(x_BTD: Any, norm_weight: Any, layer: dict[str, Any]) -> Any:
    leaves = {name: {"weight": weight} for name, weight in layer.items()}
    gate_up = partial(
        products, before=Norm(norm_weight, 1e-6, None), activation="silu", run_config=RunConfig(None)
    )
    (inner,) = gate_up(x_BTD, [leaves["gate"], leaves["up"]])
    return products(inner, [leaves["down"]], residual=x_BTD, run_config=RunConfig(None))[0]


def moved_bytes(target: str, rows: int, held: int, rank: int) -> float:
    """Bytes of the MLP's products; held 0: without adapters."""
    adapter_B = np.arange(rows, dtype=np.int32) % max(held, 1)
    layer: dict[str, Any] = {name: struct(*shape) for name, shape in SHAPES.items()}
    if held:
        for name, (O, I) in SHAPES.items():  # noqa: E741
            pair = struct(held + 1, rank, I), struct(held + 1, O, rank)
            layer[name] = AdaptedWeight(layer[name], *pair, adapter_B)
    args = struct(rows, 1, D), struct(D), layer
    card = (CARDS | TPUS)[target]
    mesh = card.mesh()
    with target_card(card, mesh):
        traced = jax.jit(mlp).trace(*to_shapes(args, mesh))
        module = parse_module(traced.lower(lowering_platforms=(card.platform,)).compile().as_text())
    choices = KnownChoices(traced.jaxpr, args, module, False, card.platform)
    return ProgramCounter(module, choices, TPUS.get(target)).of_call().bytes


def main(target: str) -> None:
    found = {}
    for rows, held, rank in CASES:
        least = min(rows, held) * rank * 2 * sum(map(sum, SHAPES.values()))
        added = moved_bytes(target, rows, held, rank) - moved_bytes(target, rows, 0, rank)
        found[f"{rows} rows of {held}, rank {rank}"] = added / least
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
