"""The page at `/`: a playground over the OpenAI interfaces, and a live view of GET /status.

    app.include_router(static_files())

Its files lie in `static/` and are served as they are: there is no build step, and nothing is fetched from elsewhere, which the
Content-Security-Policy says too. The page holds no secret, so it needs no API key; what it asks the server for may need one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response

__all__ = ["static_files"]

_FOLDER = Path(__file__).resolve().parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # asked again every time, and answered with 304 while it is the same
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def static_files() -> APIRouter:
    """Routes of the page's files: `/`, and `/NAME` of each file beside it."""
    router = APIRouter(include_in_schema=False)
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            _add(router, "/" if path.name == "index.html" else f"/{path.name}", path)
    return router


def _add(router: APIRouter, route: str, path: Path) -> None:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag, "Content-Type": _TYPES[path.suffix]}

    async def answer(request: Request) -> Response:
        known = [
            value.strip().removeprefix("W/") for value in request.headers.get("if-none-match", "").split(",")
        ]
        if tag in known:
            return Response(
                status_code=304, headers={k: v for k, v in headers.items() if k != "Content-Type"}
            )
        return Response(b"" if request.method == "HEAD" else content, headers=headers)

    router.add_api_route(route, answer, methods=["GET", "HEAD"])
