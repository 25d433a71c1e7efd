"""Writes matrices in int4 as compressed-tensors has them: W4A16, in groups with zero points or without."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from ..families.conversion import TensorOfLeaves
from ..weights.grouped_weight import GroupedWeight, unpack_int4
from ..weights.padded_weight import stored_weight, without_padding
from .tensors import Shape

_PER_WORD = 8


def packed_tensors(
    name: str, leaf: Any, expert: int | None, dtype: Any, check: Callable[[Any], None] | None
) -> dict[str, TensorOfLeaves]:
    """Returns the tensors of a matrix, X.weight_packed and so on.

    Args:
        name: X.weight.
        leaf: the matrix, or the matrices of experts. A `PaddedWeight` may hold it.
        expert: the number of the expert. None: there is one matrix.
        dtype: the dtype of scales.
        check: gets the zero points of a symmetric matrix, which are not written. None: it is not symmetric.
    """
    (outputs, inputs) = leaf.shape[-2:]
    stored: GroupedWeight = stored_weight(leaf)
    Q = -(-inputs // stored.group)
    tensors: dict[str, tuple[Shape, Any, Callable]] = {
        "packed": ((outputs, -(-inputs // _PER_WORD)), np.int32, partial(_pack_numbers, check)),
        "scale": ((outputs, Q), dtype, lambda part, convert: convert(part.scale).T),
        "shape": ((2,), np.int64, lambda part, convert: np.array(part.shape)),
    }
    if check is None:
        tensors["zero_point"] = ((-(-outputs // _PER_WORD), Q), np.int32, _pack_zeros)
    if stored.order is not None:
        tensors["g_idx"] = ((inputs,), np.int32, _group_of_inputs)

    def make(of_part: Callable, convert: Callable[[Any], np.ndarray]) -> np.ndarray:
        part = leaf if expert is None else jax.tree.map(lambda x: x[expert], leaf)
        return of_part(without_padding(part), convert)

    return {
        f"{name}_{field}": TensorOfLeaves(shape, dtype, partial(make, of_part))
        for field, (shape, dtype, of_part) in tensors.items()
    }


def _pack_numbers(check: Any, leaf: GroupedWeight, convert: Callable[[Any], np.ndarray]) -> np.ndarray:
    if check is not None:
        check(convert(leaf.zero))
    numbers_QJO = unpack_int4(convert(leaf.values))
    numbers_IO = numbers_QJO.reshape(-1, numbers_QJO.shape[-1])[: leaf.inputs]
    if leaf.order is not None:
        numbers_IO[convert(leaf.order)] = numbers_IO.copy()
    return _words(numbers_IO.T)


def _pack_zeros(leaf: GroupedWeight, convert: Callable[[Any], np.ndarray]) -> np.ndarray:
    """Returns words of neighbouring outputs."""
    return _words(convert(leaf.zero)).T


def _group_of_inputs(leaf: GroupedWeight, convert: Callable[[Any], np.ndarray]) -> np.ndarray:
    group_I = np.empty(leaf.inputs, np.int32)
    group_I[convert(leaf.order)] = np.arange(leaf.inputs) // leaf.group
    return group_I


def _words(numbers: np.ndarray) -> np.ndarray:
    """Returns numbers of 4 bits as words of neighbouring ones of a row, from the lowest bits on."""
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % _PER_WORD)))
    return np.ascontiguousarray(padded[:, ::2] | padded[:, 1::2] << 4).view("<i4")


def w4a16_settings(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `quantization_config` for symmetric int4 leaves by the names of their matrices, X.weight: with
    zero points transformers 5.24 opens no such file.
    """
    modules: dict[int, list[str]] = {}
    for name, leaf in leaves.items():
        experts = range(leaf.shape[0]) if "{}" in name else (0,)
        own = [name.removesuffix(".weight").format(expert) for expert in experts]
        modules.setdefault(leaf.group, []).extend(own)
    groups = {}
    for i, (group, names) in enumerate(sorted(modules.items())):
        weights = dict(
            num_bits=4, type="int", symmetric=True, strategy="group", group_size=group, dynamic=False
        )
        targets = ["Linear"] if len(modules) == 1 else names
        groups[f"group_{i}"] = dict(targets=targets, weights=weights, format="pack-quantized")
    return dict(
        quant_method="compressed-tensors", format="pack-quantized", config_groups=groups, ignore=[],
        quantization_status="compressed",
    )  # fmt: skip
