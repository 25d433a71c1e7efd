"""The engine's books: requests drawn at random, on a model of a device and of what may be found."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from xinfer_jax.engine import clients, scheduler
from xinfer_jax.engine.scheduler import Move, Read, Row, Scheduler

PAGE = 4
CHUNK = 12
CAPACITY = 60
PATIENCE = 3  # so small that short prompts see everything


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(scheduler, "PAGE", PAGE)
    monkeypatch.setattr(clients, "PATIENCE", PATIENCE)


def order(row):
    waited = row.late >= PATIENCE
    return not waited, 0 if waited else -row.priority, row.arrival


class Device:
    """Does what the scheduler says on pages whose cells stand for bits: a token's is a hash of the cell
    before it in the row's own pages, of the token and the weights and, in the first of a pair, of what wrote
    it. Beside them every row has the cells that it should hold.
    """

    def __init__(self, slots, pages, prefix_cache=True, several_clients=False):
        self.several_clients = several_clients
        self.books = Scheduler(slots, pages, CAPACITY, CHUNK, prefix_cache)
        self.cells = [[None] * PAGE for _ in range(pages)]
        self.rows = []
        self.queue = []
        self.host = {}
        self.texts = []
        self.weights = 0
        self.known = set()
        self.lost = False
        self.published = 0

    def submit(self, ids, most, **options):
        row = Row(ids, most, **options)
        row.should = []
        row.chosen = []
        row.late = 0
        row.weights = None
        if len(ids) + most <= self.books.room:
            self.books.submit(row)
            self.rows.append(row)
            self.queue.append(row)
        return row

    def do(self, actions):
        most = max((row.priority for row in self.queue), default=0)
        self.lost |= len(self.books.published) < self.published  # before anything new is published
        for action in actions:
            if isinstance(action, Read):
                assert action.row not in self.host and action.count > 0  # who was preempted came back before
                self.read(action)
            elif action.out:
                self.host[action.row] = [self.cells[page].copy() for page in action.pages]
                self.queue.append(action.row)
            else:
                self.enter(action.row)
                for page, cells in zip(action.pages, self.host.pop(action.row), strict=True):
                    self.cells[page] = cells
        outs = [action.row for action in actions if isinstance(action, Move) and action.out]
        outs = [row.arrival for row in outs if most - row.priority < scheduler.URGENT]
        if not self.several_clients:  # the youngest made way
            assert not outs or max(row.arrival for row in self.books.seated) < min(outs)
        assert [isinstance(action, Read) for action in actions[:-1]].count(True) == 0
        self.check()
        return actions

    def enter(self, row):
        """The first in order entered; all that came before it and do not run yet were passed over."""
        assert min(self.queue, key=order) is row or self.several_clients
        self.queue.remove(row)
        for other in self.rows:
            other.late += other.arrival < row.arrival and (other in self.queue or not other.read)

    def read(self, piece):
        row = piece.row
        (_, start, count, whole, last, _) = piece
        could = [*self.queue] if None in self.books.slots else [row]
        could += [other for other in self.books.seated if not other.read]
        if not self.several_clients and len(self.books.free) >= 80:  # else those before it may wait for pages
            assert min(could, key=order) is row
        if row in self.queue:
            self.enter(row)
            self.look_up(row, start)
        form = CHUNK if whole else PAGE
        assert start % PAGE == 0 and 0 < count <= form and (count == form or last)
        assert last == (start + count == len(row.ids)) and not (whole and last)
        for at in range(start, start + count):
            program = form if row.scored is None else "scoring"
            assert program == self.form(row, at) or not row.exact
            self.write(row, row.ids[at], program)
        if last:
            row.chosen.append(len(row.ids) % 2)
        self.books.dispatched(piece)
        if row.weights == self.weights:
            self.publish(row, row.ids[: row.held], start, form=True)

    def form(self, row, at):
        if row.scored is not None:
            return "scoring"
        return CHUNK if at < (len(row.ids) - 1) // CHUNK * CHUNK else PAGE

    def bits(self, row, before, token, form):
        exact, loose = before[-1] if before else (row.salt, row.salt)
        return hash((exact, token, self.weights, form)), hash((loose, token, self.weights))

    def write(self, row, token, form):
        at = len(row.should)
        before = [self.cells[row.pages[(at - 1) // PAGE]][(at - 1) % PAGE]] if at else []
        assert self.books.holders[row.pages[at // PAGE]] == 1  # what is shared is only read
        self.cells[row.pages[at // PAGE]][at % PAGE] = self.bits(row, before, token, form)
        row.should.append(self.bits(row, row.should, token, form))

    def keys(self, row, ids, end, form):
        forms = tuple(self.form(row, at) for at in range(end)) if form else None
        return row.salt, self.weights, tuple(ids[:end]), forms

    def publish(self, row, ids, start, form):
        for end in range(start // PAGE * PAGE + PAGE, len(ids) + 1, PAGE):
            self.known.add(self.keys(row, ids, end, False))
            if form and row.exact:
                self.known.add(self.keys(row, ids, end, True))

    def look_up(self, row, start):
        """What a set of prefixes says is found; less once pages were given up."""
        cut = (len(row.ids) - 1) // CHUNK * CHUNK
        best = [0, 0]
        most = len(row.ids)
        if row.scored is not None:
            cut = 0
            most = min(most, row.scored)
        for form in (False, True):
            for end in range(PAGE, most, PAGE):
                if self.keys(row, row.ids, end, form) not in self.known:
                    break
                if not form or end >= cut or end % CHUNK == 0:
                    best[form] = end
        expected = self.books.prefix_cache and (max(best) if row.share_answers else best[True])
        assert start == row.hits == expected or (self.lost and start == row.hits < expected)
        row.weights = self.weights
        for at in range(start):
            row.should.append(self.bits(row, row.should, row.ids[at], self.form(row, at)))

    def window(self, steps, early=None):
        """Every row that runs chooses tokens; the one in slot `early` an EOS, at once."""
        self.do(self.books.grow(steps))
        running = self.books.running
        for slot, row in running:
            left = row.most - len(row.chosen)
            steps_of_row = min(1 if slot == early else steps, left)
            for _ in range(steps_of_row):
                self.write(row, row.chosen[-1], "decoding")
                row.chosen.append(len(row.should) % 2)
            self.books.decoded(row, steps_of_row)
            self.check()
            if slot == early or steps_of_row == left:
                self.end(row)
        return len(running)

    def end(self, row, good=True):
        self.texts.append(row.ids + row.chosen)
        if good and row.share_answers and row.state == "running" and row.weights == self.weights:
            self.publish(row, (row.ids + row.chosen)[: row.held], len(row.ids), form=False)
        self.lost |= not good
        pages = set(row.pages)
        self.books.end(row, row.chosen, good)
        assert good or not pages & set(self.books.published.values())
        self.books.end(row)
        self.rows.remove(row)
        self.queue = [other for other in self.queue if other is not row]
        assert row.state == "ended" and row.slot is None and not row.pages
        self.check()

    def drop(self):
        self.books.drop_shared()
        self.weights += 1
        self.check()

    def check(self):
        books = self.books
        counts = self.books.counts()
        held = [page for row in self.rows for page in row.pages]
        assert books.holders == [held.count(page) for page in range(books.pages)]
        assert sorted([0, *books.free, *books.cached, *set(held)]) == [*range(books.pages)]
        assert counts["pages_used"] + counts["pages_cached"] + counts["pages_free"] == books.pages - 1
        assert counts["running"] + counts["reading"] + counts["waiting"] == len(self.rows)
        assert {digest: page for page, all_ in books.names.items() for digest in all_} == books.published
        assert books.names.keys() <= {*books.cached, *held} and books.cached.keys() <= books.names.keys()
        assert books.prefix_cache or not books.published
        self.published = len(books.published)
        for row in self.rows:
            assert (row.state == "waiting") == (row in self.queue) == (row not in books.slots)
            assert row.away == (row in self.host) and len(row.pages) <= row.needed
            assert row.slot is None or row.should  # who enters reads at once
            if row.slot is not None and len(row.should) == row.held:
                cells = [cell for page in row.pages for cell in self.cells[page]][: row.held]
                assert row.exact or row.share_answers
                assert cells == row.should or (
                    not row.exact and [c[1] for c in cells] == [s[1] for s in row.should]
                )

    def finish(self):
        """Every turn some row gets a token further, until all have ended: nothing is computed twice."""
        while self.rows:
            read = any(isinstance(action, Read) for action in self.do(self.books.read_next()))
            assert self.window(5) or read
        counts = self.books.counts()
        assert counts["pages_used"] == counts["waiting"] == 0 and self.books.slots == [None] * len(
            self.books.slots
        )


TEXTS = st.builds(
    lambda kind, same, tail: [kind] * same + [1 - kind] * tail,
    st.integers(0, 1), st.integers(0, 30), st.integers(1, 8),
)  # fmt: skip
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.sampled_from([0, 0, 1, 1, 2, 20]),
        "salt": st.just(b"other"),
        "scored": st.integers(0, 30),
        "share_answers": st.just(True),
    },
)
SUBMIT = st.tuples(st.just("submit"), TEXTS, st.integers(1, 40), OPTIONS)
FOLLOW = st.tuples(st.just("follow"), st.integers(0, 9), st.integers(1, 20), OPTIONS)  # on a text that ended
TURN = st.tuples(st.just("turn"), st.integers(1, 9), st.integers(0, 20))
END = st.tuples(st.just("end"), st.integers(0, 9), st.booleans())
DROP = st.just(("drop",))
STEPS = st.sampled_from([SUBMIT] * 12 + [FOLLOW] * 6 + [TURN] * 30 + [END] * 2 + [DROP]).flatmap(
    lambda step: step
)


@settings(max_examples=120, deadline=None, suppress_health_check=[*HealthCheck], derandomize=True)
@given(
    st.integers(1, 5),
    st.sampled_from([9, 12, 16, 20, 26, 200]),
    st.integers(0, 9),
    st.lists(STEPS, min_size=50, max_size=100),
)
def test_any_requests_in_any_order(small, slots, pages, prefix_cache, steps):
    run(Device(slots, pages, prefix_cache > 0), steps)


@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck], derandomize=True)
@given(
    st.integers(1, 5),
    st.sampled_from([9, 12, 16, 20, 26, 200]),
    st.lists(STEPS, min_size=50, max_size=100),
    st.lists(st.sampled_from("aaab"), min_size=1, max_size=9),
)
def test_any_requests_of_several_clients(small, slots, pages, steps, names):
    run(Device(slots, pages, several_clients=True), steps, names)


def run(device, steps, names=("",)):
    """Carries out the steps, the requests in turn for the clients of these names."""
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
        elif name == "turn":
            device.do(device.books.read_next())
            device.window(*values)
        elif name == "end" and device.rows:
            device.end(device.rows[values[0] % len(device.rows)], good=values[1])
        elif name == "drop":
            device.drop()
    device.finish()


def read(books, *rows):
    """Reads the prompts of rows that there is room for: (start, tokens, by whole chunks) of each piece."""
    for row in rows:
        books.submit(row)
    pieces = []
    while actions := books.read_next():
        books.dispatched(actions[-1])
        pieces.append((actions[-1].start, actions[-1].count, actions[-1].whole))
    return pieces


@pytest.mark.parametrize(
    "length, pieces",
    [
        (1, [(0, 1, False)]),
        (64, [(0, 64, False)]),
        (256, [(0, 64, False), (64, 64, False), (128, 64, False), (192, 64, False)]),
        (257, [(0, 256, True), (256, 1, False)]),
        (600, [(0, 256, True), (256, 256, True), (512, 64, False), (576, 24, False)]),
    ],
)
def test_a_prompt_is_cut_by_its_length(length, pieces):
    books = Scheduler(rows=2, pages=40, capacity=4096, chunk=256)
    assert read(books, Row([7] * length, 5)) == pieces
    hits = (length - 1) // 64 * 64  # all but the last piece
    assert read(books, Row([7] * length, 5)) == pieces[-1:] and books.counts()["hits"] == hits


def test_hits_are_whole_pieces_of_the_cut():
    books = Scheduler(rows=10, pages=150, capacity=4096, chunk=256)
    read(books, Row([7] * 600, 5))
    for row, hits in [
        (Row([7] * 500 + [8] * 100, 5), 256),  # 448 are the same, but read in chunks of 256
        (Row([7] * 256, 5), 0),  # too short for a whole chunk: another program
        (Row([7] * 600, 5, salt=b"other"), 0),
        (Row([7] * 600, 5, scored=0), 0),
        (Row([7] * 600 + [5], 5, scored=600), 576),  # of what the one before read
        (Row([7] * 600 + [6], 5, scored=577), 576),
        (Row([7] * 600 + [7], 5, scored=576), 512),  # how likely that token is stands behind the 575th
        (Row([7] * 500 + [9] * 100, 5, share_answers=True), 448),
    ]:
        read(books, row)
        assert row.hits == hits


@pytest.mark.parametrize("shares, asks", [(True, True), (True, False), (False, True)])
def test_an_answer_is_shared_with_those_who_ask(shares, asks):
    books = Scheduler(rows=4, pages=100, capacity=4096, chunk=256)
    row = Row([7] * 300, 84, share_answers=shares)
    read(books, row)
    books.grow(100)
    books.decoded(row, 83)
    books.end(row, [9] * 84)  # whose last is in no page: the sixth is not full
    follow = Row([7] * 300 + [9] * 84 + [5] * 20, 5, share_answers=asks)
    assert read(books, follow)[0][0] == follow.hits == (320 if shares and asks else 256)


def test_the_least_recently_used_goes_first():
    books = Scheduler(rows=1, pages=8, capacity=4096, chunk=64)
    for kind, length, hits in [(1, 129, 0), (2, 129, 0), (1, 129, 128), (3, 255, 0), (2, 129, 64)]:
        row = Row([kind] * length, 1)
        read(books, row)
        assert row.hits == hits  # of the second the last page went, the first of no use without
        books.end(row)


def test_who_was_passed_over_often_goes_first():
    books = Scheduler(rows=1, pages=8, capacity=4096, chunk=64)
    books.submit(old := Row([1], 1))
    for turn in range(clients.PATIENCE + 1):
        read(books, row := Row([2], 1, priority=1))
        assert (old.state, row.state)[turn == clients.PATIENCE] == "waiting"
        books.end(row)
    assert old.state == "running"


def test_the_urgent_take_the_place_of_who_decodes():
    books = Scheduler(rows=2, pages=20, capacity=4096, chunk=64)
    rows = [Row([kind], 200, priority=-kind) for kind in (1, 30, 40)]
    read(books, *rows[:2])
    books.submit(rows[2])
    assert books.read_next() == []
    books.submit(urgent := Row([5], 5, priority=-2))
    out, piece = books.read_next()
    assert (out.row, out.out, piece.row) == (rows[1], True, urgent) and rows[0].state == "running"
    books.dispatched(piece)
    books.end(urgent)
    back, *_ = books.read_next()
    assert (back.row, back.out) == (rows[1], False)  # before who came later
    for turn in range(clients.PATIENCE + 1):
        books.submit(urgent := Row([6], 5, priority=9))
        actions = books.read_next()
        assert (len(actions) == 2) == (turn < clients.PATIENCE - 1)  # then it stays
        if len(actions) < 2:
            break
        books.dispatched(actions[1])
        books.end(urgent)
        assert books.read_next()


def test_who_was_cancelled_publishes_nothing():
    books = Scheduler(rows=1, pages=8, capacity=4096, chunk=64)
    books.submit(row := Row([1] * 129, 1))
    piece = books.read_next()[-1]
    books.end(row)
    books.dispatched(piece)
    counts = books.counts()
    assert (counts["pages_used"], counts["pages_cached"], counts["pages_free"], row.state) == (
        0,
        0,
        7,
        "ended",
    )


def small_calls(books, count):
    """So many short requests of another client, each after the one before: turns that each one waited."""
    waited = [0] * count
    for at in range(count):
        books.submit(row := Row([1] * 10, 5, client="other"))
        while not row.read:
            for action in books.read_next():
                if isinstance(action, Read):
                    books.dispatched(action)
                    if action.last and action.row.most == 1:  # it ends with its first token
                        books.end(action.row)
            waited[at] += not row.read
        for _, running in books.running:
            books.decoded(running, 5)
        books.end(row)
    return waited


def test_a_flood_of_one_client_holds_no_other():
    books = Scheduler(rows=8, pages=200, capacity=4096, chunk=256)
    for priority in range(500):  # rows of low priority are passed over by later ones of their own client
        books.submit(Row([2] * 200, 600, priority=-(priority % 3), client="flood"))
    while len(books.running) < 8:
        books.dispatched(books.read_next()[-1])
    assert max(small_calls(books, 5 * clients.PATIENCE)) == 0
    assert len(books.seated) >= 7 and books.preemptions >= 1


@pytest.mark.parametrize("length", [2000, 1])
def test_prompts_of_one_client_hold_no_other(length):
    """Neither long ones, nor short ones that end with their first token."""
    books = Scheduler(rows=4, pages=200, capacity=4096, chunk=256)
    for at in range(500):
        books.submit(Row([at] * length, 1, client="flood"))
    waited = small_calls(books, 100)
    assert max(waited) <= 2 and sum(waited) <= 150  # the model's work is shared equally: in turns


def test_clients_share_slots_and_every_row_ends():
    books = Scheduler(rows=6, pages=100, capacity=4096, chunk=256)
    rows = {name: [Row([at] * 10, 40, client=name) for at in range(9)] for name in "abc"}
    for row in rows["a"]:
        books.submit(row)
    turn(books)
    assert len(books.running) == 6
    for row in rows["b"] + rows["c"]:
        books.submit(row)
    turn(books)
    assert [sum(row.client == name for row in books.seated) for name in "abc"] == [2, 2, 2]
    assert rows["a"][0].state == rows["a"][1].state == "running"  # the older ones stay
    for _ in range(200):
        turn(books)
        for _, row in books.running:
            books.decoded(row, 10)
            if row.held >= 50:
                books.end(row)
    assert all(row.ended for row in sum(rows.values(), []))


def turn(books):
    """Prefills all that there is room for."""
    while actions := books.read_next():
        for action in actions:
            if isinstance(action, Read):
                books.dispatched(action)


def test_nobody_is_preempted_for_a_client_whose_row_does_not_fit():
    books = Scheduler(rows=2, pages=12, capacity=640, chunk=256)
    for name in ("a", "a", "b"):
        books.submit(Row([ord(name)] * 300, 20, client=name))
        turn(books)
    first, second = books.seated
    assert (first.client, second.client) == ("a", "b")  # five pages and one more each: one had to go
    books.submit(Row([3] * 600, 20, client="c"))  # would take ten
    turn(books)
    assert [row.client for row in books.seated] == ["a", "b"]


def test_later_answers_of_a_request_wait_behind_first_ones():
    books = Scheduler(rows=2, pages=50, capacity=640, chunk=256)
    many = [Row([1] * 10, 20, later=at // 2) for at in range(8)]
    for row in many:
        books.submit(row)
    turn(books)
    books.submit(small := Row([2] * 10, 20))
    books.end(many[0])
    turn(books)
    assert small.state == "running"


def test_idle_clients_are_forgotten():
    books = Scheduler(rows=1, pages=8, capacity=640, chunk=256)
    for at in range(3 * clients._REMEMBERED):
        books.submit(row := Row([1], 1, client=str(at)))
        turn(books)
        books.end(row)
    assert len(books.clients._clients) <= clients._REMEMBERED + 1


def test_a_preempted_row_comes_back_before_it_goes_on():
    """Also where room was made for it just now."""
    books = Scheduler(rows=4, pages=24, capacity=4096, chunk=256, prefix_cache=False)
    rows = [Row([1] * 300, 300, priority=-5, client=name) for name in "aab"]
    for row in rows:
        books.submit(row)
    turn(books)
    for _ in range(5):
        books.grow(64)
        for _, row in books.running:
            books.decoded(row, 64)
    assert any(row.away for row in rows)
    for _ in range(2):
        books.submit(Row([2], 1, client="a"))
    away = {row for row in rows if row.away}
    while actions := books.read_next():
        for action in actions:
            if isinstance(action, Read):
                assert action.row not in away and action.count > 0
                books.dispatched(action)
            elif action.out:
                away.add(action.row)
            else:
                away.discard(action.row)


@pytest.mark.parametrize("length", [10, 1500])
def test_a_client_saves_nothing_up_while_it_has_one_long_answer(length):
    books = Scheduler(rows=4, pages=400, capacity=4096, chunk=256, prefix_cache=False)
    books.submit(Row([1], 4000, client="b"))
    turn(books)
    for _ in range(50):  # of another client meanwhile
        books.submit(row := Row([2] * 1500, 1, client="a"))
        turn(books)
        books.end(row)
    for _ in range(200):
        books.submit(Row([3] * 1500, 1, client="b"))
    books.submit(row := Row([4] * length, 1, client="a"))
    pieces = 0
    while not row.read:
        for action in books.read_next():
            if isinstance(action, Read):
                pieces += 1
                books.dispatched(action)
                if action.last and action.row is not row:
                    books.end(action.row)
    assert pieces <= 3 * (length // 64 + 2)
