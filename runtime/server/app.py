"""The routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from .access import Access
from .chat import chat
from .completions import completions
from .control import control
from .errors import ApiError
from .exchange import Exchange, Handler
from .page import static_files
from .responses import responses
from .service import Service
from .tokens import detokenize, tokenize

__all__ = ["create_app"]

_ROUTES: dict[str, Handler] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def create_app(service: Service) -> FastAPI:
    """Return the application that serves `service`; run it with `run.serve`, or any ASGI server."""
    app = FastAPI(title="enginewright", docs_url=None, redoc_url=None, openapi_url=None)
    for path, handler in _ROUTES.items():
        _add(app, path, handler, service)
    app.include_router(control(service))
    app.include_router(static_files())
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Access, service=service)
    return app


def _add(app: FastAPI, path: str, handler: Handler, service: Service) -> None:
    async def endpoint() -> Response:
        return Exchange(service, handler)

    app.add_api_route(path, endpoint, methods=["POST"], response_class=Response)


async def _api_error(_request: Request, error: Any) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: Any) -> Response:
    says = {404: f"there is no {request.url.path[:100]} here", 405: f"{request.method} is not served here"}
    known = ApiError(
        error.status_code, says.get(error.status_code, str(error.detail)), headers=error.headers or {}
    )
    return await _api_error(request, known)
