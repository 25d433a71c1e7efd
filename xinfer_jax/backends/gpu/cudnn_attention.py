"""Attention without a cache by cuDNN, for NVIDIA GPUs: its backward pass is a kernel too."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ... import kernels_pallas
from ...cache.contiguous import Contiguous
from ...ops.operation import Call

_FEWEST = 128  # tokens of a row: a tile of cuDNN's kernels


def cudnn_form(call: Call) -> Callable | None:
    """Returns a form of `causal_attention`, or None in these cases:

    - A kernel is named.
    - There are sinks, caps or few tokens.
    - The devices of a mesh do not divide the rows.
    - The call is in a `jax.shard_map` that leaves axes to the compiler, or of a jax without such gradients.
    - jax rejects the dtype, the widths, the GPU or the cuDNN of this process.
    """
    q_BTNH = call.operands["q_BTNH"]
    kv = call.operands["kv"]
    sink_N = call.operands["sink_N"]
    scoring = call.static["scoring"]
    T = q_BTNH.shape[1]
    if call.run_config.impl is not None or sink_N is not None or scoring.soft_cap is not None:
        return None
    if T < _FEWEST or kv.slots != T or kv.value_width != q_BTNH.shape[-1] or kv.key_bias_fn is not None:
        return None
    if kernels_pallas.device_impl().impl == "xla":  # older than Ampere
        return None
    mesh = _mesh(q_BTNH)
    if not (mesh.empty or mesh.manual_axes) and len(q_BTNH) % mesh.size:
        return None
    if mesh.manual_axes and (mesh.auto_axes or jax.__version_info__ < (0, 12)):
        return None
    form = partial(_attend, scale=scoring.scale)
    try:
        jax.eval_shape(form, **jax.tree.map(_shape, call.operands))
    except (NotImplementedError, RuntimeError):
        return None
    return form


def _attend(q_BTNH: jax.Array, kv: Contiguous, visible: Any, sink_N: Any, scale: float) -> jax.Array:
    """Computes attention without lengths. Padding follows the real tokens, which see nothing after
    themselves: lengths do not matter.
    """
    stored: Any = kv.k, kv.v
    k_BTKH, v_BTKH = (jnp.swapaxes(x, 1, 2) for x in stored)
    window = None if kv.window is None or kv.window >= kv.slots else (kv.window - 1, 0)
    options: dict[str, Any] = dict(scale=scale, is_causal=True, local_window_size=window)
    qkv = map(_divide_rows, (q_BTNH, k_BTKH, v_BTKH))
    return _divide_rows(jax.nn.dot_product_attention(*qkv, **options, implementation="cudnn"))


def _divide_rows(x: jax.Array) -> jax.Array:
    """Returns the array, divided by rows over all axes of a mesh: jax rejects operands that are divided in
    different ways, and the compiler does not see to it.
    """
    mesh = _mesh(x)
    if mesh.empty or mesh.manual_axes:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))


def _mesh(x: jax.Array) -> Any:
    return jax.typeof(x).sharding.mesh


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
