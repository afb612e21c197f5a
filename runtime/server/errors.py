"""OpenAI's error object: {"error": {"message", "type", "param", "code"}}, and which status belongs to what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from enginewright.recipes.errors import EnginewrightError, RequestError

from ..async_engine import EngineDied, Overloaded

__all__ = ["ApiError", "api_error", "not_computed"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error. `param` names the field of the request that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(
    error: RequestError,
    param: str | None = None,
    fields: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
) -> ApiError:
    """Return the answer to a request that cannot be served.

    The field at fault is the one of `fields` that the message begins with, under the client's name for it (`names`), or `param`.
    """
    if isinstance(error, Overloaded):
        return ApiError(429, _one_line(error), code="overloaded", headers={"Retry-After": "1"})
    if isinstance(error, EngineDied):
        return ApiError(503, _one_line(error), code="engine_dead")
    begins = re.match(r"([a-z_]+)([\[\].\w]*)", error.message)
    if begins is not None and begins[1] in set(fields):
        param = (names or {}).get(begins[1], begins[1]) + begins[2].rstrip(".")
    code = "context_length_exceeded" if "too long" in error.message or "never fit" in error.message else None
    return ApiError(400, _one_line(error), param=param, code=code)


def not_computed(error: RequestError | None) -> ApiError:
    """Return the answer to a request that failed while it was computed."""
    if isinstance(error, EngineDied):
        return api_error(error)
    text = "the request failed" if error is None else _one_line(error)
    return ApiError(500, text, code="request_failed")


def _one_line(error: EnginewrightError) -> str:
    parts = [("found", error.found), ("expected", error.expected), ("to do", error.action)]
    details = "; ".join(f"{name}: {str(value)[:300]}" for name, value in parts if value is not None)
    return f"{error.message} ({details})" if details else error.message
