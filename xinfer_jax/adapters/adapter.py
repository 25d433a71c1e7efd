"""`Adapter`: the low-rank matrices of a fine-tuned model (LoRA) as a pytree. Also makes new adapters, and
lists the matrices that can have one.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..annotations import AnyArray, Dtype
from ..checks import check_integer
from ..config.model_config import ModelConfig, check_config
from ..errors import InputError, format_names, format_value
from ..modes import in_default_modes
from ..weights.param_specs import leaf_name
from ..weights.params import ParamSpec, param_specs, resolve_dtype


class LowRank(NamedTuple):
    """The two matrices of a LoRA adapter for a matrix [O, I].

    The adapter adds their product ``b @ a``, times a scale, to the matrix.

    Attributes:
        a: [R, I]. For the experts of a layer: [X, R, I].
        b: [O, R]. For the experts of a layer: [X, O, R].
    """

    a: AnyArray
    b: AnyArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter (Hu et al. 2021): a pytree of float arrays, which optax can train as it is.

    Attributes:
        matrices: the `LowRank` of each adapted matrix, by its path in the parameters, for example
            "layers.0.q".
        scales: the factor of each matrix, in the order of the sorted paths. They are not leaves of the
            pytree.
        norms: weights [D] of norms that replace the model's own, by their paths, for example
            "layers.0.attn_norm".
    """

    matrices: dict[str, LowRank]
    scales: tuple[float, ...] = dataclasses.field(metadata=dict(static=True))
    norms: dict[str, AnyArray] = dataclasses.field(default_factory=dict)

    def scale_of(self) -> dict[str, float]:
        """Returns the factor of each matrix by its path.

        Raises:
            InputError: the number of scales differs from the number of matrices.
        """
        if len(self.scales) != len(self.matrices):
            raise InputError(f"the adapter has {len(self.matrices)} matrices and {len(self.scales)} scales")
        return dict(zip(sorted(self.matrices), self.scales, strict=True))


def make_adapter(
    matrices: Mapping[str, LowRank], scales: Mapping[str, float], norms: Mapping[str, Any] | None = None
) -> Adapter:
    """Returns the adapter of these matrices, factors and norms, each by path."""
    return Adapter(dict(matrices), tuple(float(scales[path]) for path in sorted(matrices)), dict(norms or {}))


def adaptable_matrices(config: ModelConfig) -> dict[str, ParamSpec]:
    """Returns the specs of the matrices that can have adapters, by path: linear layers, experts, routers, the
    embedding and the head, also if embedding and head are tied.
    """
    check_config(config)
    specs = jax.tree.leaves(param_specs(untied(config)))
    matrices = (spec for spec in specs if spec.is_matrix and spec.name.endswith(".weight"))
    return {spec.name.removesuffix(".weight"): spec for spec in matrices}


def adapter_digest(adapter: Adapter) -> bytes:
    """Returns a hash of an adapter's contents: of other contents it is another one."""
    digest = hashlib.sha256(repr(adapter.scales).encode())
    for path, x in jax.tree_util.tree_leaves_with_path(adapter):
        digest.update(f"{leaf_name(path)} {x.shape} {x.dtype}\n".encode() + np.asarray(x).tobytes())
    return digest.digest()


def is_norm(path: str) -> bool:
    """Returns True if a path in the parameters names the weights of a norm."""
    return path.endswith("norm")


def untied(config: ModelConfig) -> ModelConfig:
    """Returns the config with a separate output matrix, and without a draft head, which has no adapters."""
    return dataclasses.replace(config, tie_word_embeddings=False, draft_head=None)


def for_all_rows_only(adapter: Adapter) -> list[str]:
    """Returns the paths of the parts of an adapter that cannot differ between rows: experts, routers, norms,
    embedding and head. Functions and engines with several adapters raise errors that name these paths.
    """
    return [*filter(_is_for_all_rows, adapter.matrices), *adapter.norms]


def row_matrices(config: ModelConfig) -> dict[str, ParamSpec]:
    """Returns the matrices of `adaptable_matrices` for which each row may have a different adapter."""
    return {path: spec for path, spec in adaptable_matrices(config).items() if not _is_for_all_rows(path)}


def _is_for_all_rows(path: str) -> bool:
    return path in ("embed", "layer_embed", "lm_head") or ".experts." in path or path.endswith(".router")


@in_default_modes
def init_adapter(
    config: ModelConfig,
    key: jax.Array,
    rank: int = 8,
    targets: Sequence[str] | None = None,
    *,
    alpha: float | None = None,
    dtype: Dtype = "float32",
) -> Adapter:
    """Returns a new LoRA adapter to train. It changes nothing yet, because b is zero.

    `a` is random and uniform, like in PEFT.

    Args:
        config: the config of the model.
        key: one PRNG key.
        rank: the rank R of every matrix.
        targets: names of matrices in a layer, for example "q" or "experts.down". Also "lm_head", and "embed",
            which includes the head if it is tied. None takes all matrices that can have a different adapter
            for each row.
        alpha: the scale is alpha / rank. None makes the scale 1.
        dtype: the dtype of the arrays.

    Returns:
        An `Adapter`, for `with_adapter`.

    Raises:
        InputError: the model does not have a target, the rank is below 1, or alpha is not a finite number.
    """
    rank = check_integer("rank", rank, 1)
    if alpha is not None and not (isinstance(alpha, int | float | np.number) and math.isfinite(alpha)):
        raise InputError(f"alpha must be a finite number, got {format_value(alpha)}")
    specs = adaptable_matrices(config)
    leaf_names = {path: path.split(".", 2)[-1] for path in specs}
    of_rows = {leaf_names[path] for path in specs if not _is_for_all_rows(path)}
    wanted = of_rows if targets is None else {*targets}
    if isinstance(targets, str) or (unknown := wanted - {*leaf_names.values()}):
        raise InputError(
            f"targets must be names of {format_names(sorted({*leaf_names.values()}))}, got"
            f" {format_value(targets if isinstance(targets, str) else sorted(unknown))}"
        )
    chosen = {path: spec for path, spec in specs.items() if leaf_names[path] in wanted}
    dtype = resolve_dtype(dtype)

    def new(spec: ParamSpec, key: jax.Array) -> LowRank:
        *experts, outputs, inputs = spec.shape
        bound = 1 / math.sqrt(inputs)
        a = jax.random.uniform(key, (*experts, rank, inputs), dtype, -bound, bound)
        return LowRank(a, jnp.zeros((*experts, outputs, rank), dtype))

    keys = jax.random.split(key, len(chosen))
    matrices = {path: new(spec, own) for (path, spec), own in zip(chosen.items(), keys, strict=True)}
    return make_adapter(matrices, dict.fromkeys(matrices, 1.0 if alpha is None else alpha / rank))
