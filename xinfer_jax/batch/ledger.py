"""The output, and beside it the record of which lines are finished: what a killed run is resumed from."""

import errno
import fcntl
import json
import os
import secrets
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, shown
from .lines import DIGEST, opened, read_lines

_FORMAT = 2  # of the record; 1 had 8 bytes of a digest, and did not say which lines failed
# A finished line: its number, `Line.digest`, where the output ends behind its answer, if that is an error.
_RECORD = np.dtype([("number", "<u8"), ("digest", f"V{DIGEST}"), ("end", "<u8"), ("failed", "?")])


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
        self._path = Path(output)
        self._progress = progress_file(output)
        self._pending = list[Any]()
        settings = dict(format=_FORMAT) | settings
        with ExitStack() as held:
            self._file = _locked(self._path, held)
            self._records = _locked(self._progress, held)
            size = os.fstat(self._file).st_size
            with open(self._records, "rb", closefd=False) as file:
                content = file.read()
            if size or b"\n" in content:
                earlier, records, begin = _recorded(content, self._progress, size)
            if size:
                _check_same(earlier, settings, self._path)
            else:  # nothing is finished: whatever was meant there before
                content = json.dumps(settings, sort_keys=True).encode() + b"\n"
                records = np.zeros(0, _RECORD)
                begin = len(content)
                os.ftruncate(self._records, 0)
                _write(self._records, content, self._progress, sync=True)
                _sync_folder(self._path)
            self._end = int(records["end"][-1]) if len(records) else 0
            os.ftruncate(self._records, begin + records.nbytes)
            os.ftruncate(self._file, self._end)
            self.finished = np.sort(records, order="number")
            self._held = held.pop_all()

    def add(self, number: int, digest: bytes, line: bytes, failed: bool = False) -> None:
        """Appends a line. failed: it is an error.

        Raises:
            InputError: it cannot be written; what stood there before does.
        """
        _write(self._file, line, self._path)
        self._end += len(line)
        self._pending.append((number, digest, self._end, failed))

    def settle(self) -> None:
        """Makes what was added so far outlast anything.

        Raises:
            InputError: as `add`.
        """
        pending = self._pending
        self._pending = []  # what cannot be made safe is answered once more
        if pending:
            _write(self._file, b"", self._path, sync=True)
            _write(self._records, np.array(pending, _RECORD).tobytes(), self._progress, sync=True)

    def close(self) -> None:
        """Settles, and lets others have the files."""
        with self._held:
            self.settle()


def merge_shards(input: str | Path, output: str | Path, n: int) -> tuple[int, int]:
    """Joins the outputs of n shards in the order of the input, once each of them is whole; how many lines,
    and how many of them are errors.

    The output is there once all of it is on the disk. No shard may be written meanwhile.

    Raises:
        InputError: a line is missing, another one now or not there any more, shards are of different runs or
            are being written, or there is an output.
    """
    output = Path(output)
    check_output(output)
    first = dict[str, Any]()
    records = list[Any]()
    at = [0] * n
    count = 0
    with ExitStack() as held:
        _check_absent(output)
        files = list[Any]()
        for i in range(n):
            shard = shard_file(output, i, n)
            settings, found = _shard(shard, files, held)
            if settings != (first := first or settings):
                other = shard_file(output, 0, n)
                raise InputError(f"{shard} and {other} are of different runs: make them with the same flags")
            starts = np.concatenate([[0], found["end"][:-1]]).astype(np.int64)
            order = np.argsort(found["number"])
            records.append((found[order], starts[order]))
        joined, part = _new_file(output, held)
        for line in read_lines(input):
            i = (line.number - 1) % n
            (found, starts) = records[i]
            k = at[i]
            if k == len(found) or not is_of(found[k], line.number, line.digest):
                shard = shard_file(output, i, n)
                raise InputError(f"line {line.number} is not finished in {shard}: run that shard again")
            files[i].seek(starts[k])
            _write(joined, files[i].read(int(found["end"][k]) - int(starts[k])), part)
            at[i] = k + 1
            count = count + 1
        if count < sum(len(found) for found, _ in records):
            raise InputError(f"{count} lines are in {input}, and more were answered: give the same")
        _write(joined, b"", part, sync=True)
        try:
            os.link(part, output)  # which overwrites nothing
        except OSError:
            _check_absent(output)  # it may have come meanwhile; else there are no links here
            os.replace(part, output)
        _sync_folder(output)
    return count, sum(int(found["failed"].sum()) for found, _ in records)


