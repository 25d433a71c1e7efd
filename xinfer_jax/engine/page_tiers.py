"""`PageTiers`: moves pages between the device, host memory and files, as the scheduler decides, and also
snapshots of recurrent states.

Several engines share files, but not host memory: that would need locks in every step.
"""

import time
from collections import OrderedDict
from functools import partial
from typing import Any

from .host_pages import HostPages
from .host_tier import COPIED_PAGES, snapshot_name
from .page_files import PageFiles
from .pages import PagePool, num_pages_for
from .row import LoadPages, ReadPages, Row, SavePages, SaveSnapshot, Transfer
from .scheduler import Scheduler

_CLOSE_SECONDS = 2.0  # for writing
_POLL_SECONDS = 0.001
_FIRST_WAIT_SECONDS = 1.0  # for files, before it is known how long prefilling takes


class PageTiers:
    """The prefix cache beyond the device. The engine's thread calls it."""

    def __init__(self, device: Any, scheduler: Scheduler, files: PageFiles | None):
        self._device = device
        self._scheduler = scheduler
        self._host: Any = scheduler.host
        self._files: Any = files
        # The file's hash of saved pages, and of saved snapshots (True), the oldest first.
        self._unwritten: dict[tuple[bool, int], bytes] = {}
        self._give_up: dict[Row, float] = {}  # when a row stops to wait for files
        self._page_seconds: float | None = None  # until a prompt's first token, for each page

    @property
    def is_busy(self) -> bool:
        """Returns True if `step` will soon have something to do: rows wait for files, or pages are being
        written.
        """
        if not self._files:
            return False
        is_writing = self._files.num_writing or (self._unwritten and self._files.can_write)
        return bool(self._scheduler.waiting_for_files or is_writing)

    def execute(self, action: Transfer) -> None:
        if isinstance(action, SavePages):
            self._device.save_pages(action.pages, action.host_pages)
            pages = ((False, page) for page in action.host_pages)
            self._unwritten |= zip(pages, action.names, strict=True) if self._files else ()
        elif isinstance(action, SaveSnapshot):
            self._device.save_snapshot(action.snapshot, action.host_snapshot)
            self._unwritten |= {(True, action.host_snapshot): action.name} if self._files else {}
        elif isinstance(action, LoadPages):
            self._device.load_pages(action.pages, action.host_pages)
        else:
            self._begin_read(action)

    def step(self) -> None:
        """Handles reads and writes that ended, and begins to write saved pages."""
        if not self._files:
            return
        self._files.find_new()
        while not self._files.finished.empty():
            self._files.finished.get()()
        now = time.monotonic()
        for row in [row for row, end in self._give_up.items() if now > end]:
            del self._give_up[row]
            self._scheduler.stop_waiting_for_files(row)
        while self._unwritten and self._files.can_write:
            place = next(iter(self._unwritten))
            self._write(*place, self._unwritten.pop(place))

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Records the time that a prompt of this number of tokens took: no row waits for files longer than it
        would prefill.
        """
        self._page_seconds = seconds / num_pages_for(tokens)

    def identify(self, settings: dict[str, Any]) -> None:
        """Notes that the model has new weights: pages in files have other names."""
        self._unwritten.clear()
        self._files.identify(**settings)

    def salt(self, salt: bytes) -> bytes:
        """Returns the salt of a row's pages for the salt of its request."""
        return self._files.salt(salt) if self._files else salt

    def close(self, writes: bool) -> None:
        """Ends reading and writing. writes: True: first it writes the pages that the device still caches, the
        pages that were used last first, for a limited time.
        """
        if not self._files:
            return
        pool = self._scheduler.pool
        pool.cached = OrderedDict(reversed(pool.cached.items()))
        end = time.monotonic() + _CLOSE_SECONDS
        for save_snapshot in (
            self._scheduler.prefixes.save_snapshots(self._host.snapshots.size) if writes else ()
        ):
            self.execute(save_snapshot)
        while writes and time.monotonic() < end:
            if not self._unwritten:
                for save in self._host.save(pool.evict(COPIED_PAGES)):
                    self.execute(save)
            self.step()
            if not (self._unwritten or pool.cached or self._files.num_writing):
                break
            if not self._files.can_write:
                time.sleep(_POLL_SECONDS)
        self._files.close()

    def _write(self, is_snapshot: bool, page: int, page_hash: bytes) -> None:
        """Begins to write a saved page or snapshot, unless it was evicted meanwhile."""
        name = snapshot_name(page_hash) if is_snapshot else page_hash
        pool: PagePool = self._host.snapshots if is_snapshot else self._host.pool
        contents: HostPages = self._device.host_snapshots if is_snapshot else self._device.host
        if name not in self._files and pool.page_of_hash.get(page_hash) == page:
            contents.finish()
            pool.reuse([page])
            self._files.write(name, contents.bytes_of(page), partial(pool.release, [page]))

    def _begin_read(self, read: ReadPages) -> None:
        device = self._device
        device.host.finish()  # or a page that was evicted would be copied into one that is read
        names = [*read.names]
        places = [device.host.bytes_of(page) for page in read.host_pages]
        if read.snapshot:
            _, name, host_snapshot = read.snapshot
            device.host_snapshots.finish()
            names.append(name)
            places.append(device.host_snapshots.bytes_of(host_snapshot))
        seconds = _FIRST_WAIT_SECONDS
        if self._page_seconds is not None:
            seconds = self._page_seconds * read.num_pages
        self._give_up[read.row] = time.monotonic() + seconds

        def ended(count: int) -> None:
            self._give_up.pop(read.row, None)
            self._scheduler.record_read(read, count)

        self._files.read(names, places, ended)
