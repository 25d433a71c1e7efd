"""The output, and beside it the record of which lines are finished: what a killed run is resumed from."""

import fcntl
import json
import os
import warnings
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
        self._file, self._records = _locked(self._path), _locked(self._progress)
        head, _, rest = _content(self._records).partition(b"\n")
        size = os.fstat(self._file).st_size
        if not size:  # nothing is finished: whatever was meant there before
            head, rest = json.dumps(settings, sort_keys=True).encode(), b""
            os.ftruncate(self._records, 0)
            _write(self._records, head + b"\n", self._progress)
        try:
            _check_same(_settings(head, self._progress), settings, self._path)
        except InputError:
            self.close()
            raise
        records = np.frombuffer(rest[: len(rest) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
        records = records[: np.searchsorted(records["end"], size, "right")]  # the disk may have lost the rest
        self._end = int(records["end"][-1]) if len(records) else 0
        os.ftruncate(self._records, len(head) + 1 + records.nbytes)
        os.ftruncate(self._file, self._end)
        self.finished = np.sort(records, order="number")

    def add(self, number: int, digest: int, line: bytes) -> None:
        """Appends a line.

        Raises:
            InputError: it cannot be written; what stood there before does.
        """
        try:
            _write(self._file, line, self._path)
        except InputError:
            os.ftruncate(self._file, self._end)
            self.settle()
            raise
        self._end += len(line)
        self._pending.append((number, digest, self._end))

    def settle(self) -> None:
        """Makes what was added so far outlast anything."""
        if self._pending:
            os.fsync(self._file)
            _write(self._records, np.array(self._pending, _RECORD).tobytes(), self._progress)
            self._pending = []

    def close(self) -> None:
        """Settles, and lets others have the files."""
        try:
            self.settle()
        finally:
            for file in (self._file, self._records):
                os.close(file)


def merge_shards(input: str | Path, output: str | Path, n: int) -> int:
    """Joins the outputs of n shards in the order of the input, once each of them is whole; how many lines.

    Raises:
        InputError: a line is missing or another one now, shards are of different runs, or there is an output.
    """
    if Path(output).exists():
        raise InputError(f"{output} is there already: give another output")
    shards = [shard_file(output, i, n) for i in range(n)]
    heads, records = [], []
    for shard in shards:
        with opened(progress_file(shard)) as file:
            head, _, rest = file.read().partition(b"\n")
        heads.append(_settings(head, progress_file(shard)) | dict(shard=None, machine=None))
        found = np.frombuffer(rest[: len(rest) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
        starts = np.concatenate([[0], found["end"][:-1]]).astype(np.int64)
        order = np.argsort(found["number"])
        records.append((found[order], starts[order]))
        if heads[-1] != heads[0]:
            raise InputError(f"{shard} and {shards[0]} are of different runs: make them with the same flags")
    part, files, at, count = Path(f"{output}.part"), [open(shard, "rb") for shard in shards], [0] * n, 0
    with opened(input) as lines, open(part, "wb") as joined:
        for line in read_lines(lines):
            i = (line.number - 1) % n
            (found, starts), k = records[i], at[i]
            if k == len(found) or (found["number"][k], found["digest"][k]) != (line.number, line.digest):
                raise InputError(f"line {line.number} is not finished in {shards[i]}: run that shard again")
            files[i].seek(starts[k])
            joined.write(files[i].read(int(found["end"][k]) - int(starts[k])))
            at[i], count = k + 1, count + 1
    os.replace(part, output)
    return count


def _locked(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise InputError(f"another process writes to {path}: wait for it, or give another output") from error
    return file


def _content(file: int) -> bytes:
    with open(file, "rb", closefd=False) as whole:
        return whole.read()


def _settings(head: bytes, path: Path) -> dict[str, Any]:
    """What the first line of a record says."""
    try:
        settings = json.loads(head)
        return dict(settings)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} does not say which run wrote the output: give another output") from error


def _check_same(earlier: dict[str, Any], settings: dict[str, Any], output: Path) -> None:
    for name, now in settings.items():
        if (was := earlier.get(name)) == now:
            continue
        if name != "machine":
            what = f"{name} {shown(was)}, here {shown(now)}"
            raise InputError(f"{output} was begun with {what}: give the same, or another output")
        warnings.warn(f"{output} was begun on {was}: the last bits may differ from here on", stacklevel=4)


def _write(file: int, data: bytes, path: Path) -> None:
    """Appends all of it."""
    os.lseek(file, 0, os.SEEK_END)
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError as error:
        why = f"{path} cannot be written: {error.strerror}"
        raise InputError(f"{why}; what is finished stays, the same command goes on from there") from error
