"""Chooses the implementation of a call: by name, by the GPU or TPU in the machine, and by the arguments that
each kernel supports.

Nothing here asks which device a traced program will run on. `select` uses shapes, dtypes and the NVIDIA GPU
or TPU of this process, if any. `lax.platform_dependent` then decides whether the program runs there.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from .support import backend_of, slower_reason, unsupported_reason, without_kernel_reason

# "interpret": the Triton kernels, "interpret_tpu": the TPU kernels, emulated on any device, for tests.
IMPLS = ("mosaic", "triton", "tpu", "xla", "interpret", "interpret_tpu")
KERNELS = (
    "prefill_attention", "decode_attention", "argmax", "lm_head_argmax", "int8_head_argmax",
    "summarize_logits", "gated_experts", "product", "rope_append", "delta_step", "delta_prefill",
    "delta_drafts", "mamba_step", "mamba_prefill",
)  # fmt: skip


class Selection(NamedTuple):
    """The implementation of an operation in a call, and the reason for it.

    Attributes:
        impl: "mosaic", "triton", "tpu" or "xla".
        reason: a sentence that says why it was chosen.
    """

    impl: str
    reason: str


NO_DEVICE = "no NVIDIA GPU or TPU here"
_assumed: Selection | None = None  # inside `assume_device`


@contextlib.contextmanager
def assume_device(
    capability: tuple[int, int] | None, name: str, platform: Literal["cuda", "tpu"] = "cuda"
) -> Iterator[None]:
    """Inside, this process selects kernels as one with such an NVIDIA GPU or TPU does, to compile for it.
    jax's traces are dropped at both ends, since they do not know for which device they are.

    capability: compute capability of a GPU, (9, 0) for Hopper. None: the device is a TPU. name: the name of
    the device, for the reasons of selections.
    """
    global _assumed
    before = _assumed
    jax.clear_caches()
    _assumed = Selection("tpu", name) if platform == "tpu" else _impl_of(capability or (0, 0), name)
    try:
        yield
    finally:
        _assumed = before
        jax.clear_caches()


def default_platform() -> str:
    """Returns the platform of `assume_device`, "gpu" or "tpu". Outside of it, it returns jax's default
    backend.
    """
    if _assumed is None:
        return jax.default_backend()
    return "tpu" if _assumed.impl == "tpu" else "gpu"


def device_impl() -> Selection:
    """Returns the implementation for this process's NVIDIA GPUs or TPUs, or "xla" if it has none."""
    if _assumed is not None:
        return _assumed
    device = _first_device("cuda")
    if device is None:
        tpu = _first_device("tpu")
        return Selection("xla", NO_DEVICE) if tpu is None else Selection("tpu", tpu.device_kind)
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    name = f"{device.device_kind}, compute capability {device.compute_capability}"
    cuda = re.search(r"cuda (\d+)", device.client.platform_version)
    if cuda and 12080 <= int(cuda[1]) < 12091:  # JAX rejects causal attention of this kind there
        return Selection(
            "xla", f"{name}: CUDA {cuda[1]} is known to miscompile such kernels, 12.9.1 and 13 are not"
        )
    return _impl_of(capability, name)


def platforms() -> tuple[str, ...]:
    """Returns the platforms of this process's devices, as `lax.platform_dependent` names them."""
    here = device_impl().impl
    if here == "tpu":
        return "cpu", "tpu"
    return ("cpu", "cuda") if here != "xla" or _first_device("cuda") is not None else ("cpu",)


def _first_device(platform: str) -> jax.Device | None:
    """Returns the first device of this platform. All devices of a process are taken to be alike. None: the
    process has none.
    """
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError:
        return None


def _impl_of(capability: tuple[int, ...], name: str) -> Selection:
    if capability < (8, 0):
        return Selection("xla", f"{name}: kernels need 8.0 or newer")
    return Selection("mosaic" if capability == (9, 0) else "triton", name)


def unavailable_reason(impl: str | None) -> str | None:
    """Returns the reason why this process cannot run an implementation at all. None: it can. Ignore it for
    programs that are only compiled here.
    """
    if impl not in (None, *IMPLS):
        return f"impl must be None or one of {', '.join(IMPLS)}, got {impl!r}"
    if impl not in ("mosaic", "triton", "tpu"):
        return None  # runs on any device
    here = device_impl()
    if here.impl == impl or (here.impl, impl) == ("mosaic", "triton"):
        return None
    gpu = "an NVIDIA GPU of compute capability"
    needs = {"tpu": "a TPU", "mosaic": f"{gpu} 9.0", "triton": f"{gpu} 8.0 or newer"}[impl]
    return f"impl={impl!r} needs {needs} ({here.reason}): use impl='xla', or None to choose automatically"


