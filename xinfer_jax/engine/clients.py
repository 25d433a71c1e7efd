"""Whose row goes first: clients share slots equally, and within their shares the tokens of the model.

The tokens computed for each client are counted (virtual token counter; Sheng et al., Fairness in Serving
Large Language Models, OSDI 2024): of two clients the one with fewer goes first. A client none of whose rows
waited starts at the smallest counter of those with rows that wait, or else at that of the client that had
such rows last. So nobody saves anything up, and nobody pays for what was computed while no other waited.
"""

import dataclasses
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

PATIENCE = 32  # a row, or a client without a slot, that was passed over so often goes first
_DECODED = 2  # what a decoded token counts in tokens of a prompt
_REMEMBERED = 1024  # clients whose counters are kept while they are idle


@dataclasses.dataclass
class Client:
    """One client.

    Attributes:
        waiting: its rows without a slot, by rank.
        slots: of its other rows.
        tokens: that the model computed for it, padding included.
        passed: rows of other clients that got a slot while it had none and waited.
    """

    waiting: list[Any] = dataclasses.field(default_factory=list)
    slots: int = 0
    tokens: int = 0
    passed: int = 0

    @property
    def active(self) -> bool:
        """Whether it has any rows."""
        return bool(self.waiting or self.slots)


class Clients:
    """All clients of an engine, and the rows that wait.

    Args:
        slots: of the engine.
    """

    def __init__(self, slots: int):
        self._slots = slots
        self._clients: OrderedDict[str, Client] = OrderedDict()  # the one that was idle the longest first
        self._last = Client()  # whose last waiting row got a slot, or ended

    @property
    def waiting(self) -> list[Any]:
        """All rows without a slot, those of each client by rank."""
        return [row for client in self._clients.values() for row in client.waiting]

    @property
    def share(self) -> int:
        """Slots that each active client may have while others wait."""
        return max(1, self._slots // max(1, len(self._active)))

    @property
    def _active(self) -> list[Client]:
        return [client for client in self._clients.values() if client.active]

    def of(self, row: Any) -> Client:
        """The client of a row."""
        return self._clients[row.client]

    def add(self, row: Any, preempted: bool = False) -> None:
        """The row waits from now on. preempted: it had a slot just now."""
        client = self._clients.setdefault(row.client, Client())
        if not (client.waiting or preempted):
            others = (other.tokens for other in self._clients.values() if other.waiting)
            client.tokens = max(client.tokens, min(others, default=self._last.tokens))
        insort(client.waiting, row, key=attrgetter("rank"))

    def enter(self, row: Any) -> None:
        """The row gets a slot: rows of its client that came before it, and other clients that have no slot,
        were passed over.
        """
        own = self.of(row)
        self._unqueue(row)
        own.slots += 1
        if own.passed >= PATIENCE:
            row.passed = PATIENCE
        own.passed = 0
        for client in self._active:
            client.passed += bool(client is not own and client.waiting and not client.slots)

    def pass_over(self, row: Any, earlier: Iterable[Any]) -> None:
        """These rows of the client of `row` came before it and do not run yet."""
        for other in earlier:
            other.passed += 1
        self.of(row).waiting.sort(key=attrgetter("rank"))

    def leave(self, row: Any) -> None:
        """The row has a slot no longer."""
        self.of(row).slots -= 1
        self._forget(row.client)

    def remove(self, row: Any) -> None:
        """The row waits no longer, and has no slot either."""
        self._unqueue(row)
        self._forget(row.client)

    def count(self, row: Any, prefilled: int = 0, decoded: int = 0) -> None:
        """Tokens that the model computed for a row, padding included."""
        if row.client in self._clients:  # its row may have ended meanwhile
            self.of(row).tokens += prefilled + _DECODED * decoded

    def next(self) -> Any:
        """The row that gets the next slot; None: no row waits."""
        return next(iter(self.in_order(self.heads())), None)

    def heads(self) -> list[Any]:
        """The first row that waits, of each client."""
        return [client.waiting[0] for client in self._clients.values() if client.waiting]

    def in_order(self, rows: Iterable[Any]) -> list[Any]:
        """Rows of any clients, the one whose turn it is first."""
        first: dict[str, Any] = {}
        for row in rows:
            if row.client not in first or row.rank < first[row.client].rank:
                first[row.client] = row
        share = self.share
        turns = {name: self._turn(row, share) for name, row in first.items()}
        return sorted(rows, key=lambda row: (turns[row.client], row.rank))

    def _turn(self, row: Any, share: int) -> tuple[bool, int, bool, int, int, int]:
        """Of a client whose first row this is; lower goes first."""
        client = self.of(row)
        priority = row.priority
        if row.passed >= PATIENCE:  # it goes first within its client, but the client no sooner
            priority = max(other.priority for other in (row, *client.waiting))
        passed_over = client.passed >= PATIENCE
        beyond = client.slots + (row.slot is None) > share
        urgency = 0 if passed_over else -priority
        return not passed_over, urgency, beyond, client.tokens, client.slots, row.arrival

    def beyond_share(self, with_slots: Iterable[Any]) -> list[Any]:
        """The rows with slots that clients have beyond their share, in the order in which to preempt them:
        the last by rank of the client that has the most slots.
        """
        rows = list(with_slots)
        found = list[Any]()
        slots = {row.client: self.of(row).slots for row in rows}
        share = self.share
        while slots and slots[most := max(slots, key=lambda name: slots[name])] > share:
            last = max((r for r in rows if r.client == most and r not in found), key=attrgetter("rank"))
            found.append(last)
            slots[most] -= 1
        return found

    def _unqueue(self, row: Any) -> None:
        client = self.of(row)
        client.waiting.remove(row)
        if not client.waiting:
            self._last = client

    def _forget(self, name: str) -> None:
        """Where a client has become idle: moves it to the end, and forgets those idle the longest."""
        if self._clients[name].active:
            return
        self._clients.move_to_end(name)
        idle = [name for name, client in self._clients.items() if not client.active]
        for old in idle[: max(0, len(idle) - _REMEMBERED)]:
            del self._clients[old]
