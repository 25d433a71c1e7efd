"""Who reads, who decodes, and in which pages: books on the host, without arrays. The engine carries out what
`read_next` and `grow` say, and says what came of it (`dispatched`, `decoded`, `end`).

A page holds the keys of `PAGE` tokens that follow each other. It is free, held by rows, or cached:
published and held by nobody, until it is given up, the least recently used first. Page 0 is a bin for what
rows without tokens write. A full page is published under a digest of all tokens up to its end and of the
programs that read them, so whoever finds it gets the bits that it would have made.
"""

import dataclasses
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Literal, NamedTuple

from . import clients
from .clients import Clients

PAGE = 64  # tokens: the key block of the kernels
URGENT = 16  # whose priority is so much higher gets the slot of another row
_ANY_FORM = 0
_SCORED = 1  # in digests: pages that any program may have written; that of scoring has


def chain(salt: bytes, ids: Sequence[int], forms: Sequence[int]) -> list[bytes]:
    """A digest for each of the full pages in `ids` that has a form: of the digest before, form and tokens."""
    digests = [sha256(salt).digest()]
    for start, form in zip(range(0, len(ids), PAGE), forms, strict=False):
        page = array("q", [form, *ids[start : start + PAGE]])
        digests.append(sha256(digests[-1] + page.tobytes()).digest())
    return digests[1:]


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


