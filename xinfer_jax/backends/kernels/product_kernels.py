"""Matrix products by a kernel, and the choice of the products that it takes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ... import kernels_pallas
from ...config.run_config import RunConfig
from ...kernels_pallas.reference_products import FEW_ROWS, Matrix, RowAdapters
from ...ops.forms import with_plain_derivative
from ...ops.operation import Call
from ...sharding import abstract_mesh_of
from ...weights.adapted_weight import AdaptedWeight
from ...weights.fp8_weight import Fp8Weight
from ...weights.grouped_weight import GroupedWeight
from ...weights.int8_weight import Int8Weight
from ...weights.layers import Norm, finish_products, normalized, products
from ...weights.params import Params
from ...weights.quantized_weight import is_quantized, quantize_activations

_MOST_RANK = 128  # of adapters
_TPU_BYTES = 44 * 2**20  # of adapters: of 48 MiB that their kernel may use
_TPU_NUMBERS = 2**21  # of x with quantized weights: more forms of it do not fit in on-chip memory


class Operands(NamedTuple):
    """The operands of products."""

    x: Any  # [..., I]
    leaves: Sequence[Params]  # matrices that share x, with their biases
    norm_weight: Any = None  # [I]


def products_form(call: Call) -> Callable | None:
    """Returns a form of `products` in one launch, with the derivative of `plain`. If no kernel takes them
    all, it is a form of the products without their norm, and of each product. None: no kernel takes any of
    them.
    """
    leaves = call.operands["leaves"]
    before = call.operands["before"]
    if before is not None and before.centered:  # no kernel has such a norm
        return partial(_in_parts, call.run_config, **call.static)
    operands = Operands(call.operands["x"], leaves, before and before.weight)
    chosen = select_product(call.run_config.impl, operands, call.static["activation"]).impl
    if chosen != "xla":
        return with_plain_derivative(call, chosen, partial(_run, chosen, **call.static))
    is_adapted = any(_is_adapted(leaf["weight"]) for leaf in leaves)
    if before is None and len(leaves) == 1 and not is_adapted:
        return None
    return partial(_in_parts, call.run_config, **call.static)


def _in_parts(run_config: RunConfig, x, leaves, before, residual, activation, dtype):
    if before is not None:  # perhaps without its norm
        x = normalized(x, before)
        options: dict[str, Any] = dict(activation=activation, dtype=dtype)
        return products(x, leaves, residual=residual, run_config=run_config, **options)
    ys = [_product(x, leaf, dtype, run_config) for leaf in leaves]
    return finish_products(ys, residual, activation)


def _product(x: jax.Array, leaf: Params, dtype: Any, run_config: RunConfig) -> jax.Array:
    """Returns the product of one leaf. The product of a leaf with adapters has the best form for the matrix
    alone.
    """
    weight = leaf["weight"]
    if not _is_adapted(weight):
        return products(x, [leaf], dtype=dtype, run_config=run_config)[0]
    (y,) = products(x, [leaf | {"weight": weight.base}], dtype=jnp.float32, run_config=run_config)
    return (y + weight.added(x)).astype(dtype)


def _is_adapted(weight: Any) -> bool:
    """Returns True if a matrix has adapters and its inputs are not divided over devices."""
    return isinstance(weight, AdaptedWeight) and weight.axis_name is None


def _base(weight: Any) -> Any:
    return weight.base if isinstance(weight, AdaptedWeight) else weight


def select_product(impl: str | None, operands: Operands, activation: str | None) -> kernels_pallas.Selection:
    """Returns the implementation of products in one launch, or "xla" if there is no kernel for them.

    A named implementation is a name for attention: other matrices stay with XLA under every name.
    """
    x, leaves, norm_weight = operands
    if impl == "xla":
        return kernels_pallas.Selection("xla", "requested by name")
    if impl is None and (here := kernels_pallas.dispatch.device_impl()).impl == "xla":
        return here
    matrices = [_base(leaf["weight"]) for leaf in leaves]
    rows = x.size // max(x.shape[-1], 1)
    if abstract_mesh_of([leaf["weight"] for leaf in leaves]):  # a kernel sees only one device's part
        return kernels_pallas.Selection("xla", "arrays that the compiler divides over devices")
    on_tpu = (impl or kernels_pallas.dispatch.device_impl().impl) in ("tpu", "interpret_tpu")
    if on_tpu:
        reason = _unsupported_on_tpu(x, matrices, rows, norm_weight)
    else:
        reason = _unsupported_on_gpu(x, matrices, rows, norm_weight)
    if activation is not None and len({_layout(matrix) for matrix in matrices}) > 1:
        reason = reason or "gate and up of different formats"
    if reason := reason or _unsupported_adapters(x, leaves, rows, on_tpu):
        return kernels_pallas.Selection("xla", reason)
    return kernels_pallas.select("product", impl, x)


def _unsupported_adapters(x, leaves, rows: int, on_tpu: bool) -> str | None:
    """Returns the reason why a kernel does not take the adapters of these matrices. None: it does, or there
    are none.
    """
    weights = [leaf["weight"] for leaf in leaves if isinstance(leaf["weight"], AdaptedWeight)]
    for weight in weights:
        weight.check_rows(x)
        if not _is_adapted(weight) or rows > FEW_ROWS:
            return "adapters over a mesh, or of many rows"
        if weight.lora_a.shape[1] > _MOST_RANK:
            return f"adapters of rank {weight.lora_a.shape[1]}"
        if {weight.lora_a.dtype, weight.lora_b.dtype} != {x.dtype}:
            return "adapters of another dtype"
        if _has_int8_activations(weight.base) or getattr(weight.base, "order", None) is not None:
            return "adapters of inputs in another form"
    # On a TPU's chip: two adapters, the results, and x twice.
    ranks = ((w.lora_a.shape[1], w.lora_a.shape[2], w.lora_b.shape[1]) for w in weights)
    numbers = sum(2 * R * (I + O) * x.dtype.itemsize + 4 * rows * O for R, I, O in ranks)  # noqa: E741
    if on_tpu and weights and numbers + 2 * x.size * x.dtype.itemsize > _TPU_BYTES:
        return "adapters too large for on-chip memory"
    return None


def _unsupported_on_tpu(x, matrices, rows: int, norm_weight) -> str | None:
    """Returns the reason why the TPU kernel does not take these products in one launch, or None."""
    if rows > FEW_ROWS:
        return f"{rows} rows, more than {FEW_ROWS}"
    if len(set(map(_format, matrices))) > 1:
        return "matrices of different formats"
    if not is_quantized(matrices[0]):
        is_same = all(matrix.dtype == x.dtype for matrix in matrices)
        return None if is_same and x.dtype in (jnp.bfloat16, jnp.float32) else "floats of another dtype"
    if x.dtype != jnp.bfloat16:
        return f"quantized weights with activations of {x.dtype}"
    if rows * x.shape[-1] > _TPU_NUMBERS:
        return f"{rows} rows of {x.shape[-1]} numbers"
    if any(map(_has_int8_activations, matrices)):
        return "int8 activations"
    is_flat = isinstance(matrices[0], Int8Weight | Fp8Weight)
    return None if is_flat else _unsupported_groups(matrices, norm_weight)


def _unsupported_groups(matrices, norm_weight) -> str | None:
    if not isinstance(matrices[0], GroupedWeight) or any(matrix.offset is not None for matrix in matrices):
        return _other_kind(matrices[0])
    if matrices[0].values.dtype != jnp.uint8 or matrices[0].group % 64:
        return "int8 in groups, or groups that are no multiple of 64"
    if len({matrix.zero is None for matrix in matrices}) > 1:
        return "zero points of some matrices"
    is_ordered = any(matrix.order is not None for matrix in matrices)
    is_shared = norm_weight is not None or len(matrices) > 1
    return "inputs in the order of one matrix" if is_ordered and is_shared else None


def _other_kind(matrix: Any) -> str:
    return f"weights of the kind {type(matrix).__name__}"


def _unsupported_on_gpu(x, matrices, rows: int, norm_weight) -> str | None:
    """Returns the reason why a GPU kernel does not take these matrices. None: it does."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}"
    if norm_weight is not None and (rows > FEW_ROWS or x.dtype != jnp.bfloat16):
        return "a norm of many rows or of float16"
    if len({_has_int8_activations(matrix) for matrix in matrices}) > 1:
        return "int8 activations of some matrices"
    normed = norm_weight is not None
    several = len(matrices) > 1
    reasons = (_unsupported_matrix(matrix, x.dtype, rows, normed, several) for matrix in matrices)
    return next(filter(None, reasons), None)


