"""The settings by which a sentence-transformers checkpoint makes a vector of a text. They are in modules.json
and in the files that it names.

Source: sentence-transformers 6.2, base/modules/transformer.py and sentence_transformer/model.py.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import normalizers

from ..errors import InputError, format_value
from ..formats.files import read_json, read_text
from ..formats.tensors import open_tensors

_POOLINGS = dict(mean_tokens="mean", lasttoken="last", cls_token="first")  # after pooling_mode_
_MODES = {"mean": "mean", "lasttoken": "last", "cls": "first"}  # of newer files
_ACTIVATIONS = ("Identity", "Tanh")
_VECTOR = "sentence_embedding"  # that a Dense changes
# Files of the Transformer module, of which the first counts, and those of its settings that change vectors.
_TRANSFORMER_FILES = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
_TEXT = dict(method="forward", method_output_name="last_hidden_state")
_UNSUPPORTED = ("processing_kwargs", "query_length", "document_length", "query_expansion")


@dataclasses.dataclass(frozen=True)
class Dense:
    """A layer on pooled states: activation(x weight.T + bias)."""

    weight: np.ndarray  # [outputs, inputs]
    bias: np.ndarray | None
    activation: str  # one of "Identity", "Tanh"


@dataclasses.dataclass(frozen=True)
class EmbeddingModules:
    """The steps before the model and after it."""

    pooling: str  # "mean", "last" or "first": the tokens of a text that are taken
    dense: tuple[Dense, ...]
    normalize: bool  # vectors have length 1
    prompts: Mapping[str, str]  # by name: texts that go before others
    default_prompt: str  # that goes before each; "": none
    max_seq_length: int | None = None  # most tokens of a text; None: as many as the context has
    do_lower_case: bool = False  # the tokenizer makes letters lower-case
    truncation_side: str = "right"  # "left" or "right": of texts that are truncated
    truncate_dim: int | None = None  # vectors have so many numbers; None: all
    matryoshka_dimensions: tuple[int, ...] | None = None  # how many a caller may ask for; None: any number


def read_embedding_modules(path: Path) -> EmbeddingModules | None:
    """Returns the settings in a directory's modules.json, or None if there is none. Raises InputError."""
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
    transformer = _read_transformer(dict(modules)["Transformer"])
    settings = read_json(path / "config_sentence_transformers.json") or {}
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(one, str | None) for one in prompts.values()):
        raise InputError(f"{path}: prompts must be texts by name, got {format_value(prompts)}")
    prompts = dict(query="", document="") | {name: prompt or "" for name, prompt in prompts.items()}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise InputError(f"{path}: default_prompt_name {format_value(default)} is none of its prompts")
    return EmbeddingModules(
        _read_pooling(dict(modules)["Pooling"]),
        tuple(_read_dense(folder) for kind, folder in modules if kind == "Dense"),
        kinds[-1] == "Normalize",
        prompts,
        prompts.get(default, ""),
        **transformer,
        truncate_dim=_size(path, "truncate_dim", settings.get("truncate_dim")),
        matryoshka_dimensions=_matryoshka_dimensions(path),
    )


def add_lowercase(backend: tokenizers.Tokenizer) -> None:
    """Makes the tokenizer's normalizer begin with lower case, unless it has it. Added tokens that are not
    normalized keep their letters.
    """
    present: Any = backend.normalizer
    is_sequence = isinstance(present, normalizers.Sequence)
    found = list(present) if is_sequence else [present] if present else []
    if not any(isinstance(one, normalizers.Lowercase) for one in found):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *found])


def _read_transformer(path: Path) -> dict[str, Any]:
    """Returns the settings of the Transformer module and of its tokenizer that concern texts."""
    found = (read_json(path / name) for name in _TRANSFORMER_FILES)
    settings = next(filter(None, found), {})
    task = settings.get("transformer_task", "feature-extraction")
    asked = {name: settings[name] for name in _UNSUPPORTED if settings.get(name)}
    asked |= {} if task == "feature-extraction" else dict(transformer_task=task)
    modalities = settings.get("modality_config") or {"text": _TEXT}
    plain = isinstance(modalities, dict) and modalities.get("text") == _TEXT
    asked |= {} if plain else dict(modality_config=modalities)
    if asked:
        raise InputError(f"{path}: {_TRANSFORMER_FILES[0]} has {format_value(asked)}: it is not supported")
    tokenizer = read_json(path / "tokenizer_config.json") or {}
    lower = settings.get("do_lower_case") or False
    side = tokenizer.get("truncation_side") or "right"
    if not isinstance(lower, bool) or side not in ("left", "right"):
        raise InputError(
            f"{path}: do_lower_case must be true or false and truncation_side left or right, got"
            f" {format_value(lower)} and {format_value(side)}"
        )
    most = _size(path, "max_seq_length", settings.get("max_seq_length"))
    most = _size(path, "model_max_length", tokenizer.get("model_max_length")) if most is None else most
    return dict(max_seq_length=most, do_lower_case=lower, truncation_side=side)


def _size(path: Path, name: str, value: Any) -> int | None:
    """Returns a number from 1 on, or None. A float like 1e30 means that a tokenizer has no limit."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1
    ):
        raise InputError(f"{path}: {name} must be a whole number from 1 on, got {format_value(value)}")
    return None if value is None else int(min(value, 2**62))


def _matryoshka_dimensions(path: Path) -> tuple[int, ...] | None:
    """Returns the sizes of vectors that config.json allows, or () if it says that there are none."""
    config = read_json(path / "config.json") or {}
    sizes = config.get("matryoshka_dimensions")
    if sizes is None:
        return () if config.get("is_matryoshka") is False else None
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise InputError(f"{path}: matryoshka_dimensions must be a list of sizes, got {format_value(sizes)}")
    return tuple(sizes)


def _read_pooling(path: Path) -> str:
    settings = read_json(path / "config.json") or {}
    mode = settings.get("pooling_mode")
    found = [_POOLINGS[name] for name in _POOLINGS if settings.get(f"pooling_mode_{name}") is True]
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
    if settings.get("use_residual") or settings.get("module_input_name", _VECTOR) != _VECTOR:
        raise InputError(
            f"{path}: only a Dense of pooled states without a residual is supported, got"
            f" {format_value(settings)}"
        )
    stored = open_tensors(path)
    if activation not in _ACTIVATIONS or stored.keys() - {"linear.bias"} != {"linear.weight"}:
        raise InputError(
            f"{path}: only a linear.weight with the activation Identity or Tanh is supported, got"
            f" {format_value(activation)} and {format_value(sorted(stored))}"
        )
    arrays: dict[str, Any] = {name: tensor.array().astype(np.float32) for name, tensor in stored.items()}
    return Dense(arrays["linear.weight"], arrays.get("linear.bias"), activation)
