"""Opens the directory of a Hugging Face checkpoint."""

import dataclasses
import os
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..families.draft_heads import with_draft_head
from ..families.reading import from_hf
from ..families.skipped_tensors import text_name
from ..families.wrappers import is_tied_without_head, text_settings
from ..formats.files import file_exists, read_json
from ..formats.other_formats import describe_files
from ..formats.quantized_formats import KEPT_IF_ASKED, quantization_settings, stored_format
from ..formats.scaled_tensor import MatrixFormat
from ..formats.tensors import QuantizedFormat, StoredTensor, open_tensors, read_tensor_file
from ..formats.text_tensors import has_head, text_tensors
from ..sampling.generation_config import check_generation_config
from ..tokenization.tokenizer import Tokenizer, eos_ids
from ..weights.quantization import check_quantize
from .embedding_modules import EmbeddingModules, add_lowercase, read_embedding_modules

_HEAD_FILE = "mtp.safetensors"  # the draft head, if the other files lack it


class OpenedFiles(NamedTuple):
    """The content of the files of a checkpoint. The weights are not read yet."""

    config: ModelConfig
    tensors: dict[str, Any]  # by Hugging Face name
    skipped: tuple[str, ...]  # patterns of tensors that are known and not read, with counts
    tokenizer: Tokenizer | None
    eos_token_ids: Sequence[int]
    generation_config: dict[str, Any]
    embedding: EmbeddingModules | None = None
    quant_format: QuantizedFormat | None = None  # in which matrices are read as leaves
    matrix_format: MatrixFormat | None = None  # in which they are read as tensors
    kept: str | None = None  # the method of matrices that stay quantized; None: none do


def open_directory(
    path: Path, quantize: str | None, dequantize: bool, draft_head: bool = False
) -> OpenedFiles:
    """Reads the small files of a directory and the headers of its weights. It takes the arguments of
    `load_model`, and raises its errors.
    """
    settings = read_json(path / "config.json")
    if settings is None:
        others = [name for name in os.listdir(path) if not name.startswith("model")]
        no_config = "holds no config.json: give the directory of a Hugging Face checkpoint"
        raise InputError(f"{path} {describe_files(others, no_config)}")
    files_say_tied = is_tied_without_head(settings)
    settings = text_settings(settings)
    embedding = read_embedding_modules(path)
    if embedding is not None:
        settings["architectures"] = None  # it may be a model without a head
    config = from_hf(settings)
    stored_settings = quantization_settings(settings, path)
    found = stored_format(stored_settings, path, quantize, dequantize)
    quant_format = found if isinstance(found, QuantizedFormat) else None
    matrix_format = found if isinstance(found, MatrixFormat) else None
    is_asked = quantize in KEPT_IF_ASKED
    keeps = matrix_format and (is_asked or matrix_format.stays_quantized and not dequantize)
    stay = quant_format or keeps
    kept = found.method if found and stay else None
    check_quantize(config, quant_format.method if quant_format else None if is_asked else quantize)
    tokenizer = Tokenizer.from_dir(path) if file_exists(path / "tokenizer.json") else None
    if tokenizer and embedding and embedding.do_lower_case:
        add_lowercase(tokenizer.backend)
    generation = read_json(path / "generation_config.json") or {}
    check_generation_config(generation, config.vocab_size)
    ends = tokenizer.eos_token_ids if tokenizer else eos_ids(generation, settings)
    stored = open_tensors(path)
    if draft_head:
        stored |= _own_file_of_head(path, stored)
        try:
            config = with_draft_head(config, settings, {text_name(name, True) or name for name in stored})
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    matrix_format = matrix_format and matrix_format.of_files(stored)
    (tensors, skipped) = text_tensors(stored, config)
    if files_say_tied:
        config = dataclasses.replace(config, tie_word_embeddings=not has_head(tensors))
    if kept:
        config = dataclasses.replace(config, quantization_config=stored_settings)
    files = config, tensors, skipped, tokenizer, ends, generation, embedding
    return OpenedFiles(*files, quant_format, matrix_format, kept)


def _own_file_of_head(path: Path, known: Container[str]) -> dict[str, StoredTensor]:
    """Returns the tensors of a draft head in a file of its own that the other files lack."""
    file = path / _HEAD_FILE
    if not file_exists(file):
        return {}
    return {name: tensor for name, tensor in read_tensor_file(file).items() if name not in known}
