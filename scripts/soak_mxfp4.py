"""Loads a checkpoint of gpt-oss's shape, with experts in MXFP4, and measures the memory of that.

    python scripts/soak_mxfp4.py --dtype=bfloat16 --limit_gib=16
    python scripts/soak_mxfp4.py --config=gpt-oss-120b --layers=8

Writes three sparse files of zeros, and prints a JSON line: sizes of the files and of the weights, the peak of
anonymous memory (RssAnon) of this process, interpreter included, and seconds. Exit code 1: the peak is above
--limit_gib.
"""

from launcher import start

# isort: split
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags
from machine_limits import AnonymousPeak
from model_shapes import hf_config

import xinfer_jax as xj
from xinfer_jax.checkpoint.mxfp4_format import Mxfp4Format
from xinfer_jax.families.naming import file_specs
from xinfer_jax.families.reading import from_hf

CONFIG = flags.DEFINE_string("config", "gpt-oss-20b", "A built-in shape, or a directory with config.json.")
LAYERS = flags.DEFINE_integer("layers", None, "Number of layers; None: all.", lower_bound=1)
DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Dtype of all but the experts.")
LIMIT = flags.DEFINE_float("limit_gib", 16, "GiB of anonymous memory that loading may take.", lower_bound=0)

_FILES = 3


def main(argv: list[str]) -> int:
    hf = hf_config(CONFIG.value)
    hf = hf | dict(
        num_hidden_layers=LAYERS.value or hf["num_hidden_layers"],
        quantization_config=dict(quant_method="mxfp4"),
    )
    hf.pop("layer_types", None)
    with tempfile.TemporaryDirectory() as folder:
        stored = write_zeros(Path(folder), hf)
        peak = AnonymousPeak()
        model = xj.load_model(folder, DTYPE.value)
        found = peak.peak()
    stats = model.load_stats
    sizes = dict(stored_gib=stored, weights_gib=stats.weight_bytes, peak_gib=found)
    sizes = {name: round(size / 2**30, 2) for name, size in sizes.items()}
    print(
        json.dumps(dict(config=CONFIG.value, layers=hf["num_hidden_layers"], seconds=stats.seconds) | sizes)
    )
    return int(found > LIMIT.value * 2**30)


def write_zeros(path: Path, hf: Mapping[str, Any]) -> int:
    """Writes the checkpoint, whose numbers are zeros in bfloat16 and MXFP4; returns its bytes."""
    specs = jax.tree.leaves(file_specs(from_hf(hf)))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for spec in specs:
        packed = Mxfp4Format().tensor_specs(spec.hf_name, spec.shape, {})
        tensors |= {name: ("U8", shape) for name, (shape, _) in packed.items()}
        if not packed:
            tensors |= {name: ("BF16", shape) for name, shape in spec.tensor_shapes().items()}
    names = list(tensors)
    files = {f"model-{i}.safetensors": names[i::_FILES] for i in range(_FILES)}
    sizes = [_write_file(path / file, {name: tensors[name] for name in of}) for file, of in files.items()]
    index = {"weight_map": {name: file for file, of in files.items() for name in of}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (path / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    return sum(sizes)


def _write_file(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Writes the header, and makes the file as long as its tensors need; returns their bytes."""
    header = {}
    end = 0
    for name, (kind, shape) in tensors.items():
        start = end
        end += math.prod(shape) * (2 if kind == "BF16" else 1)
        header[name] = dict(dtype=kind, shape=shape, data_offsets=[start, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
    return end


if __name__ == "__main__":
    start(main)
