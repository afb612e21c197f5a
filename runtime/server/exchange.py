"""One request to a generating endpoint, from the first byte of its body to the last of its answer.

The work is a task of its own, so that it can be ended at any point: when the client goes away, when the server ends, when the
client reads nothing for too long. However it ends, the stream it has opened is cancelled, and its pages are free before the
next step. An error becomes a JSON answer while no answer has begun, and an event of the stream after.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from enginewright.recipes.errors import RequestError

from ..async_engine import Stream
from ..loop import FINISH_ERROR
from .errors import ApiError, api_error, not_computed
from .prepare import Job

if TYPE_CHECKING:
    from .service import Service

__all__ = ["Exchange", "Handler", "quote", "read_body"]

Handler = Callable[["Exchange", bytes], Awaitable[None]]

quote = json.JSONEncoder(ensure_ascii=False).encode
"""JSON of one value, made once: json.dumps makes an encoder every time."""

_log = logging.getLogger(__name__)
_LAST_WORDS = 2.0  # seconds that a client gets to take the error that ends its stream


async def read_body(scope: Scope, receive: Receive, most: int, seconds: float) -> bytes | None:
    """Return the body; None when the client has gone. ApiError where it is too large or too slow."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > most:
            raise _too_large(f"{int(value):,} bytes", most)
    parts: list[bytes] = []
    size = 0
    until = time.monotonic() + seconds
    while True:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {seconds:g} s", code="body_timeout"
            ) from None
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise _too_large("more", most)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(found: str, most: int) -> ApiError:
    return ApiError(413, f"the body is too large ({found}; at most {most:,} bytes)", code="body_too_large")


class Exchange(Response):
    """Runs `handler` for one request and sends what it says: `json` once, or `event` any number of times."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self.service = service
        self.notes: dict[str, Any] = {}  # what the log says of this request
        self.background = None
        self.status_code = 200
        self.writing_since: float | None = None  # a send that has not returned (monotonic seconds)
        self._handler = handler
        self._started = False
        self._events = False
        self._interrupted: ApiError | None = None
        self._work: asyncio.Task[None] | None = None
        self._send: Send
        self._send_body: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._send_body = scope.get("enginewright.send", send)
        self.notes = scope.setdefault("enginewright.notes", {})
        limits = self.service.settings.limits
        try:
            body = await read_body(scope, receive, limits.body_bytes, limits.body_seconds)
        except ApiError as error:
            await self._fail(error)
            return
        if body is None:
            self.notes["ended"] = "disconnected"
            return
        await self._run(body, receive)

    async def _run(self, body: bytes, receive: Receive) -> None:
        self._work = asyncio.create_task(self._guarded(body))
        gone = asyncio.create_task(_gone(receive))
        self.service.exchanges.add(self)
        try:
            await asyncio.wait((self._work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not self._work.done():
                self.notes["ended"] = "disconnected"
                self._work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._work
        except asyncio.CancelledError:
            self._work.cancel()
            raise
        finally:
            gone.cancel()
            self.service.exchanges.discard(self)

    async def _guarded(self, body: bytes) -> None:
        try:
            await self._handler(self, body)
        except ApiError as error:
            await self._fail(error)
        except RequestError as error:
            await self._fail(api_error(error))
        except asyncio.CancelledError:
            if self._interrupted is None:
                raise
            self.notes["ended"] = "interrupted"
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._fail(self._interrupted), _LAST_WORDS)
        except Exception:
            _log.exception("a request's handler has failed")
            await self._fail(ApiError(500, "the server has failed at this request", code="internal_error"))

    def interrupt(self, error: ApiError) -> None:
        """End the exchange now, with `error` as its last word."""
        if self._work is not None and not self._work.done() and self._interrupted is None:
            self._interrupted = error
            self._work.cancel()

    async def submit(self, job: Job) -> Stream:
        """Hand the job to the engine. Use the stream in an `async with` block."""
        self.notes["job"] = job
        if job.constraint is not None:
            grammar = await self.service.compile(job.constraint)
            for request in job.requests:
                request.grammar = grammar
        stream = await self.service.engine.submit(
            job.requests, texts=job.texts, shown=job.shown, label=job.id
        )
        self.notes["stream"] = stream
        return stream

    async def collect(self, stream: Stream) -> list[tuple[int, str, str]]:
        """Wait for the whole answer; return (choice, text, finish reason) of each. ApiError when one has failed."""
        texts: list[list[str]] = [[] for _ in stream.answers]
        reasons = [""] * len(texts)
        async for delta in stream:
            if delta.finish_reason == FINISH_ERROR:
                raise not_computed(delta.error)
            texts[delta.index].append(delta.text)
            reasons[delta.index] = delta.finish_reason or ""
        return [(index, "".join(texts[index]), reasons[index]) for index in range(len(texts))]

    # ---------------------------------------------------------------------------------------------- answers

    async def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send the whole answer."""
        content = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        await self._start(
            status, "application/json", {"content-length": str(len(content)), **(headers or {})}
        )
        await self._write(content, False)

    async def event(self, data: str, name: str | None = None) -> None:
        """Send one server-sent event; `data` is one line."""
        if not self._started:
            await self.start_events()
        text = f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"
        await self._write(text.encode("utf-8", "replace"), True)

    async def start_events(self) -> None:
        """Begin a stream of events."""
        self._events = True
        await self._start(
            200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache", "x-accel-buffering": "no"}
        )

    async def end_events(self) -> None:
        """End the stream."""
        await self._write(b"", False)

    async def _fail(self, error: ApiError) -> None:
        quoting = (
            error.message[:200] if self.service.settings.log_prompts else None
        )  # it may quote the request
        self.notes["error"] = error.code or quoting or error.param or "refused"
        if not self._started:
            await self.json(error.body(), error.status, error.headers)
        elif self._events:
            await self._write(f"data: {json.dumps(error.body())}\n\n".encode(), True)
            await self.end_events()

    async def _start(self, status: int, media: str, headers: dict[str, str]) -> None:
        self._started = True
        self.status_code = status
        pairs = [(b"content-type", media.encode())]
        pairs += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, content: bytes, more: bool) -> None:
        self.writing_since = time.monotonic()
        await self._send_body({"type": "http.response.body", "body": content, "more_body": more})
        self.writing_since = None


async def _gone(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