def check_output(output: str | Path) -> None:
    """Raises InputError for a name that no output can have."""
    if str(output) == "-":
        raise InputError("output - would be standard output, which no run can go on with: give a file")
    for path in (Path(output), progress_file(output)):
        if path.exists() and not path.is_file() or not path.absolute().parent.is_dir():
            raise InputError(f"{path} cannot be written: give a file in a directory that is there")
        if path.suffix == ".gz":
            raise InputError(f"{path} would not be packed: give a name without .gz")


def is_of(record: Any, number: int, digest: bytes) -> bool:
    """Whether a record is that of this line."""
    return bool(record["number"] == number) and bytes(record["digest"]) == digest


def _shard(path: Path, files: list[Any], held: ExitStack) -> tuple[dict[str, Any], np.ndarray]:
    """What has to be the same in all shards, and the records of one; nobody writes to it from here on."""
    file = held.enter_context(opened(path))
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{path} is being written: wait until its run has ended") from error
    files.append(file)
    with opened(progress_file(path)) as progress:
        size = os.fstat(file.fileno()).st_size
        settings, found, _ = _recorded(progress.read(), progress_file(path), size)
    same = {name: value for name, value in settings.items() if not name.startswith("machine.")}
    return same | dict(shard=None), found


def _check_absent(output: Path) -> None:
    if os.path.lexists(output):
        raise InputError(f"{output} is there already: give another output")


def _new_file(output: Path, held: ExitStack) -> tuple[int, Path]:
    """A file beside the output, of a name that nobody has, and its name; it does not stay."""
    part = output.with_name(f"{output.name}.{secrets.token_hex(8)}.part")
    try:
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InputError(f"{part} cannot be written: {error.strerror}") from error
    held.callback(os.close, file)
    held.callback(part.unlink, missing_ok=True)
    return file, part


def _sync_folder(path: Path) -> None:
    """Has the names in its directory outlast anything, too."""
    folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without this
            raise InputError(f"{path.parent} cannot be written: {error.strerror}") from error
    finally:
        os.close(folder)


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
    if (found := settings.get("format", 1)) != _FORMAT:
        raise InputError(
            f"{path} has format {shown(found)}, of another version of xinfer_jax, and this one has {_FORMAT}:"
            " give another output, or go on with that version"
        )
    records = np.frombuffer(rest[: len(rest) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    # The disk may have lost the rest of the one or of the other.
    sound = (np.diff(records["end"].astype(np.int64), prepend=0) > 0) & (records["end"] <= size)
    return settings, records[np.logical_and.accumulate(sound)], len(head) + 1


def _check_same(earlier: dict[str, Any], settings: dict[str, Any], output: Path) -> None:
    for name in {**settings, **earlier}:
        was = earlier.get(name)
        now = settings.get(name)
        if was == now:
            continue
        if not name.startswith("machine."):
            what = f"{name} {shown(was)}, here {shown(now)}"
            raise InputError(f"{output} was begun with {what}: give the same, or another output")
        what = f"{name.removeprefix('machine.')} {shown(was)}, here {shown(now)}"
        warnings.warn(f"{output} was begun with {what}: the last bits may differ from here on", stacklevel=4)


def _write(file: int, data: bytes, path: Path, sync: bool = False) -> None:
    """Appends all of it, or nothing; sync: it is on the disk then, as all before it."""
    begin = os.lseek(file, 0, os.SEEK_END)
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(file, left) :]
        if sync:
            os.fsync(file)
    except OSError as error:
        os.ftruncate(file, begin)
        why = f"{path} cannot be written: {error.strerror}"
        raise InputError(f"{why}; what is finished stays, the same command goes on from there") from error