def select(kernel: str, impl: str | None, *args: Any, obstacle: str | None = None) -> Selection:
    """Returns the implementation of `kernel` for arguments of these shapes and dtypes.

    Args:
        kernel: one of `KERNELS`.
        impl: one of `IMPLS`. None: the implementation for the device of this process, or "xla" if that does
            not support the call.
        args: the kernel's first arrays (or anything with shape and dtype). They are q, k, v and perhaps
            `KeyBias`, or x, or x and the weight, or x, the experts' matrices and perhaps their biases, or q
            and the caches, or q, the taps of its convolution and the `DeltaState`, or x, its taps and the
            `MambaState`. `SideBySide` and `Latents` are k, and v is None.
        obstacle: the reason why no kernel supports the call, if the caller knows one.

    Raises:
        ValueError: the named implementation does not exist, or does not support these arguments.
    """
    if impl is None:
        return _select_for_device(kernel, args, obstacle)
    if impl not in IMPLS:
        raise ValueError(unavailable_reason(impl))
    if reason := without_kernel_reason(kernel, impl):
        return Selection("xla", reason)
    chosen = backend_of(kernel, impl, args)
    if chosen != "xla" and (reason := obstacle or unsupported_reason(kernel, chosen, args)):
        raise ValueError(
            f"impl={impl!r} does not support {kernel} here: {reason}; use impl='xla', or None to choose"
            " automatically"
        )
    return Selection(chosen, "requested by name")


def _select_for_device(kernel: str, args: tuple[Any, ...], obstacle: str | None) -> Selection:
    device, name = device_impl()
    if device == "xla":
        return Selection("xla", name)
    if reason := without_kernel_reason(kernel, device):
        return Selection("xla", reason)
    chosen = backend_of(kernel, device, args)
    reason = obstacle or slower_reason(kernel, chosen, args)
    if reason is None and (reason := unsupported_reason(kernel, chosen, args)) is None:
        return Selection(chosen, name)
    is_attention = kernel.endswith("attention") and obstacle is None
    if chosen == "mosaic" and is_attention and unsupported_reason(kernel, "triton", args) is None:
        return Selection("triton", f"{name}; {reason}")
    return Selection("xla", reason)


def run_kernel(impl: str, kernel: str, *args: Any, **kwargs: Any) -> Any:
    """Runs a kernel of any implementation but "xla", with the arguments of its reference if it has one."""
    if impl in ("interpret", "interpret_tpu"):
        impl = "triton" if impl == "interpret" else "tpu"
        kwargs = kwargs | {"interpret": True}
    # Imported when used: Pallas takes a second to import, and a machine with CPUs alone never needs it.
    function: Callable = getattr(importlib.import_module(f"{__package__}.{impl}"), kernel)
    return match_varying_axes(function(*args, **kwargs), *args)


def platform_of(chosen: str, requested: str | None) -> str | None:
    """Returns the platform whose programs run the chosen implementation, as `lax.platform_dependent` names
    it. None: all platforms, since it was requested by name, or there is no kernel.
    """
    if requested is not None or chosen == "xla":
        return None
    return "tpu" if chosen == "tpu" else "cuda"


def run_on_platform(platform: str | None, kernel: Callable, plain: Callable, *operands: Any) -> Any:
    """Runs `kernel(*operands)` in programs of this platform, `plain` in others. None: `kernel` in all
    programs.
    """
    if platform is None:
        return kernel(*operands)
    return lax.platform_dependent(*operands, **{platform: kernel}, default=plain)


def match_varying_axes(tree: Any, *inputs: Any) -> Any:
    """Returns the tree, its arrays marked as varying over each axis of a `jax.shard_map` over which an input
    varies. Constants are not marked by themselves.
    """
    axes = _varying_axes(inputs)

    def vary(x: jax.Array) -> jax.Array:
        more = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(more), to="varying") if more else x

    return jax.tree.map(vary, tree) if axes else tree


def result_type(shape: tuple[int, ...], dtype: Any, *inputs: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result. Inside `jax.shard_map` it varies over each mesh axis that an
    input varies over.
    """
    varying = jax.sharding.ManualAxisType(varying=_varying_axes(inputs))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def _varying_axes(inputs: Any) -> frozenset:
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(inputs)))
