"""Conversion of the tree of a regular expression to a deterministic automaton over bytes of UTF-8."""

from collections.abc import Iterator, Sequence

import numpy as np

from .regex_parser import NotRegularError, Ranges, Tree

MAX_STATES = 512
_MAX_TREES = 100_000
_MAX_PARTS = 20_000  # states before the automaton is made deterministic
_LENGTH_LIMITS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # the last characters of 1, 2, 3 and 4 bytes
_Edge = tuple[int, int, int]  # from this byte to that byte, to this state


class _Parts:
    """A nondeterministic automaton (Thompson 1968)."""

    def __init__(self) -> None:
        self.edges: list[list[_Edge]] = []
        self.empty: list[list[int]] = []  # states that are reached without a byte
        self._trees = 0  # that were added; an empty one adds no state

    def state(self) -> int:
        if len(self.edges) >= _MAX_PARTS:
            raise NotRegularError(f"more than {_MAX_PARTS} parts")
        self.edges.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def add(self, tree: Tree, start: int) -> int:
        """Adds a tree from a state on. Returns the state after it."""
        self._trees += 1
        if self._trees > _MAX_TREES:
            raise NotRegularError(f"more than {_MAX_TREES} parts")
        kind = tree[0] if tree and isinstance(tree[0], str) else "set"
        if kind == "join":
            for part in tree[1]:
                start = self.add(part, start)
            return start
        end = self.state()
        if kind == "or":
            for part in tree[1]:
                self.empty[self.add(part, start)].append(end)
        elif kind == "repeat":
            self._repeat(tree, start, end)
        else:
            self._add_characters(tree, start, end)
        return end

    def _repeat(self, repeat: Tree, start: int, end: int) -> None:
        _, tree, least, most = repeat
        for _ in range(least):
            start = self.add(tree, start)
        if most is None:
            loop = self.state()
            self.empty[start].append(loop)
            self.empty[self.add(tree, loop)].append(loop)
            start = loop
        for _ in range(least, most or 0):
            self.empty[start].append(end)
            start = self.add(tree, start)
        self.empty[start].append(end)

    def _add_characters(self, ranges: Ranges, start: int, end: int) -> None:
        before: dict[tuple[tuple[int, int], ...], int] = {(): end}  # the state before these last bytes

        def state_before(rest: tuple[tuple[int, int], ...]) -> int:
            if rest not in before:
                before[rest] = self.state()
                self.edges[before[rest]].append((*rest[0], state_before(rest[1:])))
            return before[rest]

        for low, high in ranges:
            for (first, last), *rest in _byte_ranges(low, high):
                self.edges[start].append((first, last, state_before(tuple(rest))))

    def reach(self, states: Sequence[int]) -> frozenset[int]:
        """Returns these states, and all that they reach without a byte."""
        found = set(states)
        left = [*found]
        while left:
            for state in self.empty[left.pop()]:
                if state not in found:
                    found.add(state)
                    left.append(state)
        return frozenset(found)


def byte_automaton(tree: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Returns the automaton of a tree. State 0 is the first. Raises NotRegularError for more than 512 states.

    Returns:
        The next state, int16 [states, 256]. Below 0: no text that matches continues in this way. And bool
        [states]: the text may end.
    """
    parts = _Parts()
    start = parts.state()
    end = parts.add(tree, start)
    ranges = [(low, high + 1) for edges in parts.edges for low, high, _ in edges]
    bounds = sorted({0, 256, *(bound for one in ranges for bound in one)})
    first = parts.reach([start])
    numbers = {first: 0}
    rows: list[np.ndarray] = []
    for subset in (waiting := [first]):
        if len(waiting) > MAX_STATES:
            raise NotRegularError(f"more than {MAX_STATES} states")
        row = np.full(256, -1, np.int16)
        edges = [edge for state in subset for edge in parts.edges[state]]
        for low, high in zip(bounds[:-1], bounds[1:], strict=True):
            if to := [state for first_byte, last_byte, state in edges if first_byte <= low <= last_byte]:
                reached = parts.reach(to)
                if reached not in numbers:
                    numbers[reached] = len(waiting)
                    waiting.append(reached)
                row[low:high] = numbers[reached]
        rows.append(row)
    accepts_S = np.array([end in subset for subset in waiting])
    return _without_dead_ends(np.array(rows), accepts_S), accepts_S


def _without_dead_ends(next_SX: np.ndarray, accepts_S: np.ndarray) -> np.ndarray:
    """Returns the table without ways from which no end can be reached."""
    live_S = accepts_S
    next_SY = np.unique(next_SX, axis=1)  # few columns differ
    while True:
        leads_S = live_S | (live_S[next_SY] & (next_SY >= 0)).any(1)
        if (leads_S == live_S).all():
            return np.where(live_S[next_SX], next_SX, -1).astype(np.int16)
        live_S = leads_S


def _byte_ranges(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """Yields sequences of ranges of bytes, which together are the UTF-8 of these characters."""
    for limit in _LENGTH_LIMITS:
        if low <= min(high, limit):
            yield from _of_one_length(low, min(high, limit))
            low = limit + 1


def _of_one_length(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    for bits in (6, 12, 18):  # of continuation bytes
        mask = (1 << bits) - 1
        if low & ~mask != high & ~mask and high > 0x7F:
            if low & mask:
                yield from _of_one_length(low, low | mask)
                yield from _of_one_length((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _of_one_length(low, (high & ~mask) - 1)
                yield from _of_one_length(high & ~mask, high)
                return
    yield [*zip(chr(low).encode(), chr(high).encode(), strict=True)]
