"""The scheduler: it chooses the rows that prefill, the rows that decode, and their pages. It is plain Python
on the host, without arrays.

The engine executes the actions of `schedule` and `reserve_pages`. It reports what happened by
`record_prefill`, `record_decode`, `record_read` and `end`.
"""

from collections.abc import Sequence

from . import clients
from .clients import Clients
from .host_tier import COPIED_PAGES, HostTier
from .pages import PAGE_SIZE, PagePool, hash_pages, num_pages_for, usable_capacity
from .prefix_cache import ANY_PROGRAM, PrefixCache
from .row import Action, LoadPages, PrefillChunk, ReadPages, Row, Swap, TakeSnapshot

URGENT = 16  # a row whose priority is higher by this much preempts another row


class Scheduler:
    """Gives slots and pages to rows: first by priority, then by arrival. Clients share the slots (`clients`).

    Preemption: if a row needs pages and none is left, the youngest row is preempted, never an older one. Its
    pages are swapped out to host memory. So the oldest row with a slot always continues. A waiting row gets a
    slot only if its prompt and one more page for every row fit. It preempts another row only if it is much
    more urgent (`URGENT`). If several clients have rows, the rows that a client has beyond its share of the
    slots are preempted first, also to give a slot to a client with less than its share.

    Time slices: while a client without a slot waits, the row that has had its slot for the longest time is
    preempted. A new row is preempted after one time slice. A row that was preempted before is preempted after
    as many time slices as there are slots. So a new client waits for a time slice or less, and if all answers
    are long, about one row in each time slice is swapped out and in. No row is preempted for this while the
    rows that are swapped out fill as many pages as the device has.

    Prefill: if a prompt has n tokens, the first (n - 1) // chunk * chunk are prefilled in full chunks, and
    the rest page by page. So n alone decides which program computes a token. The prefix cache reuses whole
    chunks, but never the last.

    Host tier: pages that the prefix cache evicts are saved in host memory. A row loads the pages of its
    prompt, a few in an action, when it would prefill them. If the model has recurrent states, its slot gets
    the states at the end of these pages before. They count as prefilled: rows are preempted for
    them only as they are for a prompt. A row whose next pages are in files waits until they are in host
    memory. It does not wait in the queue, so other waiting rows continue.

    Args:
        rows: the number of slots.
        pages: the number of pages of the pool, page 0 included.
        capacity: the most tokens of a row.
        chunk: the tokens of a full chunk, a multiple of `PAGE_SIZE`.
        prefix_cache: True: rows share pages.
        host: the prefix cache beyond the device.
        snapshots: snapshots of recurrent states on the device, if the model has these. They are taken at the
            end of some full chunks, and cached pages are reused only up to one.
        time_slice: seconds. 0: there are no time slices.
    """

    def __init__(
        self, rows: int, pages: int, capacity: int, chunk: int, prefix_cache: bool = True,
        host: HostTier | None = None, snapshots: PagePool | None = None, time_slice: float = 0.0,
    ):  # fmt: skip
        self.capacity = capacity
        self.time_slice = time_slice
        self._now = 0.0
        self.chunk = chunk
        self.prefix_cache = prefix_cache
        self.slots: list[Row | None] = [None] * rows
        self.clients = Clients(rows)
        self.pool = PagePool(pages)
        self.host = host
        self.prefixes = PrefixCache(self.pool, host, chunk, prefix_cache, snapshots)
        self.waiting_for_files: dict[Row, None] = {}
        self.arrivals = 0
        self.hits = 0
        self.host_hits = 0
        self.file_hits = 0
        self.preemptions = 0
        self.resets = 0  # of the prefix cache

    @property
    def rows_with_slots(self) -> list[Row]:
        """The oldest first."""
        return sorted(filter(None, self.slots), key=lambda row: row.arrival)

    @property
    def waiting(self) -> list[Row]:
        return [*self.clients.waiting, *self.waiting_for_files]

    @property
    def has_waiting(self) -> bool:
        return bool(self.waiting_for_files or self.clients.first_rows())

    @property
    def running(self) -> list[Row]:
        """Rows that decode, in the order of their slots."""
        return [row for row in self.slots if row and row.state == "running"]

    def counts(self) -> dict[str, int]:
        """Returns the fields of `EngineStats` about rows and pages."""
        states = [row.state for row in self.rows_with_slots]
        return dict(
            running=states.count("running"),
            prefilling=states.count("prefilling"),
            waiting=len(self.waiting),
            hits=self.hits,
            host_hits=self.host_hits,
            file_hits=self.file_hits,
            host_pages=len(self.host.pool.hashes_of_page) if self.host else 0,
            preemptions=self.preemptions,
            **self.pool.counts(),
        )

    @property
    def usable_capacity(self) -> int:
        """Tokens that one row can hold if it is alone."""
        return usable_capacity(self.capacity, self.pool.size)

    def submit(self, row: Row) -> None:
        """Queues a row that `usable_capacity` is enough for."""
        self.arrivals += 1
        row.arrival = self.arrivals
        row.cacheable = self._may_share(row)
        self.clients.add(row)

    def schedule(self, now: float = 0.0) -> list[Action]:
        """Returns actions before the next decode steps: swaps, then at most one prefill chunk or `LoadPages`.
        now: seconds at which the step began.
        """
        actions: list[Action] = []
        self._now = now
        self._preempt_for_urgent(actions)
        self._preempt_for_share(actions)
        newest = self._preempt_over_time(actions) if self.time_slice else []
        while (row := self.clients.next_row()) and row.is_swapped_out and self._admit(row, actions):
            pass
        prefilling = [row for row in self.rows_with_slots if not row.is_prefilled]
        ordered = newest + self.clients.by_urgency(prefilling + self.clients.first_rows())
        if ordered and ordered[0].slot is None and not ordered[0].is_swapped_out:
            self._admit(ordered[0], actions)
        for row in ordered:
            if row.slot is None:  # it waits, or was preempted just now
                continue
            if row.host_pages:
                if load := self._load(row, actions):
                    return [*actions, load]
                continue
            chunk = self.next_chunk(row)
            if self._allocate(row, chunk.start + chunk.count, actions):
                return [*actions, chunk]
        return actions

    def record_prefill(self, chunk: PrefillChunk) -> TakeSnapshot | None:
        """Records that a chunk's program was called: the prefix cache may find its pages from now on. Returns
        the action that copies the row's recurrent states into a snapshot. None: no snapshot is taken.
        """
        row = chunk.row
        if row.ended:
            return None
        self.clients.count_tokens(row, prefilled=chunk.width)
        row.num_computed = chunk.start + chunk.count
        self.prefixes.cache(row, chunk.start)
        return self.prefixes.take_snapshot(row)

    def record_read(self, read: ReadPages, count: int) -> None:
        """Records that reading from files ended, and that its first `count` pages are in host memory."""
        if self.host:
            self.host.record_read(read, count)
        self.stop_waiting_for_files(read.row)

    def stop_waiting_for_files(self, row: Row) -> None:
        """Makes a row that waits for files wait for a slot again."""
        if row in self.waiting_for_files:
            del self.waiting_for_files[row]
            self.clients.add(row)

    def reserve_pages(self, steps: int, extra: int = 0) -> list[Action]:
        """Allocates pages for the next decode steps of running rows. If no page is left for a row, the row is
        preempted. extra: slots after these to which a draft head writes.
        """
        actions: list[Action] = []
        for row in self.rows_with_slots:
            if row.state == "running":  # an older row may have preempted it just now
                # The keys of the last sampled token are never written.
                left = max(0, len(row.ids) + row.max_tokens - 1 - row.num_computed)
                wanted = row.num_computed + min(steps, left)
                if extra:
                    wanted = max(wanted, min(wanted + extra, self.usable_capacity))
                if not self._allocate(row, wanted, actions):
                    actions.append(self._preempt(row))
        return actions

    def record_decode(self, row: Row, tokens: int) -> None:
        """Records that the row sampled `tokens` tokens. The same number of keys was written, from the token
        sampled before on.
        """
        row.num_computed += tokens
        self.clients.count_tokens(row, decoded=tokens)

    def end(self, row: Row, answer_ids: Sequence[int] = (), valid: bool = True) -> None:
        """Frees the slot and the pages of a row in any state. A second call changes nothing. answer_ids: the
        tokens that it sampled, so that their pages are cached. valid: False if its numbers were not finite:
        none of its pages is found again.
        """
        if row.ended:
            return
        if not valid:
            self.prefixes.uncache(row)
        elif row.state == "running" and row.share_answers and row.cacheable:
            ids = [*row.ids, *answer_ids][: row.num_computed]
            hashes = hash_pages(row.page_salt, ids, [ANY_PROGRAM] * (len(ids) // PAGE_SIZE))
            for at in range(len(row.ids) // PAGE_SIZE, len(hashes)):
                self.pool.cache(row.pages[at], hashes[at])
        self.withdraw(row)
        row.ended = True

    def set_moving(self, row: Row, moving: bool) -> None:
        """Sets whether a row's pages are on the way from or to another engine. A moving row does not
        decode."""
        row.moving = moving

    def withdraw(self, row: Row) -> None:
        """Takes back a row in any state, with its slot and its pages. It may be submitted again."""
        self.prefixes.release_host_pages(row)
        if row in self.waiting_for_files:
            del self.waiting_for_files[row]
        elif row.slot is None:
            self.clients.remove(row)
        else:
            self._free(row)

    def restart(self, row: Row, ids: Sequence[int]) -> None:
        """Runs `Row.restart` for a row, which waits again, without pages."""
        self.withdraw(row)
        row.restart(ids)
        row.page_hashes = row.token_hashes = ()
        row.cacheable = self._may_share(row)
        self.clients.add(row, preempted=True)
        self.preemptions += 1

    def _may_share(self, row: Row) -> bool:
        """Returns True if other rows may find the row's pages."""
        return self.prefix_cache and not row.factors

    def lend_pages(self, row: Row, tokens: int) -> list[Action]:
        """Gives pages for this number of tokens to a row that needs no slot, and preempts rows for them."""
        actions: list[Action] = []
        self._allocate(row, tokens, actions)
        return actions

    def cache_pages_of_answer(
        self, salt: bytes, ids: Sequence[int], first: int
    ) -> tuple[list[Action], list[int]]:
        """Caches pages for keys that another engine decoded, which prompts with `share_answers` find from now
        on.

        Args:
            ids: the tokens from the first token of the prompt on, in full pages. The tokens from `first` on
                are new.

        Returns:
            Actions, and the pages. Write the pages after the actions and before the next program. [] if there
            are not enough pages.
        """
        hashes = hash_pages(salt, ids, [ANY_PROGRAM] * (len(ids) // PAGE_SIZE))
        count = len(hashes) - first
        actions: list[Action] = []
        if not self.prefix_cache or count > self.pool.num_available:
            return actions, []
        pages = self._take_pages(count, actions)
        for page, page_hash in zip(pages, hashes[first:], strict=True):
            self.pool.cache(page, page_hash)
        self.pool.release(pages)
        return actions, pages

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache, for new weights. Rows continue with their pages, which are not shared."""
        self.resets += 1
        self.prefixes.clear()
        for row in [*self.rows_with_slots, *self.waiting]:
            row.cacheable &= row.state == "waiting" and not row.is_swapped_out

    def forget_prompt(self, row: Row) -> None:
        """Records that the row's adapter is replaced: the row searches for pages again, or continues with its
        own pages, which are not shared.
        """
        self.prefixes.release_host_pages(row)
        row.page_hashes = row.token_hashes = ()
        row.cacheable &= row.state == "waiting" and not row.is_swapped_out

    def preempt_all(self) -> list[Action]:
        """Preempts the rows that have slots, and empties the prefix cache: no page is used any more."""
        actions: list[Action] = [self._preempt(row) for row in self.rows_with_slots]
        self.reset_prefix_cache()
        return actions

    def _admit(self, row: Row, actions: list[Action]) -> bool:
        """Gives a waiting row a slot and its swapped-out pages, or the cached ones of its prompt, if it fits,
        and none of these pages are in files. If some are, it waits for them first.
        """
        if self._begin_read(row, actions):
            return False
        found = self.prefixes.find(row)
        hits = found.pages
        if not self._fits(row, hits):
            return False
        is_swapped_out = row.is_swapped_out
        self.clients.take_slot(row)
        row.slot_time = self._now
        row.slot = self.slots.index(None)
        self.slots[row.slot] = row
        if not row.num_computed:
            row.pages = hits
            row.num_computed = PAGE_SIZE * len(hits)
            row.hits = row.num_computed
            self.hits += row.hits
            self.prefixes.keep_host_pages(row, found.host_pages)
        if restore := self.prefixes.restore(row, found.total):
            actions.append(restore)
        self.pool.reuse(hits)
        others = [other for other in self.rows_with_slots if other.client == row.client]
        earlier = [r for r in others + self.clients.client_of(row).waiting if r.arrival < row.arrival]
        if overtaken := [other for other in earlier if other.state != "running"]:
            self.clients.overtake(row, overtaken)
        if is_swapped_out:
            self._allocate(row, row.num_computed, actions)
            actions.append(self.swap(row, False))
        return True

    def _fits(self, row: Row, hits: list[int], preempted: Sequence[Row] = ()) -> bool:
        """Returns True if the row fits once some rows are preempted. It needs a slot, pages for the prompt
        beyond its cached pages, and one more page for every row.
        """
        released = (page for other in preempted for page in other.pages)
        available = self.pool.num_available_after(released, hits)
        stay = [other for other in self.rows_with_slots if other not in preempted]
        others = sum(max(0, other.pages_to_continue - len(other.pages)) for other in stay)
        has_slot = bool(None in self.slots or preempted)
        return has_slot and available >= others + row.pages_to_continue - len(hits)

    def _preempt_for_urgent(self, actions: list[Action]) -> None:
        """Preempts the row of the last rank, if no slot is free and a much more urgent row waits."""
        preemptible = [row for row in self.rows_with_slots if row.overtaken < clients.STARVATION_LIMIT]
        first = self.clients.next_row()
        if first and preemptible and None not in self.slots:
            last = max(preemptible, key=lambda row: row.rank)
            if first.priority - last.priority >= URGENT:
                actions.append(self._preempt(last))

    def _preempt_for_share(self, actions: list[Action]) -> None:
        """Preempts rows that clients have beyond their share of the slots, if the next waiting row is of a
        client with less than its share, and fits then.
        """
        row = self.clients.next_row()
        if row is None or self.clients.client_of(row).slots >= self.clients.share:
            return
        hits = self.prefixes.find(row).pages
        if self._fits(row, hits):
            return
        rows = self.clients.beyond_share(self.rows_with_slots)
        beyond = [other for other in rows if other.priority <= row.priority]
        for count in range(1, len(beyond) + 1):
            if self._fits(row, hits, beyond[:count]):
                actions += map(self._preempt, beyond[:count])
                return

    def _preempt_over_time(self, actions: list[Action]) -> list[Row]:
        """Gives a slot to the next new row, and to the next preempted one, whose clients have none, in place
        of rows that have had theirs for the longest time. Returns the new row, if it is to prefill next.
        """
        waiting = self.clients.first_rows()
        priority = max((row.priority for row in waiting), default=0)
        waiting = [r for r in waiting if not self.clients.client_of(r).slots and r.priority == priority]
        new = self.clients.by_urgency([row for row in waiting if row.is_new])[:1]
        preempted = self.clients.by_urgency([row for row in waiting if not row.is_new])[:1]
        for row in new + preempted:
            over = self._over_time(row, self.time_slice * (1 if row in new else len(self.slots)))
            hits = self.prefixes.find(row).pages if over else []
            if not over or self._fits(row, hits) or not self._fits(row, hits, over):
                continue
            groups = [*([other] for other in over), *(over[:n] for n in range(2, len(over) + 1))]
            group = next(group for group in groups if self._fits(row, hits, group))
            if not self._begin_read(row, actions):
                actions += map(self._preempt, group)
                self._admit(row, actions)
        return [row for row in new if row.state == "prefilling"]

    def _over_time(self, row: Row, seconds: float) -> list[Row]:
        """Returns the rows that may be preempted for a row as they have had their slots for so long, the
        longest first.
        """
        over = [other for other in self.rows_with_slots if other.slot_time + seconds <= self._now]
        over = [other for other in over if other.priority <= row.priority and not other.moving]
        others = (other for other in self.clients.waiting if other is not row)
        if not over or sum(num_pages_for(other.num_computed) for other in others) >= self.pool.size:
            return []
        return sorted(over, key=lambda other: other.slot_time)

    def _begin_read(self, row: Row, actions: list[Action]) -> bool:
        """Lets a waiting row wait for the pages of its prompt that are in files, if there are any, and no
        more rows than there are slots wait for theirs.
        """
        is_full = len(self.waiting_for_files) >= len(self.slots)
        if self.host is None or row.is_swapped_out or row.has_read or is_full:
            return False
        row.has_read = True
        if read := self.host.begin_read(row, self.prefixes.find(row, in_files=True)):
            self.clients.remove(row)
            self.waiting_for_files[row] = None
            actions.append(read)
        return read is not None

    def _load(self, row: Row, actions: list[Action]) -> LoadPages | None:
        """Copies the next pages of a row from host memory, if pages are left for them."""
        host_pages = row.host_pages[:COPIED_PAGES]
        start = row.num_computed
        end = start + PAGE_SIZE * len(host_pages)
        if not self.host or not self._allocate(row, end, actions):
            return None
        pages = row.pages[start // PAGE_SIZE : end // PAGE_SIZE]
        row.host_pages = row.host_pages[COPIED_PAGES:]
        row.num_computed = end
        row.hits += end - start
        self.hits += end - start
        from_files = PAGE_SIZE * self.host.load(host_pages)
        self.file_hits += from_files
        self.host_hits += end - start - from_files
        self.clients.count_tokens(row, prefilled=PAGE_SIZE)
        self.prefixes.cache(row, start)
        return LoadPages(row, pages, host_pages, PAGE_SIZE)

    def next_chunk(self, row: Row) -> PrefillChunk:
        """Returns the next prefill chunk of a row. If cached pages end within a full chunk, its rest goes
        page by page.
        """
        start = row.num_computed
        end = len(row.ids)
        is_full = start < self.prefixes.tokens_in_full_chunks(row) and start % self.chunk == 0
        width = self.chunk if is_full else PAGE_SIZE
        count = min(width, end - start)
        return PrefillChunk(row, start, count, is_full, start + count == end, width)

    def _allocate(self, row: Row, tokens: int, actions: list[Action]) -> bool:
        """Gives a row pages for this number of tokens, and preempts younger rows for them. Returns False if
        older rows have all other pages.
        """
        missing = num_pages_for(tokens) - len(row.pages)
        while self.pool.num_available < missing:
            beyond = self.clients.beyond_share(self.rows_with_slots)
            last = beyond[0] if beyond else self.rows_with_slots[-1]
            if last is row:
                return False
            actions.append(self._preempt(last))
        row.pages += self._take_pages(missing, actions)
        return True

    def _take_pages(self, count: int, actions: list[Action]) -> list[int]:
        """Returns pages that are available. The pages evicted for them are saved."""
        if self.host and (short := count - len(self.pool.free)) > 0:
            actions += self.host.save(self.pool.evict(max(short, COPIED_PAGES)))
        return self.pool.allocate(count)

    def _preempt(self, row: Row) -> Swap:
        """Frees a row's slot and pages, and queues it. The swap saves them first."""
        swap = self.swap(row, True)
        self._free(row)
        self.clients.add(row, preempted=True)
        self.preemptions += 1
        return swap

    def swap(self, row: Row, out: bool) -> Swap:
        """Returns the action that moves the computed pages of a row with a slot."""
        assert row.slot is not None
        return Swap(row, row.slot, row.pages[: num_pages_for(row.num_computed)], out)

    def _free(self, row: Row) -> None:
        self.slots[self.slots.index(row)] = None
        row.slot = None
        self.clients.free_slot(row)
        self.pool.release(row.pages)
        row.pages = []
