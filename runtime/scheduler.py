"""Who is computed in the next step: continuous batching with chunked prefill, over integers only.

Rules:
1. Running requests come first: those with one pending token (decodes), then prefill chunks, each in order
   of arrival, until the step's token budget is used up.
2. Then waiting requests are admitted strictly in order of arrival, while pages remain for all their tokens
   beside what the running ones still need. Nobody is overtaken, so nobody starves.
3. When a running request finds no page, the youngest running request is preempted: it gives everything back and is computed
   again later (its tokens are kept, so nothing that was said changes). The oldest always moves on, so the whole does.
4. A request that is alone and still finds no page has reached what the pool can hold: it ends with "length".
5. A request whose prompt can never fit is refused when it arrives.

Since waiting ones enter in order and the youngest leaves first, everyone running has arrived before everyone
waiting. There is no clock, no randomness and no input or output here: the same calls give the same plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from enginewright.recipes.errors import RequestError

from .pages import PagePool, pages_to_hold
from .request import Request, Status

__all__ = ["Plan", "Scheduler"]


@dataclass
class Plan:
    """One step's work: `counts[request]` tokens of each, in order; `exhausted` ended for want of pages."""

    rows: int  # logit rows that may still be asked for
    counts: dict[Request, int] = field(default_factory=dict)
    exhausted: list[Request] = field(default_factory=list)


class Scheduler:
    """Plans steps and reserves their pages.

    `token_budget` bounds the tokens of a step, `chunk_size` the tokens of one request in a step, `row_budget`
    the rows whose logits are asked for (None = no bound beside the tokens).
    """

    def __init__(
        self, pool: PagePool, token_budget: int, chunk_size: int | None = None, row_budget: int | None = None
    ) -> None:
        if token_budget < 1 or (chunk_size is not None and chunk_size < 1):
            raise ValueError("token_budget and chunk_size must be at least 1")
        self.pool = pool
        self.token_budget = token_budget
        self.chunk_size = min(chunk_size or token_budget, token_budget)
        self.row_budget = min(row_budget or token_budget, token_budget)
        self.running: list[Request] = []  # in order of arrival
        self.waiting: list[Request] = []  # in order of arrival; preempted requests return to their place
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    # ------------------------------------------------------------------------------------------ membership

    def add(self, request: Request) -> None:
        """Queue a new request; RequestError when its prompt can never fit in the pool."""
        for g, group in enumerate(self.pool.groups):
            needed = pages_to_hold(group, request.prompt_length, 1)
            if needed > self.pool.capacity[g]:
                raise RequestError(
                    "the prompt can never fit in the key/value cache",
                    found=f"{request.prompt_length} tokens, which need {needed} pages of {group.page_size}",
                    expected=f"at most {self.pool.capacity[g]} pages",
                    action="shorten the prompt, or give the cache more memory",
                )
        request.number = self._arrivals
        self._arrivals += 1
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take the request out, wherever it stands, and free its pages."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._close(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def _close(self, request: Request) -> None:
        self.pool.close(request.slot)
        request.slot = -1
        request.computed = 0

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._close(request)
        request.status = Status.WAITING
        request.preemptions += 1
        self.waiting.insert(0, request)

    def check_invariants(self) -> None:
        """Raise AssertionError when the queues or the pool's accounts are inconsistent (slow: for tests)."""
        order = [request.number for request in (*self.running, *self.waiting)]
        assert order == sorted(order), ("somebody was overtaken", order)
        assert all(request.status is Status.RUNNING and request.slot >= 0 for request in self.running)
        assert all(request.status is Status.WAITING and request.computed == 0 for request in self.waiting)
        assert len({request.slot for request in self.running}) == len(self.running), "a slot is used twice"
        assert all(request.computed < len(request.tokens) for request in self.running), (
            "running with nothing to do"
        )
        assert self.pool.max_sequences - self.pool.free_slots == len(self.running), "slots leak"
        self.pool.check_invariants()

    # -------------------------------------------------------------------------------------------- planning

    def plan(self) -> Plan:
        """Choose the next step's work and reserve its pages."""
        plan = Plan(self.row_budget)
        budget = self._plan_running(plan, self.token_budget)
        if self.waiting and budget:
            self._admit(plan, budget)
        return plan

    def _plan_running(self, plan: Plan, budget: int) -> int:
        decodes = [request for request in self.running if len(request.tokens) - request.computed == 1]
        prefills = (
            [request for request in self.running if len(request.tokens) - request.computed > 1]
            if len(decodes) < len(self.running)
            else []
        )
        for request in (*decodes, *prefills):
            if not budget:
                break
            if request.status is Status.RUNNING:  # not preempted by one before it
                budget += self._reserve(plan, request, budget)
        return budget

    def _reserve(self, plan: Plan, request: Request, budget: int) -> int:
        """Plan `request`; return the change of the budget (what a preempted request gives back counts)."""
        pool = self.pool
        pending = len(request.tokens) - request.computed
        wanted = 1 if pending == 1 else min(pending, request.chunk_size or self.chunk_size, budget)
        if request.scores_prompt:
            wanted = min(wanted, plan.rows)
        if not wanted or not plan.rows:
            return 0
        returned = 0
        while True:
            count = pool.fits(request.slot, wanted)
            if count:
                pool.reserve(request.slot, count)
                plan.counts[request] = count
                plan.rows -= len(request.wanted_rows(count))
                return returned - count
            if len(self.running) == 1:
                plan.exhausted.append(request)
                self.remove(request)
                return returned
            victim = self.running[-1]
            returned += plan.counts.pop(victim, 0)
            self._preempt(victim)
            if victim is request:
                return returned

    def _admit(self, plan: Plan, budget: int) -> None:
        spare = list(self._spare_pages())
        while self.waiting and budget and self.pool.free_slots:
            request = self.waiting[0]
            pool = self.pool
            length = len(request.tokens)
            chunk = min(length, request.chunk_size or self.chunk_size)
            if self.running:
                needs = [pages_to_hold(group, length, chunk) for group in pool.groups]
                if any(need > pages for need, pages in zip(needs, spare, strict=True)):
                    return
                spare = [pages - need - 1 for need, pages in zip(needs, spare, strict=True)]
            self.waiting.pop(0)
            request.slot = pool.open()
            request.status = Status.RUNNING
            self.running.append(request)
            budget += self._reserve(plan, request, budget)
            if len(self.running) == 1:
                spare = list(self._spare_pages())

    def _spare_pages(self) -> Iterator[int]:
        """Pages of each group that are free beyond what running requests need: all their tokens, and one page to grow."""
        pool = self.pool
        for g, group in enumerate(pool.groups):
            spare = pool.free(g)
            for request in self.running:
                length = len(request.tokens)
                needed = pages_to_hold(group, length, min(length, request.chunk_size or self.chunk_size))
                spare -= max(0, needed - pool.held(g, request.slot)) + 1
            yield spare
