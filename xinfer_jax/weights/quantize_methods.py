"""Methods of quantization: their names, what they support, and the form of their leaves on a device."""

import dataclasses
from typing import Any

import jax
import numpy as np

import kernels_pallas

from ..config.model_config import ModelConfig
from ..config.unsupported import check_supported
from ..errors import InputError
from .grouped_weight import GroupedWeight
from .int8_weight import Int8Weight
from .quantized_weight import is_quantized

METHODS = ("int8", "int4")  # for any model; "ternary" and "mxfp4" are of models trained so


def device_form(weight: Any) -> Any:
    """Returns a leaf, or its shapes, as this process's devices read it: on TPUs scales of packed groups are
    float32, since no kernel there reads float16. Other leaves stay.
    """
    is_packed = isinstance(weight, GroupedWeight) and weight.values.dtype == np.uint8
    if not is_packed or kernels_pallas.device_impl().impl != "tpu":
        return weight
    if isinstance(weight.scale, jax.ShapeDtypeStruct):
        return dataclasses.replace(weight, scale=jax.ShapeDtypeStruct(weight.scale.shape, np.float32))
    return dataclasses.replace(weight, scale=weight.scale.astype(np.float32))


def check_quantize_method(quantize: str | None) -> None:
    """Raises InputError unless it is None or one of `METHODS`."""
    if quantize is not None and quantize not in METHODS:
        raise InputError(f"quantize={quantize!r} is not supported: use None or one of {', '.join(METHODS)}")


def check_quantize(config: ModelConfig, method: str | None) -> None:
    """Raises InputError where the model's matrices cannot be quantized by this method."""
    if method and method not in METHODS:
        feature = "mxfp4" if method == "mxfp4" else "stored formats"
        remedy = f"load a float checkpoint with quantize={' or '.join(METHODS)}"
        check_supported(config, feature, f"quantized weights ({method}) are", remedy)


def check_activations(activations: str | None, quantize: str | None, group: int | None = None) -> None:
    """Raises InputError unless these activations are supported with weights that are quantized in this way.

    Args:
        activations: None or "int8".
        quantize: method of the weights.
        group: inputs that share a scale; None: all.
    """
    if activations not in (None, "int8"):
        raise InputError(f"activations={activations!r} is not supported: use None or int8")
    if activations and quantize != "int8":
        raise InputError(
            f"activations={activations!r} needs quantize='int8', got {quantize!r}: give that too, or leave"
            " out activations (a checkpoint that was written with them has them)"
        )
    if activations and group is not None:
        raise InputError(f"group={group} with activations={activations!r}: int8 activations have no groups")


def with_int8_activations(params: Any) -> Any:
    """Returns the parameters with int8 activations for int8 matrices with a scale per output."""

    def leaf(x: Any) -> Any:
        return dataclasses.replace(x, int8_activations=True) if isinstance(x, Int8Weight) else x

    return jax.tree.map(leaf, params, is_leaf=is_quantized)
