"""The output file and its progress file, from which a killed run resumes."""

import errno
import fcntl
import json
import logging
import os
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, format_value
from .input_lines import DIGEST_BYTES, open_input, read_lines

_LOGGER = logging.getLogger(__name__)

_FORMAT = 2  # of the progress file; format 1 had digests of 8 bytes, and no `failed`
# A finished line: number, `Line.digest`, offset in the output after its answer, whether that is an error.
_RECORD = np.dtype([("number", "<u8"), ("digest", f"V{DIGEST_BYTES}"), ("end", "<u8"), ("failed", "?")])


def progress_file(output: str | Path) -> Path:
    return Path(f"{output}.progress")


def shard_file(output: str | Path, i: int, n: int) -> Path:
    return Path(f"{output}.{i}-of-{n}")


class ResumableOutput:
    """An output file to which whole lines are appended. A record is written only after its line is on disk,
    so the next start truncates every line without a record, whatever state it is in.

    Attributes:
        finished: records of earlier runs, sorted by number.
    """

    def __init__(self, output: str | Path, settings: dict[str, Any]):
        """Opens and locks both files. Raises InputError if another process writes to the files, or another
        run made them. settings: all settings on which answers depend, as JSON values. An earlier run must
        have had the same settings.
        """
        self._path = Path(output)
        self._progress = progress_file(output)
        self._pending = list[Any]()
        settings = dict(format=_FORMAT) | settings
        with ExitStack() as stack:
            self._file = _open_locked(self._path, stack)
            self._records = _open_locked(self._progress, stack)
            size = os.fstat(self._file).st_size
            with open(self._records, "rb", closefd=False) as file:
                content = file.read()
            if size or b"\n" in content:
                earlier, records, begin = _parse_progress(content, self._progress, size)
            if size:
                _check_same(earlier, settings, self._path)
            else:  # no line is finished: settings of an earlier run do not matter
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
            self._open_files = stack.pop_all()

    def add(self, number: int, digest: bytes, line: bytes, failed: bool = False) -> None:
        """Appends a line. failed: True: the line is an error. Raises InputError if the line cannot be
        written. The file then stays as it was.
        """
        _write(self._file, line, self._path)
        self._end += len(line)
        self._pending.append((number, digest, self._end, failed))

    def sync(self) -> None:
        """Syncs the added lines to disk, then their records. Raises InputError as `add`."""
        pending = self._pending
        self._pending = []  # lines that cannot be synced are answered again by the next run
        if pending:
            _write(self._file, b"", self._path, sync=True)
            _write(self._records, np.array(pending, _RECORD).tobytes(), self._progress, sync=True)

    def close(self) -> None:
        """Syncs, then closes and unlocks the files."""
        with self._open_files:
            self.sync()


def merge_shards(input: str | Path, output: str | Path, n: int) -> tuple[int, int]:
    """Joins the outputs of n complete shards in the order of the input. The output gets its name once all of
    it is on disk. Returns the number of lines, and the number of errors among them.

    Raises:
        InputError: a line is not finished, has changed or is gone from the input. Or the shards are of
            different runs or are being written. Or the output exists.
    """
    output = Path(output)
    check_output(output)
    first = dict[str, Any]()
    records = list[Any]()
    at = [0] * n
    count = 0
    with ExitStack() as stack:
        _check_absent(output)
        files = list[Any]()
        for i in range(n):
            shard = shard_file(output, i, n)
            settings, found = _open_shard(shard, files, stack)
            if settings != (first := first or settings):
                other = shard_file(output, 0, n)
                raise InputError(f"{shard} and {other} are of different runs: make them with the same flags")
            starts = np.concatenate([[0], found["end"][:-1]]).astype(np.int64)
            order = np.argsort(found["number"])
            records.append((found[order], starts[order]))
        joined, part = _new_file(output, stack)
        for line in read_lines(input):
            i = (line.number - 1) % n
            (found, starts) = records[i]
            k = at[i]
            if k == len(found) or not matches_record(found[k], line.number, line.digest):
                shard = shard_file(output, i, n)
                raise InputError(f"line {line.number} is not finished in {shard}: run that shard again")
            files[i].seek(starts[k])
            _write(joined, files[i].read(int(found["end"][k]) - int(starts[k])), part)
            at[i] = k + 1
            count += 1
        if count < sum(len(found) for found, _ in records):
            raise InputError(f"{count} lines are in {input}, and the shards have more: give their input")
        _write(joined, b"", part, sync=True)
        try:
            os.link(part, output)  # never overwrites a file
        except OSError:
            _check_absent(output)  # another process made it meanwhile; else the file system has no hard links
            os.replace(part, output)
        _sync_folder(output)
    return count, sum(int(found["failed"].sum()) for found, _ in records)


