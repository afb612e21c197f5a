"""Who is computed in the next step: continuous batching with chunked prefill, over integers only.

Rules:
1. Everyone has a turn, made at arrival from the step, the priority and the prompt's length, as the policy weighs them.
   Lower turns are served sooner.
2. Running requests come first: those with one pending token (decodes) always get it, then prompts get chunks, by turn, until the
   step's token budget is used up.
3. Then waiting requests enter by turn, while pages remain for all their tokens beside what the running ones still need. What
   the prefix cache holds of them is not computed. One whose next tokens a running prompt of an earlier turn is about to write
   waits for them.
4. Where a running request finds no page, the one with the last turn is preempted: it gives everything back and is
   computed again later (its tokens are kept, so nothing that was said changes). The first always moves on, so the whole does.
5. A request that is alone and still finds no page has reached what the pool can hold: it ends with "length".
6. A request whose prompt can never fit is refused when it arrives.

Turns do not change, but for a request that makes room after its quantum: it has moved on and joins the queue anew. So
nobody waits for ever. There is no clock, no randomness and no input or output here: the same calls give the same plans.
"""

from __future__ import annotations

import math
from bisect import insort

from enginewright.recipes.errors import RequestError

from .invariants import check_scheduler
from .pages import Hit, PagePool, pages_to_hold
from .plan import Plan
from .policies import Policy, get_policy
from .request import Request, Status

__all__ = ["Scheduler"]

LOOK_AHEAD = 64  # waiting requests that are looked at in a step beyond those that enter


