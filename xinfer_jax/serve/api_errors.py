"""`APIError`: an error as the OpenAI API returns it."""

from starlette.responses import JSONResponse, Response


class APIError(Exception):
    """An HTTP error: its status, a message, and the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def response(self) -> Response:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = dict(message=str(self), type=kind, param=self.param, code=self.code)
        headers = {"retry-after": "1"} if self.status in (429, 503) else {}
        if self.status in (408, 413):  # the rest of the body stays unread
            headers["connection"] = "close"
        return JSONResponse(dict(error=error), self.status, headers)
