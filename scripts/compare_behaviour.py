"""Compares the behaviour of the library before and after a change.

For every parity case it compares trees of parameters, bytes of caches, pages of engines, kernels, saved
files, and the results or errors of calls that a model may not support. It also compares the public API, and
the kernels of real shapes. None of these runs a model. Traces are of engines that run: the actions of the
scheduler in each step, and the answers with their versions and log-probabilities (behaviour/traces.py).
Programs are programs of small models: FLOPs, bytes accessed, bytes of arguments, outputs and temporaries, and
HLO instructions, as `cost_analysis` and `memory_analysis` give them (behaviour/programs.py).

`python scripts/compare_behaviour.py --base=main` compares the working tree with a commit. The exit code is 1
if a record differs. `--record=FILE` writes the records of the commit as JSON. `--cases=NAME` compares one
case of tests/support/parity_cases.py. Repeat the flag for several cases. `--part=records` takes six minutes
of CPU time, `--part=traces` five. `--part=programs` takes longer, and runs only if you ask for it.

Not recorded: results of compiled programs (tests/model/test_golden.py has them), calls that need a tokenizer,
checks of a request to a running engine, and GGUF, MLX and bitsandbytes files.
"""

from launcher import InputError, start

# isort: split
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import flags
from bench.commit_checkout import checkout_of, start_in, widened, write_random_checkpoint
from script_paths import ROOT

from xinfer_jax.estimates.model_shapes import SHAPES

_BASE = flags.DEFINE_string("base", "HEAD", "The commit to compare the working tree with.")
_RECORD = flags.DEFINE_string("record", None, "A file to which the records of the commit are written.")
_PARTS = flags.DEFINE_multi_enum(
    "part", ["records", "traces"], ["records", "traces", "programs"], "What is compared."
)
_CASES = flags.DEFINE_multi_string("cases", [], "Parity cases; repeat the flag for several; default: all.")
# Parity cases that are also saved with widths at which quantized groups and blocks are whole.
WIDE = (
    "llama3-new qwen3-head-dim-tied gemma3-two-ropes-new gemma4-experts moe-defaults mixtral-old"
    " gpt-oss-published qwen3-5-tied qwen3-next-sparse-step"
).split()
# Parity cases whose programs are compared.
PROGRAMS = ("llama3-new", "qwen3-head-dim-tied", "gemma3-two-ropes-new", "moe-defaults", "qwen3-5-tied")
SHAPE_LAYERS = 6  # of shapes of real models: a window and a full layer of every family
WIDTH = 400  # characters of a value that are printed
SETTINGS = {  # of processes that record no programs: two devices for a mesh, and nothing of this machine
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "PYTHONHASHSEED": "0",
}


