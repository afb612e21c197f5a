"""The rules of `pages.py`, `scheduler.py` and `draft_engine.py` as code.

Slow: every test runs them after every step, serving never does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .prefix_cache import NO_PAGE, as_content
from .request import Status

if TYPE_CHECKING:
    from .draft_engine import EngineDrafter
    from .pages import PagePool
    from .scheduler import Scheduler

__all__ = ["check_drafter", "check_pool", "check_scheduler"]


def check_pool(pool: PagePool) -> None:
    """Raise AssertionError when a rule of pages.py's docstring is broken."""
    for g in range(len(pool.groups)):
        named = [0] * pool.capacity[g]
        for slot in range(pool.max_sequences):
            for page in _sequence(pool, g, slot):
                named[page] += 1
        _states(pool, g, named)
    open_slots = [slot for slot in range(pool.max_sequences) if pool._open[slot]]
    assert sorted(pool._slots + open_slots) == list(range(pool.max_sequences)), "slots"
    if pool.cache is not None:
        pool.cache.check_invariants()
        standing = {slot: node for slot, node in enumerate(pool._node) if node is not None}
        nodes = (pool.cache.root, *pool.cache.nodes.values())
        assert all(slot in node.live for slot, node in standing.items()), "a sequence that its node forgot"
        assert all(any(node is known for known in nodes) for node in standing.values()), "a node that is gone"
        assert sum(len(node.live) for node in nodes) == len(standing), "a sequence in two places"


def _sequence(pool: PagePool, g: int, slot: int) -> list[int]:
    """Check rules 2 to 6 of one sequence; return its pages of group g."""
    group, length = pool.groups[g], pool._length[slot]
    first, past = pool._first[g][slot], pool._past[g][slot]
    row = pool.tables[g, slot].tolist()
    assert 0 <= first <= past <= len(row), (g, slot, first, past)
    pages: list[int] = row[first:past]
    assert NO_PAGE not in pages, ("a hole in the range", g, slot, row)
    assert all(page == NO_PAGE for page in row[:first] + row[past:]), ("a page outside", g, slot, row)
    if not pool._open[slot]:
        assert past == 0 and length == 0, ("a closed sequence holds pages", g, slot)
        assert pool._node[slot] is None, ("a closed sequence stands in the tree", slot)
        return pages
    assert first == min(group.first_read(length), past), ("kept or lost too much", g, slot, length, first)
    assert past * group.page_size >= length, ("tokens without a page", g, slot, length, past)
    assert pool._room[slot] <= past * group.page_size, ("room without pages", g, slot)
    for place, page in enumerate(pages, start=first):
        owner = pool.cache.owner[g][page] if pool.cache is not None else None
        start, end = place * group.page_size, (place + 1) * group.page_size
        if owner is not None:
            assert end <= length, ("a registered page that is not whole", g, slot, place)
            assert as_content(pool._tokens[slot][start:end]) == owner.content, ("other content", g, slot)
        if end > length:
            assert pool._references[g][page] == 1, ("a page that will be written is shared", g, slot, place)
    return pages


def _states(pool: PagePool, g: int, named: list[int]) -> None:
    """Check rule 1 of one group; `named[page]` counts the tables that name it."""
    free, cached = pool._free[g], list(pool._cached[g])
    assert named == pool._references[g], ("references differ from tables", g)
    assert len(set(free)) == len(free), ("a page is free twice", g)
    unheld = [page for page, count in enumerate(named) if not count]
    assert sorted(free + cached) == unheld, ("a page is neither free, cached nor used", g)
    owner = pool.cache.owner[g] if pool.cache is not None else [None] * len(named)
    assert all(owner[page] is None for page in free), ("a free page is registered", g)
    assert all(owner[page] is not None for page in cached), ("a cached page is not registered", g)


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError when the queues or the pool's accounts are inconsistent."""
    pool, running, waiting, padding = scheduler.pool, scheduler.running, scheduler.waiting, scheduler.padding
    for queue in (running, waiting):
        turns = [request.turn for request in queue]
        assert turns == sorted(turns) and len(set(turns)) == len(turns), ("out of order", turns)
    assert all(request.status is Status.RUNNING for request in running)
    assert all(request.status is Status.WAITING and request.computed == 0 for request in waiting)
    assert all(request.slot < 0 for request in waiting), "a waiting request has a slot"
    assert all(request.status is Status.FINISHED for request in padding)
    assert not padding or running, "padding without a batch"
    slots = [request.slot for request in (*running, *padding)]
    assert len(set(slots)) == len(slots) and all(slot >= 0 for slot in slots), ("slots used twice", slots)
    assert all(request.computed < len(request.tokens) for request in running), "running with nothing to do"
    assert all(pool._length[request.slot] == request.computed for request in running), "another length"
    assert pool.max_sequences - pool.free_slots == len(slots), "slots leak"
    pool.check_invariants()


def check_drafter(drafter: EngineDrafter) -> None:
    """Raise AssertionError when the drafter's pages hold anything but what its requests say."""
    pool = drafter.own_pool
    slots = []
    for request, draft in drafter._drafts.items():
        assert not request.finished, "a request that has ended"
        assert draft.tokens is request.tokens
        assert draft.computed <= len(draft.tokens), "more than the request has"
        if draft.slot < 0:
            assert not draft.computed and not draft.ahead, "tokens without a sequence"
            continue
        slots.append(draft.slot)
        assert pool._length[draft.slot] == draft.computed, "another length"
        for g, group in enumerate(pool.groups):
            spare = pool._past[g][draft.slot] - -(-draft.computed // group.page_size)
            assert draft.ahead or not spare, "pages for nothing"
    assert len(set(slots)) == len(slots) == pool.max_sequences - pool.free_slots, "slots leak"
    for request, shadow in drafter._shadows._of.items():
        ahead = drafter._drafts[request].ahead
        assert shadow.ahead == ahead, "a memory of what was settled"
        if shadow.drawing is not None and not ahead:
            matcher = shadow.drawing.matcher
            assert shadow.drawing.row.seen <= len(shadow.tokens), "tokens that did not come"
            taken = matcher._taken if matcher is not None else 0
            assert shadow.prompt_length + taken <= len(shadow.tokens), "tokens that did not come"
    pool.check_invariants()
