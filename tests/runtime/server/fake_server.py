"""A server without a model that speaks what the page asks for: the two streaming interfaces and GET /status.

What it answers is chosen by the last words that it is sent: "refuse" is a 400 with an error object, "break" an error event after
three words, "hang up" a connection that ends early, "endless" goes on until the client leaves, "<script>" is said back.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from enginewright.runtime.server.page import static_files

WORDS = "The capital of France is Paris, on the river Seine; it has been so, with pauses, for a thousand years.".split()


@dataclass
class Seen:
    """What the server was asked, and how many streams it has left because their client did."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: int = 0
    status: dict[str, Any] = field(default_factory=dict)  # overrides of GET /status


def status(now: float) -> dict[str, Any]:
    """A busy server's status, a smooth function of the time in seconds."""
    wave = 0.5 + 0.5 * math.sin(now / 7)
    running = round(2 + 12 * wave)
    first = bytes((3 if i < 40 else 2 if i < 40 + 300 * wave else 1 if i < 500 else 0) for i in range(640))
    second = bytes(2 if i % 5 == 0 and i < 250 * wave else 0 for i in range(320))
    groups = [
        {
            "page_size": 16,
            "total": len(pages),
            "used": pages.count(2) + pages.count(3),
            "cached": pages.count(1),
            "map": base64.b64encode(pages).decode(),
        }
        for pages in (first, second)
    ]
    requests = [
        {
            "id": f"chatcmpl-{i:08x}",
            "state": "running" if i < running else "waiting",
            "prompt_tokens": 100 + 37 * i,
            "computed": (100 + 37 * i if i % 3 else 60) if i < running else 0,
            "generated": 12 * i if i < running and i % 3 else 0,
            "age_s": 0.4 + 7.3 * i,
        }
        for i in range(running + 3)
    ]
    return {
        "engine": "smollm2-int4",
        "model": "smollm2",
        "policy": "latency",
        "uptime_s": 4000.0 + now % 1000,
        "running": running,
        "waiting": 3,
        "max_sequences": 16,
        "batch_fill": running / 16,
        "token_fill": 0.2 + 0.6 * wave,
        "tokens_per_second": 180 + 700 * wave,
        "ttft_ms": {"p50": 40 + 30 * wave, "p95": 90 + 250 * wave**2},
        "itl_ms": {"p50": 11 + 2 * wave, "p95": 14 + 9 * wave},
        "preemptions": 2,
        "prefix_hit_rate": 0.42,
        "speculation": None,
        "kv_groups": groups,
        "requests": requests,
    }


def make_app(seen: Seen, key: str | None = None) -> FastAPI:
    """The application. With `key`, everything but the page wants it."""
    app = FastAPI()
    app.include_router(static_files())

    def refused(request: Request) -> JSONResponse | None:
        given = request.headers.get("authorization")
        seen.keys.append(given)
        if key is None or given == f"Bearer {key}":
            return None
        return JSONResponse({"error": {"message": "the API key is wrong"}}, 401)

    @app.get("/status")
    async def get_status(request: Request) -> Any:
        return refused(request) or {**status(time.time()), **seen.status}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        seen.bodies.append(body)
        return refused(request) or _answer(seen, body["messages"][-1]["content"], True)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        body = await request.json()
        seen.bodies.append(body)
        if isinstance(body["prompt"], list):
            return refused(request) or StreamingResponse(_tokens(body), media_type="text/event-stream")
        return refused(request) or _answer(seen, body["prompt"], False)

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        return refused(request) or {"object": "list", "data": [{"id": "smollm2", "object": "model"}]}

    return app


async def _tokens(body: dict[str, Any]) -> AsyncIterator[str]:
    """As many pieces as tokens are asked for; a prompt that begins with token 9 fails after two of them."""
    for place in range(body["max_tokens"]):
        if place == 2 and body["prompt"][0] == 9:
            yield 'data: {"error": {"message": "the page pool is on fire"}}\n\n'
            return
        yield f"data: {json.dumps({'choices': [{'index': 0, 'text': f' w{place}', 'finish_reason': None}]})}\n\n"
        await asyncio.sleep(0.001)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\r\n\r\ndata: [DONE]\n\n"


def _answer(seen: Seen, asked: str, chat: bool) -> Any:
    if asked.endswith("refuse") and chat:
        return JSONResponse({"error": {"message": "the model has no chat template"}}, 400)
    return StreamingResponse(_stream(seen, asked, chat), media_type="text/event-stream")


async def _stream(seen: Seen, asked: str, chat: bool) -> AsyncIterator[str]:
    def event(value: Any) -> str:
        return f"data: {json.dumps(value)}\n\n"

    def choice(text: str, reason: str | None = None) -> dict[str, Any]:
        said = {"delta": {"content": text}} if chat else {"text": text}
        return {"choices": [{"index": 0, **said, "finish_reason": reason}], "usage": None}

    words = [asked] if "<" in asked else WORDS
    try:
        if chat:
            yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if asked.endswith("endless"):
            while True:
                yield event(choice("more "))
                await asyncio.sleep(0.02)
        for place, word in enumerate(words):
            if place == 3 and asked.endswith("break"):
                yield event({"error": {"message": "the request failed while it was computed"}})
                return
            if place == 3 and asked.endswith("hang up"):
                return
            yield event(choice(word if place == 0 else f" {word}"))
            await asyncio.sleep(0.005)
        yield event(choice("", "stop"))
        yield event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 42}})
        yield "data: [DONE]\n\n"
    except asyncio.CancelledError:
        seen.left += 1
        raise


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve `app` on a free loopback port, from a thread; gives the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: server.run(sockets=[probe]), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{probe.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
