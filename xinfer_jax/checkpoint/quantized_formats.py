"""Quantized checkpoints: AWQ and GPTQ as others write them, and our own format, which keeps every leaf as it
is in memory.

AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022) store a matrix [N outputs, K inputs] as X.qweight,
X.qzeros and X.scales, numbers of 4 (GPTQ also 8) bits in words of 32; GPTQ may add X.g_idx, the group of each
input. Ours stores the fields of a leaf as X.weight.values, .scale, .zero and .order; shapes tell the rest.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..config.model_config import from_hf
from ..errors import InputError, shown
from ..weights.params import Params, param_specs
from ..weights.quantized import GroupedWeight, Int8Weight, QuantizedWeight, is_quantized, pack
from .files import read_json

Part = tuple[tuple[int, ...], set[str]]  # shape and types of a tensor in a file

OURS, _VERSION = "xinfer_jax", 1
_REMEDY = (
    "awq (version gemm, 4 bits) and gptq (4 or 8 bits) are read: use such a checkpoint, or the unquantized"
    " one with quantize="
)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # which 4 bits of a word, from the lowest, each of its 8 outputs has
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int8": "I8", "uint8": "U8"}
_SCALES = {"F16", "BF16", "F32"}


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """How the quantized matrices of a checkpoint are stored."""

    method: str  # awq, gptq or `OURS`
    bits: int = 0
    group: int = -1  # inputs that share a scale; -1: all
    ordered: bool = False  # gptq: X.g_idx must be there
    zero_less_one: bool = False  # gptq: zeros are stored less one,
    borrowed: bool = False  # and that was subtracted from whole words, with borrows between their numbers

    def parts(self, name: str, shape: tuple[int, ...], tensors: Mapping[str, Any]) -> dict[str, Part]:
        """Tensors that a quantized matrix is stored as, by name; empty if it is not quantized.

        Args:
            name, shape: of the matrix, X.weight [N, K].
            tensors: by name, files that hold them.
        """
        if len(shape) == 1 or name in tensors:
            return {}
        if self.method == OURS:
            return _our_parts(name, shape, tensors)
        module = name.removesuffix(".weight")
        if not any(f"{module}.{part}" in tensors for part in ("qweight", "qzeros", "scales")):
            return {}
        (N, K), each = shape, 32 // self.bits
        G = -(-K // self._inputs(K))
        packed = (K, -(-N // each)) if self.method == "awq" else (-(-K // each), N)
        parts: dict[str, Part] = {
            "qweight": (packed, {"I32"}),
            "qzeros": ((G, -(-N // each)), {"I32"}),
            "scales": ((G, N), _SCALES),
        }
        if self.ordered or f"{module}.g_idx" in tensors:
            parts["g_idx"] = ((K,), {"I32", "I64"})
        return {f"{module}.{part}": stored for part, stored in parts.items()}

    def leaf(self, name: str, shape: tuple[int, ...], tensors: Mapping[str, Any]) -> QuantizedWeight:
        """The matrix whose `parts` have been checked; NumPy arrays in the leaf.

        Raises:
            InputError: numbers that do not fit.
        """

        def get(part: str) -> Any:
            full = f"{name if self.method == OURS else name.removesuffix('.weight')}.{part}"
            return tensors[full].get_tensor(full) if full in tensors else None

        N, K = shape
        if self.method == OURS:
            values, scale, zero, order = (get(part) for part in ("values", "scale", "zero", "order"))
            if order is not None and not np.array_equal(np.sort(order), np.arange(K)):
                raise InputError(f"{name}: order does not name every input once: fetch the checkpoint again")
            return (
                Int8Weight(values, scale)
                if values.ndim == 2
                else GroupedWeight(values, scale, zero, order, K)
            )
        J = self._inputs(K)
        order = None if self.method == "awq" else _order(name, get("g_idx"), J, K)
        zero, scale = self._zeros(get("qzeros"))[:, :N], get("scales")
        if self.bits == 8 and (zero != 128).any():
            raise InputError(
                f"{name}: gptq with 8 bits is only read if symmetric, all zeros 128, got"
                f" {int(zero[zero != 128][0])}"
            )
        levels_IO = self._levels(get("qweight"))[:K, :N]
        if order is not None:
            levels_IO = levels_IO[order]
        levels_QJO = np.pad(levels_IO, ((0, len(zero) * J - K), (0, 0))).reshape(len(zero), J, N)
        scale = scale if scale.dtype == np.float16 else scale.astype(np.float32)
        if self.bits == 8:
            return GroupedWeight((levels_QJO ^ 128).view(np.int8), scale, None, order, K)  # q - 128
        return GroupedWeight(pack(levels_QJO), scale, np.ascontiguousarray(zero), order, K)

    def spare(self, name: str, tensors: Mapping[str, Any]) -> bool:
        """Whether a tensor says nothing: some writers give every quantized matrix a bias, of zeros."""
        module = name.removesuffix(".bias")
        return module != name and f"{module}.qweight" in tensors and not tensors[name].get_tensor(name).any()

    def _inputs(self, K: int) -> int:
        """J: inputs of a group, even."""
        return min(self.group, K + K % 2) if self.group > 0 else K + K % 2

    def _levels(self, words: np.ndarray) -> np.ndarray:
        """X.qweight as uint8 [K, N]."""
        return (
            self._row(words)
            if self.method == "awq"
            else np.stack(_numbers(words, self.bits), 1).reshape(-1, words.shape[1])
        )

    def _zeros(self, words: np.ndarray) -> np.ndarray:
        """X.qzeros as uint8 [G, N]. A stored 15 was 0 before it was lessened; where whole words were, it
        borrowed from its neighbour.
        """
        if self.borrowed:
            words = words.view(np.uint32) + np.uint32(sum(1 << at for at in range(0, 32, self.bits)))
        return (self._row(words) + np.uint8(self.zero_less_one and not self.borrowed)) & np.uint8(
            2**self.bits - 1
        )

    def _row(self, words: np.ndarray) -> np.ndarray:
        """Numbers in the order of the outputs: [R, N]."""
        numbers = _numbers(words, self.bits)
        if self.method == "awq":
            numbers = [numbers[at] for at in _AWQ_PLACES]
        return np.stack(numbers, -1).reshape(len(words), -1)


def with_old_settings(settings: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The contents of config.json, with the quantization_config that older programs (AutoGPTQ, AutoAWQ) wrote
    to a file of its own.
    """
    if settings.get("quantization_config"):
        return settings
    for file, method in _OLD_FILES.items():
        given = {_OLD_NAMES.get(name, name): value for name, value in (read_json(path / file) or {}).items()}
        if "bits" in given:  # files of other programs have these names too
            return {**settings, "quantization_config": {"quant_method": method} | given}
    return settings


