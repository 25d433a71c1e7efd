"""Writes how a checkout of the library behaves with small checkpoints, as JSON: a process that
scripts/compare_behaviour.py starts for each of two checkouts, in its folder. It uses public names alone,
except in the functions whose docstring says so.

Arguments: the file to write, and a folder with the checkpoints: `parity/NAME`, of which everything is
recorded, `wide/NAME` and `quantized/NAME`, of which parameters and saved files are, and the configs
`shapes/NAME.json`, of which kernels are.

A call that compiles is made under `jax_no_tracing`: all checks of arguments run before anything is traced, so
the record says how a call ends that is not supported, or that another one begins.
"""

import json
import sys
from pathlib import Path

import xinfer_jax as xj
from behaviour.model_calls import call_records
from behaviour.public_api import api_records
from behaviour.recording import Records, attempt
from behaviour.saved_files import FORMATS, STORED_FORMATS, adapter_files, file_records
from behaviour.sizes import (
    cache_records,
    device_records,
    engine_record,
    engine_records,
    limit_memory,
    mesh_records,
)


def case_records(folder: Path, draft: xj.Model) -> Records:
    """Returns everything of one checkpoint, except the parts that depend on a device that is assumed. draft:
    a model with the same vocabulary.
    """
    model = attempt(lambda: xj.load_model(folder, dtype="float32"))
    if isinstance(model, str):
        return {"load": model}
    records = file_records(folder, FORMATS)
    records["save_adapter"] = attempt(lambda: adapter_files(model))
    records |= cache_records(model.config) | engine_records(model) | mesh_records(folder, model.config)
    quantized = attempt(lambda: xj.load_model(folder, dtype="float32", quantize="int8"))
    records |= call_records(model, draft, None if isinstance(quantized, str) else quantized)
    records["engine int8"] = attempt(lambda: engine_record(quantized))
    return records


def checkpoint_records(work: Path) -> Records:
    """Returns the records of all checkpoints in the folders of `work`."""
    records: Records = {}

    def add(name: str, found: Records) -> None:
        records.update({f"{name}: {what}": record for what, record in found.items()})

    configs = {}
    folders = sorted((work / "parity").iterdir())
    draft = xj.load_model(folders[0], dtype="float32")
    for folder in folders:
        found = case_records(folder, draft)
        add(folder.name, found)
        if "load" not in found:
            configs[folder.name] = xj.ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    for kind, formats in (("wide", FORMATS), ("quantized", STORED_FORMATS)):
        for folder in sorted((work / kind).glob("*")):
            add(f"{kind} {folder.name}", file_records(folder, formats))
    for file in sorted((work / "shapes").glob("*.json")):
        configs[file.stem] = xj.ModelConfig.from_hf(json.loads(file.read_text()))
    return records | device_records(configs)


def main(out: str, work: str) -> None:
    assert Path.cwd() in Path(xj.__file__).parents, "another checkout is imported"
    limit_memory()
    records = api_records() | checkpoint_records(Path(work))
    Path(out).write_text(json.dumps(records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
