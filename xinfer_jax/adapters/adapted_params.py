"""Adapters in a model's parameters: put there, taken out, or merged."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_array, is_traced
from ..errors import InputError, format_names, format_value
from ..modes import in_default_modes
from ..weights.adapted_weight import AdaptedWeight, UntiedWeight
from ..weights.param_specs import leaf_name
from ..weights.params import AnyArray, Params, activation_dtype
from ..weights.quantized_weight import is_quantized
from .adapter import Adapter, LowRank, for_all_rows_only, make_adapter
from .fitted_adapter import check_adapter, weights_by_path


@in_default_modes
def with_adapter(params: Params, adapter: Adapter) -> Params:
    """Returns parameters that compute with a LoRA adapter, for all rows.

    Pass them to `forward`, `score`, `decode_loop`, `generate` or an engine. To train the adapter,
    differentiate a function of the adapter that calls this: its gradients are the gradients of the adapter's
    arrays alone.

    Example:
        >>> import jax
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> adapter = xj.lora.init_adapter(model.config, jax.random.key(0), rank=4)
        >>> params = xj.lora.with_adapter(model.params, adapter)
        >>> ids = xj.encode_prompt(model, "What is the capital of France?")
        >>> model.tokenizer.decode(xj.generate(params, model.config, [ids]).tokens[0])
        'The capital of France is Paris.'

    Args:
        params: the parameter tree of the model, with any kind of leaves, and with its layers in a tuple.
        adapter: the adapter, from `init_adapter` or `load_adapter`.

    Raises:
        InputError: the adapter does not fit the model, or the parameters have adapters already.
    """
    adapter = check_adapter(params, adapter)
    scale_of = adapter.scale_of()

    def adapt(path: str, weight: Any) -> Any:
        a, b = adapter.matrices[path]
        if not a.shape[-2]:
            return weight
        (a, b) = (jnp.expand_dims(x, -3) for x in (a, b))
        return AdaptedWeight(weight, a, b, scale=scale_of[path])

    return map_matrices(_with_norms(params, adapter), adapter.matrices, adapt)


@in_default_modes
def with_adapters(params: Params, adapters: Sequence[Adapter], adapter_B: AnyArray) -> Params:
    """Returns parameters that compute with several LoRA adapters: each row of a batch uses one of them.

    Pass them to functions of arrays with B rows: `forward`, `score`, `prefill` or `decode_loop`.

    Args:
        params: the parameter tree of the model, with its layers in a tuple (see `with_adapter`).
        adapters: at least one adapter. They may have different ranks, matrices and dtypes. The arrays of a
            matrix are stacked in the widest dtype of them and of the activations, so each adapter has the
            results that it has alone.
        adapter_B: int32: the index of each row's adapter. -1: the row has no adapter.

    Raises:
        InputError: an adapter does not fit the model, or an index is out of range. Traced indices are not
            checked.
    """
    adapters = [*adapters]
    if not adapters:
        raise InputError("with_adapters needs at least one adapter")
    adapters = [check_adapter(params, adapter) for adapter in adapters]
    for adapter in adapters:
        if names := for_all_rows_only(adapter):
            raise InputError(
                f"{format_names(names, 8)} can have one adapter for all rows only: use with_adapter, or"
                " merge it"
            )
    number = len(adapters)
    adapter_B = adapter_B if is_traced(adapter_B) else np.asarray(adapter_B)
    check_array("adapter_B", adapter_B, np.integer, "B")
    if not is_traced(adapter_B) and not np.all((adapter_B >= -1) & (adapter_B < number)):
        raise InputError(f"adapter_B must be from -1 to {number - 1}, got {format_value(adapter_B)}")
    scales = [adapter.scale_of() for adapter in adapters]

    def adapt(path: str, weight: Any) -> AdaptedWeight:
        found = [adapter.matrices.get(path) for adapter in adapters]
        (outputs, inputs) = weight.shape
        dtype = jnp.result_type(activation_dtype(params), *jax.tree.leaves(found))
        rank = max(len(pair.a) for pair in found if pair)
        a = jnp.zeros((number + 1, rank, inputs), dtype)
        b = jnp.zeros((number + 1, outputs, rank), dtype)
        for i, pair in enumerate(found):
            if pair:
                a = a.at[i, : len(pair.a)].set(pair.a)
                b = b.at[i, :, : len(pair.a)].set(pair.b.astype(dtype) * scales[i][path])
        return AdaptedWeight(weight, a, b, jnp.asarray(adapter_B, jnp.int32))

    return map_matrices(params, {path for adapter in adapters for path in adapter.matrices}, adapt)


@in_default_modes
def split_adapter(params: Params) -> tuple[Params, Adapter]:
    """Splits the result of `with_adapter` into the parameters of the model and the adapter.

    The norms of the adapter stay in the parameters.

    Args:
        params: parameters from `with_adapter`.

    Returns:
        The parameters and the `Adapter`.
    """
    weights = weights_by_path(params)
    found = {path: weight for path, weight in weights.items() if isinstance(weight, AdaptedWeight)}
    if found.get("lm_head") is found.get("embed"):
        found.pop("lm_head", None)
    is_of_rows = any(weight.adapter_B is not None for weight in found.values())
    if not found or is_of_rows or isinstance(params["layers"], dict):
        raise InputError("split_adapter takes what with_adapter returns: one adapter, layers not stacked")
    matrices = {
        path: LowRank(weight.lora_a[..., 0, :, :], weight.lora_b[..., 0, :, :])
        for path, weight in found.items()
    }
    scales = {path: weight.scale for path, weight in found.items()}
    if isinstance(params["embed"]["weight"], UntiedWeight):
        (a, b) = next(matrices[path] for path in ("embed", "lm_head") if path in matrices)
        matrices = {"lm_head": LowRank(a[:0], b[:, :0])} | matrices
        scales = {"lm_head": 1.0} | scales
    params = map_matrices(params, matrices, lambda path, weight: getattr(weight, "base", weight))
    return params, make_adapter(matrices, scales)


@in_default_modes
def merge_adapter(params: Params, adapter: Adapter) -> Params:
    """Returns float parameters with the adapter added to their matrices, and with its norms.

    Each leaf keeps its dtype. Use it to save a fine-tuned model without an adapter.

    Args:
        params: the parameter tree of the model, of floats.
        adapter: the adapter.

    Raises:
        InputError: the adapter does not fit the model, or a matrix is quantized. In the second case merge
            into float parameters, and then quantize them with `xj.params.reshard`.
    """
    adapter = check_adapter(params, adapter)
    matrices = weights_by_path(params)
    if quantized := [path for path in adapter.matrices if is_quantized(matrices[path])]:
        raise InputError(
            f"an adapter is merged into float parameters, and {format_names(quantized, 4)} are quantized:"
            " merge first, and quantize by xj.params.reshard(…, quantize=)"
        )
    scale_of = adapter.scale_of()

    def merge(path: str, weight: Any) -> jax.Array:
        a, b = (x.astype(jnp.float32) for x in adapter.matrices[path])
        added = jnp.matmul(b, a, precision="highest") * scale_of[path]
        return (weight.astype(jnp.float32) + added).astype(weight.dtype)

    return map_matrices(_with_norms(params, adapter), adapter.matrices, merge)


def _with_norms(params: Params, adapter: Adapter) -> Params:
    """Returns the parameters with the adapter's norms, in the dtypes of the model's norms: the dtype of a
    norm is the dtype of activations.
    """

    def leaf(keys: Any, old: Any) -> Any:
        new = adapter.norms.get(leaf_name(keys))
        return old if new is None else new.astype(old.dtype)

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_quantized)


def map_matrices(params: Params, paths: Collection[str], function: Callable[[str, Any], Any]) -> Params:
    """Returns the parameters with function(path, weight) in place of these weights."""
    is_tied = "lm_head" not in params

    def new(path: str, old: Any) -> Any:
        return function(path, old) if path in paths else old

    def leaf(keys: Any, old: Any) -> Any:
        path = leaf_name(keys).removesuffix(".weight")
        if not leaf_name(keys).endswith(".weight"):
            return old
        if isinstance(old, UntiedWeight):
            embedding = new("embed", old.embedding)
            head = new("lm_head", old.head)
            return embedding if embedding is head else UntiedWeight(embedding, head)
        if path == "embed" and is_tied and "lm_head" in paths:
            return UntiedWeight(new("embed", old), new("lm_head", old))
        return new(path, old)

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_quantized)