def _has_int8_activations(matrix: Any) -> bool:
    return getattr(matrix, "int8_activations", False)


def _unsupported_matrix(matrix: Any, dtype: Any, rows: int, normed: bool, several: bool) -> str | None:
    """Returns the reason why a kernel does not take one matrix. None: it does. normed: x has a norm. several:
    other matrices share x.
    """
    if is_quantized(matrix) and not isinstance(matrix, Int8Weight | GroupedWeight | Fp8Weight):
        return _other_kind(matrix)
    if reason := kernels_pallas.support.too_large(getattr(matrix, "values", matrix)):
        return reason
    if isinstance(matrix, Fp8Weight):
        return None
    if isinstance(matrix, Int8Weight):
        return "a norm before int8 activations" if normed and matrix.int8_activations else None
    if isinstance(matrix, GroupedWeight):
        if matrix.int8_activations:
            return "int4 with int8 activations"
        if matrix.values.shape[1] % 16 or matrix.offset is not None:
            return "small groups, or offsets of groups"
        ordered = matrix.order is not None and (normed or several)
        return "inputs in the order of one matrix" if ordered else None
    return None if matrix.dtype == dtype and rows <= FEW_ROWS else "floats of another dtype, or for many rows"


def _format(matrix: Any) -> tuple[Any, ...]:
    """Returns the kind of a matrix, and which numbers share a scale."""
    return type(matrix), getattr(matrix, "group", None), getattr(matrix, "has_blocks", False)


