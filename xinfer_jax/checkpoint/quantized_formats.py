"""Finds out in which format a checkpoint stores quantized matrices: ours, or one of others."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..families.naming import TIED, FileSpec
from ..families.skipped_tensors import text_name
from ..weights.mxfp4 import Mxfp4Weight
from ..weights.padded_weight import stored_weight
from ..weights.quantized_weight import is_quantized
from .awq_gptq_format import AwqGptqFormat
from .awq_gptq_settings import auto_round_format, awq_gptq_format
from .bitnet_format import BitNetFormat, is_listed
from .bitsandbytes_format import BitsAndBytesFormat, bitsandbytes_format
from .compressed_tensors_format import CompressedTensorsFormat, compressed_tensors_format
from .files import read_json
from .fp8_format import Fp8Format
from .mlx_format import MlxFormat
from .mxfp4_format import Mxfp4Format
from .nvfp4_format import ModelOptFormat
from .own_format import OwnFormat, own_format, quantization_config
from .scaled_tensor import MatrixFormat
from .tensors import StoredFormat

KEEP_FP8 = "fp8"  # as quantize
_REMEDY = (
    "awq (gemm, 4 bits), gptq, auto-round (4, 8), bitsandbytes, bitnet, mlx, mxfp4, fp8, modelopt and"
    " compressed-tensors are supported: use such a checkpoint, or the unquantized one with quantize=, which"
    " dequantize() and save_pretrained() of transformers make"
)
OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
Require = Callable[[bool, str], None]  # raises where a setting, by its name, is not supported
# Of ModelOpt, whose tensors show which of them a matrix has.
_MODELOPT = ("FP8", "FP8_PB_WO", "FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")
_WRITTEN_APART = (
    AwqGptqFormat,
    CompressedTensorsFormat,
    Fp8Format,
)  # not where published files have matrices joined
_LOAD_IN = {"load_in_4bit", "load_in_8bit"}
_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
# The modules of gpt-oss that its files have as float numbers.
_MXFP4_FLOATS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def quantization_settings(settings: Mapping[str, Any], path: Path) -> Any:
    """Returns the `quantization_config` of a checkpoint's config.json; None: it has none. Older programs
    (AutoGPTQ, AutoAWQ) wrote a file of their own beside it. Raises InputError.
    """
    config = settings.get("quantization_config") or _old_settings(path)
    mlx = settings.get("quantization")
    if isinstance(mlx, Mapping) and "group_size" in mlx and config in (None, mlx):
        return {**mlx, "quant_method": MlxFormat.method}
    if isinstance(config, Mapping) and "quant_method" not in config and config.keys() & _LOAD_IN:
        return {**config, "quant_method": BitsAndBytesFormat.method}  # as older versions wrote it
    return config or None


def no_fp8(path: Path) -> InputError:
    """The error where quantize="fp8" does not suit a checkpoint."""
    return InputError(
        f"quantize={KEEP_FP8!r} keeps matrices in FP8 (E4M3) of a checkpoint, with a scale for a matrix,"
        f" an output, or 128 × 128 numbers, without dequantize: {path} cannot be loaded so"
    )


def read_format(config: Any) -> StoredFormat | None:
    """Returns how a checkpoint with this `quantization_config` stores its matrices; None: as float numbers.
    Raises InputError.
    """
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if not isinstance(method, str) or method not in _READERS or not isinstance(config, Mapping):
        raise InputError(
            f"quantization_config with quant_method {format_value(method)} is not supported: {_REMEDY}"
        )

    def require(is_supported: bool, name: str) -> None:
        if not is_supported:
            what = f"{method} with {name} {format_value(config.get(name))}"
            raise InputError(f"quantization_config: {what} is not supported: {_REMEDY}")

    return _READERS[method](config, require)


def stored_format(config: Any, path: Path, quantize: str | None, dequantize: bool) -> StoredFormat | None:
    """Returns the format in which matrices are stored; None: as floats. Raises InputError where the format is
    not supported, or the arguments of `load_model` do not suit it.
    """
    found = read_format(config)
    if quantize == KEEP_FP8 and (dequantize or not isinstance(found, MatrixFormat)):
        raise no_fp8(path)
    if dequantize and not isinstance(found, MatrixFormat):
        stored = found.method if found else "float numbers"
        raise InputError(
            f"dequantize is of quantized checkpoints of others, and {path} has {stored}: leave it out"
        )
    if (
        found
        and quantize not in (None, KEEP_FP8)
        and not dequantize
        and getattr(found, "stays_quantized", True)
    ):
        raise InputError(
            f"{path} is already quantized ({found.method}), and quantize={quantize!r} is asked for: load it"
            f" without quantize{', or with dequantize' if isinstance(found, MatrixFormat) else ''}"
        )
    return found


def format_to_write(
    config: ModelConfig, specs: Sequence[FileSpec], leaves: Sequence[Any]
) -> tuple[StoredFormat | None, dict[str, Any]]:
    """Returns the format for a model's quantized leaves, which is that of its checkpoint or else ours, and
    the entry of config.json for it; None and {}: none is quantized. Raises InputError.
    """
    settings = quantization_config(leaves)
    if not settings:
        return None, {}
    stored = config.quantization_config
    quantized = map(stored_weight, filter(is_quantized, leaves))
    if stored is None and all(isinstance(leaf, Mxfp4Weight) and len(leaf.shape) > 2 for leaf in quantized):
        stored = dict(quant_method=Mxfp4Format.method, modules_to_not_convert=_MXFP4_FLOATS)
    if stored and stored.get("quant_method") not in (OwnFormat.method, MlxFormat.method):
        named = zip((spec.hf_name for spec in specs), leaves, strict=True)
        floats = [name for name, leaf in named if len(leaf.shape) == 2 and not is_quantized(leaf)]
        settings = _with_floats(stored, [name.removesuffix(".weight") for name in floats if name != TIED[0]])
    found = read_format(settings)
    for spec, leaf in zip(specs, leaves, strict=True):
        if isinstance(found, _WRITTEN_APART) and is_quantized(leaf) and spec.published_name != spec.hf_name:
            raise found.misfit(spec.hf_name)
    return found, dict(quantization_config=settings)


def _with_floats(settings: Mapping[str, Any], floats: list[str]) -> dict[str, Any]:
    """The settings of a checkpoint whose modules `floats` have float matrices, and the others packed ones."""
    method = settings.get("quant_method")
    found = {**settings}
    if method == BitNetFormat.method:
        found["quantization_mode"] = "offline"
    if method == "gptq":
        rules: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in floats if module != "lm_head"}
        if rules:
            found["dynamic"] = rules | (settings.get("dynamic") or {})  # the first that matches counts
    elif method == "auto-round":
        extra = settings.get("extra_config") or {}
        is_new = lambda module: module != "lm_head" and extra.get(module, {}).get("bits") != 16  # noqa: E731
        if listed := {module: dict(bits=16) for module in filter(is_new, floats)}:
            found["extra_config"] = extra | listed
    elif method != Mxfp4Format.method:
        field = "ignore" if method == "compressed-tensors" else "modules_to_not_convert"
        names = settings.get(field)
        names = [*names] if isinstance(names, list | tuple) else ["lm_head"]
        if added := [module for module in floats if not is_listed(module, map(str, names))]:
            found[field] = names + added
    return found


def _fp8_format(config: Mapping[str, Any], require: Require) -> Fp8Format:
    block = config.get("weight_block_size", (128, 128))
    require(config.get("activation_scheme") in (None, "dynamic", "static"), "activation_scheme")
    require(config.get("scale_fmt") in (None, "float", "ue8m0"), "scale_fmt")
    require(config.get("expert_dtype") in (None, "fp8"), "expert_dtype")
    require(config.get("fmt") in (None, "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"), "fmt")
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    require(block is None or is_pair and all(type(x) is int and x > 0 for x in block), "weight_block_size")
    return Fp8Format(block and (block[0], block[1]), bool(config.get("weight_block_size")))


def _modelopt_format(config: Mapping[str, Any], require: Require) -> ModelOptFormat:
    layers = config.get("quantized_layers") or {}
    require(
        isinstance(layers, Mapping) and all(isinstance(x, Mapping) for x in layers.values()),
        "quantized_layers",
    )
    for algorithm in (config, *layers.values()):
        require(
            str(algorithm.get("quant_algo")).upper() in _MODELOPT,
            "quant_algo" if algorithm is config else "quantized_layers",
        )
        require(algorithm.get("group_size") in (None, 16, 128), "group_size")
    return ModelOptFormat((128, 128))


def _bitnet_format(config: Mapping[str, Any], require: Require) -> BitNetFormat:
    linear = config.get("linear_class", "bitlinear")
    mode = config.get("quantization_mode", "offline")
    require(linear in ("bitlinear", "autobitlinear"), "linear_class")
    require(mode in ("offline", "online"), "quantization_mode")
    require(not config.get("use_rms_norm"), "use_rms_norm")
    names = config.get("modules_to_not_convert")
    names = ["lm_head"] if names is None else names
    are_names = isinstance(names, list | tuple) and all(re.fullmatch(r"[\w.]+", str(name)) for name in names)
    require(are_names, "modules_to_not_convert")  # regular expressions are not supported
    divides = linear == "bitlinear"  # its weights are always packed
    return BitNetFormat(divides, not divides and mode == "online", tuple(names))


def _old_settings(path: Path) -> Mapping[str, Any] | None:
    """The settings in the file of an older program, or of ModelOpt; None: there is no such file."""
    for file, method in OLD_FILES.items():
        config = {_OLD_NAMES.get(name, name): value for name, value in (read_json(path / file) or {}).items()}
        if "bits" in config:  # other programs have files of these names too
            return {"quant_method": method} | config
    modelopt = (read_json(path / "hf_quant_config.json") or {}).get("quantization")
    return {"quant_method": "modelopt"} | modelopt if isinstance(modelopt, dict) else None


_READERS: dict[str, Callable[[Mapping[str, Any], Require], StoredFormat]] = {
    "awq": awq_gptq_format,
    "gptq": awq_gptq_format,
    "auto-round": auto_round_format,
    "bitsandbytes": bitsandbytes_format,
    "bitnet": _bitnet_format,
    "mxfp4": lambda config, require: Mxfp4Format(),  # the tensors show what is not converted
    "mlx": lambda config, require: MlxFormat({text_name(key) or key: x for key, x in config.items()}),
    "xinfer_jax": own_format,
    "fp8": _fp8_format,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), _modelopt_format),
    "compressed-tensors": compressed_tensors_format,
}
