"""Adapters that cost a server much: the attack `adapters` of soak_serve.py asks to load them."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from script_paths import SCRIPTS

ADMIN_KEY = "attacking-admin"
NAMES = ("metadata", "rank", "tensors", "patterns", "backtracking", "deep", "large", "pipe", "device")
_RANK = 1_000_000
_SETTINGS = dict(peft_type="LORA", r=4, lora_alpha=4, target_modules=["q_proj"])


def write(folder: Path) -> tuple[str, ...]:
    """Writes the adapters of `NAMES` for the bundled model into a folder, some of them as sparse files.
    Returns flags of a server that loads them.
    """
    root = folder / "adapters"
    for name in NAMES:
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").write_text(json.dumps(_SETTINGS))
        _write_tensors(root / name, _tensors(4))
    _write_tensors(root / "rank", _tensors(_RANK))
    _set(root / "rank", r=_RANK)
    end = max(tensor["data_offsets"][1] for tensor in _tensors(4).values())
    empty = dict(dtype="F32", shape=[0], data_offsets=[end, end])
    names = (f"base_model.model.model.layers.{i + 99}.self_attn.q_proj.lora_A.weight" for i in range(300_000))
    _write_tensors(root / "tensors", _tensors(4) | {name: empty for name in names})
    _write_tensors(root / "metadata", {"__metadata__": {str(i): "" for i in range(2_000_000)}})
    _set(root / "patterns", rank_pattern={f"x{i}.y": 4 for i in range(45_000)})
    _set(root / "backtracking", target_modules=r"([\w.]+)+!")
    (root / "deep" / "adapter_config.json").write_text('{"r":' + "[" * 400_000 + "]" * 400_000 + "}")
    os.truncate(root / "large" / "adapter_config.json", 2**34)
    for name in ("pipe", "device"):
        (root / name / "adapter_model.safetensors").unlink()
    os.mkfifo(root / "pipe" / "adapter_model.safetensors")
    (root / "device" / "adapter_model.safetensors").symlink_to("/dev/zero")
    keys = folder / "admin_keys"
    keys.write_text(f"{ADMIN_KEY}\n", encoding="utf-8")
    return f"--adapter_dir={root}", f"--admin_key_file={keys}", "--max_adapters=2", "--max_rank=8"


def _tensors(rank: int) -> dict[str, Any]:
    """Returns the header of an adapter of the query matrices."""
    config = json.loads((SCRIPTS.parent / "xinfer_jax" / "assets" / "config.json").read_text())
    width = config["hidden_size"]  # also of all heads
    header = {}
    end = 0
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (("lora_A", [rank, width]), ("lora_B", [width, rank])):
            start, end = end, end + 4 * shape[0] * shape[1]
            tensor = f"base_model.model.model.layers.{layer}.self_attn.q_proj.{name}.weight"
            header[tensor] = dict(dtype="F32", shape=shape, data_offsets=[start, end])
    return header


def _write_tensors(path: Path, header: dict[str, Any]) -> None:
    """Writes a file whose tensors are zeros, without blocks on the disk."""
    data = json.dumps(header).encode()
    end = max(
        (tensor["data_offsets"][1] for tensor in header.values() if "data_offsets" in tensor), default=0
    )
    with open(path / "adapter_model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)


def _set(path: Path, **settings: Any) -> None:
    (path / "adapter_config.json").write_text(json.dumps(_SETTINGS | settings))
