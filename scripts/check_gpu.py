"""Checks and times the kernels and the engine on this machine's NVIDIA GPU. Made for a GPU that may be
available only once, for minutes.

    python scripts/check_gpu.py --out=gpu.jsonl           # most important first, for at most 9 minutes
    python scripts/check_gpu.py --sections=decode,head    # some sections
    python scripts/check_gpu.py --report=gpu.jsonl        # print the table of an earlier run
    python scripts/check_gpu.py --tiny                    # tiny shapes, emulated kernels, on the CPU

Runs from a checkout without installation. Each section runs in its own process with a time limit: a hang, an
abort or a broken CUDA context loses the case in which it happens, at most its section. Each result is written
to --out immediately as a JSON line. The table is printed from that file at the end. Exit code 1: a result is
wrong, or a section did not finish (a speed below its target is no failure). 2: there is no GPU or a package
is missing, reported in one line. 130: the program was interrupted, and the table is printed nevertheless.
"""

import script_paths  # noqa: F401

# isort: split
from gpu.section_runner import Section, require_packages

require_packages("check_gpu")

from gpu.check_command import start  # noqa: E402

SECTIONS = (  # most important first; the limits up to `decoding` add up to 9 minutes
    Section("decode", 60),
    Section("references", 90),
    Section("prefill", 50),
    Section("head", 30),
    Section("logits", 60),
    Section("bundled", 40),
    Section("half_b", 80),
    Section("engine", 60),
    Section("decoding", 40),
    Section("seven_b", 130),  # from here on: in the time that the others leave
    Section("triton", 80),
)

if __name__ == "__main__":
    start("cuda", SECTIONS)
