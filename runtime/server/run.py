"""The process: loading beside the listening socket, signals, draining, exit codes.

- The socket listens at once; /ready says 503 until the engine is loaded, /health says 200.
- The first SIGTERM or SIGINT: new requests are refused with 503, those in flight have `drain` seconds, what is left then ends
  with an error (an event in a stream). Exit code 0.
- The second: everything ends at once, exit code 128 + the signal's number.
- An engine that cannot be loaded: the error is raised, with its exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from enginewright.recipes.errors import EnginewrightError, InputError

from ..engine import Engine, load
from .app import create_app
from .logs import configure
from .service import Service
from .settings import Settings

__all__ = ["HttpServer", "load_engine", "serve"]

_log = logging.getLogger(__name__)
_GRACE = 3  # seconds in which connections must close after the last answer
_LAST_THREADS = 0.3  # seconds that threads get to end
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def load_engine(settings: Settings) -> Engine:
    """Load the engine as the settings say."""
    return load(
        settings.engine,
        threads=settings.threads,
        weights=settings.weights,
        provider=settings.provider,
        max_sequences=settings.max_sequences,
        token_budget=settings.max_batch_tokens,
        cache_bytes=settings.kv_memory,
        max_context=settings.max_context,
        policy=settings.policy,
        speculate=settings.speculate,
        draft_tokens=settings.draft_tokens,
        draft_rule=settings.draft_rule,
        draft_cache_bytes=settings.draft_kv_memory,
    )


class HttpServer(uvicorn.Server):
    """uvicorn's server with signals that drain; `loading` makes the engine, in a thread of its own."""

    def __init__(self, settings: Settings, loading: Callable[[], Engine]) -> None:
        self.service = Service(settings)
        config = uvicorn.Config(
            create_app(self.service),
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE,
            timeout_keep_alive=75,
        )
        super().__init__(config)
        self._loading = loading
        self._stopping: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: BaseException | None = None
        self.forced: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._tasks = [asyncio.create_task(self._load()), asyncio.create_task(self.service.watch())]
        for host, port in self.addresses:
            _log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the server listens, once it has started."""
        return [socket.getsockname()[:2] for server in self.servers for socket in server.sockets]

    def stop(self) -> None:
        """Begin to drain, as the first signal does; safe from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_stopping)

    async def _load(self) -> None:
        """Load in a thread of its own: the event loop answers /health meanwhile."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Engine] = loop.create_future()

        def work() -> None:
            try:
                engine = self._loading()
            except BaseException as error:
                loop.call_soon_threadsafe(_settle, done, None, error)
            else:
                loop.call_soon_threadsafe(_settle, done, engine, None)

        threading.Thread(target=work, name="enginewright-load", daemon=True).start()
        try:
            engine = await done
        except Exception as error:
            self.failure = error
            self.service.phase = "failed"
            self.should_exit = True
            return
        self.service.adopt(engine)
        held, context = engine.cache_tokens, engine.max_context
        if engine.longest < context:
            _log.warning(
                "the key/value cache holds %s tokens, less than one context of %s: longer requests end there "
                "(--kv-memory)",
                f"{held:,}",
                f"{context:,}",
            )
        else:
            _log.info(
                "the key/value cache holds %s tokens: %.1f contexts of %s",
                f"{held:,}",
                held / context,
                f"{context:,}",
            )
        if engine.loop.speculator is not None:
            _log.info("drafts by %s (--speculate)", engine.loop.speculator.drafter.name)
        _log.info("ready: %s is served as %s", self.service.settings.engine, self.service.settings.model_name)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First: drain. Again: end at once."""
        loop = self._loop
        if loop is None:
            raise KeyboardInterrupt
        if self._stopping is None and self.forced is None:
            loop.call_soon_threadsafe(self._begin_stopping)
        else:
            self.forced = sig
            loop.call_soon_threadsafe(self._stop_now)

    async def serve(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def _begin_stopping(self) -> None:
        if self._stopping is None:
            _log.info("draining for at most %g s", self.service.settings.drain)
            self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        await self.service.drain(self.service.settings.drain)
        self.should_exit = True

    def _stop_now(self) -> None:
        self.service.interrupt_all()
        self.should_exit = self.force_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        self.service.interrupt_all()
        for _ in range(_GRACE * 50):
            if not self.service.exchanges or self.force_exit:
                break
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.service.close(), _GRACE)


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def serve(settings: Settings, loading: Callable[[], Engine] | None = None) -> int:
    """Serve until a signal ends it; return the exit code. EnginewrightError when the engine cannot be loaded.

    `loading` makes the engine, in a thread of its own (by default from the folder `settings.engine`).
    """
    configure()
    server = HttpServer(settings, loading or (lambda: load_engine(settings)))
    try:
        server.run()
    except SystemExit as error:
        raise InputError(
            f"the server cannot listen on {settings.host}:{settings.port}",
            action="choose another --host or --port; the log says why",
        ) from error
    if server.failure is not None:
        if isinstance(server.failure, EnginewrightError):
            raise server.failure
        raise RuntimeError("the engine could not be loaded") from server.failure
    code = 0 if server.forced is None else 128 + server.forced
    if server.forced is not None or _at_work():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Python would wait for a step, a load or a prompt that nobody waits for any more
    return code


def _at_work() -> bool:
    """Whether a thread of the server does not end."""
    until = time.monotonic() + _LAST_THREADS
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("enginewright-")]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return any(thread.is_alive() for thread in threads)
