"""`PageFiles`: pages of the prefix cache in files, which later runs find. Threads read and write them.

A file has one page. Its name is a digest of everything on which the bits of the page depend. Its content is a
line that names the format, an HMAC over name and page, and the page's bytes.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hmac import compare_digest
from itertools import takewhile
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..errors import format_message
from ..processes.secret import SIGNATURE_SIZE, folder_secret, sign

_LOGGER = logging.getLogger(__name__)

_HEAD = b"xinfer_jax page 1\n"
_SUFFIX = ".page"
_MAX_WRITES = 8  # pages that wait to be written
_SCAN_SECONDS = 60.0  # between two looks at the directory, which other runs write to
_PAUSE_SECONDS = 60.0  # without writing, after a write failed: the disk may be full
_OLD_SECONDS = 600.0  # after which a file that was not finished is deleted


class PageFiles:
    """The pages of one directory, as a set of the hashes whose pages are in it.

    The directory belongs to the user, with mode 0700. It has a secret, with which files are authenticated and
    salts are hashed. If all files, also the files of other models, have more than `max_bytes`, the least
    recently used ones are deleted. Raises InputError for a directory that is not the user's own, or cannot be
    used.

    Attributes:
        finished: a call for each read and write that ended, for the engine's thread.
        num_writing: the number of pages that are being written.
    """

    def __init__(self, directory: str | PathLike[str], max_bytes: int):
        self._directory = Path(directory).expanduser()
        self._max_bytes = max_bytes
        self._secret = folder_secret(self._directory, "give another --page_directory")
        self._identity = b""
        self._sizes: OrderedDict[str, int] = OrderedDict()  # of files by name, the least recently used first
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._next_scan = 0.0
        self._reported: set[str] = set()
        self._reader, self._writer = (
            ThreadPoolExecutor(1, f"xinfer_jax page {name}") for name in ("reader", "writer")
        )
        self.finished: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.num_writing = 0
        self._scan()

    def identify(self, **settings: Any) -> None:
        """Sets the model and the form to which pages belong from now on."""
        self._identity = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).digest()

    def salt(self, salt: bytes) -> bytes:
        """Returns the salt of pages in files for a request's: without the secret nobody can guess a file's
        name.
        """
        return sign(self._secret, b"salt", salt)

    def __contains__(self, page_hash: object) -> bool:
        return isinstance(page_hash, bytes) and self._name(page_hash) in self._sizes

    def discard(self, page_hash: bytes) -> None:
        """Deletes a page's file, if there is one, also if it is being written now."""
        name = self._name(page_hash)

        def delete() -> None:
            self._forget(name)
            self._delete(name)

        if name in self._sizes or self.num_writing:
            self._forget(name)
            _begin(self._writer, delete)

    def read(self, hashes: Sequence[bytes], pages: Sequence[np.ndarray], then: Callable[[int], None]) -> None:
        """Reads into `pages`, uint8. then: a function that `finished` calls with the number of first pages
        that were read.
        """
        names = [self._name(page_hash) for page_hash in hashes]

        def read_all() -> None:
            count = sum(takewhile(bool, map(self._read, names, pages)))
            self.finished.put(lambda: then(count))

        _begin(self._reader, read_all)

    @property
    def can_write(self) -> bool:
        return self.num_writing < _MAX_WRITES and time.monotonic() >= self._paused_until

    def write(self, page_hash: bytes, page: np.ndarray, then: Callable[[], None]) -> None:
        """Writes a page, uint8. then: is called once it is not needed any more, by `finished`."""
        name = self._name(page_hash)

        def write() -> None:
            if time.monotonic() >= self._paused_until:
                self._write(name, page)
            self.finished.put(ended)

        def ended() -> None:
            self.num_writing -= 1
            then()

        self.num_writing += 1
        _begin(self._writer, write)

    def find_new(self) -> None:
        """Begins to look for files of other runs, once a minute. The engine calls it in each step."""
        if (now := time.monotonic()) > self._next_scan:
            self._next_scan = now + _SCAN_SECONDS
            _begin(self._writer, self._scan)

    def close(self) -> None:
        """Ends the threads after the work that they have begun."""
        self._reader.shutdown(wait=False)
        self._writer.shutdown(wait=False)

    def _name(self, page_hash: bytes) -> str:
        return hashlib.sha256(self._identity + page_hash).hexdigest() + _SUFFIX

    def _read(self, name: str, page: np.ndarray) -> bool:
        """Reads a page. A file whose content has changed since it was written is forgotten."""
        path = self._directory / name
        try:
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                head = file.read(len(_HEAD) + SIGNATURE_SIZE)
                is_whole = file.readinto(page.data) == page.nbytes and not file.read(1)
            with contextlib.suppress(OSError):
                os.utime(path)  # it was used now
        except FileNotFoundError:  # another run deleted it
            self._forget(name)
            return False
        except OSError as error:
            self._forget(name)
            self._report("read", f"{name} cannot be read ({error.strerror})")
            return False
        is_good = is_whole and compare_digest(head, _HEAD + self._signature(name, page))
        if not is_good:
            self._forget(name)
            self._report("damaged", f"{name} is not as it was written, or not written here: it is not used")
            return False
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        return True

    def _write(self, name: str, page: np.ndarray) -> None:
        """Writes a page to a new file, and renames it: no reader sees a part of it."""
        temporary = ""
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".", delete=False) as file:
                temporary = file.name
                file.write(_HEAD + self._signature(name, page))
                file.write(page.data)
                file.flush()
                size = os.fstat(file.fileno()).st_size
            os.replace(temporary, self._directory / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            self._report("write", f"a page cannot be written ({error.strerror}): none are for a minute")
            return
        with self._lock:
            self._sizes[name] = size
            self._sizes.move_to_end(name)
        self._delete_beyond_limit()

    def _delete_beyond_limit(self) -> None:
        old = []
        with self._lock:
            total = sum(self._sizes.values())
            while total > self._max_bytes:
                name, size = self._sizes.popitem(last=False)
                total -= size
                old.append(name)
        for name in old:
            self._delete(name)

    def _delete(self, name: str) -> None:
        with contextlib.suppress(OSError):  # another run deleted it, or it cannot be
            (self._directory / name).unlink()

    def _forget(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)

    def _scan(self) -> None:
        """Finds the files in the directory, and deletes old ones that were not finished."""
        self._next_scan = time.monotonic() + _SCAN_SECONDS
        found = []
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # it was deleted just now
                    about = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_SUFFIX):
                        found.append((about.st_mtime, entry.name, about.st_size))
                    elif entry.name.startswith(".") and time.time() - about.st_mtime > _OLD_SECONDS:
                        os.unlink(entry.path)
        with self._lock:
            self._sizes = OrderedDict((name, size) for _, name, size in sorted(found))
        self._delete_beyond_limit()

    def _signature(self, name: str, page: np.ndarray) -> bytes:
        return sign(self._secret, b"page", name.encode(), page.data)

    def _report(self, kind: str, about: str) -> None:
        """Logs the first message of its kind."""
        if kind not in self._reported:
            self._reported.add(kind)
            line = format_message(f"page directory {self._directory}: {about}")
            _LOGGER.error("%s; further ones are not reported", line)


def _begin(pool: ThreadPoolExecutor, job: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the process ends
        pool.submit(job)
