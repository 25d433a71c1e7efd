"""A checkpoint directory in, a model out: opened, which tells all shapes, then read, a leaf at a time."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..brief import mib
from ..config.model_config import ModelConfig, from_hf
from ..errors import InputError, few
from ..host import aligned, by_blocks
from ..sampling.generation_config import check_generation_config
from ..sharding import MODEL, share
from ..stats import LoadStats
from ..weights import processor
from ..weights.layout import checked_mesh, shardings
from ..weights.params import (
    Params,
    ParamSpec,
    check_quantize,
    check_weights,
    param_specs,
    resolve_dtype,
    tree_bytes,
)
from ..weights.quantized import (
    check_activations,
    check_method,
    group_for,
    is_quantized,
    quantized_form,
    quantized_leaf,
    rounding_once,
)
from ..weights.rotation import Turn, turned, turns
from .files import BUNDLED, checkpoint_dir, is_there, read_json
from .own_format import OwnFormat, Part
from .quantized_formats import BitNetFormat, Stored, read_format
from .spread import Cut, check_parts, cut_of, part_of, spread, whole_form, with_heads_for
from .tensors import StoredTensor, open_tensors
from .tokenizer import Tokenizer, eos_ids

_TIED = ("model.embed_tokens.weight", "lm_head.weight")  # names of a matrix that is both
_FLOATS = {"F32", "F16", "BF16"}
_NOT_WEIGHTS = "rotary_emb.inv_freq"  # tables that old Llama checkpoints carry along


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """What `load_model` gives.

    Attributes:
        params: the parameter tree: nested dicts and tuples of arrays, or of quantized leaves; of their shapes
            in a `Checkpoint`.
        config: its shape and settings, with the checkpoint's EOS ids; static under `jit`.
        tokenizer: text to ids and back; None where the checkpoint has no tokenizer.json.
        generation_config: generation_config.json, empty if there is none; for `SamplingConfig.from_hf`.
        load_stats: what loading cost.
        name: the directory or hub name that it was loaded from, "bundled", or "": none.
    """

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any]
    load_stats: LoadStats
    name: str = ""

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params, is_leaf=is_quantized)
        count = sum(math.prod(leaf.shape) for leaf in leaves)
        stats = self.load_stats
        config = self.config
        return (
            f"Model({config.model_type}, {count / 1e6:.4g} M parameters in {stats.dtype},"
            f" {mib(stats.weight_bytes)}, vocabulary {config.vocab_size}, context {config.context_length},"
            f" {'tokenizer' if self.tokenizer else 'no tokenizer'})"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Checkpoint:
    """What `open_checkpoint` gives: a model of shapes, and how to read its weights.

    Attributes:
        model: as `read` gives it, but for the leaves of `params`, which are `jax.ShapeDtypeStruct`.
    """

    model: Model
    _read: Callable[[], Params]

    def read(self) -> Model:
        """Reads the weights.

        Raises:
            InputError: numbers that do not fit, or a file that cannot be read any more.
        """
        start = time.perf_counter()
        params = self._read()
        stats = self.model.load_stats
        stats = dataclasses.replace(stats, seconds=stats.seconds + time.perf_counter() - start)
        return dataclasses.replace(self.model, params=params, load_stats=stats)


def load_model(
    path_or_repo_id: str | Path | None = None,
    dtype: Any = None,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    activations: str | None = None,
) -> Model:
    """Loads a Hugging Face checkpoint.

    Args:
        path_or_repo_id: directory with config.json and safetensors (and tokenizer.json, if text is wanted),
            or a hub name owner/name; None: the bundled checkpoint. Quantized ones stay as they are stored.
        dtype: float32, bfloat16 or float16, whatever the checkpoint's; None: float32 on CPU, else bfloat16.
        quantize: None, or "int8" or "int4": the matrices in fewer bytes, rounded to nearest while loading.
        mesh: over whose axis "model" the parameters lie (`shardings`), and what is made of them; each process
            reads what its devices hold. Where it has more devices than the model has key heads, these are
            repeated, and the config says so.
        activations: "int8" (with quantize="int8", not over a mesh): the weights are rotated, so that on a CPU
            what they are multiplied by can be rounded to int8 too: prompts and batches are faster, and more
            is lost. None: it keeps 16 bits.

    Raises:
        InputError: files missing, unreadable or not fitting the config, every tensor at fault named.
    """
    return open_checkpoint(path_or_repo_id, dtype, quantize, mesh, activations).read()


def open_checkpoint(
    path_or_repo_id: str | Path | None = None,
    dtype: Any = None,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    activations: str | None = None,
) -> Checkpoint:
    """All of `load_model` but reading the weights; arguments and errors as there. Every shape is known."""
    start = time.perf_counter()
    dtype = resolve_dtype(dtype)
    check_method(quantize)
    check_activations(activations, quantize)
    path = BUNDLED if path_or_repo_id is None else checkpoint_dir(path_or_repo_id)
    settings = read_json(path / "config.json")
    if settings is None:
        raise InputError(f"{path} holds no config.json: give the directory of a Hugging Face checkpoint")
    config = from_hf(settings)
    stored = read_format(settings, path)
    if stored and quantize:
        raise InputError(
            f"{path} is already quantized ({stored.method}), and quantize={quantize!r} is asked for: load it"
            " without quantize"
        )
    check_quantize(config, stored.method if stored else quantize)
    tokenizer = Tokenizer.from_dir(path) if is_there(path / "tokenizer.json") else None
    generation = read_json(path / "generation_config.json") or {}
    check_generation_config(generation, config.vocab_size)
    ends = tokenizer.eos_token_ids if tokenizer else eos_ids(generation, settings)
    possible = tuple(i for i in ends if 0 <= i < config.vocab_size)
    processor.multiplies()  # refuses what the environment says of it
    known = turns(config) if activations else {}
    rotated = bool(known) or isinstance(stored, OwnFormat) and stored.rotated
    of_files = config = dataclasses.replace(config, eos_token_ids=possible, rotated=rotated)
    if mesh is not None:
        mesh = checked_mesh(mesh)
        config = with_heads_for(config, mesh.shape[MODEL])
        shardings(config, mesh)  # refuses what the devices do not divide
    forms, read = _open_params(path, of_files, dtype, quantize, stored, mesh, known)
    kind = stored.method if stored else quantize or jnp.dtype(dtype).name
    stats = LoadStats(time.perf_counter() - start, tree_bytes(forms), kind)
    name = "bundled" if path_or_repo_id is None else str(path_or_repo_id)
    return Checkpoint(Model(forms, config, tokenizer, generation, stats, name), read)


def _open_params(  # noqa: PLR0913  what decides on a leaf
    path: Path, config: ModelConfig, dtype: Any, quantize: str | None, stored: Stored | None,
    mesh: Mesh | None, known: Mapping[str, Turn],
) -> tuple[Params, Callable[[], Params]]:  # fmt: skip
    """The parameter tree from a directory's safetensors, as shapes, and what reads it, a leaf at a time."""
    tensors = open_tensors(path)
    specs, tree = _specs(path, config, tensors)
    held = [stored.parts(spec.hf_name, spec.shape, tensors) if stored else {} for spec in specs]
    wanted: dict[str, Part] = {}
    for spec, parts in zip(specs, held, strict=True):
        wanted |= parts or {name: (shape, _FLOATS) for name, shape in spec.stored(tensors).items()}
    spare = {_TIED[1]} if config.tie_word_embeddings else set()
    spare |= {t for t in tensors if t.endswith(_NOT_WEIGHTS) or stored and stored.spare(t, tensors)}
    _check_tensors(path, tensors, wanted, spare)
    check_weights(specs, dtype, stored.method if stored else quantize, share(mesh))
    reader = _Reader(tensors, config, dtype, quantize, stored, mesh, known)

    def read() -> Params:
        _check_tied(path, config, tensors)
        return jax.tree.unflatten(tree, map(reader.leaf, specs, held, forms))

    forms = list(map(reader.form, specs, held))
    return jax.tree.unflatten(tree, forms), read


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Of each leaf its shapes, and itself. parts, below: what it is quantized as in the files, if it is."""

    tensors: Mapping[str, StoredTensor]
    config: ModelConfig  # as the files have it
    dtype: Any
    quantize: str | None
    stored: Stored | None
    mesh: Mesh | None
    turns: Mapping[str, Turn]  # by name, what int8 activations make of tensors; empty: they stay

    def form(self, spec: ParamSpec, parts: Mapping[str, Part]) -> Any:
        """Of the whole leaf, on all devices."""
        cut = self._cut(spec, parts)
        whole = self._form(spec, parts, self.tensors, self._group(spec))
        if self.mesh is None:
            return whole
        check_parts(spec, whole, cut, self._word(parts))
        bitnet = isinstance(self.stored, BitNetFormat)
        if self._read_whole(spec, parts) and not bitnet:
            return whole_form(spec, whole, self.mesh, 1)
        tensors = self.tensors if bitnet else cut.tensors(parts, self.tensors, 0)
        part = self._form(cut.spec(spec), parts, tensors, self._group(spec))
        return whole_form(spec, part, self.mesh, self._devices)

    def leaf(self, spec: ParamSpec, parts: Mapping[str, Part], form: Any) -> Any:
        pieces = [] if parts else spec.pieces(self.tensors)
        cut = self._cut(spec, parts)
        group = self._group(spec)

        def part(i: int) -> Any:
            at = i // cut.each
            tensors = cut.tensors(parts, self.tensors, at)
            own = cut.pieces(pieces, at)
            return cut.padded(spec, self._leaf(cut.spec(spec, at), parts, tensors, own, group), at)

        if self.mesh is not None and not self._read_whole(spec, parts):
            return spread(spec, part, form, self.mesh)
        whole = self._leaf(spec, parts, self.tensors, pieces, group)
        if self.mesh is None:
            return jax.device_put(whole)
        return spread(spec, lambda i: part_of(spec, whole, i // cut.each, cut.n), form, self.mesh)

    @property
    def _devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.shape[MODEL]

    def _cut(self, spec: ParamSpec, parts: Mapping[str, Part] | tuple = ()) -> Cut:
        return cut_of(spec, self.config, self._devices, self._word(parts))

    def _word(self, parts: Any) -> int:
        """Numbers of a quantized matrix that the files pack together."""
        return 32 // getattr(self.stored, "bits", 32) if parts else 1

    def _group(self, spec: ParamSpec) -> int | None:
        """Where parts of a matrix are quantized while they are read: the groups of all of it. What int8
        activations are multiplied by has a scale per output.
        """
        if self.turns and len(spec.shape) == 2:
            return spec.shape[1]
        if self.quantize is None or self.mesh is None or len(spec.shape) != 2:
            return None
        parts = self._devices if self._cut(spec).axis == 1 else 1
        return group_for(spec.shape, spec.hf_name, self.quantize, parts)

    def _read_whole(self, spec: ParamSpec, parts: Mapping[str, Part]) -> bool:
        """Whether its parts belong together: those along the inputs have scales or an order in common."""
        if parts and isinstance(self.stored, BitNetFormat):
            return True
        ordered = any(name.endswith((".order", ".g_idx")) for name in parts)
        return self._cut(spec).axis == 1 and (ordered or (self._group(spec) or 0) >= spec.shape[-1])

    def _form(self, spec: ParamSpec, parts: Any, tensors: Any, group: int | None) -> Any:
        if self.stored and parts:
            return self.stored.form(spec.hf_name, spec.shape, tensors)
        if self.quantize is None or len(spec.shape) == 1:
            return jax.ShapeDtypeStruct(spec.shape, self.dtype)
        return self._once(quantized_form(spec.shape, spec.hf_name, self.quantize, group))

    def _leaf(self, spec: ParamSpec, parts: Any, tensors: Any, pieces: list[Any], group: int | None) -> Any:
        """On the host."""
        if self.stored and parts:
            return self.stored.leaf(spec.hf_name, spec.shape, tensors)
        turn = self.turns.get(spec.hf_name)
        form = jax.ShapeDtypeStruct(spec.shape, self.dtype)
        tensor = turned(pieces[0], turn, self._norm) if turn else pieces[0]
        if self.quantize is not None and len(spec.shape) > 1:
            return self._once(quantized_leaf(tensor, spec.hf_name, self.quantize, group))
        return tensor.astype(self.dtype) if turn else _array(spec.hf_name, pieces, form)

    def _once(self, weight: Any) -> Any:
        return rounding_once(weight) if self.turns else weight

    def _norm(self, name: str) -> np.ndarray:
        return self.tensors[name].array()


def _specs(
    path: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> tuple[list[ParamSpec], Any]:
    """All specs, named as in the files, and their tree; InputError where they far outnumber the tensors."""
    if config.num_hidden_layers > len(tensors):
        raise InputError(
            f"{path}: num_hidden_layers is {config.num_hidden_layers} in config.json, and the files hold only"
            f" {len(tensors)} tensors: these weights are not of this config"
        )
    specs, tree = jax.tree.flatten(param_specs(config))
    specs = [dataclasses.replace(spec, hf_name=_stored_name(spec, config, tensors)) for spec in specs]
    asked = sum(spec.shape[0] for spec in specs if "{}" in spec.hf_name and spec.fused_name not in tensors)
    if asked > 2 * len(tensors):
        raise InputError(
            f"{path}: config.json asks for {asked} tensors of experts, and the files hold only {len(tensors)}"
            " tensors: these weights are not of this config"
        )
    return specs, tree


def _stored_name(spec: ParamSpec, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """The matrix that a tied model shares may be stored under either of its names."""
    embedding, head = _TIED
    tied = config.tie_word_embeddings and spec.hf_name == embedding
    return head if tied and embedding not in tensors and head in tensors else spec.hf_name


def _check_tensors(
    path: Path, tensors: Mapping[str, StoredTensor], wanted: dict[str, Part], spare: set[str]
) -> None:
    """Raises one InputError: the first missing, unexpected or unfitting tensors by name, the rest counted."""
    faults = [f"missing {name} {list(shape)}" for name, (shape, _) in wanted.items() if name not in tensors]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - wanted.keys() - spare)]
    for name in tensors.keys() & wanted.keys():
        tensor = tensors[name]
        (shape, types) = wanted[name]
        if tensor.shape != shape:
            faults.append(f"{name} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        elif tensor.type not in types:
            read = f"{', '.join(sorted(types))} {'are' if len(types) > 1 else 'is'} read"
            faults.append(f"{name} has type {tensor.type}, only {read}")
    if faults:
        raise InputError(f"{path}: the weights do not fit config.json: {few(sorted(faults), 2)}")


def _check_tied(path: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises InputError where a tied model's one matrix is stored twice, and not alike."""
    if not config.tie_word_embeddings or not all(name in tensors for name in _TIED):
        return
    embedding, head = (tensors[name] for name in _TIED)
    same = [embedding.shape == head.shape and head.type in _FLOATS]
    if all(same):
        rows, width = head.shape
        by_blocks(lambda at: same.append(np.array_equal(embedding[at], head[at])), rows, 4 * width)
    if not all(same):
        raise InputError(
            f"{path}: the weights do not fit config.json: tie_word_embeddings is true, but {_TIED[1]}"
            f" differs from {_TIED[0]}"
        )


def _array(name: str, pieces: list[StoredTensor], form: jax.ShapeDtypeStruct) -> np.ndarray:
    """What stands in equal pieces in the files."""
    out = aligned(form)
    for piece, flat in zip(pieces, out.reshape(len(pieces), -1), strict=True):
        by_blocks(partial(_fill, name, piece, flat), flat.size, piece.form.dtype.itemsize)
    return out


def _fill(name: str, piece: StoredTensor, flat: np.ndarray, run: slice) -> None:
    piece.read(flat[run], run.start)
    if flat.dtype == np.float16 and piece.type != "F16" and not np.isfinite(flat[run]).all():
        raise InputError(f"{name} holds values beyond float16's range: use dtype bfloat16 or float32")