def read_format(settings: Mapping[str, Any]) -> FileFormat | None:
    """How the matrices are stored, from the contents of config.json; None: as float numbers.

    Raises:
        InputError: a method, or a setting of one, that is not read.
    """
    given = settings.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if method not in ("awq", "gptq", OURS) or not isinstance(given, Mapping):
        raise InputError(f"quantization_config with quant_method {shown(method)} is not supported: {_REMEDY}")

    def refuse_unless(fits: bool, name: str) -> None:
        if not fits:
            raise InputError(
                f"quantization_config: {method} with {name} {shown(given.get(name))} is not supported:"
                f" {_REMEDY}"
            )

    if method == OURS:
        refuse_unless(given.get("version") == _VERSION, "version")
        return FileFormat(OURS)
    bits, group = given.get("bits"), given.get("group_size")
    refuse_unless(type(bits) is int and bits in ((4,) if method == "awq" else (4, 8)), "bits")
    refuse_unless(type(group) is int and (group == -1 or group > 0 and group % 2 == 0), "group_size")
    refuse_unless(given.get("pack_dtype", "int32") == "int32", "pack_dtype")
    # Settings of their own for some modules; "-:": not quantized, which the tensors say too.
    dynamic = given.get("dynamic") or {}
    refuse_unless(isinstance(dynamic, Mapping) and all(rule.startswith("-:") for rule in dynamic), "dynamic")
    refuse_unless(str(given.get("backend")) != "llm-awq", "backend")
    refuse_unless(given.get("desc_act") in (None, True, False), "desc_act")
    layouts = ("gemm",) if method == "awq" else ("gptq", "gptq_v2")
    found = layouts[0]
    for name in ("version", "format", "checkpoint_format"):
        if given.get(name) is not None and not (method == "gptq" and name == "version"):
            found = str(given[name]).lower()
            refuse_unless(found in layouts, name)
    if method == "awq":
        refuse_unless(given.get("zero_point", True) is True, "zero_point")
        return FileFormat(method, bits, group)
    for name in ("is_marlin_format", "adapter"):
        refuse_unless(not given.get(name), name)
    less_one, borrowed = found == "gptq", "gptqmodel" in str(given.get("meta"))
    return FileFormat(method, bits, group, bool(given.get("desc_act")), less_one, less_one and borrowed)


