"""What check_gpu.py stands on: child processes one at a time, each with a time limit; a file that keeps every
record as it comes; the table of such a file.

Standard library alone, so that it runs, and can be tested, without JAX and without a GPU. A child prints a
JSON object per line on standard output: `{"event": "begin", "case": 0, "name": …}` before each case,
`"result"` with the same after it, `"leaving"` where the next case had better have a new process, `"end"` when
it is through, `"refuse"` with a `why` where nothing here can run at all. What else it prints there is counted
and shown, never obeyed.
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

START = 10.0  # seconds: a section that has fewer left would hardly get beyond importing JAX
DONE = "done"
_LINE = 2**16  # bytes: a longer line is garbage
_OWN = (
    "event",
    "section",
    "case",
    "name",
    "ok",
    "optional",
    "shape",
    "by",
    "traceback",
)  # not figures
_PIP = {"absl": "absl-py", "jax": "'jax[cuda13]'"}


@dataclass(frozen=True)
class Section:
    """One child's work."""

    name: str
    seconds: float  # at most; less where less is left
    needs: tuple[str, ...] = ()  # modules, besides JAX


class Refused(Exception):
    """A child says that this program cannot run on this machine."""


class Records:
    """A file of JSON lines, each on the disk before the next is made."""

    def __init__(self, path: Path):
        self._file = path.open("x", encoding="utf-8")
        self.kept = []

    def add(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.kept.append(record)
        with contextlib.suppress(OSError):  # whoever read this has gone; the file is what counts
            print(f"{record.get('section', '')}: {words(record)}", flush=True)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Wrong results, and sections that did not come to their end."""
        return [record for record in self.kept if failed(record)]


def failed(record: dict[str, Any]) -> bool:
    return record.get("ok") is False


def missing(modules: Iterable[str]) -> str | None:
    """What to install for these modules, or None where all are there."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    packages = " ".join(_PIP.get(name, name) for name in absent)
    return f"{', '.join(absent)} missing here: pip install {packages}" if absent else None


def run(
    sections: Sequence[Section],
    command: Callable[[Section, int, float], list[str]],
    records: Records,
    minutes: float,
    env: dict[str, str] | None = None,
) -> None:
    """Runs the sections in order, for so many minutes together; records what each found and how it ended.

    Args:
        sections: most wanted first.
        command: of a section, the first case to run and the seconds left: the child's command line.
        records: where results go.
        minutes: after which nothing runs any more.
        env: the children's environment; None: this process's.

    Raises:
        Refused: a child says that nothing can run here.
    """
    end = time.monotonic() + 60 * minutes
    for section in sections:
        left = end - time.monotonic()
        why = missing(section.needs) or (f"{max(left, 0):.0f} s were left" if left < START else None)
        if why:
            records.add(event="section", section=section.name, name="not run", why=why, ok=None)
        else:
            _section(section, command, records, min(section.seconds, left), env)


def _section(section, command, records, seconds, env) -> None:
    """A child; and where it dies in one of its cases, another from the next case on."""
    start = time.monotonic()
    first = 0
    garbage = 0
    while True:
        left = seconds - (time.monotonic() - start)
        child = _Child(section.name, records)
        try:
            how = child.follow(command(section, first, left), left, env)
        except KeyboardInterrupt:
            records.add(event="section", section=section.name, name="interrupted", ok=False)
            raise
        garbage += child.garbage
        if how != DONE and not child.leaving:
            child.blame(how)
        left = seconds - (time.monotonic() - start)
        if how == DONE or child.reached is None or left < START:
            break
        first = child.reached + 1
    facts = {"seconds": round(seconds - left, 1)} | ({"garbage_lines": garbage} if garbage else {})
    records.add(event="section", section=section.name, name=how, **facts, ok=None if how == DONE else False)


@dataclass
class _Child:
    """A process group, and what is known of it so far."""

    section: str
    records: Records
    begun: dict[str, Any] | None = None  # the case it is in
    reached: int | None = None  # the last case it began
    ended: bool = False
    leaving: bool = False  # of its own will, after an error that would spoil the cases to come
    garbage: int = 0
    stderr: deque = field(default_factory=lambda: deque(maxlen=30))

    def follow(self, command: list[str], seconds: float, env: dict[str, str] | None) -> str:
        """Runs it for at most so many seconds; returns how it ended, `DONE` if it said so itself."""
        end = time.monotonic() + seconds
        lines = queue.Queue(1000)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=env, process_group=0, **pipes)
        readers = [
            threading.Thread(target=_read, args=(pipe, put), daemon=True)
            for pipe, put in ((process.stdout, lines.put), (process.stderr, self.stderr.append))
        ]
        for reader in readers:
            reader.start()
        try:
            code = self._listen(process, lines, end)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # a driver may hold it for longer
            readers[1].join(1)
        if self.ended:
            return DONE
        if code is None:
            return f"still running after {seconds:.0f} s: killed"
        return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}, not through"

    def _listen(self, process: subprocess.Popen, lines: queue.Queue, end: float) -> int | None:
        """Takes its lines until it is through, gone, or out of time; returns its exit code if it is gone."""
        while not self.ended and (left := end - time.monotonic()) > 0:
            try:
                line = lines.get(timeout=min(left, 0.2))
            except queue.Empty:  # if it is gone, something that it started holds the pipe
                line = b"" if process.poll() is None else None
            if line is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(max(end - time.monotonic(), 0))
                return None
            if line:
                self._take(line)
        return None

    def _take(self, line: bytes) -> None:
        message = _message(line)
        event = message.pop("event", None)
        if event == "refuse":
            raise Refused(message.get("why"))
        if event == "begin":
            self.begun = message
            self.reached = message["case"]
        elif event == "result":
            self.begun = None
            self.records.add(event="result", section=self.section, **message)
        elif event in ("leaving", "end"):
            self.leaving = event == "leaving"
            self.ended = event == "end"
        else:
            self.garbage += 1
            if self.garbage == 1:
                shown = line[:200].decode("utf-8", "replace")
                self.records.add(event="garbage", section=self.section, name="garbage", text=shown)

    def blame(self, how: str) -> None:
        """Records its death on the case it was in, with the end of what it wrote to standard error."""
        case = self.begun or {"name": "before its first case" if self.reached is None else "between cases"}
        stderr = b"".join(filter(None, tuple(self.stderr))).decode("utf-8", "replace")[-2000:]
        died = {"error": how, "stderr": stderr, "ok": None if case.get("optional") else False}
        self.records.add(event="result", section=self.section, **case | died)