def check_output(output: str | Path) -> None:
    """Raises InputError for a name that no output can have."""
    if str(output) == "-":
        raise InputError("output - would be standard output, from which no run can resume: give a file")
    for path in (Path(output), progress_file(output)):
        if path.exists() and not path.is_file() or not path.absolute().parent.is_dir():
            raise InputError(f"{path} cannot be written: give a file in a directory that exists")
        if path.suffix == ".gz":
            raise InputError(f"{path} would not be compressed: give a name without .gz")


def matches_record(record: Any, number: int, digest: bytes) -> bool:
    """Returns True if a record belongs to the line with this number and digest."""
    return bool(record["number"] == number) and bytes(record["digest"]) == digest


def _open_shard(path: Path, files: list[Any], stack: ExitStack) -> tuple[dict[str, Any], np.ndarray]:
    """Opens and locks a shard's output, and appends the file to `files`. Returns the settings that all shards
    must share, and the shard's records.
    """
    file = stack.enter_context(open_input(path))
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{path} is being written: wait until its run has ended") from error
    files.append(file)
    with open_input(progress_file(path)) as progress:
        size = os.fstat(file.fileno()).st_size
        settings, found, _ = _parse_progress(progress.read(), progress_file(path), size)
    same = {name: value for name, value in settings.items() if not name.startswith("machine.")}
    return same | dict(shard=None), found


def _check_absent(output: Path) -> None:
    if os.path.lexists(output):
        raise InputError(f"{output} exists already: give another output")


def _new_file(output: Path, stack: ExitStack) -> tuple[int, Path]:
    """Makes a temporary file next to the output, which the stack deletes. Returns the file and its path."""
    part = output.with_name(f"{output.name}.{secrets.token_hex(8)}.part")
    try:
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InputError(f"{part} cannot be written: {error.strerror}") from error
    stack.callback(os.close, file)
    stack.callback(part.unlink, missing_ok=True)
    return file, part


def _sync_folder(path: Path) -> None:
    """Syncs the directory of a path, so that the names of new files survive a power failure, too."""
    folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system does not support it
            raise InputError(f"{path.parent} cannot be written: {error.strerror}") from error
    finally:
        os.close(folder)


def _open_locked(path: Path, stack: ExitStack) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        stack.callback(os.close, file)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"another process writes to {path}: wait for it, or give another output") from error
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    return file


def _parse_progress(content: bytes, path: Path, size: int) -> tuple[dict[str, Any], np.ndarray, int]:
    """Returns the settings, the records of lines within the first `size` bytes, and the offset of the
    records.
    """
    head, _, rest = content.partition(b"\n")
    try:
        settings = dict(json.loads(head))
        settings["model"]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} does not say which run wrote the output: give another output") from error
    if (found := settings.get("format", 1)) != _FORMAT:
        raise InputError(
            f"{path} has format {format_value(found)}, of another version of xinfer_jax, and this one has"
            f" {_FORMAT}: give another output, or continue with that version"
        )
    records = np.frombuffer(rest[: len(rest) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    # A power failure may have lost the end of either file.
    valid = (np.diff(records["end"].astype(np.int64), prepend=0) > 0) & (records["end"] <= size)
    return settings, records[np.logical_and.accumulate(valid)], len(head) + 1


def _check_same(earlier: dict[str, Any], settings: dict[str, Any], output: Path) -> None:
    """Raises InputError if a setting differs from the earlier run's. Warns if only the machine differs."""
    for name in {**settings, **earlier}:
        was = earlier.get(name)
        now = settings.get(name)
        if was == now:
            continue
        if not name.startswith("machine."):
            what = f"{name} {format_value(was)}, here {format_value(now)}"
            raise InputError(f"{output} was begun with {what}: give the same, or another output")
        what = f"{name.removeprefix('machine.')} {format_value(was)}, here {format_value(now)}"
        _LOGGER.warning("%s was begun with %s: the last bits may differ from here on", output, what)


def _write(file: int, data: bytes, path: Path, sync: bool = False) -> None:
    """Appends all of the data, or nothing. sync: the whole file is on disk afterwards."""
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
        raise InputError(f"{why}; finished lines stay: run the same command again to continue") from error
