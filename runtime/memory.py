"""How many pages each KV group gets, and what they hold."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from enginewright.backends.base import KvGroupInfo
from enginewright.recipes.errors import InputError

from .pages import GroupSpec, pages_to_hold

__all__ = [
    "DEFAULT_CACHE_BYTES",
    "cache_tokens",
    "longest_sequence",
    "machine_memory",
    "page_bytes",
    "plan_draft_pages",
    "plan_pages",
]

DEFAULT_CACHE_BYTES = 1 << 30


def plan_pages(
    groups: Sequence[KvGroupInfo],
    *,
    max_context: int,
    max_sequences: int,
    chunk: int,
    tokens: int | None,
    limit_bytes: int,
    option: str = "cache_bytes, --kv-memory",
    most_pages: Sequence[int] | None = None,
) -> list[int]:
    """Return the pages of each group.

    With `tokens` given, full-attention groups take so many tokens, otherwise as many as fit in `limit_bytes`; never
    more than max_sequences x max_context. A group with a window gets what max_sequences sequences can hold in it, at
    most as much as the others. `chunk` is the most tokens of one sequence in a step. `most_pages`: what each group's pool
    can have at all. InputError when not even one token fits.
    """
    most = max_sequences * max_context
    possible = [most] * len(groups) if most_pages is None else list(most_pages)
    for group, count in zip(groups, possible, strict=True):
        if not group.window:  # the others need no more than their sequences' windows
            most = min(most, count * group.page_size)
    wanted = min(tokens or most, most)
    if tokens is None:
        low, high = 1, wanted  # the most tokens that fit
        while low < high:
            middle = (low + high + 1) // 2
            fits = page_bytes(groups, _pages(groups, middle, max_sequences, chunk)) <= limit_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        wanted = low
        needed = page_bytes(groups, _pages(groups, wanted, max_sequences, chunk))
        if needed > limit_bytes:
            whole = max(group.page_size for group in groups)
            long = whole >= max_context
            told = (
                f" for one sequence of {whole:,} tokens: the engine has one page a sequence" if long else ""
            )
            other = (
                "a smaller max_context or kv_cache.page_size=16" if long else "kv_cache.format=bf16 or int8"
            )
            raise InputError(
                "the key/value cache has room for nothing",
                found=f"{limit_bytes:,} bytes",
                expected=f"at least {needed:,} bytes{told}",
                action=f"give the cache more memory ({option}), or build with {other}",
            )
    pages = _pages(groups, wanted, max_sequences, chunk)
    return [min(pair) for pair in zip(pages, possible, strict=True)]


def plan_draft_pages(
    groups: Sequence[KvGroupInfo],
    *,
    max_context: int,
    max_sequences: int,
    chunk: int,
    tokens: int,
    limit_bytes: int | None,
) -> list[int]:
    """Return the pages of each group of an engine that drafts: for `tokens`, or as many of them as fit in `limit_bytes`.

    Other arguments as in `plan_pages`; None is its default limit.
    """
    limit = limit_bytes or DEFAULT_CACHE_BYTES
    most = max_sequences * max_context
    pages = _pages(groups, min(tokens, most), max_sequences, chunk)
    if page_bytes(groups, pages) <= limit:
        return pages
    return plan_pages(
        groups,
        max_context=max_context,
        max_sequences=max_sequences,
        chunk=chunk,
        tokens=None,
        limit_bytes=limit,
        option="draft_cache_bytes",
    )


def _pages(groups: Sequence[KvGroupInfo], tokens: int, max_sequences: int, chunk: int) -> list[int]:
    counts = []
    for group in groups:
        whole = -(-tokens // group.page_size)
        one = pages_to_hold(GroupSpec(group.window, group.page_size), tokens, chunk)
        counts.append(min(whole, one * max_sequences) if group.window else whole)
    return counts


def page_bytes(groups: Sequence[KvGroupInfo], pages: Sequence[int]) -> int:
    """Return the bytes of so many pages of each group."""
    return sum(count * group.page_bytes for group, count in zip(groups, pages, strict=True))


def cache_tokens(groups: Sequence[KvGroupInfo], pages: Sequence[int]) -> int:
    """Return the tokens that all sequences together can hold: those of the groups that keep every token."""
    slots = [(group.window, count * group.page_size) for group, count in zip(groups, pages, strict=True)]
    return min(
        (count for window, count in slots if not window), default=min((n for _, n in slots), default=0)
    )


def longest_sequence(
    groups: Sequence[KvGroupInfo], pages: Sequence[int], *, max_context: int, chunk: int
) -> int:
    """Return the tokens that one sequence alone can hold, at most `max_context`. `chunk` as for `plan_pages`."""
    longest = max_context
    for group, count in zip(groups, pages, strict=True):
        if pages_to_hold(GroupSpec(group.window, group.page_size), max_context, chunk) > count:
            longest = min(longest, count * group.page_size)
    return longest


def machine_memory() -> int | None:
    """Return the bytes of memory that this process may use: the machine's, or its container's; None where nobody says."""
    known = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            known.append(int(Path(file).read_text()))  # "max" where there is no limit
    return min((count for count in known if count > 0), default=None)
