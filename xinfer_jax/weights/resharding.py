"""Moves a tree of parameters to other devices: it divides, casts or quantizes the parameters again, and
repeats key heads if there are more devices than key heads.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..annotations import Dtype
from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..modes import in_default_modes
from ..sharding import MODEL, RULES, check_divisible, check_mesh
from .layout import shardings
from .params import Params, ParamSpec, check_params, param_specs, resolve_dtype
from .quantization import check_quantize_method, device_form, group_size_for_shards, quantized_leaf
from .quantized_weight import is_quantized


@in_default_modes
def reshard(
    params: Params,
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: Dtype | None = None,
    quantize: str | None = None,
    fsdp: str | None = None,
) -> tuple[Params, ModelConfig]:
    """Returns the parameters over a mesh, as `load_model(mesh=mesh)` shards them, and their config.

    If the mesh has more devices along "model" than the model has key heads, the key heads are repeated, also
    in the config. A vocabulary whose size the devices do not divide is padded with rows of zeros.

    Args:
        params: the parameter tree of a model, on one device or over any mesh.
        config: the config of the model.
        mesh: a mesh with an axis "model".
        dtype: the dtype of float leaves. None keeps their dtypes.
        quantize: "int8" or "int4" quantizes the matrices, one at a time on the host. Each matrix must then be
            in one process. None quantizes nothing.
        fsdp: an axis of the mesh that divides hidden_size too (see `shardings`). None does not divide it.

    Returns:
        The parameters and the config.

    Raises:
        InputError: the devices do not divide a size, or a matrix is quantized already and would be quantized
            again or has key heads to repeat.
    """
    check_params(params, config)
    devices = check_mesh(mesh).shape[MODEL]
    new_config = with_repeated_kv_heads(config, devices)
    check_quantize_method(quantize)
    dtype = None if dtype is None else resolve_dtype(dtype)

    def convert(spec: ParamSpec, wanted: ParamSpec, leaf: Any) -> Any:
        if is_quantized(leaf):
            if spec.shape != wanted.shape or quantize:
                what = "quantized again" if quantize else "given more key heads"
                raise InputError(f"{spec.name} is quantized and cannot be {what}: start from float weights")
            return leaf
        x = leaf if dtype is None else leaf.astype(spec.dtype or dtype)
        if spec.shape != wanted.shape:
            x = grow_rows(x, len(x) * wanted.kv_heads // spec.kv_heads, spec.kv_heads)
        if spec.axes[0] == "vocab" and (more := -len(x) % devices):
            x = grow_rows(x, len(x) + more)
        if quantize is None or not spec.is_quantizable:
            return x
        parts = devices if RULES[spec.axes[-1] or "embed"] else 1  # of the groups of an output
        group = group_size_for_shards(x.shape, spec.name, quantize, parts) if x.ndim == 2 else None
        return device_form(quantized_leaf(np.asarray(x), spec.name, quantize, group))

    specs = param_specs(config), param_specs(new_config)
    tree = jax.tree.map(convert, *specs, params, is_leaf=lambda x: isinstance(x, ParamSpec))
    return jax.device_put(tree, shardings(new_config, mesh, fsdp=fsdp, like=tree)), new_config


def grow_rows(x: Any, rows: int, heads: int = 0) -> Any:
    """Returns the leaf, of NumPy or jax, with more rows: its key heads are repeated. heads: 0: zeros are
    added after its rows.
    """
    xp = x.__array_namespace__()
    if heads:
        return xp.repeat(x.reshape(heads, -1), rows // len(x), 0).reshape(rows, *x.shape[1:])
    return xp.pad(x, [(0, rows - len(x)), *[(0, 0)] * (x.ndim - 1)])


def with_repeated_kv_heads(config: ModelConfig, devices: int) -> ModelConfig:
    """Returns the config with key/value heads repeated if there are more devices than heads, so that each
    device has one. Raises InputError if neither number divides the other.
    """

    def repeated(heads: int, name: str = "kv_heads") -> int:
        if devices % heads:
            check_divisible(name, heads, devices)
        return max(heads, devices)

    def of_layer(layer: LayerSpec) -> LayerSpec:
        names = dict.fromkeys(("num_key_value_heads", "kv_copies"), "kv_heads")
        for field, name in (names | dict(n_groups="groups of Mamba-2")).items():
            found = (getattr(mixer, field, None) for mixer in layer.mixers)
            if own := next(filter(None, found), None):
                layer = layer.with_mixer(**{field: repeated(own, name)})
        return layer

    layers = tuple(map(of_layer, config.layers))
    head: Any = config.draft_head
    if head is not None:
        head = dataclasses.replace(head, layer=of_layer(head.layer))
    heads = repeated(config.num_key_value_heads)
    return dataclasses.replace(config, num_key_value_heads=heads, layers=layers, draft_head=head)


def with_kv_heads_once(params: Params, config: ModelConfig, original: ModelConfig) -> Params:
    """Returns the parameters of `original`, of which `with_repeated_kv_heads` made this config.

    Raises:
        InputError: heads that were repeated differ by now, or are quantized.
    """

    def once(spec: ParamSpec, wanted: ParamSpec, leaf: Any) -> Any:
        if spec.shape == wanted.shape:
            return leaf
        if is_quantized(leaf):
            raise InputError(f"{spec.name} has repeated key heads, which are not saved once where quantized")
        heads = leaf.reshape(wanted.kv_heads, spec.kv_heads // wanted.kv_heads, -1)
        if not bool((heads == heads[:, :1]).all()):
            raise InputError(
                f"{spec.name} has key heads that were repeated for a mesh and now differ: leave out `like`"
            )
        return heads[:, 0].reshape(wanted.shape)

    is_spec = lambda x: isinstance(x, ParamSpec)  # noqa: E731
    return jax.tree.map(once, param_specs(config), param_specs(original), params, is_leaf=is_spec)
