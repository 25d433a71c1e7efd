"""Runs the sections of check_gpu.py in child processes, one at a time and each with a time limit; writes
every record to a file at once; formats the table of such a file.

Uses only the standard library, so that it runs and can be tested without JAX and without a GPU. A child
prints one JSON object per line on standard output: `{"event": "begin", "case": 0, "name": …}` before each
case, `"result"` with the same fields after it, `"leaving"` if the next case needs a new process, `"end"`
after the last case, `"unsupported"` with a `why` if nothing can run on this machine. Any other output is
counted and reported as garbage.
"""

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

START = 10.0  # seconds: with less time left, a section is not started (importing JAX takes most of it)
DONE = "done"
_LINE = 2**16  # bytes: a longer line is garbage
_NOT_FIGURES = (
    "event",
    "section",
    "case",
    "name",
    "ok",
    "optional",
    "shape",
    "by",
    "traceback",
)  # not printed as measurements
_PIP = {"absl": "absl-py", "jax": "'jax[cuda13]'"}


@dataclass(frozen=True)
class Section:
    """The work of one child."""

    name: str
    seconds: float  # time limit; less if the run has less time left
    needs: tuple[str, ...] = ()  # required modules, besides JAX


class Unsupported(Exception):
    """This program cannot run on this machine."""


