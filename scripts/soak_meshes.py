"""Checks every family over meshes of every size, on virtual devices: tokens and logits must equal those of
one device, and collectives must be the expected ones.

    python scripts/soak_meshes.py --devices=1,2,4,8

Runs tests/support/mesh_cases.py in one process per family, and prints a JSON line for each. Exit code 1:
a result differs from one device.
"""

from launcher import start

# isort: split
import json
import os
import subprocess
import sys
from pathlib import Path

from absl import flags

DEVICES = flags.DEFINE_list("devices", ["1", "2", "4", "8"], "Sizes of the mesh.")
CASES = flags.DEFINE_list("cases", [], "Names of families or of other cases. Default: all.")

_FILE = Path(__file__).parents[1] / "tests" / "support" / "mesh_cases.py"
_OTHERS = [
    "collectives_of_a_layer",
    "collectives_of_sampling",
    "formats",
    "bitnet_files",
    "mxfp4_files",
    "an_engine",
    "caches",
    "gradients",
    "kernels",
    "other_ways",
]
_FAMILIES = [
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "qwen3_moe",
    "olmo3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "phi3",
    "smollm3",
    "bitnet",
    "qwen3_next",
    "qwen3_5",
]


def main(argv: list[str]) -> int:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    failed = False
    for case in CASES.value or [*_OTHERS, *_FAMILIES]:
        names = [f"{case}-{devices}" for devices in DEVICES.value] if case in _FAMILIES else [case]
        done = subprocess.run(
            [sys.executable, _FILE, *names], env=environment, stdout=subprocess.PIPE, text=True
        )
        wrong = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {case: "no answer"}
        print(json.dumps(wrong), flush=True)
        failed |= any(wrong.values())
    return int(failed)


if __name__ == "__main__":
    start(main)
