"""What the routes share: the engine and the phase it is in, the workers that prepare requests, the exchanges in flight."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from enginewright.recipes.errors import RequestError

from ..async_engine import AsyncEngine
from ..constraints import Grammar
from ..engine import Engine
from .errors import ApiError, api_error
from .exchange import Exchange
from .prepare import Demand
from .settings import Settings
from .tools import ToolFormat, recognise

__all__ = ["Service"]

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)

_SMALL_BODY = (
    64 << 10
)  # bytes; larger requests are prepared by a worker of their own, so that small ones pass
_WATCH_SECONDS = 5.0


class Service:
    """One served engine. `phase`: "loading", "ready", "draining", "failed"."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase = "loading"
        self.started = time.monotonic()
        self.created = int(time.time())
        self.exchanges: set[Exchange] = set()
        self.disconnects = 0
        self.responses: dict[tuple[str, int], int] = {}  # (path, status) → answers
        self.tool_format: ToolFormat | None = None
        self._engine: AsyncEngine | None = None
        self._small = ThreadPoolExecutor(2, thread_name_prefix="enginewright-prepare")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="enginewright-prepare-large")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="enginewright-compile")

    # ------------------------------------------------------------------------------------------------ life

    def adopt(self, engine: Engine) -> None:
        """Serve `engine` from now on."""
        template = engine.tokenizer.chat_template if engine.tokenizer is not None else None
        self.tool_format = recognise(template.sources) if template is not None else None
        self._engine = AsyncEngine(
            engine, max_unfinished=self.settings.max_sequences + self.settings.max_queue
        )
        self._engine.start()
        if self.phase == "loading":
            self.phase = "ready"

    @property
    def loaded(self) -> AsyncEngine | None:
        """The engine, once it is loaded."""
        return self._engine

    @property
    def engine(self) -> AsyncEngine:
        """The engine; ApiError 503 while it cannot serve."""
        if self._engine is None or self.phase != "ready":
            raise self.unavailable()
        return self._engine

    def unavailable(self) -> ApiError:
        """Return the answer to a request that comes at the wrong time."""
        says = {
            "loading": "the engine is still loading",
            "draining": "the server is shutting down",
            "failed": "the engine could not be loaded",
        }.get(self.phase, "the engine cannot serve")
        return ApiError(503, says, code=self.phase, headers={"Retry-After": "2"})

    def health(self) -> str | None:
        """Return what is wrong; None for a server that is alive (loading and draining count as alive)."""
        engine = self._engine
        if self.phase == "failed":
            return "the engine could not be loaded"
        if engine is None:
            return None
        if not engine.alive:
            return "the engine's thread has ended"
        waited = engine.seconds_without_progress()
        if waited > self.settings.stall:
            return f"no step has finished for {waited:.0f} s although there is work"
        return None

    async def watch(self) -> None:
        """End exchanges whose client has read nothing for too long; runs until it is cancelled."""
        most = self.settings.limits.write_seconds
        while True:
            await asyncio.sleep(min(_WATCH_SECONDS, most / 4))
            before = time.monotonic() - most
            for exchange in list(self.exchanges):
                if exchange.writing_since is not None and exchange.writing_since < before:
                    _log.warning("a client has read nothing for %g s: its request ends", most)
                    exchange.interrupt(ApiError(408, "the client reads nothing", code="read_timeout"))

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait for those in flight, and end with an error what is left after `seconds`."""
        self.phase = "draining"
        until = time.monotonic() + seconds
        while self.exchanges and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self.exchanges:
            _log.warning("%d requests are ended: the server is shutting down", len(self.exchanges))
        self.interrupt_all()

    def interrupt_all(self) -> None:
        """End every exchange in flight with an error."""
        self.phase = "draining"
        for exchange in list(self.exchanges):
            exchange.interrupt(ApiError(503, "the server is shutting down", code="shutting_down"))

    async def close(self) -> None:
        """Stop the engine and release it."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if self._engine is not None:
            await self._engine.close()

    # ------------------------------------------------------------------------------------------------ work

    async def prepare(self, size: int, function: Callable[..., _Result], *values: Any) -> _Result:
        """Run `function` away from the event loop: parsing, templates, tokenising. `size` of the request in bytes."""
        pool = self._small if size <= _SMALL_BODY else self._large
        return await asyncio.get_running_loop().run_in_executor(pool, function, *values)

    async def compile(self, demand: Demand) -> Grammar:
        """Compile a constraint, in a thread of its own; ApiError 400 when it cannot be."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._compiling, self.engine.engine.compile, demand.constraint)
        except RequestError as error:
            raise api_error(error, demand.field) from error

    def check_model(self, name: str | None) -> None:
        """ApiError 404 when a request names a model that is not served here."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here (served: {self.settings.model_name!r})",
                param="model",
                code="model_not_found",
            )
