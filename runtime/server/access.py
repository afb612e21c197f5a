"""Who may ask, under which id, and what the log says of it: the layer around all routes.

A client's X-Request-Id is taken where it is short and plain, and given back; it is a label and nothing else: the ids that the
server works with are its own. Keys are compared in constant time. The log has one line of JSON a request, and no prompt in it
unless the operator asked for that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections import Counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .prepare import Job
from .service import Service

__all__ = ["Access", "request_log"]

request_log = logging.getLogger("enginewright.requests")

_PLAIN_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_OPEN = ("/health", "/ready", "/metrics")  # no key is asked for: probes have none
_GUARDED = ("/v1/", "/tokenize", "/detokenize", "/status")


class Access:
    """ASGI middleware: request ids, API keys, concurrency of a key, refusal while the server cannot serve, the log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service
        self._keys = [hashlib.sha256(key.encode()).digest() for key in service.settings.api_keys]
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        headers = dict(scope["headers"])
        id_ = _request_id(headers.get(b"x-request-id"))
        notes: dict[str, Any] = {}
        scope["enginewright.notes"] = notes
        scope["enginewright.send"] = (
            send  # bodies go straight out: the layers between only look at the start of an answer
        )
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id_.encode())]
            await send(message)

        key = None
        works = scope["method"] == "POST"
        try:
            if scope["path"].startswith(_GUARDED):
                key = self._check_key(headers.get(b"authorization", b""))
                if works:
                    self._enter(key)
        except ApiError as error:
            await _answer(error, tagged)
            self._log(scope, id_, key, status, began, notes)
            return
        try:
            await self.app(scope, receive, tagged)
        finally:
            if works and scope["path"].startswith(_GUARDED):
                self._running[key or ""] -= 1
            self._log(scope, id_, key, status, began, notes)

    def _check_key(self, header: bytes) -> str | None:
        """Return the label of the key that the request brings; None where none is asked for."""
        if not self._keys:
            return None
        kind, _, given = header.partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        fits = [hmac.compare_digest(digest, key) for key in self._keys]  # all of them, always
        if kind.lower() != b"bearer" or not any(fits):
            raise ApiError(
                401,
                "the API key is missing or wrong (expected: the header Authorization: Bearer KEY)",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return digest.hex()[:8]

    def _enter(self, key: str | None) -> None:
        if self.service.phase != "ready":
            raise self.service.unavailable()
        most = self.service.settings.key_concurrency
        if most is not None and self._running[key or ""] >= most:
            raise ApiError(
                429,
                f"too many requests of this key are in flight (at most {most})",
                code="concurrency_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        self._running[key or ""] += 1

    def _log(
        self, scope: Scope, id_: str, key: str | None, status: int, began: float, notes: dict[str, Any]
    ) -> None:
        route = getattr(scope.get("route"), "path", "other")
        answers = self.service.responses
        answers[route, status] = answers.get((route, status), 0) + 1
        self.service.disconnects += notes.get("ended") == "disconnected"
        looks = (
            scope["method"] in ("GET", "HEAD") and status < 400
        )  # probes and the live page ask every second
        if looks or scope["path"] in _OPEN or not request_log.isEnabledFor(logging.INFO):
            return
        line: dict[str, Any] = {
            "event": "request",
            "id": id_,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "ms": round((time.monotonic() - began) * 1000, 1),
        }
        if key is not None:
            line["key"] = key
        job = notes.get("job")
        if job is not None:
            line |= _job_notes(job, self.service.settings.log_prompts)
        first = getattr(notes.get("stream"), "first_token_seconds", None)
        if first is not None:
            line["first_token_ms"] = round(first * 1000, 1)
        line |= {name: notes[name] for name in ("ended", "error") if name in notes}
        request_log.info(json.dumps(line, ensure_ascii=True))


def _job_notes(job: Job, with_prompts: bool) -> dict[str, Any]:
    usage = job.usage()
    line = {
        "answer": job.id,
        "stream": job.stream,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "generated_tokens": usage["completion_tokens"],
        "finish": [request.finish_reason for request in job.requests],
    }
    if job.speculates:
        line["proposed_tokens"] = sum(request.drafted for request in job.requests)
        line["accepted_tokens"] = sum(request.accepted for request in job.requests)
    if with_prompts:
        line["prompts"] = [prompt.text if prompt.text is not None else prompt.ids for prompt in job.prompts]
        line["outputs"] = [request.output for request in job.requests]
    return line


def _request_id(given: bytes | None) -> str:
    text = (given or b"").decode("latin-1")
    return text if _PLAIN_ID.fullmatch(text) else f"req-{secrets.token_hex(12)}"


async def _answer(error: ApiError, send: Send) -> None:
    content = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
