"""The engine's heartbeat: `EngineLoop.step()` is plan → reserve pages → run → commit.

A step is a transaction over requests: until the executor has returned, no request has changed. Should the
executor fail, the step's requests are run one by one, so that only the one at fault ends (running a step
twice writes the same keys and values to the same places).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginewright.backends.base import Executor, StepInput
from enginewright.recipes.errors import EnginewrightError, RequestError

from .pages import GroupSpec, PagePool
from .request import Request, Status, check_token_ids
from .sampler import Drawn, draw
from .scheduler import Scheduler

__all__ = ["EngineLoop", "LoopLimits", "StepReport"]

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"


@dataclass(frozen=True)
class LoopLimits:
    """What one loop can take.

    `max_context`: tokens of a sequence, prompt and output together. `token_budget`: tokens a step.
    `chunk_size`: prompt tokens of one request in a step (None = the budget). `max_sequences`: requests
    computed together. `row_budget`: rows of a step whose logits are asked for (None = any).
    """

    max_context: int
    max_sequences: int = 32
    token_budget: int = 512
    chunk_size: int | None = None
    row_budget: int | None = None


@dataclass(frozen=True)
class StepReport:
    """What one step did: `tokens` computed for `sequences` requests; `changed` got a token or ended."""

    tokens: int
    sequences: int
    changed: list[Request]


class EngineLoop:
    """Serves requests on one executor. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        executor: Executor,
        groups: Sequence[GroupSpec],
        pages_per_group: Sequence[int],
        limits: LoopLimits,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if limits.max_sequences > limits.token_budget:
            raise ValueError("max_sequences may not exceed token_budget: a step gives each sequence a token")
        if limits.row_budget is not None and limits.max_sequences > limits.row_budget:
            raise ValueError(
                "max_sequences may not exceed row_budget: a step draws a token for each sequence"
            )
        self.executor = executor
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pool = PagePool(groups, pages_per_group, limits.max_sequences, limits.max_context)
        self.scheduler = Scheduler(self.pool, limits.token_budget, limits.chunk_size, limits.row_budget)
        self._input = _InputBuffers(limits)
        executor.create_pool(list(pages_per_group))

    # -------------------------------------------------------------------------------------------- requests

    def submit(self, request: Request) -> None:
        """Queue `request`, or raise RequestError saying why it can never be served."""
        request.tokens = check_token_ids("prompt", request.tokens, self.executor.vocab_size)
        check_token_ids("stop_token_ids", request.options.stop_token_ids, self.executor.vocab_size)
        length, most = request.prompt_length, self.limits.max_context
        if not length:
            raise RequestError("the prompt is empty", expected="at least one token")
        room = most if request.keep_logits else most - 1
        if length > room:
            raise RequestError(
                "the prompt is too long",
                found=f"{length} tokens",
                expected=f"at most {room}: the context of {most} holds the prompt and the new tokens",
                action="shorten the prompt, or build the engine with a larger max_context",
            )
        wanted = request.options.max_tokens
        request.limit = most if wanted is None else min(most, length + wanted)
        if request.keep_logits:
            request.limit = length
        elif request.limit == length:  # max_tokens=0
            self._finish(request, FINISH_LENGTH)
            return
        self.scheduler.add(request)

    def finish(self, request: Request, reason: str = FINISH_ABORT) -> None:
        """End `request` from outside: aborted, or its text met a stop string. Its pages are free at once."""
        if not request.finished:
            self._finish(request, reason)

    @property
    def idle(self) -> bool:
        """Whether no request is running or waiting."""
        return self.scheduler.idle

    # -------------------------------------------------------------------------------------------- the step

    def step(self) -> StepReport:
        """Compute one step. `StepReport.changed` lists the requests with something new."""
        plan = self.scheduler.plan()
        changed: list[Request] = []
        for request in plan.exhausted:
            self._finish(request, FINISH_LENGTH)
            changed.append(request)
        if not plan.counts:
            return StepReport(0, 0, changed)
        work = list(plan.counts.items())
        try:
            self._run(work, changed)
        except Exception as error:
            if len(work) == 1:
                self._fail(work[0][0], error, changed)
            else:
                self._run_each(work, changed)
        return StepReport(sum(plan.counts.values()), len(work), changed)

    def _run_each(self, work: list[tuple[Request, int]], changed: list[Request]) -> None:
        """Repeat a step that failed, one request at a time, to find whose fault it was."""
        for item in work:
            try:
                self._run([item], changed)
            except Exception as error:
                self._fail(item[0], error, changed)

    def _run(self, work: list[tuple[Request, int]], changed: list[Request]) -> None:
        rows, row_counts = _logit_rows(work)
        step = self._input.fill(work, rows, self.pool.rows([request.slot for request, _ in work]))
        logits = self.executor.step(step)
        drawing, drawn = _draw(work, row_counts, logits)
        # Nothing below can fail: the step is committed whole.
        self._commit_cache(work, row_counts, logits, changed)
        self._commit_tokens(drawing, drawn, changed)

    def _commit_cache(
        self,
        work: list[tuple[Request, int]],
        row_counts: list[int],
        logits: np.ndarray,
        changed: list[Request],
    ) -> None:
        row = 0
        for (request, count), rows in zip(work, row_counts, strict=True):
            self.pool.commit(request.slot, count)
            request.computed += count
            if request.keep_logits:
                request.logit_rows.append(logits[row : row + rows].copy())
                changed.append(request)
                if request.computed == request.prompt_length:
                    self._finish(request, FINISH_LENGTH)
            row += rows

    def _commit_tokens(self, drawing: list[Request], drawn: list[Drawn], changed: list[Request]) -> None:
        for request, (token, logprob) in zip(drawing, drawn, strict=True):
            changed.append(request)
            if token < 0:
                request.error = RequestError(
                    "the model's logits cannot be sampled from",
                    found=f"NaN or infinity at position {len(request.tokens) - 1}",
                    action="if it happens for ordinary prompts, verify the engine or build it with more bits",
                )
                self._finish(request, FINISH_ERROR)
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            options = request.options
            if (token in self.eos_token_ids and not options.ignore_eos) or token in options.stop_token_ids:
                self._finish(request, FINISH_STOP)
            elif len(request.tokens) >= request.limit:
                self._finish(request, FINISH_LENGTH)

    def _fail(self, request: Request, error: Exception, changed: list[Request]) -> None:
        if isinstance(error, RequestError):
            request.error = error
        else:
            detail = (
                error.message if isinstance(error, EnginewrightError) else f"{type(error).__name__}: {error}"
            )
            request.error = RequestError("the request failed while it was computed", found=detail)
            request.error.__cause__ = error
        self._finish(request, FINISH_ERROR)
        changed.append(request)

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        if request.number >= 0:  # it was queued
            self.scheduler.remove(request)
        request.status = Status.FINISHED


