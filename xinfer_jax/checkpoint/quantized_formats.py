"""Finds out in which format a checkpoint stores matrices: ours, AWQ, GPTQ, BitNet, MLX or MXFP4."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..families.naming import TIED, FileSpec
from ..weights.mxfp4 import Mxfp4Weight
from ..weights.quantized_weight import is_quantized
from .awq_gptq_format import AwqGptqFormat
from .bitnet_format import BitNetFormat, is_listed
from .files import read_json
from .mlx_format import MlxFormat
from .mxfp4_format import Mxfp4Format
from .own_format import VERSION, VERSION_ROTATED, OwnFormat, quantization_config
from .tensors import QuantizedFormat

_REMEDY = (
    "awq (version gemm, 4 bits), gptq (4 or 8 bits), bitnet, mlx and mxfp4 are supported: use such a"
    " checkpoint, or the unquantized one with quantize="
)
OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
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
    return config or None


def read_format(config: Any) -> QuantizedFormat | None:
    """Returns how a checkpoint with this `quantization_config` stores its matrices; None: as float numbers.
    Raises InputError.
    """
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    methods = ("awq", "gptq", *(x.method for x in (BitNetFormat, MlxFormat, Mxfp4Format, OwnFormat)))
    if method not in methods or not isinstance(config, Mapping):
        raise InputError(
            f"quantization_config with quant_method {format_value(method)} is not supported: {_REMEDY}"
        )

    def require(is_supported: bool, name: str) -> None:
        if not is_supported:
            what = f"{method} with {name} {format_value(config.get(name))}"
            raise InputError(f"quantization_config: {what} is not supported: {_REMEDY}")

    if method == OwnFormat.method:
        require(config.get("version") in (VERSION, VERSION_ROTATED), "version")
        return OwnFormat(config.get("rotated") is True, config.get("once") is True)
    if method == MlxFormat.method:
        return MlxFormat(dict(config))
    if method == Mxfp4Format.method:  # the tensors show what is not converted
        return Mxfp4Format()
    if method == BitNetFormat.method:
        return _bitnet_format(config, require)
    return _awq_gptq_format(method, config, require)


def kept_format(config: Any, path: Path, quantize: str | None, dequantize: bool) -> QuantizedFormat | None:
    """Returns the format in which quantized matrices stay as they are stored; None: all are read as floats.
    Raises InputError where the format is not supported, or the arguments of `load_model` do not suit it.
    """
    found = read_format(config)
    is_mxfp4 = isinstance(found, Mxfp4Format)
    if dequantize and not is_mxfp4:
        stored = found.method if found else "float numbers"
        raise InputError(f"dequantize is of checkpoints in MXFP4, and {path} has {stored}: leave it out")
    if found and quantize and not dequantize:
        raise InputError(
            f"{path} is already quantized ({found.method}), and quantize={quantize!r} is asked for:"
            f" load it without quantize{', or with dequantize' if is_mxfp4 else ''}"
        )
    return None if dequantize else found


def format_to_write(
    config: ModelConfig, specs: Sequence[FileSpec], leaves: Sequence[Any]
) -> tuple[QuantizedFormat | None, dict[str, Any]]:
    """Returns the format for a model's quantized leaves, which is that of its checkpoint or else ours, and
    the entry of config.json for it; None and {}: none is quantized. Raises InputError.
    """
    settings = quantization_config(leaves, config.rotated)
    if not settings:
        return None, {}
    stored = config.quantization_config
    quantized = filter(is_quantized, leaves)
    if stored is None and all(isinstance(leaf, Mxfp4Weight) and len(leaf.shape) > 2 for leaf in quantized):
        stored = dict(quant_method=Mxfp4Format.method, modules_to_not_convert=_MXFP4_FLOATS)
    if stored and stored.get("quant_method") not in (OwnFormat.method, MlxFormat.method):
        named = zip((spec.hf_name for spec in specs), leaves, strict=True)
        floats = [name for name, leaf in named if len(leaf.shape) == 2 and not is_quantized(leaf)]
        settings = _with_floats(stored, [name.removesuffix(".weight") for name in floats if name != TIED[0]])
    return read_format(settings), dict(quantization_config=settings)


def _with_floats(settings: Mapping[str, Any], floats: list[str]) -> dict[str, Any]:
    """The settings of a checkpoint whose modules `floats` have float matrices, and the others packed ones."""
    method = settings.get("quant_method")
    found = {**settings}
    if method == BitNetFormat.method:
        found["quantization_mode"] = "offline"
    if method == "gptq":
        rules: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in floats if module != "lm_head"}
        if rules:
            found["dynamic"] = {**(settings.get("dynamic") or {}), **rules}
    elif method != Mxfp4Format.method:
        names = settings.get("modules_to_not_convert")
        names = [*names] if isinstance(names, list | tuple) else ["lm_head"]
        if added := [module for module in floats if not is_listed(module, map(str, names))]:
            found["modules_to_not_convert"] = names + added
    return found


def _awq_gptq_format(
    method: str, config: Mapping[str, Any], require: Callable[[bool, str], None]
) -> AwqGptqFormat:
    bits = config.get("bits")
    group = config.get("group_size")
    require(type(bits) is int and bits in ((4,) if method == "awq" else (4, 8)), "bits")
    require(type(group) is int and (group == -1 or group > 0 and group % 2 == 0), "group_size")
    require(config.get("pack_dtype", "int32") == "int32", "pack_dtype")
    # Rules for single modules. "-:" means not quantized, which the tensors show too.
    dynamic = config.get("dynamic") or {}
    require(isinstance(dynamic, Mapping) and all(rule.startswith("-:") for rule in dynamic), "dynamic")
    require(str(config.get("backend")) != "llm-awq", "backend")
    require(config.get("desc_act") in (None, True, False), "desc_act")
    layouts = ("gemm",) if method == "awq" else ("gptq", "gptq_v2")
    layout = layouts[0]
    for name in ("version", "format", "checkpoint_format"):
        if config.get(name) is not None and not (method == "gptq" and name == "version"):
            layout = str(config[name]).lower()
            require(layout in layouts, name)
    if method == "awq":
        require(config.get("zero_point", True) is True, "zero_point")
        return AwqGptqFormat(method, bits, group)
    require(not config.get("is_marlin_format"), "is_marlin_format")
    require(not config.get("adapter"), "adapter")
    zeros_minus_one = layout == "gptq"
    zeros_borrow = zeros_minus_one and "gptqmodel" in str(config.get("meta"))
    needs_order = bool(config.get("desc_act"))
    symmetric = config.get("sym") is True
    return AwqGptqFormat(method, bits, group, needs_order, zeros_minus_one, zeros_borrow, symmetric)


def _bitnet_format(config: Mapping[str, Any], require: Callable[[bool, str], None]) -> BitNetFormat:
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
    """The settings in the file of an older program; None: there is no such file."""
    for file, method in OLD_FILES.items():
        config = {_OLD_NAMES.get(name, name): value for name, value in (read_json(path / file) or {}).items()}
        if "bits" in config:  # other programs have files of these names too
            return {"quant_method": method} | config
    return None
