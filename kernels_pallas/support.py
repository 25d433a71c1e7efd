"""Checks of the arguments that each kernel supports, and of the cases in which plain jnp is faster."""

import math
from typing import Any

from .key_layouts import BIAS_STRIDE, LANES, KeyBias, Latents, Levels, SideBySide
from .mxfp4 import Mxfp4, is_for_tpu
from .reference_delta import DeltaState
from .reference_mamba import MambaState
from .reference_products import FEW_ROWS, Matrix

_SIXTEEN_BITS = ("bfloat16", "float16")
_DELTA = ("delta_step", "delta_prefill", "delta_drafts")
_MAMBA = ("mamba_step", "mamba_prefill")
_TRITON_ONLY = (
    "int8_head_argmax", "summarize_logits", "gated_experts", "product", "rope_append", *_DELTA, *_MAMBA,
)  # fmt: skip
_TPU_IMPLS = ("tpu", "interpret_tpu")
_OF_KEYS_ON_TPU = ("prefill_attention", "decode_attention", "rope_append")
_ON_TPU = (
    *_OF_KEYS_ON_TPU, "product", "lm_head_argmax", "int8_head_argmax", "gated_experts", *_DELTA, *_MAMBA,
)  # fmt: skip
_WIDTHS = (64, 128, 256)
_WIDEST = 512  # of heads in attention
_MOST_WALKED = 128  # width of heads of linear attention, whose blocks fit into a GPU's shared memory
_TPU_COPY_BYTES = 2**21
_TPU_STATE_BYTES = 2**22  # of a row


def backend_of(kernel: str, impl: str, args: tuple[Any, ...] = ()) -> str:
    """Returns the implementation that serves a kernel for this one: Mosaic does not have every kernel, and
    none for `Latents`.
    """
    is_triton_only = kernel in _TRITON_ONLY or any(isinstance(arg, Latents) for arg in args)
    return "triton" if impl == "mosaic" and is_triton_only else impl


def without_kernel_reason(kernel: str, impl: str) -> str | None:
    """Returns the reason why the operations of XLA serve a kernel under this name, or None: there is such a
    kernel.
    """
    return f"TPUs have no kernel {kernel}" if impl in _TPU_IMPLS and kernel not in _ON_TPU else None


def unsupported_reason(kernel: str, impl: str, args: tuple[Any, ...]) -> str | None:
    """Returns the reason why `impl` does not support these arguments, or None."""
    if impl == "xla":
        return None
    if impl in _TPU_IMPLS:
        if kernel == "gated_experts":
            return _unsupported_experts(*args)
        if kernel in _DELTA:
            return _unsupported_delta(*args) or _unsupported_delta_on_tpu(*args)
        if kernel in _MAMBA:
            return _unsupported_mamba(*args) or _unsupported_mamba_on_tpu(*args)
        unsupported = _unsupported_keys if kernel in _OF_KEYS_ON_TPU else _unsupported_rows
        return unsupported(kernel, *args)
    if any(isinstance(arg, SideBySide) for arg in args):
        return "keys and values side by side are for TPUs"
    return _unsupported_on_gpu(kernel, impl, args)


def _unsupported_on_gpu(kernel: str, impl: str, args: tuple[Any, ...]) -> str | None:
    if kernel.endswith("attention"):
        return too_large(args[1]) or _unsupported_attention(kernel, impl, *args)
    if kernel == "gated_experts" and isinstance(args[1], Mxfp4 | Matrix):
        return _unsupported_quantized_experts(*args)
    if kernel in (*_DELTA, *_MAMBA):
        return _unsupported_state(kernel, *args)
    if reason := next(filter(None, (too_large(arg) for arg in args if arg is not None)), None):
        return reason
    if kernel == "rope_append":  # the cache may have another dtype
        floats = (arg for arg in args if not isinstance(arg, Levels | None))
        return next((reason for arg in floats if (reason := _unsupported_dtypes((arg,)))), None)
    if (reason := _unsupported_dtypes(args[:1] if kernel == "int8_head_argmax" else args)) is not None:
        return reason
    dtype = args[0].dtype.name
    if kernel in ("product", "int8_head_argmax") and dtype not in _SIXTEEN_BITS:
        return f"dtype {dtype}"
    if kernel == "gated_experts" and any(size % 16 for size in args[1].shape[1:]):
        return f"matrices of {args[1].shape[1]} × {args[1].shape[2]}, not multiples of 16"
    if kernel == "lm_head_argmax" and impl == "mosaic" and dtype == "float32":
        return "wgmma would multiply float32 as TF32"
    return None


def too_large(x: Any) -> str | None:
    """Returns the reason why Triton's kernels do not read an array of 8-bit numbers, or None: up to 4 GiB
    they compute offsets in 32 bits, with a sign.
    """
    values = x.values if isinstance(x, Levels) else x
    one_byte = values.dtype.itemsize == 1
    return (
        f"{values.size} numbers of 8 bits in an array" if one_byte and 2**31 < values.size <= 2**32 else None
    )


