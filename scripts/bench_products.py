"""Times the forms of a CPU's matrix products by format, number of rows and shape, one after the other, in
turns: the constants of `xinfer_jax/ops/cpu` follow from its table.

    python scripts/bench_products.py --formats=int8,int4 --rows=1,2,4,8
    XINFER_JAX_CPU=none XLA_FLAGS=--xla_cpu_max_isa=AVX2 python scripts/bench_products.py

Prints billions of weights a second of each form (the best of the rounds), the fastest marked "*"; then how
fast the form that runs is by the fastest. Each call reads another copy of the matrix.
"""

from launcher import start

# isort: split
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax

from xinfer_jax.errors import InputError
from xinfer_jax.ops.cpu.cpu_features import describe_cpu
from xinfer_jax.ops.cpu.cpu_products import (
    cpu_float_form,
    int8_activation_product,
    matrix_lhs_dot,
    upcast_product,
)
from xinfer_jax.ops.product import dot
from xinfer_jax.weights.quantization import quantize_matrix, with_int8_activations

MATRICES = dict(wide=(4864, 896), tall=(896, 4864), vocabulary=(151_936, 896))
_FORMATS = flags.DEFINE_list("formats", ["float32", "bfloat16", "int8", "int8_activations", "int4"], "Which.")
_ROWS = flags.DEFINE_list(
    "rows", ["1", "2", "3", "4", "8", "12", "16", "32", "64", "256"], "Numbers of rows."
)
_MATRICES = flags.DEFINE_list("matrices", [*MATRICES], "Which of these shapes [outputs, inputs].")
_BYTES = flags.DEFINE_integer("bytes", 2**27, "Of the copies of a matrix together, at least.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Of all forms.", lower_bound=1)


def of_two_rows(product: Callable, x_MI: jax.Array, weight: Any) -> jax.Array:
    """A single row beside one of zeros."""
    rows = len(x_MI)
    x_MI = jnp.pad(x_MI, ((0, 1), (0, 0))) if rows == 1 else x_MI
    return product(lax.optimization_barrier(x_MI), weight)[:rows]


def float_forms(dtype: str) -> dict[str, Callable]:
    cast = lambda x_MI: x_MI.astype(dtype)  # noqa: E731
    return {
        "x first": lambda x_MI, w: of_two_rows(dot, cast(x_MI), w) if dtype != "float32" else dot(x_MI, w),
        "matrix first": lambda x_MI, w: of_two_rows(matrix_lhs_dot, cast(x_MI), w),
        "float32 tiles": upcast_product,
        "chosen": lambda x_MI, w: cpu_float_form(None, None, (x_MI, w), None)(x_MI, w),
    }


def int8_forms(activations: bool) -> dict[str, Callable]:
    def by(int8_dot: Callable) -> Callable:
        if activations:
            return lambda x_MI, w: int8_activation_product(x_MI, w.values, int8_dot) * w.scale
        return lambda x_MI, w: w.split_product(x_MI, int8_dot)

    return {
        "x first": by(dot),
        "matrix first": by(matrix_lhs_dot),
        "float32 tiles": lambda x_MI, w: upcast_product(x_MI, w.values) * w.scale,
        "chosen": lambda x_MI, w: w.cpu_product(x_MI),
    }


def group_forms() -> dict[str, Callable]:
    return {
        "row by row": lambda x_MI, w: w.by_rows(x_MI),
        "float32 tiles": lambda x_MI, w: w.by_tiles(x_MI),
        "chosen": lambda x_MI, w: w.cpu_product(x_MI),
    }


FORMS = dict(
    float32=partial(float_forms, "float32"), bfloat16=partial(float_forms, "bfloat16"),
    int8=partial(int8_forms, False), int8_activations=partial(int8_forms, True), int4=group_forms,
)  # fmt: skip


def weight_of(kind: str, shape: tuple[int, int]) -> Any:
    matrix_OI = np.random.default_rng(0).standard_normal(shape, np.float32)
    if kind in ("float32", "bfloat16"):
        return jnp.asarray(matrix_OI, kind)
    leaf = jax.device_put(quantize_matrix(matrix_OI, 4 if kind == "int4" else 8, None))
    return with_int8_activations(leaf) if kind == "int8_activations" else leaf


def seconds(program: Callable, x_MI: jax.Array, copies: list) -> float:
    """Of a product with each of the copies, by the number of them."""
    began = time.perf_counter()
    done = [program(x_MI, weight) for weight in copies]
    jax.block_until_ready(done)
    return (time.perf_counter() - began) / len(copies)


def measure(kind: str, name: str, rows: int, copies: list) -> None:
    shape = MATRICES[name]
    x_MI = jnp.asarray(np.random.default_rng(1).standard_normal((rows, shape[1])), "float32")
    programs = {form: jax.jit(function) for form, function in FORMS[kind]().items()}
    best = {}
    for form, program in programs.items():
        jax.block_until_ready(program(x_MI, copies[0]))
        few = copies if seconds(program, x_MI, copies[:1]) < 0.05 else copies[:1]
        best[form] = min(seconds(program, x_MI, few) for _ in range(2))
    for _ in range(_ROUNDS.value - 2):
        for form, program in programs.items():
            if best[form] < 1.5 * min(best.values()):  # others are not the fastest
                best[form] = min(best[form], seconds(program, x_MI, copies))
    chosen = best.pop("chosen")
    least = min(best.values())
    size = shape[0] * shape[1]
    parts = [f"{form} {size / s / 1e9:.2f}{'*' if s == least else ''}" for form, s in best.items()]
    print(f"{kind:16} {name:10} {rows:4}  {' · '.join(parts)}  runs: {least / chosen:.2f}", flush=True)


def main(argv: list[str]) -> None:
    for names, known in ((_FORMATS.value, FORMS), (_MATRICES.value, MATRICES)):
        if unknown := {*names} - {*known}:
            raise InputError(f"{sorted(unknown)[0]!r} is not one of {', '.join(known)}")
    print(f"jax {jax.__version__}, {describe_cpu()}")
    for kind in _FORMATS.value:
        for name in _MATRICES.value:
            weight = weight_of(kind, MATRICES[name])
            count = max(1, -(-_BYTES.value // sum(x.nbytes for x in jax.tree.leaves(weight))))
            copies = [weight, *(jax.tree.map(jnp.copy, weight) for _ in range(count - 1))]
            for rows in map(int, _ROWS.value):
                measure(kind, name, rows, copies)


if __name__ == "__main__":
    start(main)
