"""The modules of transformers' model that PEFT adapts, and the way in which a module's pair of tensors holds
the pairs of the tree's matrices. A module may hold several matrices, as `qkv_proj` does: they share its
lora_A.

Experts of a layer are one parameter, as in transformers 5. PEFT stores for it a pair with the rank of all
experts together, lora_A [X R, I] and lora_B [O, R X]. If both parameters of a layer's experts have a pair,
the pair of the first one is in the `base_layer` of the other. Files of earlier versions have a module for
each expert.
"""

import dataclasses
from collections.abc import Collection, Container, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..families.conversion import leaf_of_tensors, plan_tensors
from ..families.naming import FileSpec, file_specs
from ..formats.tensor_files import on_host
from .adapter import Adapter, LowRank, adaptable_matrices, is_norm, make_adapter, untied

EMBED = "embed"  # the path of the embedding, in a tied model also of the head
HEAD = "lm_head"
_EMBEDDINGS = (f"{EMBED}.weight", "layer_embed.weight")  # of which PEFT has the pair transposed


class PeftModule(NamedTuple):
    """A module that can have an adapter, or a parameter that holds all experts.

    Attributes:
        name: the name in transformers' model, for example "model.layers.0.self_attn.q_proj".
        specs: the matrices that it holds. The matrices of one expert have no axis for experts.
        expert: the expert of the module, if each expert has its modules. Otherwise None.
        is_wrapped: True: two wrappers hold the parameter, and it is in the inner one.
    """

    name: str
    specs: list[FileSpec]
    expert: int | None = None
    is_wrapped: bool = False

    @property
    def paths(self) -> list[str]:
        """The paths of its matrices in the tree."""
        return [spec.name.removesuffix(".weight") for spec in self.specs]

    @property
    def num_experts(self) -> int:
        """X, if it is a parameter that holds all experts. 0: it is none."""
        return self.specs[0].shape[0] if len(self.specs[0].shape) > 2 else 0

    @property
    def parameter(self) -> str:
        """The name by which `target_parameters` means it."""
        return self.name if self.num_experts else f"{self.name}.weight"

    @property
    def is_embedding(self) -> bool:
        return self.specs[0].name in _EMBEDDINGS

    @property
    def is_router(self) -> bool:
        return self.paths[0].endswith(".router")

    def is_linear(self, is_stored: bool) -> bool:
        """Returns True if "all-linear" includes the module. For modules of a mixture of experts, this depends
        on the version of transformers.
        """
        is_of_mixture = self.is_router or self.expert is not None
        return not (self.is_embedding or self.paths == [HEAD]) and (is_stored or not is_of_mixture)

    @property
    def tensors(self) -> tuple[str, str]:
        """The names of its pair."""
        prefix = self.name
        if self.num_experts:
            prefix = self.name.rpartition(".")[0] + (".base_layer" if self.is_wrapped else "")
        ends = ("embedding_A", "embedding_B") if self.is_embedding else ("A.weight", "B.weight")
        return f"{prefix}.lora_{ends[0]}", f"{prefix}.lora_{ends[1]}"

    def as_stored(self, tensors: Mapping[str, Any]) -> "PeftModule":
        """Returns this module with the outputs of its lora_B, which has key heads once that a mesh
        repeats.
        """
        b = tensors.get(self.tensors[1])
        others = sum(spec.shape[0] for spec in self.specs if not spec.kv_heads)
        own = b.shape[0] - others if b is not None and b.shape else 0
        repeated = sum(spec.shape[0] for spec in self.specs if spec.kv_heads)
        return self._with_heads_once(repeated // own if own > 0 and not repeated % own else 1)

    def as_in(self, adapter: Adapter) -> "PeftModule":
        """Returns this module with the outputs that an adapter has."""
        pairs = zip(self.specs, map(adapter.matrices.get, self.paths), strict=True)
        times = (spec.shape[0] // max(1, len(pair.b)) for spec, pair in pairs if spec.kv_heads and pair)
        return self._with_heads_once(max(times, default=1))

    def _with_heads_once(self, times: int) -> "PeftModule":
        """Returns the module whose matrices have each key head once. times: the number of copies of each key
        head.
        """
        if times < 2 or any(spec.kv_heads % times for spec in self.specs):
            return self
        specs: list[FileSpec] = []
        rows = [spec.shape[0] // (times if spec.kv_heads else 1) for spec in self.specs]
        for spec, own in sorted(zip(self.specs, rows, strict=True), key=lambda pair: pair[0].first_row):
            first = sum(before.shape[0] for before in specs)
            shape = (own, *spec.shape[1:])
            specs.append(dataclasses.replace(spec, shape=shape, first_row=first, fused_rows=sum(rows)))
        return self._replace(specs=specs)

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of its pair by name."""
        spec = self.specs[0]
        shape = _of_rank(spec, rank).tensor_shapes({self.parameter})[self.parameter]
        outputs = shape[-1] if spec.interleaved else shape[-2]
        a = (max(1, self.num_experts) * rank, spec.shape[-1])
        b = (outputs, max(1, self.num_experts) * rank)
        return dict(zip(self.tensors, (b[::-1], a[::-1]) if self.is_embedding else (a, b), strict=True))

    def matrices(self, a: np.ndarray, b: np.ndarray) -> dict[str, LowRank]:
        """Returns the low-rank matrices that a pair of tensors adds to each matrix of the module, by path."""
        (a, b) = (b.T, a.T) if self.is_embedding else (a, b)
        if X := self.num_experts:
            a = a.reshape(X, -1, a.shape[1])
            b = b.reshape(len(b), -1, X).transpose((2, 1, 0) if self.specs[0].interleaved else (2, 0, 1))
        specs = [_of_rank(spec, a.shape[-2]) for spec in self.specs]
        bs = [leaf_of_tensors(spec, {self.parameter: b}) for spec in specs]
        return {path: LowRank(a, own) for path, own in zip(self.paths, bs, strict=True)}

    def pair(self, adapter: Adapter) -> tuple[dict[str, np.ndarray], int, float] | None:
        """Returns its pair of tensors, their rank and their factor, or None if the adapter changes none of
        its matrices. If the matrices have different `a`, they become one pair, whose rank is the sum of their
        ranks.
        """
        scale_of = adapter.scale_of()
        found = [path for path in self.paths if path in adapter.matrices]
        pairs = [[on_host(x) for x in adapter.matrices[path]] for path in found]
        if not any(a.size for a, _ in pairs):
            return None
        scale = next(filter(None, map(scale_of.get, found)), 0.0)  # others are told by it
        as_ = [a for a, _ in pairs]
        ranks = [x.shape[-2] for x in as_]
        if all(np.array_equal(a, as_[0]) for a in as_) and all(scale_of[path] == scale for path in found):
            a = as_[0]
            places = [0] * len(found)
        else:
            a = np.concatenate(as_, -2)
            places = [sum(ranks[:i]) for i in range(len(ranks))]
        rank = a.shape[-2]
        specs = [_of_rank(spec, rank) for spec in self.specs]
        leaves = {path: np.zeros(spec.shape, a.dtype) for path, spec in zip(self.paths, specs, strict=True)}
        for path, at, (own_a, b) in zip(found, places, pairs, strict=True):
            if (own_a.shape[-1], *b.shape[:-1]) != (self.specs[0].shape[-1], *leaves[path].shape[:-1]):
                raise InputError(f"{path} has other sizes in the adapter than in the config")
            own = b if scale_of[path] == scale else b * (scale_of[path] / scale)
            leaves[path][..., at : at + b.shape[-1]] = own
        (tensor,) = plan_tensors(specs, leaves.values(), {self.parameter: None}).values()
        b = tensor.make(lambda leaf: leaf)
        if self.num_experts:
            a = a.reshape(-1, a.shape[-1])
            b = b.transpose((2, 1, 0) if self.specs[0].interleaved else (1, 2, 0))
            b = b.reshape(len(b), -1)
        (a, b) = (b.T, a.T) if self.is_embedding else (a, b)
        return dict(zip(self.tensors, map(np.ascontiguousarray, (a, b)), strict=True)), rank, scale


def peft_modules(config: ModelConfig, found: Container[str] = ()) -> dict[str, PeftModule]:
    """Returns the modules that can have adapters by name: the modules of published files, or the modules that
    were found.
    """
    modules: dict[str, PeftModule] = {}
    adaptable = adaptable_matrices(config)
    for spec in jax.tree.leaves(file_specs(untied(config))):
        if spec.name.removesuffix(".weight") not in adaptable:
            continue
        if "{}" in spec.hf_name and spec.hf_name.format(0).removesuffix(".weight") in found:
            own = dataclasses.replace(spec, shape=spec.shape[1:], fused_name=None)
            for expert in range(spec.shape[0]):
                name = spec.hf_name.format(expert).removesuffix(".weight")
                modules[name] = PeftModule(name, [dataclasses.replace(own, hf_name=f"{name}.weight")], expert)
            continue
        names = [spec.published_name, spec.fused_name, spec.hf_name]
        if spec.fused_name and (len(spec.shape) > 2 or "router" in spec.name):  # as in transformers 5
            names = [spec.fused_name, *names]
        names = [name.removesuffix(".weight") for name in names if name]
        name = next((name for name in names if name in found), names[0])
        modules.setdefault(name, PeftModule(name, [])).specs.append(spec)
    return modules


def norm_modules(config: ModelConfig) -> dict[str, FileSpec]:
    """Returns the norms by their names in transformers' model."""
    specs = jax.tree.leaves(file_specs(dataclasses.replace(config, draft_head=None)))
    return {spec.hf_name.removesuffix(".weight"): spec for spec in specs if is_norm(spec.name)}


def with_wrappers(modules: Collection[PeftModule]) -> list[PeftModule]:
    """Returns these modules, which are all that an adapter changes. `is_wrapped` is set if another module
    wraps the module.
    """
    names = {module.name for module in modules}

    def is_wrapped(name: str) -> bool:
        return name.endswith("gate_up_proj") and name.replace("gate_up_proj", "down_proj") in names

    return [m._replace(is_wrapped=bool(m.num_experts) and is_wrapped(m.name)) for m in modules]


def of_all_experts(
    path: str, pairs: Mapping[int, tuple[LowRank, float]], num_experts: int
) -> tuple[LowRank, float]:
    """Joins the pairs and factors of a layer's experts into one pair and one factor. Raises InputError if
    some experts have none, or if they differ from the first.
    """
    forms = {(pair.a.shape, scale) for pair, scale in pairs.values()}
    if len(pairs) < num_experts or len(forms) > 1:
        raise InputError(
            f"{path}: all experts of a layer have an adapter, of one rank and factor, or none has"
        )
    ((_, scale),) = forms
    return LowRank(*map(np.stack, zip(*(pairs[i][0] for i in range(num_experts)), strict=True))), scale


def with_tied_head(config: ModelConfig, adapter: Adapter) -> Adapter:
    """Returns the adapter in the meaning of this library. In PEFT, a tied model's embedding and head have
    separate pairs. Here "embed" alone is for both, and a head without a pair has a pair of rank 0.
    """
    if not config.tie_word_embeddings or EMBED not in adapter.matrices:
        return adapter
    matrices = dict(adapter.matrices)
    scale_of = adapter.scale_of()
    (a, b) = matrices[EMBED]
    head = matrices.setdefault(HEAD, LowRank(a[:0], b[:, :0]))
    if scale_of.setdefault(HEAD, 1.0) == scale_of[EMBED] and all(map(np.array_equal, head, (a, b))):
        del matrices[HEAD]
    return make_adapter(matrices, scale_of, adapter.norms)


def _of_rank(spec: FileSpec, rank: int) -> FileSpec:
    """Returns the spec of the matrix's `lora_B`, which is divided into matrices as the weight is."""
    return dataclasses.replace(spec, shape=(*spec.shape[:-1], rank))