def slower_reason(kernel: str, impl: str, args: tuple[Any, ...]) -> str | None:
    """Returns the reason why plain jnp is better although a kernel supports these arguments, or None."""
    if kernel in ("lm_head_argmax", "int8_head_argmax") and args[0].shape[0] > FEW_ROWS:
        return f"{args[0].shape[0]} rows would read the vocabulary matrix more than once"
    if kernel == "prefill_attention" and impl != "tpu" and isinstance(args[1], Latents):
        return "a tile of all heads of few tokens would read the latents of a prompt often"
    if kernel == "gated_experts" and impl == "triton" and args[0].dtype == "float32":
        return "its tiles are for 16-bit matrices"
    return None


def _unsupported_rows(kernel: str, x: Any, weight: Any = None) -> str | None:
    """Returns the reason why a TPU kernel does not multiply these rows, or None."""
    rows = math.prod(x.shape[:-1])
    if kernel == "product" and rows > FEW_ROWS:
        return f"{rows} rows, more than {FEW_ROWS}"
    dtypes = {x.dtype.name} if kernel != "lm_head_argmax" else {x.dtype.name, weight.dtype.name}
    is_float32 = dtypes == {"float32"} and kernel != "int8_head_argmax"
    return None if dtypes == {"bfloat16"} or is_float32 else f"dtypes {', '.join(sorted(dtypes))}"


def _unsupported_keys(
    kernel: str, q: Any, kv: Any, v: Any = None, key_bias: KeyBias | None = None
) -> str | None:
    if isinstance(kv, Latents):
        return _unsupported_latents(kernel, q, kv, key_bias)
    if not isinstance(kv, SideBySide):
        return "TPU kernels read keys and values side by side"
    width = q.shape[-1]
    if width not in (*_WIDTHS, _WIDEST):
        return f"head width {width} is not one of {', '.join(map(str, (*_WIDTHS, _WIDEST)))}"
    if kv.values.shape[-1] != 2 * width:
        return f"keys and values of {kv.values.shape[-1]} numbers, not of two heads of width {width}"
    quantized = kv.scale is not None
    if quantized != (kv.values.dtype == "uint8"):
        return f"dtype {kv.values.dtype.name} {'with' if quantized else 'without'} scales"
    dtypes = {q.dtype.name} if quantized else {q.dtype.name, kv.values.dtype.name}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        return f"dtypes {', '.join(sorted(dtypes))}"
    slots = kv.values.shape[2]
    if key_bias is not None and slots % BIAS_STRIDE:
        return f"a bias of keys in {slots} slots, not a multiple of {BIAS_STRIDE}"
    return _unaligned_slots(kernel, kv)


def _unsupported_latents(kernel: str, q: Any, kv: Latents, key_bias: KeyBias | None) -> str | None:
    widths = kv.rank, kv.shape[-1]
    if any(width % LANES for width in widths):
        return f"latents of {widths[0]} numbers in keys of {widths[1]}, not multiples of {LANES}"
    dtypes = {q.dtype.name, kv.dtype.name}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        return f"dtypes {', '.join(sorted(dtypes))}"
    if key_bias is not None:
        return "latents with a bias of keys"
    return _unaligned_slots(kernel, kv)


def _unsupported_quantized_experts(x: Any, *others: Any) -> str | None:
    if x.dtype.name not in _SIXTEEN_BITS:
        return f"dtype {x.dtype.name}"
    matrices = [other for other in others if isinstance(other, Mxfp4 | Matrix)]
    if reason := next(filter(None, (too_large(matrix.values) for matrix in matrices)), None):
        return reason
    for matrix in matrices:
        is_flat = isinstance(matrix, Matrix) and matrix.values.ndim == 3
        if (outputs := matrix.values.shape[1 if is_flat else -1]) % 16:
            return f"{outputs} outputs, not a multiple of 16"
        if matrix.values.ndim == 4 and (bytes_of_group := matrix.values.shape[2]) % 16:
            return f"groups of {bytes_of_group} bytes, not a multiple of 16"
    return None


def _unsupported_experts(x: Any, gate: Any, *others: Any) -> str | None:
    if reason := _stored_by_experts(gate, *others[:2]):
        return reason
    if isinstance(gate, Mxfp4 | Matrix):
        if x.dtype != "bfloat16":
            return f"quantized experts with activations of {x.dtype.name}"
        values = gate.values
        if isinstance(gate, Mxfp4):
            is_read = all(map(is_for_tpu, (gate, *others[:2])))
            return None if is_read else "MXFP4 in the order of files, as inputs that are no multiple of 64"
        if values.ndim == 4 and (values.dtype != "uint8" or values.shape[2] % 32):
            return "experts in int8 groups, or groups that are no multiple of 64"
        return None
    if reason := _unsupported_dtypes((x, gate, *others[:2])):
        return reason
    return "dtype float16" if x.dtype == "float16" else None


