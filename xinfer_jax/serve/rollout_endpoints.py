"""/pause, /resume, /is_paused, /weight_info and /update_weights, as vLLM has them: a trainer pauses the
engine and replaces its weights while the server runs.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from ..api.fields import BodyError
from ..engine.pausing import PAUSE_MODES, RUNNING
from ..engine.weight_updates import MODES
from ..errors import format_value
from .admin_jobs import reject_unknown_fields, run_admin_job
from .http_responses import APIError
from .served_paths import directory_below
from .service import Service

_UPDATE_FIELDS = ("path", "weight_version", "mode")  # of update_info
_PAUSING = "admins who pause"  # they do not wait for an update that reads


class RolloutEndpoints:
    """The endpoints of one server."""

    def __init__(self, service: Service):
        self._service = service

    async def pause(self, request: HTTPRequest) -> Response:
        """Pauses the engine: ?mode=abort (as without it), wait or keep."""
        query = request.query_params.multi_items()
        ((name, mode), *others) = query or [("mode", "abort")]
        if others or name != "mode" or mode not in PAUSE_MODES:
            modes = ", ".join(PAUSE_MODES)
            got = format_value(request.url.query)
            raise APIError(400, f"{got} is unknown: the query is one mode, which is one of {modes}", name)
        queue = "admins who wait" if mode == "wait" else _PAUSING
        return await self._respond(request, lambda _: self._pause(mode), queue=queue)

    async def resume(self, request: HTTPRequest) -> Response:
        """Ends a pause."""
        return await self._respond(request, lambda _: self._resume(), queue=_PAUSING)

    async def is_paused(self, request: HTTPRequest) -> Response:
        """Says whether the engine is paused."""
        self._service.admit(request).release()
        return JSONResponse(dict(is_paused=self._is_paused))

    async def weight_info(self, request: HTTPRequest) -> Response:
        """Says the version of the weights."""
        self._service.admit(request).release()
        return JSONResponse(dict(weight_version=self._engine.version))

    async def update_weights(self, request: HTTPRequest) -> Response:
        """Replaces the weights by the weights of a directory."""
        return await self._respond(request, self._update, ["update_info"])

    async def _respond(
        self,
        request: HTTPRequest,
        work: Any,
        fields: Iterable[str] | None = None,
        queue: str = "admins",
    ) -> Response:
        if self._engine is not None and not self._has_own_engines:
            raise APIError(404, "engines in other processes (--peers) are not paused, and keep their weights")
        return JSONResponse(
            await run_admin_job(self._service, request, work, None if fields is None else [*fields], queue)
        )

    @property
    def _engine(self) -> Any:
        return self._service.engine

    @property
    def _has_own_engines(self) -> bool:
        return self._service.settings.has_own_engines

    @property
    def _is_paused(self) -> bool:
        phase: str = self._engine.pausing.phase
        return phase != RUNNING

    def _pause(self, mode: str) -> dict[str, Any]:
        engine = self._engine
        if not self._is_paused:
            engine.pause(mode)
        elif mode == "abort":
            engine.pausing.abort()
        elif mode == "wait" and engine.stats.running + engine.stats.prefilling:
            raise APIError(409, "the engine is paused, and answers wait in it: resume it first", "mode")
        self._service.log(f"the engine is paused ({mode})")
        return dict(status="paused")

    def _resume(self) -> dict[str, Any]:
        if self._is_paused:
            self._engine.resume()
            self._service.log("the engine has resumed")
        return dict(status="resumed")

    def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        root = self._service.settings.weight_dir
        if root is None:
            raise APIError(404, "weights are not read from directories here: the server needs --weight_dir")
        info = body.get("update_info")
        if not isinstance(info, dict):
            example = '{"path": "step-12"}'
            raise BodyError("update_info", f"it must be an object like {example}, got {format_value(info)}")
        reject_unknown_fields(info, _UPDATE_FIELDS)
        mode = info.get("mode", MODES[0])
        if mode not in MODES:
            raise BodyError("mode", f"it must be one of {', '.join(MODES)}, got {format_value(mode)}")
        version = info.get("weight_version")
        if version is not None and (type(version) is not int or not 0 <= version < 2**31):
            raise BodyError(
                "weight_version", f"it must be a whole number from 0 on, got {format_value(version)}"
            )
        path = directory_below(root, "weight_dir", "path", info.get("path"), _files)
        engine = self._engine
        engine.update(path, version=version, mode=mode)
        self._service.log(f"the engine has the weights of {path.name}, version {engine.version}")
        return dict(message="Weights updated", weight_version=engine.version)


def _files(path: Path) -> list[Path]:
    """Returns the files that a checkpoint may be read from, in folders too."""
    return [*path.rglob("*")]
