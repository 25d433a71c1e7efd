"""What clients have under way: answers, tokens, and bytes of bodies. Who asks for more than the limits is
told to wait.
"""

import threading
from collections import Counter

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from ..api.bodies import Asked
from .settings import Settings

_BODIES = 4  # of the largest, from one client at a time


class Refused(Exception):
    """What is answered instead: a status, a message, and the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def response(self) -> Response:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = dict(message=str(self), type=kind, param=self.param, code=self.code)
        headers = {"retry-after": "1"} if self.status in (429, 503) else {}
        if self.status in (408, 413):  # the rest of the body is not read
            headers["connection"] = "close"
        return JSONResponse(dict(error=error), self.status, headers)


class Admission:
    """Counts of one server, by client. Any thread may ask."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._lock = threading.Lock()
        self.rows = 0  # of the engine, once it is there
        self.used = {unit: Counter[str]() for unit in ("answers", "tokens", "bytes")}

    def enter(self, client: str) -> "Ticket":
        """A request of this client; it counts as one answer until more is known.

        Raises:
            Refused: 429.
        """
        ticket = Ticket(self, client)
        ticket.hold(answers=1)
        return ticket

    def change(self, ticket: "Ticket", wanted: dict[str, int]) -> None:
        """Holds so many of each unit for a ticket, in place of what it held."""
        with self._lock:
            if ticket.left and any(wanted.values()):
                raise ClientDisconnect
            more = {unit: count - ticket.held[unit] for unit, count in wanted.items()}
            for unit, count in wanted.items():
                if more[unit] > 0:
                    self._check(unit, ticket.client, count, more[unit])
            for unit, count in more.items():
                self.used[unit][ticket.client] += count
                if not self.used[unit][ticket.client]:
                    del self.used[unit][ticket.client]
            ticket.held |= wanted

    def _check(self, unit: str, client: str, count: int, more: int) -> None:
        settings = self._settings
        used = self.used[unit]
        bodies = _BODIES * settings.max_body_bytes
        tokens = settings.max_waiting_tokens_per_client, settings.max_waiting_tokens
        own, whole, flag = dict(
            answers=(settings.max_waiting_per_client, settings.max_waiting + self.rows, "max_waiting"),
            tokens=(*tokens, "max_waiting_tokens"),
            bytes=(bodies, 4 * bodies, "max_body_bytes"),
        )[unit]
        if count > min(own, whole):
            name = f"{flag}_per_client" if own <= whole and unit != "bytes" else flag
            raise Refused(
                400,
                f"the request has {count} {unit}, and the server takes {min(own, whole)} at most (--{name}):"
                " send several smaller requests",
            )
        if used[client] + more > own:
            raise Refused(
                429, f"{used[client]} {unit} of yours are under way, of at most {own}: wait for one to end"
            )
        if used.total() + more > whole:
            raise Refused(429, f"too many requests wait ({used.total()} {unit} of {whole}): come again")


class Ticket:
    """What one request of a client holds.

    Attributes:
        held: of each unit.
        left: it holds nothing any more.
    """

    def __init__(self, admission: Admission, client: str):
        self._admission = admission
        self.client = client
        self.left = False
        self.held = dict.fromkeys(admission.used, 0)

    def hold(self, **wanted: int) -> None:
        """So many answers, tokens or bytes, in place of what it held.

        Raises:
            ClientDisconnect: it has left.
            Refused: 429; 400 where the request alone exceeds a limit.
        """
        self._admission.change(self, wanted)

    def leave(self) -> None:
        """Once is enough."""
        self.left = True  # seen by a thread that asks for more after that: `change` is one at a time
        self._admission.change(self, dict.fromkeys(self.held, 0))


def answers_of(asked: Asked) -> int:
    """Answers that the engine makes for a body."""
    return len(asked.prompts) * max(asked.options.n, asked.options.best_of or 0)


def tokens_of(asked: Asked) -> int:
    """Tokens that a body counts as: of its prompts, as often as they are shown, and of its answers at their
    longest. A token that is shown beside k others counts as 1 + k: each takes about 100 bytes.
    """
    shown = asked.logprobs or 0
    prompts = sum(map(len, asked.prompts)) * (asked.options.n * (1 + shown) if asked.echo else 1)
    return prompts + answers_of(asked) * asked.options.max_new_tokens * (1 + shown)
