"""As much of HTTP/1.1 as playing a workload takes: GET of JSON, POST with server-sent events back.

A general client costs more per event than the server that is measured, on the cores that both share; this one reads lines.
Each request has a connection of its own, as the requests of many clients have.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from enginewright.recipes.errors import InputError

__all__ = ["HttpError", "Target", "get_json", "post_events"]


class HttpError(InputError):
    """The server is not there, or does not answer as one should."""


@dataclass(frozen=True)
class Target:
    """Where the server is: `path` stands before every path that is asked for."""

    host: str
    port: int
    path: str
    secure: bool
    key: str | None = None

    @classmethod
    def parse(cls, url: str, key: str | None = None) -> Target:
        """Read http://HOST[:PORT][/PATH]; a final /v1 is left out, since every path that is asked for begins with it."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(
                "the server's address cannot be used", found=repr(url), expected="http://HOST:PORT"
            )
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), path, secure, key)


async def get_json(target: Target, path: str) -> Any:
    """The parsed answer to a GET."""
    async with _asked(target, "GET", path, b"") as lines:
        return json.loads(b"\n".join([line async for line in lines]))


async def post_events(target: Target, path: str, body: Any) -> AsyncGenerator[bytes, None]:
    """The data of each event until [DONE]."""
    async with _asked(target, "POST", path, json.dumps(body).encode()) as lines:
        async for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
        raise HttpError("the stream ended before [DONE]")


@asynccontextmanager
async def _asked(target: Target, method: str, path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
    """Send a request; give the lines of the answer's body. HttpError when its status is not 200."""
    secure = ssl.create_default_context() if target.secure else None
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=secure)
    except OSError as error:
        raise HttpError(
            "the server cannot be reached",
            found=f"{target.host}:{target.port}: {error.strerror or error}",
            action="start it with `engine serve`, or correct --url",
        ) from error
    try:
        head = [
            f"{method} {target.path}{path} HTTP/1.1",
            f"Host: {target.host}:{target.port}",
            "Connection: close",
            f"Content-Length: {len(body)}",
            "Content-Type: application/json",
            *([f"Authorization: Bearer {target.key}"] if target.key else []),
        ]
        writer.write("\r\n".join([*head, "", ""]).encode("latin-1", "replace") + body)
        await writer.drain()
        status, chunked = await _head(reader)
        lines = _lines(_chunks(reader) if chunked else _rest(reader))
        if status != 200:
            text = b"\n".join([line async for line in lines]).decode("utf-8", "replace")
            raise HttpError(
                f"the server refused {method} {path}",
                found=f"status {status}: {text[:400]}",
                action="--api-key KEY" if status == 401 else None,
            )
        yield lines
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    first = (await reader.readline()).split()
    if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
        raise HttpError("what answers is no HTTP server", found=repr(first)[:100])
    chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        name, _, value = line.partition(b":")
        chunked |= name == b"transfer-encoding" and value.strip() == b"chunked"
    return int(first[1]), chunked


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size = (await reader.readline()).split(b";")[0].strip()
        if not size:
            raise HttpError("the connection ended within an answer")
        count = int(size, 16)
        if not count:
            return
        yield (await reader.readexactly(count + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(65536):
        yield data


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")
    if rest:
        yield rest
