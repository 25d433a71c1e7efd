"""Runs the requests of admins: one at a time of each queue, in a thread."""

from collections.abc import Callable, Collection
from typing import Any

from starlette.requests import Request as HTTPRequest

from ..api.fields import BodyError
from ..errors import format_value
from .http_responses import APIError
from .request_body import receive_body
from .service import Service


async def run_admin_job(
    service: Service,
    request: HTTPRequest,
    work: Callable[[dict[str, Any]], Any],
    fields: Collection[str] | None = None,
    queue: str = "admins",
) -> Any:
    """Returns the result of the work. It gets the body, whose fields are checked.

    Args:
        service: the service of the server.
        request: the request of an admin.
        work: runs in a thread, while requests of clients go on.
        fields: the fields that the body may have. None: there is no body, and the work gets {}.
        queue: jobs of one queue run one after another. A job that must not wait for long ones has its own.

    Raises:
        APIError: the service cannot answer now, the body is no JSON object, or there should be none.
        BodyError: the body has another field.
    """
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    if fields is None and has_body:
        raise APIError(400, "this request has no body: a mode is part of the path, as in /pause?mode=keep")
    reservation = service.admit(request)
    try:
        data = []
        if fields is not None:
            data = [await receive_body(request, reservation, service.settings.max_body_bytes)]

        def run() -> Any:
            body = service.load_body(data, None) if fields is not None else {}
            reject_unknown_fields(body, fields or ())
            return work(body)

        # One at a time, of all admins: a job may take seconds, in which other bodies go on.
        return await service.workers.run(queue, False, run)
    finally:
        reservation.release()


def reject_unknown_fields(body: dict[str, Any], fields: Collection[str]) -> None:
    """Raises BodyError for a field that is unknown."""
    if others := sorted(body.keys() - {*fields}):
        raise BodyError(others[0], f"{format_value(others[0])} is no field here: leave it out")
