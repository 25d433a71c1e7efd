"""`LeafAssembler`: leaves of the parameter tree from tensors that come one by one, by Hugging Face names."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from .conversion import check_shapes, check_tensor, leaf_of_tensors
from .naming import TIED, FileSpec, file_specs
from .skipped_tensors import text_name, unused_names


class LeafAssembler:
    """Makes each leaf as soon as its tensors are here, and then forgets them. So memory holds the tensors of
    unfinished leaves, and not the whole model.

    Tensors may come in any order. Tensors of a model that also reads images are known by the names of its
    text model, and its other tensors are left out, as in `params_from_tensors`.
    """

    def __init__(self, config: ModelConfig):
        self._config = config
        self._waiting = {spec.name: spec for spec in jax.tree.leaves(file_specs(config))}
        # By its name, every tensor that came: the array while a leaf still needs it, then its shape.
        self._tensors: dict[str, Any] = {}
        self._readers: dict[str, list[FileSpec]] = {}  # of each tensor
        self._laid_out: dict[str, list[FileSpec]] = {}  # by `layout_name`
        self._left: dict[str, int] = {}  # of each leaf: its own tensors that have not come
        self._expected: dict[str, tuple[int, ...]] = {}  # the tensors that finished leaves were made of
        for spec in self._waiting.values():
            own = spec.tensor_shapes()
            self._left[spec.name] = len(own)
            for name in {*own, *([spec.fused_name] if spec.fused_name else [])}:
                self._readers.setdefault(name, []).append(spec)
            if spec.layout_name:
                self._laid_out.setdefault(spec.layout_name, []).append(spec)

    def add(self, name: Any, tensor: Any) -> Iterator[tuple[str, Any]]:
        """Takes the next tensor. Yields the paths and arrays of leaves that are complete now.

        Raises:
            InputError: it is no float array, it came before, or its shape is not the config's.
        """
        if not isinstance(name, str):
            raise InputError(f"the name of a tensor must be a text, got {format_value(name)}")
        check_tensor(name, tensor)
        own = text_name(name, self._config.draft_head is not None)
        if own is None:
            return
        if own in self._tensors:
            raise InputError(f"the tensor {name} came twice: give each tensor once")
        self._tensors[own] = tensor
        readers = self._readers.get(own, [])
        for spec in readers:
            self._left[spec.name] -= spec.fused_name != own or bool(spec.interleaved)
        yield from self._make([*readers, *self._laid_out.get(own, ())])
        self._forget(own)

    def finish(self) -> Iterator[tuple[str, Any]]:
        """Yields the leaves that waited for the end. Raises InputError, which names the tensors that are
        missing or unknown.
        """
        (embed, head) = TIED
        if self._config.tie_word_embeddings and embed not in self._tensors and head in self._tensors:
            self._tensors[embed] = self._tensors.pop(head)  # a tied matrix may come under either name
            for spec in self._readers[embed]:
                self._left[spec.name] -= 1
        yield from self._make(list(self._waiting.values()), is_end=True)
        expected = dict(self._expected)
        for spec in self._waiting.values():
            expected |= spec.tensor_shapes(self._tensors)
        found = {name: expected.get(name, ()) for name in self._tensors}  # shapes have been compared
        check_shapes("tensors", expected, found, unused_names(self._config, self._tensors))

    def _make(self, specs: Iterable[FileSpec], is_end: bool = False) -> Iterator[tuple[str, Any]]:
        for spec in specs:
            if spec.name not in self._waiting or not self._is_complete(spec, is_end):
                continue
            shapes = spec.tensor_shapes(self._tensors)
            for name, shape in shapes.items():
                # If a tensor is a whole leaf, whoever takes the leaf compares its shape.
                if name != spec.hf_name and (found := tuple(self._tensors[name].shape)) != shape:
                    raise InputError(
                        f"{name} has shape {list(found)}, the config asks for {list(shape)}: give the"
                        " tensors of this model"
                    )
            yield spec.name, leaf_of_tensors(spec, self._tensors)
            del self._waiting[spec.name]
            self._expected |= shapes
            for name in shapes:
                self._forget(name)

    def _is_complete(self, spec: FileSpec, is_end: bool) -> bool:
        if spec.fused_name in self._tensors:
            return is_end or spec.layout_name is None or spec.layout_name in self._tensors
        return not self._left[spec.name]

    def _forget(self, name: str) -> None:
        """Keeps the shape of a tensor alone, if no unfinished leaf reads it."""
        may_be_tied = name == TIED[1] and self._config.tie_word_embeddings and TIED[0] not in self._tensors
        is_read = any(spec.name in self._waiting for spec in self._readers.get(name, ()))
        if not is_read and not may_be_tied:
            tensor = self._tensors[name]
            self._tensors[name] = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
