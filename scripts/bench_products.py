"""Times the forms of a CPU's matrix products by format, number of rows and shape, one after the other, in
turns: `xinfer_jax/backends/cpu/product_table.py` follows from its table.

    python scripts/bench_products.py --formats=int8,int4 --rows=1,2,4,8
    XINFER_JAX_CPU=none XLA_FLAGS=--xla_cpu_max_isa=AVX2 python scripts/bench_products.py

Prints billions of weights a second of each form (the best of the rounds), with the fastest marked "*". Then
it prints the form that the table has, and its speed relative to the fastest. Each call reads another copy of
the matrix.
"""

from launcher import start

# isort: split
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from xinfer_jax.backends.cpu import product_table
from xinfer_jax.backends.cpu.product_table import INT8, MATRIX_FIRST, ROWS, TILES, X_FIRST
from xinfer_jax.errors import InputError
from xinfer_jax.generation.executor import decode_compiler_options
from xinfer_jax.ops.product import float_product
from xinfer_jax.weights.mxfp4 import mxfp4_struct
from xinfer_jax.weights.quantization import quantize_matrix, with_int8_activations
from xinfer_jax.weights.ternary import ternary_leaf

MATRICES = dict(wide=(4864, 896), tall=(896, 4864), vocabulary=(151_936, 896))
UNPACKED = (X_FIRST, MATRIX_FIRST, TILES)
FORMS = {
    "float32": UNPACKED,
    "bfloat16": UNPACKED,
    "int8": UNPACKED,
    "int8 activations": UNPACKED,
    "int4": (ROWS, TILES),
    "int4 activations": (ROWS, INT8, TILES),
    "mxfp4": (ROWS, TILES),
    "ternary": (ROWS, TILES),
}
_FORMATS = flags.DEFINE_list("formats", [*FORMS], "Which.")
_ROWS = flags.DEFINE_list(
    "rows", ["1", "2", "3", "4", "8", "12", "16", "32", "64", "256"], "Numbers of rows."
)
_MATRICES = flags.DEFINE_list("matrices", [*MATRICES], "Which of these shapes [outputs, inputs].")
_BYTES = flags.DEFINE_integer("bytes", 2**27, "Of the copies of a matrix together, at least.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Of all forms.", lower_bound=1)


def weight_of(kind: str, shape: tuple[int, int]) -> Any:
    random = np.random.default_rng(0)
    if kind == "mxfp4":
        return jax.tree.map(
            lambda x: jnp.asarray(random.integers(118, 128, x.shape, np.uint8)), mxfp4_struct(shape)
        )
    matrix_OI = random.standard_normal(shape, np.float32)
    if kind in ("float32", "bfloat16"):
        return jnp.asarray(matrix_OI, kind)
    if kind == "ternary":
        return jax.device_put(ternary_leaf(matrix_OI, "matrix"))
    leaf = jax.device_put(quantize_matrix(matrix_OI, 4 if kind.startswith("int4") else 8))
    return with_int8_activations(leaf) if kind.endswith("activations") else leaf


def program_of(form: str, x_MI: jax.Array, weight: Any) -> Callable:
    """Returns the product by a form, compiled."""

    def product(x_MI: jax.Array, weight: Any) -> jax.Array:
        return float_product(x_MI, weight) if isinstance(weight, jax.Array) else weight.product(x_MI)

    jax.clear_caches()  # a form was chosen when a function was traced
    with mock.patch.object(product_table, "fastest_form", lambda *_: form):
        return jax.jit(product, compiler_options=decode_compiler_options()).lower(x_MI, weight).compile()


def seconds(program: Callable, x_MI: jax.Array, copies: list) -> float:
    """Returns the seconds of a product, as the mean over products with each of the copies."""
    began = time.perf_counter()
    done = [program(x_MI, weight) for weight in copies]
    jax.block_until_ready(done)
    return (time.perf_counter() - began) / len(copies)


def measure(kind: str, name: str, rows: int, copies: list) -> None:
    shape = MATRICES[name]
    x_MI = jnp.asarray(np.random.default_rng(1).standard_normal((rows, shape[1])), "float32")
    x_MI = x_MI.astype("bfloat16") if kind == "bfloat16" else x_MI
    programs = {form: program_of(form, x_MI, copies[0]) for form in FORMS[kind]}
    best = {}
    for form, program in programs.items():
        jax.block_until_ready(program(x_MI, copies[0]))
        few = copies if seconds(program, x_MI, copies[:1]) < 0.05 else copies[:1]
        best[form] = min(seconds(program, x_MI, few) for _ in range(2))
    for _ in range(_ROUNDS.value - 2):
        for form, program in programs.items():
            if best[form] < 1.5 * min(best.values()):  # others are not the fastest
                best[form] = min(best[form], seconds(program, x_MI, copies))
    least = min(best.values())
    runs = product_table.fastest_form(kind, rows, *shape)
    size = shape[0] * shape[1]
    parts = [f"{form} {size / s / 1e9:.2f}{'*' if s == least else ''}" for form, s in best.items()]
    print(
        f"{kind:16} {name:10} {rows:4}  {' · '.join(parts)}  runs: {runs}, {least / best[runs]:.2f}",
        flush=True,
    )


def main(argv: list[str]) -> None:
    for names, known in ((_FORMATS.value, FORMS), (_MATRICES.value, MATRICES)):
        if unknown := {*names} - {*known}:
            raise InputError(f"{sorted(unknown)[0]!r} is not one of {', '.join(known)}")
    print(f"jax {jax.__version__}, {product_table.describe_cpu()}")
    for kind in _FORMATS.value:
        for name in _MATRICES.value:
            weight = weight_of(kind, MATRICES[name])
            count = max(1, -(-_BYTES.value // sum(x.nbytes for x in jax.tree.leaves(weight))))
            copies = [weight, *(jax.tree.map(jnp.copy, weight) for _ in range(count - 1))]
            for rows in map(int, _ROWS.value):
                measure(kind, name, rows, copies)


if __name__ == "__main__":
    start(main)