def _stored_by_experts(*matrices: Any) -> str | None:
    """Returns the reason why XLA would copy experts before a kernel reads them, or None. XLA has their axis
    in lanes if their number fills these and no other axis does. Packed matrices can have more outputs, of
    zeros.
    """
    for matrix in matrices:
        values = getattr(matrix, "values", matrix)
        is_plain = values.ndim == 3 and not isinstance(matrix, Mxfp4)
        outputs = values.shape[1 if is_plain else -1]
        lanes = [outputs, *values.shape[2:3]] if is_plain else [outputs]
        if len(values) % LANES == 0 and all(size % LANES for size in lanes):
            return f"{len(values)} experts of {outputs} outputs, which XLA stores by expert"
    return None


def _unsupported_state(kernel: str, *args: Any) -> str | None:
    """Returns the reason why a GPU's kernel does not take linear attention or Mamba-2, or None."""
    if kernel in _MAMBA:
        return _unsupported_mamba(*args)
    if reason := _unsupported_delta(*args):
        return reason
    width = max(args[2].state.shape[2:])
    is_prompt = kernel == "delta_prefill"
    return f"head width {width} is above {_MOST_WALKED}" if is_prompt and width > _MOST_WALKED else None


def _unsupported_delta(q: Any, taps: Any, old: DeltaState) -> str | None:
    """Returns the reason why no kernel takes a step of linear attention, or None."""
    if reason := _unsupported_dtypes((q,)) or _unsupported_dtypes((taps,)):
        return reason
    others = {*old.state.shape[2:]} - {*_WIDTHS}
    return f"head width {min(others)} is not one of {', '.join(map(str, _WIDTHS))}" if others else None


def _unsupported_delta_on_tpu(q: Any, taps: Any, old: DeltaState) -> str | None:
    if "float16" in (q.dtype, taps.dtype):
        return "dtype float16"
    _, heads, *widths = old.state.shape
    if min(widths) < LANES:  # half-empty lanes: XLA stores the state in another order of axes
        return f"head width {min(widths)} is less than {LANES}"
    size = 4 * heads * math.prod(widths)
    return f"a state of {size} bytes a row, more than {_TPU_STATE_BYTES}" if size > _TPU_STATE_BYTES else None


def _unsupported_mamba(x: Any, taps: Any, old: MambaState) -> str | None:
    """Returns the reason why no kernel takes a step of Mamba-2, or None."""
    if reason := _unsupported_dtypes((x,)) or _unsupported_dtypes((taps,)):
        return reason
    for name, size in zip(("head width", "state size"), old.state.shape[2:], strict=True):
        if size not in _WIDTHS:
            return f"{name} {size} is not one of {', '.join(map(str, _WIDTHS))}"
    return None


def _unsupported_mamba_on_tpu(x: Any, taps: Any, old: MambaState) -> str | None:
    if "float16" in (x.dtype, taps.dtype):
        return "dtype float16"
    _, heads, _, size = old.state.shape
    if size < LANES:  # half-empty lanes: XLA stores the state in another order of axes
        return f"state size {size} is less than {LANES}"
    return f"{heads} heads, not a multiple of 8" if heads % 8 else None


def _unaligned_slots(kernel: str, kv: SideBySide | Latents) -> str | None:
    """Returns the reason why copies of parts of a row or a page are not possible on a TPU, or None."""
    _, heads, slots, width = kv.values.shape
    itemsize = kv.values.dtype.itemsize
    if kernel == "rope_append" and slots % (32 // itemsize):
        return f"{slots} slots, not a multiple of {32 // itemsize}"
    least = 64 if kv.scale is None else 128
    if slots % least and heads * slots * width * itemsize > _TPU_COPY_BYTES:  # no parts: all slots at once
        return f"{slots} slots of a row, not a multiple of {least}"
    return None


def _unsupported_dtypes(args: tuple[Any, ...]) -> str | None:
    dtypes = {arg.dtype.name for arg in args}
    if len(dtypes) > 1:
        return f"operands of different dtypes {', '.join(sorted(dtypes))}"
    (dtype,) = dtypes
    return None if dtype in ("float32", *_SIXTEEN_BITS) else f"dtype {dtype}"


def _unsupported_attention(
    kernel: str, impl: str, q: Any, k: Any, v: Any, key_bias: KeyBias | None = None
) -> str | None:
    quantized = isinstance(k, Levels)
    is_latent = isinstance(k, Latents)
    floats = (q,) if quantized else (q, k) if is_latent else (q, k, v)
    if (reason := _unsupported_dtypes(floats)) is not None:
        return reason
    heads, width = q.shape[-2:]
    if is_latent:
        width = k.rank
        if key_bias is not None:
            return "latents with a bias of keys"
    widest = 256 if impl == "mosaic" else _WIDEST
    if width > widest:
        return f"head width {width} is above {widest}"
    if width > 128 and (quantized and q.dtype == "float32" or key_bias is not None):
        return f"head width {width} is above 128, with quantized keys and float32 queries or a bias of keys"
    if impl != "mosaic":
        return None
    if quantized or key_bias is not None:
        return "quantized keys are for the Triton kernel"
    if q.dtype == "float32":
        return "wgmma would multiply float32 as TF32"
    group = heads // k.shape[1]
    if kernel == "decode_attention" and group > 64:
        return f"{group} query heads share a key head, more than 64"
    return None
