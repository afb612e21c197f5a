"""The routes that look and do not generate: /health, /ready, /status, /metrics, /v1/models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from .metrics import CONTENT_TYPE, exposition
from .observing import live_status
from .service import Service

__all__ = ["control"]


def control(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @_look(router, "/health")
    async def health() -> Response:
        wrong = service.health()
        if wrong is None:
            return JSONResponse({"status": "ok", "phase": service.phase})
        return JSONResponse({"status": "sick", "phase": service.phase, "reason": wrong}, 503)

    @_look(router, "/ready")
    async def ready() -> Response:
        is_ready = service.phase == "ready" and service.health() is None
        return JSONResponse({"ready": is_ready, "phase": service.phase}, 200 if is_ready else 503)

    @_look(router, "/status")
    async def status() -> Response:
        return JSONResponse(await live_status(service), headers={"Cache-Control": "no-store"})

    @_look(router, "/metrics")
    async def metrics() -> Response:
        return Response(await exposition(service), media_type=CONTENT_TYPE)

    @_look(router, "/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @_look(router, "/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(_model(service))

    return router


def _look(router: APIRouter, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A route for GET, and for HEAD, which probes send; the server leaves the body of an answer to that out."""
    return router.api_route(path, methods=["GET", "HEAD"])


def _model(service: Service) -> dict[str, Any]:
    engine = service.loaded
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "enginewright",
        "max_model_len": engine.engine.longest if engine is not None else None,
    }