def _layout(matrix: Any) -> tuple[Any, ...]:
    values = getattr(matrix, "values", matrix)
    return values.shape, values.dtype, getattr(matrix, "has_blocks", False)


def _run(kernel: str, x, leaves, before: Norm | None, residual, activation, dtype) -> list[jax.Array]:
    norm_weight = None if before is None else before.weight
    options: dict[str, Any] = dict(activation=activation, dtype=dtype, eps=0.0, offset=0.0)
    if before is not None:
        options |= dict(eps=before.eps, offset=before.offset or 0.0)
    x_MI = x.reshape(-1, x.shape[-1])
    matrices = [_matrix(leaf, len(x), len(x_MI)) for leaf in leaves]
    order = getattr(_base(leaves[0]["weight"]), "order", None)
    x_MI = x_MI if order is None else x_MI[:, order]
    residual_MO = None if residual is None else residual.reshape(len(x_MI), -1)
    step_M = None
    first = _base(leaves[0]["weight"])
    if _has_int8_activations(first):
        x_MI, factor_M1 = quantize_activations(first.rotated_inputs(x_MI), first.axis_name)
        step_M = 1 / factor_M1[:, 0]
    args = (x_MI, matrices, norm_weight, residual_MO, step_M)
    ys = kernels_pallas.run_kernel(kernel, "product", *args, **options)
    return [y_MO.reshape(*x.shape[:-1], -1) for y_MO in ys]


def _matrix(leaf: Params, B: int, M: int) -> Matrix:
    """Returns a leaf as the operand of a kernel, for M rows: the rows of B, each with all of its tokens."""
    weight = leaf["weight"]
    bias = leaf.get("bias")
    if isinstance(weight, AdaptedWeight):
        adapter_B = jnp.zeros(B, jnp.int32) if weight.adapter_B is None else weight.adapter_B
        adapters = RowAdapters(weight.lora_a, weight.lora_b, jnp.repeat(adapter_B, M // B), weight.scale)
        return _matrix(leaf | {"weight": weight.base}, B, M)._replace(adapters=adapters)
    if isinstance(weight, Int8Weight | Fp8Weight):
        return Matrix(weight.values, weight.scale, None, bias)
    if isinstance(weight, GroupedWeight):
        return Matrix(weight.values, weight.scale, weight.zero, bias)
    return Matrix(weight, bias=bias)
