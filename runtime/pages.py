"""The page pool: who holds which page of the key/value cache.

Layers that share a window form a KV group, and every group has its own pages and its own table a sequence. A page holds
`page_size` consecutive tokens of one sequence. Executors own the memory; this file only hands out numbers.

With a prefix cache, whole pages that a committed step has written are registered in its tree, and a new sequence starts
with those that hold its first tokens. Nobody writes such a page again. Where a sequence shares but a part of a page,
it gets a copy of its own (copy on write), which the caller makes before the step runs.

Rules, which `check_invariants` states as code:
1. a page is in one of three states: free (once in the free list, not registered), cached (registered, held by nobody, once
   in the order of eviction) or used (referenced exactly as often as tables name it);
2. a sequence holds one unbroken range of pages a group: [first, past); every other entry of its row is -1;
3. a full-attention group keeps everything (first == 0); a group with a window has given back each page that the next
   token cannot read any more;
4. closed sequences hold nothing;
5. a registered page is whole: in every table that names it, it lies before the sequence's committed length, at its block's
   place, and holds that sequence's tokens;
6. the page that the next token is written to, and those after it, belong to one sequence and are not registered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .invariants import check_pool
from .prefix_cache import NO_PAGE, Block, Node, PrefixCache, as_content, common_tokens

__all__ = ["Copy", "GroupSpec", "Hit", "PagePool", "pages_to_hold"]

Copy = tuple[int, int, int]
"""(group, source, destination): a page to copy before the next step, in order."""


@dataclass(frozen=True)
class GroupSpec:
    """One KV group: `window` in tokens (0 = all tokens are read), `page_size` in tokens."""

    window: int
    page_size: int

    def first_read(self, length: int) -> int:
        """Return the first page that the token at position `length` reads."""
        return max(0, length - self.window + 1) // self.page_size if self.window else 0


@dataclass(frozen=True)
class Hit:
    """What a new sequence can start with: `length` tokens, those of `nodes` in their pages, the rest in a copy of `part`."""

    length: int = 0
    nodes: list[Node] = field(default_factory=list)
    part: list[int] | None = None  # the page of each group


def pages_to_hold(group: GroupSpec, length: int, chunk: int) -> int:
    """Return the most pages that `length` tokens hold at once when they are computed `chunk` a step."""
    whole = -(-length // group.page_size)
    if not group.window:
        return whole
    span = group.window + chunk - 1  # tokens of the widest step, at any alignment to pages
    return min(whole, (span + group.page_size - 2) // group.page_size + 1)


class PagePool:
    """Free lists, reference counts, page tables and the order of eviction of all KV groups.

    `tables` is int32 [groups, max_sequences, width]; a sequence's row is its `slot`. With `prefix_cache`, pages are
    kept for later sequences; `identity` names the model and its cache's format in their digests.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pages_per_group: Sequence[int],
        max_sequences: int,
        max_context: int,
        *,
        prefix_cache: bool = False,
        identity: bytes = b"",
    ) -> None:
        if len(groups) != len(pages_per_group):
            raise ValueError(f"{len(groups)} KV groups, but page counts for {len(pages_per_group)}")
        if prefix_cache and len({group.page_size for group in groups}) != 1:
            raise ValueError("a prefix cache needs one page size in all KV groups")
        self.groups = tuple(groups)
        self.capacity = tuple(pages_per_group)
        self.max_sequences = max_sequences
        width = max((-(-max_context // group.page_size) for group in groups), default=1)
        self.tables = np.full((len(groups), max_sequences, width), NO_PAGE, np.int32)
        self.cache = PrefixCache(groups[0].page_size, pages_per_group, identity) if prefix_cache else None
        self._free = [list(range(count - 1, -1, -1)) for count in pages_per_group]
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in groups]  # the next to go first
        self._references = [[0] * count for count in pages_per_group]
        self._first = [[0] * max_sequences for _ in groups]
        self._past = [[0] * max_sequences for _ in groups]
        self._length = [0] * max_sequences  # tokens committed
        self._room = [0] * max_sequences  # tokens that the held pages can take, the least over groups
        self._slots = list(range(max_sequences - 1, -1, -1))
        self._open = [False] * max_sequences
        self._windowed = [g for g, group in enumerate(groups) if group.window]
        self._tokens: list[Sequence[int]] = [()] * max_sequences  # the sequence's own list, which grows
        self._blocks: list[list[Block]] = [[] for _ in range(max_sequences)]
        self._node: list[Node | None] = [
            None
        ] * max_sequences  # of the last whole block; None: nothing is registered
        self._known = [0] * max_sequences  # whole blocks down to that node

    # ------------------------------------------------------------------------------------------- sequences

    def open(self, tokens: Sequence[int] = (), blocks: list[Block] | None = None) -> int:
        """Return a free slot for a new sequence.

        Its pages are registered if it names its `tokens`: all known ones, in a list that grows before `commit` reaches
        its end. `blocks` are theirs, as far as they have been made; the pool adds to them.
        """
        slot = self._slots.pop()
        self._open[slot] = True
        if self.cache is not None and tokens:
            self._tokens[slot] = tokens
            self._blocks[slot] = blocks if blocks is not None else []
            self._stand(slot, self.cache.root)
        return slot

    def close(self, slot: int) -> None:
        """Give back everything that the sequence holds, and its slot."""
        for g in range(len(self.groups)):
            self._give_back(g, slot, self._past[g][slot])
            self._first[g][slot] = self._past[g][slot] = 0
        self._length[slot] = self._room[slot] = self._known[slot] = 0
        self._stand(slot, None)
        self._tokens[slot], self._blocks[slot] = (), []
        self._open[slot] = False
        self._slots.append(slot)

    @property
    def free_slots(self) -> int:
        """How many more sequences can be opened."""
        return len(self._slots)

    def _stand(self, slot: int, node: Node | None) -> None:
        """Move the sequence to `node` of the tree."""
        before = self._node[slot]
        if node is not None:
            node.live[slot] = None
        self._node[slot] = node
        if before is not None and before is not node and self.cache is not None:
            del before.live[slot]
            self.cache.prune(before)

    # ----------------------------------------------------------------------------------------------- pages

    def available(self, g: int) -> int:
        """Return how many pages of group `g` can be taken: free ones, and cached ones that would be forgotten."""
        return len(self._free[g]) + len(self._cached[g])

    def fits(self, slot: int, count: int) -> int:
        """Return how many of the next `count` tokens can have pages now, held ones and available ones."""
        start = self._length[slot]
        if start + count <= self._room[slot]:
            return count
        for g, group in enumerate(self.groups):
            room = (self._past[g][slot] + self.available(g)) * group.page_size - start
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
                self.tables[g, slot, page_index] = self._take(g)
                self._past[g][slot] = page_index + 1  # at once, so that nothing is lost should `_take` raise
        self._room[slot] = min(self._past[g][slot] * group.page_size for g, group in enumerate(self.groups))

    def commit(self, slot: int, count: int) -> None:
        """`count` tokens were written: whole pages are registered, and windows give back what is not read any more."""
        length = self._length[slot] + count
        self._length[slot] = length
        if self._node[slot] is not None:
            self._register(slot, length)
        for g in self._windowed:
            first = self.groups[g].first_read(length)
            if first > self._first[g][slot]:
                self._give_back(g, slot, first)

    def trim(self, slot: int, count: int = 0) -> None:
        """Give back the pages that the next `count` tokens do not need: what was reserved beyond them was not committed."""
        end = self._length[slot] + count
        for g, group in enumerate(self.groups):
            past, needed = self._past[g][slot], -(-end // group.page_size)
            row = self.tables[g, slot]
            for place in range(past - 1, needed - 1, -1):
                page = int(row[place])
                row[place] = NO_PAGE
                self._references[g][page] = 0
                self._free[g].append(page)
                self._past[g][slot] = place
        self._room[slot] = min(self._past[g][slot] * group.page_size for g, group in enumerate(self.groups))

    def _take(self, g: int) -> int:
        """Return a page for one holder: a free one, or the cached one that was used least recently."""
        if self._free[g]:
            page = self._free[g].pop()
        else:
            page, _ = self._cached[g].popitem(last=False)
            assert self.cache is not None
            self.cache.forget(g, page)
        self._references[g][page] = 1
        return page

    def _give_back(self, g: int, slot: int, past: int) -> None:
        """Drop the sequence's pages [first, past) of group `g`, the last first: its beginning is kept the longest."""
        first = self._first[g][slot]
        past = min(past, self._past[g][slot])
        if past <= first:
            return
        row = self.tables[g, slot]
        references, free = self._references[g], self._free[g]
        owners = self.cache.owner[g] if self.cache is not None else None
        for page in reversed(row[first:past].tolist()):
            references[page] -= 1
            if references[page]:
                continue
            if owners is not None and owners[page] is not None:
                self._cached[g][page] = None
            else:
                free.append(page)
        row[first:past] = NO_PAGE
        self._first[g][slot] = past

    # -------------------------------------------------------------------------------------------- prefixes

    def find(self, tokens: Sequence[int], blocks: list[Block], most: int) -> Hit:
        """Return how much of `tokens`, at most `most`, a new sequence could start with; nothing changes.

        `blocks` are made for `tokens` where they are missing. A prefix counts only where every group still holds all that
        the token after it reads.
        """
        cache = self.cache
        if cache is None or most < 1:
            return Hit()
        cache.extend(blocks, tokens)
        nodes = cache.match(blocks, most // cache.page_size)
        del nodes[self._usable(nodes) :]
        whole = len(nodes) * cache.page_size
        node = nodes[-1] if nodes else cache.root
        shared, part = self._part(
            node, len(nodes), as_content(tokens[whole : min(most, whole + cache.page_size)])
        )
        return Hit(whole + shared, nodes, part)

    def _usable(self, nodes: list[Node]) -> int:
        """Return the longest prefix of `nodes`, in blocks, whose pages the next token could read in every group."""
        unbroken = [0] * len(self.groups)  # blocks up to here whose pages are all there
        best = 0
        for count, node in enumerate(nodes, start=1):
            usable = True
            for g, page in enumerate(node.pages):
                unbroken[g] = unbroken[g] + 1 if page != NO_PAGE else 0
                group = self.groups[g]
                usable &= unbroken[g] >= count - group.first_read(count * group.page_size)
            best = count if usable else best
        return best

    def _part(self, node: Node, place: int, wanted: bytes) -> tuple[int, list[int] | None]:
        """Return how many of the `wanted` tokens some page after `node` begins with, and that page of each group."""
        assert self.cache is not None
        best, child = self.cache.longest_part(node, wanted)
        pages = list(child.pages) if child is not None else None
        for slot in self.cache.neighbours(node):
            table = self.tables[:, slot, place].tolist() if place < self.tables.shape[2] else [NO_PAGE]
            written = self._tokens[slot][place * self.cache.page_size : self._length[slot]]
            common = common_tokens(as_content(written), wanted)
            if common > best and NO_PAGE not in table:
                best, pages = common, table
        return best, pages

    def spared(self, g: int, hit: Hit) -> int:
        """Return how many pages of group `g` a new sequence need not take: somebody holds them anyway."""
        first = self.groups[g].first_read(hit.length)
        references = self._references[g]
        return sum(references[node.pages[g]] > 0 for node in hit.nodes[first:])

    def adopt(self, slot: int, hit: Hit) -> tuple[int, list[Copy]]:
        """Let the new sequence start with what `find` has just found; return its length and the copies to be made."""
        if self.cache is None or not hit.length:
            return 0, []
        whole = len(hit.nodes)
        length = whole * self.cache.page_size
        self._known[slot] = whole
        if hit.nodes:
            self._stand(slot, hit.nodes[-1])  # before a page is taken, so that the node stays
        for g, group in enumerate(self.groups):
            first = group.first_read(length)
            pages = [node.pages[g] for node in hit.nodes[first:]]
            for page in pages:
                if not self._references[g][page]:
                    del self._cached[g][page]
                self._references[g][page] += 1
            self.tables[g, slot, first:whole] = pages
            self._first[g][slot], self._past[g][slot] = first, whole
        copies: list[Copy] = []
        if hit.part is not None and all(self.available(g) for g in range(len(self.groups))):
            length = hit.length
            for g, source in enumerate(hit.part):
                if source in self._cached[g]:
                    self._cached[g].move_to_end(source)  # it has been of use
                page = self._take(g)
                self.tables[g, slot, whole] = page
                self._past[g][slot] = whole + 1
                self._give_back(g, slot, self.groups[g].first_read(length))
                copies.append((g, source, page))
        self._length[slot] = length
        self._room[slot] = min(self._past[g][slot] * group.page_size for g, group in enumerate(self.groups))
        return length, copies

    def _register(self, slot: int, length: int) -> None:
        """Enter the sequence's blocks that have become whole; they have been written and committed."""
        cache, node = self.cache, self._node[slot]
        assert cache is not None and node is not None
        known, whole = self._known[slot], length // cache.page_size
        if whole == known:
            return
        blocks = self._blocks[slot]
        cache.extend(blocks, self._tokens[slot])
        for place in range(known, whole):
            child = cache.enter(node, blocks[place])
            if child is None:  # two contents, one digest: this one stays unknown
                self._stand(slot, None)
                return
            for g in range(len(self.groups)):
                cache.bind(child, g, int(self.tables[g, slot, place]))
            node = child
        self._known[slot] = whole
        self._stand(slot, node)

    # -------------------------------------------------------------------------------------------- accounts

    def held(self, g: int, slot: int) -> int:
        """Return how many pages of group `g` the sequence holds."""
        return self._past[g][slot] - self._first[g][slot]

    def free(self, g: int) -> int:
        """Return how many pages of group `g` hold nothing that is known."""
        return len(self._free[g])

    def slots_of(self, g: int) -> tuple[int, int]:
        """Return the token slots of group `g` that sequences have reserved, and those that a next token reads.

        What sequences share counts once for each. The difference is waste.
        """
        group = self.groups[g]
        reserved = used = 0
        for slot, is_open in enumerate(self._open):
            if is_open:
                reserved += self.held(g, slot) * group.page_size
                length = self._length[slot]
                used += min(length, group.window - 1) if group.window else length
        return reserved, used

    def page_map(self, g: int) -> bytes:
        """Return one byte a page of group `g`: 0 free, 1 cached, 2 used, 3 used by several."""
        references = np.array(self._references[g], np.int32)
        states = np.minimum(references + (references > 0), 3).astype(np.uint8)
        states[list(self._cached[g])] = 1
        return states.tobytes()

    @property
    def idle(self) -> bool:
        """Whether nobody holds a page and no sequence is open."""
        return not any(self._open) and all(
            self.available(g) == count for g, count in enumerate(self.capacity)
        )

    def rows(self, slots: Sequence[int]) -> np.ndarray:
        """Return the page tables of `slots`: int32 [groups, len(slots), longest], -1 = no page."""
        width = max((max(past[slot] for slot in slots) for past in self._past), default=1)
        if len(slots) == 1:
            return np.ascontiguousarray(self.tables[:, slots[0] : slots[0] + 1, :width])
        return np.take(self.tables[:, :, :width], slots, axis=1)

    def check_invariants(self) -> None:
        """Raise AssertionError when a rule of the file's docstring is broken (slow: for tests)."""
        check_pool(self)
