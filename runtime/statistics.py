"""What a loop has done and holds, as plain numbers; nothing here is a rate, since the loop knows no clock."""

from __future__ import annotations

from dataclasses import dataclass

from .pages import PagePool

__all__ = ["LoopStatistics", "PageCounts", "count_pages"]


@dataclass(frozen=True)
class PageCounts:
    """Pages of one KV group: `used` are held by sequences, `cached` by nobody but known, and taken when `free` ones run out."""

    page_size: int
    total: int
    used: int
    cached: int
    free: int


@dataclass(frozen=True)
class LoopStatistics:
    """Counters since the loop was made, and gauges of now.

    `tokens_computed` counts rows of all steps, prompts, repeated ones and padding included; `tokens_generated` those drawn.
    `prefix_queried_tokens` are those of admitted prompts, `prefix_hit_tokens` what came from the cache of them.
    `reserved_slots` are token slots of pages that sequences hold (a shared page counts once for each), `used_slots` those
    of them that a next token reads. `last_sequences` and `last_tokens` are the last step's.
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
    def prefix_hit_rate(self) -> float | None:
        """The share of admitted prompts' tokens that came from the cache; None before the first."""
        return self.prefix_hit_tokens / self.prefix_queried_tokens if self.prefix_queried_tokens else None


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
