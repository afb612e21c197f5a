"""Real servers on the loopback for tests: a tiny engine over the fake executor, and a server in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders
from tokenizers import models as tokenizer_models

from enginewright.backends.artifact import Artifact
from enginewright.runtime.async_engine import AsyncEngine
from enginewright.runtime.engine import Engine
from enginewright.runtime.pages import GroupSpec
from enginewright.runtime.server.run import HttpServer
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.settings import Settings
from tests.runtime.fake_executor import FakeExecutor

LETTERS = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "<|end|>", "<0xC3>", "<0xA9>", "<0xFF>", "ab", "▁"]
GROUPS = [GroupSpec(0, 4), GroupSpec(6, 4)]
# Tests share a client between threads, and httpx's pool may close a connection as idle that it has just given to
# another thread's request, which then waits for ever: so no connection is closed for being one too many, or old.
KEPT = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_tokenizer(
    folder: Path, template: str = TEMPLATE, vocab: Sequence[str] = LETTERS, special: int = 26
) -> Path:
    """A tokenizer that knows every letter as a token of its own; `special` is its end-of-sequence token."""
    ids = {letter: i for i, letter in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizer_models.BPE(ids, [], byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([vocab[special]])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def tiny_engine(
    folder: Path, executor: FakeExecutor | None = None, max_context: int = 128, end: int = 26, **options: Any
) -> Engine:
    """An engine of LETTERS over the fake executor; `end` is its end-of-sequence token."""
    model = {"max_context": max_context, "eos_token_ids": [end]}
    manifest = {"model": model, "files": {path.name: {} for path in folder.iterdir()}, "backend": "fake"}
    executor = executor or FakeExecutor(GROUPS, len(LETTERS))
    return Engine(Artifact(folder, manifest), executor, **{"max_sequences": 4, **options})


class Paced(FakeExecutor):
    """Takes at least `seconds` a step, and waits at a gate where a test wants to."""

    def __init__(self, seconds: float = 0.0, **options: Any) -> None:
        super().__init__(GROUPS, len(LETTERS), **options)
        self.seconds = seconds
        self.gate = threading.Event()
        self.gate.set()

    def step(self, step: Any) -> Any:
        self.gate.wait()
        time.sleep(self.seconds)
        return super().step(step)


class Scripted(FakeExecutor):
    """Says a fixed text after any prompt of `prompt` tokens."""

    def __init__(self, script: list[int], prompt: int, vocab_size: int, seconds: float = 0.0) -> None:
        super().__init__(GROUPS, vocab_size)
        self._script, self._prompt, self._seconds = script, prompt, seconds

    def step(self, step: Any) -> Any:
        time.sleep(self._seconds)
        logits = super().step(step)
        for r, row in enumerate(step.logit_rows.tolist()):
            place = int(step.positions[row]) + 1 - self._prompt
            logits[r] = 0
            logits[r, self._script[min(max(place, 0), len(self._script) - 1)]] = 9
        return logits


@dataclass
class Running:
    """A server that runs; `client` is closed with it, and any thread may use it."""

    url: str
    server: HttpServer
    client: httpx.Client

    @property
    def service(self) -> Service:
        return self.server.service

    @property
    def engine(self) -> AsyncEngine:
        engine = self.service.loaded
        assert engine is not None
        return engine

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The data of every event of a stream; JSON, but for [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            return list(sse(answer.iter_lines()))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run something in the engine's thread, between steps."""
        loop = self.server._loop
        assert loop is not None
        return asyncio.run_coroutine_threadsafe(self.engine.call(function), loop).result(10)

    def all_pages_free(self) -> bool:
        """Whether nobody holds a page (in the engine's thread; checks the pool's and the scheduler's invariants)."""

        def look() -> bool:
            engine_loop = self.engine.engine.loop
            engine_loop.scheduler.check_invariants()
            return bool(engine_loop.idle and engine_loop.pool.idle)

        return bool(self.call(look))


def sse(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: "):
            yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """What an answer says, without its id, its time, and the figures that only a server has which speculates."""
    value: dict[str, Any] = json.loads(json.dumps(answer))
    for name in ("id", "created", "created_at"):
        value.pop(name, None)
    (value.get("usage") or {}).pop("completion_tokens_details", None)
    for item in value.get("output", []):
        del item["id"]
    for choice in value.get("choices", []):
        for call in choice.get("message", {}).get("tool_calls", []):
            del call["id"]
    return value


@contextlib.contextmanager
def request_log(server: Running) -> Iterator[list[dict[str, Any]]]:
    """The lines of the request log, as they come: of what `server`'s client asks in here, and not of what was asked before."""
    logger = logging.getLogger("enginewright.requests")
    id_ = f"logged-{secrets.token_hex(8)}"
    lines: list[dict[str, Any]] = []

    def emit(record: logging.LogRecord) -> None:
        line = json.loads(record.getMessage())
        if line["id"] == id_:
            lines.append(line)

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    server.client.headers["X-Request-Id"] = id_
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        del server.client.headers["X-Request-Id"]
        logger.removeHandler(handler)


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "what was waited for did not come"
        time.sleep(0.005)


@contextlib.contextmanager
def serving(engine: Engine | Callable[[], Engine], wait: bool = True, **settings: Any) -> Iterator[Running]:
    """Serve `engine` on a free port, in a thread; drain and join at the end."""
    loading = engine if callable(engine) else lambda: engine
    values = {"engine": Path("tiny"), "port": 0, "max_sequences": 4, "drain": 0.2, **settings}
    server = HttpServer(Settings(**values), loading)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    url = f"http://127.0.0.1:{server.addresses[0][1]}"
    try:
        if wait:
            wait_until(lambda: server.service.phase == "ready")
        with httpx.Client(base_url=url, timeout=30, limits=KEPT) as client:
            yield Running(url, server, client)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"
