"""Estimates the memory of a model on each device of a mesh `model=n`, which need not be here: bytes of
weights, pages and states, and the library's own bound of temporaries.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..cache.kv_cache import cache_bytes, state_bytes
from ..cache.paged import PAGE_SIZE
from ..cache.stored_kv import cache_dtype_of, resolve_cache_dtype
from ..checkpoint.sharded_leaves import leaf_partition
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..memory_plan import MemoryPlan, program_parts
from ..registry import plugin
from ..sharding import RULES
from ..weights.fp8_weight import FP8_BLOCK, fp8_struct
from ..weights.layout import is_divisible, partition_specs
from ..weights.mxfp4 import mxfp4_struct
from ..weights.params import Params, ParamSpec, param_specs, tree_bytes
from ..weights.quantization import (
    METHODS,
    check_quantize,
    device_form,
    group_size_for_shards,
    quantized_struct,
)
from ..weights.resharding import with_repeated_kv_heads
from .card_specs import MOST_DEVICES
from .model_work import attention_mixers, stored_vectors

# mxfp4: experts, fp8: matrices of layers, in blocks; the rest is bfloat16.
WEIGHTS = ("float32", "bfloat16", *METHODS, "mxfp4", "fp8")
LOGITS_BYTES = 18  # of each row and token of the vocabulary, as an engine plans them


@dataclasses.dataclass(frozen=True)
class EngineLoad:
    """A model in an engine whose rows are all full."""

    config: ModelConfig
    weights: str  # one of WEIGHTS
    cache_dtype: str
    rows: int
    context: int  # tokens of each row
    chunk: int  # tokens of a prefill chunk

    @property
    def kv(self) -> Any:
        """Dtype of keys and values: a float type, or a name in the table of cache dtypes."""
        return resolve_cache_dtype(self.cache_dtype)

    @property
    def pages_per_row(self) -> int:
        return -(-self.context // PAGE_SIZE)

    @property
    def pages(self) -> int:
        """Pages of the pool, including the one that no row uses."""
        return self.rows * self.pages_per_row + 1


def valid_mesh_sizes(job: EngineLoad) -> list[int]:
    """Returns numbers of devices that divide the model."""
    kinds = tuple(dict.fromkeys(job.config.layers))  # one layer of each kind says all
    config = dataclasses.replace(job.config, layers=kinds, num_hidden_layers=len(kinds))

    def divides(n: int) -> bool:
        try:
            return is_divisible(with_repeated_kv_heads(config, n), n)
        except InputError:  # key heads
            return False

    return [*filter(divides, range(1, MOST_DEVICES + 1))]


@functools.lru_cache
def device_weights(config: ModelConfig, weights: str, n: int) -> Params:
    """Returns shapes and dtypes of the parameters on each of n devices, as `load_model` creates them.
    weights: one of `WEIGHTS`.
    """
    dtype: Any = jnp.float32 if weights == "float32" else jnp.bfloat16
    quantize = None if weights in ("float32", "bfloat16") else weights
    if quantize not in ("mxfp4", "fp8"):
        check_quantize(config, quantize)

    def struct(spec: ParamSpec) -> Any:
        partition = leaf_partition(spec, n)
        shape = partition.part_spec(spec).shape
        if not quantize or not spec.is_quantizable or quantize == "mxfp4" and len(shape) == 2:
            return jax.ShapeDtypeStruct(shape, spec.dtype or dtype)
        if quantize == "mxfp4":
            return device_form(mxfp4_struct(shape))
        if quantize == "fp8":
            is_cut = partition.num_parts > 1 and len(shape) == 2 and shape[partition.axis or 0] % FP8_BLOCK
            is_float = is_cut or "vocab" in spec.axes
            return jax.ShapeDtypeStruct(shape, dtype) if is_float else fp8_struct(shape, True)
        group = group_size_for_shards(spec.shape, spec.name, quantize, n if partition.axis == 1 else 1)
        whole = device_form(quantized_struct(spec.shape, spec.name, quantize, group))

        def divide(x: jax.ShapeDtypeStruct, places: PartitionSpec) -> jax.ShapeDtypeStruct:
            sizes = zip(x.shape, places, strict=True)
            parts = tuple(-(-size // partition.num_parts) if place else size for size, place in sizes)
            return jax.ShapeDtypeStruct(parts, x.dtype)

        return jax.tree.map(divide, whole, partition_specs(spec, whole, None, RULES))

    return jax.tree.map(struct, param_specs(config))


def num_weights(config: ModelConfig) -> int:
    """Returns the number of weights."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config)))


def mesh_plan(job: EngineLoad, n: int) -> MemoryPlan:
    """Returns the bytes on each of n devices. Temporaries and logits are at most these: as if no device had a
    part.
    """
    page, state = page_and_state_bytes(job, n)
    parts = dict(
        weights=tree_bytes(device_weights(job.config, job.weights, n)),
        pages=page * job.pages,
        states=state * job.rows,
    )
    return MemoryPlan(parts | program_parts(job.config, job.chunk, job.rows, LOGITS_BYTES))


def page_and_state_bytes(job: EngineLoad, n: int) -> tuple[int, int]:
    """Returns the bytes of a page, and of a row's recurrent state with its snapshot, on each of n devices."""
    state = state_bytes(job.config)
    config = with_repeated_kv_heads(job.config, n)
    page = (cache_bytes(config, 1, PAGE_SIZE, job.kv) - state) // n
    return page + _head_page_bytes(job, config, n), 2 * (state // n)


def _head_page_bytes(job: EngineLoad, config: ModelConfig, n: int) -> int:
    """Returns the bytes of a page in the cache of the draft head, with the features of one token, on each of
    n devices. config: the config of the model over the devices.
    """
    if config.draft_head is None:
        return 0
    head = plugin("draft head", config.draft_head.kind).of_model(config)
    itemsize = 4 if job.weights == "float32" else 2
    return cache_bytes(head.config, 1, PAGE_SIZE, job.kv) // n + itemsize * head.feature_size


def row_bytes(job: EngineLoad, n: int) -> int:
    """Returns the bytes of the pages and the state of one row on each of n devices."""
    page, state = page_and_state_bytes(job, n)
    return page * job.pages_per_row + state


def smallest_mesh(job: EngineLoad, memory: float) -> int | None:
    """Returns the smallest number of devices with this many bytes of memory each that the job fits on. None:
    it fits on none.
    """
    return next((n for n in valid_mesh_sizes(job) if mesh_plan(job, n).total <= memory), None)


def visible_kv_bytes(config: ModelConfig, kv: Any, length: int, n: int = 1) -> int:
    """Returns the bytes of keys and values, of dtype kv, that a row of this length reads on each of n
    devices.
    """
    total = 0
    for mixer in attention_mixers(config):
        (vectors, width) = stored_vectors(mixer)
        tokens = min(mixer.window or length, length)
        total += max(1, vectors // n) * tokens * cache_dtype_of(kv).vector_bytes(width)
    return total
