"""The prefix cache beyond the device. It knows which pages are in host memory, and which are in files. It is
plain Python, without arrays.

evicted from the device ─ SavePages ─► host memory ─ LoadPages ─► pages of a row
                                       host memory ◄─ ReadPages ─ files
"""

from collections.abc import Collection, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Any, NamedTuple

from .pages import PagePool
from .row import ReadPages, Row, SavePages, SaveSnapshot

COPIED_PAGES = 8  # that one program copies to host memory, or back


def snapshot_name(page_hash: bytes) -> bytes:
    """Returns the name that the file of a snapshot of recurrent states has, as pages have their hashes.
    page_hash: the hash of the page at whose end it was taken.
    """
    return sha256(b"snapshot" + page_hash).digest()


class FoundPrefix(NamedTuple):
    """The places of consecutive pages of a prompt: first pages on the device, then in host memory, then in
    files.
    """

    pages: list[int]
    host_pages: list[int]
    names: list[bytes]  # of pages in files, as in `ReadPages`, with their hashes
    hashes: list[bytes]
    # The snapshot of recurrent states at their end, if it is in a file alone: its hash, and the file's name.
    snapshot: tuple[bytes, bytes] | None = None

    @property
    def total(self) -> int:
        return len(self.pages) + len(self.host_pages) + len(self.names)

    def first(self, count: int) -> "FoundPrefix":
        in_host = max(0, count - len(self.pages))
        in_files = max(0, in_host - len(self.host_pages))
        names = self.names[:in_files]
        return FoundPrefix(self.pages[:count], self.host_pages[:in_host], names, self.hashes[:in_files])


class HostTier:
    """A limited number of pages in host memory, and of snapshots of recurrent states. The least recently used
    page is evicted, and so is the least recently used snapshot. A page has the bits that its hash stands for,
    so the same page may be on the device as well.

    Attributes:
        pool: the pool of these pages. "Used" pages are the ones that a row still has to load, that are read
            from a file, and that are written to a file.
        snapshots: the pool of snapshots, as in `PrefixCache`.
        files: `PageFiles`, or another set of the hashes of pages that are in files.
    """

    def __init__(self, pages: int, files: Any = None, snapshots: int = 0):
        """snapshots: the number of snapshots of recurrent states. 0: the model has no such states."""
        self.pool = PagePool(pages + 1)  # page 0 is none of them
        self.snapshots = PagePool(snapshots + 1)
        self.files = set[bytes]() if files is None else files
        self.epoch = 0  # how often the prefix cache was emptied
        self.read: set[int] = set()  # pages that came from files, and were not loaded since

    def find(self, hashes: Sequence[bytes], names: Sequence[bytes], in_files: bool) -> FoundPrefix:
        """Returns the first of these pages that are in host memory and then in files. names: other hashes of
        the same pages, by which a file may be found. in_files: True: look for files too.
        """
        host_pages = self.pool.find(hashes)
        if not in_files:
            return FoundPrefix([], host_pages, [], [])
        rest = hashes[len(host_pages) :]
        pairs = zip(rest, names[len(host_pages) :], strict=True)
        known = (next(filter(self.files.__contains__, pair), b"") for pair in pairs)
        found = list(takewhile(bool, known))
        return FoundPrefix([], host_pages, found, list(rest[: len(found)]))

    def save(self, evicted: Sequence[tuple[int, list[bytes]]]) -> list[SavePages]:
        """Returns the actions that save pages that the device evicts, with their hashes. Pages that are saved
        already need no action. If memory is short, the pages that were evicted last are saved.
        """
        new = []
        for page, hashes in evicted:
            if saved := self.pool.page_of_hash.get(hashes[0]):
                for page_hash in hashes:
                    self.pool.cache(saved, page_hash)
                self.pool.touch([saved])
            else:
                new.append((page, hashes))
        if not (new := new[max(0, len(new) - self.pool.num_available) :]):
            return []
        host_pages = [self.pool.add(hashes) for _, hashes in new]
        self.read.difference_update(host_pages)
        return [SavePages([page for page, _ in new], host_pages, [hashes[0] for _, hashes in new])]

    def find_snapshot(self, hashes: Sequence[bytes]) -> tuple[bytes, bytes] | None:
        """Returns `FoundPrefix.snapshot` for a snapshot in a file, or None. hashes: the hash by which it will
        be found, and another hash by which a file may have it.
        """
        names = map(snapshot_name, hashes)
        return next(((hashes[0], name) for name in names if name in self.files), None)

    def save_snapshot(self, snapshot: int, hashes: Sequence[bytes]) -> SaveSnapshot | None:
        """Returns the action that saves a snapshot that the device replaces, with its hashes. None: it is
        saved already, or there is no memory for it.
        """
        pool = self.snapshots
        pool.touch([saved for page_hash in hashes for saved in pool.find([page_hash])])
        new = [page_hash for page_hash in hashes if page_hash not in pool.page_of_hash]
        return SaveSnapshot(snapshot, pool.add(new), new[0]) if new and pool.num_available else None

    def begin_read(self, row: Row, found: FoundPrefix) -> ReadPages | None:
        """Returns the action that reads the pages of a row's prompt from files, or None if there is no memory
        for any. A snapshot of recurrent states is read with all pages before it.
        """
        self.pool.reuse(found.host_pages)  # they are not evicted for those in files
        count = min(len(found.names), self.pool.num_available)
        snapshot = None
        if found.snapshot and self.snapshots.num_available and count == len(found.names):
            (place,) = self.snapshots.allocate(1)
            snapshot = (*found.snapshot, place)
        elif found.snapshot:
            count = 0
        host_pages = self.pool.allocate(count)
        self.read.difference_update(host_pages)
        self.pool.release(found.host_pages)
        if not count and not snapshot:
            return None
        num_pages = found.total if snapshot else count
        names = found.names[:count], found.hashes[:count]
        return ReadPages(row, *names, host_pages, self.epoch, snapshot, num_pages)

    def record_read(self, read: ReadPages, count: int) -> None:
        """Records that the first `count` files were read: pages, and then a snapshot. The other files could
        not be read.
        """
        if read.epoch == self.epoch:
            for page, page_hash in zip(read.host_pages[:count], read.hashes, strict=False):
                self.pool.cache(page, page_hash)
            self.read |= {page for page in read.host_pages if page in self.pool.hashes_of_page}
        self.pool.release(read.host_pages)
        if read.snapshot:
            page_hash, _, place = read.snapshot
            if read.epoch == self.epoch and count > len(read.names):
                self.snapshots.cache(place, page_hash)
            self.snapshots.release([place])

    def load(self, host_pages: Sequence[int]) -> int:
        """Lets a row load pages that were kept for it. Returns the number of pages that came from files."""
        read = self.read & {*host_pages}
        self.read -= read
        self.pool.release(host_pages)
        return len(read)

    def remove(self, hashes: Collection[bytes]) -> None:
        """Removes these hashes: no page is found by them any more."""
        self.pool.remove(hashes)
        self.snapshots.remove(hashes)
        for page_hash in hashes:
            self.files.discard(page_hash)
            if self.snapshots.size > 1:
                self.files.discard(snapshot_name(page_hash))

    def clear(self) -> None:
        """Removes all hashes, for new weights: no page is found any more. Rows load the pages that are kept
        for them.
        """
        self.epoch += 1
        self.pool.clear_cache()
        self.snapshots.clear_cache()
