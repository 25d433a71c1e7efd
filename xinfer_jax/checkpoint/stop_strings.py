"""Finds stop strings in a text that comes in pieces."""

from collections import deque
from functools import lru_cache


class StopStrings:
    """Finds the first of some strings in a text that comes in pieces, in time linear in the text (Aho and
    Corasick 1975). A state is the longest end of the text that begins a stop string.

    Attributes:
        depth: characters of each state.
    """

    def __init__(self, stops: tuple[str, ...]):
        self.depth = [0]
        self._next = list[dict[str, int]]([{}])
        self._ending = [0]  # characters of the longest stop string that ends there; 0: none
        for stop in stops:
            state = 0
            for letter in stop:
                if letter not in self._next[state]:
                    self._next[state][letter] = len(self.depth)
                    self.depth.append(self.depth[state] + 1)
                    self._next.append({})
                    self._ending.append(0)
                state = self._next[state][letter]
            self._ending[state] = len(stop)
        self._shorter = [0] * len(self.depth)  # the next longest end of the text that begins a stop string
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for letter, child in self._next[state].items():
                self._shorter[child] = self._after(self._shorter[state], letter)
                self._ending[child] = self._ending[child] or self._ending[self._shorter[child]]
                queue.append(child)

    @staticmethod
    @lru_cache(8)  # the largest takes 4 MiB
    def of(stops: tuple[str, ...]) -> "StopStrings":
        """The same for all answers of a request."""
        return StopStrings(stops)

    def find(self, state: int, piece: str, begin: int) -> tuple[int, tuple[int, int] | None]:
        """The state behind a piece that begins at this place of a text, and where the first stop string that
        it completes begins and ends.
        """
        found = None
        for end, letter in enumerate(piece, begin + 1):
            state = self._after(state, letter)
            if (length := self._ending[state]) and (found is None or end - length < found[0]):
                found = end - length, end
        return state, found

    def _after(self, state: int, letter: str) -> int:
        while state and letter not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(letter, 0)
