"""Forms of operations over a mesh of devices: each device computes its part, with the code of one device.

A layer is one `jax.shard_map` with two sums [.., D] over all devices, in the dtype of the activations. The
embedding needs a third sum. Logits stay sharded by vocabulary, and the compiler completes the code that
samples from them, with a few numbers per row.

int8 scales activations by the largest of a device's inputs, so its last bits depend on the number of devices.
With int8 activations the largest of all devices is one number more per row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from ..cache.paged import Paged
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..feed_forward.experts import num_local_experts
from ..model.decoder_layer import LayersOutput
from ..ops.forms import by_name
from ..ops.largest import largest_k
from ..ops.operation import Call, match_varying_axes
from ..sampling.sampler import sample_from_all
from ..sharding import MODEL, REPLICATED, RULES, abstract_mesh_of, cache_specs, row_axis, shard_map_over
from ..weights.layers import products
from ..weights.layout import is_divisible, layer_partition_specs, partition_specs
from ..weights.params import AnyArray, Params, param_specs


def _model_mesh(tree: Any, config: ModelConfig) -> Any:
    """Returns the mesh over which the model is sharded. None: there is none, or its devices do not divide the
    sizes: then the caller has sharded the arrays in another way, and XLA propagates that sharding.
    """
    mesh = abstract_mesh_of(tree)
    return mesh if mesh is not None and is_divisible(config, mesh.shape[MODEL]) else None


def mesh_layer_form(call: Call) -> Callable | None:
    """Returns a form of `decoder_layer`: heads, experts, the MLP's features and the cache are divided. So are
    the rows, unless they share pages.
    """
    layer, x_BTD, positions, inputs, caches = (
        call.operands[name] for name in ("layer", "x_BTD", "positions", "inputs", "caches")
    )
    config = call.static["config"]
    model_mesh = _model_mesh(layer, config)
    mesh = model_mesh or jax.typeof(x_BTD).sharding.mesh
    rows = None if any(isinstance(cache, Paged) for cache in caches) else row_axis(mesh, len(x_BTD))
    over = MODEL if model_mesh else None
    if over is None and rows is None:
        return None
    # Those of one device too: some forms need a `shard_map` that leaves nothing to the compiler.
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    of_one = [axis for axis, kind in kinds.items() if mesh.shape[axis] == 1 and kind == AxisType.Auto]
    axes = {*of_one, *(axis for axis in (over, rows) if axis)}

    run_config = dataclasses.replace(call.run_config, over=over)

    def on_devices(layer: Params, x_BTD: jax.Array, *rest: Any) -> Any:
        return call.plain(match_varying_axes(layer, x_BTD), x_BTD, *rest, run_config=run_config)

    rules = dict(RULES if over else dict.fromkeys(RULES), rows=rows)
    layer_specs = layer_partition_specs(layer, config, mesh, rules)
    row_specs = jax.tree.map(
        lambda x: PartitionSpec(rows) if len(x) == len(x_BTD) else REPLICATED, (x_BTD, positions, inputs)
    )
    specs_of_caches = [cache_specs(cache, mesh, rows) if over else PartitionSpec(rows) for cache in caches]
    new_specs = [
        PartitionSpec(rows, over) if cache is None and config.shares_kv else specs
        for cache, specs in zip(caches, specs_of_caches, strict=True)
    ]
    specs = (layer_specs, *row_specs, tuple(specs_of_caches))
    of_rows: Any = PartitionSpec(rows)
    out_specs = LayersOutput(of_rows, tuple(new_specs), of_rows)
    return by_name(shard_map_over(on_devices, mesh, specs, out_specs, axes), call.operands)


def mesh_embedding_form(call: Call) -> Callable | None:
    """Returns a form of `embed_tokens`. Each device has some of the matrix's rows, and the results are
    summed, or each device has all rows.
    """
    leaf = call.operands["leaf"]
    mesh = _model_mesh(leaf, call.static["config"])
    if mesh is None:
        return None
    specs, sharded = _vocabulary_specs(leaf, mesh, call.static["config"])

    def embed_part(token: jax.Array, leaf: Params) -> jax.Array:
        rows = leaf["weight"].shape[0]
        token = token - lax.axis_index(MODEL) * rows
        mine = (token >= 0) & (token < rows)
        return lax.psum(jnp.where(mine[..., None], call.plain(token.clip(0, rows - 1), leaf), 0), MODEL)

    part = embed_part if sharded else call.plain
    return by_name(shard_map_over(part, mesh, (REPLICATED, specs), REPLICATED), call.operands)


def mesh_unembed_form(call: Call) -> Callable | None:
    """Returns a form of `unembed`, whose logits are divided by vocabulary."""
    leaf = call.operands["leaf"]
    config = call.static["config"]
    mesh = _model_mesh(leaf, config)
    if mesh is None:
        return None
    specs, sharded = _vocabulary_specs(leaf, mesh, config)
    leading = (None,) * (call.operands["hidden"].ndim - 1)
    out_spec = PartitionSpec(*leading, MODEL) if sharded else REPLICATED
    over_mesh = by_name(shard_map_over(call.plain, mesh, (specs, REPLICATED), out_spec), call.operands)
    if leaf["weight"].shape[0] == config.vocab_size:
        return over_mesh
    # Without the logits of padding rows. The compiler keeps the others sharded.
    return lambda **operands: over_mesh(**operands)[..., : config.vocab_size]


def _vocabulary_specs(leaf: Params, mesh: Any, config: ModelConfig) -> tuple[Any, bool]:
    """Returns the PartitionSpecs of a vocabulary matrix of a model or a draft head, and True if its rows are
    sharded.
    """
    specs = partition_specs(param_specs(config)["embed"], leaf, mesh, RULES)
    return specs, leaf["weight"].shape[0] % mesh.shape[MODEL] == 0


def summed_linear(
    x: jax.Array, leaf: Params, over: str, dtype: Any, residual: jax.Array | None, run_config: RunConfig
) -> jax.Array:
    """Runs `weights.layers.linear` if the axis `over` divides the inputs: the devices' products are
    summed.
    """
    weight = leaf["weight"]
    if not isinstance(weight, AnyArray):
        x, weight = weight.local_shard(x, over)
    y = lax.psum(products(x, [{"weight": weight}], dtype=dtype, run_config=run_config)[0], over)
    if "bias" in leaf:
        y = y + leaf["bias"]
    y = y.astype(dtype)
    return y if residual is None else residual + y


def means_of_squares(xs: list[jax.Array], over: str) -> list[jax.Array]:
    """Returns, float32 [..., 1], the mean of squares of each vector, whose features the axis `over` divides.
    One reduction serves all.
    """
    own = [jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) for x in xs]
    return jnp.split(lax.pmean(jnp.concatenate(own, -1), over), len(xs), -1)


def mesh_experts(mix: Callable, expert_MU: jax.Array, layer: Params, over: str) -> jax.Array:
    """Returns mix(expert_MU), the weighted outputs of experts, which the axis `over` divides."""
    first = lax.axis_index(over) * num_local_experts(layer["experts"])
    return lax.psum(mix(expert_MU - first), over)


def mesh_sampling_form(call: Call) -> Callable | None:
    """Returns a form of `sample_rows` for divided logits: it samples from the whole vocabulary."""
    return None if abstract_mesh_of(call.operands["processed_BV"]) is None else sample_from_all


def mesh_top_k_form(call: Call) -> Callable | None:
    """Returns a form of `top_k` for rows whose numbers are divided: each device finds candidates in its
    part.
    """
    mesh = abstract_mesh_of(call.operands["x"])
    if mesh is None:
        return None
    count = call.static["count"]
    devices = mesh.shape[MODEL]

    def local_top_k(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, index = largest_k(x, min(count, x.shape[-1]))
        return values, index + lax.axis_index(MODEL) * x.shape[-1]

    def over_mesh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if more := -x.shape[-1] % devices:  # padding comes after V, so ties go to real entries
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], constant_values=-jnp.inf)
        parts = PartitionSpec(*(None,) * (x.ndim - 1), MODEL)
        values, index = shard_map_over(local_top_k, mesh, parts, (parts, parts))(x)
        largest, which = lax.top_k(values, count)
        return largest, jnp.take_along_axis(index, which, -1)

    return over_mesh
