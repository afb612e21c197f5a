"""The page pool: who holds which page of the key/value cache.

Layers that share a window form a KV group, and every group has its own pages and its own table a sequence. A page holds
`page_size` consecutive tokens of one sequence. Executors own the memory; this file only hands out numbers.

Rules, which `check_invariants` states as code:
1. a page is either free, once, with no reference, or referenced exactly as often as tables name it;
2. a sequence holds one unbroken range of pages a group: [first, past); every other entry of its row is -1;
3. a full-attention group keeps everything (first == 0); a group with a window has given back each page that the next
   token cannot read any more;
4. closed sequences hold nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["GroupSpec", "PagePool", "pages_to_hold"]

NO_PAGE = -1


@dataclass(frozen=True)
class GroupSpec:
    """One KV group: `window` in tokens (0 = all tokens are read), `page_size` in tokens."""

    window: int
    page_size: int


def pages_to_hold(group: GroupSpec, length: int, chunk: int) -> int:
    """Return the most pages that `length` tokens hold at once when they are computed `chunk` a step."""
    whole = -(-length // group.page_size)
    if not group.window:
        return whole
    span = group.window + chunk - 1  # tokens of the widest step, at any alignment to pages
    return min(whole, (span + group.page_size - 2) // group.page_size + 1)


class PagePool:
    """Free lists, reference counts and page tables of all KV groups.

    `tables` is int32 [groups, max_sequences, width]; a sequence's row is its `slot`.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pages_per_group: Sequence[int],
        max_sequences: int,
        max_context: int,
    ) -> None:
        if len(groups) != len(pages_per_group):
            raise ValueError(f"{len(groups)} KV groups, but page counts for {len(pages_per_group)}")
        self.groups = tuple(groups)
        self.capacity = tuple(pages_per_group)
        self.max_sequences = max_sequences
        width = max((-(-max_context // group.page_size) for group in groups), default=1)
        self.tables = np.full((len(groups), max_sequences, width), NO_PAGE, np.int32)
        self._free = [list(range(count - 1, -1, -1)) for count in pages_per_group]
        self._references = [[0] * count for count in pages_per_group]
        self._first = [[0] * max_sequences for _ in groups]
        self._past = [[0] * max_sequences for _ in groups]
        self._length = [0] * max_sequences  # tokens committed
        self._room = [0] * max_sequences  # tokens that the held pages can take, the least over groups
        self._slots = list(range(max_sequences - 1, -1, -1))
        self._open = [False] * max_sequences
        self._windowed = [g for g, group in enumerate(groups) if group.window]

    # ------------------------------------------------------------------------------------------- sequences

    def open(self) -> int:
        """Return a free slot for a new sequence."""
        slot = self._slots.pop()
        self._open[slot] = True
        return slot

    def close(self, slot: int) -> None:
        """Give back everything that the sequence holds, and its slot."""
        for g in range(len(self.groups)):
            self._give_back(g, slot, self._past[g][slot])
            self._first[g][slot] = self._past[g][slot] = 0
        self._length[slot] = self._room[slot] = 0
        self._open[slot] = False
        self._slots.append(slot)

    @property
    def free_slots(self) -> int:
        """How many more sequences can be opened."""
        return len(self._slots)

    # ----------------------------------------------------------------------------------------------- pages

    def fits(self, slot: int, count: int) -> int:
        """Return how many of the next `count` tokens can have pages now, held ones and free ones."""
        start = self._length[slot]
        if start + count <= self._room[slot]:
            return count
        for g, group in enumerate(self.groups):
            room = (self._past[g][slot] + len(self._free[g])) * group.page_size - start
            count = min(count, room)
        return max(count, 0)

    def reserve(self, slot: int, count: int) -> None:
        """Take the pages for the next `count` tokens; the caller has asked `fits`."""
        end = self._length[slot] + count
        if end <= self._room[slot]:
            return
        for g, group in enumerate(self.groups):
            past, needed = self._past[g][slot], -(-end // group.page_size)
            for page_index in range(past, needed):
                page = self._free[g].pop()
                self._references[g][page] = 1
                self.tables[g, slot, page_index] = page
            self._past[g][slot] = max(past, needed)
        self._room[slot] = min(self._past[g][slot] * group.page_size for g, group in enumerate(self.groups))

    def commit(self, slot: int, count: int) -> None:
        """`count` tokens were written: groups with a window give back what the next token cannot read."""
        length = self._length[slot] + count
        self._length[slot] = length
        for g in self._windowed:
            group = self.groups[g]
            past = (length - group.window + 1) // group.page_size  # first page that is still read
            if past > self._first[g][slot]:
                self._give_back(g, slot, past)

    def share(self, source: int, target: int, length: int) -> None:
        """Let the new sequence `target` start with the first `length` tokens of `source`, in the same pages.

        `length` must be whole pages of every group, and each group must still hold what the next token reads.
        """
        for g, group in enumerate(self.groups):
            first = max(0, length - group.window + 1) // group.page_size if group.window else 0
            past = length // group.page_size
            if length % group.page_size or first < self._first[g][source] or past > self._past[g][source]:
                raise ValueError(f"group {g} does not hold the first {length} tokens of sequence {source}")
            pages = self.tables[g, source, first:past]
            self.tables[g, target, first:past] = pages
            for page in pages.tolist():
                self._references[g][page] += 1
            self._first[g][target], self._past[g][target] = first, past
        self._length[target] = self._room[target] = length

    def _give_back(self, g: int, slot: int, past: int) -> None:
        """Drop the sequence's pages [first, past) of group `g`."""
        first = self._first[g][slot]
        past = min(past, self._past[g][slot])
        if past <= first:
            return
        row = self.tables[g, slot]
        references, free = self._references[g], self._free[g]
        for page in row[first:past].tolist():
            references[page] -= 1
            if not references[page]:
                free.append(page)
        row[first:past] = NO_PAGE
        self._first[g][slot] = past

    # -------------------------------------------------------------------------------------------- accounts

    def held(self, g: int, slot: int) -> int:
        """Return how many pages of group `g` the sequence holds."""
        return self._past[g][slot] - self._first[g][slot]

    def free(self, g: int) -> int:
        """Return how many pages of group `g` nobody holds."""
        return len(self._free[g])

    @property
    def idle(self) -> bool:
        """Whether every page is free and no sequence is open."""
        return all(
            len(free) == count for free, count in zip(self._free, self.capacity, strict=True)
        ) and not any(self._open)

    def rows(self, slots: Sequence[int]) -> np.ndarray:
        """Return the page tables of `slots`: int32 [groups, len(slots), longest], -1 = no page."""
        width = max((max(past[slot] for slot in slots) for past in self._past), default=1)
        if len(slots) == 1:
            return np.ascontiguousarray(self.tables[:, slots[0] : slots[0] + 1, :width])
        return np.take(self.tables[:, :, :width], slots, axis=1)

    def check_invariants(self) -> None:
        """Raise AssertionError when a rule of the file's docstring is broken (slow: for tests)."""
        for g, group in enumerate(self.groups):
            named = [0] * self.capacity[g]
            for slot in range(self.max_sequences):
                first, past = self._first[g][slot], self._past[g][slot]
                row = self.tables[g, slot].tolist()
                assert 0 <= first <= past <= len(row), (g, slot, first, past)
                assert all(page != NO_PAGE for page in row[first:past]), ("a hole in the range", g, slot, row)
                assert all(page == NO_PAGE for page in row[:first] + row[past:]), (
                    "a page outside",
                    g,
                    slot,
                    row,
                )
                for page in row[first:past]:
                    named[page] += 1
                length = self._length[slot]
                still_read = max(0, length - group.window + 1) // group.page_size if group.window else 0
                if self._open[slot]:
                    assert first == min(still_read, past), ("kept or lost too much", g, slot, length, first)
                    assert past * group.page_size >= length, ("tokens without a page", g, slot, length, past)
                    assert self._room[slot] <= past * group.page_size, ("room without pages", g, slot)
                else:
                    assert past == 0 and length == 0, ("a closed sequence holds pages", g, slot)
            free = self._free[g]
            assert len(set(free)) == len(free), ("a page is free twice", g)
            assert named == self._references[g], ("references differ from tables", g)
            assert sorted(free) == [page for page, count in enumerate(named) if not count], ("free list", g)
        open_slots = [slot for slot in range(self.max_sequences) if self._open[slot]]
        assert sorted(self._slots + open_slots) == list(range(self.max_sequences)), "slots"
