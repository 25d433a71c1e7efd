"""`EngineShape`: the sizes of an engine, which decide on its compiled programs."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax
import jaxlib

from .. import __version__
from ..adapters.adapter import row_matrices
from ..backends.cpu.cpu_features import numerics_features
from ..cache.fingerprint import fingerprint
from ..cache.kv_cache import cache_bytes, state_bytes
from ..cache.paged import PAGE_SIZE, check_page_dtype, empty_pools
from ..cache.stored_kv import resolve_cache_dtype
from ..checkpoint.loading import Model
from ..checks import check_integer, number_array
from ..config.model_config import ModelConfig
from ..config.unsupported import check_causal
from ..device import cpu_count, host_memory_bytes, memory_bytes
from ..errors import InputError, format_value
from ..generation.options import MAX_DRAFT_TOKENS
from ..memory_plan import MemoryPlan, program_parts
from ..model.routes import routes_shape
from ..ops.operation import check_impl
from ..sharding import MODEL, concrete_mesh_of, memory_fraction
from ..weights.adapted_weight import AdaptedWeight
from ..weights.params import Params, activation_dtype, cache_dtype as default_cache_dtype, tree_bytes
from ..weights.quantized_weight import is_quantized
from .pages import num_pages_for, usable_capacity

_DEFAULT_CAPACITY = 4096
_PAGES_FRACTION = 0.5  # of the memory beside the weights
_LEAST_SNAPSHOTS = 4  # of recurrent states; one for each row if these are more


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """The arguments of `Engine` that decide on its shape, which `engine_shape` checks."""

    rows: int
    capacity: int | None
    pages: int | None
    chunk: int
    draft: str | None
    draft_tokens: int
    cache_dtype: Any
    impl: str | None
    role: str | None
    routes: bool
    max_adapters: int
    max_rank: int


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Sizes of an engine, from `engine_shape`; those that `Engine` has too are as it documents them."""

    rows: int
    capacity: int
    pages: int
    chunk: int
    num_draft_tokens: int
    cache_dtype: Any  # a float type, or a name in the table of cache dtypes
    impl: str | None
    page_bytes: int  # of one page in all layers
    state_bytes: int = 0  # of one row's recurrent states in all layers; 0: the model has none
    snapshots: int = 0  # of such states, which the prefix cache keeps
    role: str | None = None
    host_pages: int = 0
    max_adapters: int = 0
    max_rank: int = 0  # of each
    adapter_bytes: int = 0  # of all
    # Experts of a token in all layers, which are recorded beside its keys; 0: they are not.
    num_routes: int = 0
    processors: Any = None  # `HeldProcessors`; None: it has none
    vectors: Any = None  # `HeldVectors`; None: it has none

    def memory_plan(self, params: Params, config: ModelConfig) -> MemoryPlan:
        """The bytes of an engine of this shape."""
        vectors = len(self.vectors.names) if self.vectors else 0
        parts = dict(
            weights=tree_bytes(params),
            pages=self.pages * self.page_bytes,
            states=(self.rows + self.snapshots) * self.state_bytes,
            adapters=self.adapter_bytes,
            vectors=4 * vectors * config.num_hidden_layers * config.hidden_size,
            **program_parts(config, self.chunk, self.rows, 18),
        )
        return MemoryPlan(parts, memory_fraction(concrete_mesh_of(params)))


def engine_shape(model: Model, settings: EngineSettings) -> EngineShape:
    """Returns the sizes of an engine. Raises InputError for settings that no engine can have."""
    config = model.config
    check_causal(config, "an engine")
    mesh = concrete_mesh_of(model.params)
    if mesh is not None and mesh.size > mesh.shape[MODEL]:
        raise InputError(
            f"an engine takes a mesh with the axis {MODEL!r} alone, got {dict(mesh.shape)}: make one engine"
            " for each group of devices"
        )
    if settings.draft not in (None, "lookup"):
        raise InputError(
            f"draft={format_value(settings.draft)}: an engine has 'lookup', or no speculative decoding (None)"
        )
    check_impl(settings.impl)
    rows = check_integer("rows", settings.rows, 1)
    capacity = check_capacity(config, settings.capacity)
    chunk = check_integer("chunk", settings.chunk, PAGE_SIZE)
    if chunk % PAGE_SIZE:
        raise InputError(f"chunk must be a multiple of {PAGE_SIZE}, got {chunk}")
    num_draft_tokens = 0
    if settings.draft:
        num_draft_tokens = check_integer("draft_tokens", settings.draft_tokens, 1, MAX_DRAFT_TOKENS)
    dtype = settings.cache_dtype
    check_page_dtype(dtype)
    dtype = default_cache_dtype(model.params) if dtype is None else resolve_cache_dtype(dtype)
    of_state = state_bytes(config)
    num_routes = math.prod(routes_shape(config)) if settings.routes else 0
    page_bytes = cache_bytes(config, 1, PAGE_SIZE, dtype) - of_state + 2 * PAGE_SIZE * num_routes
    keeps_prefixes = of_state and settings.role != "decode"
    snapshots = max(_LEAST_SNAPSHOTS, rows) if keeps_prefixes else 0
    max_adapters = check_integer("max_adapters", settings.max_adapters, 0)
    max_rank = check_integer("max_rank", settings.max_rank, 1) if max_adapters else 0
    adapters = max_adapters, max_rank, max_adapters and (max_adapters + 1) * _adapter_bytes(model, max_rank)
    pages = 0 if settings.pages is None else check_integer("pages", settings.pages, 2)
    sizes = page_bytes, of_state, snapshots
    of_engine = rows, capacity, pages, chunk, num_draft_tokens, dtype, settings.impl
    shape = EngineShape(*of_engine, *sizes, settings.role, 0, *adapters, num_routes)
    return shape if pages else dataclasses.replace(shape, pages=_default_pages(shape, model))


