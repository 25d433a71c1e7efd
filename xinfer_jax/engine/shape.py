"""`EngineShape`: the sizes of an engine, which decide on its compiled programs."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import Mesh

from .. import __version__
from ..adapters.adapter import row_matrices
from ..backends.cpu.cpu_features import numerics_features
from ..cache.fingerprint import draft_fingerprint, fingerprint
from ..cache.kv_cache import cache_bytes, state_bytes
from ..cache.layer_cache import LayerCache
from ..cache.paged import PAGE_SIZE, check_page_dtype, empty_features, empty_pools
from ..cache.stored_kv import resolve_cache_dtype
from ..checkpoint.loading import Model
from ..checks import check_integer, number_array
from ..config.model_config import ModelConfig
from ..config.unsupported import check_causal
from ..device import cpu_count, host_memory_bytes, memory_bytes
from ..draft_heads.draft import Draft
from ..draft_heads.draft_head import DraftHead
from ..errors import InputError, format_value
from ..generation.head_prefill import bound_head
from ..grammar.token_automaton import MAX_ENTRIES
from ..memory_plan import MemoryPlan, program_parts
from ..model.routes import routes_shape
from ..ops.operation import check_impl
from ..sharding import MODEL, concrete_mesh_of, memory_fraction
from ..weights.adapted_weight import AdaptedWeight
from ..weights.params import Params, activation_dtype, cache_dtype as default_cache_dtype, tree_bytes
from ..weights.quantized_weight import is_quantized
from .device_programs import MAX_LOGPROBS
from .engine_options import EngineOptions
from .pacing import MAX_DECODE_TOKENS
from .pages import num_pages_for, usable_capacity

_DEFAULT_CAPACITY = 4096
_PAGES_FRACTION = 0.5  # of the memory beside the weights
_MOST_AUTO_TOKENS = 4  # draft tokens in each pass with draft_tokens="auto"
_UNREAD_TOKENS = 64  # of a row that its draft head reads together, if steps had no draft tokens
_LEAST_SNAPSHOTS = 4  # of recurrent states; one for each row if these are more
_CHUNKS_OF_SNAPSHOT = 4  # of host pages, for each snapshot in host memory


@dataclasses.dataclass(frozen=True)
class EngineShape(EngineOptions):
    """The options of an engine with a value for each, and the sizes that follow from them and the model.

    Attributes:
        cache_dtype: a float type, or a name in the table of cache dtypes.
        processors, vectors: `HeldProcessors`, `HeldVectors`.
        weight_bytes: the bytes of parameters and adapters.
        page_bytes: the bytes of one page in all layers.
        state_bytes: the bytes of one row's recurrent states in all layers. 0: the model has none.
        snapshots: the number of snapshots of such states that the prefix cache keeps on the device.
        host_snapshots: the number of such snapshots in host memory.
        adapter_bytes: the bytes of all adapters.
        num_routes: experts of a token in all layers, which are recorded with its keys. 0: they are not.
        head: the draft head. None: the engine has none.
    """

    capacity: int = 0
    pages: int = 0
    max_adapters: int = 0
    max_rank: int = 0
    processors: Any = None
    vectors: Any = None
    weight_bytes: int = 0
    page_bytes: int = 0
    state_bytes: int = 0
    snapshots: int = 0
    host_snapshots: int = 0
    adapter_bytes: int = 0
    num_routes: int = 0
    head: DraftHead | None = None

    @property
    def num_head_pools(self) -> int:
        """The number of pools that a draft head adds: for each of its mixers, and for its features."""
        return len(self.head.config.cached_mixers) + 1 if self.head and self.head.has_cache else 0

    def empty_pools(self, config: ModelConfig, dtype: Any, mesh: Mesh | None = None) -> Any:
        """Returns the pools of all pages, of the model and then of the draft head. dtype: the dtype of
        features.
        """
        pools = empty_pools(config, self.pages, self.cache_dtype, mesh, self.num_routes)
        if not self.num_head_pools:
            return pools
        head: Any = self.head
        own = empty_pools(head.config, self.pages, self.cache_dtype, mesh)
        return (*pools, *own, (empty_features(self.pages, head.feature_size, dtype, mesh), None))

    def empty_states(
        self, config: ModelConfig, rows: int, mesh: Mesh | None = None
    ) -> tuple[LayerCache, ...]:
        """Returns the recurrent states of this number of rows: the cache of each mixer without keys."""
        drafts = self.num_draft_tokens and 1 + self.num_draft_tokens
        layers = (
            mixer.empty_cache(rows, self.capacity, self.cache_dtype, mesh)
            for mixer in config.cached_mixers
            if not mixer.has_keys
        )
        if not rows:
            return ()
        # Each layer has its own lengths: a program could not donate one array for several.
        return tuple(layer.with_draft_slots(drafts, jnp.zeros(rows, jnp.int32)) for layer in layers)

    @property
    def extra_slots(self) -> int:
        """Slots after its tokens to which a row writes when its head drafts."""
        return self.head.scratch_slots(self.num_draft_tokens) if self.num_head_pools and self.head else 0

    @property
    def num_draft_tokens(self) -> int:
        """The most draft tokens of a pass. 0: no speculative decoding."""
        if not self.draft:
            return 0
        if not isinstance(self.draft_tokens, str):
            return self.draft_tokens
        return min(_MOST_AUTO_TOKENS, self.head.max_draft_tokens if self.head else _MOST_AUTO_TOKENS)

    @property
    def draft_widths(self) -> tuple[int, ...]:
        """The numbers of draft tokens that a pass may have. The programs of the first one compile first."""
        most = self.num_draft_tokens
        return tuple(range(1 + most)) if self.draft_tokens == "auto" else (most,)

    @property
    def num_unread(self) -> int:
        """The most tokens of a row that a draft head has not read."""
        return _UNREAD_TOKENS if self.head_waits else 1 + self.num_draft_tokens

    @property
    def head_waits(self) -> bool:
        """True if the head does not read the tokens of steps without draft tokens. It reads them together
        later (`Device.read_unread`).
        """
        return len(self.draft_widths) > 1 and self.num_head_pools > 0

    def most_steps(self, width: int) -> int:
        """Returns the most steps of a call with this number of draft tokens: a row's tokens fit into its
        output, and if the head does not read them, into its unread tokens.
        """
        most = MAX_DECODE_TOKENS // (1 + width)
        if width or not self.head_waits:
            return most
        return min(most, self.num_unread - 1 - self.num_draft_tokens)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all pages, recurrent states and their snapshots on the device."""
        return self.pages * self.page_bytes + (self.rows + self.snapshots) * self.state_bytes

    def memory_plan(self, params: Params, config: ModelConfig) -> MemoryPlan:
        """Returns the bytes of an engine of this shape."""
        vectors = len(self.vectors) if self.vectors else 0
        row = 2 * MAX_ENTRIES + 4 * self.capacity + MAX_DECODE_TOKENS * (12 + 16 * MAX_LOGPROBS)
        row += 4 * MAX_DECODE_TOKENS * -(-config.vocab_size // 32) * self.support
        own = params.get("draft_head", {})
        parts = dict(
            weights=tree_bytes(params) - tree_bytes(own),
            draft=tree_bytes(self.draft.params if isinstance(self.draft, Draft) else own),
            pages=self.pages * self.page_bytes,
            states=(self.rows + self.snapshots) * self.state_bytes,
            adapters=self.adapter_bytes,
            vectors=4 * vectors * config.num_hidden_layers * config.hidden_size,
            rows=self.rows * row,  # the table of a grammar, the tokens so far, and what a call returns
            **program_parts(config, self.chunk, self.rows, 18),
        )
        return MemoryPlan(parts, memory_fraction(concrete_mesh_of(params)))

    @property
    def usable_capacity(self) -> int:
        """Tokens of a prompt and its answer together that it can hold."""
        return usable_capacity(self.capacity, self.pages)


def check_options(model: Model, options: EngineOptions) -> EngineOptions:
    """Returns the options with plain numbers. If the engine only decodes, they have no prefix cache: a prefix
    is found by the engine that prefills prompts. Raises InputError for values that no engine can have.
    """
    checked: Any = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if "least" in field.metadata and not (value is None and field.default is None):
            if isinstance(value, str) and value in field.metadata.get("words", ()):
                continue
            least = field.metadata["least"]
            check: Any = check_integer if isinstance(least, int) else _check_number
            checked[field.name] = check(field.name, value, least, field.metadata.get("most"))
    options = dataclasses.replace(options, **checked)
    if not isinstance(options.draft, Draft) and options.draft not in (None, "lookup", "mtp"):
        what = f"draft={format_value(options.draft)}"
        raise InputError(f"{what}: an engine has 'lookup', 'mtp', a head from load_draft, or None")
    check_impl(options.impl)
    if options.chunk % PAGE_SIZE:
        raise InputError(f"chunk must be a multiple of {PAGE_SIZE}, got {options.chunk}")
    _check_host_pages(model, options)
    if options.role == "decode":
        return dataclasses.replace(options, prefix_cache=False, host_pages=0, page_directory=None)
    return options


def engine_shape(model: Model, options: EngineOptions) -> EngineShape:
    """Returns the sizes of an engine. options: the result of `check_options`. Raises InputError for a model,
    or sizes, that no engine can have.
    """
    config = model.config
    check_causal(config, "an engine")
    mesh = concrete_mesh_of(model.params)
    if mesh is not None and mesh.size > mesh.shape[MODEL]:
        raise InputError(
            f"an engine takes a mesh with the axis {MODEL!r} alone, got {dict(mesh.shape)}: make one engine"
            " for each group of devices"
        )
    check_page_dtype(dtype := options.cache_dtype)
    rows = options.rows
    of_state = state_bytes(config)
    snapshots = max(_LEAST_SNAPSHOTS, rows) if of_state and options.prefix_cache else 0
    on_host = options.host_pages * PAGE_SIZE // (_CHUNKS_OF_SNAPSHOT * options.chunk)
    num_adapters = options.max_adapters or 0
    head = engine_head(model, options)
    sizes: dict[str, Any] = dict(
        capacity=check_capacity(config, options.capacity),
        pages=options.pages or 0,
        cache_dtype=default_cache_dtype(model.params) if dtype is None else resolve_cache_dtype(dtype),
        state_bytes=of_state,
        snapshots=snapshots,
        host_snapshots=max(snapshots, on_host) if snapshots and options.host_pages else 0,
        head=head,
        num_routes=math.prod(routes_shape(config)) if options.routed_experts else 0,
        adapter_bytes=(num_adapters + 1) * _adapter_bytes(model, options.max_rank) if num_adapters else 0,
    )
    sizes["page_bytes"] = (
        cache_bytes(config, 1, PAGE_SIZE, sizes["cache_dtype"])
        - of_state
        + 2 * PAGE_SIZE * sizes["num_routes"]
    )
    if head and head.has_cache:
        itemsize = activation_dtype(model.params).itemsize
        sizes["page_bytes"] += cache_bytes(head.config, 1, PAGE_SIZE, sizes["cache_dtype"])
        sizes["page_bytes"] += itemsize * head.feature_size
    sizes["weight_bytes"] = tree_bytes(model.params) + sizes["adapter_bytes"]
    shape = EngineShape(**vars(options) | sizes)
    return shape if shape.pages else dataclasses.replace(shape, pages=_default_pages(shape, model))


def engine_head(model: Model, options: EngineOptions) -> DraftHead | None:
    """Returns the draft head of an engine for this model, or None. Raises InputError if it is the head of
    another model, or cannot draft so many tokens.
    """
    if options.draft in (None, "lookup"):
        return None
    count = 1 if options.draft_tokens == "auto" else options.draft_tokens
    return bound_head(options.draft, model.params, model.config, count).head


def checked_memory_plan(shape: EngineShape, model: Model) -> MemoryPlan:
    """Runs `EngineShape.memory_plan`. Raises InputError if it exceeds the memory of a device or of the
    host.
    """
    plan = shape.memory_plan(model.params, model.config)
    rows = ", fewer rows" if shape.state_bytes else ""
    plan.check(f"ask for fewer pages{rows}, or a smaller cache_dtype")
    if shape.host_pages:
        mesh = concrete_mesh_of(model.params)
        devices = model.params["final_norm"].sharding.addressable_devices
        part = len(devices) / mesh.size if mesh else 1  # of this process
        host = {
            "host pages": int(part * shape.host_pages * shape.page_bytes),
            "host snapshots": int(part * shape.host_snapshots * shape.state_bytes),
        }
        if next(iter(devices)).platform == "cpu":
            host["weights and pages"] = plan.total
        MemoryPlan(host).check("ask for fewer host_pages", host_memory_bytes())
    return plan


def check_capacity(config: ModelConfig, capacity: int | None) -> int:
    """Returns `EngineOptions.capacity`, or its default."""
    if capacity is None:
        capacity = min(_DEFAULT_CAPACITY, config.context_length)
    return check_integer("capacity", capacity, 2, config.context_length)


def _check_number(name: str, value: Any, least: float, most: float) -> float:
    number = number_array(value)
    if number is None or number.ndim or not least <= number <= most:
        raise InputError(f"{name} must be a number from {least:g} to {most:g}, got {format_value(value)}")
    return float(number)


def _check_host_pages(model: Model, options: EngineOptions) -> None:
    """Raises InputError if the options of pages beyond the device contradict each other."""
    host_pages = options.host_pages
    directory = options.page_directory
    if host_pages and not options.prefix_cache:
        raise InputError(f"host_pages={host_pages} are of the prefix cache: leave out prefix_cache=False")
    if directory is not None and not host_pages:
        raise InputError("page_directory needs host_pages: pages are there on their way to files and back")
    if directory is not None and not isinstance(directory, str | Path):
        raise InputError(f"page_directory must be a path, got {format_value(directory)}")


def page_settings(params: Params, config: ModelConfig, shape: EngineShape) -> dict[str, Any]:
    """Returns the settings on which the bits of a page depend, and of a snapshot of recurrent states, in
    addition to its tokens and the programs that wrote them.
    """
    adapters = [shape.max_adapters, shape.max_rank] if shape.max_adapters else None
    one_page = dataclasses.replace(shape, pages=1)
    pools = jax.eval_shape(lambda: one_page.empty_pools(config, activation_dtype(params)))
    states = jax.eval_shape(lambda: shape.empty_states(config, 1))
    mesh = concrete_mesh_of(params)
    device = next(iter(params["final_norm"].sharding.device_set))
    options = "jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion"
    return dict(
        model=fingerprint(params, config),
        draft=head_fingerprint(params, shape) if shape.num_head_pools else None,
        factors=[config.rope.short_factor, config.rope.long_factor],
        versions=[__version__, jax.__version__, jaxlib.__version__], device=device.device_kind,
        cpu=[*numerics_features(), cpu_count()] if device.platform == "cpu" else None,
        dtype=str(shape.cache_dtype), form=[f"{x.dtype}{x.shape}" for x in jax.tree.leaves((pools, states))],
        mesh=mesh.size if mesh else 1, impl=shape.impl,
        adapters=adapters, capacity=shape.capacity, flags=os.environ.get("XLA_FLAGS"),
        options=[getattr(jax.config, name) for name in options],
    )  # fmt: skip


def head_params(params: Params, shape: EngineShape) -> Any:
    """Returns the parameters of the draft head. None: there is none. params: the parameters of the model."""
    if shape.head is None:
        return None
    return shape.draft.params if isinstance(shape.draft, Draft) else params["draft_head"]


def head_fingerprint(params: Params, shape: EngineShape) -> str | None:
    """Returns the `draft_fingerprint` of the draft head. None: there is none."""
    return draft_fingerprint(shape.head, head_params(params, shape)) if shape.head else None


def max_request_tokens(config: ModelConfig, capacity: int | None, pages: int | None) -> int:
    """Returns tokens of a prompt and its answer that an `Engine` of these arguments can hold
    (`usable_capacity`).
    """
    capacity = check_capacity(config, capacity)
    return capacity if pages is None else usable_capacity(capacity, check_integer("pages", pages, 2))


def _adapter_bytes(model: Model, rank: Any) -> int:
    """Returns the bytes of an adapter of this rank on every matrix of the layers."""
    if any(isinstance(leaf, AdaptedWeight) for leaf in jax.tree.leaves(model.params, is_leaf=is_quantized)):
        raise InputError("the model has an adapter already: leave out max_adapters, or load it without")
    itemsize = activation_dtype(model.params).itemsize
    return sum(rank * sum(spec.shape) * itemsize for spec in row_matrices(model.config).values())


def _default_pages(shape: EngineShape, model: Model) -> int:
    """Returns the default number of pages. They fill half of the memory that the other parts of the plan
    leave. They are at least enough for one row, and at most twice the number that all rows fill. shape: the
    shape without pages.
    """
    plan = shape.memory_plan(model.params, model.config)
    devices = model.params["final_norm"].sharding.addressable_devices
    # On a CPU all devices have one memory, and others may have their engines.
    part = len(devices) / jax.local_device_count() if next(iter(devices)).platform == "cpu" else 1
    left = max(0, part * memory_bytes() - plan.total)
    affordable = int(_PAGES_FRACTION * left / (plan.fraction * max(1, shape.page_bytes)))
    pages_per_row = num_pages_for(shape.capacity)
    return max(pages_per_row + 1, min(2 * shape.rows * pages_per_row + 1, affordable))
