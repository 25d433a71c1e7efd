"""Finds stop strings in a text that arrives in chunks."""

from collections import deque
from functools import lru_cache


class StopStringMatcher:
    """Finds the first stop string in a text that arrives in chunks, in time linear in the text (Aho and
    Corasick 1975). A state is the longest suffix of the text that is a prefix of a stop string.

    Attributes:
        depth: length in characters of each state's suffix.
    """

    def __init__(self, stops: tuple[str, ...]):
        self.depth = [0]
        self._next = list[dict[str, int]]([{}])
        self._match = [0]  # length of the longest stop string that ends at the state; 0: none
        for stop in stops:
            state = 0
            for letter in stop:
                if letter not in self._next[state]:
                    self._next[state][letter] = len(self.depth)
                    self.depth.append(self.depth[state] + 1)
                    self._next.append({})
                    self._match.append(0)
                state = self._next[state][letter]
            self._match[state] = len(stop)
        self._fallback = [0] * len(self.depth)  # the state of the next shorter suffix
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for letter, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], letter)
                self._match[child] = self._match[child] or self._match[self._fallback[child]]
                queue.append(child)

    @staticmethod
    @lru_cache(8)  # the largest takes 4 MiB
    def cached(stops: tuple[str, ...]) -> "StopStringMatcher":
        """A matcher that all answers of a request share."""
        return StopStringMatcher(stops)

    def find(self, state: int, chunk: str, start: int) -> tuple[int, tuple[int, int] | None]:
        """The state after a chunk, and the start and end of the first stop string that it completes.

        Args:
            state: after the text before the chunk; 0 at the start.
            chunk: the next part of the text.
            start: position of the chunk; the returned positions count from the same origin.
        """
        found = None
        for end, letter in enumerate(chunk, start + 1):
            state = self._step(state, letter)
            if (length := self._match[state]) and (found is None or end - length < found[0]):
                found = end - length, end
        return state, found

    def _step(self, state: int, letter: str) -> int:
        """The state after one more letter."""
        while state and letter not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(letter, 0)
