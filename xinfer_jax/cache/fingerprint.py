"""A hash that identifies the model of a cache: of the config and of some numbers of every parameter."""

import collections
import dataclasses
import functools
import hashlib
import json
import math
import weakref
from typing import Any

import jax
import numpy as np

from ..config.layer_spec import AttentionSpec, MlpSpec
from ..config.model_config import ModelConfig
from ..kernels_pallas.mxfp4 import values_from_tpu
from ..weights.adapted_weight import AdaptedWeight
from ..weights.padded_weight import without_padding
from ..weights.params import Params

_SAMPLES = 64  # numbers of a leaf, evenly spaced, with the first and the last
# The last few parameter trees: their structure, weak references to their leaves, and their digest.
_KNOWN: collections.deque = collections.deque(maxlen=8)


def fingerprint(params: Params, config: ModelConfig) -> str:
    """Returns a hash of a model: equal for equal parameters on any device and jax version, and different once
    one changes.

    It leaves out longrope's factors, between which each call chooses (`Prefix.factors`). It reads the arrays,
    so it cannot be traced. It takes milliseconds for new parameters, and less for the parameters of the last
    calls.
    """
    own = {name: leaf for name, leaf in params.items() if name != "draft_head"}  # which has caches of its own
    config = dataclasses.replace(config, draft_head=None)
    return hashlib.sha256(f"{_config(config)}{tree_fingerprint(own)}".encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _config(config: ModelConfig) -> str:
    """Returns the compared fields as JSON, without fields at their default: so a field that a later version
    adds does not change the hash of models that do not use it.
    """
    rope = dataclasses.replace(config.rope, short_factor=(), long_factor=())

    def fields(value: Any) -> dict:
        values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare}
        defaults = {f.name: f.default for f in dataclasses.fields(value)}
        kind = getattr(value, "kind", None)  # of a part of a layer
        named = {} if kind in (None, AttentionSpec.kind, MlpSpec.kind) else dict(kind=kind)
        return named | {name: x for name, x in values.items() if x != defaults[name]}

    return json.dumps(fields(dataclasses.replace(config, rope=rope)), sort_keys=True, default=fields)


def draft_fingerprint(head: Any, params: Params) -> str:
    """Returns a hash of a draft head, as `fingerprint` returns one of a model. It leaves out the target.

    Args:
        head: a `DraftHead`.
        params: its own parameters.
    """
    own = {
        f.name: getattr(head, f.name) for f in dataclasses.fields(head) if f.name not in ("config", "target")
    }
    text = json.dumps(own, sort_keys=True, default=str)
    whole = f"{head.kind}{text}{_config(head.config)}{tree_fingerprint(params)}"
    return hashlib.sha256(whole.encode()).hexdigest()


def tree_fingerprint(params: Params) -> str:
    """Returns a hash of the parameters alone."""
    leaves, tree = jax.tree.flatten(params)
    for known_tree, known, digest in tuple(_KNOWN):
        if known_tree == tree and all(ref() is leaf for ref, leaf in zip(known, leaves, strict=True)):
            return digest
    sha = hashlib.sha256()
    found = jax.tree_util.tree_leaves_with_path(jax.eval_shape(without_padding, params))
    shapes = [leaf.shape for _, leaf in found]
    samples = jax.device_get(list(map(_sample, leaves, shapes)))
    for (keys, _), shape, sample in zip(found, shapes, samples, strict=True):
        path = jax.tree_util.keystr(keys)
        if path.endswith(".scale") and len(shape) > 1:  # of groups
            sample = _stored_form(sample)
        sha.update(f"{path} {shape} {sample.dtype}\n".encode() + sample.tobytes())
    adapted = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, AdaptedWeight))
    if scales := [leaf.scale for leaf in adapted if isinstance(leaf, AdaptedWeight)]:
        sha.update(repr(scales).encode())
    if all(isinstance(leaf, jax.Array) for leaf in leaves):  # a NumPy array may change
        _KNOWN.appendleft((tree, list(map(weakref.ref, leaves)), sha.hexdigest()))
    return sha.hexdigest()


def _stored_form(sample: np.ndarray) -> np.ndarray:
    """Returns scales of groups as float16 if that is exact. On TPUs they are float32 (`device_form`)."""
    with np.errstate(over="ignore"):
        half = sample.astype(np.float16)
    return half if np.array_equal(half, sample) else sample


def _sample(leaf: jax.Array | np.ndarray, shape: tuple[int, ...]) -> jax.Array | np.ndarray:
    """Returns numbers of an array that has this shape without padding."""
    if isinstance(leaf, jax.Array) and [device.platform for device in leaf.devices()] != ["cpu"]:
        return _gather(leaf, shape)
    return _take(np.asarray(leaf), shape)  # on CPU a view, and nothing to compile


def _take(leaf: Any, shape: tuple[int, ...]) -> Any:
    at = _sample_indices(shape)
    if leaf.ndim == len(shape):
        return leaf[at]
    (*experts, group, byte, output) = at  # of `Mxfp4Weight.for_tpu`, which has 32 bytes for two groups
    row = (group // 2 * 32)[:, None] + np.arange(32)
    blocks = leaf[(*(x[:, None] for x in experts), row, output[:, None])]
    return values_from_tpu(blocks[..., None])[np.arange(len(group)), group % 2, byte, 0]


_gather = jax.jit(_take, static_argnums=1)


@functools.lru_cache(maxsize=256)
def _sample_indices(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    size = math.prod(shape)
    return np.unravel_index(np.linspace(0, size - 1, min(_SAMPLES, size)).astype(np.int64), shape)
