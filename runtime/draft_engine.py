"""Drafting with a second engine: a smaller model of the same vocabulary, with pages and sequences of its own.

A call first lets the draft catch up with each request (its prompt at first, then what the last step gave), in one step of at
most `executor.max_tokens` tokens. A request that is through has its first proposed token drawn from that step; the others come
in steps of one token each, all requests together. A draft draws with the request's options, constraint and noise
(`shadows.py`), so the nearer its logits are to the target's, the more often the very same token comes out.

Only tokens that stand are committed to the draft's pages, hence to its prefix cache. The keys and values of proposed tokens lie
beyond, in pages of the sequence's own; what came true is committed when the step is settled, and the rest is written over.

A request keeps its sequence while it waits or has nothing proposed. Where pages or slots run out, those make room that were not
asked for now, the one that has not been for the longest first; they may find their pages in the prefix cache again. Who finds no
room even so has nothing proposed.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; Chen et al., "Accelerating large language
model decoding with speculative sampling", 2023.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginewright.backends.base import Executor

from .drafting import Proposal
from .drawing import Drawer
from .invariants import check_drafter
from .pages import GroupSpec, Hit, PagePool, pages_to_hold
from .prefix_cache import Block
from .request import Request
from .shadows import Shadows
from .step_input import InputBuffers

__all__ = ["EngineDrafter"]

STEADY = 2  # tokens that a step leaves to catch up with at most: the last proposed one, and the one after it


@dataclass(slots=True, eq=False)
class _Draft:
    """The draft's account of one request: `computed` of its `tokens` stand in the pages of `slot` (-1: it has none).

    `ahead` are proposed tokens that are not settled yet, at most `most`; `logits` a row of each, where they are kept.
    `cached`: tokens that the prefix cache held when it was asked, while there is no slot (-1: it was not).
    """

    request: Request
    tokens: list[int]  # the request's own list, which grows
    slot: int = -1
    computed: int = 0
    cached: int = -1
    blocks: list[Block] = field(default_factory=list)
    most: int = 0
    ahead: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens of the request that the draft has not computed."""
        return len(self.tokens) - self.computed


