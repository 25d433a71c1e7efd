"""The formats in which checkpoints store quantized matrices: the one list of them, and how one is chosen."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..families.naming import TIED, FileSpec
from ..weights.quantized_weight import is_quantized
from .awq_gptq_settings import AwqGptqByModule
from .bitnet_format import BitNetFormat
from .bitsandbytes_format import BitsAndBytesFormat
from .compressed_tensors_format import CompressedTensorsFormat
from .fp8_format import Fp8Format
from .mlx_format import MlxFormat
from .mxfp4_format import Mxfp4Format
from .nvfp4_format import ModelOptFormat
from .own_format import OwnFormat
from .scaled_tensor import MatrixFormat
from .tensors import StoredFormat

FORMATS: tuple[type[StoredFormat], ...] = (
    AwqGptqByModule,
    BitNetFormat,
    BitsAndBytesFormat,
    CompressedTensorsFormat,
    Fp8Format,
    MlxFormat,
    ModelOptFormat,
    Mxfp4Format,
    OwnFormat,
)
_BY_METHOD = {method: format for format in FORMATS for method in format.methods}
SETTINGS_FILES = [file for format in FORMATS for file in format.files]
# Values of `quantize` that ask for matrices as they are stored, and which matrices these are.
KEPT_IF_ASKED = {format.kept_as: format.kept_needs for format in FORMATS if format.kept_as}
# Names with _ are ours, or say more of a format.
_REMEDY = (
    f"{', '.join(method for method in _BY_METHOD if '_' not in method)} are supported: use such a"
    " checkpoint, or the unquantized one with quantize=, which dequantize() and save_pretrained() of"
    " transformers make"
)


def quantization_settings(settings: Mapping[str, Any], path: Path) -> Any:
    """Returns the `quantization_config` of a checkpoint's config.json. None: it has none. Some programs write
    it elsewhere, or without quant_method. Raises InputError.
    """
    config = settings.get("quantization_config")
    if not config or isinstance(config, Mapping) and "quant_method" not in config:
        found = (format.find_settings(settings, path) for format in FORMATS)
        return next(filter(None, found), config or None)
    return config


def not_kept(asked: str, path: Path) -> InputError:
    """Returns the error for a checkpoint that has no matrices that stay as quantize=`asked` says."""
    return InputError(
        f"quantize={asked!r} keeps matrices in {KEPT_IF_ASKED[asked]}, without dequantize: {path} cannot be"
        " loaded so"
    )


def read_format(config: Any) -> StoredFormat | None:
    """Returns how a checkpoint with this `quantization_config` stores its matrices. None: as float numbers.
    Raises InputError.
    """
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if not isinstance(method, str) or method not in _BY_METHOD or not isinstance(config, Mapping):
        raise InputError(
            f"quantization_config with quant_method {format_value(method)} is not supported: {_REMEDY}"
        )

    def require(is_supported: bool, name: str) -> None:
        if not is_supported:
            what = f"{method} with {name} {format_value(config.get(name))}"
            raise InputError(f"quantization_config: {what} is not supported: {_REMEDY}")

    return _BY_METHOD[method].from_config(config, require)


def stored_format(config: Any, path: Path, quantize: str | None, dequantize: bool) -> StoredFormat | None:
    """Returns the format in which matrices are stored. None: as floats. Raises InputError if the format is
    not supported, or the arguments of `load_model` do not suit it.
    """
    found = read_format(config)
    asked = quantize if quantize in KEPT_IF_ASKED else None
    if asked and (dequantize or not isinstance(found, MatrixFormat)):
        raise not_kept(asked, path)
    if dequantize and not isinstance(found, MatrixFormat):
        stored = found.method if found else "float numbers"
        raise InputError(
            f"dequantize is of quantized checkpoints of others, and {path} has {stored}: leave it out"
        )
    stays = found is not None and getattr(found, "stays_quantized", True)
    if found and stays and quantize is not None and not asked and not dequantize:
        raise InputError(
            f"{path} is already quantized ({found.method}), and quantize={quantize!r} is asked for: load it"
            f" without quantize{', or with dequantize' if isinstance(found, MatrixFormat) else ''}"
        )
    return found


def format_to_write(
    config: ModelConfig, specs: Sequence[FileSpec], leaves: Sequence[Any]
) -> tuple[StoredFormat | None, dict[str, Any]]:
    """Returns the format for a model's quantized leaves, and the entry of config.json for it. The format is
    the one of its checkpoint, or else ours. Returns None and {} if no leaf is quantized. Raises InputError.
    """
    if not any(map(is_quantized, leaves)):
        return None, {}
    stored = config.quantization_config or {}
    format = _BY_METHOD.get(str(stored.get("quant_method")))
    settings: Any = stored or None
    if not stored or format and not format.is_written:
        settings = next(filter(None, (format.settings_for(leaves) for format in FORMATS)))
    elif format:
        named = zip((spec.published_name for spec in specs), leaves, strict=True)
        floats = [name for name, leaf in named if len(leaf.shape) == 2 and not is_quantized(leaf)]
        floats = [name.removesuffix(".weight") for name in dict.fromkeys(floats) if name != TIED[0]]
        settings = format.with_floats(stored, floats)
    found = read_format(settings)
    for spec, leaf in zip(specs, leaves, strict=True):
        is_joined = is_quantized(leaf) and spec.published_name != spec.hf_name
        if found and not found.joined_are_written and is_joined:
            raise found.misfit(spec.hf_name, leaf)
    return found, dict(quantization_config=settings)
