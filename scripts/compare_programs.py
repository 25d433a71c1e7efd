"""Compares the programs of small models before and after a change: FLOPs, bytes accessed, bytes of arguments,
outputs and temporaries, and HLO instructions, as `cost_analysis` and `memory_analysis` give them.

`python scripts/compare_programs.py --base=main` compares the working tree with a commit, on this machine's
platform. The exit code is 1 where a program differs; one that only has another name does not. A refactoring
shows with it that it computes the same. JAX_DISABLE_MOST_OPTIMIZATIONS=1 halves its time.
"""

from launcher import InputError, start

# isort: split
import json
import sys
import tempfile
from pathlib import Path

from absl import flags
from bench.commit_checkout import checkout_of, start_in, widened, write_random_checkpoint
from script_paths import ROOT

# Of tests/support/parity_cases.py; they are widened.
MODELS = {
    "llama": "llama3-new",
    "qwen3": "qwen3-head-dim-tied",
    "gemma3": "gemma3-two-ropes-new",
    "qwen3_moe": "moe-defaults",
    "qwen3_5": "qwen3-5-tied",
}
FORMATS = ("float32", "bfloat16", "int8", "int4")
CALLS = ("forward", "prefill", "decode_step", "decode_loop", "generate", "engine")

_BASE = flags.DEFINE_string("base", "HEAD", "The commit to compare the working tree with.")
_MODELS = flags.DEFINE_multi_enum("models", [*MODELS], [*MODELS], "Families; repeat the flag for several.")
_FORMATS = flags.DEFINE_multi_enum("formats", [*FORMATS], FORMATS, "Formats of the weights.")
_CALLS = flags.DEFINE_multi_enum("calls", [*CALLS], CALLS, "Calls whose programs are compared.")


def write_checkpoint(folder: Path, case_name: str) -> None:
    """Writes a checkpoint of random weights."""
    import parity_cases

    write_random_checkpoint(folder, widened(parity_cases.CASES[case_name].hf))


def costs_of(checkout: Path, folders: list[Path], work: Path) -> dict[str, list[dict]]:
    """Returns the costs of a checkout's programs by model, format and call. Equal ones are compiled once."""
    out = work / "costs.json"
    arguments = [out, ",".join(_FORMATS.value), ",".join(_CALLS.value), *folders]
    cache = dict(
        JAX_COMPILATION_CACHE_DIR=str(work / "cache"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"
    )
    if start_in(checkout, "bench/program_costs.py", arguments, cache).wait():
        raise InputError(f"the programs of {checkout} were not compiled: see above")
    return json.loads(out.read_text(encoding="utf-8"))


def describe(program: dict) -> str:
    return " ".join(f"{key}={value}" for key, value in program.items())


def report(before: dict[str, list[dict]], after: dict[str, list[dict]]) -> int:
    """Prints what is equal and what differs, and returns how many calls differ."""
    different = 0
    for call, programs in after.items():
        counts = [[{**program, "name": None} for program in side] for side in (before[call], programs)]
        gone = [p for p, numbers in zip(before[call], counts[0], strict=True) if numbers not in counts[1]]
        new = [p for p, numbers in zip(programs, counts[1], strict=True) if numbers not in counts[0]]
        equal = not gone and not new and len(counts[0]) == len(counts[1])
        different += not equal
        print(f"{call:40} {len(counts[0]):3} programs {len(counts[1]):3}  {'equal' if equal else 'DIFFERS'}")
        for sign, side in (("-", gone), ("+", new)):
            for program in side:
                print(f"  {sign} {describe(program)}")
    return different


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folders = [work / model for model in _MODELS.value]
        for folder in folders:
            write_checkpoint(folder, MODELS[folder.name])
        with checkout_of(_BASE.value, work / "base") as base:
            before = costs_of(base, folders, work)
        different = report(before, costs_of(ROOT, folders, work))
    print(f"{different} of {len(before)} calls differ from {_BASE.value}")
    return 1 if different else 0


if __name__ == "__main__":
    start(main)
