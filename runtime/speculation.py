"""Speculative decoding around a drafter: who has tokens proposed, how many, and what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .draft_length import Candidate, DraftLength
from .drafting import Drafter, Proposal
from .pages import PagePool
from .plan import Plan
from .request import MOST_DRAFT_TOKENS, Request
from .scheduler import Scheduler
from .statistics import Speculation

__all__ = ["Speculator"]

_log = logging.getLogger(__name__)

MOST_WHEN_FREE, MOST_WHEN_DRAWN = 16, 8  # tokens of a proposal where the length is chosen by measuring


@dataclass(slots=True)
class _Open:
    """A proposal whose truth the step will tell; `length` of its tokens are verified, the rest only compared."""

    proposal: Proposal
    length: int
    before: int  # tokens of the request


class Speculator:
    """Lets one drafter propose for one loop.

    `tokens`: proposed for a request in a step, fixed; None: as `DraftLength` finds it worth. `resample`: verify by the rule of
    `resampling.py`, which is exact in distribution, but lets tokens depend on what was proposed.
    """

    def __init__(self, drafter: Drafter, tokens: int | None = None, resample: bool = False) -> None:
        self.drafter = drafter
        self.resample = drafter.keep_logits = resample
        self.tokens = tokens
        self.most = tokens or (MOST_WHEN_FREE if drafter.free else MOST_WHEN_DRAWN)
        self.length = DraftLength(drafter.free, min(self.most, MOST_DRAFT_TOKENS))
        self.figures = Speculation(drafter.name)
        self._open: dict[Request, _Open] = {}
        self._plain_tokens = self._sequences = 0  # of the step, without what is proposed
        self._drafting = 0.0

    def propose(self, plan: Plan, scheduler: Scheduler) -> None:
        """Let the plan's decoding requests be followed by proposed tokens, with their pages."""
        self._plain_tokens = plan.tokens
        self._sequences = sum(r.computed + count >= len(r.tokens) for r, count in plan.counts.items())
        self._open.clear()
        self._drafting = 0.0
        candidates = [
            Candidate(request, most, unread=self._unread(request))
            for request, count in plan.counts.items()
            if count == 1 and len(request.tokens) - request.computed == 1 and (most := self._most(request))
        ]
        if not candidates:
            return
        started = time.perf_counter()
        if self.drafter.free:
            self._choose_among(candidates, plan, scheduler)
        else:
            self._choose_before(candidates, plan, scheduler)
        self._drafting = time.perf_counter() - started
        self.figures.drafting_seconds += self._drafting

    def _most(self, request: Request) -> int:
        """How many tokens may be proposed for the request: one less than it may still have."""
        wanted = request.options.draft_tokens
        most = self.most if wanted is None else wanted
        return max(min(most, request.limit - len(request.tokens) - 1), 0)

    def _unread(self, request: Request) -> tuple[int, int]:
        """What the drafter has to read before it can propose: (tokens, calls)."""
        unread = getattr(self.drafter, "unread", None)
        return unread(request) if unread is not None and self.tokens is None else (0, 0)

    def _choose(self, candidates: Sequence[Candidate], plan: Plan) -> list[int]:
        if self.tokens is not None:
            return [candidate.most for candidate in candidates]
        return self.length.choose(candidates, self._sequences, self._plain_tokens)

    def _choose_among(self, candidates: list[Candidate], plan: Plan, scheduler: Scheduler) -> None:
        """Ask first, and verify what is worth it; the rest is compared with the tokens that come."""
        made = self._ask([(candidate.request, candidate.most) for candidate in candidates])
        found = [
            (Candidate(candidate.request, len(proposal.tokens), proposal.kind), proposal)
            for candidate, proposal in zip(candidates, made, strict=True)
            if proposal.tokens
        ]
        lengths = self._choose([candidate for candidate, _ in found], plan)
        for (candidate, proposal), length in zip(found, lengths, strict=True):
            request = candidate.request
            granted = scheduler.grant(plan, request, length) if length else 0
            if granted:
                self._plan(plan, request, Proposal(proposal.tokens[:granted], logits=proposal.logits))
            self._open[request] = _Open(proposal, granted, len(request.tokens))

    def _choose_before(self, candidates: list[Candidate], plan: Plan, scheduler: Scheduler) -> None:
        """Choose lengths, reserve pages, and ask for no more than that."""
        wanted: list[tuple[Request, int]] = []
        for candidate, length in zip(candidates, self._choose(candidates, plan), strict=True):
            granted = scheduler.grant(plan, candidate.request, length) if length else 0
            if granted:
                wanted.append((candidate.request, granted))
                # Counted at once, so that the next one is granted what is left.
                plan.draft(candidate.request, [0] * granted)
        if not wanted:
            return
        started = time.perf_counter()
        made = self._ask(wanted)
        preparation = sum(proposal.preparation for proposal in made)
        if preparation:
            self.length.reading.observe(sum(proposal.read for proposal in made), preparation)
        seconds = time.perf_counter() - started - preparation
        if longest := max(len(proposal.tokens) for proposal in made):
            self.length.drafting.observe(longest, max(seconds, 0.0))
        for (request, _), proposal in zip(wanted, made, strict=True):
            plan.undraft(request)
            if proposal.tokens:
                self._plan(plan, request, proposal)
                self._open[request] = _Open(proposal, len(proposal.tokens), len(request.tokens))
            elif proposal.preparation:
                self.length.ask_again(request)
            scheduler.pool.trim(request.slot, plan.counts[request])

    def _plan(self, plan: Plan, request: Request, proposal: Proposal) -> None:
        plan.draft(request, proposal.tokens)
        if self.resample:
            plan.drafted_from[request] = proposal.logits

    def _ask(self, wanted: list[tuple[Request, int]]) -> list[Proposal]:
        """Return the drafter's proposals; nothing from one that fails, since no token depends on it."""
        try:
            return self.drafter.propose(wanted)
        except Exception:
            if not self.figures.failures:
                _log.exception(
                    "the drafter has failed; the step is made without it, and later failures are only counted"
                )
            self.figures.failures += 1
            return [Proposal() for _ in wanted]

    def withdraw(self, plan: Plan, scheduler: Scheduler) -> None:
        """The step failed: it is made again without proposed tokens."""
        for request in list(plan.drafts):
            plan.undraft(request)
            scheduler.pool.trim(request.slot, plan.counts[request])
            self.drafter.settle(request, 0)
        self._open.clear()

    def settle(self, plan: Plan, seconds: float) -> None:
        """The step was committed, and took so long with its drafting: see what came true."""
        figures, gained = self.figures, 0
        for request, opened in self._open.items():
            tokens = opened.proposal.tokens
            came = request.tokens[opened.before :]
            length = opened.length
            known = min(len(came), length or 1)
            accepted = next((i for i in range(known) if came[i] != tokens[i]), known)
            rejected = accepted < known
            self.length.observe(request, opened.proposal.kind, accepted, rejected)
            if length:
                more = max(len(came) - 1, 0)
                gained += more
                figures.gained += more
                self._count(request, opened, accepted)
            if not request.finished:
                self.drafter.settle(request, accepted)
        if plan.drafts:
            figures.steps += 1
        saved = self.length.observe_step(
            plan.tokens, seconds, self._plain_tokens, self._sequences, gained, self._drafting
        )
        figures.saved_seconds += saved
        if plan.tokens <= MOST_FITTED:
            self.length.steps.observe(plan.tokens, seconds - self._drafting)
        for request in self._open:
            if request.finished:
                self.length.forget(request)
        self._open.clear()

    def _count(self, request: Request, opened: _Open, accepted: int) -> None:
        figures, length = self.figures, opened.length
        figures.proposals += 1
        figures.drafted += length
        figures.accepted += accepted
        request.drafted += length
        request.accepted += accepted
        if accepted and request.options.stop:
            request.accepted_runs.append((opened.before, accepted))
        for place in range(length):
            if place == len(figures.by_position):
                figures.by_position.append((0, 0))
            drafted, true = figures.by_position[place]
            figures.by_position[place] = (drafted + 1, true + (place < accepted))

    @property
    def own_pool(self) -> PagePool | None:
        """The pool of a drafter with pages of its own."""
        pool: PagePool | None = getattr(self.drafter, "own_pool", None)
        return pool

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.drafter.forget(request)
        if request not in self._open:
            self.length.forget(request)

    def close(self) -> None:
        """Give back what the drafter holds."""
        self.drafter.close()


MOST_FITTED = 128  # tokens of a step whose time is still of use for the cost of one more
