"""Checks and times kernels and engine on this machine's NVIDIA GPU, for a card that may be at hand only once,
for minutes.

    python scripts/check_gpu.py --out=gpu.jsonl           # most wanted first, for 9 minutes at most
    python scripts/check_gpu.py --sections=decode,tune    # some of it; tune: other tile sizes of the kernels
    python scripts/check_gpu.py --report=gpu.jsonl        # the table of an earlier run
    python scripts/check_gpu.py --tiny                    # tiny shapes, emulated kernels, on the CPU

Runs from a bare checkout. Each section is a process of its own with a time limit: a hang, an abort or a
broken CUDA context costs the case it happened in, at most its section. Results go to --out as they come, a
JSON line each; the table is printed from that file at the end. Exit code 1: something is wrong, or a section
did not come to its end (a figure below its target, or a baseline that fails, is no failure); 2: no GPU, or a
package is missing, in one line; 130: interrupted, the table is printed all the same.
"""

import sys

from check_gpu_runner import Records, Refused, Section, missing, read, run, table

if _lacking := missing(("absl", "jax", "numpy")):
    print(f"check_gpu: {_lacking}", file=sys.stderr)
    sys.exit(2)

import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from importlib import metadata  # noqa: E402
from pathlib import Path  # noqa: E402

from absl import app, flags  # noqa: E402
from one_line import parse, refuse  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
_MODEL = ("safetensors",)
_TEXT = (*_MODEL, "tokenizers", "jinja2")
MACHINE = Section("machine", 60)  # always: what it is, and what it can do
SECTIONS = (  # most wanted first
    Section("decode", 90),
    Section("prefill", 80),
    Section("head", 60),
    Section("half_b", 110, _MODEL),
    Section("seven_b", 130, _MODEL),
    Section("triton", 80),
    Section("odd", 80),
    Section("windows", 60, _MODEL),
    Section("quantized", 80, _MODEL),
    Section("bundled", 60, _TEXT),
    Section("engine", 100, _TEXT),
    Section("layers", 60, _MODEL),
    Section("tune", 90),
)
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)

OUT = flags.DEFINE_string(
    "out", time.strftime("check_gpu-%Y%m%d-%H%M%S.jsonl"), "Where results go, a JSON line each; a new file."
)
REPORT = flags.DEFINE_string("report", None, "Print the table of such a file, and run nothing.")
MINUTES = flags.DEFINE_float("minutes", 9, "After which nothing runs any more.", lower_bound=0)
ONLY = flags.DEFINE_list("sections", [], "What to run, in the order of importance; all but tune by default.")
CACHE = flags.DEFINE_string(
    "compilation_cache", None, "Directory of compiled programs; by default OUT with .cache behind it."
)
TUNE = flags.DEFINE_bool("tune", False, "Time other tile sizes of the Mosaic kernels too.")
SEED = flags.DEFINE_integer("seed", 0, "Of the random inputs and odd sizes.", lower_bound=0)
TINY = flags.DEFINE_bool(
    "tiny", False, "Tiny shapes and emulated kernels, on the CPU: checks this program, not the GPU."
)


def main(argv: list[str]) -> int:
    if REPORT.value is not None:
        try:
            print(table(read(Path(REPORT.value))))
        except (OSError, ValueError) as error:
            refuse(error)
        return 0
    out = Path(OUT.value)
    sections = chosen()
    try:
        records = Records(out)
    except OSError as error:
        refuse(ValueError(f"--out: {error.strerror} {out}: name another file, or read it by --report"))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # the table is printed all the same
    interrupted = False
    try:
        records.add(event="result", section="run", name="run", **facts(sections))
        run((MACHINE, *sections), command, records, MINUTES.value, environment(out))
    except Refused as refused:
        out.unlink()
        refuse(refused)
    except KeyboardInterrupt:
        interrupted = True
    except OSError as error:  # a full disk, say; --report shows what the file holds
        refuse(error)
    print(f"\n{out}\n{table(read(out))}", flush=True)
    return 130 if interrupted else int(bool(records.failed))


def chosen() -> list[Section]:
    names = {section.name for section in SECTIONS}
    if unknown := set(ONLY.value) - names:
        refuse(ValueError(f"--sections knows {', '.join(s.name for s in SECTIONS)}, got {unknown.pop()!r}"))
    wanted = (set(ONLY.value) or names - {"tune"}) | ({"tune"} if TUNE.value else set())
    slower = 4 if TINY.value else 1
    return [
        dataclasses.replace(section, seconds=slower * section.seconds)
        for section in SECTIONS
        if section.name in wanted
    ]


def command(section: Section, first: int, seconds: float) -> list[str]:
    plan = {
        "section": section.name,
        "first": first,
        "seconds": seconds,
        "tiny": TINY.value,
        "seed": SEED.value,
    }
    return [sys.executable, str(ROOT / "scripts" / "check_gpu_child.py"), json.dumps(plan)]


def environment(out: Path) -> dict[str, str]:
    """The children find the checkout, share compiled programs, and leave the card's memory to each other."""
    cache = Path(CACHE.value or f"{out}.cache").resolve()
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    }
    tiny = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return os.environ | settings | (tiny if TINY.value else {})


def facts(sections: list[Section]) -> dict[str, str]:
    """What a reader of the file must know, and what needs no GPU."""
    found = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "command": " ".join(sys.argv)}
    found |= {"python": sys.version.split()[0], "minutes": MINUTES.value, "seed": SEED.value}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if lacking := missing(sorted({name for section in sections for name in section.needs})):
        found["missing"] = lacking
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        found["commit"] = subprocess.check_output(
            ask, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    return found


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