def _logit_rows(work: list[tuple[Request, int]]) -> tuple[list[int], list[int]]:
    """Return the step's rows whose logits are wanted, and how many of them belong to each request."""
    rows: list[int] = []
    row_counts: list[int] = []
    end = 0
    for request, count in work:
        start, end = end, end + count
        if request.keep_logits:
            rows.extend(range(start, end))
            row_counts.append(count)
        elif request.computed + count == len(request.tokens):
            rows.append(end - 1)
            row_counts.append(1)
        else:
            row_counts.append(0)
    return rows, row_counts


def _draw(
    work: list[tuple[Request, int]], row_counts: list[int], logits: np.ndarray
) -> tuple[list[Request], list[Drawn]]:
    """Draw the next token of every request that the step brought to its end."""
    drawing: list[Request] = []
    at: list[int] = []
    row = 0
    for (request, _), rows in zip(work, row_counts, strict=True):
        if rows and not request.keep_logits:
            drawing.append(request)
            at.append(row)
        row += rows
    if not drawing:
        return [], []
    drawn = draw(
        logits if len(at) == len(logits) else logits[at],
        [request.options.temperature for request in drawing],
        [request.options.seed for request in drawing],
        [len(request.tokens) for request in drawing],
    )
    return drawing, drawn


class _InputBuffers:
    """The arrays of a StepInput, allocated once."""

    def __init__(self, limits: LoopLimits) -> None:
        self._tokens = np.zeros(limits.token_budget, np.int32)
        self._positions = np.zeros(limits.token_budget, np.int32)
        self._starts = np.zeros(limits.max_sequences + 1, np.int32)
        self._lengths = np.zeros(limits.max_sequences, np.int32)
        self._rows = np.zeros(limits.token_budget, np.int32)

    def fill(self, work: list[tuple[Request, int]], rows: list[int], page_tables: np.ndarray) -> StepInput:
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        lengths: list[int] = []
        for request, count in work:
            computed = request.computed
            if count == 1:
                tokens.append(request.tokens[computed])
                positions.append(computed)
            else:
                tokens += request.tokens[computed : computed + count]
                positions += range(computed, computed + count)
            starts.append(len(tokens))
            lengths.append(computed + count)
        return StepInput(
            tokens=_put(self._tokens, tokens),
            positions=_put(self._positions, positions),
            seq_starts=_put(self._starts, starts),
            context_lens=_put(self._lengths, lengths),
            page_tables=page_tables,
            logit_rows=_put(self._rows, rows),
        )


def _put(buffer: np.ndarray, values: list[int]) -> np.ndarray:
    view = buffer[: len(values)]
    view[:] = values
    return view