class Records:
    """A file of JSON lines. Each line is synced to disk before the next one is written."""

    def __init__(self, path: Path):
        self._file = path.open("x", encoding="utf-8")
        self.added = []

    def add(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.added.append(record)
        with contextlib.suppress(OSError):  # nobody reads standard output any more; the file still counts
            print(f"{record.get('section', '')}: {format_record(record)}", flush=True)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Wrong results, and sections that did not finish."""
        return [record for record in self.added if is_failure(record)]


def is_failure(record: dict[str, Any]) -> bool:
    return record.get("ok") is False


def missing_packages(modules: Iterable[str]) -> str | None:
    """A message that names the missing modules and how to install them; None if all are installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    packages = " ".join(_PIP.get(name, name) for name in absent)
    return f"{', '.join(absent)} missing here: pip install {packages}" if absent else None


def run_sections(
    sections: Sequence[Section],
    command: Callable[[Section, int, float], list[str]],
    records: Records,
    minutes: float,
    env: dict[str, str] | None = None,
) -> None:
    """Runs the sections in order within a total time limit, and records their results and how they ended.

    Args:
        sections: most important first.
        command: gives the child's command line for a section, its first case and the seconds left.
        records: file of the results.
        minutes: total time limit.
        env: environment of the children; None: that of this process.

    Raises:
        Unsupported: a child reports that nothing can run on this machine.
    """
    end = time.monotonic() + 60 * minutes
    for section in sections:
        left = end - time.monotonic()
        why = missing_packages(section.needs) or (f"{max(left, 0):.0f} s were left" if left < START else None)
        if why:
            records.add(event="section", section=section.name, name="not run", why=why, ok=None)
        else:
            _run_section(section, command, records, min(section.seconds, left), env)


def _run_section(section, command, records, seconds, env) -> None:
    """Runs a child. If it dies in a case, another child continues with the next case."""
    start = time.monotonic()
    first = 0
    garbage = 0
    while True:
        left = seconds - (time.monotonic() - start)
        child = _Child(section.name, records)
        try:
            how = child.run(command(section, first, left), left, env)
        except KeyboardInterrupt:
            records.add(event="section", section=section.name, name="interrupted", ok=False)
            raise
        garbage += child.garbage
        if how != DONE and not child.leaving:
            child.record_death(how)
        left = seconds - (time.monotonic() - start)
        if how == DONE or child.last_case is None or left < START:
            break
        first = child.last_case + 1
    facts = {"seconds": round(seconds - left, 1)} | ({"garbage_lines": garbage} if garbage else {})
    records.add(event="section", section=section.name, name=how, **facts, ok=None if how == DONE else False)


@dataclass
class _Child:
    """A child process with its process group, and its progress."""

    section: str
    records: Records
    running: dict[str, Any] | None = None  # the case that is running
    last_case: int | None = None  # number of the last case that began
    ended: bool = False
    leaving: bool = False  # it exits because later cases would fail after an error
    garbage: int = 0
    stderr: deque = field(default_factory=lambda: deque(maxlen=30))

    def run(self, command: list[str], seconds: float, env: dict[str, str] | None) -> str:
        """Runs it with a time limit. Returns how it ended: `DONE` if it reported its end."""
        end = time.monotonic() + seconds
        lines = queue.Queue(1000)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=env, process_group=0, **pipes)
        readers = [
            threading.Thread(target=_read_lines, args=(pipe, put), daemon=True)
            for pipe, put in ((process.stdout, lines.put), (process.stderr, self.stderr.append))
        ]
        for reader in readers:
            reader.start()
        try:
            code = self._listen(process, lines, end)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills the processes that it started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # a driver may block its exit for longer
            readers[1].join(1)
        if self.ended:
            return DONE
        if code is None:
            return f"still running after {seconds:.0f} s: killed"
        return (
            f"killed by signal {-code}" if code < 0 else f"ended with exit code {code} before its last case"
        )

    def _listen(self, process: subprocess.Popen, lines: queue.Queue, end: float) -> int | None:
        """Handles its lines until it reports its end, exits or reaches the time limit. Returns its exit code
        if it exited.
        """
        while not self.ended and (left := end - time.monotonic()) > 0:
            try:
                line = lines.get(timeout=min(left, 0.2))
            except queue.Empty:  # if it exited, a process that it started keeps the pipe open
                line = b"" if process.poll() is None else None
            if line is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(max(end - time.monotonic(), 0))
                return None
            if line:
                self._handle(line)
        return None

    def _handle(self, line: bytes) -> None:
        message = _parse(line)
        event = message.pop("event", None)
        if event == "unsupported":
            raise Unsupported(message.get("why"))
        if event == "begin":
            self.running = message
            self.last_case = message["case"]
        elif event == "result":
            self.running = None
            self.records.add(event="result", section=self.section, **message)
        elif event in ("leaving", "end"):
            self.leaving = event == "leaving"
            self.ended = event == "end"
        else:
            self.garbage += 1
            if self.garbage == 1:
                text = line[:200].decode("utf-8", "replace")
                self.records.add(event="garbage", section=self.section, name="garbage", text=text)

    def record_death(self, how: str) -> None:
        """Records its death as the result of the running case, with the end of its standard error."""
        case = self.running or {
            "name": "before its first case" if self.last_case is None else "between cases"
        }
        stderr = b"".join(filter(None, tuple(self.stderr))).decode("utf-8", "replace")[-2000:]
        died = {"error": how, "stderr": stderr, "ok": None if case.get("optional") else False}
        self.records.add(event="result", section=self.section, **case | died)


def _read_lines(pipe: IO[bytes], put: Callable[[bytes | None], None]) -> None:
    """Passes on each line, then None."""
    for line in iter(partial(pipe.readline, _LINE), b""):
        put(line)
    put(None)


def _parse(line: bytes) -> dict[str, Any]:
    """The message on a line of a child, or {} if it is no valid message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(message, dict) or "section" in message:
        return {}
    event = message.get("event")
    if event in ("begin", "result"):
        valid = isinstance(message.get("case"), int) and isinstance(message.get("name"), str)
    else:
        valid = event in ("leaving", "end", "unsupported")
    return message if valid else {}


# --- the table ----------------------------------------------------------------------------------------------


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file. A last line that was cut off is ignored.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no record.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    records = [record for record in records if isinstance(record, dict) and "event" in record]
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
        why = record.get("skipped") or record.get("error") or record.get("not_served")
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
