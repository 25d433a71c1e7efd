"""Reads the `quantization_config` of AWQ, GPTQ and AutoRound checkpoints.

AutoRound (Cheng et al. 2023) packs matrices as GPTQ or AWQ does. GPTQ's `dynamic` and AutoRound's
`extra_config` have settings for some modules, by a name or by a regular expression.
"""

import dataclasses
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Self

from ..families.conversion import TensorOfLeaves
from ..families.skipped_tensors import text_name
from .awq_gptq_format import AwqGptqFormat
from .files import read_json
from .scaled_tensor import ScaledTensor, is_quick_pattern
from .tensors import Require, Shape, Tensors, TensorSpec

_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # of AutoAWQ
_LAYOUTS = {  # packing_format of AutoRound: the layout, and the format of a GPTQ checkpoint
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto"), ("gptq", "gptq")),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), ("gptq", "gptq_v2")),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq"), ("awq", "gemm")),
}
# Settings of AutoRound that change what is stored, with their defaults.
_AUTO_ROUND = dict(bits=4, group_size=128, sym=True, data_type="int", act_bits=None, super_bits=None)


@dataclasses.dataclass(frozen=True)
class AwqGptqByModule(AwqGptqFormat):
    """A format in which some modules have other bits, groups or zeros. It reads the settings of all."""

    methods = ("awq", "gptq", "auto-round")
    files = ("quantize_config.json", "quant_config.json")  # of AutoGPTQ and AutoAWQ

    rules: tuple[
        tuple[str, AwqGptqFormat], ...
    ] = ()  # by regular expressions; the first that is found counts
    full_names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of modules, by their own names

    @classmethod
    def find_settings(cls, settings: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        for file, method in zip(cls.files, ("gptq", "awq"), strict=True):
            found = {} if settings.get("quantization_config") else read_json(path / file) or {}
            config = {_OLD_NAMES.get(name, name): value for name, value in found.items()}
            if "bits" in config:  # other programs have files of these names too
                return {"quant_method": method} | config
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> AwqGptqFormat:
        return (_auto_round if config["quant_method"] == "auto-round" else _awq_or_gptq)(config, require)

    @classmethod
    def with_floats(cls, settings: Mapping[str, Any], floats: list[str]) -> dict[str, Any]:
        method = settings["quant_method"]
        modules = [module for module in floats if module != "lm_head"]
        if method == "gptq" and modules:
            rules: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in modules}
            # The first that matches counts.
            return {**settings, "dynamic": rules | (settings.get("dynamic") or {})}
        if method == "auto-round":
            extra = settings.get("extra_config") or {}
            new = [module for module in modules if extra.get(module, {}).get("bits") != 16]
            listed = {module: dict(bits=16) for module in new}
            return {**settings, "extra_config": extra | listed} if listed else {**settings}
        return super().with_floats(settings, floats) if method == "awq" else {**settings}

    def of_files(self, tensors: Tensors) -> Self:
        owns = {own.rpartition(".")[0]: name for name in tensors if (own := text_name(name, True))}
        return dataclasses.replace(self, full_names={x: name.rpartition(".")[0] for x, name in owns.items()})

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        return self._of_module(name).tensor_specs(name, shape, tensors)

    def open(self, name: str, shape: Shape, tensors: Tensors) -> ScaledTensor:
        return self._of_module(name).open(name, shape, tensors)

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        packed = (self._of_module(name.format(0)).pack({name: leaf}, dtype) for name, leaf in leaves.items())
        return dict(chain.from_iterable(tensors.items() for tensors in packed))

    def _of_module(self, name: str) -> AwqGptqFormat:
        """Returns the format in which the matrix X.weight is stored."""
        own = name.removesuffix(".weight")
        names = (own, self.full_names.get(own, own))
        return next(form for pattern, form in self.rules if any(re.search(pattern, x) for x in names))


def _awq_or_gptq(config: Mapping[str, Any], require: Require) -> AwqGptqFormat:
    format = _format(config, require)
    dynamic = config.get("dynamic") or {}
    require(isinstance(dynamic, Mapping), "dynamic")
    # "-:" means not quantized, which the tensors show too.
    positive = {name.removeprefix("+:"): x for name, x in dynamic.items() if not name.startswith("-:")}
    rules = {rf"\A(?:{pattern})": changes for pattern, changes in positive.items()}
    return _with_rules(format, config, rules, lambda is_supported, _: require(is_supported, "dynamic"))


