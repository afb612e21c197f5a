"""Where each intermediate value lies: buffers reused as soon as what they held is dead.

Sizes and offsets are bytes a row, since every value of an arena has the step's rows. Two rules decide:

1. Sharing. An output that may be computed in place takes over the buffer of an input that dies in the same instruction.
2. Placement, largest first: a buffer goes to the lowest offset where it meets no placed buffer that lives at the same
   time (Pisarchyk & Lee 2020, "Efficient Memory Management for Deep Neural Net Inference", greedy by size).

Instructions of one phase can run without a barrier between them, each thread on its own rows, if no memory is touched
in two ways: buffers of different row sizes overlap across rows. So whatever is touched within a phase counts as alive
throughout it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["ALIGNMENT", "Access", "Buffer", "Plan", "plan"]

ALIGNMENT = 64


@dataclass(frozen=True)
class Buffer:
    """One value: bytes a row, and the arena whose rows it has (`tokens` or `logits`)."""

    bytes: int
    arena: str


@dataclass(frozen=True)
class Access:
    """What one instruction touches, by index of the value.

    `in_place` lists (written, read) pairs that may be one buffer. `phase` never falls from one instruction to the next.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    phase: int
    in_place: tuple[tuple[int, int], ...] = ()


@dataclass
class Plan:
    """Bytes a row: `offsets`, one a value (0 for a value nothing touches), and `totals`, one an arena."""

    offsets: list[int]
    totals: dict[str, int] = field(default_factory=dict)


@dataclass
class _Block:
    """Values that share one buffer, one after the other."""

    values: list[int]
    bytes: int
    first: int
    last: int
    offset: int = 0


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _share(buffers: Sequence[Buffer], accesses: Sequence[Access], keep: Collection[int]) -> list[_Block]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, access in enumerate(accesses):
        for value in (*access.reads, *access.writes):
            first.setdefault(value, at)
            last[value] = at
    for value in keep:
        first.setdefault(value, len(accesses) - 1)
        last[value] = len(accesses)
    block_of: dict[int, _Block] = {}
    blocks: list[_Block] = []
    for at, access in enumerate(accesses):
        taken: set[int] = set()
        for written, read in access.in_place:
            fits = (
                first[written] == last[read] == at
                and buffers[written] == buffers[read]
                and written not in block_of
                and read in block_of
                and read not in taken
                and read not in access.writes
            )
            if fits:
                taken.add(read)
                block_of[written] = block_of[read]
                block_of[read].values.append(written)
        for value in (*access.reads, *access.writes):
            if value not in block_of:
                block_of[value] = _Block([value], _align(buffers[value].bytes), 0, 0)
                blocks.append(block_of[value])
    for value in keep:
        if value not in block_of:
            blocks.append(_Block([value], _align(buffers[value].bytes), 0, 0))
    phases = [access.phase for access in accesses] or [0]
    phases.append(phases[-1] + 1)
    for block in blocks:
        block.first = min(phases[first[value]] for value in block.values)
        block.last = max(phases[last[value]] for value in block.values)
    return blocks


def _place(blocks: list[_Block]) -> int:
    """Set each block's offset; returns the arena's size. The order is fixed by size, then by first value."""
    placed: list[_Block] = []
    for block in sorted(blocks, key=lambda b: (-b.bytes, b.values[0])):
        offset = 0
        for other in placed:  # kept sorted by offset
            if other.first > block.last or block.first > other.last:
                continue
            if other.offset >= offset + block.bytes:
                break
            offset = max(offset, other.offset + other.bytes)
        block.offset = offset
        placed.append(block)
        placed.sort(key=lambda b: b.offset)
    return max((block.offset + block.bytes for block in blocks), default=0)


def plan(buffers: Sequence[Buffer], accesses: Sequence[Access], keep: Collection[int] = ()) -> Plan:
    """Give every value an offset such that no two values overlap while both are needed.

    A value lives from the first instruction that touches it to the last; those of `keep` to the end of the step.
    """
    blocks = _share(buffers, accesses, keep)
    result = Plan([0] * len(buffers))
    for arena in sorted({buffer.arena for buffer in buffers}):
        mine = [block for block in blocks if buffers[block.values[0]].arena == arena]
        result.totals[arena] = _place(mine)
        for block in mine:
            for value in block.values:
                result.offsets[value] = block.offset
    return result
