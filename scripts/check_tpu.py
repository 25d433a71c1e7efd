"""Checks and times the kernels and the engine on this machine's TPU, as check_gpu.py does on a GPU.

    python scripts/check_tpu.py --out=tpu.jsonl           # most important first, for at most 9 minutes
    python scripts/check_tpu.py --sections=half_b,engine  # some sections
    python scripts/check_tpu.py --report=tpu.jsonl        # print the table of an earlier run
    python scripts/check_tpu.py --tiny                    # tiny shapes, emulated kernels, on the CPU

Runs from a checkout without installation, on one device of the machine. Each section runs in its own process
with a time limit, and each result is written to --out immediately as a JSON line. Exit code 1: a result is
wrong, or a section did not finish; 2: no TPU or a missing package, reported in one line; 130: interrupted,
the table is printed nevertheless.
"""

import sys

import script_paths  # noqa: F401

# isort: split
from gpu.section_runner import Section, missing_packages

if _missing := missing_packages(("absl", "jax", "numpy")):
    print(f"check_tpu: {_missing}", file=sys.stderr)
    sys.exit(2)

from absl import app, flags  # noqa: E402
from gpu import check_command  # noqa: E402
from gpu.check_command import MODEL, TEXT, Program  # noqa: E402
from launcher import parse  # noqa: E402

SECTIONS = (  # most important first; the limits up to `verified` add up to 9 minutes
    Section("attention", 120),
    Section("half_b", 110, MODEL),
    Section("engine", 100, TEXT),
    Section("quantized", 80, MODEL),
    Section("sampled", 50, MODEL),
    Section("verified", 50, MODEL),
    Section("windows", 80, MODEL),  # from here on: in the time that the others leave
    Section("seven_b", 160, MODEL),
    Section("bundled", 60, TEXT),
    Section("layers", 60, MODEL),
)
PACKAGES = ("jax", "jaxlib", "libtpu")


def main(argv: list[str]) -> int:
    return check_command.run(Program("tpu", SECTIONS, PACKAGES))


if __name__ == "__main__":
    flags.adopt_module_key_flags(check_command)
    app.run(main, flags_parser=parse)
