"""`Adapter`: the low-rank matrices of a fine-tuned model (LoRA) as a pytree, in a model's parameters and out
of them.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_array, check_integer, is_traced
from ..config.model_config import ModelConfig
from ..errors import InputError, format_names, format_value
from ..weights.adapted_weight import AdaptedWeight
from ..weights.param_specs import leaf_name
from ..weights.params import AnyArray, Params, ParamSpec, param_specs, resolve_dtype
from ..weights.quantized_weight import is_quantized

_ROTATED = (
    "int8 activations rotate the model, and adapters are of one that is not: load it without activations, or"
    " merge the adapter before it is quantized"
)


class LowRank(NamedTuple):
    """What an adapter adds to a matrix [O, I], but for its scale: b @ a.

    Attributes:
        a: [R, I].
        b: [O, R].
    """

    a: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: a pytree of float arrays, for optax as it is.

    Attributes:
        matrices: by the paths of matrices in the parameters, as "layers.0.q".
        scales: the factor of each, in the order of their sorted paths; no leaves of the pytree.
    """

    matrices: dict[str, LowRank]
    scales: tuple[float, ...] = dataclasses.field(metadata=dict(static=True))

    def scale_of(self) -> dict[str, float]:
        """Returns the factor of each matrix by its path. Raises InputError where their numbers differ."""
        if len(self.scales) != len(self.matrices):
            raise InputError(f"the adapter has {len(self.matrices)} matrices and {len(self.scales)} scales")
        return dict(zip(sorted(self.matrices), self.scales, strict=True))


def make_adapter(matrices: Mapping[str, LowRank], scales: Mapping[str, float]) -> Adapter:
    """Returns the adapter of these matrices and factors, both by path."""
    return Adapter(dict(matrices), tuple(float(scales[path]) for path in sorted(matrices)))


def adaptable_matrices(config: ModelConfig) -> dict[str, ParamSpec]:
    """Returns the specs of the matrices that can have adapters, by path: those of linear layers. Raises
    InputError where the model is rotated.
    """
    if config.rotated:
        raise InputError(_ROTATED)
    specs = jax.tree.leaves(param_specs(config)["layers"])
    matrices = {spec.name: spec for spec in specs if len(spec.shape) == 2 and spec.name.endswith(".weight")}
    return {name.removesuffix(".weight"): spec for name, spec in matrices.items() if ".router." not in name}


def adapter_digest(adapter: Adapter) -> bytes:
    """Returns a hash of an adapter's contents: of other contents it is another one."""
    digest = hashlib.sha256(repr(adapter.scales).encode())
    for path, pair in sorted(adapter.matrices.items()):
        for x in map(np.asarray, pair):
            digest.update(f"{path} {x.shape} {x.dtype}\n".encode() + x.tobytes())
    return digest.digest()


def for_all_rows_only(adapter: Adapter) -> list[str]:
    """Returns the paths of what an adapter changes and rows cannot have each their own of: experts, embedding
    and head. Functions and engines of several adapters reject them by these names.
    """
    return [path for path in adapter.matrices if not path.startswith("layers.") or ".experts." in path]


def init_adapter(
    config: ModelConfig,
    key: jax.Array,
    rank: int = 8,
    targets: Sequence[str] | None = None,
    *,
    alpha: float | None = None,
    dtype: Any = "float32",
) -> Adapter:
    """Returns a new adapter, which changes nothing yet: a is random, uniform as PEFT's, and b zero.

    Args:
        config, key: the model, and one PRNG key.
        rank: R of every matrix.
        targets: names of matrices in a layer, as "q" or "mlp.down"'s "down"; None: all of the layers.
        alpha: the scale is alpha / rank; None: 1.
        dtype: of the arrays.

    Raises:
        InputError: a target that the model has not; a rank below 1; alpha is no finite number.
    """
    rank = check_integer("rank", rank, 1)
    if alpha is not None and not (isinstance(alpha, int | float | np.number) and math.isfinite(alpha)):
        raise InputError(f"alpha must be a finite number, got {format_value(alpha)}")
    specs = adaptable_matrices(config)
    leaf_names = {path: path.split(".", 2)[2] for path in specs}
    wanted = {*leaf_names.values()} if targets is None else {*targets}
    if isinstance(targets, str) or (unknown := wanted - {*leaf_names.values()}):
        raise InputError(
            f"targets must be names of {format_names(sorted({*leaf_names.values()}))}, got"
            f" {format_value(targets if isinstance(targets, str) else sorted(unknown))}"
        )
    chosen = {path: spec for path, spec in specs.items() if leaf_names[path] in wanted}
    dtype = resolve_dtype(dtype)

    def new(spec: ParamSpec, key: jax.Array) -> LowRank:
        outputs, inputs = spec.shape
        bound = 1 / math.sqrt(inputs)
        a = jax.random.uniform(key, (rank, inputs), dtype, -bound, bound)
        return LowRank(a, jnp.zeros((outputs, rank), dtype))

    keys = jax.random.split(key, len(chosen))
    matrices = {path: new(spec, own) for (path, spec), own in zip(chosen.items(), keys, strict=True)}
    return make_adapter(matrices, dict.fromkeys(matrices, 1.0 if alpha is None else alpha / rank))


