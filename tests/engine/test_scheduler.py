"""The scheduler: random requests on a fake device, and a model of what the prefix cache must find."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from xinfer_jax.engine import (
    clients,
    pages as page_pool,
    prefix_cache as cache_module,
    scheduler as scheduler_module,
)
from xinfer_jax.engine.host_tier import HostTier, snapshot_name
from xinfer_jax.engine.pages import PagePool
from xinfer_jax.engine.row import LoadPages, PrefillChunk, ReadPages, Restore, Row, SavePages, Swap
from xinfer_jax.engine.scheduler import Scheduler

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

PAGE_SIZE = 4
CHUNK = 12
CAPACITY = 60
LIMIT = 3  # so small that short prompts reach every case


@pytest.fixture
def small_sizes(monkeypatch):
    for module in (scheduler_module, page_pool, cache_module):
        monkeypatch.setattr(module, "PAGE_SIZE", PAGE_SIZE)
    monkeypatch.setattr(scheduler_module, "COPIED_PAGES", 2)
    monkeypatch.setattr(clients, "STARVATION_LIMIT", LIMIT)


def order(row):
    starved = row.overtaken_by >= LIMIT
    return not starved, 0 if starved else -row.priority, row.arrival


class FakeDevice:
    """Executes the scheduler's actions on pages of cells that stand for bits. A cell has two hashes of the
    cell before it in the row's own pages, of the token and of the weights. The first is also of the program
    that wrote it. `row.expected` are the cells that a row should have. Files keep what is saved, by hash.
    With snapshots, a slot's recurrent state is the last cell of its row.
    """

    def __init__(
        self, slots, pages, prefix_cache=True, several_clients=False, host_pages=0, time_slice=0,
        snapshots=0, host_snapshots=0,
    ):  # fmt: skip
        self.several_clients = several_clients
        self.steps = 0
        self.files = {}
        self.names = set()
        self.host_cells = {}
        self.reads = []
        self.tier = HostTier(host_pages, self.names, host_snapshots) if host_pages else None
        sizes = slots, pages, CAPACITY, CHUNK
        self.snapshots = PagePool(1 + snapshots) if snapshots else None
        self.scheduler = Scheduler(*sizes, prefix_cache, self.tier, self.snapshots, time_slice)
        self.states = {}  # by slot, and by preempted row
        self.snapshot_cells, self.host_snapshot_cells = {}, {}
        self.cells = [[None] * PAGE_SIZE for _ in range(pages)]
        self.rows = []
        self.queue = []
        self.host = {}
        self.texts = []  # prompts with their answers, of rows that ended
        self.weights = 0
        self.known = set()  # prefixes that the cache may have
        self.lost = host_pages + snapshots > 0  # whether cached pages were evicted
        self.num_cached = 0

    def submit(self, ids, most, **options):
        row = Row(ids, most, **options)
        row.expected = []
        row.sampled = []
        row.overtaken_by = 0
        row.weights = None
        if len(ids) + most <= self.scheduler.usable_capacity:
            self.scheduler.submit(row)
            self.rows.append(row)
            self.queue.append(row)
        return row

    def schedule(self):
        """A step a second."""
        self.steps += 1
        return self.execute(self.scheduler.schedule(self.steps))

    def execute(self, actions):
        highest = max((row.priority for row in self.queue), default=0)
        self.lost |= len(self.scheduler.pool.page_of_hash) < self.num_cached  # before new ones are cached
        for action in actions:
            if isinstance(action, PrefillChunk):
                assert (
                    action.row not in self.host and action.count > 0
                )  # a preempted row was swapped in before
                self.prefill(action)
            elif not isinstance(action, Swap):
                self.transfer(action)
            elif action.out:
                self.states[action.row] = self.states.get(action.slot)
                if action.pages:  # else it begins anew
                    self.host[action.row] = [self.cells[page].copy() for page in action.pages]
                self.queue.append(action.row)
            else:
                self.admit(action.row)
                self.states[action.slot] = self.states[action.row]
                for page, cells in zip(action.pages, self.host.pop(action.row), strict=True):
                    self.cells[page] = cells
        outs = [action.row for action in actions if isinstance(action, Swap) and action.out]
        outs = [row.arrival for row in outs if highest - row.priority < scheduler_module.URGENT]
        if not self.several_clients:  # the youngest rows were preempted
            assert not outs or max(row.arrival for row in self.scheduler.rows_with_slots) < min(outs)
        assert [isinstance(action, PrefillChunk | LoadPages) for action in actions[:-1]].count(True) == 0
        self.check()
        return actions

    def transfer(self, action):
        """Moves pages between the tiers. Writes files of what was saved."""
        if isinstance(action, SavePages):
            for page, host_page, name in zip(*action, strict=True):
                self.host_cells[host_page] = self.cells[page].copy()
                self.files[name] = self.cells[page].copy()
                self.names.add(name)
        elif isinstance(action, ReadPages):
            self.reads.append(action)
        elif isinstance(action, Restore):
            cells = self.host_snapshot_cells if action.on_host else self.snapshot_cells
            self.states[action.slot] = cells[action.snapshot]
        else:
            row = action.row
            if row in self.queue:
                self.admit(row)
                row.weights = self.weights
                assert row.hits + PAGE_SIZE * len(row.host_pages) <= self.longest_hit(row)
            self.expect_prompt(row)
            for page, host_page in zip(action.pages, action.host_pages, strict=True):
                assert self.scheduler.pool.ref_counts[page] == 1
                self.cells[page] = self.host_cells[host_page].copy()

    def end_read(self, at, good):
        """Ends a read: some of its pages are read, the files of the others are lost."""
        read = self.reads.pop(at % len(self.reads))
        names = [*read.names, *([read.snapshot[1]] if read.snapshot else [])]
        count = good % (len(names) + 1)
        for name, host_page in zip(read.names[:count], read.host_pages, strict=False):
            if read.epoch == self.tier.epoch:
                self.host_cells[host_page] = self.files[name].copy()
        if count > len(read.names) and read.epoch == self.tier.epoch:
            self.host_snapshot_cells[read.snapshot[2]] = self.files[read.snapshot[1]]
        self.names -= {*names[count:]}
        self.scheduler.record_read(read, count)

    def admit(self, row):
        """The first row in order gets a slot, and overtakes all earlier rows that do not run yet."""
        apart = self.scheduler.waiting_for_files
        assert min(set(self.queue) - apart.keys(), key=order) is row or self.several_clients
        self.queue.remove(row)
        for other in set(self.rows) - apart.keys():
            other.overtaken_by += other.arrival < row.arrival and (
                other in self.queue or not other.is_prefilled
            )

    def prefill(self, chunk):
        row = chunk.row
        (_, start, count, is_full, is_last, _) = chunk
        waiting = [other for other in self.queue if other not in self.scheduler.waiting_for_files]
        candidates = waiting if None in self.scheduler.slots else [row]
        candidates += [other for other in self.scheduler.rows_with_slots if not other.is_prefilled]
        # With fewer free pages the rows before it may wait for pages.
        if not self.several_clients and len(self.scheduler.pool.free) >= 80:
            assert min(candidates, key=order) is row
        if row in self.queue:
            self.admit(row)
            self.check_hits(row, start)
        width = CHUNK if is_full else PAGE_SIZE
        assert start % PAGE_SIZE == 0 and 0 < count <= width and (count == width or is_last)
        assert is_last == (start + count == len(row.ids)) and not (is_full and is_last)
        for at in range(start, start + count):
            program = width if row.logprobs_from is None else "logprobs"
            assert program == self.program(row, at) or not row.exact
            self.write(row, row.ids[at], program)
        if is_last:
            row.sampled.append(len(row.ids) % 2)
        if taken := self.scheduler.record_prefill(chunk):
            self.take_snapshot(taken, self.states[row.slot])
        if row.weights == self.weights:
            self.cache(row, row.ids[: row.num_computed], start, by_program=True)

    def take_snapshot(self, taken, state):
        """Replaces a snapshot by a state, after the old one is copied to host memory and to a file."""
        if taken.saved:
            cell = self.snapshot_cells[taken.saved.snapshot]
            self.host_snapshot_cells[taken.saved.host_snapshot] = cell
            self.files[name := snapshot_name(taken.saved.name)] = cell
            self.names.add(name)
        self.snapshot_cells[taken.snapshot] = state

    def program(self, row, at):
        if row.logprobs_from is not None:
            return "logprobs"
        return CHUNK if at < (len(row.ids) - 1) // CHUNK * CHUNK else PAGE_SIZE

    def bits(self, row, before, token, program, weights=None):
        weights = self.weights if weights is None else weights
        exact, loose = before[-1] if before else (row.salt, row.salt)
        return hash((exact, token, weights, program)), hash((loose, token, weights))

    def write(self, row, token, program):
        at = len(row.expected)
        before = [self.cells[row.pages[(at - 1) // PAGE_SIZE]][(at - 1) % PAGE_SIZE]] if at else []
        assert self.scheduler.pool.ref_counts[row.pages[at // PAGE_SIZE]] == 1  # shared pages are not written
        if before and self.snapshots:  # the slot has the state after the token before
            state = self.states[row.slot]
            assert state == before[0] or (not row.exact and state[1] == before[0][1])
        cell = self.bits(row, before, token, program)
        self.cells[row.pages[at // PAGE_SIZE]][at % PAGE_SIZE] = self.states[row.slot] = cell
        row.expected.append(self.bits(row, row.expected, token, program))

    def prefix(self, row, ids, end, by_program):
        programs = tuple(self.program(row, at) for at in range(end)) if by_program else None
        return row.salt, self.weights, tuple(ids[:end]), programs

    def cache(self, row, ids, start, by_program):
        for end in range(start // PAGE_SIZE * PAGE_SIZE + PAGE_SIZE, len(ids) + 1, PAGE_SIZE):
            self.known.add(self.prefix(row, ids, end, False))
            if by_program and row.exact:
                self.known.add(self.prefix(row, ids, end, True))

    def longest_hit(self, row):
        """Tokens of the longest known prefix of a prompt."""
        full = (len(row.ids) - 1) // CHUNK * CHUNK
        best = [0, 0]
        most = len(row.ids)
        if row.logprobs_from is not None:
            full = 0
            most = min(most, row.logprobs_from)
        for by_program in (False, True):
            for end in range(PAGE_SIZE, most, PAGE_SIZE):
                if self.prefix(row, row.ids, end, by_program) not in self.known:
                    break
                if not by_program or end >= full or end % CHUNK == 0:
                    best[by_program] = end
        return self.scheduler.prefix_cache and (max(best) if row.share_answers else best[True])

    def check_hits(self, row, start):
        """The row starts after the longest known prefix. After a shorter one once pages were evicted."""
        expected = self.longest_hit(row)
        assert start == row.hits == expected or (self.lost and start == row.hits < expected)
        row.weights = self.weights
        self.expect_prompt(row)

    def expect_prompt(self, row):
        """All computed tokens of a prompt came from the prefix cache."""
        for at in range(len(row.expected), row.num_computed):
            row.expected.append(self.bits(row, row.expected, row.ids[at], self.program(row, at), row.weights))

    def decode(self, steps, early=None):
        """Every running row samples tokens; the row in slot `early` one, an EOS."""
        self.execute(self.scheduler.reserve_pages(steps))
        running = self.scheduler.running
        for row in running:
            left = row.max_tokens - len(row.sampled)
            steps_of_row = min(1 if row.slot == early else steps, left)
            for _ in range(steps_of_row):
                self.write(row, row.sampled[-1], "decoding")
                row.sampled.append(len(row.expected) % 2)
            self.scheduler.record_decode(row, steps_of_row)
            self.check()
            if row.slot == early or steps_of_row == left:
                self.end(row)
        return len(running)

    def end(self, row, valid=True):
        self.texts.append(row.ids + row.sampled)
        if valid and row.share_answers and row.state == "running" and row.weights == self.weights:
            self.cache(row, (row.ids + row.sampled)[: row.num_computed], len(row.ids), by_program=False)
        self.lost |= not valid
        pages = set(row.pages)
        self.scheduler.end(row, row.sampled, valid)
        assert valid or not pages & set(self.scheduler.pool.page_of_hash.values())
        if not valid and self.tier:
            hashes = {*row.page_hashes, *row.token_hashes}
            hashes |= {*map(snapshot_name, hashes)}
            found = {*self.tier.pool.page_of_hash, *self.tier.snapshots.page_of_hash, *self.names}
            assert not hashes & found
        self.scheduler.end(row)
        self.rows.remove(row)
        self.queue = [other for other in self.queue if other is not row]
        assert row.state == "ended" and row.slot is None and not row.pages and not row.host_pages
        self.check()

    def reset(self):
        self.scheduler.reset_prefix_cache()
        self.names.clear()  # they have other names now
        self.weights += 1
        self.check()

    def check(self):
        scheduler = self.scheduler
        pool = scheduler.pool
        counts = scheduler.counts()
        used = [page for row in self.rows for page in row.pages]
        assert pool.ref_counts == [used.count(page) for page in range(pool.size)]
        assert sorted([0, *pool.free, *pool.cached, *set(used)]) == [*range(pool.size)]
        assert counts["pages_used"] + counts["pages_cached"] + counts["pages_free"] == pool.size - 1
        assert counts["running"] + counts["prefilling"] + counts["waiting"] == len(self.rows)
        page_of_hash = {one: page for page, hashes in pool.hashes_of_page.items() for one in hashes}
        assert page_of_hash == pool.page_of_hash
        assert pool.hashes_of_page.keys() <= {*pool.cached, *used}
        assert pool.cached.keys() <= pool.hashes_of_page.keys()
        assert scheduler.prefix_cache or not pool.page_of_hash
        self.num_cached = len(pool.page_of_hash)
        if self.tier:
            self.check_tier()
        for row in self.rows:
            assert (row.state == "waiting") == (row in self.queue) == (row not in scheduler.slots)
            assert row.is_swapped_out == (row in self.host) and len(row.pages) <= page_pool.num_pages_for(
                row.longest
            )
            assert row.slot is None or row.expected  # a row with a slot has prefilled
            if row.slot is not None and len(row.expected) == row.num_computed:
                cells = [cell for page in row.pages for cell in self.cells[page]][: row.num_computed]
                assert row.exact or row.share_answers
                assert cells == row.expected or (
                    not row.exact and [c[1] for c in cells] == [s[1] for s in row.expected]
                )

    def check_tier(self):
        """No page in host memory is lost, and those that rows and reads need are kept. The same is true for
        snapshots.
        """
        kept = [page for row in self.rows for page in row.host_pages]
        kept += [page for read in self.reads for page in read.host_pages]
        kept_snapshots = [read.snapshot[2] for read in self.reads if read.snapshot]
        for pool, used in ((self.tier.pool, kept), (self.tier.snapshots, kept_snapshots)):
            assert pool.ref_counts == [used.count(page) for page in range(pool.size)]
            assert sorted([0, *pool.free, *pool.cached, *set(used)]) == [*range(pool.size)]
            assert pool.cached.keys() <= pool.hashes_of_page.keys() <= {*pool.cached, *used}
        pool = self.tier.pool
        assert self.tier.read <= {*range(1, pool.size)}
        assert {*self.scheduler.waiting_for_files} <= {*self.queue} & {read.row for read in self.reads}

    def finish(self):
        """Steps until all rows have ended. Some row computes a token in every step, and no token is computed
        twice.
        """
        while self.rows:
            if self.reads:
                self.end_read(0, 99)
            actions = self.schedule()
            prefilled = any(isinstance(action, PrefillChunk | LoadPages) for action in actions)
            assert self.decode(5) or prefilled or self.reads
        while self.reads:
            self.end_read(0, 99)
        counts = self.scheduler.counts()
        assert counts["pages_used"] == counts["waiting"] == 0
        assert self.scheduler.slots == [None] * len(self.scheduler.slots)


TEXTS = st.builds(
    lambda kind, same, tail: [kind] * same + [1 - kind] * tail,
    st.integers(0, 1), st.integers(0, 30), st.integers(1, 8),
)  # fmt: skip
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.sampled_from([0, 0, 1, 1, 2, 20]),
        "salt": st.just(b"other"),
        "logprobs_from": st.integers(0, 30),
        "share_answers": st.just(True),
    },
)
SUBMIT = st.tuples(st.just("submit"), TEXTS, st.integers(1, 40), OPTIONS)
# A prompt that begins with a text that ended.
FOLLOW = st.tuples(st.just("follow"), st.integers(0, 9), st.integers(1, 20), OPTIONS)
STEP = st.tuples(st.just("step"), st.integers(1, 9), st.integers(0, 20))
END = st.tuples(st.just("end"), st.integers(0, 9), st.booleans())
RESET = st.just(("reset",))
STEPS = st.sampled_from([SUBMIT] * 12 + [FOLLOW] * 6 + [STEP] * 30 + [END] * 2 + [RESET]).flatmap(
    lambda step: step
)


@settings(max_examples=30, deadline=None, suppress_health_check=[*HealthCheck], derandomize=True)
@given(
    st.integers(1, 5),
    st.sampled_from([9, 12, 16, 20, 26, 200]),
    st.integers(0, 9),
    st.lists(STEPS, min_size=50, max_size=100),
)
def test_any_requests_in_any_order(small_sizes, slots, pages, prefix_cache, steps):
    run(FakeDevice(slots, pages, prefix_cache > 0), steps)


@settings(max_examples=30, deadline=None, suppress_health_check=[*HealthCheck], derandomize=True)
@given(
    st.integers(1, 5),
    st.sampled_from([9, 12, 16, 20, 26, 200]),
    st.lists(STEPS, min_size=50, max_size=100),
    st.lists(st.sampled_from("aaabcd"), min_size=1, max_size=9),
    st.sampled_from([0, 1, 2, 9]),
)
def test_any_requests_of_several_clients(small_sizes, slots, pages, steps, names, time_slice):
    run(FakeDevice(slots, pages, several_clients=True, time_slice=time_slice), steps, names)


# Reads from files end in any order, some after a part of their pages, or the row does not wait for them.
READ = st.tuples(st.just("read"), st.integers(0, 9), st.sampled_from([99, 99, 0, 1, 2, 3]))
LATE = st.tuples(st.just("late"), st.integers(0, 9))


@pytest.mark.full
@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck], derandomize=True)
@given(
    st.integers(1, 5),
    st.sampled_from([9, 12, 16, 20, 26]),
    st.sampled_from([1, 3, 8, 20, 60]),
    st.lists(st.one_of(STEPS, STEPS, STEPS, READ, LATE), min_size=50, max_size=120),
    st.lists(st.sampled_from("aab"), min_size=1, max_size=5),
)
def test_any_requests_with_pages_beyond_the_device(small_sizes, slots, pages, host_pages, steps, names):
    run(FakeDevice(slots, pages, several_clients=True, host_pages=host_pages), steps, names)


@pytest.mark.full
@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck], derandomize=True)
@given(
    st.integers(1, 3),
    st.sampled_from([12, 16, 26]),
    st.sampled_from([0, 3, 20, 60]),
    st.integers(1, 4),
    st.lists(st.one_of(STEPS, STEPS, STEPS, READ, LATE), min_size=50, max_size=120),
)
def test_any_requests_with_snapshots_of_states(small_sizes, slots, pages, host_pages, snapshots, steps):
    beyond = dict(host_pages=host_pages, host_snapshots=snapshots if host_pages else 0)
    run(FakeDevice(slots, pages, several_clients=True, snapshots=snapshots, **beyond), steps, "aab")


def run(device, steps, names=("",)):
    """Carries out the steps; the clients of these names submit in turn."""
    clients_of = itertools.cycle(names)
    for name, *values in steps:
        if name == "submit":
            ids, most, options = values
            device.submit(ids, most, client=next(clients_of), **options)
        elif name == "follow" and device.texts:
            at, most, options = values
            device.submit(
                [*device.texts[at % len(device.texts)], 2], most, client=next(clients_of), **options
            )
        elif name == "step":
            device.schedule()
            device.decode(*values)
        elif name == "end" and device.rows:
            device.end(device.rows[values[0] % len(device.rows)], valid=values[1])
        elif name == "reset":
            device.reset()
        elif name == "read" and device.reads:
            device.end_read(*values)
        elif name == "late" and device.reads:
            device.scheduler.stop_waiting_for_files(device.reads[values[0] % len(device.reads)].row)
    device.finish()


def prefill(scheduler, *rows):
    """Prefills rows. Returns (start, number of tokens, is_full) of each chunk."""
    for row in rows:
        scheduler.submit(row)
    chunks = []
    while actions := scheduler.schedule():
        scheduler.record_prefill(actions[-1])
        chunks.append((actions[-1].start, actions[-1].count, actions[-1].is_full))
    return chunks


@pytest.mark.parametrize(
    "length, chunks",
    [
        (1, [(0, 1, False)]),
        (64, [(0, 64, False)]),
        (256, [(0, 64, False), (64, 64, False), (128, 64, False), (192, 64, False)]),
        (257, [(0, 256, True), (256, 1, False)]),
        (600, [(0, 256, True), (256, 256, True), (512, 64, False), (576, 24, False)]),
    ],
)
def test_chunks_follow_from_the_length_of_the_prompt(length, chunks):
    scheduler = Scheduler(rows=2, pages=40, capacity=4096, chunk=256)
    assert prefill(scheduler, Row([7] * length, 5)) == chunks
    hits = (length - 1) // 64 * 64  # all but the last chunk
    assert prefill(scheduler, Row([7] * length, 5)) == chunks[-1:] and scheduler.counts()["hits"] == hits


def test_least_recently_used_pages_are_evicted_first():
    scheduler = Scheduler(rows=1, pages=8, capacity=4096, chunk=64)
    for kind, length, hits in [(1, 129, 0), (2, 129, 0), (1, 129, 128), (3, 255, 0), (2, 129, 64)]:
        row = Row([kind] * length, 1)
        prefill(scheduler, row)
        assert row.hits == hits  # of the second prompt the last page was evicted
        scheduler.end(row)


def test_urgent_rows_preempt_running_rows():
    scheduler = Scheduler(rows=2, pages=20, capacity=4096, chunk=64)
    rows = [Row([kind], 200, priority=-kind) for kind in (1, 30, 40)]
    prefill(scheduler, *rows[:2])
    scheduler.submit(rows[2])
    assert scheduler.schedule() == []
    scheduler.submit(urgent := Row([5], 5, priority=-2))
    out, chunk = scheduler.schedule()
    assert (out.row, out.out, chunk.row) == (rows[1], True, urgent) and rows[0].state == "running"
    scheduler.record_prefill(chunk)
    scheduler.end(urgent)
    back, *_ = scheduler.schedule()
    assert (back.row, back.out) == (rows[1], False)  # before rows that came later
    for turn in range(clients.STARVATION_LIMIT + 1):
        scheduler.submit(urgent := Row([6], 5, priority=9))
        actions = scheduler.schedule()
        assert (len(actions) == 2) == (turn < clients.STARVATION_LIMIT - 1)  # then it stays
        if len(actions) < 2:
            break
        scheduler.record_prefill(actions[1])
        scheduler.end(urgent)
        assert scheduler.schedule()


def test_a_cancelled_row_caches_no_pages():
    scheduler = Scheduler(rows=1, pages=8, capacity=4096, chunk=64)
    scheduler.submit(row := Row([1] * 129, 1))
    chunk = scheduler.schedule()[-1]
    scheduler.end(row)
    scheduler.record_prefill(chunk)
    counts = scheduler.counts()
    assert [counts[name] for name in ("pages_used", "pages_cached", "pages_free")] == [0, 0, 7]
    assert row.state == "ended"


def serve_short_requests(scheduler, count):
    """Serves short requests of another client, one after the other. Returns the steps that each waited."""
    waited = [0] * count
    for at in range(count):
        scheduler.submit(row := Row([1] * 10, 5, client="other"))
        while not row.is_prefilled:
            for action in scheduler.schedule():
                if isinstance(action, PrefillChunk):
                    scheduler.record_prefill(action)
                    if action.is_last and action.row.max_tokens == 1:  # it ends with its first token
                        scheduler.end(action.row)
            waited[at] += not row.is_prefilled
        for running in scheduler.running:
            scheduler.record_decode(running, 5)
        scheduler.end(row)
    return waited


def test_many_requests_of_one_client_do_not_delay_another():
    scheduler = Scheduler(rows=8, pages=200, capacity=4096, chunk=256)
    for priority in range(500):  # rows of low priority are overtaken by later ones of their own client
        scheduler.submit(Row([2] * 200, 600, priority=-(priority % 3), client="flood"))
    while len(scheduler.running) < 8:
        scheduler.record_prefill(scheduler.schedule()[-1])
    assert max(serve_short_requests(scheduler, 5 * clients.STARVATION_LIMIT)) == 0
    assert len(scheduler.rows_with_slots) >= 7 and scheduler.preemptions >= 1


@pytest.mark.parametrize("length", [2000, 1])
def test_prompts_of_one_client_do_not_delay_another(length):
    """Long prompts, and short ones whose answers end with the first token."""
    scheduler = Scheduler(rows=4, pages=200, capacity=4096, chunk=256)
    for at in range(500):
        scheduler.submit(Row([at] * length, 1, client="flood"))
    waited = serve_short_requests(scheduler, 100)
    assert max(waited) <= 2 and sum(waited) <= 150  # clients take turns


def test_clients_share_slots_and_every_row_ends():
    scheduler = Scheduler(rows=6, pages=100, capacity=4096, chunk=256)
    rows = {name: [Row([at] * 10, 40, client=name) for at in range(9)] for name in "abc"}
    for row in rows["a"]:
        scheduler.submit(row)
    prefill_all(scheduler)
    assert len(scheduler.running) == 6
    for row in rows["b"] + rows["c"]:
        scheduler.submit(row)
    prefill_all(scheduler)
    assert [sum(row.client == name for row in scheduler.rows_with_slots) for name in "abc"] == [2, 2, 2]
    assert rows["a"][0].state == rows["a"][1].state == "running"  # the older ones stay
    for _ in range(200):
        prefill_all(scheduler)
        for row in scheduler.running:
            scheduler.record_decode(row, 10)
            if row.num_computed >= 50:
                scheduler.end(row)
    assert all(row.ended for row in sum(rows.values(), []))


def prefill_all(scheduler, now=0):
    """Prefills all rows that fit."""
    while actions := scheduler.schedule(now):
        for action in actions:
            if isinstance(action, PrefillChunk):
                scheduler.record_prefill(action)


def one_row_each(scheduler, names, now=0):
    """Running rows with long answers of these clients."""
    rows = [Row([ord(name)] * 10, 491, client=name) for name in names]
    for row in rows:
        scheduler.submit(row)
    prefill_all(scheduler, now)
    return rows


def test_a_client_without_a_slot_takes_that_of_another_after_a_time_slice():
    scheduler = Scheduler(rows=3, pages=200, capacity=4096, chunk=256, time_slice=10)
    rows = [one_row_each(scheduler, name, now)[0] for now, name in enumerate("abc")]
    (row,) = one_row_each(scheduler, "d", 9)
    assert row.state == "waiting"
    prefill_all(scheduler, 10)
    assert row.state == "running" and [old.state for old in rows] == ["waiting", "running", "running"]
    scheduler.end(row)  # the row that it preempted continues, and the next one that has run longest goes
    (row,) = one_row_each(scheduler, "d", 11)
    assert row.state == "running" and [old.state for old in rows] == ["running", "waiting", "running"]
    prefill_all(scheduler, 30)  # a row continues in place of another one after a time slice for each slot
    assert row.state == "running" and rows[1].state == "waiting"
    prefill_all(scheduler, 32)
    assert [old.state for old in rows] == ["running", "running", "waiting"]


def test_a_time_slice_for_a_row_that_another_engine_prefilled():
    scheduler = Scheduler(rows=1, pages=200, capacity=4096, chunk=256, time_slice=10)
    (old,) = one_row_each(scheduler, "a")
    scheduler.submit(row := Row([1] * 10, 20, client="b", num_computed=10))
    (out, back) = scheduler.schedule(10)
    assert (out.row, out.out, back.row, back.out) == (old, True, row, False)


def test_time_slices_are_for_clients_without_a_slot_and_without_less_priority():
    scheduler = Scheduler(rows=2, pages=200, capacity=4096, chunk=256, time_slice=1)
    rows = one_row_each(scheduler, "ab")
    scheduler.submit(Row([1], 5, client="b"))
    scheduler.submit(Row([1], 5, client="c", priority=-1))
    prefill_all(scheduler, 100)
    assert [row.state for row in rows] == ["running"] * 2
    scheduler.time_slice = 0
    one_row_each(scheduler, "d", 100)
    assert [row.state for row in rows] == ["running"] * 2


def test_swapped_out_rows_fill_no_more_host_memory_than_the_device_has():
    scheduler = Scheduler(rows=2, pages=24, capacity=640, chunk=256, time_slice=1)
    rows = []
    for now, name in enumerate("abcdefghijklmnop"):
        rows += one_row_each(scheduler, name, 2 * now)
        scheduler.reserve_pages(500)
        for row in scheduler.running:
            scheduler.record_decode(row, 500 - row.num_computed)
    assert [row.state for row in rows].count("running") == 2
    assert [row.num_computed for row in rows if row.is_swapped_out] == [500] * 3  # of eight pages each


def test_rows_of_more_clients_than_slots_take_turns():
    """Each client's rows end, in the order of their lengths, and a row is swapped about once in a slice."""
    scheduler = Scheduler(rows=4, pages=200, capacity=4096, chunk=256, time_slice=5)
    rows = one_row_each(scheduler, "abcdefghijkl")
    for now in range(2000):
        prefill_all(scheduler, now)
        for row in scheduler.running:
            scheduler.reserve_pages(10)
            scheduler.record_decode(row, 10)
            if row.num_computed >= 500:
                scheduler.end(row)
        if now == 20:
            assert all(row.num_computed for row in rows)  # all have their first tokens
    assert all(row.ended for row in rows) and scheduler.preemptions <= 12 * 50 / 4 / 5 + 12


