"""The engine's heartbeat: `EngineLoop.step()` is plan → reserve pages → run → commit.

A step is a transaction over requests: until the executor has returned, no request has changed. Should the
executor fail, the step's requests are run one by one, so that only the one at fault ends (running a step
twice writes the same keys and values to the same places). What a drafter proposed is left out then.

Proposed tokens are computed with the request's own, and only those that came true are committed: the others' keys and values
lie beyond the sequence's end, in pages of its own, where the next step writes over them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from enginewright.backends.base import Executor
from enginewright.recipes.errors import EnginewrightError, RequestError

from .drawing import Drawer, Drawn, StepDraws, logit_rows
from .pages import GroupSpec, PagePool
from .plan import Plan
from .policies import get_policy
from .request import Request, Status, check_token_ids
from .scheduler import Scheduler
from .speculation import Speculator
from .statistics import LoopStatistics, count_pages
from .step_input import InputBuffers

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
    computed together. `row_budget`: rows of a step whose logits are asked for (None = any). `policy`: whom the
    scheduler prefers (`policies.py`). `prefix_cache`: whether written pages are kept for prompts that begin alike.
    """

    max_context: int
    max_sequences: int = 32
    token_budget: int = 512
    chunk_size: int | None = None
    row_budget: int | None = None
    policy: str = "fair"
    prefix_cache: bool = True


@dataclass(frozen=True)
class StepReport:
    """What one step did: `tokens` computed for `sequences` requests; `changed` got a token or ended."""

    tokens: int
    sequences: int
    changed: list[Request]


