"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: an admin adds and removes adapters
while requests are served.
"""

from pathlib import Path
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from ..adapters.peft_files import CONFIG, WEIGHTS
from ..api.fields import BodyError
from ..errors import format_value
from .admin_jobs import run_admin_job
from .http_responses import APIError
from .served_paths import directory_below
from .service import Service

_FIELDS = {"lora_name", "lora_path", "load_inplace"}


class AdapterEndpoints:
    """The endpoints of one server."""

    def __init__(self, service: Service):
        self._service = service

    async def load(self, request: HTTPRequest) -> Response:
        """Adds an adapter. With load_inplace it replaces the adapter with the same name."""
        return await self._respond(request, self._load)

    async def unload(self, request: HTTPRequest) -> Response:
        """Removes an adapter."""
        return await self._respond(request, self._unload)

    async def _respond(self, request: HTTPRequest, work: Any) -> Response:
        def run(body: dict[str, Any]) -> str:
            text: str = work(body)
            self._service.log(text)
            return text

        return PlainTextResponse(await run_admin_job(self._service, request, run, _FIELDS))

    def _load(self, body: dict[str, Any]) -> str:
        engine: Any = self._service.engine
        name = body.get("lora_name")
        path = self._path(body.get("lora_path"))
        if name in (self._service.settings.name, self._service.settings.model):
            raise BodyError("lora_name", f"{format_value(name)} is the name of the model: give another")
        if not isinstance(in_place := body.get("load_inplace", False), bool):
            raise BodyError("load_inplace", f"it must be true or false, got {format_value(in_place)}")
        if in_place and isinstance(name, str) and name in engine.adapters:
            engine.update_adapter(name, path)
            return f"adapter {format_value(name)} is replaced"
        if isinstance(name, str) and name in engine.adapters:
            why = f"the adapter {format_value(name)} is loaded already: give load_inplace true to replace it"
            raise BodyError("lora_name", why)
        engine.add_adapter(name, path)
        return f"adapter {format_value(name)} is loaded"

    def _unload(self, body: dict[str, Any]) -> str:
        engine: Any = self._service.engine
        name = body.get("lora_name")
        if not isinstance(name, str) or name not in engine.adapters:
            raise APIError(404, f"no adapter is called {format_value(name)}", "lora_name", "model_not_found")
        engine.remove_adapter(name)
        return f"adapter {format_value(name)} is removed"

    def _path(self, given: Any) -> Path:
        """Returns a directory below --adapter_dir, as all its files are once links are resolved."""
        root = self._service.settings.adapter_dir
        if root is None:
            raise APIError(404, "adapters are not loaded here: the server needs --adapter_dir")
        files = lambda path: (path / CONFIG, path / WEIGHTS)  # noqa: E731
        return directory_below(root, "adapter_dir", "lora_path", given, files)
