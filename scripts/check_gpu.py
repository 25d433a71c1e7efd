"""Checks and times the kernels and the engine on this machine's NVIDIA GPU. Made for a GPU that may be
available only once, for minutes.

    python scripts/check_gpu.py --out=gpu.jsonl           # most important first, for at most 9 minutes
    python scripts/check_gpu.py --sections=decode,tune    # some sections; tune: other tile sizes
    python scripts/check_gpu.py --report=gpu.jsonl        # print the table of an earlier run
    python scripts/check_gpu.py --tiny                    # tiny shapes, emulated kernels, on the CPU

Runs from a checkout without installation. Each section runs in its own process with a time limit: a hang, an
abort or a broken CUDA context loses the case in which it happens, at most its section. Each result is written
to --out immediately as a JSON line; the table is printed from that file at the end. Exit code 1: a result is
wrong, or a section did not finish (a speed below its target, or a baseline that fails, is no failure); 2: no
GPU or a missing package, reported in one line; 130: interrupted, the table is printed nevertheless.
"""

import sys

from script_paths import HELPERS, ROOT, SCRIPTS

# isort: split
from section_runner import (
    Records,
    Section,
    Unsupported,
    format_table,
    missing_packages,
    read_records,
    run_sections,
)

if _missing := missing_packages(("absl", "jax", "numpy")):
    print(f"check_gpu: {_missing}", file=sys.stderr)
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
from launcher import exit_with_error, parse  # noqa: E402

_MODEL = ("safetensors",)
_TEXT = (*_MODEL, "tokenizers", "jinja2")
MACHINE = Section("machine", 30)  # always runs: the device and its limits
SECTIONS = (  # most important first; the limits up to `verified` add up to 9 minutes
    Section("decode", 70),
    Section("layouts", 50),
    Section("prefill", 60),
    Section("head", 40),
    Section("half_b", 80, _MODEL),
    Section("engine", 70, _TEXT),
    Section("quantized", 60, _MODEL),
    Section("sampled", 40, _MODEL),
    Section("verified", 40, _MODEL),
    Section("windows", 60, _MODEL),  # from here on: in the time that the others leave
    Section("seven_b", 130, _MODEL),
    Section("triton", 80),
    Section("odd", 80),
    Section("bundled", 60, _TEXT),
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
    "out", time.strftime("check_gpu-%Y%m%d-%H%M%S.jsonl"), "New file for the results, one JSON line each."
)
REPORT = flags.DEFINE_string("report", None, "Only print the table of such a file.")
MINUTES = flags.DEFINE_float("minutes", 9, "Time limit of the whole run, in minutes.", lower_bound=0)
ONLY = flags.DEFINE_list(
    "sections", [], "Sections to run, in the order of importance; default: all but tune."
)
CACHE = flags.DEFINE_string("compilation_cache", None, "Directory of compiled programs; default: OUT.cache.")
TUNE = flags.DEFINE_bool("tune", False, "Also time other tile sizes of the Mosaic kernels.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the random inputs and sizes.", lower_bound=0)
TINY = flags.DEFINE_bool(
    "tiny", False, "Tiny shapes and emulated kernels on the CPU: tests this program, not the GPU."
)


def main(argv: list[str]) -> int:
    if REPORT.value is not None:
        try:
            print(format_table(read_records(Path(REPORT.value))))
        except (OSError, ValueError) as error:
            exit_with_error(error)
        return 0
    out = Path(OUT.value)
    sections = chosen_sections()
    try:
        records = Records(out)
    except OSError as error:
        exit_with_error(
            ValueError(f"--out: {error.strerror} {out}: name another file, or print it by --report")
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # to print the table before exiting
    interrupted = False
    try:
        records.add(event="result", section="run", name="run", **facts(sections))
        run_sections((MACHINE, *sections), command, records, MINUTES.value, environment(out))
    except Unsupported as error:
        out.unlink()
        exit_with_error(error)
    except KeyboardInterrupt:
        interrupted = True
    except OSError as error:  # for example a full disk; --report prints what was written
        exit_with_error(error)
    print(f"\n{out}\n{format_table(read_records(out))}", flush=True)
    return 130 if interrupted else int(bool(records.failed))


def chosen_sections() -> list[Section]:
    names = {section.name for section in SECTIONS}
    if unknown := set(ONLY.value) - names:
        exit_with_error(
            ValueError(f"--sections knows {', '.join(s.name for s in SECTIONS)}, got {unknown.pop()!r}")
        )
    wanted = (set(ONLY.value) or names - {"tune"}) | ({"tune"} if TUNE.value else set())
    factor = 4 if TINY.value else 1  # emulated kernels are slow
    return [
        dataclasses.replace(section, seconds=factor * section.seconds)
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
    return [sys.executable, str(SCRIPTS / "gpu" / "section_process.py"), json.dumps(plan)]


def environment(out: Path) -> dict[str, str]:
    """The environment of child processes: they import from the checkout, share compiled programs, and do not
    preallocate the GPU's memory.
    """
    cache = Path(CACHE.value or f"{out}.cache").resolve()
    folders = (ROOT, *(SCRIPTS / name for name in HELPERS))
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH")))),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    }
    tiny = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return os.environ | settings | (tiny if TINY.value else {})


def facts(sections: list[Section]) -> dict[str, str]:
    """Date, command, versions and commit of this run."""
    run = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "command": " ".join(sys.argv)}
    run |= {"python": sys.version.split()[0], "minutes": MINUTES.value, "seed": SEED.value}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            run[name] = metadata.version(name)
    if packages := missing_packages(sorted({name for section in sections for name in section.needs})):
        run["missing"] = packages
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        run["commit"] = subprocess.check_output(
            describe, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    return run


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
