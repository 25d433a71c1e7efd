"""New weights for a model that runs, leaf by leaf: of a checkpoint directory, or of named tensors."""

import os
from collections.abc import ItemsView, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..families.leaf_assembly import LeafAssembler
from ..weights.padded_weight import stored_weight
from ..weights.params import Params, activation_dtype
from ..weights.quantized_weight import is_quantized
from .config_difference import find_config_difference
from .loading import open_leaves


def new_leaves(source: Any, params: Params, config: ModelConfig) -> Iterator[tuple[str, Any]] | None:
    """Returns the path and the array of each leaf of new weights, in any order, each as soon as it is read.
    Nothing is read before the first one is asked for.

    Args:
        source: a directory, or an iterator of names and tensors.
        params, config: the model that gets the weights.

    Returns:
        The leaves, or None if the source is a tree of parameters.
    """
    if isinstance(source, str | os.PathLike):
        return _leaves_of_directory(Path(source).expanduser(), params, config)
    if isinstance(source, Iterator | ItemsView | list):
        return _leaves_of_tensors(source, config)
    return None


def _leaves_of_directory(path: Path, params: Params, config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a directory. Quantized matrices that the model has in the form of the files stay
    in it. Other matrices are read as float32, so that they are quantized as `load_model` quantizes them.
    """
    if not path.is_dir():
        raise InputError(
            f"{format_value(str(path))} is no directory: give the directory of a checkpoint, as save_model"
            " writes it"
        )
    leaves = [stored_weight(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_quantized)]
    kept = next((leaf.kept_as for leaf in leaves if getattr(leaf, "kept_as", None)), None)
    dtype = jnp.float32 if any(map(is_quantized, leaves)) else activation_dtype(params)
    has_draft_head = config.draft_head is not None
    model, read_leaves = open_leaves(path, dtype, kept, draft_head=has_draft_head)
    if difference := find_config_difference(config, model.config):
        (name, ours, theirs) = difference
        raise InputError(
            f"{path} does not fit the engine's model: {name} is {format_value(theirs)} there, and"
            f" {format_value(ours)} here"
        )
    yield from read_leaves()


def _leaves_of_tensors(tensors: Iterable[Any], config: ModelConfig) -> Iterator[tuple[str, Any]]:
    assembler = LeafAssembler(config)
    for pair in tensors:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                f"a stream of weights has pairs of a name and a tensor, got {format_value(pair)}: give"
                " params_to_tensors(params, config).items()"
            )
        yield from assembler.add(*pair)
    yield from assembler.finish()
