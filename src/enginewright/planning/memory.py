"""What keys and values take, and how many sequences of what length fit beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from enginewright.planning.structure import Attention
from enginewright.recipes.formats import kv_token_bytes
from enginewright.runtime.pages import GroupSpec, pages_to_hold

__all__ = ["RESERVED", "Cache", "Group", "lengths", "sequences_that_fit"]

RESERVED = 0.1
"""The share of the memory that is left for activations, the framework, and what allocation wastes."""

CHUNK = 512  # tokens of one sequence in a step at most, as the runtime has it by default


@dataclass(frozen=True)
class Group:
    """Layers that see the same window (0: everything): bytes of one token over all of them."""

    window: int
    layers: int
    token_bytes: int


@dataclass(frozen=True)
class Cache:
    """The key/value cache: its groups, its format and the tokens of a page."""

    groups: tuple[Group, ...]
    format: str
    page_size: int

    @classmethod
    def of(cls, attentions: Sequence[Attention], kv_format: str, page_size: int) -> Cache:
        found: dict[int, list[Attention]] = {}
        for attention in attentions:
            found.setdefault(attention.window, []).append(attention)
        groups = [
            Group(
                window,
                sum(a.layers for a in alike),
                sum(a.layers * kv_token_bytes(kv_format, a.kv_heads, a.key_dim, a.value_dim) for a in alike),
            )
            for window, alike in found.items()
        ]
        return cls(tuple(sorted(groups, key=lambda group: group.window)), kv_format, page_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token that every group still holds."""
        return sum(group.token_bytes for group in self.groups)

    def read_bytes(self, length: int) -> int:
        """What the next token of a sequence of so many tokens reads."""
        return sum(g.token_bytes * (min(length, g.window) if g.window else length) for g in self.groups)

    def held_bytes(self, length: int) -> int:
        """What the pages of a sequence of so many tokens take; a window's group holds no more than its window and a step."""
        pages = [pages_to_hold(GroupSpec(g.window, self.page_size), length, CHUNK) for g in self.groups]
        return sum(
            count * self.page_size * g.token_bytes for count, g in zip(pages, self.groups, strict=True)
        )


def lengths(max_context: int) -> list[int]:
    """Lengths worth a line: the powers of two from 1,024 to the longest context, and that."""
    found = [1 << power for power in range(10, 40) if 1 << power < max_context]
    return [*found, max_context]


def sequences_that_fit(cache: Cache, memory: float, engine: int, length: int) -> int:
    """How many sequences of so many tokens fit into the memory that weights and reserve leave."""
    left = memory * (1 - RESERVED) - engine
    return max(0, int(left // cache.held_bytes(length)))
