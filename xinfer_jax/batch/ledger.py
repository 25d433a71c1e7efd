"""The output, and beside it the record of which lines are finished: what a killed run is resumed from."""

import fcntl
import json
import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, shown
from .lines import opened, read_lines

# A finished line: its number, 64 bits of its sha256, and where the output ends behind its answer.
_RECORD = np.dtype([("number", "<u8"), ("digest", "<u8"), ("end", "<u8")])


def progress_file(output: str | Path) -> Path:
    """Of an output."""
    return Path(f"{output}.progress")


def shard_file(output: str | Path, i: int, n: int) -> Path:
    """The output of shard i of n."""
    return Path(f"{output}.{i}-of-{n}")


class Ledger:
    """An output that grows by whole lines. A record is written once its line is on the disk, so a line
    without one is cut off at the next start, whatever became of it.

    Attributes:
        finished: records of earlier runs, by number.
    """

    def __init__(self, output: str | Path, settings: dict[str, Any]):
        """Opens both files for this process alone.

        Args:
            output: the file.
            settings: all that answers depend on, as JSON has it; an earlier run's must be the same.

        Raises:
            InputError: another process writes there, or what is there is no earlier part of this run.
        """
        self._path, self._progress, self._pending = Path(output), progress_file(output), list[Any]()
        with ExitStack() as held:
            self._file, self._records = _locked(self._path, held), _locked(self._progress, held)
            size = os.fstat(self._file).st_size
            with open(self._records, "rb", closefd=False) as file:
                content = file.read()
            if size or b"\n" in content:
                earlier, records, begin = _recorded(content, self._progress, size)
            if size:
                _check_same(earlier, settings, self._path)
            else:  # nothing is finished: whatever was meant there before
                content, records = json.dumps(settings, sort_keys=True).encode() + b"\n", np.zeros(0, _RECORD)
                begin = len(content)
                os.ftruncate(self._records, 0)
                _write(self._records, content, self._progress)
            self._end = int(records["end"][-1]) if len(records) else 0
            os.ftruncate(self._records, begin + records.nbytes)
            os.ftruncate(self._file, self._end)
            self.finished, self._held = np.sort(records, order="number"), held.pop_all()

    def add(self, number: int, digest: int, line: bytes) -> None:
        """Appends a line.

        Raises:
            InputError: it cannot be written; what stood there before does.
        """
        _write(self._file, line, self._path)
        self._end += len(line)
        self._pending.append((number, digest, self._end))

    def settle(self) -> None:
        """Makes what was added so far outlast anything.

        Raises:
            InputError: as `add`.
        """
        pending, self._pending = self._pending, []  # what cannot be made safe is answered once more
        if pending:
            _write(self._file, b"", self._path, sync=True)
            _write(self._records, np.array(pending, _RECORD).tobytes(), self._progress, sync=True)

    def close(self) -> None:
        """Settles, and lets others have the files."""
        with self._held:
            self.settle()


def merge_shards(input: str | Path, output: str | Path, n: int) -> int:
    """Joins the outputs of n shards in the order of the input, once each of them is whole; how many lines.

    Raises:
        InputError: a line is missing, another one now or not there any more, shards are of different runs, or
            there is an output.
    """
    if Path(output).exists():
        raise InputError(f"{output} is there already: give another output")
    shards = [shard_file(output, i, n) for i in range(n)]
    first, records, at, count, part = dict[str, Any](), list[Any](), [0] * n, 0, Path(f"{output}.part")
    for shard in shards:
        with opened(progress_file(shard)) as progress, opened(shard) as file:
            size = os.fstat(file.fileno()).st_size
            settings, found, _ = _recorded(progress.read(), progress_file(shard), size)
        settings |= dict(shard=None, machine=None)
        if settings != (first := first or settings):
            raise InputError(f"{shard} and {shards[0]} are of different runs: make them with the same flags")
        starts, order = np.concatenate([[0], found["end"][:-1]]).astype(np.int64), np.argsort(found["number"])
        records.append((found[order], starts[order]))
    with ExitStack() as held:
        files = [held.enter_context(open(shard, "rb")) for shard in shards]
        joined = held.enter_context(open(part, "wb"))
        held.callback(part.unlink, missing_ok=True)
        for line in read_lines(input):
            i = (line.number - 1) % n
            (found, starts), k = records[i], at[i]
            if k == len(found) or (found["number"][k], found["digest"][k]) != (line.number, line.digest):
                raise InputError(f"line {line.number} is not finished in {shards[i]}: run that shard again")
            files[i].seek(starts[k])
            joined.write(files[i].read(int(found["end"][k]) - int(starts[k])))
            at[i], count = k + 1, count + 1
        if count < sum(len(found) for found, _ in records):
            raise InputError(f"{count} lines are in {input}, and more were answered: give the same")
        joined.close()
        os.replace(part, output)
    return count


def _locked(path: Path, held: ExitStack) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        held.callback(os.close, file)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"another process writes to {path}: wait for it, or give another output") from error
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    return file


def _recorded(content: bytes, path: Path, size: int) -> tuple[dict[str, Any], np.ndarray, int]:
    """Settings, records whose lines an output of this size has, and where they begin."""
    head, _, rest = content.partition(b"\n")
    try:
        settings = dict(json.loads(head))
        settings["model"]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} does not say which run wrote the output: give another output") from error
    records = np.frombuffer(rest[: len(rest) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    # The disk may have lost the rest of the one or of the other.
    sound = (np.diff(records["end"].astype(np.int64), prepend=0) > 0) & (records["end"] <= size)
    return settings, records[np.logical_and.accumulate(sound)], len(head) + 1


def _check_same(earlier: dict[str, Any], settings: dict[str, Any], output: Path) -> None:
    for name in {**settings, **earlier}:
        was, now = earlier.get(name), settings.get(name)
        if was == now:
            continue
        if name != "machine":
            what = f"{name} {shown(was)}, here {shown(now)}"
            raise InputError(f"{output} was begun with {what}: give the same, or another output")
        warnings.warn(f"{output} was begun on {was}: the last bits may differ from here on", stacklevel=4)


def _write(file: int, data: bytes, path: Path, sync: bool = False) -> None:
    """Appends all of it, or nothing; sync: it is on the disk then, as all before it."""
    begin, left = os.lseek(file, 0, os.SEEK_END), memoryview(data)
    try:
        while left:
            left = left[os.write(file, left) :]
        if sync:
            os.fsync(file)
    except OSError as error:
        os.ftruncate(file, begin)
        why = f"{path} cannot be written: {error.strerror}"
        raise InputError(f"{why}; what is finished stays, the same command goes on from there") from error
