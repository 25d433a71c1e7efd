"""Checks and times the kernels and the engine on this machine's TPU, as check_gpu.py does on a GPU, with its
flags and exit codes.

    python scripts/check_tpu.py --out=tpu.jsonl           # most important first, for at most 9 minutes
    python scripts/check_tpu.py --sections=half_b,engine  # some sections
    python scripts/check_tpu.py --tiny                    # tiny shapes, emulated kernels, on the CPU
"""

import script_paths  # noqa: F401

# isort: split
from gpu.section_runner import Section, require_packages

require_packages("check_tpu")

from gpu.check_command import start  # noqa: E402

SECTIONS = (  # most important first; the limits up to `decoding` add up to 9 minutes
    Section("decode", 50),
    Section("references", 90),
    Section("prefill", 50),
    Section("logits", 60),
    Section("bundled", 50),
    Section("half_b", 90),
    Section("engine", 60),
    Section("decoding", 60),
    Section("seven_b", 160),  # from here on: in the time that the others leave
)

if __name__ == "__main__":
    start("tpu", SECTIONS)