def _read(pipe: IO[bytes], put: Callable[[bytes | None], None]) -> None:
    """Line by line, then None."""
    for line in iter(partial(pipe.readline, _LINE), b""):
        put(line)
    put(None)


def _message(line: bytes) -> dict[str, Any]:
    """A line of a child as what it says, or {} if that is nothing that it should say."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(message, dict) or "section" in message:
        return {}
    event = message.get("event")
    if event in ("begin", "result"):
        known = isinstance(message.get("case"), int) and isinstance(message.get("name"), str)
    else:
        known = event in ("leaving", "end", "refuse")
    return message if known else {}


# --- the table ----------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, also of one whose last line was cut off.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no record.
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


def table(records: list[dict[str, Any]]) -> str:
    """A line per result; timings of one shape share a line. Last, what failed and what was not run."""
    lines = []
    shapes = {}
    for record in records:
        if record["event"] == "section":
            lines += [f"[{record.get('section')}: {words(record)}]", ""]
        elif "shape" in record:
            if (shape := (record["section"], record["shape"])) not in shapes:
                shapes[shape] = len(lines)
                lines.append(f"  {record['shape']}: {_timing(record)}")
            else:
                lines[shapes[shape]] += f" | {_timing(record)}"
        else:
            lines.append(f"  {words(record)}")
    wrong = [f"{record.get('section')}: {record.get('name')}" for record in records if failed(record)]
    left = [r for r in records if r.get("name") == "not run" or "skipped" in r]
    lines += [f"{len(wrong)} failed", *(f"  {name}" for name in wrong)]
    lines += [f"{len(left)} not run", *(f"  {r['section']}: {words(r)}" for r in left)]
    return "\n".join(lines)


def words(record: dict[str, Any]) -> str:
    """A record as a line."""
    figures = [f"{key} {_short(value)}" for key, value in record.items() if key not in _OWN]
    verdict = {True: "ok", False: "FAIL"}.get(record.get("ok"))
    return "  ".join(filter(None, (str(record.get("name")), *figures, verdict)))


def _timing(record: dict[str, Any]) -> str:
    label = str(record.get("by"))
    if not isinstance(ms := record.get("ms"), float):
        why = record.get("skipped") or record.get("error") or record.get("not_served")
        return f"{label} – ({_short(why)[:60]})" + " FAIL" * failed(record)
    share = record.get("of_limit")
    off = record.get("off")
    shown = f"{label} {ms:.4g} ms" + (f" {share:.0%}" if isinstance(share, float) else "")
    return (
        shown
        + (f" off {off:.2g}" if isinstance(off, float) and off > 0.01 else "")
        + " FAIL" * failed(record)
    )


def _short(value: Any) -> str:
    """Of a longer text the end, where an error says what it is."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"…{text[-300:]}"
