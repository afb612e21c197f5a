"""The engine for asyncio: one thread steps the loop, any number of tasks wait for their text.

    async with AsyncEngine(load("engines/smollm2-135m-int4")) as engine:
        stream = await engine.generate("The capital of France is", max_tokens=16)
        async for delta in stream:
            print(delta.text, end="")

Commands (submit, cancel) reach the thread through a mailbox that it empties between steps, so a request that is cancelled
gives its pages back before the next step. Text goes the other way: what a reader has not taken yet is merged into one
pending piece a choice, so a slow reader costs memory for its own text alone, and loses nothing.

An Engine that was handed to an AsyncEngine belongs to it: nobody else may step its loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

from enginewright.recipes.errors import RequestError

from .answer import Answer
from .engine import Engine, sampling_options
from .figures import Figures
from .loop import FINISH_ABORT, FINISH_ERROR, FINISH_STOP
from .request import Request
from .streams import Delta, Stream

__all__ = ["AsyncEngine", "Delta", "EngineDied", "Overloaded", "Stream"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Overloaded(RequestError):
    """Too many requests are unfinished; the same request may be served later."""


class EngineDied(RequestError):
    """The thread that steps the loop has ended; nothing is served any more."""


@dataclass(eq=False)
class _Entry:
    """One request on its way: where its text goes, and when it last said something (monotonic seconds)."""

    stream: Stream
    answer: Answer
    arrived: float
    since: float
    taken: int = 0


class AsyncEngine:
    """Serves one Engine to any number of tasks. Use it in an `async with` block, or call `start` and `close`.

    `max_unfinished` bounds the requests that run or wait; one more raises Overloaded.
    """

    def __init__(self, engine: Engine, *, max_unfinished: int | None = None) -> None:
        self.engine = engine
        self.figures = Figures()
        self.max_unfinished = max_unfinished
        self.failure: BaseException | None = None
        self.last_progress = time.monotonic()
        self._loop = engine.loop
        self._entries: dict[Request, _Entry] = {}
        self._mailbox: deque[Callable[[], None]] = deque()
        self._bell = threading.Event()
        self._submitting = 0  # requests that the loop's thread has not seen yet
        self._submitting_lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="enginewright-loop", daemon=True)

    # ------------------------------------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the thread that steps the loop."""
        self._thread.start()

    async def close(self) -> None:
        """Abort what is unfinished, end the thread after its step, and release the engine.

        It can be cancelled while a step hangs; nothing is released then.
        """
        self._closing = True
        self._bell.set()
        while self._thread.is_alive():
            await asyncio.sleep(0.005)
        self.engine.close()

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and self.failure is None

    @property
    def idle(self) -> bool:
        """Whether nothing is running, waiting, or on its way to the loop."""
        return not self._entries and not self._mailbox

    @property
    def unfinished(self) -> int:
        """How many requests run, wait, or are on their way to the loop."""
        return len(self._entries) + self._submitting

    def in_flight(self, most: int) -> list[tuple[str, Request, float]]:
        """Return (label, request, monotonic time of arrival) of at most `most` requests; call it in the loop's thread."""
        found = []
        for request, entry in islice(self._entries.items(), most):
            several = len(entry.stream.answers) > 1
            label = f"{entry.stream.label}-{entry.answer.index}" if several else entry.stream.label
            found.append((label, request, entry.arrived))
        return found

    def seconds_without_progress(self) -> float:
        """Return for how long no step has finished although there is work; 0 when there is none."""
        return 0.0 if self.idle else max(0.0, time.monotonic() - self.last_progress)

    # -------------------------------------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: Any,
        max_tokens: int | None = None,
        *,
        chat: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Stream:
        """Answer one prompt (text, token ids, or with `chat` a message or a conversation); options as in SamplingOptions.

        RequestError when it cannot be served. Texts are encoded, and constraints compiled, in other threads.
        """
        wanted = sampling_options(max_tokens=max_tokens, **options)
        text, ids = await asyncio.to_thread(self.engine.encode, prompt, chat, chat_options)
        grammar = None
        if wanted.constraint is not None:
            grammar = await asyncio.to_thread(self.engine.compile, wanted.constraint)
        request = Request(ids, self.engine.stop_at_special_tokens(wanted), grammar=grammar)
        return await self.submit([request], texts=[text])

    async def submit(
        self,
        requests: Sequence[Request],
        *,
        texts: Sequence[str | None] | None = None,
        shown: frozenset[int] = frozenset(),
        label: str = "",
    ) -> Stream:
        """Queue requests together and return their Stream; RequestError, and none of them is queued, if one cannot be served.

        `texts` are the prompts' texts where known; `shown` are special tokens that stay in the text; `label` names the
        requests in `in_flight`.
        """
        if not requests:
            raise RequestError("there is nothing to compute", expected="at least one request")
        if self.max_unfinished is not None and len(requests) > self.max_unfinished:
            raise RequestError(
                "the request asks for more answers than the server ever takes",
                found=f"{len(requests)} (choices of all prompts)",
                expected=f"at most {self.max_unfinished}",
                action="ask for them in several requests, or let more of them wait (--max-queue)",
            )
        if self.max_unfinished is not None and self.unfinished + len(requests) > self.max_unfinished:
            raise Overloaded(
                "the server is full",
                found=f"{self.unfinished} unfinished requests, and {len(requests)} more",
                expected=f"at most {self.max_unfinished}",
                action="try again later",
            )
        loop = asyncio.get_running_loop()
        known = texts or [None] * len(requests)
        answers = [
            Answer(index, text, request, self.engine.tokenizer, shown)
            for index, (text, request) in enumerate(zip(known, requests, strict=True))
        ]
        stream = Stream(self._abort_soon, answers, loop, label)
        self._count_submitting(len(requests))
        try:
            await self.call(lambda: self._admit(stream))
        except asyncio.CancelledError:
            stream.cancel()
            raise
        finally:
            self._count_submitting(-len(requests))
        return stream

    def _count_submitting(self, change: int) -> None:
        with self._submitting_lock:
            self._submitting += change

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Run `function` in the loop's thread, between steps, and return what it returns."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        def run() -> None:
            result, error = None, None
            try:
                result = function()
            except Exception as raised:
                error = raised
            _call_soon(loop, settle, result, error)

        if not self.alive:
            raise self._died()
        self._post(run)
        if not self._thread.is_alive():  # it may have ended before it saw the mailbox
            self._empty_mailbox()
        return await done

    def _died(self) -> EngineDied:
        return EngineDied("the engine has stopped", found=repr(self.failure), action="start the server again")

    def _post(self, command: Callable[[], None]) -> None:
        if self.idle:
            self.last_progress = time.monotonic()
        self._mailbox.append(command)
        self._bell.set()

    # -------------------------------------------------------------------------------------- the loop's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._empty_mailbox()
                if self._loop.idle:
                    self._bell.wait()
                    self._bell.clear()
                    continue
                report = self._loop.step()
                if report.tokens or report.changed:
                    now = self.last_progress = time.monotonic()
                    self._publish(report.changed, now)
                else:  # everything waits for something outside
                    self._bell.wait(0.001)
                    self._bell.clear()
        except BaseException as error:
            self.failure = error
            _log.exception("the loop has failed; the engine is dead")
        self._end_all()

    def _empty_mailbox(self) -> None:
        while True:
            try:
                command = self._mailbox.popleft()
            except IndexError:
                return
            command()

    def _admit(self, stream: Stream) -> None:
        if self.failure is not None or self._closing:
            raise self._died()
        now = time.monotonic()
        try:
            for answer in stream.answers:
                self._loop.submit(answer.request)
                self._entries[answer.request] = _Entry(stream, answer, now, now)
                self.figures.prompt_tokens += answer.request.prompt_length
        except BaseException:
            for request in stream.requests:
                if self._entries.pop(request, None) is not None:
                    self._loop.finish(request)
            raise
        self._publish([request for request in stream.requests if request.finished], now)

    def _abort_soon(self, stream: Stream) -> None:
        self._post(lambda: self._abort(stream))

    def _abort(self, stream: Stream) -> None:
        ended = [request for request in stream.requests if request in self._entries]
        for request in ended:
            self._loop.finish(request, FINISH_ABORT)
        self._publish(ended, time.monotonic())

    def _publish(self, changed: Sequence[Request], now: float) -> None:
        """Hand what is new of the changed requests to their streams, and wake the readers."""
        readers: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        tokens = 0
        for request in changed:
            entry = self._entries.get(request)
            if entry is None:
                continue
            delta = self._take(entry)
            if delta is None:
                continue
            if delta.token_ids:
                if entry.taken:
                    self.figures.next_token.observe(now - entry.since)
                else:
                    self.figures.first_token.observe(now - entry.arrived)
                    if entry.stream.first_token_seconds is None:
                        entry.stream.first_token_seconds = now - entry.arrived
                for _ in delta.token_ids[1:]:  # they came together
                    self.figures.next_token.observe(0.0)
                entry.since = now
                entry.taken += len(delta.token_ids)
                tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                del self._entries[request]
                self.figures.finished[delta.finish_reason] += 1
            if entry.stream._put(delta):
                readers.setdefault(entry.stream._loop, []).append(entry.stream)
        if tokens:
            self.figures.step(now, tokens)
        for loop, streams in readers.items():
            _call_soon(loop, _tell_all, streams)

    def _take(self, entry: _Entry) -> Delta | None:
        """Return what is new of one request; its text meets a stop string here, and only it suffers from a fault here."""
        request = entry.answer.request
        try:
            piece = entry.answer.take()
        except Exception as error:
            _log.exception("a request's text could not be made")
            self._loop.finish(request, FINISH_ERROR)
            failed = RequestError(
                "the answer's text could not be made", found=f"{type(error).__name__}: {error}"
            )
            request.error = failed
            return Delta(entry.answer.index, "", [], [], [], FINISH_ERROR, failed)
        if piece is None:
            return None
        if entry.answer.stopped and not request.finished:
            self._loop.finish(request, FINISH_STOP)
        past = entry.taken + len(piece.token_ids)
        return Delta(
            piece.index,
            piece.text,
            piece.token_ids,
            request.logprobs[entry.taken : past],
            request.top_logprobs[entry.taken : past] if request.top_logprobs else [],
            piece.finish_reason,
            piece.error,
        )

    def _end_all(self) -> None:
        """The thread is ending: everything unfinished ends, and nobody waits for an answer that will not come."""
        reason = FINISH_ABORT if self.failure is None else FINISH_ERROR
        for request, entry in list(self._entries.items()):
            try:
                self._loop.finish(request, reason)
            except Exception:
                _log.exception("a request could not be ended")
            error = self._died() if self.failure is not None else None
            if entry.stream._put(Delta(entry.answer.index, "", [], [], [], reason, error)):
                _call_soon(entry.stream._loop, entry.stream._tell)
        self._entries.clear()
        self._closing = True
        self._empty_mailbox()


def _tell_all(streams: list[Stream]) -> None:
    for stream in streams:
        stream._tell()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *values: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *values)
    except RuntimeError:  # the reader's event loop is closed: nobody waits
        _log.debug("a reader has gone with its event loop")