class Scheduler:
    """Plans steps and reserves their pages.

    `token_budget` bounds the tokens of a step, `chunk_size` the tokens of one request in a step, `row_budget`
    the rows whose logits are asked for (None = no bound beside the tokens).
    """

    def __init__(
        self,
        pool: PagePool,
        token_budget: int,
        chunk_size: int | None = None,
        row_budget: int | None = None,
        policy: str | Policy = "fair",
    ) -> None:
        if token_budget < 1 or (chunk_size is not None and chunk_size < 1):
            raise ValueError("token_budget and chunk_size must be at least 1")
        self.pool = pool
        self.policy = get_policy(policy) if isinstance(policy, str) else policy
        self.token_budget = token_budget
        self.chunk_size = min(chunk_size or token_budget, token_budget)
        self.row_budget = min(row_budget or token_budget, token_budget)
        self.running: list[Request] = []  # by turn
        self.waiting: list[Request] = []  # by turn; preempted requests return to their place
        self.padding: list[Request] = []  # ended, but computed on until their batch has ended
        self.preemptions = 0
        self.prefix_hit_tokens = 0  # of prompts, at their first admission
        self.prefix_queried_tokens = 0
        self._awaited: dict[
            Request, tuple[Request, int]
        ] = {}  # who writes a waiting one's next block, and its place
        self._step = 0
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
        self._queue(request)

    def remove(self, request: Request, *, ended: bool = False) -> None:
        """Take the request out, wherever it stands, and free its pages.

        `ended`: it has come to its own end, so that a policy with padding computes its row on while its batch runs.
        """
        if request.status is Status.RUNNING:
            self.running.remove(request)
            pads = ended and self.policy.padding and request.computed < len(request.tokens)
            if pads and self.running:
                self.padding.append(request)
            else:
                self._close(request)
            if not self.running:
                self._drop_padding()
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
            self._awaited.pop(request, None)
        request.status = Status.FINISHED

    def _queue(self, request: Request) -> None:
        """Give the request a turn and a place in the queue."""
        cost = self.policy.prompt_cost * request.prompt_length // self.token_budget
        request.turn = (self._step + self.policy.ageing * request.priority + cost, request.number)
        insort(self.waiting, request, key=_turn)

    def _close(self, request: Request) -> None:
        self.pool.close(request.slot)
        request.slot = -1
        request.computed = 0

    def _drop_padding(self) -> None:
        for request in self.padding:
            self._close(request)
        self.padding.clear()

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._close(request)
        request.status = Status.WAITING
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=_turn)

    def check_invariants(self) -> None:
        """Raise AssertionError when the queues or the pool's accounts are inconsistent (slow: for tests)."""
        check_scheduler(self)

    # -------------------------------------------------------------------------------------------- planning

    def plan(self) -> Plan:
        """Choose the next step's work and reserve its pages."""
        self._step += 1
        plan = Plan(self.row_budget, self.token_budget)
        if self.waiting and self.running and not self.policy.batches:
            self._make_room()
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            (decodes if len(request.tokens) - request.computed == 1 else prompts).append(request)
        for request in decodes:
            if request.status is Status.RUNNING:  # not preempted by one before it
                self._give(plan, request, 1)
        if self.padding:
            self._plan_padding(plan)
        if decodes:
            share = math.ceil(self.token_budget * self.policy.beside_decodes)
            plan.most = min(plan.most, plan.tokens + share)
        for request in prompts:
            if plan.left > 0 and request.status is Status.RUNNING:
                self._give(plan, request, self._chunk(plan, request, request is not prompts[-1]))
        if self.waiting:
            self._admit(plan)
        if plan.left > 0 and self.policy.largest_share < 1:
            self._share_out(plan)
        return plan

    def _chunk(self, plan: Plan, request: Request, in_company: bool) -> int:
        """Return how much of its prompt the request gets at first, where others after it may want what is left."""
        left = plan.left
        if in_company or (self.waiting and self.pool.free_slots):
            left = math.ceil(left * self.policy.largest_share)
        return min(len(request.tokens) - request.computed, request.chunk_size or self.chunk_size, left)

    def _share_out(self, plan: Plan) -> None:
        """Give what is left to prompts that could take more, by turn."""
        for request in list(self.running):
            count = plan.counts.get(request, 0)
            most = min(len(request.tokens) - request.computed, request.chunk_size or self.chunk_size)
            if count < most and plan.left > 0:
                plan.take_back(request)
                self._give(plan, request, min(most, plan.left), preempt=False)

    def _give(self, plan: Plan, request: Request, wanted: int, preempt: bool = True) -> None:
        """Plan up to `wanted` tokens of `request`, with their pages."""
        if request.scores_prompt:
            wanted = min(wanted, plan.rows)
        if wanted < 1 or plan.rows < 1:
            return
        pool = self.pool
        try:
            while True:
                count = pool.fits(request.slot, wanted)
                if count:
                    pool.reserve(request.slot, count)
                    plan.put(request, count)
                    return
                if not preempt:
                    return
                if self.padding:
                    plan.tokens -= len(plan.padding)
                    plan.padding.clear()
                    self._drop_padding()
                    continue
                if len(self.running) == 1:
                    plan.exhausted.append(request)
                    self.remove(request)
                    return
                victim = self.running[-1]
                plan.take_back(victim)
                self._preempt(victim)
                if victim is request:
                    return
        except Exception as error:
            self._fail(plan, request, error)

    def grant(self, plan: Plan, request: Request, wanted: int) -> int:
        """Reserve the pages of proposed tokens after the request's own, at most `wanted`; return of how many.

        They take what the step has left over: nobody is preempted for them.
        """
        count = plan.counts[request]
        room = request.limit - len(request.tokens) - 1  # a step gives one token more than it is proposed
        most = min(wanted, self.token_budget - plan.tokens, plan.rows, room)
        if most < 1:
            return 0
        granted = max(self.pool.fits(request.slot, count + most) - count, 0)
        try:
            self.pool.reserve(request.slot, count + granted)
        except Exception:  # the request's own tokens have their pages
            self.pool.trim(request.slot, count)
            return 0
        return granted

    def _fail(self, plan: Plan, request: Request, error: Exception) -> None:
        """The pool raised `error` for this request: it leaves, and the others stay."""
        plan.take_back(request)
        plan.failed.append((request, error))
        self.remove(request)

    def _plan_padding(self, plan: Plan) -> None:
        """Compute the pending token of every ended request again, where it has a page to write to."""
        for request in list(self.padding):
            try:
                if not self.pool.fits(request.slot, 1):
                    raise MemoryError
                self.pool.reserve(request.slot, 1)
            except Exception:  # nobody misses it
                self.padding.remove(request)
                self._close(request)
                continue
            plan.padding.append(request)
            plan.tokens += 1

    # ------------------------------------------------------------------------------------------- admission

    def _admit(self, plan: Plan) -> None:
        """Let waiting requests enter, by turn; the policy says who may pass whom."""
        policy = self.policy
        if policy.batches and self.running:
            return
        spare: list[int] | None = None
        blocked: list[Request] = []
        at = 0
        while at < min(len(self.waiting), LOOK_AHEAD) and self.pool.free_slots:
            request = self.waiting[at]
            if plan.left < 1 and not policy.batches:
                return
            hit = self._hit(request)
            if hit is None:
                at += 1
                continue
            needs = self._needs(request, hit)
            if self.running:
                spare = spare if spare is not None else self._spare_pages()
                if any(need > pages for need, pages in zip(needs, spare, strict=True)):
                    blocked.append(request)
                    if any(other.passed >= policy.overtaking for other in blocked):
                        return
                    at += 1
                    continue
                spare = [pages - need - 1 for need, pages in zip(needs, spare, strict=True)]
            for other in blocked:
                other.passed += 1
            self.waiting.pop(at)
            if self._enter(plan, request, hit) and plan.left > 0:
                self._give(plan, request, self._chunk(plan, request, False), preempt=False)

    def _enter(self, plan: Plan, request: Request, hit: Hit) -> bool:
        """Make a waiting request a running one, with what the prefix cache has of it; return whether it is."""
        request.slot = self.pool.open(request.tokens, request.blocks)
        request.status = Status.RUNNING
        request.resumed = len(request.tokens)
        insort(self.running, request, key=_turn)
        try:
            request.computed, copies = self.pool.adopt(request.slot, hit)
        except Exception as error:
            self._fail(plan, request, error)
            return False
        plan.copies += [(request, copy) for copy in copies]
        if not request.preemptions and self.pool.cache is not None:
            request.cached_tokens = request.computed
            self.prefix_hit_tokens += request.computed
            self.prefix_queried_tokens += request.prompt_length
        return True

    def _hit(self, request: Request) -> Hit | None:
        """Return what the prefix cache has of a waiting request; None where a running prompt is about to write more of it."""
        cache = self.pool.cache
        if cache is None:
            return Hit()
        if request in self._awaited:
            writer, place = self._awaited[request]
            if writer.status is Status.RUNNING and writer.computed < (place + 1) * cache.page_size:
                return None
            del self._awaited[request]
        most = min(request.first_row, len(request.tokens) - 1)
        hit = self.pool.find(request.tokens, request.blocks, most)
        place = len(hit.nodes)
        if hit.length < most and place < len(request.blocks) and not self.policy.batches:
            for writer in self.running:
                if writer.turn > request.turn:  # by turn: from here on, all give way to this request
                    break
                if (
                    writer.computed < (place + 1) * cache.page_size
                    and place < len(writer.blocks)
                    and writer.blocks[place] == request.blocks[place]
                ):
                    self._awaited[request] = (writer, place)
                    return None
        return hit

    def _needs(self, request: Request, hit: Hit) -> list[int]:
        """Return the pages of each group that the request takes for all its known tokens."""
        length = len(request.tokens)
        chunk = min(length, request.chunk_size or self.chunk_size)
        return [
            pages_to_hold(group, length, chunk) - self.pool.spared(g, hit)
            for g, group in enumerate(self.pool.groups)
        ]

    def _spare_pages(self) -> list[int]:
        """Pages of each group that are there beyond what running requests need: all their tokens, and one page to grow."""
        pool = self.pool
        spare = [pool.available(g) for g in range(len(pool.groups))]
        for request in self.running:
            length = len(request.tokens)
            chunk = min(length, request.chunk_size or self.chunk_size)
            for g, group in enumerate(pool.groups):
                spare[g] -= max(0, pages_to_hold(group, length, chunk) - pool.held(g, request.slot)) + 1
        return spare

    # ------------------------------------------------------------------------------------------ making room

    def _make_room(self) -> None:
        """Preempt for the first of the waiting: those of lower priority, or one that has had its quantum."""
        head, last = self.waiting[0], self.running[-1]
        urgent = head.priority < last.priority and head.turn < last.turn
        if not urgent and not self.policy.quantum:
            return
        rested = None if urgent else max(self.running, key=lambda r: (len(r.tokens) - r.resumed, r.turn))
        if rested is not None and len(rested.tokens) - rested.resumed < self.policy.quantum:
            return
        hit = self._hit(head)
        if hit is None:
            return
        missing = [
            need - have for need, have in zip(self._needs(head, hit), self._spare_pages(), strict=True)
        ]
        if self.pool.free_slots and max(missing, default=0) <= 0:
            return
        if rested is not None:
            self._preempt(rested)
            self.waiting.remove(rested)
            self._queue(rested)
            return
        victims = []
        for request in reversed(self.running):
            if request.priority <= head.priority or request.turn < head.turn:
                break
            victims.append(request)
            missing = [count - self.pool.held(g, request.slot) - 1 for g, count in enumerate(missing)]
            if max(missing, default=0) <= 0:
                for victim in victims:
                    self._preempt(victim)
                return


def _turn(request: Request) -> tuple[int, int]:
    return request.turn