@dataclasses.dataclass(eq=False)
class Row:
    """One answer, as the scheduler sees it.

    Attributes:
        ids: the prompt.
        most: tokens that it may choose.
        priority: higher goes first.
        later: answers of one request beyond the first few wait behind the first ones of others.
        salt: pages are shared only between rows of equal salt.
        client: whose row it is.
        scored: where not None, the prompt is read by the program that says how likely its tokens are: from
            this one on all are read, and pages are shared only with such rows.
        share_answers: takes pages whatever program wrote them, and publishes those that decoding wrote.
        pages: in order.
        held: tokens whose keys are in its pages, or away.
        hits: tokens of the prompt that came from shared pages.
        arrival, passed: its number; later rows of its client that got a slot before it.
        exact: its keys have the bits that they have without company.
        digests, loose: of the prompt's full pages; the same whatever program wrote them.
    """

    ids: Sequence[int]
    most: int
    priority: int = 0
    later: int = 0
    salt: bytes = b""
    client: str = ""
    scored: int | None = None
    share_answers: bool = False
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    held: int = 0
    hits: int = 0
    arrival: int = 0
    passed: int = 0
    exact: bool = True
    publishes: bool = True
    ended: bool = False
    digests: Sequence[bytes] = ()
    loose: Sequence[bytes] = ()

    @property
    def read(self) -> bool:
        """The whole prompt was read: it runs when it has a slot."""
        return self.held >= len(self.ids)

    @property
    def away(self) -> bool:
        """Its pages are in host memory."""
        return self.slot is None and self.held > 0 and not self.ended

    @property
    def state(self) -> Literal["waiting", "reading", "running", "ended"]:
        if self.ended:
            return "ended"
        return "waiting" if self.slot is None else "running" if self.read else "reading"

    @property
    def needed(self) -> int:
        """Pages at most."""
        return pages_for(len(self.ids) + self.most)

    @property
    def soon(self) -> int:
        """Pages that it wants to go on with: those of its prompt, or of what it holds, and another."""
        return min(self.needed, pages_for(max(len(self.ids), self.held)) + 1)

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Among the rows of its client; lower goes first."""
        if self.passed >= clients.PATIENCE:
            return False, 0, 0, self.arrival
        return True, -self.priority, self.later, self.arrival


class Move(NamedTuple):
    """Copy these pages, and the slot's state if the row was running, to host memory: then they are free. Or
    copy what went out into these pages and this slot: the row goes on where it was.
    """

    row: Row
    slot: int
    pages: list[int]
    out: bool


class Read(NamedTuple):
    """Read ids[start : start + count] of a row; then say `dispatched`."""

    row: Row
    start: int
    count: int  # type: ignore[assignment]  # a tuple has a method of this name
    whole: bool  # by the program of whole chunks, else by that of single pages
    last: bool  # behind it the first token is chosen, and the row runs
    width: int  # tokens of that program


Action = Move | Read


class Scheduler:
    """Gives slots and pages to rows. First come first served within a priority and a client, higher ones
    first; clients take turns (`clients`).

    The older row wins: who lacks pages sends the youngest row's to host memory, never an older one's. So the
    oldest row with a slot always goes on, and a row that came back makes way for older ones only. No row is
    preempted for one that enters, unless that is much more urgent: it waits until there is room for its
    prompt and a page more for each. Where several clients have rows, those that a client has beyond its share
    of the slots are preempted first, and also for a client that has less than its share.

    A prompt of n tokens is read in whole chunks up to (n - 1) // chunk * chunk, then page by page: which
    program reads a token follows from n alone. Shared pages cover whole pieces of this cut, never the last.

    Args:
        rows: slots.
        pages: of the pool, page 0 included.
        capacity: tokens of a row at most.
        chunk: tokens of a whole chunk, a multiple of `PAGE`.
        prefix_cache: whether pages are published and found.
    """

    def __init__(self, rows: int, pages: int, capacity: int, chunk: int, prefix_cache: bool = True):
        self.pages = pages
        self.capacity = capacity
        self.chunk = chunk
        self.prefix_cache = prefix_cache
        self.slots: list[Row | None] = [None] * rows
        self.clients = Clients(rows)
        self.holders = [0] * pages
        self.free = list(range(pages - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.published: dict[bytes, int] = {}
        self.names: dict[int, list[bytes]] = {}  # of a page, the digests under which it is published
        self.arrivals = self.hits = self.preemptions = 0

    @property
    def seated(self) -> list[Row]:
        """Rows that have a slot, the oldest first."""
        return sorted(filter(None, self.slots), key=lambda row: row.arrival)

    @property
    def waiting(self) -> list[Row]:
        """Rows without a slot."""
        return self.clients.waiting

    @property
    def running(self) -> list[tuple[int, Row]]:
        """Rows that decode, with their slots."""
        return [(slot, row) for slot, row in enumerate(self.slots) if row and row.read]

    def counts(self) -> dict[str, int]:
        """What `EngineStats` says of rows and pages."""
        running = len(self.running)
        seated = len(self.seated)
        return dict(
            running=running,
            reading=seated - running,
            waiting=len(self.waiting),
            pages_used=sum(n > 0 for n in self.holders),
            pages_shared=sum(n > 1 for n in self.holders),
            pages_cached=len(self.cached),
            pages_free=len(self.free),
            hits=self.hits,
            preemptions=self.preemptions,
        )

    @property
    def room(self) -> int:
        """Tokens that a row can hold if it is alone."""
        return min(self.capacity, (self.pages - 1) * PAGE)

    def submit(self, row: Row) -> None:
        """Queues a row for which there is `room`."""
        self.arrivals += 1
        row.arrival = self.arrivals
        row.publishes = self.prefix_cache
        self.clients.add(row)

    def read_next(self) -> list[Action]:
        """What to do before the next window: rows that come back, and at most one piece of reading."""
        actions: list[Action] = []
        self._make_way(actions)
        self._make_share(actions)
        while (row := self.clients.next()) and row.away and self._enter(row):
            self._take(row, row.held, actions)
            actions.append(Move(row, self.slots.index(row), row.pages[: pages_for(row.held)], False))
        ordered = self.clients.in_order([row for row in self.seated if not row.read] + self.clients.heads())
        if ordered and ordered[0].slot is None and not ordered[0].away:
            self._enter(ordered[0])
        for row in ordered:
            if row.slot is None:  # it waits, or was preempted just now
                continue
            piece = self._piece(row)
            if self._take(row, piece.start + piece.count, actions):
                return [*actions, piece]
        return actions

    def dispatched(self, piece: Read) -> None:
        """A piece's program was called: its pages may be found from now on."""
        row = piece.row
        if row.ended:
            return
        self.clients.count(row, prefilled=piece.width)
        row.held = piece.start + piece.count
        for at in range(piece.start // PAGE, row.held // PAGE):
            if row.publishes and row.exact:
                self._publish(row.pages[at], row.digests[at])
            if row.publishes:
                self._publish(row.pages[at], row.loose[at])

    def grow(self, steps: int) -> list[Action]:
        """Pages for the next steps of every row that runs, or of those for whom there are enough."""
        actions: list[Action] = []
        for row in self.seated:
            if row.state == "running":  # another may have sent it out just now
                left = max(0, len(row.ids) + row.most - 1 - row.held)  # the last token chosen is not written
                if not self._take(row, row.held + min(steps, left), actions):
                    actions.append(self._send_out(row))
        return actions

    def decoded(self, row: Row, tokens: int) -> None:
        """The row chose so many more tokens, and wrote as many, from the one chosen before on."""
        row.held += tokens
        self.clients.count(row, decoded=tokens)

    def end(self, row: Row, answer_ids: Sequence[int] = (), good: bool = True) -> None:
        """Takes back what the row has, in whatever state it is.

        Args:
            row: it ended, failed or was cancelled; once is enough.
            answer_ids: the tokens that it chose, if those who ask may find them.
            good: False if its numbers were not finite: no page that it holds is found again.
        """
        if row.ended:
            return
        if not good:
            for page in row.pages:
                self._unpublish(page)
        elif row.state == "running" and row.share_answers and row.publishes:
            ids = [*row.ids, *answer_ids][: row.held]
            digests = chain(row.salt, ids, [_ANY_FORM] * (len(ids) // PAGE))
            for at in range(len(row.ids) // PAGE, len(digests)):
                self._publish(row.pages[at], digests[at])
        if row.slot is None:
            self.clients.remove(row)
        else:
            self._give_back(row)
        row.ended = True

    def drop_shared(self) -> None:
        """Forgets every page published (the weights are others now); rows go on with what they hold."""
        self.free += self.cached
        for books in (self.cached, self.published, self.names):
            books.clear()
        for row in [*self.seated, *self.waiting]:
            row.publishes &= row.state == "waiting" and not row.away

    def _enter(self, row: Row) -> bool:
        """Gives a row that waits a slot and the pages that it shares, if there is room."""
        hits = self._find(row)
        if not self._fits(row, hits):
            return False
        self.clients.enter(row)
        row.slot = self.slots.index(None)
        self.slots[row.slot] = row
        if not row.held:
            row.pages = hits
            row.held = PAGE * len(hits)
            row.hits = row.held
            self.hits += row.hits
        for page in hits:
            self.holders[page] += 1
            self.cached.pop(page, None)
        others = [other for other in self.seated if other.client == row.client]
        earlier = [r for r in others + self.clients.of(row).waiting if r.arrival < row.arrival]
        if passed := [other for other in earlier if other.state != "running"]:
            self.clients.pass_over(row, passed)
        return True

    def _fits(self, row: Row, hits: list[int], without: Sequence[Row] = ()) -> bool:
        """Whether there is a slot, and room for the prompt behind its shared pages and a page more for every
        other row, once the rows `without` are preempted.
        """
        held = Counter(page for other in without for page in other.pages)
        freed = {page for page, count in held.items() if self.holders[page] == count}
        spare = len(self.free) + len(self.cached) + len(freed)
        spare -= sum(page in self.cached or page in freed for page in hits)
        others = sum(max(0, r.soon - len(r.pages)) for r in self.seated if r not in without)
        return bool(None in self.slots or without) and spare >= others + row.soon - len(hits)

    def _make_way(self, actions: list[Action]) -> None:
        """Preempts the last of the rows with a slot, where the first that waits is much more urgent."""
        patient = [row for row in self.seated if row.passed < clients.PATIENCE]
        first = self.clients.next()
        if first and patient and None not in self.slots:
            last = max(patient, key=lambda row: row.rank)
            if first.priority - last.priority >= URGENT:
                actions.append(self._send_out(last))

    def _make_share(self, actions: list[Action]) -> None:
        """Preempts rows that clients have beyond their share of slots, where the first row that waits is of a
        client that has less, and then fits.
        """
        row = self.clients.next()
        if row is None or self.clients.of(row).slots >= self.clients.share:
            return
        hits = self._find(row)
        if self._fits(row, hits):
            return
        beyond = [r for r in self.clients.beyond_share(self.seated) if r.priority <= row.priority]
        for count in range(1, len(beyond) + 1):
            if self._fits(row, hits, beyond[:count]):
                actions += map(self._send_out, beyond[:count])
                return

    def _find(self, row: Row) -> list[int]:
        """The shared pages that a row begins with; of any form if it may and they reach further."""
        if row.away or not self.prefix_cache:
            return []
        full = len(row.ids) // PAGE
        cut = self._cut(row)
        needed = len(row.ids)
        if row.scored is not None:
            needed = max(1, min(needed, row.scored))  # what stands before it says how likely it is
        last = (needed - 1) // PAGE
        if not row.digests:
            by_page = PAGE if row.scored is None else _SCORED
            forms = [self.chunk if at * PAGE < cut else by_page for at in range(full)]
            row.digests = chain(row.salt, row.ids, forms)
            row.loose = chain(row.salt, row.ids, [_ANY_FORM] * full)
        exact = self._found(row.digests[:last])
        if len(exact) * PAGE < cut:
            exact = exact[: len(exact) * PAGE // self.chunk * self.chunk // PAGE]
        loose = self._found(row.loose[:last]) if row.share_answers else []
        row.exact = len(loose) <= len(exact)
        return exact if row.exact else loose

    def _found(self, digests: Sequence[bytes]) -> list[int]:
        """Pages published under the first of these, up to one that is missing."""
        return list(takewhile(bool, (self.published.get(digest, 0) for digest in digests)))

    def _cut(self, row: Row) -> int:
        """Tokens of the prompt that are read in whole chunks."""
        return (len(row.ids) - 1) // self.chunk * self.chunk if row.scored is None else 0

    def _piece(self, row: Row) -> Read:
        """What the row reads next; behind hits that end within a chunk page by page up to its end."""
        start = row.held
        end = len(row.ids)
        whole = start < self._cut(row) and start % self.chunk == 0
        count = min(self.chunk if whole else PAGE, end - start)
        return Read(row, start, count, whole, start + count == end, self.chunk if whole else PAGE)

    def _take(self, row: Row, tokens: int, actions: list[Action]) -> bool:
        """Gives a row pages for so many tokens, if older ones leave enough; younger ones are sent out."""
        missing = pages_for(tokens) - len(row.pages)
        while len(self.free) + len(self.cached) < missing:
            beyond = self.clients.beyond_share(self.seated)
            last = beyond[0] if beyond else self.seated[-1]
            if last is row:
                return False
            actions.append(self._send_out(last))
        for _ in range(missing):
            if not self.free:
                page, _ = self.cached.popitem(last=False)
                self._unpublish(page)
                self.free.append(page)
            row.pages.append(self.free.pop())
            self.holders[row.pages[-1]] = 1
        return True

    def _send_out(self, row: Row) -> Move:
        out = Move(row, self.slots.index(row), row.pages[: pages_for(row.held)], True)
        self._give_back(row)
        self.clients.add(row, preempted=True)
        self.preemptions += 1
        return out

    def _give_back(self, row: Row) -> None:
        self.slots[self.slots.index(row)] = row.slot = None
        self.clients.leave(row)
        for page in reversed(row.pages):  # of no use without those before it, which are given up later
            self.holders[page] -= 1
            if not self.holders[page] and page in self.names:
                self.cached[page] = None
            elif not self.holders[page]:
                self.free.append(page)
        row.pages = []

    def _publish(self, page: int, digest: bytes) -> None:
        """Unless another page has the same content: both stay, one is found."""
        if self.published.setdefault(digest, page) == page:
            self.names.setdefault(page, []).append(digest)

    def _unpublish(self, page: int) -> None:
        for digest in self.names.pop(page, ()):
            del self.published[digest]
