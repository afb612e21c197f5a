"""Answers on their way to a reader: pieces that wait, merged, until somebody takes them.

Written by the thread that steps the loop, read in the reader's event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from enginewright.recipes.errors import RequestError

from .answer import Answer
from .request import Request

__all__ = ["Delta", "Stream"]


@dataclass
class Delta:
    """A piece of choice `index`: text and tokens since the last piece. The last piece has a `finish_reason`.

    `logprobs` has one value a token; `top_logprobs` one list of (id, log-probability) a token, or nothing where none
    were asked for. `error` comes with the reason "error".
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    error: RequestError | None = None


class Stream:
    """The answers to requests that were submitted together: `async for delta in stream`.

    `requests[i]` is choice i of the deltas. Leave it early with `cancel()`, or use it in an `async with` block.
    """

    def __init__(
        self,
        abort: Callable[[Stream], None],
        answers: Sequence[Answer],
        loop: asyncio.AbstractEventLoop,
        label: str = "",
    ) -> None:
        self.answers = list(answers)
        self.label = label
        self.first_token_seconds: float | None = (
            None  # from submission to the first token of the first choice to have one
        )
        self._abort = abort
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: dict[int, list[Delta]] = {}
        self._unfinished = len(self.answers)
        self._notified = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def requests(self) -> list[Request]:
        """The requests, one a choice; the loop changes them."""
        return [answer.request for answer in self.answers]

    def cancel(self) -> None:
        """End what is unfinished, before the next step; safe from any thread, and more than once."""
        if self._unfinished:
            self._abort(self)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while True:
            with self._lock:
                self._notified = False
                pieces = self._pending.pop(next(iter(self._pending)), None) if self._pending else None
            if pieces:
                delta = pieces[0] if len(pieces) == 1 else _merged(pieces)
                self._unfinished -= delta.finish_reason is not None
                return delta
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _put(self, delta: Delta) -> bool:
        """Add a piece (in the loop's thread); return whether the reader must be told."""
        with self._lock:
            pieces = self._pending.setdefault(delta.index, [])
            pieces.append(delta)
            if len(pieces) > _MERGE_BEYOND:
                pieces[:] = [_merged(pieces)]
            told, self._notified = self._notified, True
        return not told

    def _tell(self) -> None:
        """Wake the reader (in its own event loop)."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_MERGE_BEYOND = 64  # pieces of one choice that wait unread


def _merged(pieces: list[Delta]) -> Delta:
    last = pieces[-1]
    return Delta(
        last.index,
        "".join([piece.text for piece in pieces]),
        [token for piece in pieces for token in piece.token_ids],
        [value for piece in pieces for value in piece.logprobs],
        [best for piece in pieces for best in piece.top_logprobs],
        last.finish_reason,
        last.error,
    )
