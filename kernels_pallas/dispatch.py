"""Which implementation serves a call: by the name asked for, the GPU in the machine, and what each kernel can
do.

Nothing here asks which device a traced program will run on. `select` looks at shapes, dtypes and at the kind
of NVIDIA GPU that this process has, if any; that the program then lands on that GPU is for
`lax.platform_dependent` to decide.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

# Interpret: the Triton kernels, emulated on any device, for tests.
IMPLS = ("mosaic", "triton", "xla", "interpret")
KERNELS = ("prefill_attention", "decode_attention", "argmax", "lm_head_argmax")


class Selection(NamedTuple):
    """The implementation of one call, and why it is not another."""

    impl: str
    reason: str


def device_impl() -> Selection:
    """The implementation made for this process's NVIDIA GPUs; "xla" where it has none."""
    try:
        device = jax.local_devices(backend="cuda")[0]  # the others of one machine are taken to be like it
    except RuntimeError:
        return Selection("xla", "no NVIDIA GPU here")
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    name = f"{device.device_kind}, compute capability {device.compute_capability}"
    cuda = re.search(r"cuda (\d+)", device.client.platform_version)
    if cuda and 12080 <= int(cuda[1]) < 12091:  # JAX refuses causal attention of this kind there
        return Selection(
            "xla", f"{name}: CUDA {cuda[1]} is known to miscompile such kernels, 12.9.1 and 13 are not"
        )
    if capability == (9, 0):
        return Selection("mosaic", name)
    return (
        Selection("triton", name)
        if capability >= (8, 0)
        else Selection("xla", f"{name}: kernels need 8.0 or newer")
    )


def unavailable(impl: str | None) -> str | None:
    """Why this process cannot run an implementation at all, or None. For programs that are compiled elsewhere
    it may be ignored.
    """
    if impl not in (None, *IMPLS):
        return f"impl must be None or one of {', '.join(IMPLS)}, got {impl!r}"
    if impl not in ("mosaic", "triton"):
        return None  # runs anywhere: the device is not asked for
    here = device_impl()
    if here.impl == "xla" or impl == "mosaic" and here.impl != "mosaic":
        needs = "9.0" if impl == "mosaic" else "8.0 or newer"
        return (
            f"impl={impl!r} needs an NVIDIA GPU of compute capability {needs} ({here.reason}): use"
            " impl='xla', or None to let it choose"
        )
    return None


def select(kernel: str, impl: str | None, *args: Any, ring: bool = False) -> Selection:
    """The implementation that serves `kernel` on arguments of these shapes and dtypes.

    Args:
        kernel: one of `KERNELS`.
        impl: one of `IMPLS`; None: what suits the GPU of this process, "xla" where no kernel serves the call.
        args: the kernel's leading arrays (or anything with shape and dtype): q, k, v, or x, or x and the
            weight.
        ring: keys not in order of position, which no kernel reads.

    Raises:
        ValueError: the named implementation does not exist, or does not serve these arguments.
    """
    if impl is None:
        made_for = device_impl()
        reason = _refusal(kernel, made_for.impl, args, ring)
        if made_for.impl != "xla" and kernel == "lm_head_argmax" and args[0].shape[0] > 64:
            reason = f"{args[0].shape[0]} rows would read the vocabulary matrix more than once"
        return Selection("xla", reason) if reason else made_for
    if impl not in IMPLS:
        raise ValueError(unavailable(impl))
    reason = _refusal(kernel, impl, args, ring)
    if reason:
        raise ValueError(
            f"impl={impl!r} does not serve {kernel} here: {reason}; use impl='xla', or None to let it choose"
        )
    return Selection(impl, "asked for by name")


def run(impl: str, kernel: str, *args: Any, **kwargs: Any) -> Any:
    """Runs a kernel ("mosaic", "triton" or "interpret") with the arguments of its oracle in
    `reference.py`.
    """
    if impl == "interpret":
        impl = "triton"
        kwargs = kwargs | {"interpret": True}
    # Imported when used: Pallas's GPU half takes a second to import, and a machine without a GPU never needs
    # it.
    function: Callable = getattr(importlib.import_module(f"{__package__}.{impl}"), kernel)
    return varying_as(function(*args, **kwargs), *args)


def varying_as(tree: Any, *inputs: Any) -> Any:
    """The tree, its arrays said to differ over each axis of a `jax.shard_map` that an input does: what
    is made from nothing does not say so.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(inputs)))

    def vary(x: jax.Array) -> jax.Array:
        more = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(more), to="varying") if more else x

    return jax.tree.map(vary, tree) if axes else tree


def _refusal(kernel: str, impl: str, args: tuple[Any, ...], ring: bool) -> str | None:
    """Why `impl` cannot serve these arguments, or None."""
    if impl == "xla":
        return None
    if ring:
        return "keys in a ring, as layers with a sliding window keep them in a larger cache"
    dtypes = {arg.dtype.name for arg in args}
    if len(dtypes) > 1:
        return f"operands of different dtypes {', '.join(sorted(dtypes))}"
    (dtype,) = dtypes
    if impl == "mosaic" and kernel != "argmax" and dtype == "float32":
        return "wgmma would multiply float32 as TF32"
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"dtype {dtype}"
    if kernel.endswith("attention"):
        heads, width = args[0].shape[-2:]
        group = heads // args[1].shape[1]
        if width > 256:
            return f"head width {width} is above 256"
        if impl == "mosaic" and kernel == "decode_attention" and group > 64:
            return f"{group} query heads share a key head, more than 64"
    return None
