"""How many pages each KV group gets."""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.backends.base import KvGroupInfo
from enginewright.recipes.errors import InputError

from .pages import GroupSpec, pages_to_hold

__all__ = ["plan_pages"]


def plan_pages(
    groups: Sequence[KvGroupInfo],
    *,
    max_context: int,
    max_sequences: int,
    chunk: int,
    tokens: int | None,
    limit_bytes: int,
) -> list[int]:
    """Return the pages of each group.

    With `tokens` given, full-attention groups take so many tokens, otherwise as many as fit in `limit_bytes`; never
    more than max_sequences x max_context. A group with a window gets what max_sequences sequences can hold in it, at
    most as much as the others. `chunk` is the most tokens of one sequence in a step. InputError when not even one token fits.
    """
    most = max_sequences * max_context
    wanted = min(tokens or most, most)
    if tokens is None:
        low, high = 1, wanted  # the most tokens that fit
        while low < high:
            middle = (low + high + 1) // 2
            fits = _bytes(groups, _pages(groups, middle, max_sequences, chunk)) <= limit_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        wanted = low
        needed = _bytes(groups, _pages(groups, wanted, max_sequences, chunk))
        if needed > limit_bytes:
            raise InputError(
                "the key/value cache has room for nothing",
                found=f"{limit_bytes:,} bytes",
                expected=f"at least {needed:,} bytes",
                action="give the cache more memory (cache_bytes, --kv-memory), or build with kv_cache.format=bf16 or int8",
            )
    return _pages(groups, wanted, max_sequences, chunk)


def _pages(groups: Sequence[KvGroupInfo], tokens: int, max_sequences: int, chunk: int) -> list[int]:
    counts = []
    for group in groups:
        whole = -(-tokens // group.page_size)
        one = pages_to_hold(GroupSpec(group.window, group.page_size), tokens, chunk)
        counts.append(min(whole, one * max_sequences) if group.window else whole)
    return counts


def _bytes(groups: Sequence[KvGroupInfo], pages: Sequence[int]) -> int:
    return sum(count * group.page_bytes for group, count in zip(groups, pages, strict=True))
