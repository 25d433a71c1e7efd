"""The prefix cache: the pages that a prompt begins with, on the device, in host memory and in files. Plain
Python, without arrays.

A page is found only by rows whose own program would write the same bits: its hash covers the program. The
length of a prompt alone decides which program computes a token, so whole chunks are reused. Prompts with
log-probabilities have another program, and so other pages. Models with linear attention reuse pages up to a
snapshot of the states, taken at the end of a full chunk. Decoding takes none. With a host tier, a snapshot
that the device replaces is saved in host memory.
"""

from collections.abc import Sequence
from itertools import chain, starmap

from .host_tier import FoundPrefix, HostTier
from .pages import PAGE_SIZE, PagePool, hash_pages
from .row import Restore, Row, SaveSnapshot, TakeSnapshot

# What stands for a program in a hash: any program, that of prompt log-probabilities; else its tokens.
ANY_PROGRAM = 0
_LOGPROBS_PROGRAM = 1


class PrefixCache:
    """Finds pages of prompts on the device and, with a host tier, in host memory and files. It takes the
    arguments of `Scheduler`. enabled: False: it finds nothing.
    """

    def __init__(
        self, pool: PagePool, host: HostTier | None, chunk: int, enabled: bool, snapshots: PagePool | None
    ):
        self._pool = pool
        self._host = host
        self._chunk = chunk
        self._enabled = enabled
        self._snapshots = snapshots

    def find(self, row: Row, in_files: bool = False) -> FoundPrefix:
        """Returns the cached pages that a row's prompt begins with. With `share_answers` it returns pages
        that any program wrote, if they are more. in_files: True: pages in files are included.
        """
        none = FoundPrefix([], [], [], [])
        if row.is_swapped_out or row.factors or not self._enabled:
            return none
        num_pages = len(row.ids) // PAGE_SIZE  # full ones
        in_full_chunks = self.tokens_in_full_chunks(row)
        end = len(row.ids)
        if row.logprobs_from is not None:  # that log-probability is computed after the token before it
            end = max(1, min(end, row.logprobs_from))
        max_hits = (end - 1) // PAGE_SIZE
        if not row.page_hashes:
            by_page = PAGE_SIZE if row.logprobs_from is None else _LOGPROBS_PROGRAM
            num_full = min(num_pages, in_full_chunks // PAGE_SIZE)
            programs = [self._chunk] * num_full + [by_page] * (num_pages - num_full)
            row.page_hashes = hash_pages(row.page_salt, row.ids, programs)
            row.token_hashes = hash_pages(row.page_salt, row.ids, [ANY_PROGRAM] * num_pages)
        exact = self._find(row, row.page_hashes[:max_hits], in_files)
        if exact.total * PAGE_SIZE < in_full_chunks:
            exact = exact.first(exact.total * PAGE_SIZE // self._chunk * self._chunk // PAGE_SIZE)
        by_tokens = self._find(row, row.token_hashes[:max_hits], in_files) if row.share_answers else none
        row.shared = PAGE_SIZE * max(exact.total, by_tokens.total)
        exact = self._up_to_snapshot(row, exact, row.page_hashes, in_files)
        by_tokens = self._up_to_snapshot(row, by_tokens, row.token_hashes, in_files)
        row.exact = by_tokens.total <= exact.total
        return exact if row.exact else by_tokens

    def cache(self, row: Row, start: int) -> None:
        """Lets the prefix cache find the pages of a prompt from this token on."""
        for at in range(start // PAGE_SIZE, row.num_computed // PAGE_SIZE):
            if row.cacheable and row.exact:
                self._pool.cache(row.pages[at], row.page_hashes[at])
            if row.cacheable:
                self._pool.cache(row.pages[at], row.token_hashes[at])

    def take_snapshot(self, row: Row) -> TakeSnapshot | None:
        """Returns the action that copies a row's recurrent states into a snapshot, as they are now at the end
        of a chunk. None: no snapshot is taken.
        """
        snapshots = self._snapshots
        if snapshots is None or not row.cacheable or row.num_computed % self._chunk:
            return None
        if row.num_computed // self._chunk not in self._snapshot_ends(row, snapshots.size - 1):
            return None
        last = row.num_computed // PAGE_SIZE - 1
        hashes = [*([row.page_hashes[last]] if row.exact else []), row.token_hashes[last]]
        if all(page_hash in snapshots.page_of_hash for page_hash in hashes):
            return None
        saved = [] if snapshots.free else self.save_snapshots(1)
        return TakeSnapshot(snapshots.add(hashes), saved[0] if saved else None)

    def save_snapshots(self, count: int) -> list[SaveSnapshot]:
        """Frees up to `count` snapshots on the device, the least recently used first. Returns the actions
        that save them in host memory.
        """
        if self._snapshots is None or self._host is None:
            return []
        evicted = self._snapshots.evict(count)
        return list(filter(None, starmap(self._host.save_snapshot, evicted)))

    def restore(self, row: Row, pages: int) -> Restore | None:
        """Returns the action that copies the snapshot at the end of these pages of a row's prompt, which were
        found just now, into the row's slot. None: there is none.
        """
        pools = self._snapshot_pools
        if not pools or not pages:
            return None
        page_hash = (row.page_hashes if row.exact else row.token_hashes)[pages - 1]
        pool = next(pool for pool in pools if page_hash in pool.page_of_hash)
        (snapshot,) = pool.find([page_hash])
        pool.touch([snapshot])
        assert row.slot is not None
        return Restore(row, row.slot, snapshot, pool is not self._snapshots)

    def uncache(self, row: Row) -> None:
        """Lets no tier find the pages of a row and of its prompt."""
        of_pages = chain(*(self._pool.hashes_of_page.get(page, ()) for page in row.pages))
        hashes = {*of_pages, *row.page_hashes, *row.token_hashes}
        self._pool.remove(hashes)
        if self._host:
            self._host.remove(hashes)
        if self._snapshots:
            self._snapshots.remove(hashes)

    def keep_host_pages(self, row: Row, pages: list[int]) -> None:
        """Keeps pages in host memory until the row loads them."""
        self.release_host_pages(row)
        if self._host:
            self._host.pool.reuse(pages)
            row.host_pages = pages

    def release_host_pages(self, row: Row) -> None:
        """Releases the row's pages in host memory, which it will not load."""
        if self._host:
            self._host.pool.release(row.host_pages)
            row.host_pages = []

    def clear(self) -> None:
        """Empties all tiers except files, whose names change with the weights."""
        self._pool.clear_cache()
        if self._host:
            self._host.clear()
        if self._snapshots:
            self._snapshots.clear_cache()

    def tokens_in_full_chunks(self, row: Row) -> int:
        """Returns tokens of the prompt that are prefilled in full chunks."""
        return (len(row.ids) - 1) // self._chunk * self._chunk if row.logprobs_from is None else 0

    def _snapshot_ends(self, row: Row, most: int) -> set[int]:
        """Returns the chunks at whose ends there is a snapshot of a prompt. They are at most `most`, so that
        snapshots do not replace each other:

        - the last full chunk,
        - the chunk in which the prompt leaves the pages of earlier prompts,
        - chunks before it at distances that grow by a factor.
        """
        chunks = (len(row.ids) - 1) // self._chunk
        others = max(1, most - 2)
        factor = 1 + int(chunks ** (1 / others))
        return {chunks, row.shared // self._chunk, *(factor**i for i in range(others))}

    def _up_to_snapshot(
        self, row: Row, found: FoundPrefix, hashes: Sequence[bytes], in_files: bool
    ) -> FoundPrefix:
        """Returns the first of these pages, up to the last one at whose end there is a snapshot of the
        states.
        """
        pools = self._snapshot_pools
        if not pools:
            return found
        for count in range(found.total, 0, -1):
            page_hash = hashes[count - 1]
            if any(page_hash in pool.page_of_hash for pool in pools):
                return found.first(count)
            if in_files and self._host:
                names = page_hash, row.page_hashes[count - 1]
                if snapshot := self._host.find_snapshot(names):
                    return found.first(count)._replace(snapshot=snapshot)
        return found.first(0)

    @property
    def _snapshot_pools(self) -> list[PagePool]:
        """The snapshots on the device and then in host memory. []: the model has no recurrent states."""
        if self._snapshots is None:
            return []
        return [self._snapshots, self._host.snapshots] if self._host else [self._snapshots]

    def _find(self, row: Row, hashes: Sequence[bytes], in_files: bool) -> FoundPrefix:
        """Returns the first cached pages of these hashes, which are all of one kind."""
        pages = self._pool.find(hashes)
        if self._host is None:
            return FoundPrefix(pages, [], [], [])
        others = row.page_hashes[len(pages) : len(hashes)]  # the bits of these serve for both kinds
        return self._host.find(hashes[len(pages) :], others, in_files)._replace(pages=pages)
