"""The command of check_gpu.py and check_tpu.py: flags, the time limit, the file of results, the table."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

from absl import app, flags
from launcher import exit_with_error, parse
from script_paths import ROOT, SCRIPTS

from gpu.section_runner import (
    Section,
    Unsupported,
    add_record,
    format_table,
    is_failure,
    read_records,
    run_sections,
)

MACHINE = Section("machine", 30)  # always runs: the device and its limits


# Their versions are recorded.
PACKAGES = "jax jaxlib libtpu jax-cuda13-plugin jax-cuda12-plugin nvidia-cudnn-cu13 nvidia-cudnn-cu12".split()
OUT = flags.DEFINE_string(
    "out",
    time.strftime(f"{Path(sys.argv[0]).stem}-%Y%m%d-%H%M%S.jsonl"),
    "New file for the results, one JSON line each.",
)
REPORT = flags.DEFINE_string("report", None, "Only print the table of such a file.")
MINUTES = flags.DEFINE_float("minutes", 9, "Time limit of the whole run, in minutes.", lower_bound=0)
ONLY = flags.DEFINE_list("sections", [], "Sections to run, in the order of importance; default: all.")
CACHE = flags.DEFINE_string("compilation_cache", None, "Directory of compiled programs; default: OUT.cache.")
TINY = flags.DEFINE_bool(
    "tiny", False, "Tiny shapes and emulated kernels on the CPU: tests this program, not the device."
)


def start(platform: str, sections: Sequence[Section]) -> None:
    """Parses the flags, runs the program and exits.

    Args:
        platform: the platform of the devices, as jax names it.
        sections: most important first.
    """
    flags.adopt_module_key_flags(sys.modules[__name__])
    app.run(lambda argv: run(platform, sections), flags_parser=parse)


def run(platform: str, sections: Sequence[Section]) -> int:
    """Runs the chosen sections, and returns the exit code."""
    if REPORT.value is not None:
        try:
            print(format_table(read_records(Path(REPORT.value))))
        except (OSError, ValueError) as error:
            exit_with_error(error)
        return 0
    out = Path(OUT.value).absolute()
    chosen = chosen_sections(sections)
    try:
        out.open("x").close()
    except OSError as error:
        exit_with_error(
            ValueError(f"--out: {error.strerror} {OUT.value}: name another file, or print it by --report")
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # to print the table before exiting
    interrupted = False
    try:
        add_record(out, event="result", section="run", name="run", **facts())
        command = partial(child_command, platform, out)
        run_sections((MACHINE, *chosen), command, out, MINUTES.value, environment(out))
    except Unsupported as error:
        out.unlink()
        exit_with_error(error)
    except KeyboardInterrupt:
        interrupted = True
    except OSError as error:  # for example a full disk; --report prints what was written
        exit_with_error(error)
    records = read_records(out)
    print(f"\n{OUT.value}\n{format_table(records)}", flush=True)
    return 130 if interrupted else int(any(map(is_failure, records)))


def chosen_sections(sections: Sequence[Section]) -> list[Section]:
    names = [section.name for section in sections]
    if unknown := {*ONLY.value} - {*names}:
        exit_with_error(ValueError(f"--sections knows {', '.join(names)}, got {unknown.pop()!r}"))
    wanted = {*ONLY.value} or {*names}
    factor = 4 if TINY.value else 1  # emulated kernels are slow
    return [
        dataclasses.replace(section, seconds=factor * section.seconds)
        for section in sections
        if section.name in wanted
    ]


def child_command(platform: str, out: Path, section: Section, first: int, seconds: float) -> list[str]:
    plan: dict = dict(section=section.name, first=first, seconds=seconds, tiny=TINY.value)
    plan |= dict(platform=platform, out=str(out))
    return [sys.executable, str(SCRIPTS / "gpu" / "section_process.py"), json.dumps(plan)]


def environment(out: Path) -> dict[str, str]:
    """Returns the environment of child processes: they import from the checkout, share compiled programs, and
    do not preallocate the GPU's memory.
    """
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(SCRIPTS), os.environ.get("PYTHONPATH")))),
        "JAX_COMPILATION_CACHE_DIR": str(Path(CACHE.value or f"{out}.cache").resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    }
    tiny = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return os.environ | settings | (tiny if TINY.value else {})


def facts() -> dict[str, str]:
    """Returns date, command, versions and commit of this run."""
    run = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "command": " ".join(sys.argv)}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            run[name] = metadata.version(name)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
        run["commit"] = done.stdout.strip()
    return run
