"""Tests of the choice of the process that does a job, and of the client whose job is next."""

import threading
from types import SimpleNamespace

import pytest

from xinfer_jax.grammar.turns import CHECK, MASKS, NEW, QUICK, SLOW, Turns


@pytest.fixture
def turns():
    with (lock := threading.RLock()):
        yield Turns(lock)


def job(client, name=CHECK, key="a", quick=0.1):
    return SimpleNamespace(client=client, name=name, key=key, quick_seconds=quick)


def place(turns, one):
    """(name, pace) of the slot that gets a job."""
    turns.add(one)
    (slot,) = (slot for slot in turns.slots if one in slot.jobs)
    return slot, (slot.name, slot.pace)


def work(turns, one, seconds):
    """Does a job alone; where."""
    slot, where = place(turns, one)
    assert turns.take(slot) is one and slot.client == one.client
    turns.end(slot, one, seconds)
    assert slot.client is None
    return where


def test_jobs_that_are_not_quick_have_processes_of_their_own(turns):
    assert work(turns, job("one"), 0.01) == (CHECK, NEW)
    assert work(turns, job("one"), 0.01) == (CHECK, QUICK)
    assert work(turns, job("one", MASKS), 0.01) == (MASKS, QUICK)
    assert work(turns, job("one"), 0.2) == (CHECK, QUICK)
    for _ in range(16):  # the next ones of this client
        assert work(turns, job("one"), 0.01) == (CHECK, SLOW)
        assert work(turns, job("one", MASKS), 0.01) == (MASKS, QUICK)
    assert work(turns, job("one"), 0.01) == (CHECK, QUICK)
    assert work(turns, job("other", MASKS), 0.2) == (MASKS, QUICK)
    assert work(turns, job("other", MASKS), 0.2) == (MASKS, SLOW)
    assert work(turns, job("one"), 0.0) == (CHECK, QUICK)  # it did not begin, and says nothing
    assert work(turns, job("one"), 0.01) == (CHECK, QUICK)


def test_grammars_are_slow_for_all_and_masks_for_their_client(turns):
    turns.set_slow(job("one"))
    turns.set_slow(job("one", MASKS))
    assert [place(turns, job(client))[1] for client in ("one", "other")] == [(CHECK, SLOW)] * 2
    assert place(turns, job("other", key="b"))[1] == (CHECK, NEW)
    assert place(turns, job("one", MASKS))[1] == (MASKS, SLOW)
    assert place(turns, job("other", MASKS))[1] == (MASKS, QUICK)


def test_the_client_goes_first_whose_jobs_took_least(turns):
    """A client that is known to send quick jobs goes before clients of which nothing is known."""
    for client, seconds in (("cheap", 0.001), ("dear", 0.05)):
        for _ in range(4):
            work(turns, job(client, MASKS), seconds)
    slot = next(slot for slot in turns.slots if (slot.name, slot.pace) == (MASKS, QUICK))
    jobs = [job(client, MASKS) for client in ("dear", "new", "cheap", "dear")]
    slot.jobs.extend(jobs)
    assert [turns.take(slot) for _ in jobs] == [jobs[i] for i in (2, 1, 0, 3)]


def test_a_client_keeps_its_slot_while_no_other_is_free(turns):
    """Its process knows the grammars of its answers."""
    first, _ = place(turns, job("one", MASKS))
    second, _ = place(turns, job("other", MASKS))
    assert first is not second
    for slot in (first, second):
        turns.take(slot)
        slot.client = None
    assert place(turns, job("other", MASKS))[0] is second and place(turns, job("one", MASKS))[0] is first
    third, _ = place(turns, job("third", MASKS))
    assert third not in (first, second) and place(turns, job("one", MASKS))[0] is first
