"""Which rows prefill, which decode, and in which pages: plain Python on the host, without arrays.

The engine executes the actions of `schedule` and `reserve_pages`, and reports what happened by
`record_prefill`, `record_decode` and `end`.
"""

from collections.abc import Sequence

from . import clients
from .clients import Clients
from .pages import PAGE_SIZE, PagePool, SnapshotPool, hash_pages, num_pages_for, usable_capacity
from .row import Action, PrefillChunk, Restore, Row, Swap

URGENT = 16  # a row whose priority is higher by this much preempts another row
# What stands for a program in a hash: any program, that of prompt log-probabilities; else its tokens.
_ANY_PROGRAM = 0
_LOGPROBS_PROGRAM = 1


class Scheduler:
    """Gives slots and pages to rows: first by priority, then by arrival. Clients share the slots (`clients`).

    Preemption: if a row needs pages and none is left, the youngest row is preempted, never an older one. Its
    pages are swapped out to host memory. So the oldest row with a slot always continues. A waiting row gets a
    slot only if its prompt and one more page for every row fit. It preempts another row only if it is much
    more urgent (`URGENT`). If several clients have rows, the rows that a client has beyond its share of the
    slots are preempted first, also to give a slot to a client with less than its share.

    Prefill: of a prompt of n tokens the first (n - 1) // chunk * chunk are prefilled in full chunks, the rest
    page by page. So n alone decides which program computes a token. The prefix cache reuses whole chunks, but
    never the last.

    Args:
        rows: number of slots.
        pages: of the pool, page 0 included.
        capacity: tokens of a row at most.
        chunk: tokens of a full chunk, a multiple of `PAGE_SIZE`.
        prefix_cache: whether rows share pages.
        snapshots: of recurrent states, at most; None: the model has none. They are taken at the end of full
            chunks, and cached pages are reused only up to one.
    """

    def __init__(  # noqa: PLR0913
        self, rows: int, pages: int, capacity: int, chunk: int, prefix_cache: bool = True,
        snapshots: int | None = None,
    ):  # fmt: skip
        self.capacity = capacity
        self.chunk = chunk
        self.prefix_cache = prefix_cache
        self.slots: list[Row | None] = [None] * rows
        self.clients = Clients(rows)
        self.pool = PagePool(pages)
        self.snapshots = None if snapshots is None else SnapshotPool(snapshots)
        self.arrivals = 0
        self.hits = 0
        self.preemptions = 0

    @property
    def rows_with_slots(self) -> list[Row]:
        """The oldest first."""
        return sorted(filter(None, self.slots), key=lambda row: row.arrival)

    @property
    def waiting(self) -> list[Row]:
        """Rows without a slot."""
        return self.clients.waiting

    @property
    def running(self) -> list[tuple[int, Row]]:
        """Rows that decode, with their slots."""
        return [(slot, row) for slot, row in enumerate(self.slots) if row and row.state == "running"]

    def counts(self) -> dict[str, int]:
        """The fields of `EngineStats` about rows and pages."""
        states = [row.state for row in self.rows_with_slots]
        return dict(
            running=states.count("running"),
            reading=states.count("prefilling"),
            waiting=len(self.waiting),
            hits=self.hits,
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
        row.cacheable = self.prefix_cache
        self.clients.add(row)

    def schedule(self) -> list[Action]:
        """Actions before the next decode steps: swaps, then at most one prefill chunk."""
        actions: list[Action] = []
        self._preempt_for_urgent(actions)
        self._preempt_for_share(actions)
        while (row := self.clients.next_row()) and row.is_swapped_out and self._admit(row):
            self._allocate(row, row.num_computed, actions)
            pages = row.pages[: num_pages_for(row.num_computed)]
            actions.append(Swap(row, self.slots.index(row), pages, False))
        prefilling = [row for row in self.rows_with_slots if not row.is_prefilled]
        ordered = self.clients.by_urgency(prefilling + self.clients.first_rows())
        if ordered and ordered[0].slot is None and not ordered[0].is_swapped_out:
            first = ordered[0]
            if self._admit(first) and first.pages and self.snapshots:
                snapshot = self.snapshots.find(self._reused_hashes(first)[len(first.pages) - 1])
                actions.append(Restore(first, self.slots.index(first), snapshot))
        for row in ordered:
            if row.slot is None:  # it waits, or was preempted just now
                continue
            chunk = self._next_chunk(row)
            if self._allocate(row, chunk.start + chunk.count, actions):
                return [*actions, chunk]
        return actions

    def record_prefill(self, chunk: PrefillChunk) -> int | None:
        """A chunk's program was called: the prefix cache may find its pages from now on. Returns the
        snapshot into which the row's recurrent states are to be copied; None: into none.
        """
        row = chunk.row
        if row.ended:
            return None
        self.clients.count_tokens(row, prefilled=chunk.width)
        row.num_computed = chunk.start + chunk.count
        for at in range(chunk.start // PAGE_SIZE, row.num_computed // PAGE_SIZE):
            if row.cacheable and row.exact:
                self.pool.cache(row.pages[at], row.page_hashes[at])
            if row.cacheable:
                self.pool.cache(row.pages[at], row.token_hashes[at])
        if not self.snapshots or not row.cacheable or row.num_computed % self.chunk:
            return None
        last = row.num_computed // PAGE_SIZE - 1
        return self.snapshots.add([row.token_hashes[last], *([row.page_hashes[last]] if row.exact else [])])

    def reserve_pages(self, steps: int) -> list[Action]:
        """Allocates pages for the next decode steps of running rows; rows for which none are left are
        preempted.
        """
        actions: list[Action] = []
        for row in self.rows_with_slots:
            if row.state == "running":  # an older row may have preempted it just now
                # The keys of the last sampled token are never written.
                left = max(0, len(row.ids) + row.max_new_tokens - 1 - row.num_computed)
                if not self._allocate(row, row.num_computed + min(steps, left), actions):
                    actions.append(self._preempt(row))
        return actions

    def record_decode(self, row: Row, tokens: int) -> None:
        """The row sampled so many tokens. As many keys were written, from the token sampled before on."""
        row.num_computed += tokens
        self.clients.count_tokens(row, decoded=tokens)

    def end(self, row: Row, answer_ids: Sequence[int] = (), valid: bool = True) -> None:
        """Frees the slot and the pages of a row in any state.

        Args:
            row: it ended, failed or was cancelled; a second call changes nothing.
            answer_ids: the tokens that it sampled, to cache their pages.
            valid: False if its numbers were not finite: none of its pages is found again.
        """
        if row.ended:
            return
        if not valid:
            for page in row.pages:
                self.pool.uncache(page)
            if self.snapshots:
                self.snapshots.remove([*row.page_hashes, *row.token_hashes])
        elif row.state == "running" and row.share_answers and row.cacheable:
            ids = [*row.ids, *answer_ids][: row.num_computed]
            hashes = hash_pages(row.salt, ids, [_ANY_PROGRAM] * (len(ids) // PAGE_SIZE))
            for at in range(len(row.ids) // PAGE_SIZE, len(hashes)):
                self.pool.cache(row.pages[at], hashes[at])
        if row.slot is None:
            self.clients.remove(row)
        else:
            self._free(row)
        row.ended = True

    def cache_pages_of_answer(self, salt: bytes, ids: Sequence[int], first: int) -> list[int]:
        """Pages for keys that another engine decoded, which prompts with `share_answers` find from now on.

        Args:
            salt: of the row.
            ids: the tokens from the first of the prompt on, in full pages.
            first: the first of these pages that is new.

        Returns:
            The pages, to be written before the next program; [] without enough pages.
        """
        hashes = hash_pages(salt, ids, [_ANY_PROGRAM] * (len(ids) // PAGE_SIZE))
        count = len(hashes) - first
        if not self.prefix_cache or count > self.pool.num_available:
            return []
        pages = self.pool.allocate(count)
        for page, page_hash in zip(pages, hashes[first:], strict=True):
            self.pool.cache(page, page_hash)
        self.pool.release(pages)
        return pages

    def forget_pages(self, row: Row) -> None:
        """Removes the pages of a row's prompt from the prefix cache: its numbers were not finite."""
        for page_hash in (*row.page_hashes, *row.token_hashes):
            if page := self.pool.page_of_hash.get(page_hash):
                self.pool.uncache(page)
        if self.snapshots:
            self.snapshots.remove([*row.page_hashes, *row.token_hashes])

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache, for new weights. Rows continue with their pages, which are not shared."""
        self.pool.clear_cache()
        if self.snapshots:
            self.snapshots.clear()
        for row in [*self.rows_with_slots, *self.waiting]:
            row.cacheable &= row.state == "waiting" and not row.is_swapped_out

    def _admit(self, row: Row) -> bool:
        """Gives a waiting row a slot and the cached pages of its prompt, if it fits."""
        hits = self._find_prefix(row)
        if not self._fits(row, hits):
            return False
        self.clients.take_slot(row)
        row.slot = self.slots.index(None)
        self.slots[row.slot] = row
        if not row.num_computed:
            row.pages = hits
            row.num_computed = PAGE_SIZE * len(hits)
            row.hits = row.num_computed
            self.hits += row.hits
        self.pool.reuse(hits)
        others = [other for other in self.rows_with_slots if other.client == row.client]
        earlier = [r for r in others + self.clients.client_of(row).waiting if r.arrival < row.arrival]
        if overtaken := [other for other in earlier if other.state != "running"]:
            self.clients.overtake(row, overtaken)
        return True

    def _fits(self, row: Row, hits: list[int], preempted: Sequence[Row] = ()) -> bool:
        """Whether, once some rows are preempted, there is a slot, and pages for the prompt beyond its cached
        ones, with one more for every row.
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
        hits = self._find_prefix(row)
        if self._fits(row, hits):
            return
        rows = self.clients.beyond_share(self.rows_with_slots)
        beyond = [other for other in rows if other.priority <= row.priority]
        for count in range(1, len(beyond) + 1):
            if self._fits(row, hits, beyond[:count]):
                actions += map(self._preempt, beyond[:count])
                return

    def _find_prefix(self, row: Row) -> list[int]:
        """The cached pages that a row's prompt begins with; with `share_answers` pages that any program
        wrote, if they are more.
        """
        if row.is_swapped_out or not self.prefix_cache:
            return []
        num_pages = len(row.ids) // PAGE_SIZE  # full ones
        in_full_chunks = self._tokens_in_full_chunks(row)
        end = len(row.ids)
        if row.logprobs_from is not None:  # that log-probability is computed after the token before it
            end = max(1, min(end, row.logprobs_from))
        max_hits = (end - 1) // PAGE_SIZE
        if not row.page_hashes:
            by_page = PAGE_SIZE if row.logprobs_from is None else _LOGPROBS_PROGRAM
            programs = [self.chunk if at * PAGE_SIZE < in_full_chunks else by_page for at in range(num_pages)]
            row.page_hashes = hash_pages(row.salt, row.ids, programs)
            row.token_hashes = hash_pages(row.salt, row.ids, [_ANY_PROGRAM] * num_pages)
        exact = self.pool.find(row.page_hashes[:max_hits])
        if len(exact) * PAGE_SIZE < in_full_chunks:
            exact = exact[: len(exact) * PAGE_SIZE // self.chunk * self.chunk // PAGE_SIZE]
        exact = self._up_to_snapshot(exact, row.page_hashes)
        by_tokens = self.pool.find(row.token_hashes[:max_hits]) if row.share_answers else []
        by_tokens = self._up_to_snapshot(by_tokens, row.token_hashes)
        row.exact = len(by_tokens) <= len(exact)
        return exact if row.exact else by_tokens

    def _up_to_snapshot(self, pages: list[int], hashes: Sequence[bytes]) -> list[int]:
        """The first of these pages, up to the last one at whose end there is a snapshot of the states."""
        if self.snapshots is None:
            return pages
        ends = (count for count in range(len(pages), 0, -1) if hashes[count - 1] in self.snapshots)
        return pages[: next(ends, 0)]

    def _reused_hashes(self, row: Row) -> Sequence[bytes]:
        """The hashes by which a row's cached pages were found."""
        return row.page_hashes if row.exact else row.token_hashes

    def _tokens_in_full_chunks(self, row: Row) -> int:
        """Tokens of the prompt that are prefilled in full chunks."""
        return (len(row.ids) - 1) // self.chunk * self.chunk if row.logprobs_from is None else 0

    def _next_chunk(self, row: Row) -> PrefillChunk:
        """The next prefill chunk of a row. If cached pages end within a full chunk, its rest goes page by
        page.
        """
        start = row.num_computed
        end = len(row.ids)
        is_full = start < self._tokens_in_full_chunks(row) and start % self.chunk == 0
        width = self.chunk if is_full else PAGE_SIZE
        count = min(width, end - start)
        return PrefillChunk(row, start, count, is_full, start + count == end, width)

    def _allocate(self, row: Row, tokens: int, actions: list[Action]) -> bool:
        """Gives a row pages for so many tokens, and preempts younger rows for them; False if older rows have
        all others.
        """
        missing = num_pages_for(tokens) - len(row.pages)
        while self.pool.num_available < missing:
            beyond = self.clients.beyond_share(self.rows_with_slots)
            last = beyond[0] if beyond else self.rows_with_slots[-1]
            if last is row:
                return False
            actions.append(self._preempt(last))
        row.pages += self.pool.allocate(missing)
        return True

    def _preempt(self, row: Row) -> Swap:
        """Frees a row's slot and pages, and queues it; the swap saves them first."""
        swap = Swap(row, self.slots.index(row), row.pages[: num_pages_for(row.num_computed)], True)
        self._free(row)
        self.clients.add(row, preempted=True)
        self.preemptions += 1
        return swap

    def _free(self, row: Row) -> None:
        self.slots[self.slots.index(row)] = None
        row.slot = None
        self.clients.free_slot(row)
        self.pool.release(row.pages)
        row.pages = []
