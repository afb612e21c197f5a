"""The prefix cache's index: which page holds which tokens after which others.

A *block* is one page's worth of tokens. Written blocks form a tree of nodes: a node is a block after the blocks of its
parents, and names the page of each KV group that holds its keys and values. Nodes are found by a digest, BLAKE2b of
the parent's digest and the block's token ids; the root's digest stands for the model and the format of its cache.

A digest finds a node and proves nothing. What is found counts only when it holds the very tokens that are looked for
and its parent is the node that was accepted before it, so that by induction the whole prefix is compared. Were all
digests equal, hits would be missed and none would be wrong.

Pages belong to `pages.py`; this file only remembers what stands in them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import islice

__all__ = ["NO_PAGE", "Block", "Node", "PrefixCache", "as_content", "block_digest", "common_tokens"]

Block = tuple[bytes, bytes]
"""(digest, content): 32 bytes, and the block's token ids as int32."""

NO_PAGE = -1
_TOKEN = array("i").itemsize
_LOOK_AT = (
    8  # children and sequences that are compared for a part of a block; more would cost more than they save
)


def block_digest(parent: bytes, content: bytes) -> bytes:
    """Return the 32 bytes that name a block after its parents."""
    return hashlib.blake2b(parent + content, digest_size=32).digest()


class Node:
    """A block in its place: `pages[g]` holds it in KV group g (-1: no page does), `live` are the slots that stand here."""

    __slots__ = ("children", "content", "digest", "live", "pages", "parent")

    def __init__(self, parent: Node | None, digest: bytes, content: bytes, groups: int) -> None:
        self.parent = parent
        self.digest = digest
        self.content = content
        self.pages = [NO_PAGE] * groups
        self.children: dict[bytes, Node] = {}
        self.live: dict[int, None] = {}

    @property
    def unused(self) -> bool:
        """Whether nothing is known by this node."""
        return not self.children and not self.live and all(page == NO_PAGE for page in self.pages)


class PrefixCache:
    """The tree of blocks, and which page of each group stands for which node.

    `page_size` in tokens, `pages_per_group` as in the pool. `identity`: what, beside tokens, decides keys and values.
    """

    def __init__(self, page_size: int, pages_per_group: Sequence[int], identity: bytes = b"") -> None:
        self.page_size = page_size
        self.root = Node(None, block_digest(b"", identity), b"", len(pages_per_group))
        self.nodes: dict[bytes, Node] = {}
        self.owner: list[list[Node | None]] = [[None] * count for count in pages_per_group]

    def extend(self, blocks: list[Block], tokens: Sequence[int]) -> None:
        """Make `blocks` name every whole block of `tokens`; those that it names already are not looked at again."""
        size = self.page_size
        digest = blocks[-1][0] if blocks else self.root.digest
        for start in range(len(blocks) * size, len(tokens) // size * size, size):
            content = as_content(tokens[start : start + size])
            digest = block_digest(digest, content)
            blocks.append((digest, content))

    def match(self, blocks: Sequence[Block], most: int) -> list[Node]:
        """Return the nodes of the first blocks, as far as they are known, at most `most`."""
        found: list[Node] = []
        node = self.root
        for digest, content in islice(blocks, most):
            child = self.nodes.get(digest)
            if child is None or child.parent is not node or child.content != content:
                break
            found.append(child)
            node = child
        return found

    def enter(self, parent: Node, block: Block) -> Node | None:
        """Return the node of a block that was written after `parent`; None where other content has its digest."""
        digest, content = block
        node = self.nodes.get(digest)
        if node is None:
            node = Node(parent, digest, content, len(self.owner))
            self.nodes[digest] = parent.children[digest] = node
        elif node.parent is not parent or node.content != content:
            return None
        return node

    def bind(self, node: Node, g: int, page: int) -> None:
        """Let `page` stand for `node` in group g, unless another page does."""
        if node.pages[g] == NO_PAGE:
            node.pages[g] = page
            self.owner[g][page] = node

    def forget(self, g: int, page: int) -> None:
        """`page` is about to hold something else."""
        node = self.owner[g][page]
        if node is not None:
            self.owner[g][page] = None
            node.pages[g] = NO_PAGE
            self.prune(node)

    def prune(self, node: Node) -> None:
        """Drop `node` and those above it that nothing is known by any more."""
        while node.parent is not None and node.unused:
            del self.nodes[node.digest], node.parent.children[node.digest]
            node = node.parent

    def longest_part(self, node: Node, wanted: bytes) -> tuple[int, Node | None]:
        """Return how many tokens the best child of `node` begins with `wanted`, and that child."""
        best, found = 0, None
        for child in islice(reversed(node.children.values()), _LOOK_AT):
            if NO_PAGE not in child.pages:
                common = common_tokens(child.content, wanted)
                if common > best:
                    best, found = common, child
        return best, found

    def neighbours(self, node: Node) -> list[int]:
        """Return a few slots of sequences whose last whole block is `node`."""
        return list(islice(reversed(node.live), _LOOK_AT))

    def check_invariants(self) -> None:
        """Raise AssertionError when the tree contradicts itself (slow: for tests)."""
        seen, rest = 0, [self.root]
        while rest:
            node = rest.pop()
            for digest, child in node.children.items():
                assert child.parent is node and child.digest == digest, "a child of somebody else"
                assert self.nodes.get(digest) is child, "a child that is not found by its digest"
                assert digest == block_digest(node.digest, child.content), "a digest of other content"
                assert len(child.content) == self.page_size * _TOKEN, "a block that is not whole"
                assert not child.unused, "a node that nothing is known by"
                rest.append(child)
                seen += 1
            for g, page in enumerate(node.pages):
                assert page == NO_PAGE or self.owner[g][page] is node, ("a page of somebody else", g, page)
        assert seen == len(self.nodes), "nodes out of reach"
        for g, owners in enumerate(self.owner):
            for page, owner in enumerate(owners):
                assert owner is None or owner.pages[g] == page, (
                    "a page that its node does not name",
                    g,
                    page,
                )


def as_content(tokens: Sequence[int]) -> bytes:
    """Return token ids as blocks hold them."""
    return array("i", tokens).tobytes()


def common_tokens(first: bytes, second: bytes) -> int:
    """Return how many token ids two contents have in common at their beginning."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most // _TOKEN
    return next(at for at in range(most) if first[at] != second[at]) // _TOKEN
