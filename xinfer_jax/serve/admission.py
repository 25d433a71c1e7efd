"""Admission control: limits on the answers, tokens and body bytes that clients have in flight. Excess
requests get 429.
"""

import dataclasses
import threading
from collections import Counter, defaultdict
from contextlib import AbstractAsyncContextManager

from starlette.requests import ClientDisconnect

from ..api.bodies import ParsedBody
from .arrivals import Arrival, Arrivals
from .http_responses import APIError
from .server_settings import ServerSettings

_BODIES = 4  # of the largest size, that one client may have in flight
_BYTES_PER_TOKEN = 100  # of a response, which count as one token


class AdmissionControl:
    """The reservations of the clients of one server. It is thread-safe."""

    def __init__(self, settings: ServerSettings):
        self._settings = settings
        self._lock = threading.Lock()
        self.rows = 0  # of the engine, once it exists
        self.arrivals = Arrivals(settings)
        self.used = {unit: Counter[str]() for unit in ("answers", "tokens", "bytes")}  # by client

    def admit(self, client: str, address: str) -> "Reservation":
        """Returns a reservation of nothing yet, for a request of this client. Raises APIError 429 if no
        answer has room.
        """
        with self._lock:
            self._check("answers", client, 1, 1)
        return Reservation(self, client, address)

    def update(self, reservation: "Reservation", amounts: dict[str, int]) -> None:
        """Replaces the amounts of a reservation."""
        with self._lock:
            if reservation.released and any(amounts.values()):
                raise ClientDisconnect
            client = reservation.client
            more = {unit: count - reservation.amounts[unit] for unit, count in amounts.items()}
            for unit in amounts:
                if more[unit] > 0:
                    self._check(unit, client, amounts[unit], more[unit])
            for unit in amounts:
                self.used[unit][client] += more[unit]
                if not self.used[unit][client]:
                    del self.used[unit][client]
            reservation.amounts.update(amounts)

    def _check(self, unit: str, client: str, count: int, more: int) -> None:
        settings = self._settings
        used = self.used[unit]
        body_bytes = _BODIES * settings.max_body_bytes
        waiting_answers = settings.max_waiting + self.rows
        per_client, total, flag = dict(
            answers=(settings.max_waiting_per_client, waiting_answers, "max_waiting"),
            tokens=(
                settings.max_waiting_tokens_per_client,
                settings.max_waiting_tokens,
                "max_waiting_tokens",
            ),
            bytes=(body_bytes, 4 * body_bytes, "max_body_bytes"),
        )[unit]
        most = min(per_client, total)
        if count > most:
            name = f"{flag}_per_client" if per_client <= total and unit != "bytes" else flag
            said = f"the request has {count} {unit}, and the server takes {most} at most (--{name})"
            raise APIError(400, f"{said}: send several smaller requests")
        if used[client] + more > per_client:
            said = f"this client has {used[client]} {unit} in flight, of at most {per_client}"
            raise APIError(429, f"{said}: wait until a request ends")
        if used.total() + more > total:
            raise APIError(429, f"too many requests wait ({used.total()} {unit} of {total}): try again later")


@dataclasses.dataclass(eq=False)
class Reservation:
    """The part of the limits that one request has reserved."""

    _admission: AdmissionControl
    client: str
    address: str
    released: bool = False
    amounts: dict[str, int] = dataclasses.field(default_factory=lambda: defaultdict(int))

    def reserve(self, **amounts: int) -> None:
        """Sets the number of answers, tokens or bytes. Raises ClientDisconnect after `release`, and APIError
        429, or 400 if the request alone exceeds a limit.
        """
        self._admission.update(self, amounts)

    def arrive(self, seconds: float) -> AbstractAsyncContextManager[Arrival]:
        """Within the block, the body of the request arrives, in this number of seconds: see `Arrivals`."""
        return self._admission.arrivals.receive((self.client, self.address), seconds)

    def check(self) -> None:
        """Raises ClientDisconnect after `release`."""
        if self.released:
            raise ClientDisconnect

    def release(self) -> None:
        """Ends the reservation. Further calls do nothing."""
        self.released = True  # before `update`, so that no other thread can reserve after it
        self._admission.update(self, dict.fromkeys(self.amounts, 0))


def count_answers(parsed: ParsedBody) -> int:
    """Returns the number of answers that the engine makes for a body."""
    return len(parsed.prompts) * max(parsed.options.n, parsed.options.best_of or 0)


def count_tokens(parsed: ParsedBody) -> int:
    """Returns the number of tokens to reserve for a body: its prompts, once for each time the response
    repeats them, and its answers at their maximum. A token with k top log-probabilities counts as 1 + k, as
    each takes about 100 bytes. If the response has the experts of each token, each 100 bytes of them count as
    one more token.
    """
    top = parsed.logprobs or 0
    prompt_tokens = sum(map(len, parsed.prompts))
    prompts = prompt_tokens * (parsed.options.n * (1 + top) if parsed.echo else 1)
    most = count_answers(parsed) * parsed.options.max_tokens
    with_experts = prompt_tokens * parsed.options.n + most
    experts = -(-with_experts * parsed.routed_experts_bytes // _BYTES_PER_TOKEN)
    return prompts + most * (1 + top) + experts