def _auto_round(config: Mapping[str, Any], require: Require) -> AwqGptqFormat:
    packing = config.get("packing_format", "auto")
    require(isinstance(packing, str) and packing in _LAYOUTS, "packing_format")
    # Earlier versions wrote the packing into `backend`, by names that say less of it.
    require("packing_format" in config or config.get("backend") in (None, "auto"), "backend")
    require(not config.get("rotation_config"), "rotation_config")
    (layout, version) = _LAYOUTS[packing]
    given = {name: config[name] for name in _AUTO_ROUND if name in config}
    settings = _AUTO_ROUND | given | dict(layout=layout, checkpoint_format=version, quant_method="auto-round")
    extra = config.get("extra_config") or {}
    require(
        isinstance(extra, Mapping) and all(isinstance(x, Mapping) for x in extra.values()), "extra_config"
    )
    packed = {name: changes for name, changes in extra.items() if changes.get("bits", 4) not in (16, 32)}
    is_name = {name: bool(re.fullmatch(r"[\w.]+", name)) for name in packed}
    rules = {rf"\A{re.escape(name)}\Z": changes for name, changes in packed.items() if is_name[name]}
    rules |= {name: changes for name, changes in packed.items() if not is_name[name]}
    format = _format(settings, require)
    return _with_rules(format, settings, rules, lambda is_supported, _: require(is_supported, "extra_config"))


def _with_rules(
    format: AwqGptqFormat, settings: Mapping[str, Any], rules: Mapping[str, Any], require: Require
) -> AwqGptqFormat:
    """Returns the format, or one with others for some modules. rules: their settings by regular
    expressions.
    """
    found = []
    for pattern, changes in rules.items():
        require(
            isinstance(changes, Mapping) and not changes.keys() & {"quant_method", "method", "layout"}, ""
        )
        found.append((pattern, _format({**settings, **changes}, require)))
    if all(own == format for _, own in found):
        return format
    require(all(is_quick_pattern(pattern) for pattern, _ in found), "")
    return AwqGptqByModule(**vars(format), rules=(*found, ("", format)))


def _format(config: Mapping[str, Any], require: Require) -> AwqGptqFormat:
    """Returns the format of all modules, or of one."""
    method = config["quant_method"]
    kind = config.get("layout", method)
    bits: Any = config.get("bits")
    group: Any = config.get("group_size")
    require(type(bits) is int and bits in ((4,) if kind == "awq" else (4, 8)), "bits")
    require(type(group) is int and (group == -1 or group > 0 and group % 2 == 0), "group_size")
    require(config.get("pack_dtype", "int32") == "int32", "pack_dtype")
    require(config.get("data_type") in (None, "int"), "data_type")
    for name in ("act_bits", "super_bits"):
        require(config.get(name) is None or config[name] in (16, 32), name)
    require(str(config.get("backend")) != "llm-awq", "backend")
    require(config.get("desc_act") in (None, True, False), "desc_act")
    layouts = ("gemm",) if kind == "awq" else ("gptq", "gptq_v2")
    layout = layouts[0]
    for name in ("version", "format", "checkpoint_format"):
        if config.get(name) is not None and not (kind == "gptq" and name == "version"):
            layout = str(config[name]).lower()
            require(layout in layouts, name)
    if kind == "awq":
        require(config.get("zero_point", True) is True, "zero_point")
        return AwqGptqFormat(method, kind, bits, group)
    require(not config.get("is_marlin_format"), "is_marlin_format")
    require(not config.get("adapter"), "adapter")
    zeros_minus_one = layout == "gptq"
    zeros_borrow = zeros_minus_one and "gptqmodel" in str(config.get("meta"))
    needs_order = bool(config.get("desc_act"))
    symmetric = config.get("sym") is True
    return AwqGptqFormat(method, kind, bits, group, needs_order, zeros_minus_one, zeros_borrow, symmetric)