class EngineDrafter:
    """Proposes what another engine says. See `Drafter`.

    `executor`: its own, of the target's vocabulary, with room for `max_sequences` logit rows; closed with the drafter.
    `pages_per_group`: of its pool, which is made here. `max_context`: tokens of a sequence; beyond them nothing is proposed.
    `eos_token_ids`: the target's. `identity`: as in `PagePool`.
    """

    name = "engine"
    free = False
    keep_logits = False

    def __init__(
        self,
        executor: Executor,
        pages_per_group: Sequence[int],
        *,
        max_sequences: int,
        max_context: int,
        eos_token_ids: Iterable[int] = (),
        identity: bytes = b"",
    ) -> None:
        groups = [GroupSpec(group.window, group.page_size) for group in executor.kv_groups]
        self.executor = executor
        self.max_context = max_context
        self.own_pool = PagePool(
            groups,
            pages_per_group,
            max_sequences,
            max_context,
            prefix_cache=len({group.page_size for group in groups}) == 1,
            identity=identity,
        )
        self._shadows = Shadows(Drawer(executor.vocab_size, eos_token_ids, executor))
        self._input = InputBuffers(executor.max_tokens, max_sequences)
        self._drafts: dict[Request, _Draft] = {}  # those asked for last stand last
        executor.create_pool(list(pages_per_group))

    # ------------------------------------------------------------------------------------------ the contract

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        try:
            return self._propose(wanted)
        except BaseException:  # what the step has written is in doubt
            for request, _ in wanted:
                self.forget(request)
            raise

    def settle(self, request: Request, accepted: int) -> None:
        draft = self._drafts.get(request)
        if draft is None:
            return
        self._shadows.settle(request)
        if draft.ahead:
            kept = min(accepted, len(draft.ahead) - 1)  # the last one's keys and values were not computed
            self.own_pool.commit(draft.slot, kept)
            self.own_pool.trim(draft.slot)
            draft.computed += kept
            draft.ahead, draft.logits = [], []

    def forget(self, request: Request) -> None:
        self._shadows.forget(request)
        draft = self._drafts.pop(request, None)
        if draft is not None:
            self._close(draft)

    def close(self) -> None:
        for request in list(self._drafts):
            self.forget(request)
        self.executor.close()

    def memory(self) -> Mapping[str, int]:
        """Bytes by purpose, as the executor has them."""
        return self.executor.memory()

    def unread(self, request: Request) -> tuple[int, int]:
        """See `Drafter`. What the prefix cache held when this was first asked need not be read."""
        draft = self._drafts.get(request)
        if draft is None:
            draft = self._drafts[request] = _Draft(request, request.tokens)
        if draft.slot < 0 and draft.cached < 0:
            draft.cached = self.own_pool.find(draft.tokens, draft.blocks, len(draft.tokens) - 1).length
        known = draft.computed if draft.slot >= 0 else draft.cached
        count = max(len(draft.tokens) - known - STEADY, 0)
        return count, -(-count // self.executor.max_tokens)

    # --------------------------------------------------------------------------------------------- proposing

    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        started = time.perf_counter()
        drafts: dict[_Draft, Proposal] = {}
        for request, count in wanted:
            self.settle(request, 0)  # nothing is open, unless a step was given up
            draft = self._drafts.pop(request, None) or _Draft(request, request.tokens)
            self._drafts[request] = draft
            self._shadows.begin(request)
            draft.most = min(count, self.max_context - len(draft.tokens) + 1)
            drafts[draft] = Proposal()
        work = self._plan(drafts)
        if work:
            ready = self._catch_up(work)
            seconds, tokens = time.perf_counter() - started, sum(count for _, count in work)
            for draft, count in work:
                drafts[draft].read = max(count - STEADY, 0)
                drafts[draft].preparation = seconds * drafts[draft].read / tokens
            self._go_on(ready)
        for draft, proposal in drafts.items():
            proposal.tokens = list(draft.ahead)
            if draft.logits:
                proposal.logits = np.stack(draft.logits)
        return list(drafts.values())

    def _plan(self, drafts: Collection[_Draft]) -> list[tuple[_Draft, int]]:
        """Return how many pending tokens of each the first step computes, and reserve their pages: the nearest to done first."""
        work: list[tuple[_Draft, int]] = []
        left = self.executor.max_tokens
        for draft in sorted(drafts, key=lambda draft: draft.pending):
            if draft.most < 1 or not draft.pending:
                self._close(draft)  # too long; or its last step came to nothing, and its row is needed again
            if left < 1 or draft.most < 1 or not self._stand(draft, drafts, [other for other, _ in work]):
                continue
            count = self.own_pool.fits(draft.slot, min(draft.pending, left))
            if count:
                self.own_pool.reserve(draft.slot, count)
                work.append((draft, count))
                left -= count
        return work

    def _catch_up(self, work: list[tuple[_Draft, int]]) -> list[_Draft]:
        """Compute pending tokens; draw a first token for those that are through, and return those that go on."""
        rows: list[int] = []
        ready: list[_Draft] = []
        end = 0
        for draft, count in work:
            end += count
            if count == draft.pending:
                ready.append(draft)
                rows.append(end - 1)
        tables = self.own_pool.rows([draft.slot for draft, _ in work])
        logits = self.executor.step(self._input.fill(work, rows, tables))
        for draft, count in work:
            self.own_pool.commit(draft.slot, count)
            draft.computed += count
        return self._draw(ready, logits)

    def _go_on(self, ready: list[_Draft]) -> None:
        """Draw the other tokens, one of every draft a step; who has come to an end or has no page drops out."""
        pool = self.own_pool
        for draft in ready:
            room = pool.fits(draft.slot, draft.most - 1)
            pool.reserve(draft.slot, room)
            draft.most = room + 1
        live = [draft for draft in ready if draft.most > 1]
        while live:
            step = self._input.fill_one_each(
                [draft.ahead[-1] for draft in live],
                [draft.computed + len(draft.ahead) - 1 for draft in live],
                pool.rows([draft.slot for draft in live]),
            )
            live = self._draw(live, self.executor.step(step))

    def _draw(self, drafts: list[_Draft], logits: np.ndarray) -> list[_Draft]:
        """Draw a token for each draft from its row of `logits`; return those that want another."""
        if not drafts:
            return []
        drawn = self._shadows.draw([draft.request for draft in drafts], logits)
        going: list[_Draft] = []
        for row, draft, (token, more) in zip(logits, drafts, drawn, strict=True):
            if token < 0:
                continue
            draft.ahead.append(token)
            if self.keep_logits:
                draft.logits.append(row)
            if more and len(draft.ahead) < draft.most:
                going.append(draft)
        return going

    # ------------------------------------------------------------------------------------------------- pages

    def _stand(self, draft: _Draft, asked: Collection[_Draft], writers: Sequence[_Draft]) -> bool:
        """See to it that the draft has a slot, and there are pages for all its tokens; others that are not `asked` make room.

        A new one begins with what the prefix cache holds. It waits while one of the `writers`, who are computed in this
        call, is about to write more of it.
        """
        pool = self.own_pool
        while True:
            hit = Hit()
            if draft.slot < 0:
                hit = pool.find(draft.tokens, draft.blocks, len(draft.tokens) - 1)
                if self._is_written(draft, len(hit.nodes), writers):
                    return False
            if (draft.slot >= 0 or pool.free_slots) and self._fits(draft, hit):
                break
            if not self._make_room(asked):
                self._close(draft)
                return False
        if draft.slot < 0:
            draft.slot = pool.open(draft.tokens, draft.blocks)
            draft.computed, copies = pool.adopt(draft.slot, hit)
            for g, source, destination in copies:
                self.executor.copy_pages(g, [source], [destination])
        return True

    def _fits(self, draft: _Draft, hit: Hit) -> bool:
        pool, length = self.own_pool, len(draft.tokens)
        chunk = min(length, self.executor.max_tokens)
        for g, group in enumerate(pool.groups):
            has = pool.spared(g, hit) if draft.slot < 0 else pool.held(g, draft.slot)
            if pages_to_hold(group, length, chunk) - has > pool.available(g):
                return False
        return True

    def _is_written(self, draft: _Draft, place: int, writers: Sequence[_Draft]) -> bool:
        """Whether one of `writers` has yet to write the block at `place`, the next that the draft needs."""
        cache = self.own_pool.cache
        if cache is None or place >= len(draft.blocks):
            return False
        block, end = draft.blocks[place], (place + 1) * cache.page_size
        return any(
            writer.computed < end and writer.blocks[place : place + 1] == [block] for writer in writers
        )

    def _make_room(self, asked: Collection[_Draft]) -> bool:
        """Close the sequence of one that is not asked for; return whether there was one."""
        for draft in self._drafts.values():
            if draft.slot >= 0 and draft not in asked:
                self._close(draft)
                return True
        return False

    def _close(self, draft: _Draft) -> None:
        """Give back what the draft's sequence holds; it can begin anew."""
        if draft.slot >= 0:
            self.own_pool.close(draft.slot)
        draft.slot, draft.computed, draft.cached = -1, 0, -1
        draft.ahead, draft.logits = [], []

    def check_invariants(self) -> None:
        """Raise AssertionError when the accounts contradict each other (slow: for tests)."""
        check_drafter(self)