class EngineLoop:
    """Serves requests on one executor. Not thread-safe: one caller at a time.

    `identity` names what, beside tokens, decides keys and values: the model and its cache's format. `speculator` may be set
    before the first step: it has tokens proposed, which steps verify.
    """

    def __init__(
        self,
        executor: Executor,
        groups: Sequence[GroupSpec],
        pages_per_group: Sequence[int],
        limits: LoopLimits,
        eos_token_ids: Sequence[int] = (),
        identity: bytes = b"",
    ) -> None:
        if limits.max_sequences > limits.token_budget:
            raise ValueError("max_sequences may not exceed token_budget: a step gives each sequence a token")
        if limits.row_budget is not None and limits.max_sequences > limits.row_budget:
            raise ValueError(
                "max_sequences may not exceed row_budget: a step draws a token for each sequence"
            )
        self.executor = executor
        self.limits = limits
        self.pool = PagePool(
            groups,
            pages_per_group,
            limits.max_sequences,
            limits.max_context,
            prefix_cache=limits.prefix_cache,
            identity=identity,
        )
        self.scheduler = Scheduler(
            self.pool, limits.token_budget, limits.chunk_size, limits.row_budget, get_policy(limits.policy)
        )
        self._drawer = Drawer(executor.vocab_size, eos_token_ids, executor)
        self.speculator: Speculator | None = None
        self._input = InputBuffers(limits.token_budget, limits.max_sequences)
        self._steps = self._tokens_computed = self._tokens_generated = 0
        self._last = (0, 0)  # sequences and tokens of the last step
        self._finished: dict[str, int] = {}
        executor.create_pool(list(pages_per_group))

    # -------------------------------------------------------------------------------------------- requests

    def submit(self, request: Request) -> None:
        """Queue `request`, or raise RequestError saying why it can never be served."""
        request.tokens = check_token_ids("prompt", request.tokens, self.executor.vocab_size)
        options = request.options
        check_token_ids("stop_token_ids", options.stop_token_ids, self.executor.vocab_size)
        check_token_ids("logit_bias", [token for token, _ in options.bias_pairs], self.executor.vocab_size)
        if options.constraint is not None and request.grammar is None:
            raise RequestError("the constraint was not compiled", action="give the request its grammar")
        length, most = request.prompt_length, self.limits.max_context
        if not length:
            raise RequestError("the prompt is empty", expected="at least one token")
        wanted = options.max_tokens
        room = most if request.keep_logits or (request.scores_prompt and wanted == 0) else most - 1
        if length > room:
            raise RequestError(
                "the prompt is too long",
                found=f"{length} tokens",
                expected=f"at most {room}: the context of {most} holds the prompt and the new tokens",
                action="shorten the prompt, or build the engine with a larger max_context",
            )
        request.limit = most if wanted is None else min(most, length + wanted)
        if request.keep_logits:
            request.limit = length
        elif (
            request.limit == length and request.first_row >= length - 1
        ):  # max_tokens=0, and nothing to score
            self._finish(request, FINISH_LENGTH)
            return
        self.scheduler.add(request)

    def finish(self, request: Request, reason: str = FINISH_ABORT) -> None:
        """End `request` from outside: aborted, or its text met a stop string. Its pages are free at once."""
        if not request.finished:
            self._finish(request, reason)

    @property
    def drawer(self) -> Drawer:
        """What draws the tokens; a drafter may draw with it between steps."""
        return self._drawer

    @property
    def idle(self) -> bool:
        """Whether no request is running or waiting."""
        return self.scheduler.idle

    def statistics(self) -> LoopStatistics:
        """Return what the loop has done and holds; not while it steps."""
        scheduler, pool = self.scheduler, self.pool
        drafts = self.speculator.own_pool if self.speculator is not None else None
        slots = [pool.slots_of(g) for g in range(len(pool.groups))]
        return LoopStatistics(
            policy=scheduler.policy.name,
            steps=self._steps,
            tokens_computed=self._tokens_computed,
            tokens_generated=self._tokens_generated,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_queried_tokens=scheduler.prefix_queried_tokens,
            preemptions=scheduler.preemptions,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=count_pages(pool),
            reserved_slots=sum(reserved for reserved, _ in slots),
            used_slots=sum(used for _, used in slots),
            last_sequences=self._last[0],
            last_tokens=self._last[1],
            max_sequences=self.limits.max_sequences,
            token_budget=self.limits.token_budget,
            finished=dict(self._finished),
            draft_pages=count_pages(drafts) if drafts is not None else (),
            speculation=None if self.speculator is None else self.speculator.figures.snapshot(),
        )

    # -------------------------------------------------------------------------------------------- the step

    def step(self) -> StepReport:
        """Compute one step. `StepReport.changed` lists the requests with something new."""
        plan = self.scheduler.plan()
        changed: list[Request] = []
        for request in plan.exhausted:
            self._finish(request, FINISH_LENGTH)
            changed.append(request)
        for request, error in plan.failed:
            self._fail(request, error, changed)
        if plan.copies:
            self._copy(plan, changed)
        if not plan.counts:
            return StepReport(0, 0, changed)
        started = time.perf_counter()
        if self.speculator is not None:
            self.speculator.propose(plan, self.scheduler)
        drafts = plan.drafts
        work = list(plan.counts.items())
        padding = [request for request in plan.padding if request.slot >= 0]  # else its batch has ended since
        tokens = sum(plan.counts.values()) + len(padding)
        try:
            self._run(work, changed, padding, drafts, plan.drafted_from)
        except Exception as error:
            if len(work) == 1 and not drafts:
                self._fail(work[0][0], error, changed)
            else:
                if self.speculator is not None:
                    self.speculator.withdraw(plan, self.scheduler)
                self._run_each(list(plan.counts.items()), changed)
        if self.speculator is not None:
            self.speculator.settle(plan, time.perf_counter() - started)
        self._steps += 1
        self._tokens_computed += tokens
        self._last = (len(work) + len(padding), tokens)
        return StepReport(tokens, len(work), changed)

    def _copy(self, plan: Plan, changed: list[Request]) -> None:
        """Make the plan's copies, in order within a group; where that fails, the requests that wanted them end."""
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        for _, (g, source, destination) in plan.copies:
            sources, destinations = by_group.setdefault(g, ([], []))
            sources.append(source)
            destinations.append(destination)
        try:
            for g, (sources, destinations) in by_group.items():
                self.executor.copy_pages(g, sources, destinations)
        except Exception as error:
            for request in {request: None for request, _ in plan.copies}:
                if request.status is Status.RUNNING:
                    plan.take_back(request)
                    self._fail(request, error, changed)

    def _run_each(self, work: list[tuple[Request, int]], changed: list[Request]) -> None:
        """Repeat a step that failed, one request at a time, to find whose fault it was."""
        for item in work:
            try:
                self._run([item], changed)
            except Exception as error:
                self._fail(item[0], error, changed)

    def _run(
        self,
        work: list[tuple[Request, int]],
        changed: list[Request],
        padding: Sequence[Request] = (),
        drafts: Mapping[Request, list[int]] = MappingProxyType({}),
        drafted_from: Mapping[Request, np.ndarray | None] = MappingProxyType({}),
    ) -> None:
        """Run a step of `work` and commit it; rows of `padding` are computed with it and thrown away."""
        rows, row_counts = logit_rows(work)
        wanted, computed = len(rows), work
        if padding:
            computed = [*work, *((request, 1) for request in padding)]
            start = sum(count for _, count in work)
            most = self.scheduler.row_budget - wanted
            rows += list(range(start, start + len(padding)))[:most]
        tables = self.pool.rows([request.slot for request, _ in computed])
        step = self._input.fill(computed, rows, tables, drafts)
        logits = self.executor.step(step)[:wanted]
        draws = self._drawer.draw(work, row_counts, logits, drafts, drafted_from)
        # Nothing below can fail: the step is committed whole.
        self._commit(work, draws, changed, drafts)

    def _commit(
        self,
        work: list[tuple[Request, int]],
        draws: StepDraws,
        changed: list[Request],
        drafts: Mapping[Request, list[int]],
    ) -> None:
        for request, count in work:
            if request in drafts:  # how far it has come will show once its tokens are known
                count -= len(drafts[request])
            self.pool.commit(request.slot, count)
            request.computed += count
        for request, rows in draws.kept:
            request.logit_rows.append(rows)
            changed.append(request)
            if request.computed == request.prompt_length:
                self._finish(request, FINISH_LENGTH)
        for request, scores in draws.scored:
            request.prompt_logprobs += scores
            if not request.draws and len(request.prompt_logprobs) == request.prompt_length:
                changed.append(request)
                self._finish(request, FINISH_LENGTH)
        for request, run in draws.drawn:
            changed.append(request)
            for place, drawn in enumerate(run):
                if place:  # the token before was proposed, and its keys and values stand
                    self.pool.commit(request.slot, 1)
                    request.computed += 1
                self._take(request, drawn)
                if request.finished:
                    break
            else:
                if request in drafts:
                    self.pool.trim(request.slot)

    def _take(self, request: Request, drawn: Drawn) -> None:
        """Give the request its next token, or the error that ends it."""
        if drawn.error is not None:
            request.error = drawn.error
            self._finish(request, FINISH_ERROR)
            return
        self._tokens_generated += 1
        request.tokens.append(drawn.token)
        request.logprobs.append(drawn.logprob)
        if drawn.top is not None:
            request.top_logprobs.append(drawn.top)
        if drawn.complete or self._drawer.ends(request, drawn.token):
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
        if self.speculator is not None:
            self.speculator.forget(request)
        self._finished[reason] = self._finished.get(reason, 0) + 1
        if request.number >= 0:  # it was queued
            self.scheduler.remove(request, ended=reason in (FINISH_STOP, FINISH_LENGTH))
        request.status = Status.FINISHED
