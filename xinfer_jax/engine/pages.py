"""Pages of the KV cache, counted on the host: pages that are free, used by rows, or cached for later prompts.

A page holds keys and values of `PAGE_SIZE` consecutive tokens (vLLM: a block). The prefix cache finds a full
page by a hash of all tokens up to its end, so a page is found only after all pages before it.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import takewhile

from ..cache.page_size import PAGE_SIZE


def num_pages_for(tokens: int) -> int:
    """Returns the number of pages that hold this number of tokens."""
    return -(-tokens // PAGE_SIZE)


def usable_capacity(capacity: int, pages: int) -> int:
    """Returns the number of tokens that one row can hold if no other row has pages. Page 0 holds none."""
    return min(capacity, (pages - 1) * PAGE_SIZE)


def hash_pages(salt: bytes, ids: Sequence[int], programs: Sequence[int]) -> list[bytes]:
    """Returns a hash for each page of `ids`. It covers the previous page's hash, the program that writes the
    page and its tokens. programs: a number for each full page that stands for its program. Further pages get
    no hash.
    """
    hashes = [sha256(salt).digest()]
    for start, program in zip(range(0, len(ids), PAGE_SIZE), programs, strict=False):
        page = array("q", [program, *ids[start : start + PAGE_SIZE]])
        hashes.append(sha256(hashes[-1] + page.tobytes()).digest())
    return hashes[1:]


class PagePool:
    """All pages of an engine, and the prefix cache over them. Pages of host memory are a pool too, and so are
    snapshots of recurrent states, which have the hash of the page at whose end they were taken.

    A page is used by rows, or cached (no row uses it, but the prefix cache finds it), or free. Page 0 is none
    of these: rows without tokens write there.

    Attributes:
        size: the number of pages, page 0 included.
        ref_counts: for each page, the number of rows that use it.
        free: pages that nothing uses. The last one is allocated next.
        cached: cached pages. The least recently used page is first, and is evicted first.
        page_of_hash, hashes_of_page: the prefix cache.
    """

    def __init__(self, size: int):
        self.size = size
        self.ref_counts = [0] * size
        self.free = list(range(size - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.page_of_hash: dict[bytes, int] = {}
        self.hashes_of_page: dict[int, list[bytes]] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self.free) + len(self.cached)

    def num_available_after(self, released: Iterable[int], reused: Iterable[int]) -> int:
        """Returns `num_available` after rows release pages (each page once for each row) and others are
        reused.
        """
        unused = {page for page, count in Counter(released).items() if self.ref_counts[page] == count}
        taken = sum(page in self.cached or page in unused for page in reused)
        return self.num_available + len(unused) - taken

    def counts(self) -> dict[str, int]:
        """Returns the fields of `EngineStats` about pages."""
        return dict(
            pages_used=sum(n > 0 for n in self.ref_counts),
            pages_shared=sum(n > 1 for n in self.ref_counts),
            pages_cached=len(self.cached),
            pages_free=len(self.free),
        )

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the pages cached under the first of these hashes, up to the first hash that is missing."""
        return list(takewhile(bool, (self.page_of_hash.get(page_hash, 0) for page_hash in hashes)))

    def reuse(self, pages: Iterable[int]) -> None:
        """Counts one more row that uses each of these pages."""
        for page in pages:
            self.ref_counts[page] += 1
            self.cached.pop(page, None)

    def touch(self, pages: Sequence[int]) -> None:
        self.reuse(pages)
        self.release(pages)

    def add(self, hashes: Iterable[bytes]) -> int:
        """Returns a new page, which is cached under each of these hashes that finds no page, or 0 if all find
        one.
        """
        new = [page_hash for page_hash in hashes if page_hash not in self.page_of_hash]
        if not new:
            return 0
        (page,) = self.allocate(1)
        for page_hash in new:
            self.cache(page, page_hash)
        self.release([page])
        return page

    def allocate(self, count: int) -> list[int]:
        """Returns pages for one row. Cached pages are evicted once no page is free. count: at most
        `num_available`.
        """
        pages = []
        for _ in range(count):
            if not self.free:
                self.evict(1)
            pages.append(self.free.pop())
            self.ref_counts[pages[-1]] = 1
        return pages

    def evict(self, count: int) -> list[tuple[int, list[bytes]]]:
        """Frees up to `count` cached pages, the least recently used first. Returns them with their hashes."""
        evicted: list[tuple[int, list[bytes]]] = []
        while self.cached and len(evicted) < count:
            page, _ = self.cached.popitem(last=False)
            evicted.append((page, self.hashes_of_page[page]))
            self.uncache(page)
            self.free.append(page)
        return evicted

    def release(self, pages: Sequence[int]) -> None:
        """Counts one row less that uses each of these consecutive pages."""
        for page in reversed(pages):  # a page is not found without those before it, so it is evicted first
            self.ref_counts[page] -= 1
            if not self.ref_counts[page] and page in self.hashes_of_page:
                self.cached[page] = None
            elif not self.ref_counts[page]:
                self.free.append(page)

    def cache(self, page: int, page_hash: bytes) -> None:
        """Lets the prefix cache find a page by a hash, unless it finds one of the same content already."""
        if page_hash not in self.page_of_hash:
            self.page_of_hash[page_hash] = page
            self.hashes_of_page.setdefault(page, []).append(page_hash)

    def uncache(self, page: int) -> None:
        for page_hash in self.hashes_of_page.pop(page, ()):
            del self.page_of_hash[page_hash]
        if page in self.cached:
            del self.cached[page]
            self.free.append(page)

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Removes the pages of these hashes from the prefix cache."""
        for page_hash in hashes:
            if page := self.page_of_hash.get(page_hash):
                self.uncache(page)

    def clear_cache(self) -> None:
        """Removes all pages from the prefix cache. Rows keep their pages."""
        self.free += self.cached
        self.cached.clear()
        self.page_of_hash.clear()
        self.hashes_of_page.clear()