def with_fewer_layers(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json with the first layers."""
    types = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    hf = hf | {name: hf[name][:SHAPE_LAYERS] for name in types if name in hf}
    lists = {name: hf[name] for name in ("full_attn_idxs", "attn_layer_indices") if name in hf}
    hf = hf | {name: [i for i in found if i < SHAPE_LAYERS] for name, found in lists.items()}
    return hf | dict(num_hidden_layers=SHAPE_LAYERS)


def parity_case(name: str) -> dict[str, Any]:
    """Returns the config.json of a parity case."""
    import parity_cases

    if name not in parity_cases.CASES:
        raise InputError(f"--cases={name} is no parity case: tests/support/parity_cases.py")
    return parity_cases.CASES[name].hf


def write_checkpoints(folder: Path, names: list[str]) -> None:
    """Writes the parity cases with these names. Without names it writes all checkpoints and configs."""
    import parity_cases

    for name in names or parity_cases.CASES:
        write_random_checkpoint(folder / "parity" / name, parity_case(name))
    if names:
        return
    for name in WIDE:
        write_random_checkpoint(folder / "wide" / name, widened(parity_case(name)))
    write_quantized(folder / "quantized")
    shapes = folder / "shapes"
    shapes.mkdir()
    for name, hf in SHAPES.items():
        if "num_kv_shared_layers" not in hf:
            hf = with_fewer_layers(hf)
        (shapes / f"{name}.json").write_text(json.dumps(hf), encoding="utf-8")


def write_quantized(folder: Path) -> None:
    """Writes small checkpoints whose matrices are stored quantized."""
    import bitnet_checkpoints
    import mxfp4_checkpoints
    import quantized_checkpoints
    import scaled_checkpoints as scaled
    import tiny

    for name, (settings, how) in quantized_checkpoints.CASES.items():
        quantized_checkpoints.write(folder / name, settings, **how)
    for layout in bitnet_checkpoints.LAYOUTS:
        bitnet_checkpoints.checkpoint(folder / f"bitnet-{layout}", layout)
    tiny.write(folder / "mxfp4", mxfp4_checkpoints.HF, weights=mxfp4_checkpoints.tensors())
    hf = tiny.UNTIED | dict(hidden_size=64, intermediate_size=96, head_dim=16)
    for name, settings, encode in (
        ("fp8-blocks", scaled.fp8_settings([32, 32]), scaled.fp8((32, 32))),
        ("fp8-rows", scaled.fp8_settings(), scaled.fp8("row", end="_scale")),
        ("nvfp4", dict(quant_method="modelopt_fp4", quant_algo="NVFP4", group_size=16), scaled.nvfp4),
        ("w4a16", scaled.w4(), scaled.integers(4, 32)),
        ("w4a16-zeros", scaled.w4(symmetric=False), scaled.integers(4, 32, False)),
    ):
        scaled.checkpoint(folder / name, hf, settings, encode)


def records_of(part: str, checkouts: list[Path], work: Path) -> list[dict[str, Any]]:
    """Returns a part of the records of each checkout. They are made at the same time."""
    outs = [work / f"{part} {i}.json" for i in range(len(checkouts))]
    started = [
        start_in(checkout, f"behaviour/{part}.py", [out, work], {} if part == "programs" else SETTINGS)
        for checkout, out in zip(checkouts, outs, strict=True)
    ]
    failed = [process.wait() for process in started]
    for checkout, code in zip(checkouts, failed, strict=True):
        if code:
            raise InputError(f"the behaviour of {checkout} was not recorded: see above")
    return [json.loads(out.read_text(encoding="utf-8")) for out in outs]


def differences(before: Any, after: Any, place: str = "") -> list[tuple[str, Any, Any]]:
    """Returns the parts in which two values differ: the place, the value before, and the value after."""
    if isinstance(before, dict) and isinstance(after, dict):
        parts = [*before, *(name for name in after if name not in before)]
        pairs = [(f"{place} / {x}" if place else x, before.get(x), after.get(x)) for x in parts]
        return [found for name, old, new in pairs for found in differences(old, new, name)]
    return [] if before == after else [(place, before, after)]


def report(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints the records that differ with both values, and returns their number. A case that the base does
    not load is new: its records are counted and not compared.
    """
    new = [name.split(":")[0] for name in before if name.endswith(": load") and name not in after]
    of_new = [name for name in {**before, **after} if name.split(":")[0] in new]
    before, after = ({x: side[x] for x in side if x not in of_new} for side in (before, after))
    found = differences(before, after)
    for place, old, now in found:
        print(place)
        print(f"  - {json.dumps(old)[:WIDTH]}")
        print(f"  + {json.dumps(now)[:WIDTH]}")
    if new:
        print(f"new, not compared: {', '.join(new)}")
    names = {**before, **after}
    different = sum(before.get(name) != after.get(name) for name in names)
    print(f"equal: {len(names)} records" if not different else f"{different} of {len(names)} records differ")
    return different


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        before: dict[str, Any] = {}
        after: dict[str, Any] = {}
        if "records" in _PARTS.value:
            write_checkpoints(work, _CASES.value)
        if "programs" in _PARTS.value:
            for case in _CASES.value or PROGRAMS:
                write_random_checkpoint(work / "programs" / case, widened(parity_case(case)))
        with checkout_of(_BASE.value, work / "base") as base:
            for part in _PARTS.value:
                of_base, of_tree = records_of(part, [base, ROOT], work)
                before |= of_base
                after |= of_tree
        if _RECORD.value:
            Path(_RECORD.value).write_text(json.dumps(before, indent=1), encoding="utf-8")
    return 1 if report(before, after) else 0


if __name__ == "__main__":
    start(main)