def with_adapter(params: Params, adapter: Adapter) -> Params:
    """Returns parameters of the adapted model, for `forward`, `score`, `decode_loop`, `generate` and engines.
    Gradients in the adapter are those of its arrays alone.

    Args:
        params: of the model, of any kind, with its layers in a tuple.
        adapter: for all rows.

    Raises:
        InputError: it does not fit the model; the parameters have adapters.
    """
    check_adapter(params, adapter)
    scale_of = adapter.scale_of()

    def adapt(path: str, weight: Any) -> AdaptedWeight:
        a, b = adapter.matrices[path]
        return AdaptedWeight(weight, a[None], b[None], scale=scale_of[path])

    return map_matrices(params, adapter.matrices, adapt)


def with_adapters(params: Params, adapters: Sequence[Adapter], adapter_B: AnyArray) -> Params:
    """Returns parameters of several adapted models, for functions of arrays with B rows: `forward`, `score`,
    `prefill`, `decode_loop`.

    Args:
        params: as in `with_adapter`.
        adapters: at least one; of any ranks and matrices.
        adapter_B: int32: the index of each row's adapter; -1: it has none.

    Raises:
        InputError: an adapter that does not fit the model; an index that is none, unless it is traced.
    """
    adapters = [*adapters]
    if not adapters:
        raise InputError("with_adapters needs at least one adapter")
    for adapter in adapters:
        check_adapter(params, adapter)
        if names := for_all_rows_only(adapter):
            raise InputError(
                f"{format_names(names, 8)} can have one adapter for all rows only: use with_adapter, or merge"
                " it"
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
        rank = max(pair.a.shape[0] for pair in found if pair is not None)

        def stacked(of: int, shape: tuple[int, ...]) -> jax.Array:
            zeros = jnp.zeros(shape, jax.tree.leaves(found)[0].dtype)
            padded = (zeros if x is None else zeros.at[*map(slice, x[of].shape)].set(x[of]) for x in found)
            return jnp.stack(list(padded))

        scale_N = jnp.array([scale.get(path, 0.0) for scale in scales], jnp.float32)
        pair = stacked(0, (rank, inputs)), stacked(1, (outputs, rank))
        return AdaptedWeight(weight, *pair, jnp.asarray(adapter_B, jnp.int32), scale_N)

    return map_matrices(params, {path for adapter in adapters for path in adapter.matrices}, adapt)


def split_adapter(params: Params) -> tuple[Params, Adapter]:
    """Returns what `with_adapter` put together: the model's parameters, and the adapter."""
    found = {path: weight for path, weight in _matrices(params).items() if isinstance(weight, AdaptedWeight)}
    if not found or any(x.adapter_B is not None or x.lora_a.ndim != 3 for x in found.values()):
        raise InputError("split_adapter takes what with_adapter returns: one adapter, layers not stacked")
    params = map_matrices(params, found, lambda path, weight: weight.base)
    matrices = {path: LowRank(weight.lora_a[0], weight.lora_b[0]) for path, weight in found.items()}
    return params, make_adapter(matrices, {path: weight.scale for path, weight in found.items()})


def merge_adapter(params: Params, adapter: Adapter) -> Params:
    """Returns float parameters with the adapter's sum in them, each of the dtype that it has.

    Raises:
        InputError: it does not fit the model; a matrix is quantized: merge into float parameters, then
            quantize them by `xj.reshard`.
    """
    check_adapter(params, adapter)
    matrices = _matrices(params)
    if quantized := [path for path in adapter.matrices if is_quantized(matrices[path])]:
        raise InputError(
            f"an adapter is merged into float parameters, and {format_names(quantized, 4)} are quantized:"
            " merge first, and quantize by xj.reshard(…, quantize=)"
        )
    scale_of = adapter.scale_of()

    def merge(path: str, weight: Any) -> jax.Array:
        a, b = (x.astype(jnp.float32) for x in adapter.matrices[path])
        added = jnp.matmul(b, a, precision="highest") * scale_of[path]
        return (weight.astype(jnp.float32) + added).astype(weight.dtype)

    return map_matrices(params, adapter.matrices, merge)


def _matrices(params: Params) -> dict[str, Any]:
    """Every weight by the path of its matrix."""
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    named = {leaf_name(keys): leaf for keys, leaf in found}
    return {name.removesuffix(".weight"): leaf for name, leaf in named.items() if name.endswith(".weight")}


def map_matrices(params: Params, paths: Collection[str], function: Callable[[str, Any], Any]) -> Params:
    """Returns the parameters with function(path, weight) in place of these weights."""

    def leaf(keys: Any, old: Any) -> Any:
        path = leaf_name(keys).removesuffix(".weight")
        return function(path, old) if path in paths and leaf_name(keys).endswith(".weight") else old

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_quantized)


def check_adapter(params: Params, adapter: Adapter) -> None:
    """Raises one InputError for all matrices of an adapter that are unknown or misshapen."""
    if not isinstance(adapter, Adapter):
        raise InputError(f"an adapter is what load_adapter returns, got {type(adapter).__name__}")
    matrices = _matrices(params)
    if any(getattr(leaf, "int8_activations", False) for leaf in matrices.values()):
        raise InputError(_ROTATED)
    faults = []
    for path, (a, b) in adapter.matrices.items():
        weight = matrices.get(path)
        if weight is None:
            faults.append(f"{path} is no matrix of the model")
        elif isinstance(weight, AdaptedWeight):
            faults.append(f"{path} has an adapter already")
        elif (
            a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != weight.shape or a.shape[0] != b.shape[1]
        ):
            faults.append(f"{path} {list(weight.shape)} has a {list(a.shape)} and b {list(b.shape)}")
    if faults:
        raise InputError(f"the adapter does not fit the parameters: {format_names(faults, 8)}")
