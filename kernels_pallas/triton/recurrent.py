"""Parts that the Triton kernels of recurrent layers share: calls of kernels of pytrees, a step of the short
convolution in place, and products of float32 matrices in parts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..delta_blocks import PAIRS, Parts
from ..dispatch import result_type


def call_kernel(
    kernel: Callable, grid: tuple[int, ...], operands: Any, outs: Any, name: str, warps: int, interpret: bool,
    in_place: int = 0,
) -> Any:  # fmt: skip
    """Returns the results of a kernel of pytrees. outs: their types. in_place: the number of last results
    that have the memory of the last operands.
    """
    arrays = jax.tree.leaves(operands)
    types = jax.tree.leaves(outs)
    structure: Any = jax.tree.structure((operands, outs))

    def body(*refs: Any) -> None:
        (of_operands, of_outs) = jax.tree.unflatten(structure, refs)
        kernel(*of_operands, *of_outs)

    results = pl.pallas_call(
        body,
        grid=grid,
        out_shape=[result_type(x.shape, x.dtype, *arrays) for x in types],
        input_output_aliases={len(arrays) - i: len(types) - i for i in range(1, in_place + 1)},
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arrays)
    return jax.tree.unflatten(jax.tree.structure(outs), results)


class Convolution(NamedTuple):
    """The references of a convolution."""

    before: Any  # its last inputs, [B, heads, W, width]
    new: Any  # the input of the token, [B, heads · width]
    taps: Any  # [heads · width, W + 1]
    after: Any  # the same memory as `before`
    bias: Any = None  # [heads · width]

    def step(self, place: tuple[Any, Any], first: Any, size: int, begins: Any, interpret: bool) -> jax.Array:
        """Returns silu of the convolution, float32, of `size` columns of a head, from `first` on. Moves their
        inputs by one, so no other program may read them.

        place: the row and the head. begins: True if the inputs before the token were zeros.
        """
        row, head = place
        W, width = self.before.shape[2:]
        columns = pl.ds(head * width + first, size)
        slots = [(row, head, w, pl.ds(first, size)) for w in range(W)]
        inputs = [jnp.where(begins, 0, self.before[slot]) for slot in slots]
        inputs.append(self.new[row, columns].astype(jnp.float32))
        taps = (self.taps[columns, w].astype(jnp.float32) for w in range(W + 1))
        total: Any = sum(x * tap for x, tap in zip(inputs, taps, strict=True))
        if self.bias is not None:
            total += self.bias[columns].astype(jnp.float32)
        wait(interpret)  # until all warps have loaded the inputs
        for slot, x in zip(slots, inputs[1:], strict=True):
            self.after[slot] = x
        return jax.nn.silu(total)


def wait(interpret: bool) -> None:
    """Loads that follow stay after it: all of them at once would need more registers than there are. It also
    waits for the loads and stores of all warps.
    """
    if not interpret:
        pltriton.debug_barrier()


def load_parts(refs: Parts, at: Any, transposed: bool = False) -> Parts:
    (a, b, c) = (ref[at].T if transposed else ref[at] for ref in refs)
    return a, b, c


def dot_parts(a: Parts, b: Parts) -> jax.Array:
    """Returns the product of float32 matrices in parts."""
    total: Any = 0
    for i, j in PAIRS:
        total += jnp.dot(a[i], b[j], preferred_element_type=jnp.float32)
    return total