def checked_memory_plan(shape: EngineShape, model: Model) -> MemoryPlan:
    """`EngineShape.memory_plan`. Raises InputError if it exceeds the memory of a device or of the host."""
    plan = shape.memory_plan(model.params, model.config)
    rows = ", fewer rows" if shape.state_bytes else ""
    plan.check(f"ask for fewer pages{rows}, or a smaller cache_dtype")
    if shape.host_pages:
        mesh = concrete_mesh_of(model.params)
        devices = model.params["final_norm"].sharding.addressable_devices
        part = len(devices) / mesh.size if mesh else 1  # of this process
        host = {"host pages": int(part * shape.host_pages * shape.page_bytes)}
        if next(iter(devices)).platform == "cpu":
            host["weights and pages"] = plan.total
        MemoryPlan(host).check("ask for fewer host_pages", host_memory_bytes())
    return plan


def check_capacity(config: ModelConfig, capacity: int | None) -> int:
    """`Engine`'s capacity, or its default."""
    if capacity is None:
        capacity = min(_DEFAULT_CAPACITY, config.context_length)
    return check_integer("capacity", capacity, 2, config.context_length)


def check_time_slice(seconds: Any) -> float:
    """`Engine`'s time_slice."""
    number = number_array(seconds)
    if number is None or number.ndim or not 0 <= number < math.inf:
        raise InputError(f"time_slice must be a number of seconds from 0 on, got {format_value(seconds)}")
    return float(number)


def check_host_pages(shape: EngineShape, host_pages: Any, prefix_cache: bool, page_directory: Any) -> int:
    """`Engine`'s host_pages. Raises InputError where these arguments contradict each other."""
    host_pages = check_integer("host_pages", host_pages, 0)
    if host_pages and shape.state_bytes:
        raise InputError(
            f"host_pages={host_pages} are not supported for a model with recurrent states, of which"
            " snapshots are on the device only: leave them out"
        )
    if host_pages and not prefix_cache:
        raise InputError(f"host_pages={host_pages} are of the prefix cache: leave out prefix_cache=False")
    if page_directory is not None and not host_pages:
        raise InputError("page_directory needs host_pages: pages are there on their way to files and back")
    if page_directory is not None and not isinstance(page_directory, str | Path):
        raise InputError(f"page_directory must be a path, got {format_value(page_directory)}")
    return host_pages


def page_settings(params: Params, config: ModelConfig, shape: EngineShape) -> dict[str, Any]:
    """What the bits of a page depend on, beside its tokens and the programs that wrote them."""
    adapters = [shape.max_adapters, shape.max_rank] if shape.max_adapters else None
    pools = jax.eval_shape(lambda: empty_pools(config, 1, shape.cache_dtype, None, shape.num_routes))
    mesh = concrete_mesh_of(params)
    device = next(iter(params["final_norm"].sharding.device_set))
    options = "jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion"
    return dict(
        model=fingerprint(params, config), factors=[config.rope.short_factor, config.rope.long_factor],
        versions=[__version__, jax.__version__, jaxlib.__version__], device=device.device_kind,
        cpu=[*numerics_features(), cpu_count()] if device.platform == "cpu" else None,
        dtype=str(shape.cache_dtype), form=[f"{x.dtype}{x.shape}" for x in jax.tree.leaves(pools)],
        mesh=mesh.size if mesh else 1, impl=shape.impl,
        adapters=adapters, capacity=shape.capacity, flags=os.environ.get("XLA_FLAGS"),
        options=[getattr(jax.config, name) for name in options],
    )  # fmt: skip


def max_request_tokens(config: ModelConfig, capacity: int | None, pages: int | None) -> int:
    """Tokens of a prompt and its answer that an `Engine` of these arguments can hold (`usable_capacity`)."""
    capacity = check_capacity(config, capacity)
    return capacity if pages is None else usable_capacity(capacity, check_integer("pages", pages, 2))


def _adapter_bytes(model: Model, rank: int) -> int:
    """Bytes of an adapter of this rank on every matrix of the layers."""
    if any(isinstance(leaf, AdaptedWeight) for leaf in jax.tree.leaves(model.params, is_leaf=is_quantized)):
        raise InputError("the model has an adapter already: leave out max_adapters, or load it without")
    itemsize = activation_dtype(model.params).itemsize
    return sum(rank * sum(spec.shape) * itemsize for spec in row_matrices(model.config).values())


def _default_pages(shape: EngineShape, model: Model) -> int:
    """Half of the memory that the other parts of the plan leave; at least what one row fills, at most twice
    what all fill. shape: without pages.
    """
    plan = shape.memory_plan(model.params, model.config)
    devices = model.params["final_norm"].sharding.addressable_devices
    # On a CPU all devices have one memory, and others may have their engines.
    part = len(devices) / jax.local_device_count() if next(iter(devices)).platform == "cpu" else 1
    left = max(0, part * memory_bytes() - plan.total)
    affordable = int(_PAGES_FRACTION * left / (plan.fraction * max(1, shape.page_bytes)))
    pages_per_row = num_pages_for(shape.capacity)
    return max(pages_per_row + 1, min(2 * shape.rows * pages_per_row + 1, affordable))
