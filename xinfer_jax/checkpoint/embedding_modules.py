"""How a sentence-transformers checkpoint makes a vector of hidden states: modules.json and what it names."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, format_value
from .files import read_json, read_text
from .tensors import open_tensors

_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "first",
}
_MODES = {"mean": "mean", "lasttoken": "last", "cls": "first"}  # of newer files
_ACTIVATIONS = ("Identity", "Tanh")


@dataclasses.dataclass(frozen=True)
class Dense:
    """A layer on pooled states: activation(x weight.T + bias)."""

    weight: np.ndarray  # [outputs, inputs]
    bias: np.ndarray | None
    activation: str  # one of "Identity", "Tanh"


@dataclasses.dataclass(frozen=True)
class EmbeddingModules:
    """What follows the model."""

    pooling: str  # "mean", "last" or "first": the tokens of a text that are taken
    dense: tuple[Dense, ...]
    normalize: bool  # vectors have length 1
    prompts: Mapping[str, str]  # by name: texts that go before others
    default_prompt: str  # that goes before each; "": none


def read_embedding_modules(path: Path) -> EmbeddingModules | None:
    """Returns what a directory's modules.json asks for; None: there is none. Raises InputError."""
    text = read_text(path / "modules.json")
    if text is None:
        return None
    try:
        modules = [(entry["type"].split(".")[-1], path / entry["path"]) for entry in json.loads(text)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{path / 'modules.json'} is no list of modules with type and path") from error
    kinds = [kind for kind, _ in modules]
    expected = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense")]
    if kinds not in (expected, [*expected, "Normalize"]):
        raise InputError(
            f"{path / 'modules.json'}: modules {format_value(kinds)} are not supported: only Transformer,"
            " Pooling, any number of Dense, and Normalize are, in this order"
        )
    settings = read_json(path / "config_sentence_transformers.json") or {}
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise InputError(f"{path}: prompts must be texts by name, got {format_value(prompts)}")
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise InputError(f"{path}: default_prompt_name {format_value(default)} is none of its prompts")
    return EmbeddingModules(
        _read_pooling(dict(modules)["Pooling"]),
        tuple(_read_dense(folder) for kind, folder in modules if kind == "Dense"),
        kinds[-1] == "Normalize",
        prompts,
        prompts.get(default, ""),
    )


def _read_pooling(path: Path) -> str:
    settings = read_json(path / "config.json") or {}
    mode = settings.get("pooling_mode")
    found = [pooling for name, pooling in _POOLINGS.items() if settings.get(name) is True]
    others = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True]
    if mode is None and len(found) == len(others) == 1:
        mode = found[0]
    else:
        mode = _MODES.get(mode) if isinstance(mode, str) else None
    if mode is None or settings.get("include_prompt") is False:
        raise InputError(
            f"{path}: only one of mean, last token and first token is supported as pooling, with the prompt"
            f" included, got {format_value(settings)}"
        )
    return mode


def _read_dense(path: Path) -> Dense:
    settings = read_json(path / "config.json") or {}
    activation = str(settings.get("activation_function", "Tanh")).split(".")[-1]
    stored = open_tensors(path)
    if activation not in _ACTIVATIONS or stored.keys() - {"linear.bias"} != {"linear.weight"}:
        raise InputError(
            f"{path}: only a linear.weight with the activation Identity or Tanh is supported, got"
            f" {format_value(activation)} and {format_value(sorted(stored))}"
        )
    arrays: dict[str, Any] = {name: tensor.array().astype(np.float32) for name, tensor in stored.items()}
    return Dense(arrays["linear.weight"], arrays.get("linear.bias"), activation)
