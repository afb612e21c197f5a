"""What a loop has done and holds, as plain numbers; nothing here is a rate, since the loop knows no clock."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from .pages import PagePool

__all__ = ["LoopStatistics", "PageCounts", "Speculation", "count_pages", "speculation_between"]


@dataclass(frozen=True)
class PageCounts:
    """Pages of one KV group: `used` are held by sequences, `cached` by nobody but known, and taken when `free` ones run out."""

    page_size: int
    total: int
    used: int
    cached: int
    free: int


@dataclass
class Speculation:
    """What speculating has brought. Counters, over all requests.

    drafter: its name. steps: those with proposed tokens. proposals: requests in them. drafted, accepted: proposed tokens, and
    those that came true. gained: tokens of those requests beside one a step. by_position: (proposed, accepted) of the first,
    second, … token of a proposal. drafting_seconds: spent by the drafter. saved_seconds: what the same tokens would have taken
    longer without (an estimate, from the steps' cost). failures: times that the drafter raised an error; the
    step was made without it.
    """

    drafter: str
    steps: int = 0
    proposals: int = 0
    drafted: int = 0
    accepted: int = 0
    gained: int = 0
    by_position: list[tuple[int, int]] = field(default_factory=list)
    drafting_seconds: float = 0.0
    saved_seconds: float = 0.0
    failures: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of drafted tokens; 0 where there are none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_proposal(self) -> float:
        """Tokens that a request got from a step which verified a proposal for it: 1 and those that came true."""
        return 1 + self.gained / self.proposals if self.proposals else 1.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of the first, second, … tokens of proposals the share that came true."""
        return [accepted / drafted if drafted else 0.0 for drafted, accepted in self.by_position]

    def snapshot(self) -> Speculation:
        """Return the figures as they are now."""
        return replace(self, by_position=list(self.by_position))

    def since(self, before: Speculation) -> Speculation:
        """Return what has come about after `before`, an earlier snapshot."""
        counters = [option.name for option in fields(self) if option.name not in ("drafter", "by_position")]
        earlier = before.by_position + [(0, 0)] * (len(self.by_position) - len(before.by_position))
        places = [
            (now[0] - was[0], now[1] - was[1]) for now, was in zip(self.by_position, earlier, strict=True)
        ]
        while places and not places[-1][0]:
            places.pop()
        changes = {name: getattr(self, name) - getattr(before, name) for name in counters}
        return Speculation(self.drafter, by_position=places, **changes)


@dataclass(frozen=True)
class LoopStatistics:
    """Counters since the loop was made, and gauges of now.

    `tokens_computed` counts rows of all steps, prompts, repeated ones and padding included; `tokens_generated` those drawn.
    `prefix_queried_tokens` are those of admitted prompts, `prefix_hit_tokens` what came from the cache of them.
    `reserved_slots` are token slots of pages that sequences hold (a shared page counts once for each), `used_slots` those
    of them that a next token reads. `last_sequences` and `last_tokens` are the last step's. `speculation` is None where the loop
    does not speculate.
    """

    policy: str
    steps: int
    tokens_computed: int
    tokens_generated: int
    prefix_hit_tokens: int
    prefix_queried_tokens: int
    preemptions: int
    running: int
    waiting: int
    pages: tuple[PageCounts, ...]  # one a KV group
    reserved_slots: int
    used_slots: int
    last_sequences: int
    last_tokens: int
    max_sequences: int
    token_budget: int
    finished: dict[str, int]  # by reason
    speculation: Speculation | None = None
    draft_pages: tuple[PageCounts, ...] = ()  # one a KV group of the engine that drafts, where one does

    @property
    def waste(self) -> float:
        """The share of reserved token slots that nothing will read."""
        return 1 - self.used_slots / self.reserved_slots if self.reserved_slots else 0.0

    @property
    def batch_fill(self) -> float:
        """Sequences of the last step over those that it could have."""
        return self.last_sequences / self.max_sequences

    @property
    def token_fill(self) -> float:
        """Tokens of the last step over its budget."""
        return self.last_tokens / self.token_budget

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gets from a step that draws for it, on average: 1 without speculation."""
        return _tokens_per_step(self.tokens_generated, self.speculation)

    @property
    def prefix_hit_rate(self) -> float | None:
        """The share of admitted prompts' tokens that came from the cache; None before the first."""
        return self.prefix_hit_tokens / self.prefix_queried_tokens if self.prefix_queried_tokens else None


def _tokens_per_step(generated: int, speculation: Speculation | None) -> float:
    gained = speculation.gained if speculation is not None else 0
    return generated / (generated - gained) if gained else 1.0


def speculation_between(before: LoopStatistics, after: LoopStatistics) -> dict[str, Any]:
    """Return as plain values what speculation has brought between two looks at one loop; nothing where it does not speculate."""
    if after.speculation is None or before.speculation is None:
        return {}
    found = after.speculation.since(before.speculation)
    return {
        "drafter": found.drafter,
        "proposals": found.proposals,
        "drafted_tokens": found.drafted,
        "accepted_tokens": found.accepted,
        "acceptance_rate": found.acceptance_rate if found.drafted else None,
        "acceptance_by_position": found.acceptance_by_position,
        "tokens_per_step": _tokens_per_step(after.tokens_generated - before.tokens_generated, found),
    }


def count_pages(pool: PagePool) -> tuple[PageCounts, ...]:
    """Return the counts of every KV group."""
    return tuple(
        PageCounts(
            group.page_size,
            total,
            total - pool.available(g),
            pool.available(g) - pool.free(g),
            pool.free(g),
        )
        for g, (group, total) in enumerate(zip(pool.groups, pool.capacity, strict=True))
    )
