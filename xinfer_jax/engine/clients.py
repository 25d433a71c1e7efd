"""The order of rows by client: clients share the slots equally and, within their shares, the work of the
model.

The engine counts the tokens that it computes for each client. Between two clients, the one with fewer tokens
goes first (virtual token counter, Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

When a client without waiting rows submits one, its counter is raised to the smallest counter of the clients
with waiting rows. If there are none, it is raised to the counter of the client that had the last waiting row.
So a client saves up nothing while it is idle, and pays nothing for tokens that were computed while no other
client waited.
"""

import dataclasses
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

STARVATION_LIMIT = 32  # a row, or a client without a slot, that was overtaken so often goes first
_DECODE_WEIGHT = 2  # a decoded token counts as many tokens of a prompt
_MAX_IDLE_CLIENTS = 1024  # whose counters are kept


@dataclasses.dataclass
class Client:
    waiting: list[Any] = dataclasses.field(default_factory=list)  # its rows without a slot, by rank
    slots: int = 0  # the number of its other rows
    tokens: int = 0  # that the model computed for it, padding included
    overtaken: int = 0  # rows of other clients that got their first slot while it waited and had none

    @property
    def is_active(self) -> bool:
        return bool(self.waiting or self.slots)


class Clients:
    """All clients of an engine with this number of slots, and the rows that wait."""

    def __init__(self, slots: int):
        self._slots = slots
        self._clients: OrderedDict[str, Client] = OrderedDict()  # the one idle for the longest time first
        self._last_waiting = Client()  # that had the last waiting row

    @property
    def waiting(self) -> list[Any]:
        """All rows without a slot, with the rows of each client by rank."""
        return [row for client in self._clients.values() for row in client.waiting]

    @property
    def share(self) -> int:
        """Slots that each active client may have while others wait."""
        return max(1, self._slots // max(1, len(self._active)))

    @property
    def _active(self) -> list[Client]:
        return [client for client in self._clients.values() if client.is_active]

    def client_of(self, row: Any) -> Client:
        return self._clients[row.client]

    def add(self, row: Any, preempted: bool = False) -> None:
        """Queues a row. preempted: it had a slot just now."""
        client = self._clients.setdefault(row.client, Client())
        if not (client.waiting or preempted):
            others = (other.tokens for other in self._clients.values() if other.waiting)
            client.tokens = max(client.tokens, min(others, default=self._last_waiting.tokens))
        insort(client.waiting, row, key=attrgetter("rank"))

    def take_slot(self, row: Any) -> None:
        """Records that a waiting row gets a slot, and overtakes the other clients that wait without one."""
        own = self.client_of(row)
        self._unqueue(row)
        own.slots += 1
        if own.overtaken >= STARVATION_LIMIT:
            row.overtaken = STARVATION_LIMIT
        own.overtaken = 0
        if row.is_new:
            for client in self._active:
                client.overtaken += bool(client is not own and client.waiting and not client.slots)

    def overtake(self, row: Any, earlier: Iterable[Any]) -> None:
        """Records that a row got a slot before these earlier rows of its client."""
        for other in earlier:
            other.overtaken += 1
        self.client_of(row).waiting.sort(key=attrgetter("rank"))

    def free_slot(self, row: Any) -> None:
        self.client_of(row).slots -= 1
        self._forget_if_idle(row.client)

    def remove(self, row: Any) -> None:
        self._unqueue(row)
        self._forget_if_idle(row.client)

    def count_tokens(self, row: Any, prefilled: int = 0, decoded: int = 0) -> None:
        """Adds the tokens that the model computed for a row, padding included."""
        if row.client in self._clients:  # the row may have ended meanwhile
            self.client_of(row).tokens += prefilled + _DECODE_WEIGHT * decoded

    def next_row(self) -> Any:
        """Returns the row that gets the next slot, or None if no row waits."""
        return next(iter(self.by_urgency(self.first_rows())), None)

    def first_rows(self) -> list[Any]:
        return [client.waiting[0] for client in self._clients.values() if client.waiting]

    def by_urgency(self, rows: Iterable[Any]) -> list[Any]:
        """Returns rows of any clients, the most urgent first."""
        first: dict[str, Any] = {}
        for row in rows:
            if row.client not in first or row.rank < first[row.client].rank:
                first[row.client] = row
        share = self.share
        orders = {name: self._client_order(row, share) for name, row in first.items()}
        return sorted(rows, key=lambda row: (orders[row.client], row.rank))

    def _client_order(self, row: Any, share: int) -> tuple[bool, int, bool, int, int, int]:
        """Returns the order of the client whose first row this is. The lowest goes first."""
        client = self.client_of(row)
        priority = row.priority
        if row.overtaken >= STARVATION_LIMIT:  # it is the client's first row, but its client goes no sooner
            priority = max(other.priority for other in (row, *client.waiting))
        starved = client.overtaken >= STARVATION_LIMIT
        beyond_share = client.slots + (row.slot is None) > share
        urgency = 0 if starved else -priority
        return not starved, urgency, beyond_share, client.tokens, client.slots, row.arrival

    def beyond_share(self, with_slots: Iterable[Any]) -> list[Any]:
        """Returns the rows that clients have beyond their share of the slots, in the order to preempt them:
        each time the last by rank of the client with the most slots.
        """
        rows = list(with_slots)
        found = list[Any]()
        slots = {row.client: self.client_of(row).slots for row in rows}
        share = self.share
        while slots:
            most = max(slots, key=lambda name: slots[name])
            if slots[most] <= share:
                break
            last = max((r for r in rows if r.client == most and r not in found), key=attrgetter("rank"))
            found.append(last)
            slots[most] -= 1
        return found

    def _unqueue(self, row: Any) -> None:
        client = self.client_of(row)
        client.waiting.remove(row)
        if not client.waiting:
            self._last_waiting = client

    def _forget_if_idle(self, name: str) -> None:
        """Moves a client that became idle to the end, and forgets the clients that have been idle for the
        longest time.
        """
        if self._clients[name].is_active:
            return
        self._clients.move_to_end(name)
        idle = [name for name, client in self._clients.items() if not client.is_active]
        for old in idle[: max(0, len(idle) - _MAX_IDLE_CLIENTS)]:
            del self._clients[old]