def test_no_row_is_preempted_for_a_row_that_does_not_fit():
    scheduler = Scheduler(rows=2, pages=12, capacity=640, chunk=256)
    for name in ("a", "a", "b"):
        scheduler.submit(Row([ord(name)] * 300, 20, client=name))
        prefill_all(scheduler)
    first, second = scheduler.rows_with_slots
    assert (first.client, second.client) == ("a", "b")  # five pages and one more each: one row was preempted
    scheduler.submit(Row([3] * 600, 20, client="c"))  # would take ten
    prefill_all(scheduler)
    assert [row.client for row in scheduler.rows_with_slots] == ["a", "b"]


def test_further_answers_of_a_request_wait_for_first_answers():
    scheduler = Scheduler(rows=2, pages=50, capacity=640, chunk=256)
    many = [Row([1] * 10, 20, answer_group=at // 2) for at in range(8)]
    for row in many:
        scheduler.submit(row)
    prefill_all(scheduler)
    scheduler.submit(small := Row([2] * 10, 20))
    scheduler.end(many[0])
    prefill_all(scheduler)
    assert small.state == "running"


def test_idle_clients_are_forgotten(monkeypatch):
    monkeypatch.setattr(clients, "_MAX_IDLE_CLIENTS", 50)
    scheduler = Scheduler(rows=1, pages=8, capacity=640, chunk=256)
    for at in range(3 * clients._MAX_IDLE_CLIENTS):
        scheduler.submit(row := Row([1], 1, client=str(at)))
        prefill_all(scheduler)
        scheduler.end(row)
    assert len(scheduler.clients._clients) <= clients._MAX_IDLE_CLIENTS + 1


@pytest.mark.parametrize("length", [10, 1500])
def test_a_client_with_one_long_answer_saves_up_no_tokens(length):
    scheduler = Scheduler(rows=4, pages=400, capacity=4096, chunk=256, prefix_cache=False)
    scheduler.submit(Row([1], 4000, client="b"))
    prefill_all(scheduler)
    for _ in range(50):  # of another client meanwhile
        scheduler.submit(row := Row([2] * 1500, 1, client="a"))
        prefill_all(scheduler)
        scheduler.end(row)
    for _ in range(200):
        scheduler.submit(Row([3] * 1500, 1, client="b"))
    scheduler.submit(row := Row([4] * length, 1, client="a"))
    chunks = 0
    while not row.is_prefilled:
        for action in scheduler.schedule():
            if isinstance(action, PrefillChunk):
                chunks += 1
                scheduler.record_prefill(action)
                if action.is_last and action.row is not row:
                    scheduler.end(action.row)
    assert chunks <= 3 * (length // 64 + 2)