def save_checkpoint(
    path: str | Path, model_dir: str | Path | None, params: Params, settings: Mapping[str, Any]
) -> None:
    """Writes a checkpoint that `load_model` opens again with the same bits in every leaf; one tensor at a
    time is on the host.

    Args:
        path: the directory, made if it is not there.
        model_dir: where the tokenizer and generation_config.json are copied from; None: they are not.
        params: the parameter tree, some of its matrices quantized or none.
        settings: contents of config.json.

    Raises:
        InputError: `path` is `model_dir`, or cannot be written.
    """
    path = Path(path)
    specs, tree = jax.tree.flatten(param_specs(from_hf(settings)))
    tensors: dict[str, Any] = {}
    flat = tree.flatten_up_to(params)  # type: ignore[attr-defined]
    for spec, leaf in zip(specs, flat, strict=True):
        fields = (
            {name: getattr(leaf, name, None) for name in ("values", "scale", "zero", "order")}
            if is_quantized(leaf)
            else {}
        )
        leaves = zip(spec.stored(), leaf, strict=True) if len(spec.shape) == 3 else [(spec.hf_name, leaf)]
        tensors |= {
            f"{spec.hf_name}.{name}": field for name, field in fields.items() if field is not None
        } or dict(leaves)
    settings = {name: value for name, value in settings.items() if name != "quantization_config"}
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        settings["quantization_config"] = {"quant_method": OURS, "version": _VERSION}
    try:
        path.mkdir(parents=True, exist_ok=True)
        if model_dir is not None and path.samefile(model_dir):
            raise InputError(f"{path} is the checkpoint that is read: give another directory to write to")
        for name in _COPIED if model_dir is not None else ():
            if (Path(model_dir) / name).is_file():
                shutil.copyfile(Path(model_dir) / name, path / name)
        _write(path / "model.safetensors", tensors)
        (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}") from error


def _write(file: Path, tensors: Mapping[str, jax.Array]) -> None:
    """The safetensors format: length of the header, header, data. Its own writer would hold all data
    twice.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # so that every tensor is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _TYPES[tensors[name].dtype.name],
            "shape": tensors[name].shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            out.write(np.ascontiguousarray(tensors[name]).view(np.uint8).data)


def _our_parts(name: str, shape: tuple[int, ...], tensors: Mapping[str, Any]) -> dict[str, Part]:
    if (values := f"{name}.values") not in tensors:
        return {}
    (N, K), stored = shape, tensors[values].get_slice(values)
    if len(stored.get_shape()) != 3:
        return {values: ((N, K), {"I8"}), f"{name}.scale": ((N,), {"F32"})}
    rows, packed = stored.get_shape()[1], stored.get_dtype() == "U8"
    G = -(-K // max(1, rows * (2 if packed else 1)))
    parts = {values: ((G, rows, N), {"U8", "I8"}), f"{name}.scale": ((G, N), {"F16", "F32"})}
    optional = {f"{name}.zero": ((G, N), {"U8"}), f"{name}.order": ((K,), {"I32"})}
    return parts | {part: expected for part, expected in optional.items() if part in tensors}


def _order(name: str, group_I: np.ndarray | None, J: int, K: int) -> np.ndarray | None:
    """Inputs group by group, from the group of each; None if that is their own order."""
    natural = np.arange(K) // J
    if group_I is None or np.array_equal(group_I, natural):
        return None
    order = np.argsort(group_I, kind="stable")
    if not np.array_equal(group_I[order], natural):
        raise InputError(
            f"{name}: g_idx does not give every group its {J} inputs: fetch the checkpoint again"
        )
    return order.astype(np.int32)


def _numbers(words: np.ndarray, bits: int) -> list[np.ndarray]:
    """int32 [R, C] as the numbers in each word, lowest first, each uint8 [R, C]."""
    by_byte = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(*words.shape, 4)
    bytes_OC = [by_byte[..., i] for i in range(4)]
    return bytes_OC if bits == 8 else [number for byte in bytes_OC for number in (byte & 15, byte >> 4)]
