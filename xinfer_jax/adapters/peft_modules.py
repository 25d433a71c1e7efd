"""The modules of transformers' model that PEFT adapts, and how a module's pair of tensors holds those of the
tree's matrices. A module may hold several, as `qkv_proj` does: they share its lora_A.
"""

import dataclasses
from collections.abc import Container
from typing import NamedTuple

import jax
import numpy as np

from ..checkpoint.tensor_files import on_host
from ..config.model_config import ModelConfig
from ..families.conversion import leaf_of_tensors, plan_tensors
from ..families.naming import FileSpec, file_specs
from .adapter import Adapter, LowRank, adaptable_matrices, make_adapter, untied

EMBED = "embed"  # the path of the embedding, in a tied model also of the head
HEAD = "lm_head"
_EMBEDDINGS = (f"{EMBED}.weight", "layer_embed.weight")  # of which PEFT has the pair transposed


class PeftModule(NamedTuple):
    """A module that can have an adapter.

    Attributes:
        name: in transformers' model, as "model.layers.0.self_attn.q_proj".
        specs: the matrices that it holds.
    """

    name: str
    specs: list[FileSpec]

    @property
    def paths(self) -> list[str]:
        """Those of its matrices in the tree."""
        return [spec.name.removesuffix(".weight") for spec in self.specs]

    @property
    def is_embedding(self) -> bool:
        return self.specs[0].name in _EMBEDDINGS

    @property
    def is_linear(self) -> bool:
        """Whether "all-linear" means it."""
        return not self.is_embedding and self.paths != [HEAD]

    @property
    def tensors(self) -> tuple[str, str]:
        """The names of its pair."""
        ends = ("embedding_A", "embedding_B") if self.is_embedding else ("A.weight", "B.weight")
        return f"{self.name}.lora_{ends[0]}", f"{self.name}.lora_{ends[1]}"

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The shapes of its pair by name."""
        spec = self.specs[0]
        (b,) = _of_rank(spec, rank).tensor_shapes({f"{self.name}.weight"}).values()
        a = rank, spec.shape[1]
        return dict(zip(self.tensors, (b[::-1], a[::-1]) if self.is_embedding else (a, b), strict=True))

    def matrices(self, a: np.ndarray, b: np.ndarray) -> dict[str, LowRank]:
        """What its pair of tensors adds to each of its matrices."""
        (a, b) = (b.T, a.T) if self.is_embedding else (a, b)
        tensors = {f"{self.name}.weight": b}
        specs = [_of_rank(spec, len(a)) for spec in self.specs]
        return {
            path: LowRank(a, leaf_of_tensors(spec, tensors))
            for path, spec in zip(self.paths, specs, strict=True)
        }

    def pair(self, adapter: Adapter) -> tuple[np.ndarray, np.ndarray, float] | None:
        """Its pair of tensors, and their factor; None: the adapter changes none of its matrices. Matrices
        that have each their own `a` become one pair of the sum of their ranks.
        """
        scale_of = adapter.scale_of()
        found = [path for path in self.paths if path in adapter.matrices]
        if not found:
            return None
        pairs = {path: [on_host(x) for x in adapter.matrices[path]] for path in found}
        scale = next(filter(None, map(scale_of.get, found)), 0.0)  # others are told by it
        as_, bs = [[pair[i] for pair in pairs.values()] for i in (0, 1)]
        if all(np.array_equal(a, as_[0]) for a in as_) and all(scale_of[path] == scale for path in found):
            a = as_[0]
            places = [0] * len(found)
        else:
            a = np.concatenate(as_)
            places = [sum(map(len, as_[:i])) for i in range(len(as_))]
        leaves = {
            path: np.zeros((spec.shape[0], len(a)), a.dtype)
            for path, spec in zip(self.paths, self.specs, strict=True)
        }
        for path, at, b in zip(found, places, bs, strict=True):
            own = b if scale_of[path] == scale else b * (scale_of[path] / scale)
            leaves[path][:, at : at + b.shape[1]] = own
        specs = [_of_rank(spec, len(a)) for spec in self.specs]
        (tensor,) = plan_tensors(specs, leaves.values()).values()
        b = tensor.make(lambda leaf: leaf)
        (a, b) = (b.T, a.T) if self.is_embedding else (a, b)
        return np.ascontiguousarray(a), np.ascontiguousarray(b), scale


def peft_modules(config: ModelConfig, found: Container[str] = ()) -> dict[str, PeftModule]:
    """Returns the modules that can have adapters by name: those of published files, or those found."""
    modules: dict[str, PeftModule] = {}
    adaptable = adaptable_matrices(config)
    for spec in jax.tree.leaves(file_specs(untied(config))):
        if spec.name.removesuffix(".weight") not in adaptable:
            continue
        names = [
            name.removesuffix(".weight")
            for name in (spec.published_name, spec.fused_name, spec.hf_name)
            if name
        ]
        name = next((name for name in names if name in found), names[0])
        modules.setdefault(name, PeftModule(name, [])).specs.append(spec)
    return modules


def with_tied_head(config: ModelConfig, adapter: Adapter) -> Adapter:
    """The adapter as the library means it. For PEFT a tied model's embedding and head have each their own;
    here "embed" alone is for both, and a head without one has a pair of rank 0.
    """
    if not config.tie_word_embeddings or EMBED not in adapter.matrices:
        return adapter
    matrices = dict(adapter.matrices)
    scale_of = adapter.scale_of()
    (a, b) = matrices[EMBED]
    head = matrices.setdefault(HEAD, LowRank(a[:0], b[:, :0]))
    if scale_of.setdefault(HEAD, 1.0) == scale_of[EMBED] and all(map(np.array_equal, head, (a, b))):
        del matrices[HEAD]
    return make_adapter(matrices, scale_of)


def _of_rank(spec: FileSpec, rank: int) -> FileSpec:
    """The spec of a matrix as that of its `lora_B`, which is divided into matrices as the weight is."""
    return dataclasses.replace(spec, shape=(spec.shape[0], rank))
