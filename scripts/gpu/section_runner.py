"""Runs the sections of check_gpu.py in child processes, one at a time and each with a time limit. Standard
library only: it runs without jax and without a GPU.

All results are JSON lines of one file. A child (section_process.py) appends `{"event": "begin", "case": 0,
"name": …}` before each case, `"result"` with the same fields after it, and `"end"` after the last one. If
nothing can run on this machine, it appends `"unsupported"` with a `why`. Its parent adds how each section
ended.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = 10.0  # seconds: with less time left, a section is not started (importing JAX takes most of it)
_NOT_FIGURES = {"event", "section", "case", "name", "ok", "traceback"}
_PACKAGES = {  # that sections need, and what installs them
    "absl": "absl-py", "jax": "'jax[cuda13]'", "numpy": "numpy", "safetensors": "safetensors",
    "tokenizers": "tokenizers", "jinja2": "jinja2",
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """The work of one child."""

    name: str
    seconds: float  # time limit; less if the run has less time left


class Unsupported(Exception):
    """This program cannot run on this machine."""


def add_record(path: Path, **record: Any) -> None:
    """Appends a line to the file of results, and syncs it to disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if record["event"] in ("result", "section"):
        with contextlib.suppress(OSError):  # nobody reads standard output any more; the file still counts
            print(f"{record['section']}: {format_record(record)}", flush=True)


def is_failure(record: dict[str, Any]) -> bool:
    """Returns True if it is a wrong result, or a section that did not finish."""
    return record.get("ok") is False


def require_packages(program: str) -> None:
    """Exits with one line that names the packages to install if one is missing."""
    if absent := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        packages = " ".join(_PACKAGES[name] for name in absent)
        print(f"{program}: {', '.join(absent)} missing here: pip install {packages}", file=sys.stderr)
        sys.exit(2)


def run_sections(
    sections: Sequence[Section],
    command: Callable[[Section, int, float], list[str]],
    out: Path,
    minutes: float,
    env: dict[str, str] | None = None,
) -> None:
    """Runs the sections in order within a total time limit, and records how they ended. command: gives the
    child's command line for a section, its first case and the seconds left.

    Raises:
        Unsupported: a child reports that nothing can run on this machine.
    """
    end = time.monotonic() + 60 * minutes
    for section in sections:
        left = end - time.monotonic()
        if left < START:
            why = f"{max(left, 0):.0f} s were left"
            add_record(out, event="section", section=section.name, name="not run", why=why, ok=None)
        else:
            _run_section(section, command, out, min(section.seconds, left), env)


def _run_section(
    section: Section, command: Callable, out: Path, seconds: float, env: dict[str, str] | None
) -> None:
    """Runs a child. If it ends before its last case, another child continues with the next case."""
    end = time.monotonic() + seconds
    first = 0
    while True:
        before = len(read_events(out))
        left = end - time.monotonic()
        try:
            how, stderr = _run_child(command(section, first, left), left, env)
        except KeyboardInterrupt:
            add_record(out, event="section", section=section.name, name="interrupted", ok=False)
            raise
        events = read_events(out)[before:]
        last = events[-1] if events else {"event": "begin", "name": "before its first case"}
        if last["event"] == "unsupported":
            raise Unsupported(last["why"])
        if last["event"] == "end":
            how = "done"
            break
        if last["event"] == "begin":
            died = {"event": "result", "section": section.name, "error": how, "stderr": stderr, "ok": False}
            add_record(out, **last | died)
        if not events or end - time.monotonic() < START:
            break
        first = last["case"] + 1
    facts = {"seconds": round(seconds - (end - time.monotonic()), 1), "ok": None if how == "done" else False}
    add_record(out, event="section", section=section.name, name=how, **facts)


def _run_child(command: list[str], seconds: float, env: dict[str, str] | None) -> tuple[str, str]:
    """Runs a child with a time limit. Returns how it ended, and the end of its standard error."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=env, process_group=0, stdin=subprocess.DEVNULL, stderr=errors)
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills the processes that it started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # a driver may block its exit for longer
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
        text = errors.read().decode("utf-8", "replace")
    if code is None:
        return f"still running after {seconds:.0f} s: killed", text
    return f"ended with exit code {code} before its last case", text


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file. A last line that was cut off is ignored."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict)]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the results in a file, and how its sections ended.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no result.
    """
    records = [event for event in read_events(path) if event.get("event") in ("result", "section")]
    if not records:
        raise ValueError(f"{path} holds no results of this program")
    return records


def format_table(records: list[dict[str, Any]]) -> str:
    """Returns one line per result. The last lines list failures and cases that did not run."""
    lines = [
        f"[{r.get('section')}: {format_record(r)}]" if r["event"] == "section" else f"  {format_record(r)}"
        for r in records
    ]
    wrong = [f"{r.get('section')}: {r.get('name')}" for r in records if is_failure(r)]
    not_run = [r for r in records if r.get("name") == "not run" or "skipped" in r]
    lines += [f"{len(wrong)} failed", *(f"  {name}" for name in wrong)]
    lines += [f"{len(not_run)} not run", *(f"  {r['section']}: {format_record(r)}" for r in not_run)]
    return "\n".join(lines)


def format_record(record: dict[str, Any]) -> str:
    """Returns a record as one line."""
    figures = [f"{key} {_format_value(value)}" for key, value in record.items() if key not in _NOT_FIGURES]
    verdict = {True: "ok", False: "FAIL"}.get(record.get("ok"))
    return "  ".join(filter(None, (str(record.get("name")), *figures, verdict)))


def _format_value(value: Any) -> str:
    """Returns a value in one line. A long text is cut to its end, which has the message of an error."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"…{text[-300:]}"
