"""Runs the sections of check_gpu.py in child processes, one at a time and each with a time limit; formats the
table of their results. Standard library only: it runs without jax and without a GPU.

All results are JSON lines of one file, to which a child (section_process.py) appends `{"event": "begin",
"case": 0, "name": …}` before each case, `"result"` with the same fields after it, `"end"` after the last one;
or `"unsupported"` with a `why` if nothing can run on this machine. Its parent adds how each section ended.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = 10.0  # seconds: with less time left, a section is not started (importing JAX takes most of it)
LEAVING = 70  # exit code of a child that can no longer use the device: the next case needs another
DONE = "done"
_NOT_FIGURES = {"event", "section", "case", "name", "ok", "optional", "shape", "by", "traceback"}
_PIP = {"absl": "absl-py", "jax": "'jax[cuda13]'"}


@dataclass(frozen=True)
class Section:
    """The work of one child."""

    name: str
    seconds: float  # time limit; less if the run has less time left
    needs: tuple[str, ...] = ()  # required modules, besides JAX


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
    """Whether it is a wrong result, or a section that did not finish."""
    return record.get("ok") is False


def missing_packages(modules: Iterable[str]) -> str | None:
    """A message that names the missing modules and how to install them; None if all are installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    packages = " ".join(_PIP.get(name, name) for name in absent)
    return f"{', '.join(absent)} missing here: pip install {packages}" if absent else None


def require_packages(program: str) -> None:
    """Exits with one line where what each section needs is not installed."""
    if missing := missing_packages(("absl", "jax", "numpy")):
        print(f"{program}: {missing}", file=sys.stderr)
        sys.exit(2)


def run_sections(
    sections: Sequence[Section],
    command: Callable[[Section, int, float], list[str]],
    out: Path,
    minutes: float,
    env: dict[str, str] | None = None,
) -> None:
    """Runs the sections in order within a total time limit, and records how they ended. command: gives the
    child's command line for a section, its first case and the seconds left. Raises Unsupported where a child
    reports that nothing can run on this machine.
    """
    end = time.monotonic() + 60 * minutes
    for section in sections:
        left = end - time.monotonic()
        why = missing_packages(section.needs) or (f"{max(left, 0):.0f} s were left" if left < START else None)
        if why:
            add_record(out, event="section", section=section.name, name="not run", why=why, ok=None)
        else:
            _run_section(section, command, out, min(section.seconds, left), env)


def _run_section(section, command, out: Path, seconds: float, env) -> None:
    """Runs a child. If it dies in a case, another child continues with the next case."""
    end = time.monotonic() + seconds
    first = 0
    while True:
        before = len(_read_events(out))
        left = end - time.monotonic()
        try:
            how, code, stderr = _run_child(command(section, first, left), left, env)
        except KeyboardInterrupt:
            add_record(out, event="section", section=section.name, name="interrupted", ok=False)
            raise
        events = _read_events(out)[before:]
        last = events[-1] if events else {}
        if last.get("event") == "unsupported":
            raise Unsupported(last["why"])
        left = end - time.monotonic()
        if last.get("event") == "end":
            how = DONE
            break
        if code != LEAVING:
            case = last if last.get("event") == "begin" else {}
            case = case or {"name": "between cases" if events else "before its first case"}
            died = {"error": how, "stderr": stderr, "ok": None if case.get("optional") else False}
            add_record(out, **case | died | {"event": "result", "section": section.name})
        if not events or left < START:
            break
        first = last["case"] + 1
    facts = {"seconds": round(seconds - left, 1), "ok": None if how == DONE else False}
    add_record(out, event="section", section=section.name, name=how, **facts)


def _run_child(command: list[str], seconds: float, env: dict[str, str] | None) -> tuple[str, int | None, str]:
    """Runs a child with a time limit: how it ended, its exit code, and the end of its standard error."""
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
        return f"still running after {seconds:.0f} s: killed", code, text
    if code < 0:
        return f"killed by signal {-code}", code, text
    return f"ended with exit code {code} before its last case", code, text


# --- the table ----------------------------------------------------------------------------------------------


def _read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of a file. A last line that was cut off is ignored."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict)]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The results in a file, and how its sections ended.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no result.
    """
    records = [event for event in _read_events(path) if event.get("event") in ("result", "section")]
    if not records:
        raise ValueError(f"{path} holds no results of this program")
    return records


def format_table(records: list[dict[str, Any]]) -> str:
    """One line per result; timings of one shape share a line. The last lines list failures and cases that did
    not run.
    """
    lines = []
    shapes = {}
    for record in records:
        if record["event"] == "section":
            lines += [f"[{record.get('section')}: {format_record(record)}]", ""]
        elif "shape" in record:
            if (shape := (record["section"], record["shape"])) not in shapes:
                shapes[shape] = len(lines)
                lines.append(f"  {record['shape']}: {_timing(record)}")
            else:
                lines[shapes[shape]] += f" | {_timing(record)}"
        else:
            lines.append(f"  {format_record(record)}")
    wrong = [f"{record.get('section')}: {record.get('name')}" for record in records if is_failure(record)]
    not_run = [r for r in records if r.get("name") == "not run" or "skipped" in r]
    lines += [f"{len(wrong)} failed", *(f"  {name}" for name in wrong)]
    lines += [f"{len(not_run)} not run", *(f"  {r['section']}: {format_record(r)}" for r in not_run)]
    return "\n".join(lines)


def format_record(record: dict[str, Any]) -> str:
    """A record as one line."""
    figures = [f"{key} {_format_value(value)}" for key, value in record.items() if key not in _NOT_FIGURES]
    verdict = {True: "ok", False: "FAIL"}.get(record.get("ok"))
    return "  ".join(filter(None, (str(record.get("name")), *figures, verdict)))


def _timing(record: dict[str, Any]) -> str:
    label = str(record.get("by"))
    failure = " FAIL" if is_failure(record) else ""
    if not isinstance(ms := record.get("ms"), float):
        why = record.get("skipped") or record.get("error")
        return f"{label} – ({_format_value(why)[:60]})" + failure
    share = record.get("of_limit")
    off = record.get("off")
    text = f"{label} {ms:.4g} ms" + (f" {share:.0%}" if isinstance(share, float) else "")
    return text + (f" off {off:.2g}" if isinstance(off, float) and off > 0.01 else "") + failure


def _format_value(value: Any) -> str:
    """The value in one line. A long text is cut to its end, where an error has its message."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"…{text[-300:]}"
